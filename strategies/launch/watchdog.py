"""The watchdog: ends a job that makes no progress, names the rank that the others wait for, and writes all stacks down.

It runs beside the ranks, in the process that started them, and looks at the memory in which they store their signs of
life. So it needs nothing of a rank, which may be stopped, or wait where no thread of it can run. A process that nobody
started has one in a thread of its own.
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
from datetime import timedelta
from typing import TYPE_CHECKING

from leyden.strategies.errors import ConfigurationError, LeydenError
from leyden.strategies.launch.environment import is_interactive, is_running, with_variables
from leyden.strategies.launch.hangs import Hang, Sight
from leyden.strategies.launch.heartbeat import (
    AUTO,
    BATCHES,
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
from leyden.strategies.launch.processes import descendants, runs, started, status_of
from leyden.strategies.launch.stacks import Thread, ask

if TYPE_CHECKING:
    from leyden.strategies.ranks import Ranks

LEAST = 60.0
"""Seconds that a training batch may take at least, where the limit follows the slowest."""
TIMES = 10
"""How many times as long as the slowest recent batch it may take."""
LATE = 100
"""How many of the last waits count as recent."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
ASLEEP = 5.0
"""A look that comes this many seconds too late means that this process itself was suspended."""
OTHERS = 5.0
"""Seconds that a waiting rank leaves the others to report themselves, where each has a watchdog of its own."""
LONGER = {
    Phase.TRAINING: 1,
    Phase.EPOCH: 5,
    Phase.EVALUATION: 5,
    Phase.GOING_BACK: 5,
}
"""How many times a given limit, which is that of a training batch, a phase may take."""
LONGEST = 30
"""The same of all other phases; and of all but training, where the limit follows the slowest batch."""
AT_LEISURE = (Phase.PREPARING, Phase.LOOP)
"""Phases of which nobody but the user knows how long they take."""
MOST_CHILDREN = 8
"""Processes that a rank has started, whose stacks are read too."""


class Pulse:
    """What a watchdog has seen of one rank.

    Args:
        slot: of the rank.
        least: seconds that a training batch may take at least, where the limit follows the slowest.

    Attributes:
        since: when it last stored something new, or was forgiven that it did not.
    """

    def __init__(self, slot: Slot, least: float = LEAST) -> None:
        self.slot, self._least = slot, least
        self.since = time.monotonic()
        self._seen: tuple[int, ...] = ()
        self._phase = Phase.OUTSIDE
        """Of the last look."""
        self._waits: dict[Phase, deque[float]] = {}

    @property
    def process(self) -> int:
        return self.slot.words[PROCESS]

    @property
    def is_there(self) -> bool:
        """True if a run has begun in it, and its process lives."""
        process = self.process
        return process != 0 and is_running(process) and not self.state.startswith(("Z", "X"))

    @property
    def state(self) -> str:
        """The state of its process as /proc has it; "" where there is none."""
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
        """True if it has stored something new since the last look."""
        words = self.slot.words
        seen = tuple(words[number] for number in (PROCESS, BATCHES, STEP, MARKS, EVALUATED))
        if seen == self._seen:
            return False
        if seen[:1] != self._seen[:1]:
            self._waits.clear()
        else:
            self._waits.setdefault(self._phase, deque(maxlen=LATE)).append(now - self.since)
        self._seen, self._phase, self.since = seen, self.phase, now
        return True

    def forgive(self, now: float) -> None:
        """Counts the time without a sign of life from now."""
        self.since = now

    def limit(self, phase: Phase) -> float:
        """Seconds without a sign of life that are too many."""
        given = self.slot.words[LIMIT]
        if given != AUTO:
            return given / 1000 * LONGER.get(phase, LONGEST)
        if phase in AT_LEISURE:
            # A download or a tokenisation takes as long as it takes.
            return math.inf
        # Before the third batch is done, the first two are all that is known of batches.
        batch = max(self._least, TIMES * (self._slowest(Phase.TRAINING) or self._slowest(Phase.FIRST)))
        return batch if phase == Phase.TRAINING else max(LEAST * LONGEST, batch, TIMES * self._slowest(phase))

    def _slowest(self, phase: Phase) -> float:
        """Seconds of the longest recent wait in a phase; 0 before the first."""
        return max(self._waits.get(phase, ()), default=0.0)

    def is_overdue(self, now: float) -> bool:
        return now - self.since > self.limit(self.phase)


class Watchdog:
    """Watches the ranks that this process starts, or this process alone.

    Args:
        count: ranks.
        say: called with what happened, once for each hang.
        ended: says what is ended then; "" if a hang is only reported.
        sees_all: the run has no other ranks. Those of another machine or process may compile, save or validate while
            these wait for them.
    """

    def __init__(
        self, count: int, say: Callable[[Hang], None], ended: str = "All ranks are ended.", sees_all: bool = True
    ) -> None:
        self._shared = SharedSlots(count)
        least = LEAST if sees_all else LEAST * LONGEST
        self._pulses = [Pulse(slot, least) for slot in self._shared.slots]
        self._say, self._words = say, ended
        self._over = threading.Event()
        self._ended: set[int] = set()
        self.hang: Hang | None = None
        """The last one that was found."""
        self._thread = threading.Thread(target=self._watch, name="leyden-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(GRACE + 1)
        self._shared.close()

    @property
    def slot(self) -> Slot:
        """The slot of the first rank."""
        return self._shared.slots[0]

    def variables(self) -> dict[str, str]:
        """The environment variables of the ranks."""
        return {HEARTBEATS: self._shared.path}

    def has_ended(self, process: int) -> bool:
        """True if it has ended this process, since it hung or waited for one that did."""
        return process in self._ended

    # the thread -------------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(self._pause()):
            now = time.monotonic()
            suspended, looked = now - looked > self._pause() + ASLEEP, now
            there = [pulse for pulse in self._pulses if pulse.is_there]
            for pulse in there:
                pulse.look(now)
                if suspended:
                    pulse.forgive(now)
            if self._hangs(there, now):
                self._judge(there)
                looked = time.monotonic()

    def _pause(self) -> float:
        limits = [pulse.slot.words[LIMIT] / 1000 for pulse in self._pulses]
        return min(1.0, *(limit / 10 for limit in limits if limit > 0), 1.0)

    def _hangs(self, there: list[Pulse], now: float) -> bool:
        """True if no rank makes progress, and at least one of them should have.

        A rank that waits for one that compiles, saves or validates has the same patience as that one.
        """
        if not any(pulse.phase != Phase.OUTSIDE and pulse.is_overdue(now) for pulse in there):
            return self._has_stopped(there, now)
        stopped = [pulse.state.startswith("T") for pulse in there]
        if all(stopped):
            # The job is suspended, as by Ctrl-Z.
            self._forgive(there)
            return False
        return all(pulse.is_overdue(now) for pulse in there)

    def _has_stopped(self, there: list[Pulse], now: float) -> bool:
        """True if some rank is stopped, and nobody has done anything for as long as a training batch may take."""
        if all(pulse.phase == Phase.OUTSIDE or pulse.phase in AT_LEISURE for pulse in there):
            return False
        if not all(now - pulse.since > pulse.limit(Phase.TRAINING) for pulse in there):
            return False
        stopped = [pulse.state.startswith("T") for pulse in there]
        if all(stopped):
            self._forgive(there)
        return any(stopped) and not all(stopped)

    def _forgive(self, there: list[Pulse]) -> None:
        now = time.monotonic()
        for pulse in there:
            pulse.forgive(now)

    def _judge(self, there: list[Pulse]) -> None:
        """Looks at the ranks themselves; ends them unless a debugger holds one, or one goes on."""
        silent = max(time.monotonic() - pulse.since for pulse in there)
        sights = self._sights(there)
        if any(sight.is_debugged for sight in sights) or _go_on(there):
            self._forgive(there)
            return
        if self._over.is_set():
            return
        self.hang = hang = Hang.reported(sights, silent, self._words, [pulse.slot.folder for pulse in there])
        if self._words:
            self._end([pulse.process for pulse in there], hang)
        else:
            self._say(hang)
            while not self._over.wait(1.0) and not _go_on(there):
                pass

    def _sights(self, there: list[Pulse]) -> list[Sight]:
        """What is known of each rank: words, state and stacks, those of its loader's workers with it."""
        processes = [pulse.process for pulse in there]
        indices = map(self._pulses.index, there)
        files = {process: self._shared.stacks[index] for process, index in zip(processes, indices, strict=True)}
        stacks = ask(files)
        inner = {process: descendants(process)[:MOST_CHILDREN] for process in files}
        of_children: dict[int, dict[int, list[Thread]]] = {process: {} for process in files}
        for turn in range(max(map(len, inner.values()), default=0)):
            # One of each rank at a time: those of one rank write to the same file.
            asked = {children[turn]: process for process, children in inner.items() if turn < len(children)}
            for child, threads in ask({child: files[process] for child, process in asked.items()}).items():
                of_children[asked[child]][child] = threads
        return [
            Sight(
                pulse.slot.words.tolist(), pulse.phase, pulse.state, stacks.get(process), of_children.get(process, {})
            )
            for pulse, process in zip(there, processes, strict=True)
        ]

    def _end(self, processes: list[int], hang: Hang) -> None:
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


def _go_on(there: list[Pulse]) -> bool:
    """True if some rank has done something since the last look."""
    now = time.monotonic()
    return bool([pulse for pulse in there if pulse.look(now)])


class OwnWatchdog(Watchdog):
    """Watches this process, which nobody who watches it has started: a single one, or a rank of torchrun or srun.

    It cannot see other ranks, nor itself while it is stopped or a library holds the GIL. Where a person sits before the
    process, in a notebook or under pytest, it only reports.

    Args:
        ranks: of the run.
    """

    def __init__(self, ranks: Ranks) -> None:
        is_watched = is_interactive() or ("_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ)
        super().__init__(1, say, "" if is_watched else "This process is ended.", ranks.world_size == 1)
        self._ranks = ranks

    def _end(self, processes: list[int], hang: Hang) -> None:
        if hang.waits and self._ranks.world_size > 1 and self._over.wait(OTHERS):
            return
        # The others leave by themselves, and one of those that only wait says so for all.
        if self._ranks.report_failure(LeydenError(str(hang))):
            self._say(hang)
        for process in descendants(os.getpid()):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@contextmanager
def watched(heartbeat: Heartbeat, ranks: Ranks, hang_timeout: float | str | None, folder: str) -> Iterator[None]:
    """Has the run watched, by the process that started this rank, or else by a thread of this one.

    A run within a hook of another one is a part of that one, whose limit holds unless it has its own.

    Args:
        heartbeat: of the run.
        ranks: of the run.
        hang_timeout: seconds that a training batch may take; "auto" for ten times the slowest recent one, or None.
        folder: where a report is wanted.
    """
    slot = slot_of_watchdog(ranks.local_rank)
    if hang_timeout is None and (slot is None or not slot.beats_here):
        yield
        return
    with ExitStack() as stack:
        if slot is None:
            watchdog = stack.enter_context(OwnWatchdog(ranks))
            slot = watchdog.slot
            # A run within a hook of this one beats in the same slot.
            stack.enter_context(with_variables(watchdog.variables()))
        if hang_timeout is None:
            limit = slot.words[LIMIT]
        else:
            limit = AUTO if hang_timeout == "auto" else max(1, round(float(hang_timeout) * 1000))
        stack.enter_context(heartbeat.beating(slot, ranks.global_rank, limit, folder))
        yield


def hang_limit(value: object) -> float | str | None:
    """Reads `hang_timeout`: seconds, "auto", or None for no watchdog.

    Raises:
        ConfigurationError: for anything else.
    """
    if value is None or value is False:
        return None
    if value is True or value == "auto":
        return "auto"
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, (int, float)) and 0 < seconds < math.inf:
        return float(seconds)
    raise ConfigurationError(
        f"hang_timeout={value!r}: use a number of seconds above 0, a timedelta, 'auto', or None for no watchdog."
    )


def say(hang: Hang) -> None:
    """Prints what happened."""
    print(f"leyden: {hang}", file=sys.stderr, flush=True)
