"""Starts a DataLoader's iterator with well-behaved workers.

Workers end immediately when the loader is released, and on their own if the main process is killed. A worker that dies
is identified, and so is a sample that raises. The random state of workers is not saved: `leyden/data/sample_rng.py`
seeds each sample instead.
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

from leyden.core.environment import is_running
from leyden.core.errors import LeydenError
from leyden.data.samples import Samples, named, names_samples
from leyden.launch.heartbeat import answer_like
from leyden.launch.stacks import StackFile

THEIRS = {"SIGTERM", "SIGINT", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"}
"""Signals that multiprocessing and torch use to end a worker or to detect its end."""
CUT_OFF = (ConnectionError, EOFError, FileNotFoundError)
"""Errors, besides torch's RuntimeError, that are raised if a worker ends before its batch has been received."""
REAPED = 1.0
"""Seconds to wait for a worker that is exiting."""
PAUSE = 1.0
"""Seconds between a worker's checks that the main process is alive."""
ATTEMPTS = 8
"""Maximum number of errors to handle. Every loader whose workers fail raises once, and few fail together."""

# A Trainer and its module form a reference cycle, so their loaders are freed by the garbage collector. It may close the
# queues to the workers before the iterator uses them to stop the workers, and the iterator would then wait for each
# worker (measured with torch 2.13 on Python 3.11). This dict keeps the queues alive, so they outlive the iterator.
_queues: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def iterator_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Returns the loader's iterator, whose workers end when this process does.

    Example:
        >>> list(iterator_of([1, 2]))
        [1, 2]
    """
    if not names_samples(loader):
        return _started(loader)
    with replaced(loader, "dataset", named(loader)):  # type: ignore[arg-type]
        return _started(loader)


def _started(loader: Iterable[Any]) -> Iterator[Any]:
    # A loader whose `worker_init_fn` is a property is left unchanged.
    if getattr(loader, "num_workers", 0) == 0 or "worker_init_fn" not in getattr(loader, "__dict__", {}):
        return iter(loader)
    # torch passes the function to each worker that it starts in this block.
    own = loader.worker_init_fn  # type: ignore[attr-defined]
    with replaced(loader, "worker_init_fn", EndsWithParent(own, survives=_handled_signals())):
        iterator = iter(loader)
    if _has_workers(iterator):
        _queues[iterator] = iterator._index_queues, iterator._worker_result_queue  # type: ignore[attr-defined]
    return iterator


def _has_workers(item: object) -> bool:
    """Returns True for an iterator of a DataLoader that has worker processes."""
    # Checks the type first, because reading an attribute of an arbitrary object could run arbitrary code.
    return issubclass(type(item), _BaseDataLoaderIter) and {"_workers", "_index_queues"} <= vars(item).keys()


@contextmanager
def replaced(loader: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of a loader within the block. A DataLoader refuses plain assignment."""
    own = vars(loader)[name]
    vars(loader)[name] = value
    try:
        yield
    finally:
        vars(loader)[name] = own


class WorkerDied(LeydenError):
    """Raised if a worker process of a loader ended without raising an error."""


def died(error: BaseException) -> WorkerDied | None:
    """Returns an explanation of an error that a dead worker caused, either torch's own or from an unfinished batch.

    None for any other error. Afterwards, the SIGCHLD of that worker, which may arrive later, raises no second error.
    """
    for _ in range(ATTEMPTS):
        try:
            return _died(error)
        except RuntimeError as late:
            # Raised by torch's handler of SIGCHLD. Its traceback would keep this frame, and with it the iterators, in
            # a reference cycle.
            error = late.with_traceback(None)
    return None


def _died(error: BaseException) -> WorkerDied | None:
    text = str(error)
    found = re.match(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", text)
    if found is not None:
        pids = [int(pid) for pid in found[1].split(",")]
        # torch raises this error anywhere, perhaps for a loader that the user reads. `_queues` adds the iterators that
        # `gc.freeze` has hidden from the collector.
        iterators = [item for item in (*_queues, *gc.get_objects()) if _has_workers(item)]
        ended = [(iterator, *entry) for iterator in iterators for entry in _numbered(iterator) if entry[1].pid in pids]
    elif (isinstance(error, CUT_OFF) or "ancdata" in text) and "in DataLoader worker process" not in text:
        workers = [
            (iterator, *entry) for iterator in _iterators_in(error.__traceback__) for entry in _numbered(iterator)
        ]
        # A dying worker closes its socket a moment before it ends.
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
    """Returns the iterators with workers in whose methods an error was raised."""
    found: dict[int, Any] = {}
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if _has_workers(owner):
            found[id(owner)] = owner
        trace = trace.tb_next
    return list(found.values())


def _explained(number: int, count: int, pid: int, code: int | None) -> WorkerDied:
    how, cause, fix = f"ended with exit code {code}", "some code in it called os._exit or sys.exit", ""
    if code is not None and code < 0:
        how = f"was killed by {_signal_name(-code)}"
        cause, fix = _CAUSES.get(_signal_name(-code), ("another process sent it that signal", ""))
    elif code is None:
        how, cause = "ended", "its exit code is unknown"
    return WorkerDied(
        f"worker {number} of {count} of a DataLoader (pid {pid}) {how}: {cause}{_shared_memory()}. "
        f"{fix or 'Use num_workers=0 to load in this process and see the error.'} To continue from the last "
        "checkpoint, use Trainer(resume='auto'); leyden launch --max_restarts also restarts the run automatically."
    )


_FEWER = "Use fewer workers, a smaller prefetch_factor, or a dataset that loads its samples lazily."
_CAUSES = {
    "SIGKILL": ("usually the kernel's response to running out of memory (see dmesg)", _FEWER),
    "SIGBUS": (
        "usually because shared memory is full",
        "Give the container more (docker run --shm-size=8g), or call "
        "torch.multiprocessing.set_sharing_strategy('file_system').",
    ),
    "SIGSEGV": (
        "a library crashed in it",
        "Run with num_workers=0 under python -X faulthandler to see where. A library that does not survive a fork "
        "needs DataLoader(multiprocessing_context='spawn').",
    ),
}
"""The usual cause of each signal, and the fix."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _shared_memory() -> str:
    """Returns a note on the free shared memory, through which workers send batches; empty if there is none."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return ""
    return f"; /dev/shm has {usage.free / 2**20:,.0f} of {usage.total / 2**20:,.0f} MiB free now"


def _handled_signals() -> list[int]:
    """Returns the signals for which this process has its own handler."""
    return [int(kind) for kind in signal.Signals if kind.name not in THEIRS and callable(signal.getsignal(kind))]


def _survive(number: int, frame: FrameType | None) -> None:
    """Ignores a signal. Used instead of SIG_IGN, which programs that a worker starts would inherit."""


class EndsWithParent:
    """A `worker_init_fn` that ends a worker within two seconds after the main process was killed.

    torch's worker checks for its main process only while it waits for work. A worker whose batch exceeds the buffer of
    the pipe would otherwise block on it forever, because no process reads it any more.

    Args:
        then: the user's own `worker_init_fn`; None without one.
        survives: the signals that the main process handles, for example by saving and exiting. A scheduler may send
            them to all processes of a job, while the main process still needs batches.
    """

    def __init__(self, then: Callable[[int], None] | None, survives: Iterable[int]) -> None:
        self._then = then
        self._survives = tuple(survives)
        self._main = os.getpid()
        self._stacks: StackFile | None = None

    def __call__(self, worker_id: int) -> None:
        for number in self._survives:
            signal.signal(number, _survive)
        # Kept open in this process. A forked worker inherits the rank's own.
        self._stacks = answer_like(self._main)
        # On Windows the parent never changes, and a pipe without a reader is an error.
        if sys.platform != "win32":
            threading.Thread(target=self._watch, name="leyden-parent", daemon=True).start()
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Samples):
            # The user's `worker_init_fn` may set attributes of its own dataset. torch's class refuses plain assignment.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._then is not None:
            self._then(worker_id)

    def _watch(self) -> None:
        # The parent is the main process, or multiprocessing's fork server, which ends with it. The parent's id changes
        # when it ends.
        parent, pause = os.getppid(), threading.Event()
        while os.getppid() == parent and (parent == self._main or is_running(self._main)):
            pause.wait(PAUSE)
        os._exit(1)
