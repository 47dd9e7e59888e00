"""Batch norm's statistics of weights that no training step has seen, such as averages: one more pass over the data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.launch.heartbeat import EVALUATED, Phase
from leyden.trainer.data.cursor import LoaderCursor
from leyden.trainer.data.limits import apart
from leyden.trainer.data.rng import isolated_rng
from leyden.trainer.data.sharding import NOTHING
from leyden.trainer.engine.toggling import keeping_modes
from leyden.trainer.logging.metric_states import MetricStates
from leyden.trainer.loops.agreement import Pass
from leyden.trainer.loops.user_step import step_arguments, without_trace

if TYPE_CHECKING:
    from leyden.trainer.run.state import Run


@torch.no_grad()
def update_batch_norm(run: Run) -> bool:
    """Recomputes the running statistics of batch norm, for the current weights.

    As torch's `update_bn`, it takes their mean over all batches of the training data. `training_step` runs without
    gradients; what it logs is dropped, and random numbers are as before. Over several ranks it is the mean over the
    batches of all of them.

    Args:
        run: a fit, whose training data is loaded.

    Returns:
        False if a signal broke the pass off: the statistics are those of before.

    Raises:
        ConfigurationError: in manual optimisation, where `training_step` would step.
    """
    layers = [part for part in run.module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    if not layers:
        return True
    if not run.module.automatic_optimization:
        raise ConfigurationError(
            "update_batch_norm runs training_step without gradients, and in manual optimisation it steps by itself: "
            "compute the statistics in a loop of your own, as torch.optim.swa_utils.update_bn does."
        )
    # A copy, so that persistent workers that the fit reads from are left alone.
    loader, arguments, metrics = apart(run.loaders.train_loader), run.arguments, MetricStates(run.module)
    cursor = LoaderCursor(loader, allow_replay=arguments.allow_replay, sample_rng=arguments.sample_rng)
    seen = metrics.state_dict()
    statistics = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
    before = [buffer.clone() for buffer in statistics]
    with run.logs.discarding(), isolated_rng([cursor.loader]), _accumulating(run.module, layers):
        with run.heartbeat.during(Phase.EVALUATION):
            is_whole = _pass(run, cursor)
    metrics.load_state_dict(seen)
    if not is_whole:
        for buffer, value in zip(statistics, before, strict=True):
            buffer.copy_(value)
    elif run.strategy.ranks.world_size > 1:
        _average(run, layers)
    run.strategy.end_evaluation()
    return is_whole


def _pass(run: Run, cursor: LoaderCursor) -> bool:
    """Runs the batches through the step; False if a signal came between two."""
    strategy, transfer = run.strategy, run.train_transfer
    # The wrapper of DDP would give every rank the statistics of rank 0 at each batch.
    step = run.module.training_step if strategy.replicates else run.step_function("training_step")
    takes_index = step_arguments(run.module.training_step)[0]
    limit = run.arguments.limit_train_batches if cursor.length is None else run.loaders.limited(cursor.length)
    batches = cursor.start(run.progress.epoch)
    beat = run.heartbeat.words
    ranks = Pass(strategy.ranks, run.signals)
    for number, batch in enumerate(itertools.islice(batches, limit if isinstance(limit, int) else None)):
        if ranks.breaks_off():
            return False
        beat[EVALUATED] += 1
        own: Any = batch[0] if cursor.shares else batch
        if own is NOTHING and strategy.replicates:
            continue
        filler = cursor.filler() if own is NOTHING else own
        moved = filler if transfer is None else transfer(filler, 0)
        extra = (number,) if takes_index else ()
        if own is NOTHING:
            with without_trace(run.module):
                strategy.forward(step, moved, extra)
        else:
            strategy.forward(step, moved, extra)
    return not ranks.ends()


@contextmanager
def _accumulating(module: nn.Module, layers: list[_BatchNorm]) -> Iterator[None]:
    """Has the layers average over all batches of the block, starting from none."""
    momenta = [layer.momentum for layer in layers]
    with keeping_modes(module):
        module.train()
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None
        try:
            yield
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum


def _average(run: Run, layers: list[_BatchNorm]) -> None:
    """Brings each rank's means to those over the batches of all ranks."""
    for layer in layers:
        mean, variance, count = layer.running_mean, layer.running_var, layer.num_batches_tracked
        if mean is None or variance is None or count is None:
            continue
        share = count / run.strategy.ranks.reduce(count.double(), reduction="sum")
        for statistic in (mean, variance):
            statistic.copy_(run.strategy.ranks.reduce(statistic.double() * share, reduction="sum"))
        count.copy_(run.strategy.ranks.reduce(count.double(), reduction="max"))
