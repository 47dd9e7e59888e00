"""The limits of a fit: maximum epochs, steps and seconds, and the minimum before `should_stop` takes effect."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from leyden.core.errors import ConfigurationError
from leyden.trainer.starting.build import seconds_of

if TYPE_CHECKING:
    from leyden.callbacks.gradient_accumulation import GradientAccumulation
    from leyden.trainer.arguments.arguments import Arguments
    from leyden.trainer.events.progress import Progress


class FitLimits:
    """The limits of a fit, available as `trainer.fit_loop`, where Lightning's users set them.

    Values set here apply to the current run and all later ones. Values passed to `fit` apply to that fit only.

    Args:
        arguments: the Trainer's arguments.

    Example:
        >>> from leyden import Trainer
        >>> trainer = Trainer(max_epochs=3, accelerator="cpu", logger=False)
        >>> trainer.fit_loop.max_epochs = 10
        >>> trainer.max_epochs
        10
    """

    def __init__(self, arguments: Arguments) -> None:
        self._lasting = (arguments.max_epochs, arguments.max_steps)
        """The `max_epochs` and `max_steps` that later fits begin with."""
        self._max_epochs, self._max_steps = self._lasting
        self._min_epochs, self._min_steps = arguments.min_epochs, arguments.min_steps
        self.max_seconds = seconds_of(arguments.max_time)
        """Seconds of training after which a fit ends; None for no limit."""
        self._skips_training = arguments.limit_train_batches == 0

    def begin(self, max_epochs: int | None, max_steps: int | None) -> None:
        """Begins a fit, with limits for this fit only; None keeps the Trainer's."""
        for name, value in (("max_epochs", max_epochs), ("max_steps", max_steps)):
            if value is not None:
                _check(f"fit({name}={value!r})", value, -1)
        epochs, steps = self._lasting
        self._max_epochs = epochs if max_epochs is None else max_epochs
        self._max_steps = steps if max_steps is None else max_steps

    @property
    def max_epochs(self) -> int:
        """Epochs after which a fit ends. If it was not set: -1 if another limit ends the fit, otherwise 1000."""
        if self._max_epochs is not None:
            return self._max_epochs
        return 1000 if self._max_steps == -1 and self.max_seconds is None else -1

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        if value is not None:
            _check(f"max_epochs={value!r}", value, -1)
        self._max_epochs, self._lasting = value, (value, self._lasting[1])

    @property
    def max_steps(self) -> int:
        """Optimizer steps after which a fit ends; -1 for no limit."""
        return self._max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        _check(f"max_steps={value!r}", value, -1)
        self._max_steps, self._lasting = value, (self._lasting[0], value)

    @property
    def min_epochs(self) -> int | None:
        """Epochs before which `should_stop` has no effect."""
        return self._min_epochs

    @min_epochs.setter
    def min_epochs(self, value: int | None) -> None:
        if value is not None:
            _check(f"min_epochs={value!r}", value, 0)
        self._min_epochs = value

    @property
    def min_steps(self) -> int | None:
        """Optimizer steps before which `should_stop` has no effect."""
        return self._min_steps

    @min_steps.setter
    def min_steps(self, value: int | None) -> None:
        if value is not None:
            _check(f"min_steps={value!r}", value, 0)
        self._min_steps = value

    def epochs_reached(self, epochs: int) -> bool:
        """Returns True if this number of epochs reaches `max_epochs`."""
        return self.max_epochs != -1 and epochs >= self.max_epochs

    def reached(self, progress: Progress) -> list[str]:
        """Returns the limits that a fit has reached, in the form `max_epochs=3`."""
        epochs = [f"max_epochs={self.max_epochs}"] if self.epochs_reached(progress.epochs_done) else []
        steps = [f"max_steps={self._max_steps}"] if 0 <= self._max_steps <= progress.global_step else []
        return epochs + steps

    def reason(self, progress: Progress, should_stop: bool) -> str:
        """Returns the reason why a fit ended, in a few words."""
        if self._skips_training:
            return "limit_train_batches=0 skips training"
        reached = self.reached(progress)
        if reached:
            return f"{reached[-1]} reached"
        return "stopped early (should_stop)" if should_stop else "max_time reached"

    def estimated_steps(
        self, num_batches: int | None, accumulation: GradientAccumulation | None, samples: int | None = None
    ) -> float:
        """Returns the number of optimizer steps of the whole fit; inf if it has no limit.

        Args:
            num_batches: the batches in an epoch; None if the loader has no length.
            accumulation: the callback that sets the batches per step; None for one batch per step.
            samples: the samples in one batch of all ranks together; None if unknown.
        """
        limit = self._max_steps if self._max_steps != -1 else float("inf")
        epochs = self.max_epochs
        if epochs == -1 or num_batches is None:
            return limit
        if accumulation is None:
            return min(limit, epochs * num_batches)
        if accumulation.by == "step":
            return min(limit, _steps_by_step(epochs, num_batches, accumulation, samples))
        return min(limit, sum(math.ceil(num_batches / accumulation.batches(at, samples)) for at in range(epochs)))

    def past_minimum(self, epochs: int, steps: int) -> bool:
        """Returns True if `should_stop` takes effect after this number of epochs and steps."""
        return epochs >= (self._min_epochs or 0) and steps >= (self._min_steps or 0)


def _steps_by_step(epochs: int, num_batches: int, accumulation: GradientAccumulation, samples: int | None) -> int:
    """Counts the steps of a number of epochs, in jumps from one change of the schedule to the next."""
    changes, steps = [*accumulation.scheduling][1:], 0
    for epoch in range(epochs):
        remaining = num_batches
        while changes:
            length = accumulation.batches(steps, samples)
            jump = min(math.ceil(remaining / length), changes[0] - steps)
            steps, remaining = steps + jump, remaining - jump * length
            if steps == changes[0]:
                del changes[0]
            if remaining <= 0:
                break
        else:
            # The schedule is exhausted: its last length applies to the rest of this epoch and to all later ones.
            length = accumulation.batches(steps, samples)
            return steps + math.ceil(remaining / length) + (epochs - epoch - 1) * math.ceil(num_batches / length)
    return steps


def _check(what: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        end = ", where -1 means no limit" if least == -1 else ""
        raise ConfigurationError(f"{what}: use a whole number from {least}{end}.")
