"""Starts a DataLoader's iterator. Its workers end without delay when the loader is released, and by themselves if the
main process is killed; one that dies is found, and a sample that raises is named. Nobody saves the random numbers of
workers: `trainer/data/sample_rng.py` seeds each sample instead.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import get_worker_info
from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails  # type: ignore[attr-defined]
from torch.utils.data.dataloader import _BaseDataLoaderIter

from leyden.strategies.errors import LeydenError
from leyden.strategies.launch.environment import is_running
from leyden.trainer.data.samples import Samples, named, names_samples

THEIRS = {"SIGTERM", "SIGINT", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"}
"""Signals by which multiprocessing and torch end a worker or learn of its end."""
CUT_OFF = (ConnectionError, EOFError, FileNotFoundError)
"""What is raised where a worker ended before the tensors of its batch were received, besides torch's RuntimeError."""
REAPED = 1.0
"""Seconds within which a worker that is ending has ended."""
PAUSE = 1.0
"""Seconds between two looks of a worker at whether the main process is still there."""
ATTEMPTS = 8
"""More than loaders whose workers fail at once; each raises once."""

# A Trainer and its module refer to each other, so their loaders end by garbage collection. It closes the queues to the
# workers before the iterator uses them to stop the workers, and the iterator then waits for each worker (torch 2.13,
# Python 3.11, tried). The queues of an iterator are kept alive from here, so they outlive it.
_queues: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def iterator_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Returns the loader's iterator; its workers end when this process does.

    Example:
        >>> list(iterator_of([1, 2]))
        [1, 2]
    """
    if not names_samples(loader):
        return _started(loader)
    with replaced(loader, "dataset", named(loader)):  # type: ignore[arg-type]
        return _started(loader)


def _started(loader: Iterable[Any]) -> Iterator[Any]:
    # One that has a property of that name is left alone.
    if getattr(loader, "num_workers", 0) == 0 or "worker_init_fn" not in getattr(loader, "__dict__", {}):
        return iter(loader)
    # torch's loader passes it to each worker that it starts here.
    own = loader.worker_init_fn  # type: ignore[attr-defined]
    with replaced(loader, "worker_init_fn", EndsWithParent(own, survives=_answered_here())):
        iterator = iter(loader)
    if _has_workers(iterator):
        _queues[iterator] = iterator._index_queues, iterator._worker_result_queue  # type: ignore[attr-defined]
    return iterator


def _has_workers(item: object) -> bool:
    """True for an iterator of torch's DataLoader, or of a subclass of it, that has worker processes."""
    # By its type: to ask an object that somebody else made for its attributes could run anything.
    return issubclass(type(item), _BaseDataLoaderIter) and {"_workers", "_index_queues"} <= vars(item).keys()


@contextmanager
def replaced(loader: Any, name: str, value: Any) -> Iterator[None]:
    """The loader has another attribute while its iterator is made; it refuses plain assignment."""
    own = vars(loader)[name]
    vars(loader)[name] = value
    try:
        yield
    finally:
        vars(loader)[name] = own


class WorkerDied(LeydenError):
    """A worker process of a loader ended without an error of its own."""


def died(error: BaseException) -> WorkerDied | None:
    """Explains an error that a dead worker has caused: torch's own, or one in a batch that it did not finish.

    None for any other error. Afterwards SIGCHLD, which arrives a little later, raises no second one.
    """
    for _ in range(ATTEMPTS):
        try:
            return _died(error)
        except RuntimeError as late:
            # From torch's handler of SIGCHLD. Its traceback, which ends here, would keep this frame in a cycle, and
            # the iterators with it.
            error = late.with_traceback(None)
    return None


def _died(error: BaseException) -> WorkerDied | None:
    text = str(error)
    found = re.match(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", text)
    if found is not None:
        pids = [int(pid) for pid in found[1].split(",")]
        # Torch raises it anywhere, and a loader of the user's own may read others. Frozen ones the collector has not.
        iterators = [item for item in (*_queues, *gc.get_objects()) if _has_workers(item)]
        ended = [(iterator, *entry) for iterator in iterators for entry in _numbered(iterator) if entry[1].pid in pids]
    elif (isinstance(error, CUT_OFF) or "ancdata" in text) and "in DataLoader worker process" not in text:
        workers = [
            (iterator, *entry) for iterator in _iterators_in(error.__traceback__) for entry in _numbered(iterator)
        ]
        # Its socket is closed before it has ended.
        ending = wait([process.sentinel for _, _, process in workers], REAPED)
        ended = [(iterator, *entry) for iterator, *entry in workers if entry[1].sentinel in ending]
    else:
        return None
    for iterator, number, process in ended:
        process.join(REAPED)
        _error_if_any_worker_fails()
        return _explained(number, len(iterator._workers), process.pid, process.exitcode)
    return None


def _numbered(iterator: Any) -> list[tuple[int, Any]]:
    return list(enumerate(iterator._workers))


def _iterators_in(trace: TracebackType | None) -> list[Any]:
    """The iterators with workers in which an error was raised."""
    found: dict[int, Any] = {}
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if _has_workers(owner):
            found[id(owner)] = owner
        trace = trace.tb_next
    return list(found.values())


def _explained(number: int, count: int, pid: int, code: int | None) -> WorkerDied:
    how, cause, fix = f"ended with exit code {code}", "something in it called os._exit or sys.exit", ""
    if code is not None and code < 0:
        how = f"was killed by {_signal_name(-code)}"
        cause, fix = _CAUSES.get(_signal_name(-code), ("another process sent it that signal", ""))
    elif code is None:
        how, cause = "ended", "its exit code is not known"
    return WorkerDied(
        f"worker {number} of {count} of a DataLoader (pid {pid}) {how}: {cause}{_shared_memory()}. "
        f"{fix or 'num_workers=0 loads in this process, where the error can be seen.'} What was trained is lost from "
        "the last checkpoint on: Trainer(resume='auto') continues there, and leyden launch --max_restarts does so by "
        "itself."
    )


_FEWER = "Use fewer workers, a smaller prefetch_factor, or a data set that loads its samples when they are asked for."
_CAUSES = {
    "SIGKILL": ("mostly the system's answer to memory that runs out (dmesg says so)", _FEWER),
    "SIGBUS": (
        "mostly shared memory that is full",
        "Give the container more (docker run --shm-size=8g), or call "
        "torch.multiprocessing.set_sharing_strategy('file_system').",
    ),
    "SIGSEGV": (
        "a library crashed in it",
        "num_workers=0 shows where, under python -X faulthandler; one that does not survive a fork needs "
        "DataLoader(multiprocessing_context='spawn').",
    ),
}
"""What a signal mostly means, and the fix."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _shared_memory() -> str:
    """How much there is, in words, where workers pass their batches by it."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return ""
    return f"; /dev/shm has {usage.free / 2**20:,.0f} of {usage.total / 2**20:,.0f} MiB free now"


def _answered_here() -> list[int]:
    """The signals to which this process has an answer of its own."""
    return [int(kind) for kind in signal.Signals if kind.name not in THEIRS and callable(signal.getsignal(kind))]


def _survive(number: int, frame: FrameType | None) -> None:
    """Handles a signal that the main process answers. A function, since programs that a worker starts would inherit
    SIG_IGN.
    """


class EndsWithParent:
    """A `worker_init_fn` that ends a worker within a second or two after the main process was killed.

    torch's worker checks for its main process only while it waits for work. It then waits until the pipe has taken what
    it loaded, which nobody reads any more, so a worker that loads more than a pipe holds would stay alive.

    Args:
        then: the user's own `worker_init_fn`.
        survives: signals that the main process answers, perhaps by ending in order. A scheduler may send them to all
            processes of a job, and the main process still needs its batches.
    """

    def __init__(self, then: Callable[[int], None] | None, survives: Iterable[int]) -> None:
        self._then = then
        self._survives = tuple(survives)
        self._parent = os.getpid()

    def __call__(self, worker_id: int) -> None:
        for number in self._survives:
            signal.signal(number, _survive)
        # On Windows the parent never changes, and a pipe without a reader is an error.
        if sys.platform != "win32":
            threading.Thread(target=self._watch, name="leyden-parent", daemon=True).start()
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Samples):
            # A user's `worker_init_fn` sets attributes of its own data set. torch's class refuses plain assignment.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._then is not None:
            self._then(worker_id)

    def _watch(self) -> None:
        # This is the main process or multiprocessing's fork server, which ends with it; another process if it has
        # ended.
        above, pause = os.getppid(), threading.Event()
        while os.getppid() == above and (above == self._parent or is_running(self._parent)):
            pause.wait(PAUSE)
        os._exit(1)
