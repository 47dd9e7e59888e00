"""Logged values: numbers and tensors on their devices, their pairwise reduction, and their read-back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from leyden.core.devices import start_reading
from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.rank_zero import warn
from leyden.core.tree import widest_float
from leyden.strategies.local_weights import local_part

K = TypeVar("K")
Value: TypeAlias = "Tensor | float"
Reduction: TypeAlias = "str | Callable[[Tensor], Tensor]"
REDUCTIONS = ("mean", "sum", "max", "min")
_FUNCTIONS = {"mean": (torch.mean,), "sum": (torch.sum, sum), "max": (torch.max, max), "min": (torch.min, min)}


def reduction_of(given: Any) -> Any:
    """Returns the name of a reduction, which may be given in any case, as "avg", or as torch's or Python's function.

    Other functions and unknown names are returned unchanged.
    """
    if isinstance(given, str):
        name = given.lower()
        return "mean" if name == "avg" else name if name in REDUCTIONS else given
    return next((name for name, functions in _FUNCTIONS.items() if any(given is one for one in functions)), given)


def read_back(values: Mapping[K, Value]) -> dict[K, float]:
    """Converts values to Python floats, with one transfer per device."""
    result: dict[K, float] = {}
    by_device: dict[torch.device, list[K]] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(name)
        else:
            result[name] = float(value)
    for device, names in by_device.items():
        tensors = [values[name] for name in names]
        wide = widest_float(device)
        stacked = torch.stack([t.detach().to(wide).reshape(()) for t in tensors if isinstance(t, Tensor)])
        result.update(zip(names, start_reading(stacked)(), strict=True))
    return {name: result[name] for name in values}


def as_number(name: str, value: Any) -> Value:
    """Returns the value of an epoch as one number.

    Raises:
        ConfigurationError: if the value is not a single number.
    """
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Tensor) or value.numel() != 1:
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
        raise ConfigurationError(
            f"{name!r} was reduced over the epoch to {kind}, not to one number. Compute the metric yourself in the "
            "last hook of the epoch, and log each of its values under its own name."
        )
    return value.reshape(())


def extreme(total: Value, value: Value, which: str) -> Value:
    """Returns the larger ("max") or smaller ("min") of two values."""
    if isinstance(total, Tensor) or isinstance(value, Tensor):
        function = torch.maximum if which == "max" else torch.minimum
        return function(*together(as_tensor(total), as_tensor(value)))
    if total != total or value != value:
        # nan wins, as in torch.maximum. Python's max and min would depend on the order of the arguments.
        return math.nan
    return max(total, value) if which == "max" else min(total, value)


def together(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Moves two values to the same device. The accelerator takes precedence, since moving to the CPU would sync."""
    if a.device == b.device:
        return a, b
    if a.device.type == "cpu":
        return a.to(b.device, non_blocking=True), b
    return a, b.to(a.device, non_blocking=True)


def as_tensor(value: Value) -> Tensor:
    """Returns a value as a tensor. A number becomes a float32 tensor on the CPU."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)


def in_turns(values: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """Yields the items of all ranks in the order of global batches: every rank's first, then every rank's second, …"""
    for turn in range(max(map(len, values))):
        for items in values:
            if turn < len(items):
                yield items[turn]


class Nans:
    """Tracks losses that are nan, with the steps at which they may have become nan.

    It only sees values that are read back anyway, at the latest at the end of an epoch. The warning comes at the end of
    the run.
    """

    def __init__(self) -> None:
        self._finite: dict[str, int] = {}
        """The last step at which a loss was not nan."""
        self._since: dict[str, tuple[int, int]] = {}
        """The first and the last step at which a loss may have become nan."""

    def note(self, numbers: dict[str, float], step: int) -> dict[str, float]:
        """Records which of these values are nan losses, and returns the values unchanged."""
        for name, number in numbers.items():
            if not is_loss(name):
                continue
            if number == number:
                self._finite[name] = step
                self._since.pop(name, None)
            elif name not in self._since:
                self._since[name] = min(step, self._finite.get(name, 0) + 1), step
        return numbers

    def warn(self, weights_are_finite: bool) -> None:
        """Warns, at the end of a fit, about losses that are still nan and about weights that are not finite."""
        if not self._since and weights_are_finite:
            return
        found = [] if weights_are_finite else ["weights are nan or infinite"]
        for name, (first, last) in self._since.items():
            since = f"step {last}" if first == last else f"one of the steps {first} to {last}"
            found.append(f"{name!r} is nan since {since}")
        warn(
            f"the run ended with nan: {', '.join(found)}. Train again with detect_anomaly=True, which names the batch "
            "and the operation, with a lower learning rate, or with gradient_clip_val=1.0."
        )


def are_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Returns a 0-d bool tensor: whether all of these tensors, or this rank's parts of sharded ones, are finite."""
    parts = [part.coalesce().values() if part.is_sparse else part for part in map(local_part, tensors)]
    by_device: dict[torch.device, list[Tensor]] = {}
    for part in parts:
        if part.numel() and not part.is_meta:
            by_device.setdefault(part.device, []).append(part.detach())
    if not by_device:
        return torch.ones((), dtype=torch.bool)
    # The max norm: other norms of finite half-precision values may overflow.
    largest = [torch.stack([n.float() for n in torch._foreach_norm(own, math.inf)]) for own in by_device.values()]
    return torch.stack([found.max().to(largest[0].device) for found in largest]).max().isfinite()


def is_loss(name: str) -> bool:
    return "loss" in name.lower()


def readable_losses(values: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    """Returns the losses among logged values, without tensors on the meta device, which have no values to read."""
    return {n: value for n, value in values if is_loss(n) and not (isinstance(value, Tensor) and value.is_meta)}
