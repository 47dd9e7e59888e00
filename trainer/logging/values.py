"""Logged values: numbers and tensors on their devices, how two are reduced to one, and how all are read back."""

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
    """Turns values into Python floats, with one transfer for each device they lie on."""
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
    """Starts to copy a vector to the host; the function that it returns waits for that, and returns the numbers.

    A GPU copies once its earlier work is done, and nobody waits for it in the meantime.
    """
    if values.device.type != "cuda":
        return values.tolist  # type: ignore[no-any-return]
    # By pinned memory and an event: this one wait is meant, and torch.cuda.set_sync_debug_mode is left to find the
    # others.
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(values.device))

    def wait() -> list[float]:
        copied.synchronize()
        return host.tolist()  # type: ignore[no-any-return]

    return wait


def as_number(name: str, value: Any) -> Value:
    """The value of an epoch as one number.

    Raises:
        ConfigurationError: if it was reduced to something else.
    """
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Tensor) or value.numel() != 1:
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
        raise ConfigurationError(
            f"{name!r} was reduced over the epoch to {kind}, which is not one number: compute the metric yourself in "
            "the last hook of the epoch, and log each of its values under its own name."
        )
    return value.reshape(())


def extreme(total: Value, value: Value, which: str) -> Value:
    """The larger ("max") or smaller ("min") of two values."""
    if isinstance(total, Tensor) or isinstance(value, Tensor):
        function = torch.maximum if which == "max" else torch.minimum
        return function(*together(as_tensor(total), as_tensor(value)))
    if total != total or value != value:
        # As torch's functions have it, and not by the order in which the two come.
        return math.nan
    return max(total, value) if which == "max" else min(total, value)


def together(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Brings two values to one device: that of the accelerator, since the other way round would be a read-back."""
    if a.device == b.device:
        return a, b
    if a.device.type == "cpu":
        return a.to(b.device, non_blocking=True), b
    return a, b.to(a.device, non_blocking=True)


def as_tensor(value: Value) -> Tensor:
    """A value as a tensor; a number as one of float32 on the CPU."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """float64, so that a long epoch of float32 values loses no precision; float32 on Apple's GPUs."""
    return widest_float(tensor.device)


def in_turns(values: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """The items of all ranks in the order of global batches: every rank's first, then every rank's second, …"""
    for turn in range(max(map(len, values))):
        for items in values:
            if turn < len(items):
                yield items[turn]


class Nans:
    """The losses that are nan, each with the step at which that began.

    They are seen in values that were read back for a logger or a bar anyway, and reported at the end of the run.
    """

    def __init__(self) -> None:
        self._since: dict[str, int] = {}

    def note(self, numbers: dict[str, float], step: int) -> dict[str, float]:
        """Notes which of these values are a loss that is nan, and returns them."""
        for name, number in numbers.items():
            if number == number:
                self._since.pop(name, None)
            elif "loss" in name.lower():
                self._since.setdefault(name, step)
        return numbers

    def warn(self) -> None:
        """Warns at the end of a fit of losses that were nan until then."""
        if self._since:
            since = ", ".join(f"{name!r} since step {step}" for name, step in self._since.items())
            warnings.warn(
                f"the loss was nan until the run's end ({since}), and so may the weights be: train again with "
                "detect_anomaly=True, which names the batch and the operation, with a lower learning rate, or with "
                "gradient_clip_val=1.0.",
                stacklevel=2,
            )
