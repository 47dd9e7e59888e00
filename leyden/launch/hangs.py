"""The report of a hang: which rank the others wait for, where each rank is, and a file with all stacks."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from leyden.core.environment import ranks_in_words
from leyden.launch.heartbeat import BATCHES, EPOCH, EPOCH_BEGAN, PROCESS, RANK, STEP, THREAD, Phase
from leyden.launch.processes import status_of
from leyden.launch.stacks import Thread, lines_of

PHASES = {
    Phase.OUTSIDE: "outside of a run",
    Phase.SETUP: "in setup",
    Phase.FIRST: "in the first batches",
    Phase.TRAINING: "in training",
    Phase.EPOCH: "between two epochs",
    Phase.EVALUATION: "in an evaluation",
    Phase.SAVING: "saving a checkpoint",
    Phase.COMPILING: "compiling",
    Phase.ENDING: "ending the run",
    Phase.PREPARING: "preparing data and model",
    Phase.GOING_BACK: "going back to a checkpoint",
    Phase.LOOP: "between two passes over its loaders",
}

MAX_TASKS = 4
"""Number of busy workers of a loader that a message names. The loader waits for one of them."""


@dataclass(frozen=True, slots=True)
class Sight:
    """A watchdog's findings about one rank.

    Attributes:
        words: the words of its slot.
        phase: its phase.
        state: state of its process, from /proc.
        threads: its threads' stacks. None if it did not answer.
        children: the stacks of its child processes, by process ID.
    """

    words: Sequence[int]
    phase: Phase
    state: str
    threads: Sequence[Thread] | None
    children: Mapping[int, Sequence[Thread]] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.words[RANK]

    @property
    def process(self) -> int:
        return self.words[PROCESS]

    @property
    def main(self) -> Thread | None:
        """The main thread, or None if the rank did not answer."""
        threads = self.threads or ()
        return next((thread for thread in threads if thread.ident == self.words[THREAD]), next(iter(threads), None))

    @property
    def is_stopped(self) -> bool:
        return self.state.startswith("T")

    @property
    def is_debugged(self) -> bool:
        """True if a debugger has paused it, inside Python or attached from outside."""
        tracer = status_of(self.process).get("TracerPid", "0")
        return tracer != "0" or any(thread.is_debugged for thread in self.threads or ())

    @property
    def collective(self) -> str:
        return self.main.collective if self.main is not None else ""

    @property
    def where(self) -> str:
        """Step, epoch, batch and phase, for a message."""
        batch = self.words[BATCHES] - self.words[EPOCH_BEGAN]
        return f"step {self.words[STEP]} (epoch {self.words[EPOCH]}, batch {batch}), {PHASES[self.phase]}"

    def words_for(self) -> str:
        """Describes what the rank is doing, in words that follow "rank 3, at step 7, "."""
        if self.is_stopped:
            return f"is stopped (state {self.state} in /proc: something sent it SIGSTOP; SIGCONT resumes it)"
        main = self.main
        if main is None:
            return f"does not answer{f' (state {self.state} in /proc)' if self.state else ''}"
        if main.collective:
            return f"waits for the others in {main.collective}, {main.place}"
        if main.loads:
            loads = [(process, thread.load) for process, threads in self.children.items() for thread in threads]
            tasks = [f"(process {process}) is {place}" for process, place in loads if place is not None]
            if tasks:
                return f"waits for its loader, whose worker {', and worker '.join(tasks[:MAX_TASKS])}"
        return f"is {main.place}"


@dataclass(frozen=True, slots=True)
class Hang:
    """A job that has stopped making progress.

    Attributes:
        sights: the findings about its ranks on this machine.
        seconds: time without progress.
        ended: sentence that says which processes are terminated. "" if the hang is only reported.
        file: the report with all stacks. None if it could not be written.
    """

    sights: Sequence[Sight]
    seconds: float
    ended: str
    file: Path | None = None

    @classmethod
    def reported(cls, sights: Sequence[Sight], seconds: float, ended: str, folders: Sequence[str]) -> Hang:
        """Creates a hang and writes its report to the first writable folder."""
        hang = cls(sights, seconds, ended)
        return replace(hang, file=report(hang, folders))

    @property
    def odd(self) -> list[Sight]:
        """The ranks that the others wait for. Empty if all ranks wait, and all of them if it cannot be determined."""
        sights = self.sights
        foremost = max(sight.words[BATCHES] for sight in sights)
        places = [(sight.collective, str(sight.main.place if sight.main is not None else "")) for sight in sights]
        usual = max(places, key=places.count)
        unusual = [sight for sight, place in zip(sights, places, strict=True) if place != usual]
        for kind in (
            [sight for sight in sights if sight.is_stopped],
            [sight for sight in sights if sight.threads is None],
            [sight for sight in sights if not sight.collective],
            [sight for sight in sights if sight.words[BATCHES] < foremost],
            unusual if 2 * len(unusual) < len(sights) else [],
        ):
            if 0 < len(kind) < len(sights):
                return kind
        return [] if all(sight.collective for sight in sights) else list(sights)

    @property
    def waits(self) -> bool:
        """True if every rank on this machine waits for a rank elsewhere."""
        return not self.odd

    def __str__(self) -> str:
        odd = self.odd
        others = [sight for sight in self.sights if sight not in odd]
        parts = [f"rank {sight.rank}, at {sight.where}, {sight.words_for()}" for sight in odd[:4]]
        if len(odd) > 4:
            parts.append(f"{ranks_in_words([sight.rank for sight in odd[4:]])} likewise")
        crossed = not odd and len({sight.collective for sight in others}) > 1
        parts += _waiting(others, for_somebody=bool(odd), names_lines=crossed)
        if crossed:
            parts.append("they wait for each other in different collectives")
        elif not odd:
            parts.append("the cause is not on this machine: a rank elsewhere is stopped or has gone")
        file = f"Every stack is in {self.file}." if self.file is not None else ""
        said = f"no progress for {self.seconds:.0f} s (hang_timeout): {'; '.join(parts)}."
        return " ".join(part for part in (said, self.ended, file) if part)


def _waiting(sights: Sequence[Sight], for_somebody: bool, names_lines: bool) -> Iterator[str]:
    """Describes which ranks wait and in which collective. If it is unknown for whom, adds their step.

    `for_somebody` is True if the message has named whom they wait for. `names_lines` adds the line at which the first
    rank in each collective waits.
    """
    for collective in dict.fromkeys(sight.collective for sight in sights):
        alike = [sight for sight in sights if sight.collective == collective]
        wait = "wait" if len(alike) > 1 else "waits"
        place = f" in {collective}" if collective else ""
        rest = f" for it{place}" if for_somebody else f"{place}, at {alike[0].where}"
        main = alike[0].main
        if names_lines and main is not None:
            rest += f", {main.place}"
        yield f"{ranks_in_words([sight.rank for sight in alike])} {wait}{rest}"


def report(hang: Hang, folders: Sequence[str]) -> Path | None:
    """Writes the report of a hang to the first of the runs' folders that is writable, or to the temporary folder.

    Returns:
        Path of the report, or None if it could not be written.
    """
    name = f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{platform.node() or 'host'}-{os.getpid()}.txt"
    text = "\n".join(_lines(hang)) + "\n"
    for folder in (*dict.fromkeys(folder for folder in folders if folder), tempfile.gettempdir()):
        with suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8")
            return path
    return None


def _lines(hang: Hang) -> list[str]:
    lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S %z')} on {platform.node()}", str(hang), ""]
    for sight in hang.sights:
        lines += [f"rank {sight.rank} (process {sight.process}), at {sight.where}, {sight.words_for()}", ""]
        lines += _proc_lines(sight)
        main = sight.main
        if main is not None:
            lines += ["  main thread:", *lines_of(main)]
        for thread in sight.threads or ():
            if thread is not main:
                lines += [f"  thread 0x{thread.ident:x}:", *lines_of(thread)]
        for process, threads in sight.children.items():
            for thread in threads:
                lines += [f"  its process {process}, thread 0x{thread.ident:x}:", *lines_of(thread)]
        lines.append("")
    return lines


def _proc_lines(sight: Sight) -> list[str]:
    """Returns the kernel's view of the process: its state, and what it waits for."""
    found = [f"  state {sight.state}"] if sight.state else []
    for name in ("wchan", "syscall", "stack"):
        with suppress(OSError):
            text = Path(f"/proc/{sight.process}/{name}").read_text().strip()
            found += [f"  {name} {line}" for line in text.splitlines() if line.strip() not in ("", "0")]
    return found
