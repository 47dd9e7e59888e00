"""RunSettings: a run's settings, for strategies whose own settings may contradict them (DeepSpeed's config)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run. None means not set, or not known yet.

    Attributes:
        accumulation: number of batches per optimizer step. Also None if it changes during the run.
        clip_value: norm or value that gradients are clipped to.
        clip_algorithm: "norm" or "value".
        batch_size: number of samples per batch on one rank.
        manual: True if the module calls backward and steps itself (manual optimization).
        own_backward: True if the module overrides `backward`.
        sync_batchnorm: True if batch norm computes its statistics over all ranks.
        optimizers: number of optimizers.
        schedulers: number of learning-rate schedulers.
    """

    accumulation: int | None = None
    clip_value: float | None = None
    clip_algorithm: str | None = None
    batch_size: int | None = None
    manual: bool | None = None
    own_backward: bool | None = None
    sync_batchnorm: bool | None = None
    optimizers: int | None = None
    schedulers: int | None = None
