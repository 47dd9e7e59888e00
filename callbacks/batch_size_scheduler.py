"""BatchSizeScheduler, a callback that changes the global batch size during a fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from leyden.callbacks.gradient_accumulation import GradientAccumulation
from leyden.core.checks import check_whole
from leyden.core.environment import machine_range, rank_environment
from leyden.core.errors import ConfigurationError


class BatchSizeScheduler(GradientAccumulation):
    """Sets the global batch size, in samples across all ranks, by step or by epoch.

    The loader's batch size stays the same, so it can be the one that fits into memory. A step accumulates as many
    batches as make up the global size. The order of samples therefore does not change, a run with another number of
    ranks takes the same steps, and a resume continues with the size of its step. The last step of an epoch takes the
    remaining samples.

    Args:
        sizes: a schedule {step: samples}. Each entry applies once that many steps are taken; an entry for 0 is
            required. Sizes must be multiples of the loader's batch size times the number of ranks.
        by: "step", or "epoch" for a schedule {epoch: samples}.

    Raises:
        ConfigurationError: for an invalid schedule; at the start of fit, if a size is not a multiple of one batch
            across all ranks. If machines come and go, on any number of machines of the launch.

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
        """The samples in one batch of all ranks that the sizes were last checked against."""

    @classmethod
    def rampup(cls, start: int, increment: int, samples: int, size: int) -> BatchSizeScheduler:
        """Returns a scheduler with equal increments, like Megatron's `--rampup-batch-size start increment samples`.

        Args:
            start: the first global batch size.
            increment: the increment between sizes.
            samples: the number of samples in the ramp. Each size gets an equal share, rounded up to whole steps.
            size: the last global batch size: `start` plus a multiple of `increment`.

        Example:
            >>> BatchSizeScheduler.rampup(32, 32, 960, 128).scheduling
            {0: 32, 10: 64, 15: 96, 19: 128}
        """
        check_whole("BatchSizeScheduler.rampup", 1, start=start, increment=increment, samples=samples, size=size)
        stages, rest = divmod(size - start, increment)
        if stages < 0 or rest:
            raise ConfigurationError(
                f"BatchSizeScheduler.rampup: size={size} is not start={start} plus a multiple of increment={increment}."
            )
        sizes, step = {}, 0
        for stage in range(stages):
            sizes[step] = start + stage * increment
            step += -(-samples // (stages * sizes[step]))
        return cls({**sizes, step: size})

    @property
    def constant(self) -> int | None:
        # Unknown until the loader exists.
        return None

    def batches(self, at: int, samples: int | None) -> int:
        if samples == 0:
            return 1
        if samples is None:
            raise ConfigurationError(
                "BatchSizeScheduler needs the training loader's batch size: use a DataLoader with a batch_size (the "
                "same in all parts of a sequential CombinedLoader), or schedule batches instead of samples with "
                "GradientAccumulation({0: 1, 1000: 2}, by='step')."
            )
        if samples != self._checked:
            self._check(samples)
            self._checked = samples
        return self.length(at) // samples

    def _check(self, samples: int) -> None:
        machines, found = machine_range(), rank_environment()
        if machines is not None and found is not None and samples % found.num_nodes == 0:
            self._check_machines(samples // found.num_nodes, machines)
        for size in self.scheduling.values():
            if size % samples:
                raise ConfigurationError(
                    f"BatchSizeScheduler: {size} is not a multiple of {samples}, the samples in one batch of all "
                    "ranks. Change the size, or the loader's batch_size."
                )

    def _check_machines(self, samples: int, machines: range) -> None:
        """Raises if some number of the launch's machines does not fit, before such a number meets.

        `samples` are those in one batch of all ranks of a machine.
        """
        for size in self.scheduling.values():
            fits = [count for count in machines if size % (count * samples) == 0]
            if len(fits) < len(machines):
                unit = samples * math.lcm(*machines)
                fit = f"{', '.join(map(str, fits))} fit{'s' * (len(fits) == 1)}" if fits else "none fits"
                raise ConfigurationError(
                    f"BatchSizeScheduler: {size} is not a multiple of {samples} samples, one batch of a machine, times "
                    f"each number of machines from {machines[0]} to {machines[-1]}: of these, {fit}. Give a multiple "
                    f"of {unit}, launch another range, or use Trainer(global_batch_size={size}), which any number of "
                    "machines divides."
                )
