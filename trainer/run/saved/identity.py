"""Which run saved a checkpoint: recorded when a fit begins, and compared with the run that wants to continue it.

What is recorded is the class of the module, the hyperparameters, and the optimizers with their options as
`configure_optimizers` returned them. Values are kept as plain JSON that can be compared and shown, and are never turned
back into objects.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from leyden.trainer.format.errors import CheckpointError
from leyden.trainer.format.safefile import memory_of

if TYPE_CHECKING:
    from leyden.trainer.checkpoint.foreign import ForeignWeights
    from leyden.trainer.checkpoint.reader import CheckpointReader
    from leyden.trainer.hparams import Hyperparameters
    from leyden.trainer.module import TrainModule

FILE = "identity"
# How a step is computed, and not what it computes; and the parameters, which the optimizer's own state names.
FREE = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
# Tensors of so many elements are kept with their values, larger ones by a digest.
SMALL = 32
DEPTH = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is not what it was.

    Attributes:
        text: what it was and is, in words.
        counts: it makes another run; a path, or what a checkpoint cannot hold, does not.
        replaced: resuming puts the checkpoint's value in the place of this run's.
    """

    text: str
    counts: bool = True
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Identity:
    """What distinguishes a run from other runs.

    Attributes:
        own: what `TrainModule.run_identity` returned; where there is one, nothing else is compared.
        module: the qualified name of the module's class, without its file: a script is `__main__` when it is run.
        hparams: hyperparameters of the module and the DataModule.
        optimizers: class and options by group of each optimizer; None before they are made.
    """

    own: Any
    module: str
    hparams: dict[str, dict[str, Any]]
    optimizers: list[dict[str, Any]] | None = None

    @classmethod
    def of(cls, module: TrainModule, datamodule: Hyperparameters | None) -> Identity:
        """The identity of a run that begins with this module and DataModule."""
        owners = {"module": module, "datamodule": datamodule}
        hparams: dict[str, dict[str, Any]] = {}
        for name, owner in owners.items():
            if owner is not None:
                owner.kept_hparams.settle(type(owner).__name__)
                skipped = {key: {"$skipped": words} for key, words in owner.kept_hparams.skipped.items()}
                hparams[name] = {**plain(dict(owner.hparams)), **skipped}
        return cls(plain(module.run_identity()), type(module).__qualname__, hparams)

    def with_optimizers(self, optimizers: Iterable[Optimizer]) -> Identity:
        """The same with the optimizers that `configure_optimizers` returned."""
        return dataclasses.replace(self, optimizers=[_described(optimizer) for optimizer in optimizers])

    def to_dict(self) -> dict[str, Any]:
        """Returns the identity as checkpoints hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, reader: CheckpointReader) -> Identity | None:
        """The identity of the run that saved a checkpoint; None where it has none, as those of earlier versions.

        Raises:
            CheckpointError: if it is not what `to_dict` gives.
        """
        if not reader.has(FILE):
            return None
        found = reader.json(FILE)
        needed = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(found, dict) or not needed <= found.keys() or not _is_sound(found):
            raise CheckpointError(reader.path / f"{FILE}.json", "does not say which run saved the checkpoint.")
        return cls(found["own"], found["module"], found["hparams"], found["optimizers"])

    def as_in(self, file: ForeignWeights) -> Identity:
        """The same run with the hyperparameters that a `.ckpt` of Lightning has of the same names."""
        saved = {"module": file.entry("hyper_parameters"), "datamodule": file.entry("datamodule_hyper_parameters")}
        hparams = {
            owner: {**own, **{key: value for key, value in plain(dict(saved[owner] or {})).items() if key in own}}
            for owner, own in self.hparams.items()
        }
        return dataclasses.replace(self, own=None, hparams=hparams, optimizers=None)

    def differences(self, before: Identity) -> list[Difference]:
        """Where this run differs from the one before."""
        if self.own is not None and before.own is not None:
            return _compared("run_identity()", before.own, self.own)
        found = _compared("the module's class", before.module, self.module)
        for owner, kind in (("module", "hyperparameter"), ("datamodule", "DataModule's hyperparameter")):
            then, now = before.hparams.get(owner, {}), self.hparams.get(owner, {})
            for name in dict.fromkeys([*then, *now]):
                found += _compared(f"the {kind} {name}", then.get(name, _ABSENT), now.get(name, _ABSENT))
        if self.optimizers is not None and before.optimizers is not None:
            changed = _compared_optimizers(before.optimizers, self.optimizers)
            found += [dataclasses.replace(difference, replaced=True) for difference in changed]
        return found


_ABSENT = {"$absent": ""}


def plain(value: Any, depth: int = 0, of_tensor: Callable[[Tensor], Any] | None = None) -> Any:
    """A value as JSON that is equal where the value is: lists equal tuples, and NumPy's numbers equal Python's.

    Args:
        value: anything.
        depth: levels around it.
        of_tensor: what stands for a tensor; its values or a digest of them if left out.

    Example:
        >>> plain({"betas": (0.9, float("nan"))})
        {'betas': [0.9, {'$number': 'nan'}]}
    """
    if isinstance(value, Tensor):
        return (of_tensor or _tensor)(value)
    atom = _atom(value)
    if atom is not _NESTED:
        return atom
    if depth > DEPTH:
        return _skipped(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1, of_tensor) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, depth + 1, of_tensor) for item in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [plain(item, depth + 1, of_tensor) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name, None), depth + 1, of_tensor)
            for field in dataclasses.fields(value)
        }
    if type(value).__name__ in ("Namespace", "SimpleNamespace"):
        return plain(vars(value), depth, of_tensor)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return plain(value.tolist(), depth + 1, of_tensor)
    if (
        isinstance(value, (bytes, bytearray, complex, torch.dtype, torch.device))
        or type(value).__module__ == "datetime"
    ):
        return {"$value": repr(value)}
    return _skipped(value)


_NESTED: Any = object()


def _atom(value: Any) -> Any:
    """A value without parts as JSON; `_NESTED` for any other."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, enum.Enum):
        return {"$enum": f"{type(value).__qualname__}.{value.name}"}
    if isinstance(value, (int, float)):
        number = int(value) if isinstance(value, int) else float(value)
        return number if math.isfinite(number) else {"$number": repr(number)}
    return {"$path": str(value)} if isinstance(value, PurePath) else _NESTED


def _skipped(value: Any) -> dict[str, str]:
    named = getattr(value, "__qualname__", None)
    return {"$skipped": named if isinstance(named, str) else f"a {type(value).__qualname__}"}


def _tensor(value: Tensor) -> dict[str, Any]:
    try:
        dense = value.detach().cpu().to_dense() if value.layout is not torch.strided else value.detach().cpu()
        dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        small = dense.numel() <= SMALL
        held = (
            plain(dense.flatten().tolist()) if small else hashlib.sha256(memory_of(dense.contiguous())).hexdigest()[:16]
        )
    except (RuntimeError, NotImplementedError):
        # On the meta device, or of a kind without a memory of its own.
        return _skipped(value)
    return {"$tensor": f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}", "values": held}


def _described(optimizer: Optimizer) -> dict[str, Any]:
    return {"class": type(optimizer).__qualname__, "groups": [_options(group) for group in optimizer.param_groups]}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group before a scheduler changed them: it keeps the first ones as `initial_lr` and the like."""
    found = {str(key): value for key, value in group.items() if key not in FREE}
    for key in [key for key in found if key.startswith("initial_")]:
        found[key.removeprefix("initial_")] = found.pop(key)
    return {key: plain(value) for key, value in found.items()}


def _compared_optimizers(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[Difference]:
    if len(before) != len(now):
        return _compared("the number of optimizers", len(before), len(now))
    found = []
    for number, (then, here) in enumerate(zip(before, now, strict=True)):
        which = f"optimizer {number}"
        if then["class"] != here["class"] or len(then["groups"]) != len(here["groups"]):
            found += _compared(f"{which}'s class", then["class"], here["class"])
            found += _compared(f"{which}'s number of groups", len(then["groups"]), len(here["groups"]))
            continue
        several = len(here["groups"]) > 1
        for place, (old, new) in enumerate(zip(then["groups"], here["groups"], strict=True)):
            of = f"{which} ({here['class']})" + (f", group {place}" if several else "")
            for key in new:
                # Another torch knows other options.
                if key in old:
                    found += _compared(f"{key} of {of}", old[key], new[key])
    return found


def _compared(where: str, before: Any, now: Any) -> list[Difference]:
    """The differences within two values of `plain`."""
    if _is_nest(before) and _is_nest(now):
        return [
            found
            for key in dict.fromkeys([*before, *now])
            for found in _compared(f"{where}[{key!r}]", before.get(key, _ABSENT), now.get(key, _ABSENT))
        ]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [found for place, pair in pairs for found in _compared(f"{where}[{place}]", *pair)]
    if before == now:
        return []
    counts = not any(isinstance(value, dict) and ("$path" in value or "$skipped" in value) for value in (before, now))
    return [Difference(f"{where} was {_shown(before)} and is {_shown(now)}", counts)]


def _is_nest(value: Any) -> bool:
    return isinstance(value, dict) and not any(key.startswith("$") for key in value)


def _shown(value: Any) -> str:
    if not isinstance(value, dict) or _is_nest(value):
        text = repr(value)
    elif "$absent" in value:
        text = "not there"
    elif "$tensor" in value:
        held = value.get("values")
        text = f"a tensor {value['$tensor']} " + (f"with the digest {held}" if isinstance(held, str) else f"{held}")
    else:
        text = str(next(iter(value.values())))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_sound(found: dict[str, Any]) -> bool:
    hparams, optimizers = found.get("hparams"), found.get("optimizers")
    return (
        "own" in found
        and isinstance(found.get("module"), str)
        and isinstance(hparams, dict)
        and all(isinstance(values, dict) for values in hparams.values())
        and (optimizers is None or (isinstance(optimizers, list) and all(map(_is_optimizer, optimizers))))
    )


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("class"), str):
        return False
    groups = value.get("groups")
    return isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
