"""Checkpoints of a loop of one's own: models, optimizers, schedulers, loaders, random numbers and registered objects."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leyden.strategies.errors import ConfigurationError, kind_of, nearest
from leyden.strategies.saved_state import SavedState
from leyden.trainer.accelerator.accelerate_folder import AccelerateFolder, is_folder
from leyden.trainer.checkpoint.checks import check_schedulers
from leyden.trainer.checkpoint.folder import all_checkpoints, delete, is_checkpoint, newest
from leyden.trainer.checkpoint.optimizers import from_named, parameter_names, to_named
from leyden.trainer.checkpoint.peers import Peers
from leyden.trainer.checkpoint.reader import CheckpointReader, open_verified
from leyden.trainer.checkpoint.regrouped import rank_seed, saved_ranks
from leyden.trainer.checkpoint.writer import CheckpointWriter
from leyden.trainer.data.places import check_place
from leyden.trainer.data.rng import check_rng_state, rng_state, seeded_state, set_rng_state
from leyden.trainer.format.errors import CheckpointError, blame
from leyden.trainer.format.manifest import OPTIMIZERS

if TYPE_CHECKING:
    from leyden.trainer.accelerator.accelerator import Accelerator
    from leyden.trainer.accelerator.loader import PreparedLoader

KIND = "accelerator"
"""The entry of `user.json` by which a checkpoint of a loop of one's own is known."""
NAME = re.compile(r"checkpoint_(\d+)")


class Models(nn.Module):
    """Several models as one, for their names in a checkpoint; a single one keeps the names that it has."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        for number, model in enumerate(models):
            self.add_module(f"model_{number}", model)


def together(models: list[nn.Module]) -> nn.Module:
    """The models as one module."""
    return models[0] if len(models) == 1 else Models(models)


class Handle:
    """Removes a hook."""

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


@dataclass
class StateHooks:
    """What a script does beside a save or a load.

    Attributes:
        before_save: called with (models, weights, output_dir): what it takes out of `weights` is not saved by Leyden, and
            what it writes into the folder belongs to the checkpoint.
        before_load: called with (models, input_dir): what it takes out of `models` is not loaded by Leyden.
    """

    before_save: list[Callable[..., Any]] = field(default_factory=list)
    before_load: list[Callable[..., Any]] = field(default_factory=list)

    def add(self, hooks: list[Callable[..., Any]], hook: Callable[..., Any]) -> Handle:
        """Registers a hook; the handle removes it."""
        hooks.append(hook)
        return Handle(hooks, hook)


LOAD_ARGUMENTS = ("strict", "map_location", "weights_only")
PLACES = (None, "cpu", "on_device")


def load_arguments(given: Mapping[str, Any] | None, strict: bool, map_location: Any) -> bool:
    """Whether names of weights must fit.

    Raises:
        ConfigurationError: for an argument that would be without effect.
    """
    for name in given or {}:
        if name not in LOAD_ARGUMENTS:
            raise ConfigurationError(
                f"load_state(load_kwargs={{{name!r}: …}}) is not known. {nearest(name, LOAD_ARGUMENTS)}"
            )
    place = (given or {}).get("map_location", map_location)
    if place not in PLACES:
        raise ConfigurationError(
            f"load_state(map_location={place!r}): tensors go to where the prepared model's are. Leave it out; 'cpu' and "
            "'on_device' are taken, as Accelerate takes them."
        )
    return strict and bool((given or {}).get("strict", True))


def _check_alike(accelerator: Accelerator, name: str, path: Path) -> None:
    """A checkpoint is one folder, which all ranks write and read together."""
    found = accelerator.strategy.ranks.differing(str(path))
    if found:
        rank, other = next((rank, text) for rank, text in enumerate(found) if text != found[0])
        raise ConfigurationError(
            f"{name} was given {found[0]!r} on rank 0 and {other!r} on rank {rank}: give every rank the same folder, without its rank "
            "or a time of its own in the name."
        )


def target(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> Path:
    """Where a save goes; all ranks are told what rank 0 finds.

    Raises:
        ConfigurationError: if there is no folder to be saved in.
        CheckpointError: if there is one that holds something else.
    """
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming:
        folder = checkpoint_folder(accelerator)
        number = Peers(accelerator.strategy, folder).first(lambda: _free_number(folder, config.iteration))
        config.iteration = number
        return folder / f"checkpoint_{number}"
    if output_dir is None:
        raise ConfigurationError(
            "save_state() needs a folder: save_state('path'), or Accelerator(project_dir=…, project_config="
            "ProjectConfiguration(automatic_checkpoint_naming=True))."
        )
    path = Path(os.path.expanduser(os.fspath(output_dir)))
    _check_alike(accelerator, "save_state", path)
    Peers(accelerator.strategy, path).first(lambda: _make_way(path))
    return path


def _free_number(folder: Path, number: int) -> int:
    """Numbers of an earlier run in the same folder are not used twice."""
    while os.path.lexists(folder / f"checkpoint_{number}"):
        number += 1
    return number


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


def checkpoint_folder(accelerator: Accelerator) -> Path:
    """Folder of checkpoints that are named automatically."""
    if accelerator.project_dir is None:
        raise ConfigurationError("automatic_checkpoint_naming needs Accelerator(project_dir=…).")
    return Path(accelerator.project_dir) / "checkpoints"


def save(accelerator: Accelerator, path: Path, asked: tuple[PreparedLoader, int] | None = None) -> Path:
    """Writes a checkpoint, then removes those above the limit.

    Args:
        accelerator: whose state it is.
        path: the folder.
        asked: the loader that was being read when the script asked for the checkpoint, and its position then.
    """
    strategy = accelerator.strategy
    accelerator.flush_scaler()
    for tracker in accelerator.trackers:
        logger = getattr(tracker, "logger", None)
        if logger is not None:
            logger.save()
    models = accelerator.bare_models
    ranks = Peers(strategy, path)
    overwrite = ranks.first(lambda: is_checkpoint(path))
    with CheckpointWriter(path, overwrite=overwrite, ranks=ranks) as writer:
        kept = _run_save_hooks(accelerator, models, writer)
        whole = together(models)
        names = parameter_names(whole)
        optimizers = [to_named(strategy.masters.saved_form(optimizer), names) for optimizer in accelerator.optimizers]
        strategy.save(writer, together(kept) if kept else nn.Module(), optimizers)
        writer.state("schedulers", _schedulers(accelerator))
        writer.state("user", _user(accelerator))
        writer.state(f"rank-{strategy.data_rank}", _rank(accelerator, asked), of_rank=True)
        saved = writer.commit(
            progress=_progress(accelerator), world_size=strategy.ranks.world_size, strategy=strategy.name or "custom"
        )
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming:
        config.iteration += 1
        ranks.first(lambda: _remove_old(saved.parent, config.total_limit))
    return saved


def _run_save_hooks(accelerator: Accelerator, models: list[nn.Module], writer: CheckpointWriter) -> list[nn.Module]:
    """Calls the hooks; gives back the models whose weights they left to be saved."""
    hooks = accelerator.state_hooks.before_save
    if not hooks:
        return models
    weights = [model.state_dict() for model in models]
    owners = {id(state): model for state, model in zip(weights, models, strict=True)}
    for hook in hooks:
        hook(list(models), weights, str(writer.folder))
    writer.adopt()
    return [owners[id(state)] for state in weights]


def _schedulers(accelerator: Accelerator) -> dict[str, Any]:
    return {
        "schedulers": [scheduler.state_dict() for scheduler in accelerator.prepared_schedulers],
        "precision": accelerator.precision.state_dict(),
        "strategy": accelerator.strategy.state_dict(),
    }


def _user(accelerator: Accelerator) -> dict[str, Any]:
    return {
        "kind": KIND,
        "models": len(accelerator.bare_models),
        "steps": accelerator.steps,
        "registered": [obj.state_dict() for obj in accelerator.registered],
        "trackers": {
            tracker.name: tracker.logger.state_dict()
            for tracker in accelerator.trackers
            if hasattr(tracker, "logger") and tracker.logger.state_dict()
        },
    }


def _rank(accelerator: Accelerator, asked: tuple[PreparedLoader, int] | None) -> dict[str, Any]:
    loaders = []
    for loader in accelerator.prepared_loaders:
        state = loader.state_dict()
        if asked is not None and loader is asked[0]:
            state["asked"] = asked[1]
        loaders.append(state)
    # The random numbers last, since everything before may draw.
    return {"loaders": loaders, "seed": torch.initial_seed() % 2**63, "rng": rng_state()}


def _progress(accelerator: Accelerator) -> dict[str, Any]:
    loaders = accelerator.prepared_loaders
    first = loaders[0] if loaders else None
    return {
        "epoch": 0 if first is None else first.iteration,
        "batch": first.position if first is not None and first.is_active else 0,
        "global_step": accelerator.steps,
    }


def _remove_old(folder: Path, limit: int | None) -> None:
    """Removes the oldest automatic ones above the limit. The new one is committed."""
    if limit is None:
        return
    named = [path for path in all_checkpoints(folder) if NAME.fullmatch(path.name)]
    for path in named[: max(0, len(named) - limit)]:
        delete(path)


# loading ----------------------------------------------------------------------------------------------------------------
def find(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None) -> Path:
    """The checkpoint that is meant; the newest whole one of the automatic folder if none is named.

    Raises:
        CheckpointError: if there is none.
    """
    if input_dir is not None:
        path = Path(os.path.expanduser(os.fspath(input_dir)))
        _check_alike(accelerator, "load_state", path)
        return path
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ConfigurationError("load_state() needs a folder: load_state('path').")
    folder = checkpoint_folder(accelerator)
    found = newest(folder, strict=True, ranks=Peers(accelerator.strategy, folder))
    if found is None:
        raise CheckpointError(folder, "holds no checkpoint: save_state() writes one.")
    return found


def load(accelerator: Accelerator, path: Path, strict: bool, trust: bool = False) -> None:
    """Takes back what `save` wrote; what does not fit is refused before anything is changed.

    The optimizers' states are read last, since an engine's are read into the memory that it steps with.

    Args:
        accelerator: whose state it becomes.
        path: the folder.
        strict: names of weights must fit.
        trust: Accelerate's own folder is taken, whose files are pickles.
    """
    if is_folder(path):
        if not trust:
            raise CheckpointError(
                path,
                "was written by Accelerate's save_state, in pickles, which can run any code when loaded. If you trust who wrote it: "
                f"load_state(path, trust=True); or once `leyden convert {path} OUT`, and load OUT.",
            )
        AccelerateFolder(path, accelerator, strict).load()
        return
    reader = open_verified(path, Peers(accelerator.strategy, path))
    models = list(accelerator.bare_models)
    user = reader.state("user", like=_user(accelerator)) if reader.has("user") else {}
    if user.get("kind") != KIND:
        raise CheckpointError(path, "was not written by save_state: a Trainer's checkpoint is resumed by Trainer.fit.")
    schedulers = reader.state("schedulers")
    rank = _read_rank(reader, accelerator)
    _check_parts(reader.path, user, schedulers, rank, accelerator)
    _check("models", user["models"], len(models))
    _check("registered objects", len(user["registered"]), len(accelerator.registered))
    _check("optimizers", reader.optimizer_count(), len(accelerator.optimizers))
    _check("schedulers", len(schedulers["schedulers"]), len(accelerator.prepared_schedulers))
    # None in a checkpoint of another trainer that was converted: its data begins anew.
    loaders = rank["loaders"] if rank["loaders"] is not None else [None] * len(accelerator.prepared_loaders)
    _check("loaders", len(loaders), len(accelerator.prepared_loaders))
    left = list(models)
    for hook in accelerator.state_hooks.before_load:
        hook(left, str(path))
    if left:
        whole = together(models) if len(left) == len(models) else Models([])
        for number, model in enumerate(models if len(left) < len(models) else ()):
            if any(model is other for other in left):
                whole.add_module(f"model_{number}", model)
        accelerator.strategy.load_module(reader, whole, strict and len(left) == len(models))
    names = parameter_names(together(models))
    optimizers = reader.optimizers(like=accelerator.strategy.masters.parts(together(models)))
    for number, (optimizer, state) in enumerate(zip(accelerator.optimizers, optimizers, strict=True)):
        with blame(reader.path / OPTIMIZERS, f"optimizers[{number}]"):
            from_named(accelerator.strategy.masters.saved_form(optimizer), state, names)
    with blame(reader.path / "schedulers.json"):
        for scheduler, state in zip(accelerator.prepared_schedulers, schedulers["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        accelerator.precision.load_state_dict(schedulers["precision"])
        accelerator.strategy.load_state_dict(schedulers.get("strategy", {}))
    for number, (obj, state) in enumerate(zip(accelerator.registered, user["registered"], strict=True)):
        with blame(reader.path / "user.json", f"registered[{number}]"):
            obj.load_state_dict(state)
    for tracker in accelerator.trackers:
        if tracker.name in user["trackers"] and hasattr(tracker, "logger"):
            with blame(reader.path / "user.json", f"trackers.{tracker.name}"):
                tracker.logger.load_state_dict(user["trackers"][tracker.name])
    for number, (loader, state) in enumerate(zip(accelerator.prepared_loaders, loaders, strict=True)):
        if state is not None:
            with blame(reader.path, f"loaders[{number}]"):
                loader.load_state_dict(state)
    accelerator.restore_counters(user["steps"])
    named = NAME.fullmatch(path.name)
    if named is not None:
        accelerator.project_configuration.iteration = int(named[1]) + 1
    if rank["rng"] is not None:
        set_rng_state(rank["rng"])


def _check_parts(folder: Path, user: Any, schedulers: Any, rank: Any, accelerator: Accelerator) -> None:
    """Refuses what `save` cannot have written, before anything is changed.

    Raises:
        CheckpointError: names the file and the entry.
    """
    with blame(folder / "user.json"):
        saved = SavedState(user)
        saved.integer("models", least=0)
        saved.integer("steps", least=0)
        saved.items("registered")
        saved.nested("trackers")
    own = [getattr(scheduler, "scheduler", scheduler) for scheduler in accelerator.prepared_schedulers]
    check_schedulers(folder / "schedulers.json", schedulers, own)
    with blame(folder / f"rank-{accelerator.strategy.data_rank}.json"):
        saved = SavedState(rank)
        if saved.value("rng") is not None:
            check_rng_state(rank["rng"])
        for number, state in enumerate(saved.items("loaders") if saved.value("loaders") is not None else ()):
            if state is None:
                continue
            loader = SavedState(state, f"loaders[{number}]")
            loader.integer("iteration", least=0)
            loader.value("rest")
            if loader.value("place") is not None:
                loader.integer("position", least=0)
                check_place(loader.nested("place"))


def _read_rank(reader: CheckpointReader, accelerator: Accelerator) -> dict[str, Any]:
    """The state of this rank; on another number of ranks the place of all, and random numbers seeded anew beyond rank 0."""
    strategy = accelerator.strategy
    number = strategy.data_rank
    if saved_ranks(reader) == strategy.data_size:
        own: dict[str, Any] = reader.state(f"rank-{number}")
        return own
    first: dict[str, Any] = reader.state("rank-0")
    if number > 0:
        first["rng"] = seeded_state(rank_seed(first["seed"], reader.progress()["global_step"], number))
    return first


def _check(kind: str, there: int, here: int) -> None:
    if there != here:
        raise ConfigurationError(
            f"the checkpoint has {there} {kind}, and this Accelerator has {here}: prepare and register the same, in the same order, "
            "before load_state."
        )


def check_registrable(objects: tuple[Any, ...]) -> None:
    """Raises ConfigurationError where an object has no state that could be saved."""
    for number, obj in enumerate(objects):
        if isinstance(obj, (Tensor, nn.Module)) and not callable(getattr(obj, "state_dict", None)):
            raise ConfigurationError(f"register_for_checkpointing: object {number} is a tensor. Hold it in a module.")
        if not callable(getattr(obj, "state_dict", None)) or not callable(getattr(obj, "load_state_dict", None)):
            raise ConfigurationError(
                f"register_for_checkpointing: object {number}, {kind_of(obj)}, has no state_dict and load_state_dict."
            )
