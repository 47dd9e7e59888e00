"""A thread of an asynchronous save that is always later than the step, whatever the machine does."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest

from leyden.trainer.checkpoint.background import PendingSave
from leyden.trainer.checkpoint.copies import Copies

THREAD = "leyden-save"


class _Queue(deque[Any]):
    """What is to be copied: the thread takes some of it, then holds until it is let go."""

    def __init__(self, copies: deque[Any], begun: int, let_go: threading.Event) -> None:
        super().__init__(copies)
        self._begun, self._let_go = begun, let_go

    def popleft(self) -> Any:
        if threading.current_thread().name != THREAD:
            return super().popleft()
        if not self._begun:
            self._let_go.wait()
            return super().popleft()
        self._begun -= 1
        copy = super().popleft()
        if not self._begun:
            self._let_go.wait()
        return copy


class _Copied(threading.Event):
    """The event that all copies are made. Waiting for it releases the thread."""

    def __init__(self, let_go: threading.Event) -> None:
        super().__init__()
        self._let_go = let_go

    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread().name != THREAD:
            self._let_go.set()
        return super().wait(timeout)


def delay_copies(monkeypatch: pytest.MonkeyPatch, begun: int) -> None:
    """Holds the thread of each save until the run waits for its copies, or for its end.

    A step that does not wait for them is therefore done before they are made.

    Args:
        monkeypatch: ends that.
        begun: tensors that the thread has taken by then; it has copied all of them but the last.
    """
    begin, join = Copies.begin, PendingSave.join

    def delayed(copies: Copies) -> None:
        begin(copies)
        if copies._queue:
            let_go = threading.Event()
            copies._queue, copies._copied = _Queue(copies._queue, begun, let_go), _Copied(let_go)

    def joined(save: PendingSave, timeout: float | None = None) -> None:
        queue = save._copies._queue
        if isinstance(queue, _Queue):
            queue._let_go.set()
        join(save, timeout)

    monkeypatch.setattr(Copies, "begin", delayed)
    monkeypatch.setattr(PendingSave, "join", joined)
