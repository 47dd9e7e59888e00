"""Delays the thread of an asynchronous save until after the step, however fast the machine is."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest

from leyden.checkpoint.copies import Copies
from leyden.checkpoint.saves import PendingSave

THREAD = "leyden-save"


class _Queue(deque[Any]):
    """A queue of copies: the save's thread takes some of them, then blocks until released."""

    def __init__(self, copies: deque[Any], begun: int, release: threading.Event) -> None:
        super().__init__(copies)
        self._begun, self._release = begun, release

    def popleft(self) -> Any:
        if threading.current_thread().name != THREAD:
            return super().popleft()
        if not self._begun:
            self._release.wait()
            return super().popleft()
        self._begun -= 1
        copy = super().popleft()
        if not self._begun:
            self._release.wait()
        return copy


class _Copied(threading.Event):
    """The event set once all copies are made; waiting for it releases the thread."""

    def __init__(self, release: threading.Event) -> None:
        super().__init__()
        self._release = release

    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread().name != THREAD:
            self._release.set()
        return super().wait(timeout)


def delay_copies(monkeypatch: pytest.MonkeyPatch, begun: int) -> None:
    """Blocks each save's thread until the run waits for the copies or for the save to end.

    A step that does not wait for the copies is therefore done before they are made.

    Args:
        monkeypatch: undoes the delay when the test ends.
        begun: number of tensors that the thread takes before it blocks; it has copied all of them but the last.
    """
    begin, join = Copies.begin, PendingSave.join

    def delayed(copies: Copies) -> None:
        begin(copies)
        if copies._queue:
            release = threading.Event()
            copies._queue, copies._copied = _Queue(copies._queue, begun, release), _Copied(release)

    def joined(save: PendingSave, timeout: float | None = None) -> None:
        queue = save._copies._queue
        if isinstance(queue, _Queue):
            queue._release.set()
        join(save, timeout)

    monkeypatch.setattr(Copies, "begin", delayed)
    monkeypatch.setattr(PendingSave, "join", joined)
