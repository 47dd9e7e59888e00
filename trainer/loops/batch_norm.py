"""Recomputes batch norm statistics for weights that never ran a training step, such as averaged weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from leyden.core.errors import ConfigurationError
from leyden.data.cursor import LoaderCursor
from leyden.data.limits import apart
from leyden.data.rng import isolated_rng
from leyden.data.sharding import NO_SAMPLES
from leyden.launch.heartbeat import EVALUATED, Phase
from leyden.trainer.engine.toggling import keeping_modes
from leyden.trainer.logging.metric_states import MetricStates
from leyden.trainer.loops.agreement import InterruptiblePass
from leyden.trainer.loops.user_step import step_arguments, without_side_effects

if TYPE_CHECKING:
    from leyden.strategies.ranks import Ranks
    from leyden.trainer.run import Run


@torch.no_grad()
def update_batch_norm(run: Run) -> bool:
    """Recomputes the running statistics of batch norm for the current weights.

    Like torch's `update_bn`, it averages them over all batches of the training data, on all ranks. `training_step` runs
    without gradients. Values that it logs are dropped, and random states are restored.

    Args:
        run: the run of a fit whose training data is loaded.

    Returns:
        False if a signal interrupted the pass; the previous statistics are then restored.

    Raises:
        ConfigurationError: in manual optimization, where `training_step` would step.
    """
    layers = [part for part in run.module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    if not layers:
        return True
    if not run.module.automatic_optimization:
        raise ConfigurationError(
            "update_batch_norm runs training_step without gradients, but in manual optimization training_step steps "
            "its optimizers. Compute the statistics in your own loop, as torch.optim.swa_utils.update_bn does."
        )
    # A copy of the loader, because the fit may be reading from the loader's persistent workers.
    loader, arguments, metrics = apart(run.loaders.train_loader), run.arguments, MetricStates(run.module)
    cursor = LoaderCursor(loader, allow_replay=arguments.allow_replay, sample_rng=arguments.sample_rng)
    metrics_before = metrics.state_dict()
    statistics = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
    statistics_before = [buffer.clone() for buffer in statistics]
    with run.logs.discarding(), isolated_rng([cursor.loader]), _accumulating(run.module, layers):
        with run.heartbeat.during(Phase.EVALUATION):
            is_complete = _run_batches(run, cursor)
    metrics.load_state_dict(metrics_before)
    if not is_complete:
        for buffer, value in zip(statistics, statistics_before, strict=True):
            buffer.copy_(value)
    elif run.strategy.ranks.world_size > 1:
        _average(run.strategy.ranks, layers)
    run.strategy.end_evaluation()
    return is_complete


def _run_batches(run: Run, cursor: LoaderCursor) -> bool:
    """Runs the batches through the step; returns False if a signal interrupted the pass."""
    strategy, transfer = run.strategy, run.loaders.train_transfer
    # Without the DDP wrapper, which would broadcast rank 0's statistics in each batch.
    step = run.module.training_step if strategy.replicates else run.step_function("training_step")
    takes_index = step_arguments(run.module.training_step)[0]
    limit = run.arguments.limit_train_batches if cursor.length is None else run.loaders.limited(cursor.length)
    batches = cursor.start(run.progress.epoch)
    beat = run.heartbeat.words
    interruptible = InterruptiblePass(strategy.ranks, run.signals)
    for batch_idx, batch in enumerate(itertools.islice(batches, limit if isinstance(limit, int) else None)):
        if interruptible.interrupted_before_batch():
            return False
        beat[EVALUATED] += 1
        own: Any = batch[0] if cursor.shares else batch
        if own is NO_SAMPLES and strategy.replicates:
            continue
        on_host = cursor.filler() if own is NO_SAMPLES else own
        on_device = on_host if transfer is None else transfer(on_host, 0)
        extra = (batch_idx,) if takes_index else ()
        with without_side_effects(run.module) if own is NO_SAMPLES else nullcontext():
            strategy.forward(step, on_device, extra)
    return not interruptible.interrupted_at_end()


@contextmanager
def _accumulating(module: nn.Module, layers: list[_BatchNorm]) -> Iterator[None]:
    """Resets the layers' statistics and makes them cumulative averages inside the block."""
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


def _average(ranks: Ranks, layers: list[_BatchNorm]) -> None:
    """Averages the statistics over all ranks, weighted by each rank's number of batches."""
    for layer in layers:
        mean, variance, count = layer.running_mean, layer.running_var, layer.num_batches_tracked
        if mean is None or variance is None or count is None:
            continue
        share = count / ranks.reduce(count.double(), reduction="sum")
        for statistic in (mean, variance):
            statistic.copy_(ranks.reduce(statistic.double() * share, reduction="sum"))
        count.copy_(ranks.reduce(count.double(), reduction="max"))
