"""Compares states, such as saved and restored ones."""

from __future__ import annotations

import argparse
import collections
import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def differences(a: Any, b: Any, place: str = "") -> list[str]:
    """Returns the places where two nested states differ in type, order, dtype or any bit; functions count as equal."""
    if type(a) is not type(b):
        return [f"{place}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, dict):
        return differences([*a], [*b], f"{place} keys") or [
            found for key in a for found in differences(a[key], b[key], f"{place}[{key!r}]")
        ]
    if isinstance(a, (list, tuple, collections.deque)):
        if len(a) != len(b):
            return [f"{place}: {len(a)} and {len(b)} items"]
        return [
            found
            for index, (x, y) in enumerate(zip(a, b, strict=True))
            for found in differences(x, y, f"{place}[{index}]")
        ]
    if isinstance(a, argparse.Namespace):
        return differences(vars(a), vars(b), place)
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        fields = [field.name for field in dataclasses.fields(a)]
        return [
            found for name in fields for found in differences(getattr(a, name), getattr(b, name), f"{place}.{name}")
        ]
    if isinstance(a, Tensor):
        kinds = [(x.dtype, x.shape, x.layout, x.device, x.requires_grad) for x in (a, b)]
        alike = kinds[0] == kinds[1] and torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        alike = (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    elif isinstance(a, (float, np.floating)):
        # As text, -0.0 differs from 0.0, and nan equals nan.
        alike = repr(a) == repr(b)
    else:
        alike = bool(a == b) or callable(a)
    return [] if alike else [f"{place}: {a!r} and {b!r}"]


def whole(tensor: Any) -> Any:
    """Returns the full tensor of one that is sharded across ranks; any other one unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns a copy of a module's state."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def numbers_of(module: nn.Module) -> dict[str, list[float]]:
    """Returns a module's full state, exact to the bit, as lists that can be sent between processes."""
    return {name: whole(tensor).flatten().tolist() for name, tensor in module.state_dict().items()}


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Returns True if the states of two modules are equal."""
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
