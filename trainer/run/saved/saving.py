"""Saves a run: what a checkpoint holds of it, file by file."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from leyden.strategies.errors import ConfigurationError, LeydenError
from leyden.trainer.arguments.replay import replay_of
from leyden.trainer.checkpoint.background import is_possible
from leyden.trainer.checkpoint.checkpoint_io import CheckpointIO, pack
from leyden.trainer.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.trainer.checkpoint.owners import collect_rank, write_rank
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.checkpoint.writer import CheckpointWriter
from leyden.trainer.format.codec import check_encodable
from leyden.trainer.plugins import wait_for
from leyden.trainer.run.reporting.command import FILE as COMMAND
from leyden.trainer.run.reporting.command import Command
from leyden.trainer.run.saved.checkpoint_folders import are_on_each_node, checkpoint_callbacks, home_of
from leyden.trainer.run.saved.identity import FILE as IDENTITY
from leyden.trainer.run.saved.resuming import PLACES
from leyden.trainer.run.saved.rolling_back import places_now
from leyden.trainer.run.saved.run_states import rank_owners, step_states_of
from leyden.trainer.run.saved.user_states import UserStates
from leyden.trainer.run.starting.build import saves_asynchronously

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from leyden.trainer.engine.engine import Engine
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.run.state import Run


class SavedLoop(Protocol):
    """What saving asks of a `FitLoop`."""

    progress: Progress

    def progress_to_save(self) -> Progress:
        """The progress that a checkpoint saved now would hold."""

    def state_dict(self) -> dict[str, Any]:
        """What the loop keeps on this rank."""


def store(run: Run, loop: SavedLoop | None, path: Path, options: Any, **what: bool) -> Path:
    """Saves a checkpoint of the run, as a folder or by the plugin that there is for it; see `save_through`.

    Raises:
        ConfigurationError: for options that no plugin takes.
    """
    if run.checkpoint_io is not None:
        return save_through(run.checkpoint_io, run, loop, path, options, **what)
    if options is not None:
        raise ConfigurationError(
            f"storage_options={options!r} is for a CheckpointIO in Trainer(plugins=…), and there is none."
        )
    return save(run, loop, path, **what)


def save(
    run: Run,
    loop: SavedLoop | None,
    path: Path,
    *,
    weights_only: bool,
    exact: bool,
    overwrite: bool,
    asynchronous: bool,
) -> Path:
    """Writes a checkpoint folder of the run; see `Trainer.save_checkpoint`.

    Args:
        run: that is saved.
        loop: the fit that runs, or was the last; None without one.
        path: of the checkpoint.
        weights_only: leave out all but the weights.
        exact: refuse to save inside an accumulation window.
        overwrite: replace what is there.
        asynchronous: a thread writes it beside the training.
    """
    if replay_of(run.arguments) is not None:
        # It leaves the run's folder as it is.
        return path
    _check_savable(run, exact)
    if loop is not None and loop.progress is not run.progress:
        # The loop of an earlier fit: this one has none yet.
        loop = None
    strategy = run.engine.strategy
    ranks = CheckpointRanks(strategy, path, are_on_each_node(run.callbacks))
    if run.lock is not None:
        ranks.keep(run.lock.check_held)
    home = home_of(run.callbacks, run.arguments.default_root_dir, Path(os.path.abspath(path)))
    is_scheduled = _is_scheduled(run)
    noted = run.note_save if is_scheduled and not weights_only else run.note_weights
    optimizers, copies = steppers(run.engine), None
    # One save at a time.
    if asynchronous:
        copies = run.saves.take(optimizers)
    else:
        run.saves.wait()
    with ExitStack() as stack:
        writer = stack.enter_context(
            CheckpointWriter(path, overwrite=overwrite, ranks=ranks, home=home, plans=run.shard_plans, copies=copies)
        )
        # The loop first: it sends the loggers the row of the step just done.
        progress = run.progress if loop is None else loop.progress_to_save()
        for logger in run.loggers:
            logger.save()
        users = UserStates(run)
        writer.substitute(users.replaced_weights())
        if weights_only:
            strategy.save(writer, run.module, None)
        else:
            _save_states(run, users, loop, writer, ranks)
            if not is_scheduled:
                writer.json(PLACES, _relative(places_now(run), Path(os.path.realpath(path.parent))))
        if hparams := users.hparams():
            writer.state("hparams", hparams)
        facts: dict[str, Any] = {
            "progress": progress.to_dict(),
            "world_size": strategy.ranks.world_size,
            "strategy": strategy.name or "custom",
            "data_ranks": strategy.data_ranks,
        }
        if copies is None:
            written = writer.commit(**facts)
            noted(written)
            return written
        writer.beside()
        return run.saves.start(writer, stack.pop_all(), copies, facts, optimizers, run.hooks, noted).path


def _check_savable(run: Run, exact: bool) -> None:
    """Raises LeydenError if there is no module, or, with `exact`, a window whose gradients would be lost."""
    if run.module._trainer is None:
        raise LeydenError("save_checkpoint has no module to save: fit one first.")
    if run.engine.window.is_open and exact:
        raise LeydenError(
            "save_checkpoint was called inside an accumulation window, whose gradients a checkpoint does not hold. "
            "Call it where trainer.window.closes is true and the step is done (on_train_batch_end), or give "
            "exact=False."
        )


def _is_scheduled(run: Run) -> bool:
    """False where the run ends: a run without an end would not save here, so nobody goes back to what is saved."""
    is_paused = run.hooks.current == "on_train_epoch_end" and run.progress.phase == "paused"
    return not is_paused and run.hooks.current not in ("on_train_end", "on_exception")


def save_through(
    plugin: CheckpointIO, run: Run, loop: SavedLoop | None, path: Path, options: Any, **what: bool
) -> Path:
    """Stores a checkpoint of the run by a plugin, on the first rank; see `save` for the other arguments.

    All ranks write a folder, which is read back as a dict, and deleted.

    Args:
        options: `storage_options` of the plugin.
    """
    if replay_of(run.arguments) is not None:
        return path
    ranks = CheckpointRanks(run.engine.strategy, path)
    if not what["overwrite"]:
        path = ranks.first(lambda: _free(path))
    folder = ranks.first(lambda: _temporary(run))
    try:
        what |= {"asynchronous": False, "overwrite": False}
        written = save(run, loop, folder / "checkpoint", **what)
        # It cannot be gone back to.
        run.note_weights(written)
        ranks.first(lambda: plugin.save_checkpoint(pack(CheckpointReader(written)), str(path), storage_options=options))
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if run.state.stage != "fit":
        wait_for(plugin)
    return path


def _free(path: Path) -> Path:
    """The path, or the first with a number that is not taken."""
    names = (path.with_name(f"{path.name}-v{number}") for number in itertools.count(1))
    return next(one for one in itertools.chain([path], names) if not os.path.lexists(one))


def _temporary(run: Run) -> Path:
    """A folder that all ranks see."""
    root = Path(run.arguments.default_root_dir)
    root.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".checkpoint-", dir=root)).absolute()


def _relative(places: Iterable[Path], folder: Path) -> list[str]:
    """The paths, seen from a folder, of those that are still there."""
    return [os.path.relpath(os.path.realpath(place), folder) for place in places if os.path.lexists(place)]


def _save_states(
    run: Run, users: UserStates, loop: SavedLoop | None, writer: CheckpointWriter, ranks: CheckpointRanks
) -> None:
    """Writes the weights, and the state of everybody who has one."""
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
    states = {**users.own(composed), **rank_state(run, loop, ranks)}
    write_rank(writer, run.engine.strategy, states)


def rank_state(run: Run, loop: SavedLoop | None, ranks: CheckpointRanks | None = None) -> dict[str, Any]:
    """What this rank has of its own: place in the data, sums of logged values, metrics, random numbers.

    Given the ranks that write a checkpoint, also the buffers in which they differ.
    """
    of_loop = {"loader": None} if loop is None else loop.state_dict()
    # Inside a validation the loop has metrics and random numbers from before it.
    return {**collect_rank(rank_owners(run, ranks or CheckpointRanks())), **of_loop}


def beside(run: Run, asked: bool | None) -> bool:
    """Whether a save is written beside the training.

    Args:
        run: that is saved.
        asked: what the caller gave; None for what the Trainer's plugins say.
    """
    if asked and run.checkpoint_io is not None:
        raise ConfigurationError(
            f"asynchronous=True, and {type(run.checkpoint_io).__name__} stores checkpoints itself: give "
            "plugins=AsyncCheckpointIO(…) around it, which calls it in a thread."
        )
    if asked is None:
        asked = saves_asynchronously(run.arguments)
    if not asked or run.state.stage != "fit" or run.saves.is_over:
        return False
    return is_possible(run.strategy)


def steppers(engine: Engine) -> list[Optimizer]:
    """The optimizers, if their own steps are all that changes the weights; none under an engine that steps."""
    strategy = engine.strategy
    methods = (type(strategy).step, type(strategy).forward_backward, type(strategy.precision).step)
    return engine.optimizers if all(method.__module__.startswith("leyden.") for method in methods) else []


def check_composable(run: Run) -> None:
    """Finds before the first step what the first save would refuse.

    It is called after `on_train_start`, in which averages of weights and the like are made.
    """
    states = UserStates(run).compose(run.progress)
    for optimizer in run.engine.optimizers if checkpoint_callbacks(run.callbacks) else ():
        run.engine.strategy.master_weights.saved_form(optimizer)
    for name, tree in states.items():
        check_encodable(tree, where=name, sharded=name == "callbacks")
