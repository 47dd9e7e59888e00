"""BatchSizeScheduler, a callback that changes the global batch size during a fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from leyden.callbacks.gradient_accumulation import GradientAccumulation
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.arguments.checks import check_whole


class BatchSizeScheduler(GradientAccumulation):
    """Sets the global batch size, in samples of all ranks, by step or by epoch.

    The loader's batches keep their size, which is what fits into memory: a step takes as many of them as make up the
    size (gradient accumulation). So the order of samples stays as it is, a run on another number of ranks takes the
    same steps, and a resume goes on with the size of its step. The last step of an epoch takes the samples that are
    left.

    Args:
        sizes: {step: samples}, each from the step after so many on; it must have an entry for 0. All are multiples of
            the loader's batch size times the number of ranks.
        by: "epoch" for {epoch: samples}.

    Raises:
        ConfigurationError: for an invalid schedule; at the start of fit, if a size is no multiple of a batch of all
            ranks.

    Example:
        >>> scheduler = BatchSizeScheduler({0: 64, 1000: 128, 5000: 256})
        >>> [scheduler.batches(step, samples=32) for step in (0, 999, 1000, 5000)]
        [2, 2, 4, 8]
    """

    counts_samples: ClassVar[bool] = True

    def __init__(self, sizes: Mapping[int, int], by: Literal["epoch", "step"] = "step") -> None:
        if not isinstance(sizes, Mapping) or 0 not in sizes:
            raise ConfigurationError(
                f"BatchSizeScheduler({sizes!r}): give a dict with an entry for 0, such as {{0: 64, 1000: 128}}."
            )
        super().__init__(sizes, by)
        self._checked: int | None = None
        """A batch of all ranks, of which all sizes are multiples."""

    @classmethod
    def rampup(cls, start: int, increment: int, samples: int, size: int) -> BatchSizeScheduler:
        """Returns a scheduler that grows in equal parts, as Megatron's `--rampup-batch-size start increment samples`.

        Args:
            start: the first global batch size.
            increment: what is added each time.
            samples: over which it grows: each size has an equal share of them, in whole steps.
            size: the last global batch size; `start` and a multiple of `increment`.

        Example:
            >>> BatchSizeScheduler.rampup(32, 32, 960, 128).scheduling
            {0: 32, 10: 64, 15: 96, 19: 128}
        """
        check_whole("BatchSizeScheduler.rampup", 1, start=start, increment=increment, samples=samples, size=size)
        stages, rest = divmod(size - start, increment)
        if stages < 0 or rest:
            raise ConfigurationError(
                f"BatchSizeScheduler.rampup: size={size} is not start={start} and a multiple of increment={increment}."
            )
        sizes, step = {}, 0
        for stage in range(stages):
            sizes[step] = start + stage * increment
            step += -(-samples // (stages * sizes[step]))
        return cls({**sizes, step: size})

    @property
    def constant(self) -> int | None:
        # Known once the loader is.
        return None

    def batches(self, at: int, samples: int | None) -> int:
        if samples == 0:
            return 1
        if samples is None:
            raise ConfigurationError(
                "BatchSizeScheduler needs to know the size of the training loader's batches: give a DataLoader with a "
                "batch_size (the same in all parts of a sequential CombinedLoader), or count batches by "
                "GradientAccumulation({0: 1, 1000: 2}, by='step')."
            )
        if samples != self._checked:
            self._check(samples)
            self._checked = samples
        return self.length(at) // samples

    def _check(self, samples: int) -> None:
        for size in self.scheduling.values():
            if size % samples:
                raise ConfigurationError(
                    f"BatchSizeScheduler: {size} samples are no multiple of {samples}, the batch of all ranks: change "
                    "the loader's batch_size, or the size."
                )
