"""The state of a whole run: what a checkpoint holds of it, and how a run takes it back."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from leyden.strategies.errors import ConfigurationError, LeydenError, nearest
from leyden.strategies.weights import check_partial
from leyden.trainer.checkpoint.checks import check_callbacks, check_rank, check_schedulers, check_user
from leyden.trainer.checkpoint.folder import newest
from leyden.trainer.checkpoint.foreign import ForeignWeights
from leyden.trainer.checkpoint.nodes import is_shared
from leyden.trainer.checkpoint.optimizers import check_named, from_named, parameter_names, to_named
from leyden.trainer.checkpoint.peers import Peers
from leyden.trainer.checkpoint.reader import CheckpointReader, open_verified
from leyden.trainer.checkpoint.regrouped import load_buffers, own_buffers, read_rank, saved_ranks
from leyden.trainer.checkpoint.writer import CheckpointWriter
from leyden.trainer.data.rng import rng_state
from leyden.trainer.events.progress import Progress
from leyden.trainer.format import staging
from leyden.trainer.format.codec import check_encodable, class_names, known_classes
from leyden.trainer.format.errors import CheckpointError, blame
from leyden.trainer.format.manifest import KEPT, OPTIMIZERS, PROGRESS
from leyden.trainer.logging.metric_states import metric_states
from leyden.trainer.run.identity import FILE as IDENTITY
from leyden.trainer.run.identity import Difference, Identity
from leyden.trainer.run.rank_states import own_states, warn_of_difference, with_own

if TYPE_CHECKING:
    from leyden.trainer.loops.fit import FitLoop
    from leyden.trainer.trainer import Trainer

PARTS = ("weights", "optimizers", "progress", "rng", "callbacks", "loaders")
SCHEDULERS, USER = "schedulers.json", "user.json"
WORDS = ("last", "best", "auto", "current")
"""What `ckpt_path` may be in place of a path."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a run is to resume.

    Attributes:
        path: a path, "last", "best", "auto", "current", or None to start anew.
        parts: which parts of it are restored.
        trust: it may be a pickle file of another trainer.
        same_run: it is this run's own, whatever its record says.
        weights_only: how a pickle of another trainer is read: True by torch's safe loader alone, which needs no trust; False in
            full if need be, as `trust` says too.

    Raises:
        ConfigurationError: if `weights_only` is none of the three.
    """

    path: str | os.PathLike[str] | None = None
    parts: frozenset[str] = frozenset(PARTS)
    trust: bool = False
    same_run: bool = False
    weights_only: bool | None = None

    def __post_init__(self) -> None:
        if self.weights_only not in (None, True, False):
            raise ConfigurationError(f"weights_only={self.weights_only!r}: use True, False or None.")

    @property
    def continues(self) -> bool:
        """True if the Trainer's own last fit continues, from memory."""
        return self.path == "current"


def wanted_parts(restore: str | Sequence[str]) -> frozenset[str]:
    """Reads the argument `restore` of fit.

    Raises:
        ConfigurationError: if a part is unknown; names the nearest.
    """
    if restore == "all":
        return frozenset(PARTS)
    if isinstance(restore, str):
        restore = (restore,)
    elif not isinstance(restore, Iterable):
        raise ConfigurationError(f"restore={restore!r}: use 'all', 'weights', or a set of {', '.join(PARTS)}.")
    names = tuple(restore)
    for name in names:
        if name not in PARTS:
            raise ConfigurationError(
                f"restore={restore!r}: there is no part {name!r}. {nearest(name, ('all', *PARTS))}"
            )
    return frozenset(names)


Reader = CheckpointReader | ForeignWeights


# finding ----------------------------------------------------------------------------------------------------------------
def settled(trainer: Trainer, goal: Goal) -> Goal:
    """The goal with the path that "best" means now: a new fit starts with an empty ranking."""
    if goal.path != "best":
        return goal
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not best:
        raise ConfigurationError(
            "ckpt_path='best', and no ModelCheckpoint of this Trainer has saved one yet: give a path, or 'last'."
        )
    return dataclasses.replace(goal, path=best)


def open_reader(trainer: Trainer, goal: Goal) -> tuple[Reader | None, str]:
    """Opens and verifies the checkpoint that a run resumes, before anything of the run has changed.

    Returns:
        The reader, or None to start anew; and the words that tell the user which.
    """
    settle_nodes(trainer)
    if goal.path is None:
        return None, "anew"
    if goal.continues:
        return None, f"where the last fit ended (epoch {trainer.progress.epoch}, step {trainer.progress.global_step})"
    ranks = Peers(trainer.strategy, trainer.checkpoint_folder, trainer.saves_on_each_node)
    path = _find(trainer, goal, ranks)
    if path is None:
        return None, "anew (there is no checkpoint yet)"
    if path.is_file():
        return ForeignWeights(path, goal.trust, goal.weights_only), f"weights of {path}"
    if goal.weights_only and goal.parts != {"weights"}:
        warnings.warn(
            f"weights_only=True says how pickle files of other trainers are read. {path} is a checkpoint of Leyden's, which holds no "
            "pickle, and is resumed as a whole: restore='weights' takes its weights alone.",
            stacklevel=2,
        )
    reader = CheckpointReader(path) if goal.path in ("last", "auto") else open_verified(path, ranks)
    progress = progress_of(reader)
    exact = "" if progress.exact else "; saved inside an accumulation window, which is repeated"
    if goal.parts == {"weights"}:
        return reader, f"weights of {path}"
    if "rng" in goal.parts and saved_ranks(reader) not in (0, trainer.strategy.data_size):
        exact += f"; saved by {saved_ranks(reader)} rank(s): random numbers of ranks from 1 on are seeded anew"
    return reader, f"{path} (epoch {progress.epoch}, step {progress.global_step}{exact})"


def settle_nodes(trainer: Trainer) -> None:
    """Finds out where several machines share the folders of checkpoints.

    Raises:
        ConfigurationError: if fit would save into folders that are not shared, and was not told to.
    """
    for callback in trainer.checkpoint_callbacks if trainer.strategy.ranks.num_nodes > 1 else ():
        folder = callback.folder_of(trainer)
        callback.saves_on_each_node = not is_shared(folder, Peers(trainer.strategy, folder))
        if callback.saves_on_each_node and not callback.save_on_each_node and trainer.state.stage == "fit":
            raise ConfigurationError(
                f"{folder} is not one folder for all machines. Put checkpoints where all of them see the same files "
                "(default_root_dir or dirpath), or give ModelCheckpoint(save_on_each_node=True): every machine then keeps "
                "whole checkpoints of its own."
            )


def _find(trainer: Trainer, goal: Goal, ranks: Peers) -> Path | None:
    folder = trainer.checkpoint_folder
    if goal.path in ("last", "auto"):
        found = newest(folder, depth=_depth(trainer, str(folder)), strict=goal.path == "auto", ranks=ranks)
        if found is None and goal.path == "last":
            raise CheckpointError(
                folder, "holds no whole checkpoint, and ckpt_path='last' needs one: use 'auto' to begin anew."
            )
        return found
    if goal.path is None:
        return None
    path = Path(os.path.expanduser(os.fspath(goal.path)))
    if not os.path.lexists(staging.standing(path)) and path.name == str(goal.path):
        raise CheckpointError(
            path, f"is not there, and none of the words for a checkpoint. {nearest(path.name, WORDS)}"
        )
    return path


def _depth(trainer: Trainer, folder: str) -> int:
    """How many levels of folders the names of checkpoints make below one."""
    return max((c.depth for c in trainer.checkpoint_callbacks if c.folder_of(trainer) == folder), default=0)


def _home(trainer: Trainer, path: Path) -> tuple[Path, int] | None:
    """The folder whose checkpoints are counted together with that of a path, and the levels below it; None if it is none's."""
    for callback in trainer.checkpoint_callbacks:
        folder = callback.folder_of(trainer)
        if callback.depth and path.parent.is_relative_to(folder):
            return Path(folder), max(_depth(trainer, folder), len(path.parent.relative_to(folder).parts))
    return None


def check_same_run(trainer: Trainer, reader: Reader | None, goal: Goal) -> None:
    """Compares the run that saved a checkpoint with the one that resumes it: once at the start, and when the optimizers are made.

    Raises:
        ConfigurationError: if "auto" found the checkpoint of another run; lists the differences and the ways out.
    """
    identity = trainer.identity
    resumes = bool(goal.parts & {"progress", "optimizers"})
    if not isinstance(reader, CheckpointReader) or identity is None or not resumes or not reader.has("user"):
        return
    refuses = goal.path == "auto" and "progress" in goal.parts and not goal.same_run
    before, at_start = Identity.read(reader), identity.optimizers is None
    if before is None:
        if refuses and at_start and trainer.is_global_zero:
            warnings.warn(
                f"{reader.path} does not say which run saved it: an earlier version did. ckpt_path='auto' takes it for this run's.",
                stacklevel=2,
            )
        return
    with blame(reader.path / f"{IDENTITY}.json"):
        differences = identity.differences(before)
    found = [d for d in differences if not d.replaced or "optimizers" in goal.parts]
    if refuses and any(difference.counts for difference in found):
        raise ConfigurationError(
            f"{reader.path} was saved by another run, and ckpt_path='auto' continues none but its own: {_listed(found)}. Give each "
            "run a folder of its own: Trainer(default_root_dir=…), or ModelCheckpoint(dirpath=…). To continue this one all the "
            f"same: fit(ckpt_path={str(reader.path)!r}), or fit(ckpt_path='auto', same_run=True); for its weights alone: "
            "restore='weights'."
        )
    if found and not at_start and trainer.is_global_zero:
        what = "The checkpoint's options replace those that configure_optimizers returned"
        kept = "The run continues with what it has here"
        warnings.warn(
            f"fit continues {reader.path}, whose run differed from this one: {_listed(found)}. "
            f"{what if any(d.replaced for d in found) else kept}. For its weights alone: restore='weights'.",
            stacklevel=2,
        )


def _listed(found: Sequence[Difference]) -> str:
    shown = [difference.text for difference in found[:12]]
    return "; ".join(shown) + (f"; and {len(found) - 12} more" if len(found) > 12 else "")


# saving -----------------------------------------------------------------------------------------------------------------
def compose(trainer: Trainer) -> dict[str, Any]:
    """The state of callbacks, DataModule and user hooks, as a checkpoint would hold it now."""
    callbacks: dict[str, Any] = {}
    for callback in trainer.callbacks:
        state = callback.state_dict()
        if not state:
            continue
        if callback.state_key in callbacks:
            raise ConfigurationError(
                f"two callbacks have the state_key {callback.state_key!r}: override state_key so that they differ."
            )
        callbacks[callback.state_key] = state
    progress = trainer.progress
    checkpoint: dict[str, Any] = {"epoch": progress.epoch, "global_step": progress.global_step}
    trainer.hooks.fire_all("on_save_checkpoint", checkpoint)
    datamodule = {} if trainer.datamodule is None else trainer.datamodule.state_dict()
    return {"callbacks": callbacks, "user": {"checkpoint": checkpoint, "datamodule": datamodule}}


def check_composable(trainer: Trainer) -> None:
    """Finds before the first step what the first save would refuse.

    It is called after `on_train_start`, in which averages of weights and the like are made.
    """
    state = compose(trainer)
    for optimizer in trainer.optimizers if trainer.checkpoint_callbacks else ():
        trainer.strategy.masters.saved_form(optimizer)
    for name, tree in state.items():
        check_encodable(tree, where=name)


def save(
    trainer: Trainer, loop: FitLoop | None, path: Path, *, weights_only: bool, exact: bool, overwrite: bool
) -> Path:
    """Writes a checkpoint of the run; see `Trainer.save_checkpoint`."""
    if trainer.module._trainer is None:
        raise LeydenError("save_checkpoint has no module to save: fit one first.")
    if trainer.accelerator.window.is_open and exact:
        raise LeydenError(
            "save_checkpoint was called inside an accumulation window, whose gradients a checkpoint does not hold. Call it "
            "where trainer.window.closes is true and the step is done (on_train_batch_end), or give exact=False."
        )
    strategy, progress = trainer.strategy, trainer.progress
    ranks = Peers(strategy, path, trainer.saves_on_each_node)
    home = _home(trainer, Path(os.path.abspath(path)))
    with CheckpointWriter(path, overwrite=overwrite, ranks=ranks, home=home) as writer:
        if loop is not None and trainer.state.stage == "fit":
            loop.send_ahead()
        for logger in trainer.loggers:
            logger.save()
        if loop is not None and trainer.state.stage == "fit":
            loop.clock.note()
        if trainer.accelerator.window.is_open and loop is not None:
            progress = loop.window_start()
        if weights_only:
            strategy.save(writer, trainer.module, None)
        else:
            state = compose(trainer)
            names = parameter_names(trainer.module)
            optimizers = [strategy.masters.saved_form(optimizer) for optimizer in trainer.optimizers]
            strategy.save(writer, trainer.module, [to_named(optimizer, names) for optimizer in optimizers])
            writer.state("schedulers", _schedulers(trainer))
            warn_of_difference(trainer, state, ranks)
            writer.state("callbacks", state["callbacks"])
            writer.state("user", state["user"])
            if trainer.identity is not None:
                writer.json(IDENTITY, trainer.identity.to_dict())
            buffers = own_buffers(trainer.module, ranks)
            own = {"buffers": buffers, **own_states(trainer, state), **rank_state(trainer, loop, progress)}
            writer.state(f"rank-{strategy.data_rank}", own, of_rank=True)
        hparams = _hparams(trainer)
        if hparams:
            writer.state("hparams", hparams)
        return writer.commit(
            progress=progress.to_dict(), world_size=trainer.world_size, strategy=strategy.name or "custom"
        )


def _schedulers(trainer: Trainer) -> dict[str, Any]:
    return {
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "precision": trainer.strategy.precision.state_dict(),
        "strategy": trainer.strategy.state_dict(),
    }


def rank_state(trainer: Trainer, loop: FitLoop | None, progress: Progress) -> dict[str, Any]:
    """What each rank has of its own: place in the data, sums of logged values, metrics, random numbers."""
    before = None if loop is None else loop.validation.before_pass()
    return {
        "loader": None if loop is None else loop.loader_state(progress),
        "logs": trainer.logs.state_dict(trainer.module),
        "metrics": metric_states(trainer.module.named_modules()) if before is None else before["metrics"],
        "seed": torch.initial_seed() % 2**63,
        # Last, since everything before it may draw.
        "rng": rng_state() if before is None else before["rng"],
    }


def _hparams(trainer: Trainer) -> dict[str, Any]:
    owners = {"module": trainer.module, "datamodule": trainer.datamodule}
    found = {
        name: values
        for name, owner in owners.items()
        if owner is not None and (values := owner.kept_hparams.saved(owner.hparams))
    }
    kept = {
        name: said for name, owner in owners.items() if owner is not None and (said := owner.kept_hparams.to_dict())
    }
    return {**found, **({KEPT: kept} if kept else {})}


# restoring --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds beside the weights, as far as it is wanted."""

    user: dict[str, Any] | None = None
    callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)
    schedulers: dict[str, Any] | None = None
    optimizers: list[dict[str, Any]] | None = None
    progress: Progress | None = None
    rank: dict[str, Any] | None = None
    reader: Reader | None = None
    """Reads the checkpoint again, for what cannot be read before the optimizers are set up."""


def _read(trainer: Trainer, reader: Reader, goal: Goal) -> Saved:
    """Reads everything at once, so that a file which is not what it should be is found before anything has changed."""
    if isinstance(reader, ForeignWeights):
        return Saved(reader=reader)
    fits, whole = trainer.state.stage == "fit", reader.has("user")
    live = _live_state(trainer, reader) if fits and whole else None
    user = reader.state("user", like=live) if whole else None
    if user is not None:
        check_user(reader.path / USER, user)
    if not fits or goal.parts == {"weights"}:
        return Saved(user, reader=reader)
    if not whole:
        raise CheckpointError(
            reader.path,
            "was saved with weights_only and cannot be resumed: fit(..., restore='weights') takes its weights.",
        )
    callbacks = reader.state("callbacks", like=live) if "callbacks" in goal.parts else {}
    check_callbacks(reader.path, trainer.callbacks, callbacks)
    progress = progress_of(reader) if "progress" in goal.parts else None
    file = rank_file(reader, trainer)
    with blame(file):
        rank = read_rank(reader, trainer.strategy, trainer.module, like=live)
    check_rank(file, rank, trainer.logs, trainer.module, progress)
    if "callbacks" in goal.parts:
        callbacks, user = with_own(trainer, reader, rank, callbacks, user or {})
    steps = "optimizers" in goal.parts
    # An engine that is still there is that of an earlier fit; its successor is made later, and has other memory.
    parts = None if trainer.strategy.drives_one else trainer.strategy.masters.parts(trainer.module)
    return Saved(
        user,
        callbacks,
        reader.state("schedulers") if steps else None,
        reader.optimizers(like=parts) if steps and parts is not None else None,
        progress,
        rank,
        reader,
    )


def progress_of(reader: CheckpointReader) -> Progress:
    """Where the run stood that saved a checkpoint."""
    with blame(reader.path / PROGRESS):
        return Progress.from_dict(reader.progress())


def rank_file(reader: Reader, trainer: Trainer) -> Path:
    """The file of this rank's own state, for messages."""
    return reader.path / f"rank-{trainer.strategy.data_rank}.json"


def restore_weights(trainer: Trainer, reader: Reader | None, goal: Goal) -> Saved:
    """Weights, and in fit the state of DataModule and callbacks: all that comes before the optimizers.

    Returns:
        The rest of the checkpoint, which `restore_run` takes.
    """
    if reader is None:
        return Saved()
    saved = _read(trainer, reader, goal)
    if "weights" in goal.parts:
        if saved.user is not None:
            with blame(reader.path / USER, "on_load_checkpoint"):
                trainer.hooks.load_into_module(saved.user["checkpoint"])
        if not trainer.module.strict_loading:
            check_partial(trainer.module, reader.names(), warns=trainer.is_global_zero)
        trainer.strategy.load_module(reader, trainer.module, trainer.module.strict_loading)
        if saved.rank is not None:
            load_buffers(trainer.module, saved.rank.get("buffers", {}))
    if trainer.state.stage == "fit" and saved.user is not None and "callbacks" in goal.parts:
        if trainer.datamodule is not None and saved.user.get("datamodule"):
            with blame(reader.path / USER, "datamodule"):
                trainer.datamodule.load_state_dict(saved.user["datamodule"])
        with blame(reader.path / USER, "on_load_checkpoint"):
            trainer.hooks.load_into_callbacks(saved.user["checkpoint"])
        for callback in trainer.callbacks:
            if callback.state_key in saved.callbacks:
                with blame(reader.path / "callbacks.json", callback.state_key):
                    callback.load_state_dict(saved.callbacks[callback.state_key])
    return saved


def _live_state(trainer: Trainer, reader: CheckpointReader) -> list[Any]:
    """Where the classes are found of which values in a checkpoint are: in the attributes of callbacks, DataModule and module.

    Only for a class that is in none of them the run's state is composed, before any hook of the run has made it.
    """
    rank = [f"rank-{trainer.strategy.data_rank}"] if trainer.world_size > 1 else []
    wanted = {
        name for part in ("user", "callbacks", *rank) if reader.has(part) for name in class_names(reader.json(part))
    }
    if not wanted:
        return []
    owners = [*trainer.callbacks, trainer.module, trainer.datamodule]
    live: list[Any] = [vars(owner) for owner in owners if owner is not None]
    unknown = wanted - {cls.__name__ for cls in known_classes(live, None).values()}
    if not unknown:
        return live
    try:
        return [*live, compose(trainer)]
    except Exception as error:
        warnings.warn(
            f"{reader.path} has values of {', '.join(sorted(unknown))}, which come back as plain ones: no attribute of a callback or "
            f"module is of that class, and the state could not be composed before the run ({type(error).__name__}: {error}). Have "
            "an attribute of that class from the start.",
            stacklevel=2,
        )
        return live


def restore_run(trainer: Trainer, saved: Saved, goal: Goal) -> dict[str, Any] | None:
    """Optimizers, schedulers, scaler, progress and metrics.

    Returns:
        What the fit loop takes: loader state, sums of logged values and random numbers; None to start anew.
    """
    if saved.reader is not None and "weights" in goal.parts:
        trainer.strategy.masters.load(saved.reader, trainer.module)
    if saved.rank is None:
        return None
    if saved.schedulers is not None:
        optimizers = saved.optimizers
        if optimizers is None and isinstance(saved.reader, CheckpointReader):
            optimizers = saved.reader.optimizers(like=trainer.strategy.masters.parts(trainer.module))
        assert saved.reader is not None
        _restore_optimizers(trainer, optimizers or [], saved.schedulers, saved.reader.path)
    if saved.progress is not None:
        for field in dataclasses.fields(Progress):
            setattr(trainer.progress, field.name, getattr(saved.progress, field.name))
        trainer.progress.exact = True
    return {
        "logs": saved.rank["logs"] if saved.progress is not None else None,
        "metrics": saved.rank["metrics"],
        "loader": saved.rank["loader"] if "loaders" in goal.parts else None,
        "rng": saved.rank["rng"] if "rng" in goal.parts else None,
        "file": None if saved.reader is None else rank_file(saved.reader, trainer),
    }


def _restore_optimizers(trainer: Trainer, saved: list[dict[str, Any]], state: dict[str, Any], folder: Path) -> None:
    optimizers, configs = trainer.optimizers, trainer.lr_scheduler_configs
    check_schedulers(folder / SCHEDULERS, state, [config.scheduler for config in configs])
    for kind, there, here in (
        ("optimizers", len(saved), len(optimizers)),
        ("schedulers", len(state["schedulers"]), len(configs)),
    ):
        if there != here:
            raise ConfigurationError(
                f"the checkpoint has {there} {kind}, and configure_optimizers made {here}: make as many, or leave "
                "'optimizers' out of restore."
            )
    names = parameter_names(trainer.module)
    pairs = [
        (trainer.strategy.masters.saved_form(optimizer), own) for optimizer, own in zip(optimizers, saved, strict=True)
    ]
    for number, (optimizer, own) in enumerate(pairs):
        with blame(folder / OPTIMIZERS, f"optimizers[{number}]"):
            check_named(optimizer, own, names)
    with blame(folder / SCHEDULERS):
        for config, scheduler_state in zip(configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(scheduler_state)
    for number, (optimizer, own) in enumerate(pairs):
        with blame(folder / OPTIMIZERS, f"optimizers[{number}]"):
            from_named(optimizer, own, names)
    with blame(folder / SCHEDULERS):
        trainer.strategy.precision.load_state_dict(state["precision"])
        trainer.strategy.load_state_dict(state.get("strategy", {}))
