"""Rolls a fit back to its last checkpoint without rewinding the data, so the batches that went wrong are not repeated.

The training of PaLM did this by hand: "we re-started training from a checkpoint roughly 100 steps before the spike
started, and skipped roughly 200–500 data batches" (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1).

State that belongs to the weights is restored. State that belongs to the data is kept: the position, the loaders, the
DataModule and the random generators, from which some loaders draw their order. The current loader therefore continues
where it was, and a checkpoint saved after the rollback resumes like any other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from leyden.callbacks.base import Callback, refusal
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.folder import is_taken
from leyden.checkpoint.format import staging
from leyden.checkpoint.format.bucket import BucketPath, Place, place_of
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.reader import CheckpointReader, open_verified
from leyden.core.errors import LeydenError
from leyden.core.rank_zero import warn
from leyden.core.text import listed
from leyden.launch.heartbeat import Phase
from leyden.trainer.arguments.replay import replay_of
from leyden.trainer.events.progress import Progress
from leyden.trainer.saved.checkpoint_folders import are_on_each_node, checkpoint_callbacks
from leyden.trainer.saved.goal import PARTS, Goal
from leyden.trainer.saved.restoring import Restorer
from leyden.trainer.saved.resuming import progress_of

if TYPE_CHECKING:
    from torch import nn

    from leyden.trainer.logging.logs import Logs
    from leyden.trainer.run import Run

KEPT = frozenset({"loaders", "rng"})
"""Parts that a rollback does not restore."""
SHOWN = 3
"""Maximum number of parameter names in a message."""


class ReadLoop(Protocol):
    """The method of `FitLoop` that a rollback calls."""

    def pass_over(self, batches: int) -> None:
        """Draws up to this number of remaining batches of the epoch without training on them."""


def roll_back(run: Run, loop: ReadLoop | None, further_batches: int) -> Place:
    """Rolls a fit back to its last complete checkpoint, and skips further batches of the epoch.

    See `Trainer.roll_back`. Before the first fit there is no loop.

    Returns:
        The path of the checkpoint.

    Raises:
        LeydenError: if it is not called between two steps, or if there is no complete checkpoint; names the fix.
    """
    if type(further_batches) is not int or further_batches < 0:
        raise LeydenError(f"roll_back(further_batches={further_batches!r}): pass a whole number from 0.")
    _check_place(run)
    run.finish_saves()
    with run.heartbeat.during(Phase.GOING_BACK):
        reader = _last(run)
        now, before = Progress.from_dict(run.progress.to_dict()), progress_of(reader)
        restorer = Restorer(run, reader, Goal(str(reader.path), frozenset(PARTS) - KEPT), within=True)
        begun = _epochs_begun(before, now)
        gained = restorer.gained()
        _check_gained(run.callbacks, gained, begun)
        restorer.restore_weights()
        # Gradients accumulated by a custom step belong to weights that no longer exist.
        for optimizer in run.engine.optimizers:
            optimizer.zero_grad(set_to_none=True)
        run.module.zero_grad(set_to_none=True)
        states = restorer.restore_run()
        assert states is not None
        run.progress.go_back(now, before)
        if before.is_inside and not before.ended and before.epoch == now.epoch:
            states.load("logs", "metrics")
        else:
            _forget_epoch(run.logs, run.module)
        _repeat_epochs(run, before, now, begun)
        if len(gained) > len(restorer.gained()):
            raise LeydenError(
                f"the rollback removed the parameter groups of {listed(gained, SHOWN)}, which were added during an "
                "epoch, and no callback added them again."
            )
        run.strategy.check_trained()
    if loop is not None:
        loop.pass_over(further_batches)
    return reader.path


def _check_place(run: Run) -> None:
    """Raises LeydenError if the run cannot roll back at this point, whatever it has saved."""
    if run.state.stage != "fit" or run.hooks.current != "on_train_batch_end" or run.engine.window.is_open:
        raise LeydenError(
            "roll_back only works between two steps: call it in on_train_batch_end, if trainer.window_is_over."
        )
    check_reaches_all_ranks(run, "roll_back")
    if replay_of(run.arguments) is not None:
        raise LeydenError(
            "leyden replay cannot repeat a rollback, and the run rolled back here: replay a later step from a "
            "checkpoint that was saved after the rollback."
        )
    why = refusal(run.callbacks)
    if run.strategy.drives_one:
        why = f"strategy={run.strategy.name!r} keeps the optimizer state in its own memory"
    if why is not None:
        raise LeydenError(f"the run cannot roll back to a checkpoint: {why}.")


def check_reaches_all_ranks(run: Run, method: str) -> None:
    """Raises LeydenError if a hook that a rank without samples does not call has called this method.

    All ranks must call the method.
    """
    share = run.engine.share
    is_batch_end = run.hooks.current == "on_train_batch_end" and not run.hooks.is_closing
    if is_batch_end and share is not None and share.idle:
        raise LeydenError(
            f"all ranks must call {method}, but a rank without samples in this batch does not call this "
            'on_train_batch_end: call it in a callback with closing_hooks = frozenset({"on_train_batch_end"}).'
        )


# the checkpoint -------------------------------------------------------------------------------------------------------
def _last(run: Run) -> CheckpointReader:
    """Returns a reader of the newest complete checkpoint that this run saved before the current batch.

    Raises:
        LeydenError: if there is none.
    """
    each_node = are_on_each_node(run.callbacks)
    ranks = CheckpointRanks(run.strategy, run.arguments.local_root, each_node)
    paths = rollback_paths(run)
    existing = {path for path in paths if exists(path)} if ranks.is_keeper else None
    existing_by_keeper = [found for found in ranks.gather(existing) if found is not None]
    on_all_keepers = [path for path in paths if all(path in found for found in existing_by_keeper)]
    damaged = 0
    for path in reversed(on_all_keepers):
        ranks = CheckpointRanks(run.strategy, path, each_node)
        try:
            reader = open_verified(path, ranks)
        except CheckpointError as error:
            damaged += 1
            if ranks.rank == 0:
                warn(f"the rollback skips a damaged checkpoint: {error}")
            continue
        # An earlier hook of this batch may already have saved the step to undo.
        if progress_of(reader).batches < run.progress.batches:
            return reader
    if damaged:
        raise LeydenError(
            f"all {damaged} remaining checkpoints of the run are damaged: keep more, with "
            "ModelCheckpoint(save_top_k=…)."
        )
    raise LeydenError(
        "the run has not saved a checkpoint yet: let ModelCheckpoint save earlier, for example with "
        "every_n_train_steps=100."
    )


def rollback_paths(run: Run) -> list[Place]:
    """Returns the checkpoints that a run may roll back to, the newest last.

    Those from before a resume are included if they are in a folder that this run saves into.
    """
    folders = [callback.dirpath for callback in checkpoint_callbacks(run.callbacks)]
    own = [_real(place_of(folder, "dirpath")) for folder in folders if folder is not None]
    before = [_real(path) for path in run.continued]
    return [*(path for path in before if any(folder in own for folder in path.parents)), *run.saved]


def _real(path: Place) -> Place:
    return path if isinstance(path, BucketPath) else Path(os.path.realpath(path))


def exists(path: Place) -> bool:
    """Returns True if a checkpoint is at this path, or was moved aside from it."""
    return is_taken(path if isinstance(path, BucketPath) else staging.standing(path))


# epochs ---------------------------------------------------------------------------------------------------------------
def _epochs_begun(before: Progress, now: Progress) -> range:
    """Returns the epochs that have begun since the checkpoint."""
    return range(before.epoch + (before.phase != "epoch_start"), now.epoch + 1)


def _check_gained(callbacks: Iterable[Callback], gained: Sequence[str], begun: range) -> None:
    """Raises LeydenError if the rollback would remove parameter groups that no callback would add again."""
    repeats = any(type(callback).repeat_epoch_start is not Callback.repeat_epoch_start for callback in callbacks)
    if gained and not (begun and repeats):
        raise LeydenError(
            f"the parameter group of {listed(gained, SHOWN)} was added to the optimizer after the last checkpoint, and "
            "no callback would add it again after a rollback: add it in a callback's repeat_epoch_start, or save a "
            "checkpoint after adding it."
        )


def _forget_epoch(logs: Logs, module: nn.Module) -> None:
    """Clears the logged sums and metrics of the epoch, if the checkpoint is from an earlier epoch."""
    logs.forget("train")
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return
    for part in module.modules():
        if isinstance(part, torchmetrics.Metric):
            part.reset()


def _repeat_epochs(run: Run, before: Progress, now: Progress, begun: range) -> None:
    """Repeats the effects that the ends and starts of epochs since the checkpoint had on the optimizers.

    Epoch schedulers step, except ReduceLROnPlateau: its metric was computed with weights that no longer exist.
    """
    steps_schedulers = run.module.automatic_optimization and not run.schedulers_rest()
    # An epoch's schedulers step with its last window, or after its last hook if a hook has cut the epoch short.
    first_to_step = before.epoch + (before.ended or before.phase == "epoch_end")
    for epoch in range(before.epoch, now.epoch + 1):
        if epoch in begun:
            run.hooks.repeat_epoch_start(run.callbacks, epoch)
        if not (steps_schedulers and first_to_step <= epoch < now.epoch + now.ended):
            continue
        for config in run.schedulers:
            if not config.reduce_on_plateau and config.due("epoch", epoch + 1):
                run.module.lr_scheduler_step(config.scheduler, None)
