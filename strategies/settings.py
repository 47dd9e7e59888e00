"""Settings of a run, for strategies whose own settings may contradict them (DeepSpeed's config)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run. None: not set, or not known yet.

    Attributes:
        accumulation: batches of one optimizer step; None also where it changes during the run.
        clip_value: gradients are clipped to this.
        clip_algorithm: "norm" or "value".
        batch_size: samples of a batch on one rank.
        manual: the module calls backward and steps by itself.
        own_backward: the module has a `backward` of its own.
        sync_batchnorm: batch norm takes its statistics over all ranks.
        optimizers: how many the run makes.
        schedulers: how many learning-rate schedulers it makes.
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
