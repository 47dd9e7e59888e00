"""Logged values: numbers and tensors on their devices, their pairwise reduction, and their read-back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from leyden.strategies.batch import widest_float
from leyden.strategies.errors import ConfigurationError, kind_of

K = TypeVar("K")
Value: TypeAlias = "Tensor | float"
Reduction: TypeAlias = "str | Callable[[Tensor], Tensor]"
REDUCTIONS = ("mean", "sum", "max", "min")


def read_back(values: Mapping[K, Value]) -> dict[K, float]:
    """Converts values to Python floats, with one transfer per device."""
    result: dict[K, float] = {}
    by_device: dict[torch.device, list[K]] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(name)
        else:
            result[name] = float(value)
    for names in by_device.values():
        tensors = [values[name] for name in names]
        stacked = torch.stack([t.detach().to(sum_dtype(t)).reshape(()) for t in tensors if isinstance(t, Tensor)])
        result.update(zip(names, start_reading(stacked)(), strict=True))
    return {name: result[name] for name in values}


def start_reading(values: Tensor) -> Callable[[], list[float]]:
    """Starts copying a vector to the host.

    On CUDA the copy is asynchronous: it runs after the work already queued on the stream, and does not block the host.

    Returns:
        A function that waits for the copy and returns the numbers.
    """
    if values.device.type != "cuda":
        return values.tolist  # type: ignore[no-any-return]
    # Pinned memory and an event make this a deliberate wait, which torch.cuda.set_sync_debug_mode does not report. It
    # reports only accidental syncs.
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(values.device))

    def wait() -> list[float]:
        copied.synchronize()
        return host.tolist()  # type: ignore[no-any-return]

    return wait


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


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """Returns float64, so that long sums of float32 values lose no precision; float32 on Apple GPUs."""
    return widest_float(tensor.device)


def in_turns(values: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """Yields the items of all ranks in the order of global batches: every rank's first, then every rank's second, …"""
    for turn in range(max(map(len, values))):
        for items in values:
            if turn < len(items):
                yield items[turn]


class Nans:
    """Tracks losses that are nan, with the step since which they are.

    It only sees values that are read back for a logger or a bar anyway. The warning comes at the end of the run.
    """

    def __init__(self) -> None:
        self._since: dict[str, int] = {}

    def note(self, numbers: dict[str, float], step: int) -> dict[str, float]:
        """Records which of these values are nan losses, and returns the values unchanged."""
        for name, number in numbers.items():
            if number == number:
                self._since.pop(name, None)
            elif "loss" in name.lower():
                self._since.setdefault(name, step)
        return numbers

    def warn(self) -> None:
        """Warns about losses that are still nan at the end of a fit."""
        if self._since:
            since = ", ".join(f"{name!r} since step {step}" for name, step in self._since.items())
            warnings.warn(
                f"the loss was nan until the end of the run ({since}), and the weights may be nan too. Train again "
                "with detect_anomaly=True, which names the batch and the operation, with a lower learning rate, or "
                "with gradient_clip_val=1.0.",
                stacklevel=2,
            )
