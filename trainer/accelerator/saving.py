"""Checkpoints of the user's own loop: models, optimizers, schedulers, loaders, random numbers, registered objects."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from leyden.strategies.errors import ConfigurationError, kind_of, nearest
from leyden.strategies.saved_state import SavedState
from leyden.trainer.accelerator.accelerate_folder import AccelerateFolder, is_folder
from leyden.trainer.accelerator.plugins import AUTOMATIC
from leyden.trainer.accelerator.tracking import LoggerTracker
from leyden.trainer.checkpoint.background import is_possible
from leyden.trainer.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.trainer.checkpoint.folder import all_checkpoints, delete, is_checkpoint, newest
from leyden.trainer.checkpoint.lock import FolderLock
from leyden.trainer.checkpoint.owners import (
    RankStates,
    StateOwner,
    Unclaimed,
    collect_rank,
    write_rank,
)
from leyden.trainer.checkpoint.reader import CheckpointReader, open_verified
from leyden.trainer.checkpoint.step_states import SCHEDULERS, StepStates, check_count
from leyden.trainer.checkpoint.writer import CheckpointWriter
from leyden.trainer.data.rng import RandomNumbers
from leyden.trainer.format.errors import CheckpointError, blame, naming

if TYPE_CHECKING:
    from leyden.callbacks.loggers.logger import Logger
    from leyden.strategies.base import Strategy
    from leyden.trainer.accelerator.accelerator import Accelerator
    from leyden.trainer.accelerator.loader import PreparedLoader
    from leyden.trainer.accelerator.options import Options
    from leyden.trainer.accelerator.stepping import Stepping

KIND = "accelerator"
"""The entry of `user.json` by which a checkpoint of a loop of one's own is known."""
UNLIKE = "this Accelerator has {here}: prepare and register the same, in the same order, before load_state."


def together(models: Sequence[nn.Module], chosen: Sequence[nn.Module]) -> nn.Module:
    """Returns some of several models as one module, each under its number; a single model keeps its own names."""
    if len(models) == 1:
        return models[0] if chosen else nn.Module()
    numbered = enumerate(models)
    return nn.ModuleDict({f"model_{n}": model for n, model in numbered if any(model is other for other in chosen)})


@dataclass
class StateHooks:
    """The hooks that a script adds to saves and loads.

    Attributes:
        before_save: called with (models, weights, output_dir): what it takes out of `weights` is not saved by Leyden,
            and what it writes into the folder belongs to the checkpoint.
        before_load: called with (models, input_dir): what it takes out of `models` is not loaded by Leyden.
    """

    before_save: dict[int, Callable[..., Any]] = field(default_factory=OrderedDict)
    before_load: dict[int, Callable[..., Any]] = field(default_factory=OrderedDict)

    def add(self, hooks: dict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a hook; the handle removes it."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def run_before_load(self, models: list[nn.Module], folder: Path) -> list[nn.Module]:
        """Calls the hooks of a load, and returns the models that they leave to Leyden."""
        left = list(models)
        for hook in self.before_load.values():
            hook(left, str(folder))
        return left

    def run_before_save(self, models: list[nn.Module], writer: CheckpointWriter) -> list[nn.Module]:
        """Calls the hooks of a save, and returns the models whose weights they leave to Leyden."""
        if not self.before_save:
            return models
        weights = [model.state_dict() for model in models]
        owners = {id(state): model for state, model in zip(weights, models, strict=True)}
        for hook in self.before_save.values():
            hook(list(models), weights, str(writer.folder))
        writer.adopt()
        return [owners[id(state)] for state in weights]


LOAD_ARGUMENTS = ("strict", "map_location", "weights_only")
PLACES = (None, "cpu", "on_device")


def load_arguments(given: Mapping[str, Any] | None, strict: bool, map_location: Any) -> bool:
    """Checks the arguments of `load_state`, and returns whether the names of weights must match.

    Raises:
        ConfigurationError: for an argument that would have no effect.
    """
    for name in given or {}:
        if name not in LOAD_ARGUMENTS:
            raise ConfigurationError(
                f"load_state(load_kwargs={{{name!r}: …}}) is not known. {nearest(name, LOAD_ARGUMENTS)}"
            )
    place = (given or {}).get("map_location", map_location)
    if place not in PLACES:
        raise ConfigurationError(
            f"load_state(map_location={place!r}): tensors go to where the prepared model's are. Leave it out; 'cpu' "
            "and 'on_device' are taken, as Accelerate takes them."
        )
    return strict and bool((given or {}).get("strict", True))


def _check_alike(accelerator: Accelerator, name: str, path: Path) -> None:
    """Raises if ranks name different folders: all of them write and read one checkpoint together."""
    found = accelerator.strategy.ranks.differing(str(path))
    if found:
        rank, other = next((rank, text) for rank, text in enumerate(found) if text != found[0])
        raise ConfigurationError(
            f"{name} was given {found[0]!r} on rank 0 and {other!r} on rank {rank}: give every rank the same folder, "
            "without its rank or a time of its own in the name."
        )


def target(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> Path:
    """Returns the folder of a save, which rank 0 finds for all ranks.

    Raises:
        ConfigurationError: if no folder is given.
        CheckpointError: if the folder holds other files.
    """
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming or (output_dir is None and accelerator.options.resumes):
        folder = config.checkpoint_folder
        return folder / CheckpointRanks(accelerator.strategy, folder).first(config.next_name)
    if output_dir is None:
        raise ConfigurationError(
            "save_state() needs a folder: save_state('path'), Accelerator(project_dir=…, resume='auto'), or "
            "Accelerator(project_dir=…, project_config=ProjectConfiguration(automatic_checkpoint_naming=True))."
        )
    path = Path(os.path.expanduser(os.fspath(output_dir)))
    _check_alike(accelerator, "save_state", path)
    CheckpointRanks(accelerator.strategy, path).first(lambda: _make_way(path))
    return path


def _make_way(path: Path) -> None:
    if not path.is_dir() or is_checkpoint(path):
        return
    if any(path.iterdir()):
        raise CheckpointError(
            path,
            "holds other files, and a checkpoint is a folder of its own, complete or absent: save to "
            f"{str(path / 'checkpoint')!r}, say.",
        )
    path.rmdir()


def check_format(safe_serialization: bool) -> None:
    """Raises ConfigurationError for the format that is not written."""
    if not safe_serialization:
        raise ConfigurationError("save_state(safe_serialization=False) would be a pickle: leave it out.")


def save_in_time(
    accelerator: Accelerator, stepping: Stepping, output_dir: str | os.PathLike[str] | None, asynchronous: bool
) -> Path:
    """Writes a checkpoint, now or when the accumulation window that is open closes; returns its folder.

    Args:
        accelerator: whose state it is.
        stepping: knows the window.
        output_dir: as the script gave it.
        asynchronous: see `save`.
    """
    # One save at a time, and the name of the one before is taken once it is there.
    accelerator.finish_saving()
    path, loader = target(accelerator, output_dir), accelerator.active_loader
    if not stepping.is_within_window:
        with stepping.beat.saving():
            return save(accelerator, path, asynchronous=asynchronous)
    asked = None if loader is None else (loader, loader.position)
    stepping.after_window(partial(_save_late, stepping, accelerator, path, asked, asynchronous))
    return path


def _save_late(stepping: Stepping, *args: Any) -> None:
    with stepping.beat.saving():
        save(*args)


def save(
    accelerator: Accelerator,
    path: Path,
    asked: tuple[PreparedLoader, int] | None = None,
    asynchronous: bool = False,
) -> Path:
    """Writes a checkpoint, then deletes old ones above the limit.

    Args:
        accelerator: whose state it is.
        path: the folder.
        asked: the loader that was being read when the script asked for the checkpoint, and its position then.
        asynchronous: everything is copied now, and a thread writes it.
    """
    strategy, config = accelerator.strategy, accelerator.project_configuration
    accelerator.flush_scaler()
    for logger in _loggers(accelerator).values():
        logger.save()
    models = accelerator.bare_models
    ranks = CheckpointRanks(strategy, path)
    if accelerator.lock is not None:
        ranks.keep(accelerator.lock.check_held)
    overwrite = ranks.first(lambda: is_checkpoint(path))
    # Only the script knows what writes to weights between here and the next step: nothing is copied later.
    copies = accelerator.saves.take(()) if asynchronous and is_possible(strategy) else None
    with ExitStack() as stack:
        writer = stack.enter_context(
            CheckpointWriter(path, overwrite=overwrite, ranks=ranks, plans=accelerator.shard_plans, copies=copies)
        )
        kept = accelerator.state_hooks.run_before_save(models, writer)
        _step_states(accelerator).save(writer, together(models, kept))
        writer.state("user", _user(accelerator))
        loaders = [_loader_state(loader, asked) for loader in accelerator.prepared_loaders]
        # The random numbers last, since loaders may draw.
        own = {"loaders": loaders, **collect_rank({"rng": RandomNumbers()})}
        write_rank(writer, strategy, own)
        facts: dict[str, Any] = {
            "progress": _progress(accelerator),
            "world_size": strategy.ranks.world_size,
            "strategy": strategy.name or "custom",
            "data_ranks": strategy.data_ranks,
        }
        pending = None
        if copies is None:
            saved = writer.commit(**facts)
        else:
            writer.beside()
            pending = accelerator.saves.start(writer, stack.pop_all(), copies, facts, accelerator.optimizers, None)
            saved = pending.path
    if not _is_automatic(accelerator, path):
        return saved
    config.continue_after(saved)
    limit = config.total_limit
    if pending is None:
        ranks.first(lambda: _remove_old(saved.parent, limit))
    elif ranks.rank == 0:
        pending.follow(lambda path: _remove_old(path.parent, limit))
    return saved


def _is_automatic(accelerator: Accelerator, path: Path) -> bool:
    """True for a checkpoint that was named automatically, and counts for the limit."""
    config = accelerator.project_configuration
    names = config.automatic_checkpoint_naming or accelerator.options.resumes
    return names and path.parent == config.checkpoint_folder and AUTOMATIC.fullmatch(path.name) is not None


def _step_states(accelerator: Accelerator) -> StepStates:
    schedulers = [prepared.scheduler for prepared in accelerator.prepared_schedulers]
    whole = together(accelerator.bare_models, accelerator.bare_models)
    return StepStates(accelerator.strategy, whole, accelerator.optimizers, schedulers)


def _loader_state(loader: PreparedLoader, asked: tuple[PreparedLoader, int] | None) -> dict[str, Any]:
    state = loader.state_dict()
    return {**state, "asked": asked[1]} if asked is not None and loader is asked[0] else state


def _user(accelerator: Accelerator) -> dict[str, Any]:
    loggers = _loggers(accelerator)
    return {
        "kind": KIND,
        "models": len(accelerator.bare_models),
        "steps": accelerator.steps,
        "registered": [obj.state_dict() for obj in accelerator.registered],
        "trackers": {name: state for name, logger in loggers.items() if (state := logger.state_dict())},
    }


def _loggers(accelerator: Accelerator) -> dict[str, Logger]:
    """Returns the loggers among the trackers, by the trackers' names."""
    return {tracker.name: tracker.logger for tracker in accelerator.trackers if isinstance(tracker, LoggerTracker)}


def _progress(accelerator: Accelerator) -> dict[str, Any]:
    loaders = accelerator.prepared_loaders
    first = loaders[0] if loaders else None
    return {
        "epoch": 0 if first is None else first.iteration,
        "batch": first.position if first is not None and first.is_active else 0,
        "global_step": accelerator.steps,
    }


def _remove_old(folder: Path, limit: int | None) -> None:
    """Deletes the oldest automatic checkpoints above the limit, once the new one is committed."""
    if limit is None:
        return
    named = [path for path in all_checkpoints(folder) if AUTOMATIC.fullmatch(path.name)]
    for path in named[: max(0, len(named) - limit)]:
        delete(path)


# loading --------------------------------------------------------------------------------------------------------------
def find(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None) -> Path | None:
    """Returns the checkpoint to load: the given one, or the newest complete one in the automatic folder.

    A loop that continues by itself says which one it is. It begins anew where there is none yet: None.

    Raises:
        CheckpointError: if there is none.
    """
    if input_dir is not None:
        path = Path(os.path.expanduser(os.fspath(input_dir)))
        _check_alike(accelerator, "load_state", path)
        return path
    config, resumes = accelerator.project_configuration, accelerator.options.resumes
    if not config.automatic_checkpoint_naming and not resumes:
        raise ConfigurationError(
            "load_state() needs a folder: load_state('path'), or Accelerator(project_dir=…, resume='auto')."
        )
    folder = config.checkpoint_folder
    found = newest(folder, strict=True, ranks=CheckpointRanks(accelerator.strategy, folder))
    if found is None and not resumes:
        raise CheckpointError(folder, "holds no checkpoint: save_state() writes one.")
    if resumes and accelerator.is_main_process:
        print(f"begins anew: no checkpoint in {folder} yet" if found is None else f"continues from {found}", flush=True)
    return found


def hold(strategy: Strategy, options: Options) -> FolderLock | None:
    """Takes the folder of a loop that continues by itself, until it is released; None for any other loop.

    Raises:
        LeydenError: on all ranks, if another run holds it; names its process.
    """
    if not options.resumes:
        return None
    # A script may change its working directory.
    folder = options.project.checkpoint_folder.absolute()
    lock = FolderLock(folder, elsewhere="Accelerator(project_dir=…). accelerator.end_training() gives it up")
    CheckpointRanks(strategy, folder).first(lock.acquire)
    return lock


def load(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None, strict: bool, trust: bool = False) -> None:
    """Loads what `save` wrote. Everything is checked before anything changes.

    The optimizers' states are read into new memory, and checked on the way. The weights are read into the models only
    then: they alone are read twice. An engine's states are read last, into the memory that it steps with.

    Args:
        accelerator: whose state it becomes.
        input_dir: as the script gave it; see `find`.
        strict: names of weights must fit.
        trust: a folder of Accelerate's own is read too, whose files are pickles.
    """
    accelerator.finish_saving()
    path = find(accelerator, input_dir)
    if path is None:
        return
    if is_folder(path):
        if not trust:
            raise CheckpointError(
                path,
                "was written by Accelerate's save_state, in pickles, which can run any code when loaded. If you trust "
                f"who wrote it: load_state(path, trust=True); or once `leyden convert {path} OUT`, and load OUT.",
            )
        AccelerateFolder(path, accelerator, strict).load()
        return
    step_states, found = _step_states(accelerator), list[list[dict[str, Any]] | None]()
    ranks = CheckpointRanks(accelerator.strategy, path)
    reader = open_verified(path, ranks, lambda reader: found.append(step_states.read(reader)))
    steps, users = _read_user(reader, accelerator)
    schedulers = reader.state(SCHEDULERS)
    step_states.check(reader.path / f"{SCHEDULERS}.json", schedulers, reader.optimizer_count(), UNLIKE)
    rank = _read_rank(reader, accelerator)
    _load_models(accelerator, reader, strict)
    step_states.load(reader, schedulers, found.pop())
    users.load(*users.names)
    accelerator.restore_counters(steps)
    accelerator.project_configuration.continue_after(path)
    # The random numbers last, since loaders may draw.
    rank.load(*rank.names)


def _read_user(reader: CheckpointReader, accelerator: Accelerator) -> tuple[int, Unclaimed]:
    """Reads the number of steps done, and the states of registered objects and trackers."""
    user = reader.state("user", like=_user(accelerator)) if reader.has("user") else {}
    if user.get("kind") != KIND:
        raise CheckpointError(
            reader.path, "was not written by save_state: a Trainer's checkpoint is resumed by Trainer.fit."
        )
    file = reader.path / "user.json"
    with blame(file):
        saved = SavedState(user)
        models, steps = saved.integer("models", least=0), saved.integer("steps", least=0)
        registered, trackers = saved.items("registered"), saved.nested("trackers").entries
    check_count("models", models, len(accelerator.bare_models), UNLIKE)
    check_count("registered objects", len(registered), len(accelerator.registered), UNLIKE)
    states = {f"trackers.{name}": state for name, state in trackers.items()}
    owners: dict[str, StateOwner] = {f"trackers.{name}": logger for name, logger in _loggers(accelerator).items()}
    owners |= _numbered("registered", map(Unchecked, accelerator.registered))
    return steps, Unclaimed(file, {**states, **_numbered("registered", registered)}, owners)


def _read_rank(reader: CheckpointReader, accelerator: Accelerator) -> Unclaimed:
    """Reads the states of this rank's loaders and random numbers."""
    prepared, random = accelerator.prepared_loaders, RandomNumbers()
    found = RankStates(reader, accelerator.strategy)
    states, file = found.read({"rng": random}), found.path
    with blame(file):
        saved = SavedState(states)
        # None in a checkpoint of another trainer that was converted: its data begins anew.
        loaders = [None] * len(prepared) if saved.value("loaders") is None else saved.items("loaders")
        rng = saved.value("rng")
    check_count("loaders", len(loaders), len(prepared), UNLIKE)
    owners: dict[str, StateOwner] = {**_numbered("loaders", prepared), "rng": random}
    return Unclaimed(file, {**_numbered("loaders", loaders), "rng": rng}, owners)


class Unchecked:
    """A user's object as an owner of state. It has no check of its own, and may raise when it loads.

    Args:
        obj: with `state_dict` and `load_state_dict`.
    """

    def __init__(self, obj: Any) -> None:
        self._obj = obj

    def state_dict(self) -> Any:
        return self._obj.state_dict()

    def check_state_dict(self, state: Any) -> None: ...

    def load_state_dict(self, state: Any) -> None:
        self._obj.load_state_dict(state)


def _numbered(name: str, items: Iterable[Any]) -> dict[str, Any]:
    return {f"{name}[{number}]": item for number, item in enumerate(items)}


def _load_models(accelerator: Accelerator, reader: CheckpointReader, strict: bool) -> None:
    """Loads the weights of the models that the hooks leave to Leyden."""
    models = accelerator.bare_models
    left = accelerator.state_hooks.run_before_load(models, reader.path)
    if left:
        with naming(reader.weights_file):
            accelerator.strategy.load_module(reader, together(models, left), strict and len(left) == len(models))


def check_registrable(objects: tuple[Any, ...]) -> None:
    """Raises ConfigurationError for an object without state to save."""
    for number, obj in enumerate(objects):
        if isinstance(obj, (Tensor, nn.Module)) and not callable(getattr(obj, "state_dict", None)):
            raise ConfigurationError(f"register_for_checkpointing: object {number} is a tensor. Hold it in a module.")
        if not callable(getattr(obj, "state_dict", None)) or not callable(getattr(obj, "load_state_dict", None)):
            raise ConfigurationError(
                f"register_for_checkpointing: object {number}, {kind_of(obj)}, has no state_dict and load_state_dict."
            )
