"""Saving and loading a module's weights: the interface of a checkpoint, and errors for weights that do not match."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn


class StateWriter(Protocol):
    """The part of a checkpoint writer that a strategy uses. All ranks call it with the same names.

    Each rank writes its own shard of a DTensor, and replicas are written once. The same holds for a `Fragment`, an
    engine's range of a flat buffer, which may replace a parameter or an optimizer's state. Other tensors are written
    once, by rank 0. Large ones named in `replicated` may be written by any rank.
    """

    def model(self, state_dict: Mapping[str, Any], replicated: Collection[str] = ()) -> None: ...
    def optimizers(self, states: list[dict[str, Any]]) -> None: ...


class WeightReader(Protocol):
    """The part of a checkpoint reader that a strategy loads modules from. It does not communicate with other ranks.

    `model` returns whole tensors, merged from all shards. `fill` reads into the target tensors in place, casting to
    their dtype; for a DTensor or a `Fragment` it reads only this rank's part. `names` lists the weights in the
    checkpoint.
    """

    def model(self, names: Iterable[str] | None = None, device: str | torch.device = "cpu") -> dict[str, Tensor]: ...
    def names(self) -> list[str]: ...
    def fill(self, targets: Mapping[str, Tensor]) -> None: ...


def load_weights(module: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Loads a state dict. The error for weights that do not match names them and the fix.

    Raises:
        ConfigurationError: if a name is missing or unexpected (strict only), or a shape differs.
    """
    state = dict(state)
    for name, saved_name in _saved_names_of_tied(module, state).items():
        state[name] = state[saved_name]
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        problems = " ".join(str(error).split())
        loses = "size mismatch" in problems or bool(state.keys() - module.state_dict().keys())
        raise ConfigurationError(_mismatch(module, problems, loses)) from error


def fill_weights(
    module: nn.Module, reader: WeightReader, strict: bool = True, places: Mapping[str, Any] | None = None
) -> None:
    """Reads weights into a module in place, so that no rank ever holds more than its shards.

    Args:
        module: the module.
        reader: reader of the checkpoint.
        strict: whether names must match exactly.
        places: tensors to read into, by the names of the module's state dict. Default: the state dict itself.

    Raises:
        ConfigurationError: if a name is missing or unexpected (strict only), or a shape differs.
    """
    state, saved = module.state_dict() if places is None else places, reader.names()
    tied = _saved_names_of_tied(module, saved)
    missing, unexpected = sorted(state.keys() - {*saved, *tied}), sorted(set(saved) - state.keys())
    if strict and (missing or unexpected):
        problems = [f"Missing: {', '.join(missing)}."] if missing else []
        problems += [f"Unexpected: {', '.join(unexpected)}."] if unexpected else []
        raise ConfigurationError(_mismatch(module, " ".join(problems), bool(unexpected)))
    matching = [name for name in state if name not in {*missing, *tied}]
    reader.fill({name: state[name] for name in matching if isinstance(state[name], Tensor)})
    others = [name for name in matching if not isinstance(state[name], Tensor)]
    if others:
        module.load_state_dict(reader.model(others), strict=False)


def is_plain(module: nn.Module) -> bool:
    """Returns True if loading a state dict only copies tensors into the module's existing CPU tensors.

    Returns False if a submodule or hook customizes saving or loading, or has state that is not a tensor.
    """
    return all(_is_plain_part(part) for part in module.modules())


_CUSTOMIZABLE = ("state_dict", "load_state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state")
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")


def _is_plain_part(part: nn.Module) -> bool:
    kind = type(part)
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in _CUSTOMIZABLE):
        return False
    # Batch norm's override only adds a counter to files written by torch before 0.4.
    loading = kind._load_from_state_dict
    if loading is not nn.Module._load_from_state_dict and loading is not _NormBase._load_from_state_dict:
        return False
    tensors = [*part._parameters.values(), *part._buffers.values()]
    # XLA tensors have no host memory to read into: writes to their storage would be lost.
    on_cpu = all(t is None or (type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu") for t in tensors)
    return on_cpu and not any(getattr(part, name) for name in _HOOKS)


def _saved_names_of_tied(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Maps tied parameters missing from a file to their saved name: some libraries write shared tensors once."""
    saved, by_parameter = set(names), dict[int, list[str]]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    saved_names: dict[str, str] = {}
    for tied in by_parameter.values():
        present = [name for name in tied if name in saved]
        saved_names |= {name: present[0] for name in tied if present and name not in saved}
    return saved_names


def check_partial(module: nn.Module, names: Iterable[str], warns: bool = True) -> None:
    """Warns, before a partial load, of saved weights that the module lacks and of weights that are not saved.

    Args:
        module: the module to load into.
        names: names of the saved weights.
        warns: False on ranks other than 0, so that only rank 0 warns.

    Raises:
        ConfigurationError: if no name matches.
    """
    saved, present = set(names), set(module.state_dict())
    not_loaded = sorted(saved - present)
    not_saved = sorted(present - saved - _saved_names_of_tied(module, saved).keys())
    kind = type(module).__name__
    if saved and not saved & present:
        raise ConfigurationError(
            f"No weight of the checkpoint fits {kind}. The checkpoint has {_listed(not_loaded)}. {kind} has "
            f"{_listed(not_saved) or 'none'}. Build the module as it was saved."
        )
    if warns and (not_loaded or not_saved):
        lines = [f"not loaded, since they are not in {kind}: {_listed(not_loaded)}"] if not_loaded else []
        lines += [f"unchanged, since they are not in the checkpoint: {_listed(not_saved)}"] if not_saved else []
        warn(f"Not all weights fit {kind}; {'; '.join(lines)}.")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _mismatch(module: nn.Module, problems: str, loses: bool) -> str:
    """Returns the error message for weights that do not match.

    Args:
        module: the module to load into.
        problems: names that are missing or unexpected, or shapes that differ.
        loses: True if a partial load would drop saved weights. The message then does not suggest it.
    """
    instead = "" if loses else ", or set strict_loading = False on it to keep the missing weights as they are"
    return (
        f"The checkpoint's weights do not fit {type(module).__name__}: {problems.rstrip('. ')}. "
        f"Build the module as it was saved{instead}."
    )
