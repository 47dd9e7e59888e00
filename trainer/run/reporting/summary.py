"""What fit prints at its start and its end, and which settings of a run a strategy checks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from leyden.strategies.settings import RunSettings
from leyden.trainer.events.hooks import overrides
from leyden.trainer.format.text import aligned
from leyden.trainer.module import TrainModule
from leyden.trainer.run.starting.loaders import batch_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.strategies.base import Strategy
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.run.state import Run


def result_lines(results: Sequence[Mapping[str, float]]) -> str:
    """What an evaluation prints: a line for each value, loader by loader."""
    rows = [(name, f"{value:.6g}") for values in results for name, value in values.items()]
    return "\n".join(aligned(rows)) if rows else ""


def five_lines(strategy: Strategy, loader: Any, accumulated: int, folder: str, start: str) -> str:
    """What runs where, in the five lines that fit prints.

    Args:
        strategy: where it runs.
        loader: of the training data.
        accumulated: batches of the first window.
        folder: of the logs.
        start: what the run starts from.
    """
    ranks, readers, sizes = strategy.ranks.world_size, strategy.data_size, batch_sizes(loader)
    per_rank = "+".join(str(size) for size in sizes) if sizes else "?"
    total = str(sum(sizes) * readers * accumulated) if sizes else "?"
    notes = [text for text in (strategy.details, strategy.precision.describe(strategy.modules)) if text]
    details = f": {', '.join(notes)}" if notes else ""
    return "\n".join(
        (
            f"devices     {ranks} × {strategy.root_device}, {ranks} rank{'s' if ranks > 1 else ''}",
            f"strategy    {strategy.name}, precision {strategy.precision.name}{details}",
            f"batch       {per_rank} per rank × {readers} × {accumulated} accumulated = {total}",
            f"run folder  {folder}",
            f"start       {start}",
        )
    )


def closing_lines(
    progress: Progress,
    checkpoint_callbacks: Sequence[ModelCheckpoint],
    last_checkpoint: Path | None,
    reason: str,
    seconds: float,
) -> str:
    """Why a fit ended, how long it took, and where its best checkpoint is; in the form of the five lines.

    Args:
        progress: after the fit.
        checkpoint_callbacks: each knows its best checkpoint.
        last_checkpoint: the one that was saved last; None if there is none.
        reason: in a few words.
        seconds: from the first step on, or the sanity check before it.
    """
    took = timedelta(seconds=round(seconds))
    lines = [f"ended       {reason}, at step {progress.global_step} in epoch {progress.epoch}, after {took}"]
    if progress.bad_samples:
        bad = progress.bad_samples
        lines.append(f"left out    {bad} sample{'s' if bad > 1 else ''} that raised")
    for callback in checkpoint_callbacks:
        if callback.monitor is not None and callback.best_model_path:
            score = callback.best_model_score
            value = "" if score is None else f" ({callback.monitor}={float(score):.4g})"
            lines.append(f"best        {callback.best_model_path}{value}")
    if not any(line.startswith("best") for line in lines) and last_checkpoint is not None:
        lines.append(f"checkpoint  {last_checkpoint}")
    return "\n".join(lines)


def settings_of(run: Run, optimizers: int | None = None, loader: Any = None) -> RunSettings:
    """What a run asks for, for a strategy that has settings of its own.

    Args:
        run: before the first one its module is a blank one.
        optimizers: how many there are, once they are made.
        loader: of the training data, once it is loaded.
    """
    accumulation, module, arguments = run.accumulation, run.module, run.arguments
    sizes = batch_sizes(loader)
    return RunSettings(
        accumulation=1 if accumulation is None else accumulation.constant,
        clip_value=arguments.gradient_clip_val,
        clip_algorithm=arguments.gradient_clip_algorithm,
        batch_size=sizes[0] if len(sizes) == 1 else None,
        manual=not module.automatic_optimization,
        own_backward=overrides(module, "backward", TrainModule),
        sync_batchnorm=arguments.sync_batchnorm,
        optimizers=optimizers,
        schedulers=None if optimizers is None else len(run.schedulers),
    )
