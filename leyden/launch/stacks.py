"""Python stacks of other processes. Each dumps its own on a signal, whatever its threads are waiting for."""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from leyden.core.user_code import is_users
from leyden.launch.processes import status_of

SIGNAL: int | None = getattr(signal, "SIGURG", None)
"""Requests the stacks of a process. Processes without a handler ignore it, and no scheduler preempts a run with it."""
ANSWER = 2.0
"""Seconds to wait for an answer. faulthandler runs in the signal handler, so only a stopped process fails to answer."""
DEBUGGERS = {
    "pdb.py": ("interaction", "_interact", "cmdloop"),
    "bdb.py": ("user_line", "dispatch_line"),
    "code.py": ("interact",),
    "pydevd.py": ("do_wait_suspend", "_do_wait_suspend"),
    "embed.py": ("mainloop", "__call__"),
}
"""Debugger functions in which a process waits for user input."""
WAITING = ("torch/distributed/", "torch/nn/parallel/", "torch/autograd/graph.py", "strategies/process_group.py")
"""Files whose functions wait for other ranks, including `backward`, which reduces gradients."""
_HEAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\S+) in (.*)')


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        source = f": {self.source}" if self.source else ""
        return f"at {self.file}, line {self.line}, in {self.function}{source}"


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread of a process. The innermost frame comes first."""

    ident: int
    frames: tuple[Frame, ...]

    @property
    def users(self) -> Frame | None:
        """The innermost frame in the user's code, or None."""
        return next((frame for frame in self.frames if is_users(frame.file)), None)

    @property
    def place(self) -> Frame | None:
        """The innermost frame in the user's code, or else the innermost frame."""
        return self.users or next(iter(self.frames), None)

    @property
    def collective(self) -> str:
        """Name of the function in which the thread waits for other ranks. "" if it does not wait."""
        if not self.frames or not _is_in(self.frames[0].file, WAITING):
            return ""
        inner = [frame.function for frame in self.frames]
        files = [_is_in(frame.file, WAITING) for frame in self.frames]
        count = files.index(False) if False in files else len(files)
        # The outermost waiting function, which the user's code called.
        name = next((name for name in reversed(inner[:count]) if name not in ("wrapper", "_call_impl")), inner[0])
        return "backward" if name in ("_engine_run_backward", "backward") else name

    @property
    def loads(self) -> bool:
        """True if the thread is waiting for a DataLoader worker."""
        return any("torch/utils/data/" in frame.file.replace(os.sep, "/") for frame in self.frames[:12])

    @property
    def load(self) -> Frame | None:
        """The place in a DataLoader worker's present task. None for a worker without a task, and for other threads.

        The stack of a forked worker continues with that of the process that started it, which is not its place.
        """
        loop = next((n for n, frame in enumerate(self.frames) if frame.function == "_worker_loop"), 0)
        if loop == 0 or _is_in(self.frames[loop - 1].file, ("multiprocessing/queues.py",)):
            return None
        return Thread(self.ident, self.frames[:loop]).place

    @property
    def is_debugged(self) -> bool:
        """True if a debugger has paused the thread and waits for user input."""
        return any(frame.function in DEBUGGERS.get(os.path.basename(frame.file), ()) for frame in self.frames)


class StackFile:
    """Appends this process's stacks to a file on each signal. Forked children, such as DataLoader workers, do too."""

    def __init__(self, path: str) -> None:
        self._file: Any = None
        if SIGNAL is not None and path:
            with suppress(OSError):
                self._file = open(path, "a")  # noqa: SIM115 - for faulthandler, until `close`
                faulthandler.register(SIGNAL, self._file, all_threads=True)

    def close(self) -> None:
        """Stops answering the signal."""
        if self._file is not None and SIGNAL is not None:
            faulthandler.unregister(SIGNAL)
            self._file.close()


def ask(files: Mapping[int, Any]) -> dict[int, list[Thread]]:
    """Requests the stacks of several processes, each of which appends to a file that is open in this process.

    The result omits those that do not answer.
    """
    found: dict[int, list[Thread]] = {}
    if SIGNAL is None:
        return found
    before = {}
    for process, file in files.items():
        # A process without a handler for the signal cannot dump its stacks.
        if catches(process, SIGNAL):
            before[process] = os.fstat(file.fileno()).st_size
            with suppress(OSError):
                os.kill(process, SIGNAL)
    deadline, sizes = time.monotonic() + ANSWER, dict[int, int]()
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = {process: os.fstat(files[process].fileno()).st_size for process in before}
        if now == sizes and all(now[process] > before[process] for process in before):
            break
        sizes = now
    for process, start in before.items():
        text = os.pread(files[process].fileno(), 1 << 20, start).decode(errors="replace")
        if text:
            found[process] = threads_in(text)
    return found


def threads_in(text: str) -> list[Thread]:
    """Parses faulthandler's output."""
    threads: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        head, frame = _HEAD.match(line), _FRAME.match(line)
        if head is not None:
            threads.append((int(head[1], 16), []))
        elif frame is not None and threads:
            number = int(frame[2]) if frame[2].isdigit() else 0
            threads[-1][1].append(Frame(frame[1], number, frame[3]))
    return [Thread(ident, tuple(frames)) for ident, frames in threads]


def catches(process: int, number: int) -> bool:
    """Returns True if a process handles a signal, or if that is unknown."""
    status = status_of(process)
    return not status or bool(int(status.get("SigCgt", "0"), 16) & 1 << number - 1)


def lines_of(thread: Thread) -> list[str]:
    """Formats a stack as Python does, with the innermost frame last."""
    lines = []
    for frame in reversed(thread.frames):
        lines.append(f'    File "{frame.file}", line {frame.line}, in {frame.function}')
        if frame.source:
            lines.append(f"      {frame.source}")
    return lines


def _is_in(file: str, places: Iterable[str]) -> bool:
    return any(place in file.replace(os.sep, "/") for place in places)
