"""The lines that fit prints at its start and end, and the settings of a run for its strategy to check."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from leyden.core.text import aligned
from leyden.strategies.base import RunSettings
from leyden.trainer.events.hooks import overrides
from leyden.trainer.module import TrainModule
from leyden.trainer.starting.loaders import batch_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.checkpoint.format.bucket import Place
    from leyden.strategies.base import Strategy
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.run import Run


def result_lines(results: Sequence[Mapping[str, float]]) -> str:
    """Returns the text that an evaluation prints: one line per value, loader by loader."""
    rows = [(name, f"{value:.6g}") for values in results for name, value in values.items()]
    return "\n".join(aligned(rows)) if rows else ""


def five_lines(strategy: Strategy, loader: Any, accumulated: int, folder: str, start: str) -> str:
    """Returns the five lines that fit prints at its start: devices, strategy, batch, run folder and starting point.

    `accumulated` is the number of batches in the first accumulation window.
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
    last_checkpoint: Place | None,
    reason: str,
    seconds: float,
) -> str:
    """Returns the lines that fit prints at its end: why it ended, how long it took, and where its best checkpoint is.

    The seconds are those from the sanity check, or without one from the first step.
    """
    took = timedelta(seconds=round(seconds))
    lines = [f"ended       {reason}, at step {progress.global_step} in epoch {progress.epoch}, after {took}"]
    if progress.bad_samples:
        bad = progress.bad_samples
        lines.append(f"left out    {bad} sample{'s' if bad > 1 else ''} that raised")
    for callback in checkpoint_callbacks:
        if callback.monitor is not None and callback.best_model_path:
            score = callback.best_model_score
            # A checkpoint ranks as infinitely bad if the value was nan.
            shown = "" if score is None else f"{float(score):.4g}" if math.isfinite(score) else "nan or infinite"
            value = f" ({callback.monitor}={shown})" if shown else ""
            lines.append(f"best        {callback.best_model_path}{value}")
    if not any(line.startswith("best") for line in lines) and last_checkpoint is not None:
        lines.append(f"checkpoint  {last_checkpoint}")
    return "\n".join(lines)


def settings_of(run: Run, optimizers: int | None = None, loader: Any = None) -> RunSettings:
    """Returns the settings of a run that a strategy may refuse, or may need for its own configuration.

    Args:
        run: the run. Before the Trainer's first one, its module is a placeholder.
        optimizers: the number of optimizers; None before they are created.
        loader: the training loader; None before it is fetched.
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
