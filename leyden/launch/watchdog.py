"""The watchdog: ends a job that hangs, names the rank that the others wait for, and saves all stacks.

It runs in the launcher, outside of the ranks, and reads the memory to which they write their heartbeats. It needs no
cooperation from a rank, which may be stopped or blocked in a call that lets none of its threads run. A process without
a launcher runs a watchdog in a thread of its own.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Protocol

from leyden.core.environment import is_interactive, is_running, with_variables
from leyden.core.errors import LeydenError
from leyden.launch.hangs import Hang, Sight
from leyden.launch.heartbeat import (
    AUTO,
    BATCHES,
    DEADLOCKS,
    EPOCH_BEGAN,
    EVALUATED,
    FIT_BEGAN,
    HEARTBEATS,
    LIMIT,
    MARKS,
    PHASE,
    PROCESS,
    STEP,
    Heartbeat,
    Phase,
    SharedSlots,
    Slot,
    slot_of_watchdog,
)
from leyden.launch.processes import descendants, processor_seconds, runs, started, status_of
from leyden.launch.stacks import Thread, ask

MIN_LIMIT = 60.0
"""Smallest adaptive limit of a training batch, in seconds."""
SLOWDOWN = 10
"""The adaptive limit, as a multiple of the slowest recent batch."""
RECENT_WAITS = 100
"""Number of recent waits that the adaptive limit considers."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
SUSPENDED_AFTER = 5.0
"""If the watchdog wakes this many seconds late, it was itself suspended."""
PEER_GRACE = 5.0
"""Seconds that a waiting rank gives the others to report the cause, if each rank runs its own watchdog."""
PHASE_FACTORS = {
    Phase.TRAINING: 1,
    Phase.EPOCH: 5,
    Phase.EVALUATION: 5,
    Phase.GOING_BACK: 5,
}
"""The limit of a phase, as a multiple of the given limit of a training batch."""
OTHER_FACTOR = 30
"""That multiple for all other phases. With an adaptive limit, that for every phase but training."""
UNLIMITED = (Phase.PREPARING, Phase.LOOP)
"""Phases without a limit, since they run user code of unknown length."""
IDLE = 0.02
"""A rank that waits uses less processor time than this, in seconds per second."""
IDLE_WINDOW = 5.0
"""Seconds over which processor time is measured. Each measurement that finds no hang doubles it."""
LOOP_PHASES = {Phase.FIRST, Phase.TRAINING, Phase.EPOCH, Phase.LOOP}
"""Phases of a user's own loop over prepared loaders."""
MAX_CHILDREN = 64
"""Number of child processes per rank whose stacks are read too."""


class Pulse:
    """A watchdog's record of one rank's heartbeat.

    Args:
        slot: the rank's slot.
        least: smallest adaptive limit of a training batch, in seconds.

    Attributes:
        since: time of the last progress, or of the last `forgive`.
    """

    def __init__(self, slot: Slot, least: float = MIN_LIMIT) -> None:
        self.slot, self._least = slot, least
        self.since = time.monotonic()
        self._seen: tuple[int, ...] = ()
        self._phase = Phase.OUTSIDE
        """The phase at the last look."""
        self._waits: dict[Phase, deque[float]] = {}

    @property
    def process(self) -> int:
        return self.slot.words[PROCESS]

    @property
    def is_alive(self) -> bool:
        """True if a run has begun in the slot and its process is alive."""
        process = self.process
        return process != 0 and is_running(process) and not self.state.startswith(("Z", "X"))

    @property
    def state(self) -> str:
        """State of the process in /proc. "" if unknown."""
        return status_of(self.process).get("State", "")

    @property
    def phase(self) -> Phase:
        words = self.slot.words
        phase = Phase(words[PHASE])
        if phase == Phase.TRAINING and words[BATCHES] - words[FIT_BEGAN] < 2:
            return Phase.FIRST
        # The first batch of an epoch waits for new workers.
        return Phase.EPOCH if phase == Phase.TRAINING and words[BATCHES] == words[EPOCH_BEGAN] else phase

    def look(self, now: float) -> bool:
        """Returns True if the rank made progress since the last look."""
        words = self.slot.words
        seen = tuple(words[number] for number in (PROCESS, BATCHES, STEP, MARKS, EVALUATED))
        if seen == self._seen:
            return False
        if seen[:1] != self._seen[:1]:
            self._waits.clear()
        else:
            self._waits.setdefault(self._phase, deque(maxlen=RECENT_WAITS)).append(now - self.since)
        self._seen, self._phase, self.since = seen, self.phase, now
        return True

    def forgive(self, now: float) -> None:
        """Restarts the clock."""
        self.since = now

    def limit(self, phase: Phase) -> float:
        """Returns how long a phase may go without progress, in seconds."""
        given = self.slot.words[LIMIT]
        if given > AUTO:
            return given / 1000 * PHASE_FACTORS.get(phase, OTHER_FACTOR)
        if phase in UNLIMITED or given == DEADLOCKS:
            # A download or tokenization can take arbitrarily long.
            return math.inf
        batch = self._adapted
        return (
            batch if phase == Phase.TRAINING else max(MIN_LIMIT * OTHER_FACTOR, batch, SLOWDOWN * self._slowest(phase))
        )

    @property
    def _adapted(self) -> float:
        """The adaptive limit of a training batch. Until the third one, only the timings of the first two are known."""
        return max(self._least, SLOWDOWN * (self._slowest(Phase.TRAINING) or self._slowest(Phase.FIRST)))

    @property
    def patience(self) -> float:
        """How long the rank of a user's loop may wait in a collective in which nobody can join it, in seconds."""
        return self._adapted if self.slot.words[LIMIT] == DEADLOCKS else self.limit(Phase.TRAINING)

    def _slowest(self, phase: Phase) -> float:
        """Returns the longest recent wait in a phase, in seconds. 0 before the first."""
        return max(self._waits.get(phase, ()), default=0.0)

    def is_overdue(self, now: float) -> bool:
        return now - self.since > self.limit(self.phase)


class Watchdog:
    """Watches the ranks that this process starts, or this process alone.

    Args:
        count: number of ranks.
        say: called once with each hang.
        ended: sentence that says which processes are terminated. "" to report hangs only.
        sees_all: False if the run has ranks on other machines, or in processes with watchdogs of their own. Those may
            compile, save or validate while these ranks wait for them.
    """

    def __init__(
        self, count: int, say: Callable[[Hang], None], ended: str = "All ranks were terminated.", sees_all: bool = True
    ) -> None:
        self._shared = SharedSlots(count)
        least = MIN_LIMIT if sees_all else MIN_LIMIT * OTHER_FACTOR
        self._pulses = [Pulse(slot, least) for slot in self._shared.slots]
        self._say, self._outcome, self._sees_all = say, ended, sees_all
        self._idle: tuple[float, float, dict[int, float]] = (0.0, 0.0, {})
        """When to measure processor time again, when it was measured, and the seconds of each process."""
        self._closed = threading.Event()
        self._ended: set[int] = set()
        self.hang: Hang | None = None
        """The last hang; None before the first."""
        self._thread = threading.Thread(target=self._watch, name="leyden-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(GRACE + 1)
        self._shared.close()

    @property
    def slot(self) -> Slot:
        """Slot of local rank 0."""
        return self._shared.slots[0]

    def variables(self) -> dict[str, str]:
        """Returns the environment variables for the ranks."""
        return {HEARTBEATS: self._shared.path}

    def has_ended(self, process: int) -> bool:
        """Returns True if the watchdog terminated this process in a hang."""
        return process in self._ended

    # the thread -------------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._closed.wait(self._pause()):
            now = time.monotonic()
            suspended, looked = now - looked > self._pause() + SUSPENDED_AFTER, now
            alive = [pulse for pulse in self._pulses if pulse.is_alive]
            for pulse in alive:
                pulse.look(now)
                if suspended:
                    pulse.forgive(now)
            if self._is_hung(alive, now):
                self._handle_hang(alive)
                looked = time.monotonic()

    def _pause(self) -> float:
        limits = [pulse.slot.words[LIMIT] / 1000 for pulse in self._pulses]
        return min(1.0, *(limit / 10 for limit in limits if limit > 0), 1.0)

    def _is_hung(self, alive: list[Pulse], now: float) -> bool:
        """Returns True if no rank makes progress: all have exceeded the limits of their phases, or some are stopped.

        So a rank that waits for another one to compile, save or validate gets the longer limit of that phase.
        """
        if not any(pulse.phase != Phase.OUTSIDE and pulse.is_overdue(now) for pulse in alive):
            return self._is_partly_stopped(alive, now) or self._is_deadlocked(alive, now)
        stopped = [pulse.state.startswith("T") for pulse in alive]
        if all(stopped):
            # The whole job is suspended, for example by Ctrl-Z.
            self._forgive(alive)
            return False
        return all(pulse.is_overdue(now) for pulse in alive) or self._is_deadlocked(alive, now)

    def _is_deadlocked(self, alive: list[Pulse], now: float) -> bool:
        """Returns True if all ranks wait for each other in a user's loop that has no limit, or none between two passes.

        It may run anything of unknown length. But if each rank is in a collective, and none uses the processor, there
        is nobody to wait for.
        """
        if not alive or not self._sees_all or len(self._pulses) < 2:
            return False
        phases = {pulse.phase for pulse in alive}
        is_loop = Phase.LOOP in phases or all(pulse.slot.words[LIMIT] == DEADLOCKS for pulse in alive)
        if not is_loop or not phases <= LOOP_PHASES:
            return False
        longest = max(pulse.patience for pulse in alive)
        if not all(now - pulse.since > longest for pulse in alive):
            self._idle = (0.0, 0.0, {})
            return False
        due, measured, before = self._idle
        if now < due:
            return False
        seconds = {pulse.process: processor_seconds(pulse.process) for pulse in alive}
        window = 2 * (now - measured) if before else IDLE_WINDOW
        self._idle = (now + window, now, seconds)
        if seconds.keys() != before.keys():
            return False
        # Not the negation: without /proc the difference is nan.
        if not all(seconds[process] - before[process] < IDLE * (now - measured) for process in seconds):
            return False
        return all(sight.collective for sight in self._inspect(alive))

    def _is_partly_stopped(self, alive: list[Pulse], now: float) -> bool:
        """Returns True if some but not all ranks are stopped, and none has progressed within a batch's limit."""
        if all(pulse.phase == Phase.OUTSIDE or pulse.phase in UNLIMITED for pulse in alive):
            return False
        if not all(now - pulse.since > pulse.limit(Phase.TRAINING) for pulse in alive):
            return False
        stopped = [pulse.state.startswith("T") for pulse in alive]
        if all(stopped):
            self._forgive(alive)
        return any(stopped) and not all(stopped)

    def _forgive(self, alive: list[Pulse]) -> None:
        now = time.monotonic()
        for pulse in alive:
            pulse.forgive(now)

    def _handle_hang(self, alive: list[Pulse]) -> None:
        """Inspects the ranks, and ends them unless a debugger has paused one or one makes progress again."""
        silent = max(time.monotonic() - pulse.since for pulse in alive)
        sights = self._inspect(alive)
        if any(sight.is_debugged for sight in sights) or _any_progress(alive):
            self._forgive(alive)
            return
        if self._closed.is_set():
            return
        self.hang = hang = Hang.reported(sights, silent, self._outcome, [pulse.slot.folder for pulse in alive])
        if self._outcome:
            self._terminate([pulse.process for pulse in alive], hang)
        else:
            self._say(hang)
            while not self._closed.wait(1.0) and not _any_progress(alive):
                pass

    def _inspect(self, alive: list[Pulse]) -> list[Sight]:
        """Collects each rank's words, process state and stacks, including those of its DataLoader workers."""
        processes = [pulse.process for pulse in alive]
        indices = map(self._pulses.index, alive)
        files = {process: self._shared.stacks[index] for process, index in zip(processes, indices, strict=True)}
        stacks = ask(files)
        inner = {process: descendants(process)[:MAX_CHILDREN] for process in files}
        of_children: dict[int, dict[int, list[Thread]]] = {process: {} for process in files}
        for turn in range(max(map(len, inner.values()), default=0)):
            # One child per rank at a time: all children of a rank append to the same file.
            asked = {children[turn]: process for process, children in inner.items() if turn < len(children)}
            for child, threads in ask({child: files[process] for child, process in asked.items()}).items():
                of_children[asked[child]][child] = threads
        return [
            Sight(
                pulse.slot.words.tolist(), pulse.phase, pulse.state, stacks.get(process), of_children.get(process, {})
            )
            for pulse, process in zip(alive, processes, strict=True)
        ]

    def _terminate(self, processes: list[int], hang: Hang) -> None:
        self._ended.update(processes)
        self._say(hang)
        known = {process: started(process) for rank in processes for process in (rank, *descendants(rank))}
        for process in processes:
            with suppress(OSError):
                os.kill(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and any(runs(process, known[process]) for process in processes):
            time.sleep(0.05)
        for process, start in known.items():
            if runs(process, start):
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)


def _any_progress(alive: list[Pulse]) -> bool:
    """Returns True if any rank made progress since the last look."""
    now = time.monotonic()
    return bool([pulse for pulse in alive if pulse.look(now)])


class WatchedRanks(Protocol):
    """What a watchdog asks of the run's ranks, which `strategies/ranks.py` implements."""

    @property
    def global_rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def report_failure(self, error: BaseException, where: str = "") -> bool:
        """Reports an error to the other ranks. Returns False if the error is a consequence of another rank's."""
        ...


class OwnWatchdog(Watchdog):
    """Watches its own process: a single one, or a rank of torchrun or srun, which no launcher of Leyden watches.

    It cannot see other ranks, and it cannot run while the process is stopped or a library holds the GIL. In a notebook
    and under pytest, where a user is watching, it only reports; and if the run is not in the main thread, because the
    process belongs to the program that started the thread, such as Ray.
    """

    def __init__(self, ranks: WatchedRanks) -> None:
        is_watched = is_interactive() or ("_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ)
        is_guest = threading.current_thread() is not threading.main_thread()
        ended = "" if is_watched or is_guest else "This process was terminated."
        super().__init__(1, say, ended, ranks.world_size == 1)
        self._ranks = ranks

    def _terminate(self, processes: list[int], hang: Hang) -> None:
        if hang.waits and self._ranks.world_size > 1 and self._closed.wait(PEER_GRACE):
            return
        # The other ranks exit on their own. Of those that only wait, one reports for all.
        if self._ranks.report_failure(LeydenError(str(hang))):
            self._say(hang)
        for process in descendants(os.getpid()):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@contextmanager
def watched(heartbeat: Heartbeat, ranks: WatchedRanks, hang_timeout: float | str | None, folder: str) -> Iterator[None]:
    """Puts the run under a watchdog for the block: the launcher's, or else one in a thread of this process.

    A run inside a hook of another run counts as part of it, and shares its limit unless it sets one.

    Args:
        heartbeat: the run's heartbeat.
        ranks: the run's ranks.
        hang_timeout: time limit of a training batch in seconds. "auto" for ten times the slowest recent one,
            "deadlocks" for no limit, so that a launcher ends only ranks that wait for each other, or None for no
            watchdog.
        folder: folder for reports of hangs.
    """
    slot = slot_of_watchdog(ranks.local_rank)
    is_nested = slot is not None and slot.beats_here
    if (hang_timeout is None and not is_nested) or (hang_timeout == "deadlocks" and (slot is None or is_nested)):
        yield
        return
    with ExitStack() as stack:
        if slot is None:
            watchdog = stack.enter_context(OwnWatchdog(ranks))
            slot = watchdog.slot
            # A run inside a hook of this one uses the same slot.
            stack.enter_context(with_variables(watchdog.variables()))
        if hang_timeout is None:
            limit = slot.words[LIMIT]
        else:
            words = {"auto": AUTO, "deadlocks": DEADLOCKS}
            limit = words[hang_timeout] if hang_timeout in words else max(1, round(float(hang_timeout) * 1000))
        stack.enter_context(heartbeat.beating(slot, ranks.global_rank, limit, folder))
        yield


def say(hang: Hang) -> None:
    """Prints a hang to stderr."""
    print(f"leyden: {hang}", file=sys.stderr, flush=True)
