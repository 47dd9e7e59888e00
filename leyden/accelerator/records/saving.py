"""Checkpoints of a custom training loop: models, optimizers, schedulers, loaders, random states, registered objects."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from leyden.accelerator.records.tracking import LoggerTracker
from leyden.accelerator.settings.plugins import AUTOMATIC
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.folder import all_checkpoints, delete, is_checkpoint, newest
from leyden.checkpoint.format.bucket import Place, place_of
from leyden.checkpoint.format.errors import CheckpointError, blame, naming
from leyden.checkpoint.lock import lock_on
from leyden.checkpoint.owners import RankStates, StateOwner, Unclaimed, collect_rank, write_rank
from leyden.checkpoint.reader import CheckpointReader, open_verified
from leyden.checkpoint.saves import Saves, is_possible
from leyden.checkpoint.step_states import SCHEDULERS, StepStates, check_count
from leyden.checkpoint.writer import CheckpointWriter
from leyden.core.errors import ConfigurationError, LeydenError, kind_of, nearest
from leyden.core.rank_zero import inform
from leyden.core.saved_state import SavedState
from leyden.data.rng import RandomNumbers

if TYPE_CHECKING:
    from leyden.accelerator.accelerator import Accelerator
    from leyden.accelerator.loop.stepping import Stepping
    from leyden.accelerator.prepared.loader import PreparedLoader
    from leyden.accelerator.settings.options import Options
    from leyden.callbacks.loggers.logger import Logger
    from leyden.strategies.base import Strategy

KIND = "accelerator"
"""The `kind` entry of `user.json` that marks a checkpoint of `save_state`."""
MISMATCH = (
    "this Accelerator has {here}. Prepare and register the same objects, in the same order, before load_state. For the "
    "weights alone, load the file that `leyden merge CHECKPOINT weights.safetensors` writes."
)


def combined(models: Sequence[nn.Module], chosen: Sequence[nn.Module]) -> nn.Module:
    """Returns the chosen models as one module, each as `model_<number>`; a single model keeps its own names."""
    if len(models) == 1:
        return models[0] if chosen else nn.Module()
    numbered = enumerate(models)
    return nn.ModuleDict({f"model_{n}": model for n, model in numbered if any(model is other for other in chosen)})


@dataclass
class StateHooks:
    """A script's own hooks in saves and loads.

    Attributes:
        before_save: hooks called with (models, weights, output_dir). Leyden does not save the entries that a hook
            removes from `weights`. Files that a hook writes to the folder become part of the checkpoint.
        before_load: hooks called with (models, input_dir). Leyden does not load models that a hook removes from
            `models`.
    """

    before_save: dict[int, Callable[..., Any]] = field(default_factory=OrderedDict)
    before_load: dict[int, Callable[..., Any]] = field(default_factory=OrderedDict)

    def add(self, hooks: dict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a hook and returns a handle that removes it."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def run_before_load(self, models: list[nn.Module], folder: Place) -> list[nn.Module]:
        """Calls the hooks of a load and returns the models left for Leyden to load."""
        remaining = list(models)
        for hook in self.before_load.values():
            hook(remaining, str(folder))
        return remaining

    def run_before_save(self, models: list[nn.Module], writer: CheckpointWriter) -> list[nn.Module]:
        """Calls the hooks of a save and returns the models whose weights are left for Leyden to save."""
        if not self.before_save:
            return models
        weights = [model.state_dict() for model in models]
        owners = {id(state): model for state, model in zip(weights, models, strict=True)}
        for hook in self.before_save.values():
            hook(list(models), weights, str(writer.folder))
        writer.adopt()
        return [owners[id(state)] for state in weights]


LOAD_ARGUMENTS = ("strict", "map_location", "weights_only")
MAP_LOCATIONS = (None, "cpu", "on_device")


def check_load_arguments(given: Mapping[str, Any] | None, strict: bool, map_location: Any) -> bool:
    """Refuses arguments of `load_state` without an effect, and returns True if the names of weights must match."""
    for name in given or {}:
        if name not in LOAD_ARGUMENTS:
            raise ConfigurationError(
                f"load_state(load_kwargs={{{name!r}: …}}) is unknown. {nearest(name, LOAD_ARGUMENTS)}"
            )
    location = (given or {}).get("map_location", map_location)
    if location not in MAP_LOCATIONS:
        raise ConfigurationError(
            f"load_state(map_location={location!r}) has no effect: tensors go to the prepared model's device. Leave it "
            "out. Only Accelerate's 'cpu' and 'on_device' are accepted."
        )
    return strict and bool((given or {}).get("strict", True))


def _check_same_folder(accelerator: Accelerator, name: str, path: Place) -> None:
    """Raises ConfigurationError if ranks name different folders: they write and read one checkpoint together."""
    found = accelerator.strategy.ranks.differing(str(path))
    if found:
        rank, other = next((rank, text) for rank, text in enumerate(found) if text != found[0])
        raise ConfigurationError(
            f"{name} got {found[0]!r} on rank 0 and {other!r} on rank {rank}. Pass the same folder on every rank, "
            "without the rank or the time in its name."
        )


def save_folder(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> Place:
    """Returns the folder of a save; rank 0 chooses automatic names for all ranks.

    Raises:
        ConfigurationError: if no folder is given.
        CheckpointError: if the folder holds other files.
        LeydenError: after `end_training`, for the folder that it has released.
    """
    path = _save_folder(accelerator, output_dir)
    lock = accelerator.saves.lock
    if lock is not None and lock.is_released and _is_same(path.parent, lock.folder):
        raise LeydenError(
            f"save_state() after end_training(), which released {lock.folder} to other runs. Call save_state() "
            "first, or pass a path outside of that folder."
        )
    return path


def _is_same(one: Place, other: Place) -> bool:
    return one == other or os.path.realpath(str(one)) == os.path.realpath(str(other))


def _save_folder(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> Place:
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming or (output_dir is None and accelerator.options.resumes):
        folder = config.checkpoint_folder
        return folder / CheckpointRanks(accelerator.strategy, folder).first(config.next_name)
    if output_dir is None:
        raise ConfigurationError(
            "save_state() needs a folder. Use save_state('path'), Accelerator(project_dir=…, resume='auto'), or "
            "Accelerator(project_dir=…, project_config=ProjectConfiguration(automatic_checkpoint_naming=True))."
        )
    path = place_of(output_dir, "output_dir")
    _check_same_folder(accelerator, "save_state", path)
    if isinstance(path, Path):
        CheckpointRanks(accelerator.strategy, path).first(lambda: _remove_empty_folder(Path(path)))
    return path


def _remove_empty_folder(path: Path) -> None:
    if not path.is_dir() or is_checkpoint(path):
        return
    if any(path.iterdir()):
        raise CheckpointError(
            path,
            "holds other files, but a checkpoint needs its own folder, which is replaced as a whole. Save to "
            f"{str(path / 'checkpoint')!r}, for example.",
        )
    path.rmdir()


def save_in_time(
    accelerator: Accelerator, stepping: Stepping, output_dir: str | os.PathLike[str] | None, asynchronous: bool
) -> Place:
    """Writes a checkpoint, now or once the open accumulation window closes; returns its folder."""
    # One save at a time, and automatic naming needs to see the previous checkpoint in place.
    accelerator.finish_saving()
    path, loader = save_folder(accelerator, output_dir), accelerator.active_loader
    if not stepping.is_within_window:
        with stepping.beat.saving():
            return save(accelerator, path, asynchronous=asynchronous)
    requested = None if loader is None else (loader, loader.position)
    stepping.after_window(partial(_save_deferred, stepping, accelerator, path, requested, asynchronous))
    return path


def _save_deferred(stepping: Stepping, *args: Any) -> None:
    with stepping.beat.saving():
        save(*args)


def save(
    accelerator: Accelerator,
    path: Place,
    requested: tuple[PreparedLoader, int] | None = None,
    asynchronous: bool = False,
) -> Place:
    """Writes a checkpoint, then deletes old ones above the limit.

    For a deferred save, `requested` has the active loader and its position when the script asked for it.
    """
    strategy, config = accelerator.strategy, accelerator.project_configuration
    accelerator.flush_scaler()
    for logger in _loggers(accelerator).values():
        logger.save()
    models = accelerator.bare_models
    ranks = CheckpointRanks(strategy, path)

    def contents(writer: CheckpointWriter) -> dict[str, Any]:
        kept = accelerator.state_hooks.run_before_save(models, writer)
        _step_states(accelerator).save(writer, combined(models, kept))
        writer.state("user", _user_state(accelerator))
        loaders = [_loader_state(loader, requested) for loader in accelerator.prepared_loaders]
        # Random states last, since loaders may draw random numbers.
        own = {"loaders": loaders, **collect_rank({"rng": RandomNumbers()})}
        write_rank(writer, strategy, own)
        return _progress(accelerator)

    saved = accelerator.saves.write(
        path,
        contents,
        strategy=strategy,
        ranks=ranks,
        overwrite=ranks.first(lambda: is_checkpoint(path)),
        background=asynchronous and is_possible(strategy),
        # The script may change weights at any time, not only in a step, so nothing is copied later.
        optimizers=accelerator.optimizers,
    )
    if not _is_automatic(accelerator, path):
        return saved
    config.continue_after(saved)
    limit, pending = config.total_limit, accelerator.saves.pending
    if pending is None:
        ranks.first(lambda: _remove_old(saved.parent, limit))
    elif ranks.rank == 0:
        pending.follow(lambda path: _remove_old(path.parent, limit))
    return saved


def _is_automatic(accelerator: Accelerator, path: Place) -> bool:
    """Returns True for an automatically named checkpoint, which counts toward the limit."""
    config = accelerator.project_configuration
    names = config.automatic_checkpoint_naming or accelerator.options.resumes
    is_there = names and path.absolute().parent == config.checkpoint_folder.absolute()
    return is_there and AUTOMATIC.fullmatch(path.name) is not None


def _step_states(accelerator: Accelerator) -> StepStates:
    schedulers = [prepared.scheduler for prepared in accelerator.prepared_schedulers]
    whole = combined(accelerator.bare_models, accelerator.bare_models)
    return StepStates(accelerator.strategy, whole, accelerator.optimizers, schedulers)


def _loader_state(loader: PreparedLoader, requested: tuple[PreparedLoader, int] | None) -> dict[str, Any]:
    state = loader.state_dict()
    return {**state, "asked": requested[1]} if requested is not None and loader is requested[0] else state


def _user_state(accelerator: Accelerator) -> dict[str, Any]:
    loggers = _loggers(accelerator)
    return {
        "kind": KIND,
        "models": len(accelerator.bare_models),
        "steps": accelerator.steps,
        "registered": [obj.state_dict() for obj in accelerator.registered],
        "trackers": {name: state for name, logger in loggers.items() if (state := logger.state_dict())},
    }


def _loggers(accelerator: Accelerator) -> dict[str, Logger]:
    """Returns the trackers' loggers by tracker name."""
    return {tracker.name: tracker.logger for tracker in accelerator.trackers if isinstance(tracker, LoggerTracker)}


def _progress(accelerator: Accelerator) -> dict[str, Any]:
    loaders = accelerator.prepared_loaders
    first = loaders[0] if loaders else None
    return {
        "epoch": 0 if first is None else first.iteration,
        "batch": first.position if first is not None and first.is_active else 0,
        "global_step": accelerator.steps,
    }


def _remove_old(folder: Place, limit: int | None) -> None:
    """Deletes the oldest automatic checkpoints above the limit, once the new one is committed."""
    if limit is None:
        return
    named = [path for path in all_checkpoints(folder) if AUTOMATIC.fullmatch(path.name)]
    for path in named[: max(0, len(named) - limit)]:
        delete(path)


# loading --------------------------------------------------------------------------------------------------------------
def checkpoint_to_load(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None) -> Place | None:
    """Returns the checkpoint to load: the given one, or the newest complete one in the automatic folder.

    With `resume="auto"`, prints which one it is, and returns None if there is none yet.

    Raises:
        CheckpointError: if there is none, without `resume="auto"`.
    """
    if input_dir is not None:
        place = place_of(input_dir, "input_dir")
        _check_same_folder(accelerator, "load_state", place)
        return place
    config, resumes = accelerator.project_configuration, accelerator.options.resumes
    if not config.automatic_checkpoint_naming and not resumes:
        raise ConfigurationError(
            "load_state() needs a folder. Use load_state('path'), or Accelerator(project_dir=…, resume='auto')."
        )
    folder = config.checkpoint_folder
    found = newest(folder, strict=True, ranks=CheckpointRanks(accelerator.strategy, folder))
    if found is None and not resumes:
        raise CheckpointError(folder, "holds no checkpoint. save_state() writes one.")
    if resumes:
        fresh = f"starts from scratch: no checkpoint in {folder} yet"
        inform(fresh if found is None else f"continues from {found}")
    return found


def saves_of(strategy: Strategy, options: Options) -> Saves:
    """Returns the saves of a loop. With `resume="auto"`, the folder is locked against other runs."""
    saves = Saves(holds_exit=True)
    if not options.resumes:
        return saves
    # `project_dir` may be set later, and a script may change its working directory.
    folder = options.project.checkpoint_folder.absolute()
    lock = lock_on(folder, elsewhere="Accelerator(project_dir=…). accelerator.end_training() releases it")
    saves.hold(lock, CheckpointRanks(strategy, folder))
    return saves


def load(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None, strict: bool, trust: bool) -> None:
    """Loads a checkpoint of `save`; see `Accelerator.load_state`. Everything is checked before anything changes.

    Optimizer states are read into new memory and checked while they are read. Only then are the weights read into the
    models; they alone are read twice, once to verify them. The states of a DeepSpeed engine are read last, in place.
    """
    from leyden.compat.accelerate.folder import AccelerateFolder, is_folder

    accelerator.finish_saving()
    path = checkpoint_to_load(accelerator, input_dir)
    if path is None:
        return
    if isinstance(path, Path) and is_folder(path):
        if not trust:
            raise CheckpointError(
                path,
                "was written by Accelerate's save_state, in pickles, which can run any code when loaded. If you trust "
                f"its author, use load_state(path, trust=True), or run `leyden convert {path} OUT` once and load OUT.",
            )
        AccelerateFolder(path, accelerator, strict).load()
        return
    step_states, found = _step_states(accelerator), list[list[dict[str, Any]] | None]()
    ranks = CheckpointRanks(accelerator.strategy, path)
    reader = open_verified(path, ranks, lambda reader: found.append(step_states.read(reader)))
    steps, users = _read_user(reader, accelerator)
    schedulers = reader.state(SCHEDULERS)
    step_states.check(reader.path / f"{SCHEDULERS}.json", schedulers, reader.optimizer_count(), MISMATCH)
    rank = _read_rank(reader, accelerator)
    _load_models(accelerator, reader, strict)
    step_states.load(reader, schedulers, found.pop())
    users.load(*users.names)
    accelerator.restore_counters(steps)
    accelerator.project_configuration.continue_after(path)
    # Random states last, since loaders may draw random numbers.
    rank.load(*rank.names)


def _read_user(reader: CheckpointReader, accelerator: Accelerator) -> tuple[int, Unclaimed]:
    """Reads the number of completed steps, and the states of registered objects and trackers."""
    user = reader.state("user", like=_user_state(accelerator)) if reader.has("user") else {}
    if user.get("kind") != KIND:
        raise CheckpointError(
            reader.path, "was not written by save_state. Resume a Trainer's checkpoint with Trainer.fit."
        )
    file = reader.path / "user.json"
    with blame(file):
        saved = SavedState(user)
        models, steps = saved.integer("models", least=0), saved.integer("steps", least=0)
        registered, trackers = saved.items("registered"), saved.nested("trackers").entries
    check_count("models", models, len(accelerator.bare_models), MISMATCH)
    check_count("registered objects", len(registered), len(accelerator.registered), MISMATCH)
    states = {f"trackers.{name}": state for name, state in trackers.items()}
    owners: dict[str, StateOwner] = {f"trackers.{name}": logger for name, logger in _loggers(accelerator).items()}
    owners |= _numbered("registered", map(Unchecked, accelerator.registered))
    return steps, Unclaimed(file, {**states, **_numbered("registered", registered)}, owners)


def _read_rank(reader: CheckpointReader, accelerator: Accelerator) -> Unclaimed:
    """Reads the states of this rank's loaders and random number generators."""
    prepared, random = accelerator.prepared_loaders, RandomNumbers()
    found = RankStates(reader, accelerator.strategy)
    states, file = found.read({"rng": random}), found.path
    with blame(file):
        saved = SavedState(states)
        # None in a checkpoint converted from another trainer: loaders then start from the beginning.
        loaders = [None] * len(prepared) if saved.value("loaders") is None else saved.items("loaders")
        rng = saved.value("rng")
    check_count("loaders", len(loaders), len(prepared), MISMATCH)
    owners: dict[str, StateOwner] = {**_numbered("loaders", prepared), "rng": random}
    return Unclaimed(file, {**_numbered("loaders", loaders), "rng": rng}, owners)


class Unchecked:
    """Adapts a registered object to `StateOwner`. Its state is not checked up front, so loading may raise."""

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
    """Loads the weights of the models that the hooks leave for Leyden."""
    models = accelerator.bare_models
    remaining = accelerator.state_hooks.run_before_load(models, reader.path)
    if remaining:
        strict = strict and len(remaining) == len(models)
        with naming(reader.weights_file):
            accelerator.strategy.load_module(reader, combined(models, remaining), strict)


def check_registrable(objects: tuple[Any, ...]) -> None:
    """Raises ConfigurationError for an object without state to save."""
    for number, obj in enumerate(objects):
        if isinstance(obj, Tensor):
            raise ConfigurationError(
                f"register_for_checkpointing: object {number} is a tensor. Make it a buffer of a module."
            )
        if not callable(getattr(obj, "state_dict", None)) or not callable(getattr(obj, "load_state_dict", None)):
            raise ConfigurationError(
                f"register_for_checkpointing: object {number}, {kind_of(obj)}, needs both state_dict and "
                "load_state_dict."
            )
