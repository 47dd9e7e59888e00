"""Callbacks that set how many batches make one optimizer step, or in how many parts a batch is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from leyden.callbacks.base import Callback
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.saved_state import SavedState
from leyden.trainer.arguments.checks import check_choice, check_flags, check_whole

if TYPE_CHECKING:
    from leyden.trainer.events.progress import Progress

BY = ("epoch", "step")


class GradientAccumulation(Callback):
    """Sets the length of accumulation windows, by epoch or by step; the engine counts the batches.

    The last window of an epoch takes the batches that are left, and its gradient is divided by that true length.

    Args:
        steps: batches per optimizer step, or a schedule {epoch: batches}, each from that epoch on (counted from 0).
            Epochs before the first one take one batch per step.
        by: "step" for a schedule {global step: batches}: each from the window after so many steps on.

    Raises:
        ConfigurationError: if `steps` is of another type, empty, or has an epoch below 0 or a length below 1; for an
            unknown `by`.

    Example:
        >>> accumulation = GradientAccumulation({2: 4, 8: 16})
        >>> [accumulation.length(epoch) for epoch in (0, 2, 7, 8, 100)]
        [1, 4, 4, 16, 16]
    """

    counts_samples: ClassVar[bool] = False
    """The lengths of its windows are samples, so that they are known in batches once the loader is there."""
    cuts_batches: ClassVar[bool] = False
    """A batch that does not fit into memory is cut, so that none is too large."""

    def __init__(self, steps: int | Mapping[int, int], by: Literal["epoch", "step"] = "epoch") -> None:
        name = type(self).__name__
        check_choice(name, BY, by=by)
        self.by = by
        schedule = {0: steps} if not isinstance(steps, Mapping) else dict(steps)
        if not schedule:
            raise ConfigurationError(f"{name} got an empty schedule: write {{0: 4}}, for example, or a number.")
        for epoch, length in schedule.items():
            if not _is_whole(epoch) or epoch < 0:
                raise ConfigurationError(
                    f"{name}: {epoch!r} is not {'an epoch' if by == 'epoch' else 'a step'}. "
                    f"{by.capitalize()}s are whole numbers from 0, as in {{0: 4}}."
                )
            if not _is_whole(length) or length < 1:
                raise ConfigurationError(f"{name}: {length!r} is not a number of batches. Give a whole number from 1.")
        self.scheduling: dict[int, int] = dict(sorted({0: 1, **schedule}.items()))

    @property
    def longest(self) -> int:
        """The longest window in any epoch, in batches."""
        return max(self.scheduling.values())

    def length(self, epoch: int) -> int:
        """Returns the batches per window in an epoch.

        Args:
            epoch: counted from 0; with `by="step"` the steps done before the window.
        """
        return next(length for start, length in reversed(self.scheduling.items()) if start <= epoch)

    @property
    def constant(self) -> int | None:
        """The batches of every window; None if they differ."""
        lengths = set(self.scheduling.values())
        return lengths.pop() if len(lengths) == 1 else None

    def batches(self, at: int, samples: int | None) -> int:
        """Returns the batches of a window.

        Args:
            at: its epoch, or the steps done before it, as `by` says.
            samples: of one batch of all ranks; None where they are not known, 0 before the loader is there.
        """
        return self.length(at)

    def at(self, progress: Progress) -> int:
        """Returns the place in the schedule of a window that starts where the run stands."""
        return progress.epoch if self.by == "epoch" else progress.global_step


class GradientAccumulationScheduler(GradientAccumulation):
    """Lightning's name for `GradientAccumulation` with a schedule.

    Args:
        scheduling: {epoch: batches}, as `GradientAccumulation`'s `steps`.

    Example:
        >>> schedule = GradientAccumulationScheduler(scheduling={0: 8, 4: 4})
        >>> schedule.get_accumulate_grad_batches(5), schedule.going_to_accumulate_grad_batches()
        (4, True)
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not isinstance(scheduling, Mapping):
            raise ConfigurationError(
                f"GradientAccumulationScheduler(scheduling={scheduling!r}): give a dict such as {{0: 4}}, or use "
                "GradientAccumulation for one number."
            )
        super().__init__(scheduling)

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Lightning's name of `length`."""
        return self.length(epoch)

    def going_to_accumulate_grad_batches(self) -> bool:
        """True if a window of any epoch has several batches."""
        return self.longest > 1


class AutoAccumulation(GradientAccumulation):
    """Runs each batch of the loader in micro-batches that fit into memory: `Trainer(accumulate_grad_batches="auto")`.

    A batch stays one optimizer step. If it does not fit into memory, it is cut into twice as many micro-batches, whose
    gradients are accumulated, and run again; so are all batches from there on. Checkpoints hold the number.

    Args:
        micro_batches: the number to begin with.
        try_largest: try a large batch when a fit starts, also one that resumes, so that memory runs out then and not
            hours later. Up to eight batches of samples from all over the data set are read for it in the main process,
            before workers start, and `training_step` runs once more. So a data set that opens a file at its first
            read, or draws from a generator of its own, is not as it would be without it; nor is an attribute that
            `training_step` appends to.

    Attributes:
        micro_batches: into how many a batch is cut now.

    Raises:
        ConfigurationError: if the number is no whole number from 1, or `try_largest` no bool.

    Example:
        >>> AutoAccumulation(micro_batches=4).state_dict()
        {'micro_batches': 4}
    """

    state_per_rank = False
    cuts_batches = True

    def __init__(self, micro_batches: int = 1, try_largest: bool = False) -> None:
        super().__init__(1)
        check_whole("AutoAccumulation", 1, micro_batches=micro_batches)
        check_flags("AutoAccumulation", try_largest=try_largest)
        self.micro_batches, self.try_largest = micro_batches, try_largest

    def cut_finer(self, least: int = 0) -> int:
        """Doubles the number, or more often until it is at least so large; returns it."""
        self.micro_batches *= 2
        while self.micro_batches < least:
            self.micro_batches *= 2
        return self.micro_batches

    def state_dict(self) -> dict[str, Any]:
        return {"micro_batches": self.micro_batches}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        SavedState(state).integer("micro_batches", least=1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state_dict(state)
        self.micro_batches = state["micro_batches"]

    def go_back(self, state: dict[str, Any], step: int) -> None:
        # Memory is as small as it was: the number never falls within a fit.
        if state:
            self.check_state_dict(state)
            self.micro_batches = max(self.micro_batches, state["micro_batches"])


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
