"""Learning-rate schedules that torch lacks."""

from __future__ import annotations

import functools
import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from leyden.core.errors import ConfigurationError, nearest
from leyden.core.rank_zero import warn

SHAPES = ("sqrt", "linear", "cosine")


def warmup_stable_decay(
    optimizer: Optimizer,
    total_steps: float,
    *,
    warmup_steps: float = 0.01,
    decay_steps: float = 0.2,
    decay: str = "sqrt",
    min_lr_ratio: float = 0.0,
) -> LambdaLR:
    """Returns a schedule that warms up, stays at the full learning rate, and decays at the end.

    A checkpoint from the stable phase can be trained further with a larger `total_steps`, or with a decay at once (Hu
    et al., https://arxiv.org/abs/2404.06395).

    Args:
        optimizer: the optimizer.
        total_steps: the number of optimizer steps, such as `trainer.estimated_stepping_batches`.
        warmup_steps: steps of the linear warm-up; below 1, a fraction of all steps.
        decay_steps: steps of the decay at the end; below 1, a fraction of all steps. A run that is too short for both
            phases has a shorter decay.
        decay: "linear", "cosine", or "sqrt", which is 1 - √x (Hägele et al., https://arxiv.org/abs/2405.18392).
        min_lr_ratio: the last learning rate as a share of the full one.

    Raises:
        ConfigurationError: if an argument is invalid, or the run has no end.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> schedule = warmup_stable_decay(optimizer, 10, warmup_steps=2, decay_steps=4, decay="linear")
        >>> rates = []
        >>> for _ in range(10):
        ...     rates.append(optimizer.param_groups[0]["lr"])
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if decay not in SHAPES:
        raise ConfigurationError(f"decay={decay!r}: {nearest(str(decay), SHAPES)}")
    if math.isinf(total_steps):
        raise ConfigurationError("warmup_stable_decay needs the number of steps: set max_steps or max_epochs.")
    if warmup_steps < 0 or decay_steps < 0:
        raise ConfigurationError(f"warmup_steps={warmup_steps}, decay_steps={decay_steps}: use numbers of at least 0.")
    total = int(total_steps)
    warmup, cooldown = (math.ceil(n * total) if n < 1 else int(n) for n in (warmup_steps, decay_steps))
    if warmup_steps >= 1 <= decay_steps and warmup + cooldown > total:
        warn(f"warmup_steps={warmup_steps} and decay_steps={decay_steps} are more than the {total} steps of this run.")
    warmup = min(warmup, total)
    cooldown = min(cooldown, total - warmup)
    factor = functools.partial(
        _factor, warmup=warmup, start=total - cooldown, cooldown=cooldown, decay=decay, least=min_lr_ratio
    )
    return LambdaLR(optimizer, factor)


def _factor(step: int, warmup: int, start: int, cooldown: int, decay: str, least: float) -> float:
    if step < warmup:
        return step / warmup
    if step <= start or not cooldown:
        return 1.0
    share = min(1.0, (step - start) / cooldown)
    left = {"linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2, "sqrt": 1 - math.sqrt(share)}[decay]
    return least + (1 - least) * left
