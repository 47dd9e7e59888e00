"""When one rank fails, every rank stops within seconds, and the user sees one error: that of the rank that failed first."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from leyden.strategies.errors import add_note
from leyden.strategies.launch.engine import AGENT
from leyden.strategies.launch.environment import STARTER

KEY = "failed"
GRACE = 4.0
"""Seconds in which a rank may leave by itself after another one failed."""
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "connectFullMesh"),
    *(
        "remote process exited",
        "remote process exiting",
        "Connection closed by remote peer",
        "communicator was aborted",
    ),
)
"""What gloo and the store, and in the second line NCCL, say when another rank is gone."""


class FirstFailure:
    """Lets one rank of all tell its error, and ends the others. Lives as long as the process.

    The ranks meet in the process group's store. Whoever fails writes its error there, unless one stands there already. While a
    run lasts, a thread of each rank looks once in a while, since a rank may wait for the failed one where nothing would ever
    wake it.

    Args:
        store: of the process group; connections of its own are made.
        rank: of this process.
        size: ranks in all.
        interval: seconds between two looks.
    """

    def __init__(self, store: Any, rank: int, size: int, interval: float = 0.5) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.rank, self.size = rank, size
        self.told = False
        """This rank's error is the first, and was told."""
        self.follows = False
        """Another rank failed first."""
        prefix = f"leyden/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = PrefixStore(prefix, store.clone())
        self._watched = PrefixStore(prefix, store.clone())
        self._interval = interval
        self._run = 0
        self._looks = False
        self._looking = threading.Lock()
        self._done = threading.Event()
        self._hook = sys.excepthook
        sys.excepthook = self._at_exit
        self._thread = threading.Thread(target=self._watch, name="leyden-failure", daemon=True)
        self._thread.start()

    def begin_run(self) -> None:
        """Looks from now on for what other ranks tell."""
        if not self._looks:
            self._run += 1
            self._looks = True

    def end_run(self) -> None:
        """Looks no more, so that rank 0, which may hold the store, can go."""
        with self._looking:
            looked, self._looks = self._looks, False
        if looked:
            with suppress(RuntimeError):
                self._store.add(f"ended/{self._run}", 1)

    def report(self, error: BaseException, where: str = "") -> bool:
        """Tells the other ranks of an error.

        Args:
            error: what was raised.
            where: step and batch.

        Returns:
            True if it is the first, so that the user must see it; False if it follows from another rank's.
        """
        if self.told or self.follows:
            return self.told
        if isinstance(error, SystemExit) and not error.code:
            # An end in order, which every rank comes to by itself.
            return True
        lost = is_lost(error)
        if lost and self._another_failed(seconds=2.0):
            self.follows = True
            return False
        place = f"rank {self.rank}{', ' + where if where else ''}"
        text = f"{place}: {_last_line(error)}"
        first = self._claim(text, lost)
        # Whoever started the ranks says how one ended that is gone without a word.
        self.told = first and not (lost and AGENT in os.environ)
        self.follows = not self.told
        if first:
            _write_error_file(text, error, lost)
        if self.told:
            add_note(error, f"leyden: this was {place}; the other ranks are ended.")
        return self.told

    def close(self) -> None:
        """Ends the thread, before the store goes; rank 0 waits until nobody looks any more."""
        self.end_run()
        self._done.set()
        self._thread.join(5.0)
        if sys.excepthook == self._at_exit:
            sys.excepthook = self._hook
        if self.rank == 0 and self._run:
            self._wait_for_others(2.0 if self.follows else 8.0)

    def _wait_for_others(self, seconds: float) -> None:
        end, pause = time.monotonic() + seconds, threading.Event()
        with suppress(RuntimeError):
            while self._store.add(f"ended/{self._run}", 0) < self.size and time.monotonic() < end:
                pause.wait(0.02)

    def _claim(self, text: str, lost: bool) -> bool:
        try:
            return bool(self._store.compare_set(KEY, "", text) == text.encode())
        except RuntimeError:
            # The store is gone with rank 0; an error of this rank's own is shown all the same.
            return not lost

    def _another_failed(self, seconds: float) -> bool:
        """Waits for a failed rank to say why: its lost connection is noticed earlier than its message."""
        end, pause = time.monotonic() + seconds, threading.Event()
        while True:
            try:
                if self._store.check([KEY]):
                    return True
            except RuntimeError:
                return True
            if time.monotonic() > end:
                return False
            pause.wait(0.05)

    def _watch(self) -> None:
        while not self._done.wait(self._interval):
            try:
                with self._looking:
                    failed = self._looks and self._watched.check([KEY])
            except RuntimeError:
                # Without a store nothing can be told, and collectives fail by themselves.
                return
            if failed and not self.told:
                if not self._done.wait(GRACE) and not self.told:
                    self.end_run()
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(1)
                return

    def _at_exit(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error outside of any run ends the script: told as one of a run is."""
        if self.report(error):
            self._hook(kind, error, trace)


def is_lost(error: BaseException) -> bool:
    """True for the errors that the end of another rank makes in this one's collectives, and those told by another rank."""
    from torch.distributed import DistNetworkError

    text = str(error)
    if getattr(error, "of_another_rank", False):
        return True
    return isinstance(error, DistNetworkError) or (
        isinstance(error, RuntimeError) and any(words in text for words in LOST) and "imed out" not in text
    )


def _last_line(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[0].strip()


def _write_error_file(text: str, error: BaseException, lost: bool) -> None:
    """What torch's agent reads to tell which rank was the first."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    trace = "".join(traceback.format_exception(error))
    stamp = str(int(time.time()))
    message = {"message": text, "lost": lost, "extraInfo": {"py_callstack": trace, "timestamp": stamp}}
    with open(path, "w") as file:
        json.dump({"message": message}, file)


def leave_stdin_to_rank_0(rank: int) -> None:
    """Ranks of one agent share its standard input, where a breakpoint of rank 0 reads; the others find it empty."""
    if rank > 0 and AGENT in os.environ:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)


def end_with_parent() -> None:
    """Lets this rank be killed when its agent is, so that nobody is left behind. Linux only; elsewhere ranks end at their next collective."""
    if not sys.platform.startswith("linux") or not (os.environ.get(STARTER) or os.environ.get("TORCHELASTIC_RUN_ID")):
        return
    set_death_signal = 1
    with_libc: Callable[..., int] = ctypes.CDLL(None).prctl
    with_libc(set_death_signal, signal.SIGKILL)
    agent = os.environ.get(AGENT, "")
    if agent.isdigit():
        try:
            os.kill(int(agent), 0)
        except ProcessLookupError:
            # It died before this was asked for.
            os._exit(1)
        except PermissionError:
            # It lives, and belongs to somebody else.
            pass
