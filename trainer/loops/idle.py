"""Ranks without a sample in a global batch: the batch that they run for the others leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from leyden.trainer.data.rng import undoing
from leyden.trainer.logging.metric_states import load_metric_states, metric_states

if TYPE_CHECKING:
    from leyden.trainer.logging.logs import Logs


@contextmanager
def without_trace(module: nn.Module, logs: Logs) -> Iterator[None]:
    """What runs in this block leaves no logged value, buffer, metric state or random number behind."""
    modules = list(module.named_modules())
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    metrics, undo = metric_states(modules), undoing()
    try:
        with logs.discarding():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        load_metric_states(modules, metrics)
        undo()
