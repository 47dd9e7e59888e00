"""Going back to the last checkpoint within a fit, and on in the data: steps that went wrong are not taken again.

PaLM's practice against spikes of the loss: "we re-started training from a checkpoint roughly 100 steps before the spike
started, and skipped roughly 200-500 data batches" (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from leyden.callbacks.base import Callback
from leyden.callbacks.logger import Logger
from leyden.strategies.errors import LeydenError
from leyden.trainer.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.trainer.checkpoint.reader import CheckpointReader, open_verified
from leyden.trainer.events.progress import Progress
from leyden.trainer.format.errors import CheckpointError
from leyden.trainer.run.restoring import Restorer
from leyden.trainer.run.resuming import PARTS, Goal

if TYPE_CHECKING:
    from leyden.trainer.run.state import Run

KEPT = frozenset({"loaders"})
"""Parts of a checkpoint to which a run does not go back."""


def roll_back(run: Run, each_node: bool, staying: Collection[Callback] = ()) -> Path:
    """Takes a fit back to its last whole checkpoint; see `Trainer.roll_back`.

    Args:
        run: between two windows.
        each_node: every machine has checkpoints of its own.
        staying: callbacks that keep their state.

    Raises:
        LeydenError: inside a window, and if the fit has no checkpoint.
    """
    if run.state.stage != "fit" or run.engine.window.is_open:
        raise LeydenError("roll_back is for hooks between two steps of a fit, such as on_train_batch_end.")
    run.finish_saves()
    reader = _last(run, each_node)
    callbacks = [c for c in run.callbacks if not isinstance(c, Logger) and all(c is not other for other in staying)]
    now = Progress.from_dict(run.progress.to_dict())
    restorer = Restorer(run, reader, Goal(str(reader.path), frozenset(PARTS) - KEPT), callbacks)
    restorer.restore_weights()
    states = restorer.restore_run()
    assert states is not None
    before = Progress.from_dict(run.progress.to_dict())
    run.progress.go_back(now, before)
    if before.is_inside and not before.ended and before.epoch == now.epoch:
        states.load("logs", "metrics")
    else:
        _forget_epoch(run)
    _step_by_epoch(run, before, now)
    # Last, since everything before may draw.
    states.load("rng")
    return reader.path


def _last(run: Run, each_node: bool) -> CheckpointReader:
    """The last checkpoint of the run that is whole: one that it has saved, or the one that it has started from."""
    for path in (run.saved, run.ckpt_path):
        if path is None:
            continue
        ranks = CheckpointRanks(run.strategy, Path(path), each_node)
        try:
            reader = open_verified(path, ranks)
        except CheckpointError as error:
            if ranks.rank == 0:
                warnings.warn(f"passing over a damaged checkpoint: {error}", stacklevel=3)
            continue
        if reader.has("user"):
            return reader
    raise LeydenError(
        "there is no checkpoint of this run to go back to: save one before, as by "
        "ModelCheckpoint(every_n_train_steps=…)."
    )


def _forget_epoch(run: Run) -> None:
    """Drops what the epoch has summed up: the checkpoint is from before it."""
    run.logs.forget("train")
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return
    for part in run.module.modules():
        if isinstance(part, torchmetrics.Metric):
            part.reset()


def _step_by_epoch(run: Run, before: Progress, now: Progress) -> None:
    """Steps schedulers for the epochs that have ended since the checkpoint, but for those on a plateau."""
    if run.schedulers_rest() or not run.module.automatic_optimization:
        return
    ended = before.epoch + (before.ended or before.phase == "epoch_end")
    for count in range(ended + 1, now.epoch + now.ended + 1):
        for config in run.schedulers:
            if not config.reduce_on_plateau and config.due("epoch", count):
                run.module.lr_scheduler_step(config.scheduler, None)
