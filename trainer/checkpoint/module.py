"""Building a module from a checkpoint: its hyperparameters, then its weights."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.weights import load_weights
from leyden.trainer.checkpoint.errors import CheckpointError
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.checkpoint.run import ForeignWeights

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule

M = TypeVar("M", bound="TrainModule")


def load_module(
    cls: type[M],
    path: str | Path,
    map_location: Any,
    hparams_file: str | Path | None,
    strict: bool | None,
    trust: bool,
    given: dict[str, Any],
) -> M:
    """See `TrainModule.load_from_checkpoint`."""
    path = Path(os.path.expanduser(path))
    reader = ForeignWeights(path, trust) if path.is_file() else CheckpointReader(path)
    saved = _read_hparams(Path(hparams_file)) if hparams_file is not None else _saved_hparams(reader, cls)
    module = cls(**_accepted(cls, {**saved, **given}, given))
    if isinstance(reader, CheckpointReader) and reader.has("user"):
        module.on_load_checkpoint(reader.state("user")["checkpoint"])
    load_weights(module, reader.model(), module.strict_loading if strict is None else strict)
    return module.to(map_location) if map_location is not None else module


def _saved_hparams(reader: CheckpointReader | ForeignWeights, cls: type) -> dict[str, Any]:
    if not isinstance(reader, CheckpointReader) or not reader.has("hparams"):
        return {}
    # The classes of Enums and dataclasses come from the defaults of the arguments, never from the file.
    defaults = [
        p.default for p in inspect.signature(cls).parameters.values() if p.default is not inspect.Parameter.empty
    ]
    found: dict[str, Any] = reader.state("hparams", like=_encodable_only(defaults)).get("module", {})
    return found


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


def _accepted(cls: type, values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The saved values that `__init__` takes; an error names those that it still needs."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    accepted = {name: value for name, value in values.items() if takes_any or name in parameters or name in given}
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
    return accepted
