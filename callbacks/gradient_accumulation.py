"""Callbacks that set the number of batches per optimizer step, or of micro-batches per batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from leyden.callbacks.base import Callback
from leyden.core.checks import check_choice, check_flags, check_whole
from leyden.core.errors import ConfigurationError
from leyden.core.saved_state import SavedState

if TYPE_CHECKING:
    from leyden.trainer.events.progress import Progress

BY = ("epoch", "step")


class GradientAccumulation(Callback):
    """Sets the length of accumulation windows, by epoch or by step.

    The last window of an epoch has the remaining batches, and its gradient is divided by that actual length.

    Args:
        steps: the number of batches per optimizer step, or a schedule {epoch: batches}. Each entry applies from its
            epoch on (counted from 0); before the first entry, a step takes one batch.
        by: "epoch", or "step" for a schedule {global step: batches}.

    Raises:
        ConfigurationError: if `steps` has another type, is empty, or has an epoch below 0 or a length below 1; or if
            `by` is unknown.

    Example:
        >>> accumulation = GradientAccumulation({2: 4, 8: 16})
        >>> [accumulation.length(epoch) for epoch in (0, 2, 7, 8, 100)]
        [1, 4, 4, 16, 16]
    """

    counts_samples: ClassVar[bool] = False
    """Whether the schedule is in samples. Its lengths in batches are then unknown until the loader exists."""
    cuts_batches: ClassVar[bool] = False
    """Whether a batch that does not fit into memory is cut into micro-batches."""

    def __init__(self, steps: int | Mapping[int, int], by: Literal["epoch", "step"] = "epoch") -> None:
        name = type(self).__name__
        check_choice(name, BY, by=by)
        self.by = by
        schedule = {0: steps} if not isinstance(steps, Mapping) else dict(steps)
        if not schedule:
            raise ConfigurationError(f"{name} got an empty schedule: give {{0: 4}}, for example, or a number.")
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
        """The longest window of the schedule, in batches."""
        return max(self.scheduling.values())

    def length(self, epoch: int) -> int:
        """Returns the number of batches per window in an epoch.

        Args:
            epoch: the epoch, counted from 0; with `by="step"`, the number of steps before the window.
        """
        return next(length for start, length in reversed(self.scheduling.items()) if start <= epoch)

    @property
    def constant(self) -> int | None:
        """The number of batches of every window; None if windows differ."""
        lengths = set(self.scheduling.values())
        return lengths.pop() if len(lengths) == 1 else None

    def batches(self, at: int, samples: int | None) -> int:
        """Returns the number of batches in a window.

        Args:
            at: the window's epoch, or the number of steps before it, depending on `by`.
            samples: the number of samples in one batch of all ranks; None if unknown, 0 before the loader exists.
        """
        return self.length(at)

    def at(self, progress: Progress) -> int:
        """Returns the key in the schedule, an epoch or a step, of a window that starts now."""
        return progress.epoch if self.by == "epoch" else progress.global_step


class GradientAccumulationScheduler(GradientAccumulation):
    """Lightning's name for `GradientAccumulation` with a schedule.

    Args:
        scheduling: a schedule {epoch: batches}, as for `GradientAccumulation`.

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
        """Lightning's name for `length`."""
        return self.length(epoch)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Returns True if any epoch has windows of more than one batch."""
        return self.longest > 1


class AutoAccumulation(GradientAccumulation):
    """Runs each batch of the loader in micro-batches that fit into memory: `Trainer(accumulate_grad_batches="auto")`.

    Each batch remains one optimizer step. If a batch does not fit into memory, it is run again in twice as many
    micro-batches, whose gradients are accumulated, and so are all later batches. Checkpoints include the number of
    micro-batches.

    Tensors whose first dimension is the batch size are split, and lists of that length, in dicts, tuples and
    dataclasses. A mask (T, T) is split too if T equals the batch size. A time-major batch is an error: transpose it in
    `training_step`. So are samples in another form (a graph, a list of images), once the batch has to be split: have
    the `collate_fn` return tensors.

    Each batch copies buffers of up to 1 MiB, larger ones once they have changed, and the states of random number
    generators and metrics. DDP exchanges gradients once all ranks have theirs, not during the last backward. Under FSDP
    a rank that runs out of memory completes its pass with one sample, since the others wait for its part of the
    weights. In an uneven last batch one rank may have fewer micro-batches than another. On a CPU, the peak memory that
    an error reports is that of the process so far.

    Args:
        micro_batches: the initial number of micro-batches per batch.
        try_largest: try a large batch at the start of each fit, also on resume, so that memory runs out then and not
            hours later. This reads up to eight batches of samples from across the data set in the main process, before
            workers start, and runs `training_step` one extra time. Any side effects remain: of a data set that opens a
            file at its first read or draws from its own generator, and of a `training_step` that appends to an
            attribute.

    Attributes:
        micro_batches: the current number of micro-batches per batch.

    Raises:
        ConfigurationError: if `micro_batches` is not a whole number from 1, or `try_largest` is not a bool.

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
        """Doubles `micro_batches`, repeatedly until it is at least `least`, and returns it."""
        self.micro_batches *= 2
        while self.micro_batches < least:
            self.micro_batches *= 2
        return self.micro_batches

    def state_dict(self) -> dict[str, Any]:
        return {"micro_batches": self.micro_batches}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        SavedState(state).integer("micro_batches", least=1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.micro_batches = state["micro_batches"]

    def go_back(self, state: dict[str, Any], step: int) -> None:
        # Memory has not grown, so the number never decreases within a fit.
        if state:
            self.check_state_dict(state)
            self.micro_batches = max(self.micro_batches, state["micro_batches"])


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
