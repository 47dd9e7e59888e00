"""Saves and loads optimizer state keyed by parameter name, in the dtype in which it was saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from leyden.core.errors import ConfigurationError, StateError, nearest
from leyden.core.saved_state import SavedState, brief
from leyden.core.tree import map_tensors
from leyden.strategies.fragment import Fragment

# Full names by parameter, or the module that has the parameters.
Names: TypeAlias = "Mapping[nn.Parameter, str] | Mapping[Tensor, str] | nn.Module"


def parameter_names(module: nn.Module) -> dict[Tensor, str]:
    """Returns the full name of every parameter; for a tied parameter, its first name."""
    return {parameter: name for name, parameter in module.named_parameters()}


def to_named(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """Returns the state of an optimizer, keyed by parameter name and never by index.

    Args:
        optimizer: any optimizer with torch's `state_dict`.
        names: parameter → full name, or the module. Parameters outside the module are named
            `__extra__.<group>.<position>`.

    Returns:
        A dict of `state` by name; `param_groups` with names under `params`; `other` for state that belongs to no
        parameter; `host` for entries on the CPU whose parameter is on another device; `dtypes` for parameters that the
        optimizer does not step in float32; and `extra` for all other entries of the optimizer's state dict. Tensors are
        the optimizer's own, not copies.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> to_named(torch.optim.SGD(layer.parameters(), lr=0.1), layer)["param_groups"][0]["params"]
        ['weight', 'bias']
    """
    flat = flat_names(optimizer, names)
    plain = optimizer.state_dict()
    by_index = [name for group in flat for name in group]
    parameters = _by_name(optimizer, flat)
    state: dict[str, Any] = {}
    other: dict[Any, Any] = {}
    host: dict[str, list[Any]] = {}
    for key, entries in plain["state"].items():
        if type(key) is not int or not 0 <= key < len(by_index):
            other[key] = entries
            continue
        name = by_index[key]
        state[name] = entries
        if parameters[name].device.type != "cpu" and isinstance(entries, Mapping):
            host[name] = [
                entry
                for entry, value in entries.items()
                # For Fragments, the engine decides where its offloaded memory is.
                if isinstance(value, Tensor) and value.device.type == "cpu" and not isinstance(value, Fragment)
            ]
    groups = [{**group, "params": list(own)} for group, own in zip(plain["param_groups"], flat, strict=True)]
    extra = {key: value for key, value in plain.items() if key not in ("state", "param_groups")}
    # An engine that steps copies of the parameters reports the copies' dtypes.
    master_dtypes: Mapping[Tensor, torch.dtype] = getattr(optimizer, "dtypes", {})
    dtypes = {name: master_dtypes.get(parameter, parameter.dtype) for name, parameter in parameters.items()}
    not_float32 = {name: dtype for name, dtype in dtypes.items() if dtype != torch.float32}
    return {
        "state": state,
        "param_groups": groups,
        "other": other,
        "host": host,
        "dtypes": not_float32,
        "extra": extra,
    }


def from_named(optimizer: Optimizer, saved: Mapping[str, Any], names: Names) -> None:
    """Loads a state from `to_named`. The optimizer takes over the tensors without copying them.

    torch's `load_state_dict` casts state to the dtype of its parameter. This function keeps the dtype in which the
    state was saved, because NAdam and others would otherwise continue with different numbers if parameters are bf16. If
    the parameter itself had another dtype when saved, as under another precision, state of the parameter's shape and
    dtype is cast along with it.

    Raises:
        ConfigurationError: if groups differ, or a parameter is missing or new; names the parameter.
    """
    check_named(optimizer, saved, names)
    flat = flat_names(optimizer, names)
    index = {name: position for position, name in enumerate(name for group in flat for name in group)}
    plain = {
        **saved.get("extra", {}),
        "state": {**{index[name]: entries for name, entries in saved["state"].items()}, **saved.get("other", {})},
        "param_groups": [
            {**group, "params": [index[name] for name in own]}
            for group, own in zip(saved["param_groups"], flat, strict=True)
        ],
    }
    rates = [group.get("lr") for group in optimizer.param_groups]
    # Read before loading, since loading adds to the defaults. An engine's stand-in for an optimizer has no defaults.
    defaults = set(getattr(optimizer, "defaults", ()))
    needed = [defaults.intersection(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(plain)
    pairs = zip(needed, optimizer.param_groups, strict=True)
    missing = sorted({key for keys, group in pairs for key in keys if key not in group})
    if missing:
        raise ConfigurationError(
            f"the checkpoint's optimizer was of another class than {type(optimizer).__name__}: it has no "
            f"{', '.join(missing)}. Build the same optimizer, or leave 'optimizers' out of restore."
        )
    _restore_dtypes(optimizer, saved, flat)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(rate, Tensor) and isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].to(rate.device)


# Entries of torch's optimizers that have the shape of the parameter.
_PARAMETER_SHAPED = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum"),
    *("exp_inf", "prev", "ax"),
}


# Entries that a step of torch's optimizers needs for any parameter that has state.
_NEEDED = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "SparseAdam"), ("step", "exp_avg", "exp_avg_sq")),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "RMSprop": ("step", "square_avg"),
    "Adagrad": ("step", "sum"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Rprop": ("step", "prev"),
}


def check_named(optimizer: Optimizer, saved: Any, names: Names) -> None:
    """Raises if `from_named` could not load a state. Changes nothing.

    Raises:
        ConfigurationError: if groups differ, or a parameter is missing or new; names the parameter.
        StateError: if an entry cannot be from `to_named`; names the entry.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise ConfigurationError(
            "this is not the state of an optimizer by name. Pass the result of to_named or of the reader."
        )
    entries, flat = SavedState(saved), flat_names(optimizer, names)
    groups = [
        SavedState(group, f"param_groups[{number}]") for number, group in enumerate(entries.items("param_groups"))
    ]
    saved_names = [group.items("params") for group in groups]
    for group, own in zip(groups, saved_names, strict=True):
        if not all(isinstance(name, str) for name in own):
            raise StateError(group.path("params"), "must be names of parameters")
    _check_groups(optimizer, saved_names, flat)
    parameters = _by_name(optimizer, flat)
    state = entries.nested("state")
    unknown = [name for name in state.entries if name not in parameters]
    if unknown:
        raise ConfigurationError(
            f"the saved optimizer has state for {unknown[0]!r}. {nearest(str(unknown[0]), parameters)}"
        )
    for part in ("other", "host", "dtypes", "extra"):
        entries.nested(part, {})
    for group, now in zip(groups, optimizer.param_groups, strict=True):
        _check_options(group, now)
    if not type(optimizer).__module__.startswith("torch.optim."):
        # Only the ranges and entries of torch's own optimizers are known.
        return
    for group, now in zip(groups, optimizer.param_groups, strict=True):
        _check_ranges(type(optimizer), group, now)
    for name, parameter in parameters.items():
        if name in state:
            _check_moments(state.nested(name), parameter, type(optimizer).__name__)


def _check_options(saved: SavedState, now: Mapping[str, Any]) -> None:
    """Compares the types of a group's saved options with those of its current ones."""
    for key, present in now.items():
        if key == "params" or key not in saved or present is None:
            continue
        value = saved.value(key)
        if isinstance(present, bool):
            # None lets torch choose, as for `foreach`.
            fits = value is None or isinstance(value, bool)
        elif isinstance(present, (int, float, Tensor)):
            fits = type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
        elif isinstance(present, (tuple, list)):
            numbers = all(type(item) in (int, float) or isinstance(item, Tensor) for item in present)
            fits = isinstance(value, (tuple, list)) and len(value) == len(present)
            fits = fits and not (numbers and not all(type(v) in (int, float) or isinstance(v, Tensor) for v in value))
        else:
            fits = not isinstance(present, str) or isinstance(value, str)
        if not fits:
            raise StateError(saved.path(key), f"is {brief(value)}, and this optimizer has {brief(present)}")


def _check_ranges(kind: Any, saved: SavedState, now: Mapping[str, Any]) -> None:
    """Raises if torch's optimizer refuses a number among the saved options, or could not compute a step with it."""
    for key, present in now.items():
        value = saved.entries.get(key, present)
        numbers = value if isinstance(value, (tuple, list)) else (value,)
        if key == "params" or not all(type(number) in (int, float) for number in numbers) or value == present:
            continue
        largest = max(numbers, key=abs, default=0)
        if abs(largest) > torch.finfo(torch.float32).max:
            raise StateError(saved.path(key), f"is {brief(largest)}, which float32 cannot hold")
        # A schedule may end slightly below zero, by a rounding error.
        if key in ("lr", "initial_lr", "weight_decay"):
            continue
        try:
            kind([nn.Parameter(torch.zeros(1, 1))], **{key: value})
        except ValueError as error:
            raise StateError(saved.path(key), f"cannot be: {error}") from error
        except TypeError:
            # Not an argument of the optimizer: something else keeps this entry in the groups.
            continue


def _check_moments(saved: SavedState, parameter: Tensor, kind: str) -> None:
    """Raises if a parameter's state lacks an entry, or if an entry has the wrong shape."""
    for key in _NEEDED.get(kind, ()) if saved.entries else ():
        saved.value(key)
    for key, value in saved.entries.items():
        fits = isinstance(value, (Tensor, Fragment))
        if key in _PARAMETER_SHAPED:
            # SGD without momentum saves None.
            fits = (fits and value.shape == parameter.shape) or (value is None and key == "momentum_buffer")
        elif key == "step":
            fits = (fits and value.numel() == 1) or (kind == "SparseAdam" and type(value) is int)
        else:
            fits = True
        if not fits:
            wanted = "one number" if key == "step" else f"the shape {tuple(parameter.shape)}"
            raise StateError(saved.path(key), f"is {brief(value)}, and must be a tensor of {wanted}")


def _restore_dtypes(optimizer: Optimizer, saved: Mapping[str, Any], flat: list[list[str]]) -> None:
    """Replaces the tensors that `load_state_dict` has cast with the saved ones."""
    own_loading = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    groups = {name: group for group, own in zip(optimizer.param_groups, flat, strict=True) for name in own}
    for name, parameter in _by_name(optimizer, flat).items():
        entries = saved["state"].get(name)
        loaded = optimizer.state.get(parameter)
        if not isinstance(entries, Mapping) or not isinstance(loaded, dict):
            continue
        on_host = saved.get("host", {}).get(name)
        # Checkpoints of earlier versions do not record dtypes.
        saved_dtype = saved["dtypes"].get(name, torch.float32) if "dtypes" in saved else parameter.dtype
        for key, value in entries.items():
            if key not in loaded or (own_loading and not _only_cast(value, loaded[key])):
                continue
            follows = isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype == saved_dtype
            if follows and saved_dtype != parameter.dtype and key != "step":
                continue
            if on_host is None:
                stays_on_host = key == "step" and not _steps_on_device(groups[name])
            else:
                stays_on_host = key in on_host
            loaded[key] = value if stays_on_host else map_tensors(value, partial(Tensor.to, device=parameter.device))


def _only_cast(saved: Any, loaded: Any) -> bool:
    """Returns True if loading changed at most the dtype and device of a tensor, not its shape."""
    return isinstance(saved, Tensor) and isinstance(loaded, Tensor) and saved.shape == loaded.shape


def _steps_on_device(group: Mapping[str, Any]) -> bool:
    """Returns True if the optimizer keeps this group's "step" on the device."""
    return bool(group.get("capturable") or group.get("fused"))


def flat_names(optimizer: Optimizer, names: Names) -> list[list[str]]:
    """Returns the names of the parameters, group by group."""
    known: Mapping[Any, str] = parameter_names(names) if isinstance(names, nn.Module) else names
    name_of: Callable[[Any, str], str] = known.get
    flat = [
        [name_of(parameter, f"__extra__.{number}.{position}") for position, parameter in enumerate(group["params"])]
        for number, group in enumerate(optimizer.param_groups)
    ]
    all_names = [name for group in flat for name in group]
    if len(set(all_names)) != len(all_names):
        duplicate = next(name for name in all_names if all_names.count(name) > 1)
        raise ConfigurationError(f"two parameters of an optimizer are called {duplicate!r}. Give each its own name.")
    return flat


def _by_name(optimizer: Optimizer, flat: list[list[str]]) -> dict[str, Tensor]:
    return {
        name: parameter
        for group, own in zip(optimizer.param_groups, flat, strict=True)
        for name, parameter in zip(own, group["params"], strict=True)
    }


def _check_groups(optimizer: Optimizer, saved: list[list[str]], current: list[list[str]]) -> None:
    kind = type(optimizer).__name__
    before = {name for group in saved for name in group}
    now = {name for group in current for name in group}
    if before != now:
        gone, new = sorted(before - now), sorted(now - before)
        parts = [f"saved, but not in this optimizer: {', '.join(gone)}"] if gone else []
        parts += [f"in this optimizer, but not saved: {', '.join(new)}"] if new else []
        raise ConfigurationError(
            f"the parameters of {kind} differ from the checkpoint's ({'; '.join(parts)}). Build the same optimizer, or "
            "restore only the weights."
        )
    if len(saved) != len(current):
        raise ConfigurationError(
            f"{kind} has {len(current)} parameter groups and the checkpoint has {len(saved)}. Build the same groups, "
            "or restore only the weights."
        )
    for number, (was, here) in enumerate(zip(saved, current, strict=True)):
        if set(was) != set(here):
            name = min(set(was) ^ set(here))
            raise ConfigurationError(
                f"the parameter {name!r} of {kind} is in another group than in the checkpoint (group {number}). Build "
                "the same groups, or restore only the weights."
            )
        if isinstance(optimizer, LBFGS) and was != here:
            raise ConfigurationError(
                "LBFGS needs its parameters in the order in which they were saved. Build it the same way."
            )
