"""The identity of a training run, saved in its checkpoints and compared with the run that resumes one.

An identity consists of the module's class, the hyperparameters, and the optimizers with the options that
`configure_optimizers` returned. Values are stored as plain JSON, for comparison and display only. They are never
converted back into objects.
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

from leyden.checkpoint.format.configs import is_config, resolved
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.safefile import memory_of
from leyden.checkpoint.format.secrets import DIGEST, digest_of, masked_values

if TYPE_CHECKING:
    from leyden.checkpoint.foreign import ForeignWeights
    from leyden.checkpoint.reader import CheckpointReader
    from leyden.trainer.hparams import Hyperparameters
    from leyden.trainer.module import TrainModule

FILE = "identity"
# Options that affect how a step is computed but not its result, and the parameters, which the optimizer's state names.
FREE = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
# Tensors up to this number of elements are stored by value, larger ones as a digest.
SMALL = 32
DEPTH = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """One value in which two identities differ.

    Attributes:
        text: a description with the old and the new value.
        counts: True if the difference makes it another run. Paths, and values that JSON cannot represent, do not count.
        replaced: True if resuming replaces this run's value by the checkpoint's.
    """

    text: str
    counts: bool = True
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Identity:
    """The properties that distinguish a training run from others.

    Attributes:
        own: the return value of `TrainModule.run_identity`. If both runs have one, nothing else is compared.
        module: the qualified name of the module's class, without its Python module, which is `__main__` in a script.
        hparams: the hyperparameters of the module and the DataModule.
        optimizers: the class of each optimizer, and its options by group; None before the optimizers are created.
    """

    own: Any
    module: str
    hparams: dict[str, dict[str, Any]]
    optimizers: list[dict[str, Any]] | None = None

    @classmethod
    def of(cls, module: TrainModule, datamodule: Hyperparameters | None) -> Identity:
        """Returns the identity of a run that begins with this module and DataModule."""
        owners = {"module": module, "datamodule": datamodule}
        hparams: dict[str, dict[str, Any]] = {}
        for name, owner in owners.items():
            if owner is not None:
                owner.kept_hparams.settle(type(owner).__name__)
                skipped = {key: {"$skipped": words} for key, words in owner.kept_hparams.skipped.items()}
                hparams[name] = {**_digested(plain(dict(owner.hparams))), **skipped}
        return cls(_digested(plain(module.run_identity())), type(module).__qualname__, hparams)

    def with_optimizers(self, optimizers: Iterable[Optimizer]) -> Identity:
        """Returns this identity with the optimizers that `configure_optimizers` returned."""
        return dataclasses.replace(self, optimizers=[_described(optimizer) for optimizer in optimizers])

    def to_dict(self) -> dict[str, Any]:
        """Returns the identity in the form that checkpoints store."""
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, reader: CheckpointReader) -> Identity | None:
        """Returns the identity of the run that saved a checkpoint; None in checkpoints of earlier versions.

        Raises:
            CheckpointError: if the file does not have the form that `to_dict` returns.
        """
        if not reader.has(FILE):
            return None
        found = reader.json(FILE)
        needed = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(found, dict) or not needed <= found.keys() or not _is_sound(found):
            raise CheckpointError(reader.path / f"{FILE}.json", "is not the identity of a run.")
        # Earlier versions saved secrets themselves.
        return cls(_digested(found["own"]), found["module"], _digested(found["hparams"]), found["optimizers"])

    def as_in(self, file: ForeignWeights) -> Identity:
        """Returns this identity with the values of a Lightning `.ckpt` for those hyperparameters that it has."""
        saved = {"module": file.entry("hyper_parameters"), "datamodule": file.entry("datamodule_hyper_parameters")}
        found = {owner: _digested(plain(dict(values or {}))) for owner, values in saved.items()}
        hparams = {
            owner: {**own, **{key: value for key, value in found[owner].items() if key in own}}
            for owner, own in self.hparams.items()
        }
        return dataclasses.replace(self, own=None, hparams=hparams, optimizers=None)

    def differences(self, before: Identity) -> list[Difference]:
        """Returns the differences between this run and an earlier one."""
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


def _digested(values: Any) -> Any:
    """Replaces the secrets in a result of `plain` by their digests."""
    return masked_values(values, mask=lambda secret, _: {DIGEST: digest_of(secret)})


def plain(value: Any, depth: int = 0, of_tensor: Callable[[Tensor], Any] | None = None) -> Any:
    """Converts a value to JSON that compares like the value. Tuples become lists, and NumPy scalars become numbers.

    `of_tensor` converts a tensor; by default to its values, or to a digest if it is large.

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
    if is_config(value):
        value = resolved(value)
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
    return {"$value": repr(value)} if _is_told_by_its_repr(value) else _skipped(value)


_NESTED: Any = object()


def _atom(value: Any) -> Any:
    """Converts a scalar to JSON; returns `_NESTED` for any other value."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, enum.Enum):
        return {"$enum": f"{type(value).__qualname__}.{value.name}"}
    if isinstance(value, (int, float)):
        number = int(value) if isinstance(value, int) else float(value)
        return number if math.isfinite(number) else {"$number": repr(number)}
    return {"$path": str(value)} if isinstance(value, PurePath) else _NESTED


def _is_told_by_its_repr(value: Any) -> bool:
    kinds = (bytes, bytearray, complex, torch.dtype, torch.device)
    return isinstance(value, kinds) or type(value).__module__ == "datetime"


def _skipped(value: Any) -> dict[str, str]:
    named = getattr(value, "__qualname__", None)
    return {"$skipped": named if isinstance(named, str) else f"a {type(value).__qualname__}"}


def _tensor(value: Tensor) -> dict[str, Any]:
    try:
        dense = value.detach().cpu().to_dense() if value.layout is not torch.strided else value.detach().cpu()
        dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        if dense.numel() <= SMALL:
            values = plain(dense.flatten().tolist())
        else:
            values = hashlib.sha256(memory_of(dense.contiguous())).hexdigest()[:16]
    except (RuntimeError, NotImplementedError):
        # A tensor without storage: on the meta device, or a subclass.
        return _skipped(value)
    return {"$tensor": f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}", "values": values}


def _described(optimizer: Optimizer) -> dict[str, Any]:
    return {"class": type(optimizer).__qualname__, "groups": [_options(group) for group in optimizer.param_groups]}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a group from before any scheduler changed them, which are saved as `initial_lr` etc."""
    found = {str(key): value for key, value in group.items() if key not in FREE}
    for key in [key for key in found if key.startswith("initial_")]:
        found[key.removeprefix("initial_")] = found.pop(key)
    return {key: plain(value) for key, value in found.items()}


def _compared_optimizers(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[Difference]:
    if len(before) != len(now):
        return _compared("the number of optimizers", len(before), len(now))
    found = []
    for number, (then, here) in enumerate(zip(before, now, strict=True)):
        name = f"optimizer {number}"
        if then["class"] != here["class"] or len(then["groups"]) != len(here["groups"]):
            found += _compared(f"{name}'s class", then["class"], here["class"])
            found += _compared(f"{name}'s number of groups", len(then["groups"]), len(here["groups"]))
            continue
        several = len(here["groups"]) > 1
        for index, (old, new) in enumerate(zip(then["groups"], here["groups"], strict=True)):
            group = f"{name} ({here['class']})" + (f", group {index}" if several else "")
            # Options that the other version of torch does not have are not compared.
            for key in new:
                if key in old:
                    found += _compared(f"{key} of {group}", old[key], new[key])
    return found


def _compared(where: str, before: Any, now: Any) -> list[Difference]:
    """Returns the differences between two results of `plain`."""
    if _is_mapping(before) and _is_mapping(now):
        return [
            found
            for key in dict.fromkeys([*before, *now])
            for found in _compared(f"{where}[{key!r}]", before.get(key, _ABSENT), now.get(key, _ABSENT))
        ]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [found for index, pair in pairs for found in _compared(f"{where}[{index}]", *pair)]
    if before == now or _is_same_secret(before, now) or _is_same_secret(now, before):
        return []
    counts = not any(isinstance(value, dict) and ("$path" in value or "$skipped" in value) for value in (before, now))
    return [Difference(f"{where} was {_shown(before)} and is {_shown(now)}", counts)]


def _is_same_secret(digest: Any, value: Any) -> bool:
    """Returns True for a secret and its digest, if only one of two versions takes it for a secret."""
    return isinstance(digest, dict) and isinstance(value, str) and digest.get(DIGEST) == digest_of(value)


def _is_mapping(value: Any) -> bool:
    """Returns True for the JSON form of a mapping, which has no "$" key, unlike those of special values."""
    return isinstance(value, dict) and not any(key.startswith("$") for key in value)


def _shown(value: Any) -> str:
    if not isinstance(value, dict) or _is_mapping(value):
        text = repr(value)
    elif "$absent" in value:
        text = "absent"
    elif DIGEST in value:
        text = f"a secret with the digest {value[DIGEST]}"
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
