"""When one rank fails, every rank stops within seconds, and the user sees one error: the first rank's."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from leyden.core.environment import AGENT, STARTER, is_running, ranks_in_words
from leyden.core.errors import add_note
from leyden.core.user_code import users_frame
from leyden.launch.leaving import ERROR_FILE
from leyden.launch.meeting import attempt, until
from leyden.launch.processes import started
from leyden.launch.tries import GIVEN_UP, starts_again

KEY = "failed"
POLL = 0.5
"""Seconds between two looks for another rank's failure."""
GRACE = 4.0
"""Seconds that a rank has to exit on its own after another rank failed."""
ANSWER = 5.0
"""Seconds to wait for an answer from the store, and from each rank about where it is."""
LEAVE = 5.0
"""Seconds allowed for leaving a process group after a failure."""
TIME_OUTS = ("timed out", "timeout", "time out")
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "connectFullMesh"),
    *("remote process exited", "remote process exiting", "Connection closed by remote peer"),
    "communicator was aborted",
)
"""Error texts for a lost peer: gloo's and the store's on the first line, NCCL's on the others."""
STORE_GONE = "rank 0 has gone, and the store with it. If its machine is still up, its output says why"


class Unanswered(RuntimeError):
    """Raised if a remote process did not answer in time."""


class Limited:
    """Makes calls to another process with a timeout. torch's store would wait forever for a stopped process.

    A thread makes the calls, because nothing can interrupt them. After one unanswered call the thread is stuck, and
    every later call fails immediately.
    """

    def __init__(self) -> None:
        self.is_stuck = False
        self._wanted: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        threading.Thread(target=self._serve, name="leyden-calls", daemon=True).start()

    def call(self, seconds: float, function: Callable[..., Any], *args: Any) -> Any:
        """Calls the function in the thread, and returns or raises what it does.

        Raises:
            Unanswered: if this call, or an earlier one, exceeded its limit.
        """
        if self.is_stuck:
            raise Unanswered("an earlier call got no answer")
        self._wanted.put(lambda: function(*args))
        try:
            value, error = self._answers.get(timeout=seconds)
        except Empty:
            self.is_stuck = True
            raise Unanswered(f"no answer within {seconds:.0f} s") from None
        if error is not None:
            raise error
        return value

    def _serve(self) -> None:
        while True:
            wanted = self._wanted.get()
            try:
                self._answers.put((wanted(), None))
            except Exception as error:
                self._answers.put((None, error))


class FirstFailure:
    """Reports the error of the first rank to fail, and ends the others. Lives as long as the process.

    The ranks communicate through the process group's store, which lives in the host's process. A failing rank writes
    its error there, unless another rank has done so first. During a run, a thread on each rank polls the store, because
    the run's thread may wait for the failed rank in a call that never wakes. The thread replies with the location of
    the run's, so the failed rank can report where the others were.

    Every wait for another process has a limit, since that process, or the one with the store, may be stopped.
    """

    def __init__(self, store: Any, rank: int, size: int, is_host: bool) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.rank, self.size = rank, size
        self.reported = False
        """True if this rank failed first and has reported its error."""
        self.follows = False
        """True if another rank failed first, or if the agent reports how this rank ended."""
        self._is_first = False
        prefix = f"leyden/{attempt()}"
        self._store = PrefixStore(prefix, store.clone())
        self._watched = PrefixStore(prefix, store.clone())
        self._limited = Limited()
        self._is_host = is_host
        self._run = 0
        self._looks = False
        self._ident = threading.get_ident()
        """The run's thread."""
        self._looking = threading.Lock()
        self._done = threading.Event()
        self._hook = sys.excepthook
        sys.excepthook = self._at_exit
        self._thread = threading.Thread(target=self._watch, name="leyden-failure", daemon=True)
        self._thread.start()

    def begin_run(self) -> None:
        """Starts polling for errors of other ranks."""
        self._ident = threading.get_ident()
        if not self._looks:
            self._run += 1
            self._looks = True

    def end_run(self) -> None:
        """Stops polling, so rank 0, which may host the store, can exit."""
        # The thread holds the lock during a poll, which never returns if the store does not answer.
        held = self._looking.acquire(timeout=ANSWER)
        looked, self._looks = self._looks, False
        if held:
            self._looking.release()
        if looked:
            with suppress(RuntimeError):
                self._ask("add", f"ended/{self._run}", 1)

    def report(self, error: BaseException, where: str = "") -> bool:
        """Reports an error that this rank raised to the other ranks, with its step and batch.

        Returns:
            True if this rank failed first, so the user must see its error. False if another rank's failure caused it.
        """
        if self.reported or self.follows:
            return self.reported
        if isinstance(error, SystemExit) and not error.code:
            # A clean exit, which every rank reaches on its own. If one does not, it can name the ranks that exited.
            self._answer(f"exited with code 0{', at ' + where if where else ''}")
            return True
        if isinstance(error, KeyboardInterrupt):
            # Nobody needs to be told who pressed Ctrl-C; the other ranks end even if they were not sent it.
            self._is_first = self.reported = True
            self._claim(f"rank {self.rank}: KeyboardInterrupt", False)
            return True
        self._answer("was " + _place(traceback.extract_tb(error.__traceback__)))
        lost = is_lost(error)
        heard = self._another_failed(seconds=2.0) if lost else False
        place = f"rank {self.rank}{', ' + where if where else ''}"
        text = f"{place}: {traceback.format_exception_only(error)[0].strip()}"
        if heard is None:
            # The agent prints it once for all ranks of this machine.
            _write_error_file(text, error, lost, [], STORE_GONE)
        if heard is not False:
            self.follows = True
            return False
        first = self._is_first = self._claim(text, lost)
        # For a rank that wrote no error, the agent reports how it ended.
        self.reported = first and not (lost and AGENT in os.environ)
        self.follows = not self.reported
        silent, words = self._others() if first and (lost or is_time_out(error)) else ([], "")
        if first:
            _write_error_file(text, error, lost, silent, words)
        if self.reported:
            _show(error, place, words)
        return self.reported

    def close(self) -> None:
        """Ends the thread before the store closes. The rank that hosts the store waits until no rank polls it."""
        if self._looks and not (self.reported or self.follows):
            self._answer("exited cleanly before the others")
        self.end_run()
        self._done.set()
        self._thread.join(ANSWER)
        if sys.excepthook == self._at_exit:
            sys.excepthook = self._hook
        if self._is_host and self._run:
            self._wait_for_others(2.0 if self.reported or self.follows else 8.0)

    # the store --------------------------------------------------------------------------------------------------------
    def _ask(self, name: str, *args: Any) -> Any:
        return self._limited.call(ANSWER, getattr(self._store, name), *args)

    def _answer(self, text: str) -> None:
        """Publishes this rank's location for the rank that failed first. The first answer wins."""
        with suppress(RuntimeError):
            self._ask("compare_set", f"answer/{self.rank}", "", text)

    def _others(self) -> tuple[list[int], str]:
        """Returns the ranks that do not answer, and a description of them and of where the others are."""
        found: dict[int, str] = {}
        awaited = [rank for rank in range(self.size) if rank != self.rank]

        def all_answered() -> bool:
            nonlocal awaited
            for rank in awaited:
                if self._ask("check", [f"answer/{rank}"]):
                    found[rank] = self._ask("get", f"answer/{rank}").decode()
            awaited = [rank for rank in awaited if rank not in found]
            return not awaited

        with suppress(RuntimeError):
            until(all_answered, ANSWER, most=0.1)
        places: dict[str, list[int]] = {}
        for rank, answer in found.items():
            places.setdefault(answer, []).append(rank)
        words = [f"{ranks_in_words(ranks)} {answer}" for answer, ranks in list(places.items())[:8]]
        if awaited:
            silent = (
                "does not answer: it has exited or is stopped"
                if len(awaited) == 1
                else "do not answer: they have exited or are stopped"
            )
            words.insert(0, f"{ranks_in_words(awaited)} {silent}")
        if self._limited.is_stuck:
            words = ["no rank can answer: rank 0, which hosts the store, has exited or is stopped"]
            awaited = [0] if self.rank != 0 else []
        return awaited, "; ".join(words)

    def _wait_for_others(self, seconds: float) -> None:
        with suppress(RuntimeError):
            until(lambda: bool(self._ask("add", f"ended/{self._run}", 0) >= self.size), seconds, most=0.02)

    def _claim(self, text: str, lost: bool) -> bool:
        try:
            return bool(self._ask("compare_set", KEY, "", text) == text.encode())
        except Unanswered:
            return True
        except RuntimeError:
            # The store died with rank 0. Show this rank's error anyway if it is its own.
            return not lost

    def _another_failed(self, seconds: float) -> bool | None:
        """Waits for another rank to report its failure. A lost connection is noticed before that report arrives.

        Returns:
            Whether a rank has reported. None if the store has died, so it is unknown.
        """
        try:
            return until(lambda: bool(self._ask("check", [KEY])), seconds, most=0.05)
        except Unanswered:
            return False
        except RuntimeError:
            return None

    def _watch(self) -> None:
        while not self._done.wait(POLL):
            try:
                with self._looking:
                    failed = self._looks and self._watched.check([KEY])
                if failed and not self._is_first:
                    self._watched.compare_set(f"answer/{self.rank}", "", "is " + _place_of_thread(self._ident))
            except RuntimeError:
                # Without a store nothing can be reported, and collectives fail on their own.
                return
            if failed:
                # The rank that failed first asks the others, and exits on its own.
                if not self._done.wait(0.0 if self._is_first else GRACE) and not self._is_first:
                    self.end_run()
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(1)
                return

    def _at_exit(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Reports an uncaught error that ends the script outside of a run, in the same way as one inside a run."""
        # After `close` another hook may still hold this one.
        if self._done.is_set() or self.report(error):
            self._hook(kind, error, trace)


def _place_of_thread(ident: int) -> str:
    frame = sys._current_frames().get(ident)
    return _place(traceback.extract_stack(frame)) if frame is not None else "outside of Python"


def _place(stack: traceback.StackSummary) -> str:
    """Describes the innermost frame of the user's code."""
    frame = users_frame(stack)
    return f"at {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" if frame else "outside of Python"


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Exits this process with status 1 if the block takes longer, even while C code holds the GIL."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def is_time_out(error: BaseException) -> bool:
    """Returns True for the errors of gloo, NCCL and the store about a peer that exceeded their timeout."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in TIME_OUTS)


def is_lost(error: BaseException) -> bool:
    """Returns True for errors that another rank reported, or that its exit caused in this rank's collectives."""
    from torch.distributed import DistNetworkError

    text = str(error)
    if getattr(error, "of_another_rank", False):
        return True
    return isinstance(error, DistNetworkError) or (
        isinstance(error, RuntimeError) and any(words in text for words in LOST) and "imed out" not in text
    )


def _show(error: BaseException, place: str, others: str) -> None:
    """Notes on the error which rank raised it and where the others were."""
    of_these = f" Of these, {others}" if others else ""
    add_note(error, f"leyden: raised on {place}; the other ranks were terminated.{of_these}")
    if isinstance(error, SystemExit) and not (starts_again() and error.code == GIVEN_UP):
        # Python prints nothing for a SystemExit, not even its notes.
        print(f"leyden: {place} exited with code {error.code}; all ranks were terminated.", file=sys.stderr)


def _write_error_file(text: str, error: BaseException, lost: bool, silent: list[int], others: str) -> None:
    """Writes the file from which the agent finds the rank that failed first: the error in one line, and more.

    `lost` is True if the error only follows from another rank's exit. `silent` ranks did not answer; `others` says
    where the other ranks were.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    message: dict[str, Any] = {"message": text, "lost": lost, "silent": silent, "others": others, "extraInfo": extra}
    frame = users_frame(traceback.extract_tb(error.__traceback__))
    if frame is not None:
        message["line"] = f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
    with open(path, "w") as file:
        json.dump({"message": message}, file)


def leave_stdin_to_rank_0(rank: int) -> None:
    """Replaces standard input by an empty one, except on rank 0, so a breakpoint on rank 0 reads the agent's input."""
    if rank > 0 and AGENT in os.environ:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)


def end_with_parent() -> None:
    """Has the kernel kill this rank when its agent dies. Linux only; elsewhere ranks exit at their next collective."""
    if not sys.platform.startswith("linux") or not (os.environ.get(STARTER) or os.environ.get("TORCHELASTIC_RUN_ID")):
        return
    set_death_signal = 1
    with_libc: Callable[..., int] = ctypes.CDLL(None).prctl
    with_libc(set_death_signal, signal.SIGKILL)
    agent, parent = os.environ.get(AGENT, ""), multiprocessing.parent_process()
    # Not getppid, which returns the fork server under "forkserver".
    starter = None if parent is None or not os.path.isdir("/proc/self") else parent.pid
    is_gone = starter is not None and started(starter) in ("0", "gone")
    if is_gone or (agent.isdigit() and not is_running(int(agent))):
        # The agent died before this call.
        os._exit(1)
