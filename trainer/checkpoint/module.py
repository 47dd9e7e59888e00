"""Building a module from a checkpoint: its hyperparameters, then its weights."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import types
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from leyden.strategies.errors import ConfigurationError, nearest
from leyden.strategies.weights import check_partial, load_weights
from leyden.trainer.checkpoint.errors import CheckpointError
from leyden.trainer.checkpoint.manifest import KEPT
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.checkpoint.run import ForeignWeights
from leyden.trainer.hparams import AttributeDict, in_words

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule

M = TypeVar("M", bound="TrainModule")


@dataclass(frozen=True, slots=True)
class SavedArguments:
    """What is known of the arguments that a module was made with.

    Attributes:
        values: hyperparameters by name.
        argument: name and kind of the one argument that held all of them; None where each is an argument.
        skipped: arguments that no checkpoint holds, each with what it was, in words.
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
) -> M:
    """See `TrainModule.load_from_checkpoint`."""
    path = Path(os.path.expanduser(path))
    reader = ForeignWeights(path, trust, weights_only) if path.is_file() else CheckpointReader(path)
    saved = _saved_arguments(reader, cls)
    if hparams_file is not None:
        saved = replace(saved, values=_read_hparams(Path(hparams_file)))
    module = cls(**_accepted(cls, saved, given))
    module.configure_model()
    if isinstance(reader, CheckpointReader) and reader.has("user"):
        module.on_load_checkpoint(reader.state("user")["checkpoint"])
    weights, strict = reader.model(), module.strict_loading if strict is None else strict
    if not strict:
        check_partial(module, weights)
    load_weights(module, weights, strict)
    device = _device(map_location)
    return module if device is None else module.to(device)


def _device(map_location: Any) -> Any:
    """The device that torch.load's argument means for tensors that were read to the CPU; None to leave them there."""
    if callable(map_location):
        storage = map_location(torch.empty(0).untyped_storage(), "cpu")
        return None if storage is None else storage.device
    return map_location.get("cpu") if isinstance(map_location, Mapping) else map_location


def _saved_arguments(reader: CheckpointReader | ForeignWeights, cls: type) -> SavedArguments:
    if not isinstance(reader, CheckpointReader) or not reader.has("hparams"):
        return SavedArguments()
    # The classes of Enums and dataclasses come from the defaults of the arguments, never from the file.
    defaults = [
        p.default for p in inspect.signature(cls).parameters.values() if p.default is not inspect.Parameter.empty
    ]
    state = reader.state("hparams", like=_encodable_only(defaults))
    values, kept = state.get("module", {}), state.get(KEPT, {}).get("module", {})
    argument, skipped = kept.get("argument"), kept.get("skipped", {})
    whole = argument is None or (isinstance(argument, tuple) and [type(part) for part in argument] == [str, str])
    if not isinstance(values, dict) or not isinstance(skipped, dict) or not whole:
        raise CheckpointError(reader.path / "hparams.json", "does not hold the hyperparameters of a module.")
    return SavedArguments(values, argument, skipped)


def _encodable_only(values: list[Any]) -> list[Any]:
    from leyden.trainer.checkpoint.codec import check_encodable

    kept = []
    for value in values:
        try:
            check_encodable(value)
        except ConfigurationError:
            continue
        kept.append(value)
    return kept


def _read_hparams(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"is no JSON file of hyperparameters: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(path, "is no JSON object of hyperparameters.")
    return found


def _accepted(cls: type, saved: SavedArguments, given: dict[str, Any]) -> dict[str, Any]:
    """The saved values that `__init__` takes, under those that are given; an error names what it still needs."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    values = saved.values
    if saved.argument is not None and saved.argument[0] in parameters:
        name, kind = saved.argument
        within = {key: value for key, value in given.items() if key in values and key not in parameters}
        values = {name: _rebuilt(cls, name, kind, {**values, **within})}
        given = {key: value for key, value in given.items() if key not in within}
    unknown = [] if takes_any else [name for name in given if name not in parameters]
    for name in unknown:
        warnings.warn(
            f"{cls.__name__} takes no argument {name!r}, and is built without it. {nearest(name, dict.fromkeys([*parameters, *saved.values]))}",
            stacklevel=4,
        )
    values = {**values, **{name: value for name, value in given.items() if name not in unknown}}
    accepted = {name: value for name, value in values.items() if takes_any or name in parameters}
    missing = [
        name
        for name, p in parameters.items()
        if p.default is inspect.Parameter.empty
        and p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        and name not in accepted
    ]
    if missing:
        raise ConfigurationError(
            f"{cls.__name__} needs {', '.join(missing)}, which the checkpoint does not have: give "
            f"load_from_checkpoint(..., {missing[0]}=…), or call self.save_hyperparameters() in __init__ before training."
        )
    for name, was in saved.skipped.items():
        if name in parameters and name not in accepted and in_words(parameters[name].default) != was:
            warnings.warn(
                f"{cls.__name__} was trained with {name}={was}, which no checkpoint holds, and is built with the default: give "
                f"load_from_checkpoint(..., {name}=…).",
                stacklevel=4,
            )
    return accepted


def _rebuilt(cls: type, name: str, kind: str, values: dict[str, Any]) -> Any:
    """The one argument that held all hyperparameters, as the kind of object that it was."""
    if kind == "namespace":
        return argparse.Namespace(**values)
    if kind != "dataclass":
        return values if kind == "dict" else AttributeDict(values)
    # The class is the one that the code of `cls` names, never one that the file does.
    try:
        hint = typing.get_type_hints(cls.__init__).get(name)  # type: ignore[misc]
    except (NameError, TypeError):
        # An annotation whose import is for type checkers alone.
        hint = None
    default = inspect.signature(cls).parameters[name].default
    known = hint if dataclasses.is_dataclass(hint) else type(default)
    if not dataclasses.is_dataclass(known) or not isinstance(known, type):
        return types.SimpleNamespace(**values)
    fields = {item.name for item in dataclasses.fields(known) if item.init}
    return known(**{key: value for key, value in values.items() if key in fields})
