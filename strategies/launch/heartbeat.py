"""Signs of life: each rank stores how far it is in memory that it shares with its watchdog (`watchdog.py`).

A training batch costs a rank two stores of a word, and no call. Whatever is not a training batch has a phase of its
own, which the rank marks when it enters it.
"""

from __future__ import annotations

import enum
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from leyden.strategies.launch.environment import is_running
from leyden.strategies.launch.stacks import StackFile

HEARTBEATS = "LEYDEN_HEARTBEATS"
"""Set by who starts ranks: the path of the memory that it shares with them."""
AUTO = 0
"""Stands for a limit that follows the slowest recent batch."""

# The words of a slot. The first two are what a training batch stores.
BATCHES, STEP, MARKS, PHASE, EVALUATED, EPOCH, EPOCH_BEGAN, FIT_BEGAN, PROCESS, RANK, THREAD, LIMIT = range(12)
WORDS = 16 * 8
TEXT = 960
SLOT = WORDS + 2 * TEXT


class Phase(enum.IntEnum):
    """What a rank is doing. `FIRST` is what a watchdog makes of the first batches of a fit, and `LOOP` is a loop of the
    user's own between two passes over its loaders.
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
    """The shared memory of one rank.

    Args:
        memory: of all ranks of this machine.
        number: local rank.
    """

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        view = memoryview(memory)[number * SLOT : (number + 1) * SLOT]
        self.words = view[:WORDS].cast("q")
        self._stacks, self._folder = view[WORDS : WORDS + TEXT], view[WORDS + TEXT :]

    @property
    def beats_here(self) -> bool:
        """True if a run of this process beats in it: another run here is within one of its hooks."""
        return self.words[PROCESS] == os.getpid() and self.words[PHASE] != Phase.OUTSIDE

    @property
    def stacks(self) -> str:
        """Path of the file that the rank's stacks are to be written to; the watchdog's."""
        return _text(self._stacks)

    @stacks.setter
    def stacks(self, path: str) -> None:
        _write(self._stacks, path)

    @property
    def folder(self) -> str:
        """Where the run wants a report."""
        return _text(self._folder)

    @folder.setter
    def folder(self, path: str) -> None:
        _write(self._folder, path)


class SharedSlots:
    """The memory that a watchdog shares with so many ranks. It has no name that could be left behind.

    Args:
        count: ranks.
    """

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
        """Gives the memory up; ranks that still have it keep it until they end."""
        for file in (self._file, *self.stacks):
            file.close()


class Heartbeat:
    """This rank's signs of life. Until a watchdog is there they are stored where nobody looks.

    Attributes:
        words: a training loop stores its batches in `words[BATCHES]`, and its steps in `words[STEP]`.
    """

    def __init__(self) -> None:
        self.words = memoryview(bytearray(WORDS)).cast("q")
        self._compiles: Callable[[], None] | None = None

    def __reduce__(self) -> tuple[type[Heartbeat], tuple[()]]:
        return Heartbeat, ()

    @contextmanager
    def beating(self, slot: Slot, rank: int, limit: int, folder: str) -> Iterator[None]:
        """Beats in a slot during the block.

        Args:
            slot: of this rank.
            rank: over all machines.
            limit: milliseconds that a training batch may take; AUTO for a limit that follows the slowest recent one.
            folder: where a report is wanted.
        """
        own, words = self.words, slot.words
        is_inner = slot.beats_here
        # A run within a hook of another run.
        before, place = words.tolist(), slot.folder
        words[RANK], words[PROCESS] = rank, os.getpid()
        words[THREAD] = threading.main_thread().ident or 0
        words[LIMIT] = limit
        slot.folder = os.path.abspath(folder)
        self.words = words
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
            self.words = own
            if stacks is not None:
                stacks.close()
            if is_inner:
                slot.folder = place
                for number in (STEP, BATCHES, PHASE, EVALUATED, EPOCH, EPOCH_BEGAN, FIT_BEGAN, LIMIT):
                    words[number] = before[number]

    def mark(self, phase: Phase) -> None:
        """Enters a phase."""
        self.words[PHASE] = phase
        self.words[MARKS] += 1

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Marks a phase for the block, and restores the one before."""
        before = Phase(self.words[PHASE])
        self.mark(phase)
        try:
            yield
        finally:
            self.mark(before)

    def begin_fit(self, batches: int) -> None:
        """Begins or continues training after this many batches: the first ones may take long."""
        self.words[FIT_BEGAN] = self.words[BATCHES] = batches

    def begin_epoch(self, epoch: int, batch: int, batches: int, step: int) -> None:
        """Begins the batches of an epoch.

        Args:
            epoch: from 0.
            batch: batches of it that are done.
            batches: those of all epochs.
            step: the global step.
        """
        words = self.words
        words[BATCHES], words[STEP], words[EPOCH], words[EPOCH_BEGAN] = batches, step, epoch, batches - batch
        self._mark_compiles()
        self.mark(Phase.TRAINING)

    def _mark_compiles(self) -> None:
        """Has torch.compile mark a phase of its own while it compiles, even in the middle of a training."""
        dynamo = sys.modules.get("torch._dynamo.callback")
        if dynamo is None or self._compiles is not None:
            # Nothing is compiled before the module is imported.
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
    """This rank's slot in the memory of who started it, or of this process's own watchdog; None where there is none.

    A process that a rank has started inherits the variable, and not the slot.
    """
    path = os.environ.get(HEARTBEATS)
    if not path:
        return None
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):
        return None
    # A process that watches itself has one slot, whatever its rank.
    number = 0 if len(memory) == SLOT else local_rank
    if len(memory) < (number + 1) * SLOT:
        return None
    slot = Slot(memory, number)
    owner = slot.words[PROCESS]
    return slot if owner in (0, os.getpid()) or not is_running(owner) else None


def _nameless() -> tuple[Any, str]:
    """Returns a file in memory and a path by which other processes can open it; a temporary file where not on Linux."""
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
