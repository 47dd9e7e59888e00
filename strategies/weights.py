"""Saving and loading a module's weights: what strategies need of a checkpoint, and errors for names that do not fit."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from leyden.strategies.errors import ConfigurationError


class StateWriter(Protocol):
    """The part of a checkpoint writer that a strategy fills. All ranks call it, with the same names.

    Of a DTensor each rank's shard is written, a replica once; so is a `Fragment`, an engine's stretch of flat memory,
    which may stand in the place of a parameter or of an optimizer's state. Other tensors are written once: by rank 0,
    or, where they are large and named in `replicated`, by any rank.
    """

    def model(self, state_dict: Mapping[str, Any], replicated: Collection[str] = ()) -> None: ...
    def optimizers(self, states: list[dict[str, Any]]) -> None: ...


class WeightReader(Protocol):
    """The part of a checkpoint reader that a strategy loads modules from.

    `model` gives whole tensors, merged from all shards. `fill` reads into tensors where they are, of a DTensor or a
    `Fragment` only this rank's part, and casts to their dtype; `names` are those that there are. It exchanges nothing
    with other ranks.
    """

    def model(self, names: Iterable[str] | None = None, device: str | torch.device = "cpu") -> dict[str, Tensor]: ...
    def names(self) -> list[str]: ...
    def fill(self, targets: Mapping[str, Tensor]) -> None: ...


def load_weights(module: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Loads a state dict and names what does not fit, in words that a user can act on.

    Raises:
        ConfigurationError: if a name is missing or unexpected (strict only), or a shape differs.
    """
    state = dict(state)
    for name, held in _held_as(module, state).items():
        state[name] = state[held]
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        found = " ".join(str(error).split())
        loses = "size mismatch" in found or bool(state.keys() - module.state_dict().keys())
        raise ConfigurationError(_unfit(module, found, loses)) from error


def fill_weights(
    module: nn.Module, reader: WeightReader, strict: bool = True, places: Mapping[str, Any] | None = None
) -> None:
    """Reads weights into a module in place, so that no rank ever holds more than its part of a sharded one.

    Args:
        module: whose weights they are.
        reader: of the checkpoint.
        strict: every name must be there, and no other.
        places: where each is read to, with the names of the module's state dict, which it is if left out.

    Raises:
        ConfigurationError: if a name is missing or unexpected (strict only), or a shape differs.
    """
    state, saved = module.state_dict() if places is None else places, reader.names()
    tied = _held_as(module, saved)
    missing, unexpected = sorted(state.keys() - {*saved, *tied}), sorted(set(saved) - state.keys())
    if strict and (missing or unexpected):
        found = [f"Missing: {', '.join(missing)}."] if missing else []
        found += [f"Unexpected: {', '.join(unexpected)}."] if unexpected else []
        raise ConfigurationError(_unfit(module, " ".join(found), bool(unexpected)))
    known = [name for name in state if name not in {*missing, *tied}]
    reader.fill({name: state[name] for name in known if isinstance(state[name], Tensor)})
    others = [name for name in known if not isinstance(state[name], Tensor)]
    if others:
        module.load_state_dict(reader.model(others), strict=False)


def is_plain(module: nn.Module) -> bool:
    """Returns True if loading a state dict into a module only copies tensors into those on the CPU that the module has.

    Not if a part of it, or a hook, has a way of its own to save or to load, or a state that is no tensor.
    """
    return all(_is_plain_part(part) for part in module.modules())


_OWN_WAYS = ("state_dict", "load_state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state")
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")


def _is_plain_part(part: nn.Module) -> bool:
    kind = type(part)
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in _OWN_WAYS):
        return False
    # Batch norm's adds a counter to the files of torch before 0.4.
    loading = kind._load_from_state_dict
    if loading is not nn.Module._load_from_state_dict and loading is not _NormBase._load_from_state_dict:
        return False
    own = [*part._parameters.values(), *part._buffers.values()]
    # XLA's tensors have no memory to read into: a write to what stands for it is lost.
    usual = all(t is None or (type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu") for t in own)
    return usual and not any(getattr(part, name) for name in _HOOKS)


def _held_as(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names of tied parameters that a file leaves out, each with the one it has: some libraries write tensors once."""
    written, by_parameter = set(names), dict[int, list[str]]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    found: dict[str, str] = {}
    for tied in by_parameter.values():
        held = [name for name in tied if name in written]
        found |= {name: held[0] for name in tied if held and name not in written}
    return found


def check_partial(module: nn.Module, names: Iterable[str], warns: bool = True) -> None:
    """Lists, before a partial load, the weights that will not be loaded, and those that nothing is loaded into.

    Args:
        module: which takes what fits by name.
        names: of the weights that there are.
        warns: False on ranks that leave it to the first one.

    Raises:
        ConfigurationError: if no weight fits at all.
    """
    saved, here = set(names), set(module.state_dict())
    left, bare = sorted(saved - here), sorted(here - saved - _held_as(module, saved).keys())
    kind = type(module).__name__
    if saved and not saved & here:
        raise ConfigurationError(
            f"no weight of the checkpoint fits {kind}. There: {_some(left)}. Here: {_some(bare) or 'none'}. Build the "
            "module as it was saved."
        )
    if warns and (left or bare):
        lines = [f"not loaded, since {kind} has no such weights: {_some(left)}"] if left else []
        lines += [f"left as they are, since the checkpoint has none: {_some(bare)}"] if bare else []
        warnings.warn(f"not all weights fit {kind}; {'; '.join(lines)}.", stacklevel=3)


def _some(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _unfit(module: nn.Module, found: str, loses: bool) -> str:
    """Returns the error for weights that do not fit.

    Args:
        module: which they do not fit.
        found: the names that are missing or unexpected.
        loses: loading what fits by name would leave saved weights out, so the error does not advise it.
    """
    instead = "" if loses else ", or set strict_loading = False on it, and what is missing stays as it is now"
    return (
        f"the checkpoint's weights do not fit {type(module).__name__}: {found.rstrip('. ')}. "
        f"Build the module as it was saved{instead}."
    )
