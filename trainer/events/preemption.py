"""Preemption: what a run does when its machine is about to go away."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta

from leyden.strategies.errors import ConfigurationError

# Windows has no SIGUSR1.
USUAL = tuple(int(getattr(signal, name)) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
UNFIT = {
    **dict.fromkeys(("SIGKILL", "SIGSTOP"), "nothing can catch it"),
    **dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"), "it means a crash"),
    "SIGCHLD": "it reports the end of a loader's worker",
    "SIGINT": "it is Ctrl-C, which keeps its own meaning",
    "SIGURG": "the watchdog asks ranks for their stacks by it",
}
"""Signals that announce nothing, and why."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """How a run ends when it is preempted: it saves a checkpoint and exits with a status of its own.

    The run ends after the step under way; an evaluation ends after its batch. It saves before any other hook hears of
    the end. All ranks end at the same step, whichever of them received the signal. Further signals change nothing.
    A loop of your own under an Accelerator saves when `check_preemption` tells it to.

    Args:
        signals: the signals that announce it, as numbers or names such as "SIGUSR1"; one or several.
        grace_period: seconds from the signal to the end, or a timedelta. If the run is not saved by then, it ends all
            the same, with the same exit code, and the next start continues from the checkpoint before. None waits for
            the step and the save, however long they take.
        exit_code: the exit status. 75 is "try again" in sysexits.h.
        requeue: in a job of SLURM, hand it back to the queue with `scontrol requeue`. None does so after every signal
            but SIGTERM, with which `scancel` ends a job, and SLURM one that it requeues itself.
        should_preempt: called every `poll_every` seconds by one thread of each machine; once it returns True, the run
            is preempted. For clouds that announce the end of a spot machine at an address.
        poll_every: seconds between two calls.

    Raises:
        ConfigurationError: for a value that cannot be; names the fix.

    Example:
        >>> Preemption(signals="SIGUSR1", grace_period=90).signals
        (10,)
    """

    signals: int | str | Collection[int | str] = USUAL
    grace_period: float | timedelta | None = None
    exit_code: int = 75
    requeue: bool | None = None
    should_preempt: Callable[[], bool] | None = None
    poll_every: float = 5.0

    def __post_init__(self) -> None:
        given = [self.signals] if isinstance(self.signals, (int, str)) else list(self.signals)
        numbers = tuple(dict.fromkeys(_number(value) for value in given))
        if not numbers and self.should_preempt is None:
            raise ConfigurationError(
                "signals=() and no should_preempt: give one of them, or preemption=False in place of a Preemption."
            )
        grace = self.grace_period.total_seconds() if isinstance(self.grace_period, timedelta) else self.grace_period
        for name, value in (("grace_period", grace), ("poll_every", self.poll_every)):
            if not (value is None and name == "grace_period") and not _is_seconds(value):
                raise ConfigurationError(f"{name}={value!r}: use a number of seconds above 0.")
        if isinstance(self.exit_code, bool) or not isinstance(self.exit_code, int) or not 0 <= self.exit_code <= 255:
            raise ConfigurationError(f"exit_code={self.exit_code!r}: use a whole number from 0 to 255.")
        if self.requeue not in (None, True, False):
            raise ConfigurationError(f"requeue={self.requeue!r}: use True, False or None.")
        if self.should_preempt is not None and not callable(self.should_preempt):
            raise ConfigurationError(
                f"should_preempt={self.should_preempt!r}: give a function without arguments that returns True or False."
            )
        object.__setattr__(self, "signals", numbers)
        object.__setattr__(self, "grace_period", None if grace is None else float(grace))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The signals, as numbers."""
        assert isinstance(self.signals, tuple)
        return tuple(int(number) for number in self.signals)

    @property
    def grace(self) -> float | None:
        """The grace period in seconds."""
        assert not isinstance(self.grace_period, timedelta)
        return self.grace_period

    def requeues(self, number: int) -> bool:
        """True if a job that this signal has ended goes back to the queue."""
        return number != signal.SIGTERM if self.requeue is None else self.requeue


def wanted(value: object, resumes: bool) -> Preemption | None:
    """Reads the argument `preemption` of the Trainer or the Accelerator.

    Args:
        value: as it was given.
        resumes: the run continues when it is started again, which is what None goes by.

    Raises:
        ConfigurationError: for anything else.
    """
    if value not in (None, True, False) and not isinstance(value, Preemption):
        raise ConfigurationError(
            f"preemption={value!r}: use True, False, or Preemption(…) (from leyden.trainer import Preemption)."
        )
    if isinstance(value, Preemption):
        return value
    return Preemption() if value or (value is None and resumes) else None


def _number(value: object) -> int:
    """The number of a signal by number or name."""
    if isinstance(value, str):
        name = value.upper() if value.upper().startswith("SIG") else f"SIG{value.upper()}"
        found = getattr(signal.Signals, name, None)
    else:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        found = value if is_number and value in signal.valid_signals() else None
    if found is None:
        raise ConfigurationError(f"signals: {value!r} is no signal here: use names such as 'SIGUSR1', or numbers.")
    number = int(found)
    # Real-time signals have no name in the Enum.
    name = signal.Signals(number).name if number in list(signal.Signals) else ""
    if name in UNFIT:
        raise ConfigurationError(f"signals: {name} announces nothing: {UNFIT[name]}. Leave it out.")
    return number


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
