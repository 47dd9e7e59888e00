"""The plan of a run: the five lines that fit prints at its start, the two at its end, and what a strategy is told of the run's settings."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from leyden.strategies.settings import RunSettings
from leyden.trainer.events.hooks import overrides
from leyden.trainer.module import TrainModule

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer


def five_lines(trainer: Trainer, start: str) -> str:
    """What runs where, in the five lines that fit prints.

    Args:
        trainer: a Trainer whose training data is loaded.
        start: what the run starts from.
    """
    ranks, strategy = trainer.world_size, trainer.strategy
    readers = strategy.data_size
    sizes = _batch_sizes(trainer.loaders.train_loader)
    accumulated = trainer.accumulation.length(trainer.progress.epoch) if trainer.accumulation is not None else 1
    per_rank = "+".join(str(size) for size in sizes) if sizes else "?"
    total = str(sum(sizes) * readers * accumulated) if sizes else "?"
    told = [text for text in (strategy.details, strategy.precision.describe(strategy.modules)) if text]
    details = f": {', '.join(told)}" if told else ""
    folder = trainer.log_dir or trainer.default_root_dir
    return "\n".join(
        (
            f"devices     {ranks} × {strategy.root_device}, {ranks} rank{'s' if ranks > 1 else ''}",
            f"strategy    {strategy.name}, precision {strategy.precision.name}{details}",
            f"batch       {per_rank} per rank × {readers} × {accumulated} accumulated = {total}",
            f"run folder  {folder}",
            f"start       {start}",
        )
    )


def closing_lines(trainer: Trainer, reason: str, seconds: float) -> str:
    """Why a fit ended, how long it took, and where its best checkpoint is; in the form of the five lines.

    Args:
        trainer: after the fit.
        reason: in a few words.
        seconds: from the first step on, or the sanity check before it.
    """
    progress, took = trainer.progress, timedelta(seconds=round(seconds))
    lines = [f"ended       {reason}, at step {progress.global_step} in epoch {progress.epoch}, after {took}"]
    for callback in trainer.checkpoint_callbacks:
        if callback.monitor is not None and callback.best_model_path:
            score = callback.best_model_score
            value = "" if score is None else f" ({callback.monitor}={float(score):.4g})"
            lines.append(f"best        {callback.best_model_path}{value}")
    if len(lines) == 1 and trainer.last_checkpoint is not None:
        lines.append(f"checkpoint  {trainer.last_checkpoint}")
    return "\n".join(lines)


def settings_of(trainer: Trainer, optimizers: int | None = None, loader: Any = None) -> RunSettings:
    """What a run asks for, for a strategy that has settings of its own.

    Args:
        trainer: before a fit its module is a blank one.
        optimizers: how many there are, once they are made.
        loader: of the training data, once it is loaded.
    """
    accumulation, module = trainer.accumulation, trainer.module
    lengths = [1] if accumulation is None else list(set(accumulation.scheduling.values()))
    sizes = _batch_sizes(loader)
    return RunSettings(
        accumulation=lengths[0] if len(lengths) == 1 else None,
        clip_value=trainer.arguments.gradient_clip_val,
        clip_algorithm=trainer.arguments.gradient_clip_algorithm,
        batch_size=sizes[0] if len(sizes) == 1 else None,
        manual=not module.automatic_optimization,
        own_backward=overrides(module, "backward", TrainModule),
        optimizers=optimizers,
        schedulers=None if optimizers is None else len(trainer.lr_scheduler_configs),
    )


def _batch_sizes(loader: Any) -> list[int]:
    """Batch sizes of a loader, or of each of several; empty where they are not known."""
    parts = getattr(loader, "flattened", None)
    if parts is not None:
        found = [_batch_sizes(part) for part in parts]
        return [size for sizes in found for size in sizes] if all(found) else []
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return [size] if isinstance(size, int) else []
