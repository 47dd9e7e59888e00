"""Heartbeats: each rank writes its progress to memory that it shares with its watchdog (`watchdog.py`).

A training batch costs a rank two word-sized stores and no call. Everything else is a phase, which the rank marks on
entry.
"""

from __future__ import annotations

import enum
import math
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from leyden.core.environment import is_running
from leyden.core.errors import ConfigurationError
from leyden.launch.stacks import SIGNAL, StackFile, catches

HEARTBEATS = "LEYDEN_HEARTBEATS"
"""Path of the shared memory. Set by the launcher."""
AUTO = 0
"""Marks a limit that adapts to the slowest recent batch."""

DEADLOCKS = -1
"""Marks a run without a limit, which ends only if its ranks wait for each other."""

# The words of a slot. A training batch stores the first two.
BATCHES, STEP, MARKS, PHASE, EVALUATED, EPOCH, EPOCH_BEGAN, FIT_BEGAN, PROCESS, RANK, THREAD, LIMIT = range(12)
WORDS = 16 * 8
TEXT = 960
SLOT = WORDS + 2 * TEXT


class Phase(enum.IntEnum):
    """What a rank is doing.

    A watchdog reads `TRAINING` as `FIRST` during the first batches of a fit. `LOOP` is a user's custom loop between two
    passes over its loaders.
    """

    OUTSIDE = 0
    SETUP = 1
    FIRST = 2
    TRAINING = 3
    EPOCH = 4
    EVALUATION = 5
    SAVING = 6
    COMPILING = 7
    ENDING = 8
    PREPARING = 9
    GOING_BACK = 10
    LOOP = 11


class Slot:
    """One rank's part of the memory that all ranks on this machine share; `number` is its local rank."""

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        view = memoryview(memory)[number * SLOT : (number + 1) * SLOT]
        self.words = view[:WORDS].cast("q")
        self._stacks, self._folder = view[WORDS : WORDS + TEXT], view[WORDS + TEXT :]

    @property
    def beats_here(self) -> bool:
        """True if a run of this process already uses the slot, so a new run must be nested in one of its hooks."""
        return self.words[PROCESS] == os.getpid() and self.words[PHASE] != Phase.OUTSIDE

    @property
    def stacks(self) -> str:
        """Path of the watchdog's file to which the rank appends its stacks."""
        return _text(self._stacks)

    @stacks.setter
    def stacks(self, path: str) -> None:
        _write(self._stacks, path)

    @property
    def folder(self) -> str:
        """The run's folder for reports of hangs."""
        return _text(self._folder)

    @folder.setter
    def folder(self, path: str) -> None:
        _write(self._folder, path)


class SharedSlots:
    """The memory that a watchdog shares with its ranks. It is anonymous, so nothing can be left behind."""

    def __init__(self, count: int) -> None:
        self._file, self.path = _nameless()
        self._file.truncate(count * SLOT)
        self._memory = mmap.mmap(self._file.fileno(), count * SLOT)
        self.slots = [Slot(self._memory, number) for number in range(count)]
        self.stacks = []
        for slot in self.slots:
            file, slot.stacks = _nameless()
            self.stacks.append(file)

    def close(self) -> None:
        """Closes the memory. Ranks that have mapped it keep it until they exit."""
        for file in (self._file, *self.stacks):
            file.close()


class Heartbeat:
    """This rank's heartbeat. Without a watchdog it writes to private memory.

    Attributes:
        words: the words of the slot. A training loop stores its batch count in `words[BATCHES]` and its step count in
            `words[STEP]`.
    """

    def __init__(self) -> None:
        self.words = memoryview(bytearray(WORDS)).cast("q")
        self._compiles: Callable[[], None] | None = None
        self._slot: Slot | None = None

    def __reduce__(self) -> tuple[type[Heartbeat], tuple[()]]:
        return Heartbeat, ()

    @contextmanager
    def beating(self, slot: Slot, rank: int, limit: int, folder: str) -> Iterator[None]:
        """Writes to this rank's slot during the block. `folder` is for reports of hangs.

        The limit is that of a training batch, in milliseconds. AUTO adapts it to the slowest recent batch; DEADLOCKS is
        for no limit.
        """
        own, words = self.words, slot.words
        # True for a run inside a hook of another run.
        is_inner = slot.beats_here
        before, place = words.tolist(), slot.folder
        words[RANK], words[PROCESS] = rank, os.getpid()
        # Ray and others run a fit in a thread of theirs.
        words[THREAD] = threading.get_ident()
        words[LIMIT] = limit
        slot.folder = os.path.abspath(folder)
        self.words, outer, self._slot = words, self._slot, slot
        self.mark(Phase.SETUP)
        stacks = None if is_inner else StackFile(slot.stacks)
        self._mark_compiles()
        try:
            yield
        finally:
            self.mark(Phase.OUTSIDE)
            forget, self._compiles = self._compiles, None
            if forget is not None:
                forget()
            self.words, self._slot = own, outer
            if stacks is not None:
                stacks.close()
            if is_inner:
                slot.folder = place
                for number in (STEP, BATCHES, PHASE, EVALUATED, EPOCH, EPOCH_BEGAN, FIT_BEGAN, LIMIT):
                    words[number] = before[number]

    @property
    def is_watched(self) -> bool:
        """True if a watchdog reads this heartbeat."""
        return self._slot is not None

    def report_to(self, folder: str) -> None:
        """Sets the folder for reports of hangs, once the run has one."""
        if self._slot is not None:
            self._slot.folder = os.path.abspath(folder)

    def mark(self, phase: Phase) -> None:
        """Enters a phase."""
        self.words[PHASE] = phase
        self.words[MARKS] += 1

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Marks a phase for the block, then restores the previous one."""
        before = Phase(self.words[PHASE])
        self.mark(phase)
        try:
            yield
        finally:
            self.mark(before)

    def begin_fit(self, batches: int) -> None:
        """Starts or continues training after this many batches. The next ones may take long."""
        self.words[FIT_BEGAN] = self.words[BATCHES] = batches

    def begin_epoch(self, epoch: int, batch: int, batches: int, step: int) -> None:
        """Starts the batches of an epoch, after `batch` of its own and `batches` of all epochs. Also sets the step."""
        words = self.words
        words[BATCHES], words[STEP], words[EPOCH], words[EPOCH_BEGAN] = batches, step, epoch, batches - batch
        self._mark_compiles()
        self.mark(Phase.TRAINING)

    def _mark_compiles(self) -> None:
        """Has torch.compile mark the phase COMPILING while it compiles, even in the middle of an epoch."""
        dynamo = sys.modules.get("torch._dynamo.callback")
        if dynamo is None or self._compiles is not None:
            # Nothing can compile before this module has been imported.
            return
        handler, before = dynamo.callback_handler, [Phase.SETUP]

        def begin(*_: Any) -> None:
            before[0] = Phase(self.words[PHASE])
            self.mark(Phase.COMPILING)

        def end(*_: Any) -> None:
            self.mark(before[0])

        def forget() -> None:
            handler.remove_start_callback(begin)
            handler.remove_end_callback(end)

        handler.register_start_callback(begin)
        handler.register_end_callback(end)
        self._compiles = forget


def slot_of_watchdog(local_rank: int) -> Slot | None:
    """Returns this rank's slot in the memory of its launcher or of this process's own watchdog, or None.

    A child process of a rank inherits the environment variable but does not own the slot.
    """
    memory = _memory_of_watchdog()
    if memory is None:
        return None
    # A process that watches itself has a single slot, whatever its rank.
    number = 0 if len(memory) == SLOT else local_rank
    if len(memory) < (number + 1) * SLOT:
        return None
    slot = Slot(memory, number)
    owner = slot.words[PROCESS]
    return slot if owner in (0, os.getpid()) or not is_running(owner) else None


def answer_like(rank: int) -> StackFile | None:
    """Has this process, a child of a rank, answer the watchdog's requests for stacks, unless it inherited that.

    Returns:
        The file to keep open; None if there is no watchdog, or if this process answers already.
    """
    memory = _memory_of_watchdog()
    if memory is None or SIGNAL is None or catches(os.getpid(), SIGNAL):
        return None
    slots = (Slot(memory, number) for number in range(len(memory) // SLOT))
    return next((StackFile(slot.stacks) for slot in slots if slot.words[PROCESS] == rank), None)


def _memory_of_watchdog() -> mmap.mmap | None:
    path = os.environ.get(HEARTBEATS)
    if not path:
        return None
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):
        return None


def _nameless() -> tuple[Any, str]:
    """Returns an anonymous file and a path for other processes to open it. Outside Linux, a temporary file."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("leyden")
        return open(number, "w+b", buffering=0), f"/proc/{os.getpid()}/fd/{number}"
    file = tempfile.NamedTemporaryFile(prefix="leyden-heartbeats-", buffering=0)  # noqa: SIM115
    return file, file.name


def _text(view: memoryview) -> str:
    return bytes(view).partition(b"\0")[0].decode(errors="replace")


def _write(view: memoryview, text: str) -> None:
    data = text.encode()[: len(view) - 1] + b"\0"
    view[: len(data)] = data


def hang_limit(value: object) -> float | str | None:
    """Parses `hang_timeout`: seconds or a timedelta, "auto", or None for no watchdog.

    Raises:
        ConfigurationError: if it is anything else.
    """
    if value is None or value is False:
        return None
    if value is True or value == "auto":
        return "auto"
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, (int, float)) and 0 < seconds < math.inf:
        return float(seconds)
    raise ConfigurationError(
        f"hang_timeout={value!r} is invalid. Use a positive number of seconds, a timedelta, 'auto', or None for no "
        "watchdog."
    )
