"""Preemption: how a run ends when its machine is about to go away."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta

from leyden.core.environment import is_submitit_task, submitit_signal
from leyden.core.errors import ConfigurationError

# Windows has no SIGUSR1.
DEFAULT_SIGNALS = tuple(int(getattr(signal, name)) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
UNSUITABLE = {
    **dict.fromkeys(("SIGKILL", "SIGSTOP"), "no process can catch it"),
    **dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"), "it signals a crash"),
    "SIGCHLD": "it reports the exit of a loader worker",
    "SIGINT": "it is Ctrl-C, which keeps its own meaning",
    "SIGURG": "the watchdog uses it to ask ranks for their stacks",
}
"""Signals that cannot announce a preemption, and why."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """How a run ends when it is preempted: it saves a checkpoint and exits with a dedicated status.

    The run ends after the current step; an evaluation ends after its current batch. It saves before any other hook
    learns of the end. All ranks end at the same step, whichever of them received the signal. Further signals are
    ignored. Under an Accelerator, your own loop saves when `check_preemption` tells it to.

    Args:
        signals: one or several signals that announce the preemption, as numbers or names such as "SIGUSR1". In a job of
            submitit, its signal is added, and the default leaves SIGTERM to submitit, which ignores it.
        grace_period: time from the signal to the end, in seconds or as a timedelta. If the run is not saved by then, it
            ends anyway, with the same exit code, and the next start continues from the previous checkpoint. None waits
            for the step and the save without a limit.
        exit_code: the exit status. 75 means "try again" in sysexits.h.
        requeue: whether to requeue a SLURM job with `scontrol requeue`. None requeues after every signal except
            SIGTERM: `scancel` sends SIGTERM to end a job, and so does SLURM before it requeues a job itself. A job of
            submitit is requeued by submitit.
        should_preempt: a function called every `poll_every` seconds by one thread on each machine. Once it returns
            True, the run is preempted. For clouds that announce the end of a spot machine at an address.
        poll_every: seconds between two calls of `should_preempt`.

    Raises:
        ConfigurationError: if a value is invalid; the message names the fix.

    Example:
        >>> Preemption(signals="SIGUSR1", grace_period=90).signals
        (10,)
    """

    signals: int | str | Collection[int | str] = DEFAULT_SIGNALS
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
                "signals=() without should_preempt never preempts. Set one of them, or use preemption=False."
            )
        grace = self.grace_period.total_seconds() if isinstance(self.grace_period, timedelta) else self.grace_period
        durations = {} if grace is None else {"grace_period": grace}
        for name, value in {**durations, "poll_every": self.poll_every}.items():
            if not _is_seconds(value):
                raise ConfigurationError(f"{name}={value!r}: use a number of seconds above 0.")
        if isinstance(self.exit_code, bool) or not isinstance(self.exit_code, int) or not 0 <= self.exit_code <= 255:
            raise ConfigurationError(f"exit_code={self.exit_code!r}: use a whole number from 0 to 255.")
        if self.requeue not in (None, True, False):
            raise ConfigurationError(f"requeue={self.requeue!r}: use True, False or None.")
        if self.should_preempt is not None and not callable(self.should_preempt):
            raise ConfigurationError(
                f"should_preempt={self.should_preempt!r}: use a function without arguments that returns True or False."
            )
        object.__setattr__(self, "signals", numbers)
        object.__setattr__(self, "grace_period", None if grace is None else float(grace))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The signals, as numbers, in this process."""
        assert isinstance(self.signals, tuple)
        numbers, submitits = [int(number) for number in self.signals], submitit_signal()
        if submitits is not None:
            numbers.append(submitits)
            if self.signals == DEFAULT_SIGNALS and is_submitit_task():
                numbers.remove(signal.SIGTERM)
        return tuple(dict.fromkeys(numbers))

    @property
    def grace(self) -> float | None:
        """The grace period in seconds."""
        assert not isinstance(self.grace_period, timedelta)
        return self.grace_period

    def requeues(self, number: int) -> bool:
        """Returns True if a job that ends on this signal is requeued."""
        if self.requeue is None:
            # submitit may be told to use SIGTERM itself.
            return number != signal.SIGTERM or number == submitit_signal()
        return self.requeue


def preemption_from(value: object, resumes: bool) -> Preemption | None:
    """Returns the Preemption for the `preemption` argument of a Trainer or Accelerator; None if it is off.

    Args:
        value: the argument: a Preemption, True, False or None.
        resumes: whether a restart continues the run. This is the default if `value` is None.

    Raises:
        ConfigurationError: if `value` is anything else.
    """
    if value not in (None, True, False) and not isinstance(value, Preemption):
        raise ConfigurationError(
            f"preemption={value!r}: use True, False, or Preemption(…) (from leyden.trainer import Preemption)."
        )
    if isinstance(value, Preemption):
        return value
    return Preemption() if value or (value is None and resumes) else None


def _number(value: object) -> int:
    """Returns the number of a signal given by number or name."""
    if isinstance(value, str):
        name = value.upper() if value.upper().startswith("SIG") else f"SIG{value.upper()}"
        found = getattr(signal.Signals, name, None)
    else:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        found = value if is_number and value in signal.valid_signals() else None
    if found is None:
        raise ConfigurationError(
            f"signals: {value!r} is not a signal on this platform. Use names such as 'SIGUSR1', or numbers."
        )
    number = int(found)
    # Real-time signals have no name in the Enum.
    name = signal.Signals(number).name if number in list(signal.Signals) else ""
    if name in UNSUITABLE:
        raise ConfigurationError(f"signals: {name} cannot announce a preemption: {UNSUITABLE[name]}. Leave it out.")
    return number


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
