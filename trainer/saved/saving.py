"""Saves a run as a checkpoint, file by file."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from leyden.checkpoint.checkpoint_io import CheckpointIO, pack
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.format.bucket import BucketPath, Place
from leyden.checkpoint.format.codec import check_encodable
from leyden.checkpoint.frozen import FILE as FROZEN
from leyden.checkpoint.frozen import FrozenPart, frozen_part
from leyden.checkpoint.owners import collect_rank, write_rank
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.saves import is_possible
from leyden.checkpoint.staged import free_path
from leyden.checkpoint.writer import CheckpointWriter
from leyden.core.errors import ConfigurationError, LeydenError
from leyden.trainer.arguments.replay import replay_of
from leyden.trainer.logging.history import FILE as HISTORY
from leyden.trainer.plugins import wait_for
from leyden.trainer.reporting.command import FILE as COMMAND
from leyden.trainer.reporting.command import Command
from leyden.trainer.saved.checkpoint_folders import (
    are_on_each_node,
    checkpoint_callbacks,
    copies_are_on_each_node,
    copies_of,
    copy_of,
    places_of,
)
from leyden.trainer.saved.identity import FILE as IDENTITY
from leyden.trainer.saved.resuming import ROLLBACK_PATHS
from leyden.trainer.saved.rolling_back import check_reaches_all_ranks, exists, rollback_paths
from leyden.trainer.saved.run_folder import RECORD, record_of
from leyden.trainer.saved.states import UserStates, rank_owners, step_states_of
from leyden.trainer.starting.build import saves_asynchronously

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from leyden.trainer.engine.engine import Engine
    from leyden.trainer.events.hooks import Hooks
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.run import Run


class SavedLoop(Protocol):
    """The methods of `FitLoop` that saving calls."""

    progress: Progress

    def progress_to_save(self) -> Progress:
        """Returns the progress to record in a checkpoint that is saved now."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the loop on this rank."""


def store(run: Run, loop: SavedLoop | None, path: Place, options: Any, **what: bool) -> Place:
    """Saves a checkpoint of the run as a folder, or through the run's CheckpointIO plugin; see `save_through`.

    Raises:
        ConfigurationError: if options are given, but there is no plugin to take them.
    """
    if run.checkpoint_io is not None:
        return save_through(run.checkpoint_io, run, loop, path, options, **what)
    if options is not None:
        raise ConfigurationError(
            f"storage_options={options!r} needs a CheckpointIO in Trainer(plugins=…), and there is none."
        )
    return save(run, loop, path, **what)


def save(
    run: Run,
    loop: SavedLoop | None,
    path: Place,
    *,
    weights_only: bool,
    trainable_only: bool,
    exact: bool,
    overwrite: bool,
    asynchronous: bool,
) -> Place:
    """Writes a checkpoint folder of the run, with its current or last fit loop; see `Trainer.save_checkpoint`."""
    if replay_of(run.arguments) is not None:
        # A replay must not change the run's folder.
        return path
    _check_savable(run, exact)
    if loop is not None and loop.progress is not run.progress:
        # The loop belongs to an earlier fit: this fit has no loop yet.
        loop = None
    strategy = run.engine.strategy
    local_copy = copy_of(path, run.callbacks)
    on_each_node = are_on_each_node if local_copy is None else copies_are_on_each_node
    ranks = CheckpointRanks(strategy, local_copy or path, on_each_node(run.callbacks))
    # A plugin's checkpoints have no counters.
    places = places_of(run.callbacks, run.checkpoint_root) if run.checkpoint_io is None else []
    is_scheduled = _is_scheduled(run.hooks, run.progress)
    optimizers = stepping_optimizers(run.engine)

    def contents(writer: CheckpointWriter) -> dict[str, Any]:
        # The loop first, because it sends the row of the last step to the loggers before they are saved.
        progress = run.progress if loop is None else loop.progress_to_save()
        for logger in run.loggers:
            logger.save()
        users = UserStates(run)
        replaced = users.replaced_weights()
        writer.substitute(replaced)
        if trainable_only:
            frozen = _frozen_part(run, replaced)
            writer.leave_out(frozen.digests)
            writer.json(FROZEN, frozen.to_dict())
        if weights_only:
            strategy.save(writer, run.module, None)
        else:
            _save_states(run, users, loop, writer, ranks, path)
            if not is_scheduled:
                writer.json(ROLLBACK_PATHS, _named(rollback_paths(run), path.parent))
        if hparams := users.hparams():
            writer.state("hparams", hparams)
        return progress.to_dict()

    return run.saves.write(
        path,
        contents,
        strategy=strategy,
        ranks=ranks,
        overwrite=overwrite,
        places=[*places, *copies_of(run.callbacks)],
        background=asynchronous,
        optimizers=optimizers,
        stepped=optimizers,
        hooks=run.hooks,
        committed=run.note_save if is_scheduled and not weights_only else run.note_weights,
        local_copy=local_copy,
    )


def _check_savable(run: Run, exact: bool) -> None:
    """Raises LeydenError if there is no module, if a rank does not save, or if `exact` and gradients would be lost."""
    if run.module._trainer is None:
        raise LeydenError("save_checkpoint has no module to save: call fit first.")
    if run.engine.window.is_open and exact:
        raise LeydenError(
            "save_checkpoint was called inside an accumulation window, whose gradients a checkpoint does not save. "
            "Call it after the window's step (in on_train_batch_end, if trainer.window.closes), or pass exact=False."
        )
    check_reaches_all_ranks(run, "save_checkpoint")


def _frozen_part(run: Run, replaced: Mapping[str, Tensor]) -> FrozenPart:
    """Returns the tensors that are frozen now, and equal to those before training. All ranks call it."""
    base = run.trained.base
    if base is None:
        raise ConfigurationError(
            "trainable_only=True: a checkpoint leaves out frozen weights if they are as before training, which only a "
            "fit with ModelCheckpoint(trainable_only=True) notes."
        )
    return frozen_part(run.module, run.strategy, base, replaced)


def _is_scheduled(hooks: Hooks, progress: Progress) -> bool:
    """Returns False if the save is due to the end of the run.

    A run that continues would not save at this point, so no rollback uses the checkpoint.
    """
    is_paused = hooks.current == "on_train_epoch_end" and progress.phase == "paused"
    return not is_paused and hooks.current not in ("on_train_end", "on_exception")


def save_through(
    plugin: CheckpointIO, run: Run, loop: SavedLoop | None, path: Place, options: Any, **what: bool
) -> Place:
    """Stores a checkpoint of the run through a plugin, on the first rank; see `save`.

    All ranks write a temporary folder. The first rank reads it back as a dict for the plugin, then deletes it.
    `options` are the plugin's `storage_options`.
    """
    if replay_of(run.arguments) is not None:
        return path
    ranks = CheckpointRanks(run.engine.strategy, path)
    # Only the plugin knows what is in a bucket.
    if not what["overwrite"] and isinstance(path, Path):
        path = ranks.first(lambda: free_path(path))
    folder = ranks.first(lambda: _temporary(Path(run.arguments.local_root)))
    try:
        what |= {"asynchronous": False, "overwrite": False}
        written = save(run, loop, folder / "checkpoint", **what)
        # No rollback can use the temporary folder.
        run.note_weights(written)
        ranks.first(lambda: plugin.save_checkpoint(pack(CheckpointReader(written)), str(path), storage_options=options))
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if run.state.stage != "fit":
        wait_for(plugin)
    return path


def _temporary(root: Path) -> Path:
    """Creates a temporary folder that all ranks can access."""
    root.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".checkpoint-", dir=root)).absolute()


def _named(places: Iterable[Place], folder: Place) -> list[str]:
    """Returns the paths that still exist: relative to the folder if both are local."""
    existing = list(filter(exists, places))
    if isinstance(folder, BucketPath):
        return [str(place) for place in existing]
    home = os.path.realpath(folder)
    return [
        str(place) if isinstance(place, BucketPath) else os.path.relpath(os.path.realpath(place), home)
        for place in existing
    ]


def _save_states(
    run: Run, users: UserStates, loop: SavedLoop | None, writer: CheckpointWriter, ranks: CheckpointRanks, path: Place
) -> None:
    """Writes the weights and all other states of the run."""
    composed = users.compose(run.progress)
    step_states_of(run).save(writer, run.module)
    users.warn_of_difference(composed, ranks)
    writer.state("callbacks", composed["callbacks"], sharded=True)
    writer.state("user", composed["user"])
    if run.identity is not None:
        writer.json(IDENTITY, run.identity.to_dict())
    command = Command.here()
    if command is not None:
        writer.json(COMMAND, command.to_dict())
    if writer.is_first and (history := run.history.state_dict()):
        writer.state(HISTORY, history)
    folder = record_of(run.folder, path)
    if folder is not None:
        writer.json(RECORD, folder)
    states = {**users.own(composed), **rank_state(run, loop, ranks)}
    write_rank(writer, run.engine.strategy, states)


def rank_state(run: Run, loop: SavedLoop | None, ranks: CheckpointRanks | None = None) -> dict[str, Any]:
    """Returns the states specific to this rank: data position, sums of logged values, metrics, random state.

    With the ranks that write the checkpoint, it includes the buffers that differ between them.
    """
    loop_state = {"loader": None} if loop is None else loop.state_dict()
    # During a validation the loop overrides metrics and random state with those from before it.
    return {**collect_rank(rank_owners(run, ranks or CheckpointRanks())), **loop_state}


def saves_in_background(run: Run, asked: bool | None) -> bool:
    """Returns True if a save is to be written in the background.

    `asked` is the caller's `asynchronous`; None for the default, which the Trainer's plugins decide.

    Raises:
        ConfigurationError: if True is requested of a plugin that stores checkpoints itself.
    """
    if asked and run.checkpoint_io is not None:
        raise ConfigurationError(
            f"asynchronous=True does not work with {type(run.checkpoint_io).__name__}, which stores checkpoints "
            "itself: wrap it in AsyncCheckpointIO(…), which calls it in a background thread."
        )
    if asked is None:
        asked = saves_asynchronously(run.arguments)
    if not asked or run.state.stage != "fit" or run.saves.is_over:
        return False
    return is_possible(run.strategy)


def stepping_optimizers(engine: Engine) -> list[Optimizer]:
    """Returns the optimizers if only their `step` changes the weights; an empty list under a fused engine."""
    strategy = engine.strategy
    methods = (type(strategy).step, type(strategy).forward_backward, type(strategy.precision).step)
    return engine.optimizers if all(method.__module__.startswith("leyden.") for method in methods) else []


def check_composable(run: Run) -> None:
    """Raises before the first step any error that would otherwise occur in the first save.

    Called after `on_train_start`, in which callbacks create state such as averaged weights.
    """
    states = UserStates(run).compose(run.progress)
    for optimizer in run.engine.optimizers if checkpoint_callbacks(run.callbacks) else ():
        run.engine.strategy.master_weights.saved_form(optimizer)
    for name, tree in states.items():
        check_encodable(tree, where=name, sharded=name == "callbacks")


HOOKS = {"validated": "on_validation_end", "paused": "on_train_epoch_end", "epoch_end": "on_train_epoch_end"}
"""The hook in which a ModelCheckpoint saves, by the phase that its checkpoint records; else `on_train_batch_end`."""


def finish_saves(run: Run) -> None:
    """Finishes the saves of the hook whose checkpoint a run resumes. All of the run's state must be restored.

    The killed run may have committed that checkpoint without linking it, without deleting old ones, and without the
    saves of other ModelCheckpoints that were due in the same hook.
    """
    if run.arguments.fast_dev_run:
        return
    callbacks, trainer = checkpoint_callbacks(run.callbacks), run.module.trainer
    owes = any(callback.has_saved(trainer) for callback in callbacks)
    event = HOOKS.get(run.progress.phase, "on_train_batch_end")
    # In `on_train_batch_end`, a save would first send the step's row to the loggers, which have it already.
    with run.hooks.inside("on_train_epoch_end"):
        for callback in callbacks:
            callback.finish_saves(trainer, event, owes)
