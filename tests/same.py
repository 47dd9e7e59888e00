"""Compares what came back with what was saved."""

from __future__ import annotations

import argparse
import collections
import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor


def differences(a: Any, b: Any, place: str = "") -> list[str]:
    """The places where two nests of state differ in kind, order, dtype or a bit; functions count as equal."""
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
        # By their text, in which -0.0 is not 0.0 and nan is nan.
        alike = repr(a) == repr(b)
    else:
        alike = bool(a == b) or callable(a)
    return [] if alike else [f"{place}: {a!r} and {b!r}"]
