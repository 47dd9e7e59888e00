"""Ends a DataLoader's workers: without delay when the loader is released, and by themselves if the main process is
killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from leyden.strategies.launch.environment import is_running

THEIRS = {"SIGTERM", "SIGINT", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"}
"""Signals by which multiprocessing and torch end a worker or learn of its end."""

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
    if getattr(loader, "num_workers", 0) == 0 or not hasattr(loader, "worker_init_fn"):
        return iter(loader)
    # torch's loader passes it to each worker that it starts here.
    own = loader.worker_init_fn
    loader.worker_init_fn = EndsWithParent(own, survives=_answered_here())
    try:
        iterator = iter(loader)
    finally:
        loader.worker_init_fn = own
    to_workers = getattr(iterator, "_index_queues", None)
    if to_workers is not None:
        _queues[iterator] = to_workers, iterator._worker_result_queue  # type: ignore[attr-defined]
    return iterator


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
        interval: seconds between two checks.
        survives: signals that the main process answers, perhaps by ending in order. A scheduler may send them to all
            processes of a job, and the main process still needs its batches.
    """

    def __init__(self, then: Callable[[int], None] | None, interval: float = 1.0, survives: Iterable[int] = ()) -> None:
        self._then = then
        self._interval = interval
        self._survives = tuple(survives)
        self._parent = os.getpid()

    def __call__(self, worker_id: int) -> None:
        for number in self._survives:
            signal.signal(number, _survive)
        # On Windows the parent never changes, and a pipe without a reader is an error.
        if sys.platform != "win32":
            threading.Thread(target=self._watch, name="leyden-parent", daemon=True).start()
        if self._then is not None:
            self._then(worker_id)

    def _watch(self) -> None:
        # This is the main process or multiprocessing's fork server, which ends with it; another process if it has
        # ended.
        above, pause = os.getppid(), threading.Event()
        while os.getppid() == above and (above == self._parent or is_running(self._parent)):
            pause.wait(self._interval)
        os._exit(1)
