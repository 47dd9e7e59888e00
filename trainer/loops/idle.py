"""Ranks without a sample in a global batch: the batch that they run for the others leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from leyden.trainer.data.rng import undoing
from leyden.trainer.logging.metric_states import load_metric_states, metric_states

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer


@contextmanager
def without_trace(trainer: Trainer) -> Iterator[None]:
    """What runs in this block leaves no logged value, buffer, metric state or random number behind."""
    modules = list(trainer.module.named_modules())
    buffers = [(buffer, buffer.clone()) for buffer in trainer.module.buffers()]
    metrics, undo = metric_states(modules), undoing()
    try:
        with trainer.logs.discarding():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        load_metric_states(modules, metrics)
        undo()
