"""Goes back to the last checkpoint within a fit, but not in the data: steps that went wrong are not repeated.

It is what was done by hand in the training of PaLM: "we re-started training from a checkpoint roughly 100 steps before
the spike started, and skipped roughly 200–500 data batches" (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1).

What belongs to the weights goes back. What belongs to the data stays: the place in it, the loaders, the DataModule, and
random numbers, of which some loaders draw their order. So the loader that is being read is read on, a checkpoint that
is saved afterwards is like any other, and a run that is resumed from it is where this one was.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from leyden.callbacks.base import Callback, refusal
from leyden.strategies.errors import LeydenError
from leyden.strategies.launch.heartbeat import Phase
from leyden.trainer.arguments.replay import replay_of
from leyden.trainer.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.trainer.checkpoint.reader import CheckpointReader, open_verified
from leyden.trainer.events.progress import Progress
from leyden.trainer.format import staging
from leyden.trainer.format.errors import CheckpointError
from leyden.trainer.format.text import listed
from leyden.trainer.run.saved.checkpoint_folders import are_on_each_node, checkpoint_callbacks
from leyden.trainer.run.saved.restoring import Restorer
from leyden.trainer.run.saved.resuming import PARTS, Goal, progress_of

if TYPE_CHECKING:
    from leyden.trainer.run.state import Run

KEPT = frozenset({"loaders", "rng"})
"""Parts of a checkpoint to which a run does not go back."""
SHOWN = 3
"""So many names of parameters a message lists."""


class ReadLoop(Protocol):
    """What going back asks of a `FitLoop`."""

    def pass_over(self, batches: int) -> None:
        """Draws this many batches of the epoch, or those that are left, and trains on none of them."""


def roll_back(run: Run, loop: ReadLoop | None, further_batches: int) -> Path:
    """Takes a fit back to its last whole checkpoint; see `Trainer.roll_back`.

    Args:
        run: the fit.
        loop: of the fit; None before the first one.
        further_batches: so many of the epoch are drawn and not trained.

    Raises:
        LeydenError: elsewhere than between two steps, and if there is no whole checkpoint; says what to do.
    """
    if type(further_batches) is not int or further_batches < 0:
        raise LeydenError(f"roll_back(further_batches={further_batches!r}): give a number from 0.")
    _check_place(run)
    run.finish_saves()
    with run.heartbeat.during(Phase.GOING_BACK):
        reader = _last(run, are_on_each_node(run.callbacks))
        now, before = Progress.from_dict(run.progress.to_dict()), progress_of(reader)
        restorer = Restorer(run, reader, Goal(str(reader.path), frozenset(PARTS) - KEPT), within=True)
        begun = _epochs_begun(before, now)
        gained = restorer.gained()
        _check_gained(run, gained, begun)
        restorer.restore_weights()
        states = restorer.restore_run()
        assert states is not None
        run.progress.go_back(now, before)
        if before.is_inside and not before.ended and before.epoch == now.epoch:
            states.load("logs", "metrics")
        else:
            _forget_epoch(run)
        _repeat_epochs(run, before, now, begun)
        if len(gained) > len(restorer.gained()):
            raise LeydenError(f"the optimizer has lost the groups of {_some(gained)}, which it gained within an epoch.")
        run.strategy.check_trained()
        # What a step of the user's own has summed up of its window is of weights that are gone.
        for optimizer in run.engine.optimizers:
            optimizer.zero_grad(set_to_none=True)
        run.module.zero_grad(set_to_none=True)
    if loop is not None:
        loop.pass_over(further_batches)
    return reader.path


def _check_place(run: Run) -> None:
    """Raises LeydenError where the run cannot go back, whatever it has saved."""
    if run.state.stage != "fit" or run.hooks.current != "on_train_batch_end" or run.engine.window.is_open:
        raise LeydenError(
            "roll_back goes back between two steps: call it in on_train_batch_end, where trainer.window_is_over."
        )
    share = run.engine.share
    if share is not None and share.idle and not run.hooks.is_closing:
        raise LeydenError(
            "roll_back is for all ranks, and on one that has no sample of this batch this on_train_batch_end is not "
            'called: call it in a callback with closing_hooks = frozenset({"on_train_batch_end"}).'
        )
    if replay_of(run.arguments) is not None:
        raise LeydenError(
            "leyden replay shows steps as they were taken first, and this is where the run has gone back: replay a "
            "later step from a checkpoint that was saved after it."
        )
    why = refusal(run.callbacks)
    if run.strategy.drives_one:
        why = f"strategy={run.strategy.name!r} keeps its optimizer in memory of its own"
    if why is not None:
        raise LeydenError(f"the run cannot go back to a checkpoint: {why}.")


# the checkpoint -------------------------------------------------------------------------------------------------------
def _last(run: Run, each_node: bool) -> CheckpointReader:
    """The newest whole checkpoint that this run has saved, before this batch.

    Raises:
        LeydenError: if there is none.
    """
    ranks = CheckpointRanks(run.strategy, run.arguments.default_root_dir, each_node)
    places = places_now(run)
    there = {path for path in places if os.path.lexists(staging.standing(path))} if ranks.is_keeper else None
    kept = [found for found in ranks.gather(there) if found is not None]
    damaged = 0
    for path in (path for path in reversed(places) if all(path in found for found in kept)):
        ranks = CheckpointRanks(run.strategy, path, each_node)
        try:
            reader = open_verified(path, ranks)
        except CheckpointError as error:
            damaged += 1
            if ranks.rank == 0:
                warnings.warn(f"the run goes back past a damaged checkpoint: {error}", stacklevel=3)
            continue
        # A hook that comes before may have saved the step that is undone.
        if progress_of(reader).batches < run.progress.batches:
            return reader
    if damaged:
        raise LeydenError(
            f"all {damaged} of its checkpoints that are left are damaged: keep more, by ModelCheckpoint(save_top_k=…)."
        )
    raise LeydenError(
        "it has not saved a checkpoint yet: let ModelCheckpoint save earlier, as by every_n_train_steps=100."
    )


def places_now(run: Run) -> list[Path]:
    """The checkpoints to which a run may go back, the newest last.

    Those from before a resume are, if they are in a folder of this run's own.
    """
    folders = [callback.dirpath for callback in checkpoint_callbacks(run.callbacks)]
    own = [os.path.realpath(folder) for folder in folders if folder is not None]
    before = [Path(os.path.realpath(path)) for path in run.continued]
    return [*(path for path in before if any(path.is_relative_to(folder) for folder in own)), *run.saved]


# epochs ---------------------------------------------------------------------------------------------------------------
def _epochs_begun(before: Progress, now: Progress) -> range:
    """The epochs that have begun since the checkpoint."""
    return range(before.epoch + (before.phase != "epoch_start"), now.epoch + 1)


def _check_gained(run: Run, gained: Sequence[str], begun: range) -> None:
    """Raises LeydenError for groups of parameters that nobody would add again."""
    repeats = any(type(callback).repeat_epoch_start is not Callback.repeat_epoch_start for callback in run.callbacks)
    if gained and not (begun and repeats):
        raise LeydenError(
            f"the optimizer has gained the group of {_some(gained)} since the last checkpoint, and nobody would add it "
            "again: add it in a callback's repeat_epoch_start, or save a checkpoint after it was added."
        )


def _some(names: Sequence[str]) -> str:
    return listed(names, SHOWN)


def _forget_epoch(run: Run) -> None:
    """Drops the sums of the epoch: the checkpoint is from before it."""
    run.logs.forget("train")
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return
    for part in run.module.modules():
        if isinstance(part, torchmetrics.Metric):
            part.reset()


def _repeat_epochs(run: Run, before: Progress, now: Progress, begun: range) -> None:
    """Repeats what the ends and starts of epochs since the checkpoint did to the optimizers.

    Schedulers that go by epochs step, but for those on a plateau: their metric was of weights that are gone.
    """
    steps = run.module.automatic_optimization and not run.schedulers_rest()
    # An epoch's schedulers step with its last window, or with its last hook if a hook has cut it.
    stepped = before.epoch + (before.ended or before.phase == "epoch_end")
    for epoch in range(before.epoch, now.epoch + 1):
        if epoch in begun:
            run.hooks.repeat_epoch_start(run.callbacks, epoch)
        if not (steps and stepped <= epoch < now.epoch + now.ended):
            continue
        for config in run.schedulers:
            if not config.reduce_on_plateau and config.due("epoch", epoch + 1):
                run.module.lr_scheduler_step(config.scheduler, None)
