"""Builds a module or a DataModule from a checkpoint: from its hyperparameters, then its weights or its state."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from leyden.checkpoint.foreign import ForeignWeights
from leyden.checkpoint.format.bucket import place_of
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import KEPT
from leyden.checkpoint.frozen import FrozenPart, digests_of
from leyden.checkpoint.reader import CheckpointReader
from leyden.core.errors import ConfigurationError, needs
from leyden.core.paths import local_path
from leyden.strategies.weights import check_partial, load_weights

if TYPE_CHECKING:
    from leyden.trainer.datamodule import DataModule
    from leyden.trainer.module import TrainModule

M = TypeVar("M", bound="TrainModule")
D = TypeVar("D", bound="DataModule")


@dataclass(frozen=True, slots=True)
class SavedArguments:
    """The arguments of a module's or DataModule's `__init__`, as a checkpoint records them.

    Attributes:
        values: the hyperparameters by name.
        argument: the name and kind of the one argument that held all hyperparameters; None if each is an argument.
        skipped: the arguments that a checkpoint cannot hold, each with a description.
    """

    values: dict[str, Any] = field(default_factory=dict)
    argument: tuple[str, str] | None = None
    skipped: dict[str, str] = field(default_factory=dict)


def load_module(
    cls: type[M],
    path: str | Path,
    map_location: Any,
    hparams_file: str | Path | None,
    strict: bool | None,
    trust: bool,
    weights_only: bool | None,
    given: dict[str, Any],
    arguments_for: Callable[[type, SavedArguments, dict[str, Any]], dict[str, Any]],
) -> M:
    """Implements `TrainModule.load_from_checkpoint`; `arguments_for` chooses the arguments of `__init__`."""
    reader = _open(path, trust, weights_only)
    saved = _saved_arguments(reader, cls, "module", hparams_file)
    module = cls(**arguments_for(cls, saved, given))
    module.configure_model()
    if isinstance(reader, CheckpointReader) and reader.has("user"):
        module.on_load_checkpoint(reader.state("user")["checkpoint"])
    weights, strict = reader.model(), module.strict_loading if strict is None else strict
    frozen = FrozenPart.read(reader) if isinstance(reader, CheckpointReader) else None
    if frozen is not None and isinstance(reader, CheckpointReader):
        frozen.check(reader, module, digests_of(module, dtypes=frozen.dtypes), strict)
        strict = False
    elif not strict:
        check_partial(module, weights)
    load_weights(module, weights, strict)
    device = _device(map_location)
    return module if device is None else module.to(device)


def load_datamodule(
    cls: type[D],
    path: str | Path,
    hparams_file: str | Path | None,
    trust: bool,
    weights_only: bool | None,
    given: dict[str, Any],
    arguments_for: Callable[[type, SavedArguments, dict[str, Any]], dict[str, Any]],
) -> D:
    """Implements `DataModule.load_from_checkpoint`; `arguments_for` chooses the arguments of `__init__`."""
    reader = _open(path, trust, weights_only)
    datamodule = cls(**arguments_for(cls, _saved_arguments(reader, cls, "datamodule", hparams_file), given))
    if isinstance(reader, ForeignWeights):
        state = reader.entry(cls.__qualname__)
    else:
        state = reader.state("user").get("datamodule") if reader.has("user") else None
    if state:
        datamodule.load_state_dict(state)
    return datamodule


def _open(path: str | Path, trust: bool, weights_only: bool | None) -> CheckpointReader | ForeignWeights:
    place = place_of(path, "checkpoint_path")
    if isinstance(place, Path) and place.is_file():
        return ForeignWeights(place, trust, weights_only)
    return CheckpointReader(place)


def _device(map_location: Any) -> Any:
    """Returns the device to which torch.load's `map_location` maps CPU tensors; None if they stay on the CPU."""
    if callable(map_location):
        storage = map_location(torch.empty(0).untyped_storage(), "cpu")
        return None if storage is None else storage.device
    return map_location.get("cpu") if isinstance(map_location, Mapping) else map_location


def _saved_arguments(
    reader: CheckpointReader | ForeignWeights, cls: type, owner: str, hparams_file: str | Path | None
) -> SavedArguments:
    saved = _recorded_arguments(reader, cls, owner)
    return saved if hparams_file is None else replace(saved, values=_read_hparams(Path(hparams_file)))


def _recorded_arguments(reader: CheckpointReader | ForeignWeights, cls: type, owner: str) -> SavedArguments:
    if isinstance(reader, ForeignWeights):
        return _arguments_of_lightning(reader, owner)
    if not reader.has("hparams"):
        return SavedArguments()
    # Enums and dataclasses are restored with the classes of the arguments' defaults. The file never names a class.
    defaults = [
        p.default for p in inspect.signature(cls).parameters.values() if p.default is not inspect.Parameter.empty
    ]
    state = reader.state("hparams", like=_encodable_only(defaults))
    values, kept = state.get(owner, {}), state.get(KEPT, {}).get(owner, {})
    argument, skipped = kept.get("argument"), kept.get("skipped", {})
    is_valid = argument is None or (isinstance(argument, tuple) and [type(part) for part in argument] == [str, str])
    if not isinstance(values, dict) or not isinstance(skipped, dict) or not is_valid:
        raise CheckpointError(reader.path / "hparams.json", f"does not hold the hyperparameters of a {owner}.")
    return SavedArguments(values, argument, skipped)


def _arguments_of_lightning(reader: ForeignWeights, owner: str) -> SavedArguments:
    """Returns the hyperparameters in a Lightning `.ckpt`. Does not import the class that LightningCLI records there."""
    prefix = "" if owner == "module" else "datamodule_"
    entries, name = reader.entry(f"{prefix}hyper_parameters"), reader.entry(f"{prefix}hparams_name")
    if not isinstance(entries, Mapping):
        return SavedArguments()
    values = {str(key): value for key, value in entries.items() if key not in ("_class_path", "_instantiator")}
    return SavedArguments(values, (name, "mapping") if isinstance(name, str) else None)


def _encodable_only(values: list[Any]) -> list[Any]:
    """Returns the values that a checkpoint can hold."""
    from leyden.checkpoint.format.codec import check_encodable

    kept = []
    for value in values:
        try:
            check_encodable(value)
        except ConfigurationError:
            continue
        kept.append(value)
    return kept


def _read_hparams(path: Path) -> dict[str, Any]:
    path = Path(local_path(path, "hparams_file"))
    kind, parse = ("YAML", _yaml) if path.suffix in (".yaml", ".yml") else ("JSON", json.loads)
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not a {kind} file of hyperparameters: {error}.") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise CheckpointError(path, f"is not a {kind} file of hyperparameters by name.")
    return values


def _yaml(text: str) -> Any:
    """Parses YAML safely: constructs no Python objects and runs no code."""
    with needs("pyyaml", None, "load_from_checkpoint(hparams_file='….yaml')"):
        import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
