"""Batches of any nested structure: moving them to a device, converting dtypes, counting samples, describing them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from leyden.core.devices import copies_aside
from leyden.core.errors import ConfigurationError

T = TypeVar("T")

BUILTIN = frozenset({dict, list, tuple, set, frozenset, str, bytes, int, float, bool, complex, type(None)})
PLAIN = (str, bytes, int, float, complex, type(None), type)


def move_to_device(batch: T, device: torch.device | str) -> T:
    """Moves every tensor of a batch to a device.

    Structure and types are kept: dicts and other mappings, lists, tuples, named tuples, sets, dataclasses, and
    subclasses of these. Any other object is moved by its `to(device)` method, as graphs and encodings have, or left in
    place if it has none. A tensor that occurs twice is moved once. An object without anything to move is returned
    itself, not a copy. Copies from pinned memory to a GPU are asynchronous.

    Args:
        batch: any nested structure.
        device: the destination.

    Example:
        >>> batch = {"x": torch.zeros(2), "name": "a"}
        >>> move_to_device(batch, "cpu") is batch
        True
    """
    if not isinstance(device, torch.device):
        device = torch.device(device)
    # Fast path for common structures that are already in place, since the loop spends only microseconds per step.
    kind = type(batch)
    if kind is Tensor:
        parts: Any = (batch,)
    elif kind is tuple or kind is list:
        parts = batch
    else:
        parts = batch.values() if kind is dict else (None,)  # type: ignore[attr-defined]
    for part in parts:
        if type(part) is not Tensor or part.device != device:
            break
    else:
        return batch
    return _Move(device, copies_aside(device)).visit(batch)  # type: ignore[no-any-return]


def map_tensors(data: T, function: Callable[[Tensor], Any]) -> T:
    """Returns a nested structure with every tensor replaced by `function(tensor)`. The original is not changed.

    Example:
        >>> map_tensors({"x": [torch.ones(2)]}, lambda tensor: tensor.sum().item())
        {'x': [2.0]}
    """
    return _Apply(function).visit(data)  # type: ignore[no-any-return]


class _Apply:
    """Applies a function to every tensor of a structure.

    An object, since a recursive closure is a reference cycle, which would keep each batch alive until it is collected.
    """

    __slots__ = ("function",)

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self.function = function

    def visit(self, item: Any) -> Any:
        return self.function(item) if isinstance(item, Tensor) else map_children(item, self.visit)


class _Move:
    __slots__ = ("device", "moved", "non_blocking")

    def __init__(self, device: torch.device, non_blocking: bool) -> None:
        self.device = device
        self.non_blocking = non_blocking
        self.moved: dict[int, Tensor] = {}

    def visit(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            if item.device == self.device:
                return item
            known = self.moved.get(id(item))
            if known is None:
                known = self.moved[id(item)] = item.to(self.device, non_blocking=self.non_blocking)
            return known
        kind = type(item)
        if kind in BUILTIN:
            return map_children(item, self.visit)
        if isinstance(item, PackedSequence):
            if item.data.device == self.device:
                return item
            return item.to(self.device, non_blocking=self.non_blocking)  # type: ignore[arg-type]
        if not isinstance(item, type) and callable(getattr(item, "to", None)):
            result = item.to(self.device)
            # A `to` that returns None has moved the object in place.
            return item if result is None else result
        return map_children(item, self.visit)


def convert_floats(batch: T, dtype: torch.dtype) -> T:
    """Converts the floating-point tensors of a batch. Integer, bool and complex tensors are unchanged."""
    return map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def leaves(data: Any) -> Iterator[Any]:
    """Yields what a nest of mappings, lists, tuples and sets holds that is none of these.

    Example:
        >>> list(leaves({"x": [1, (2,)], "y": "a"}))
        [1, 2, 'a']
    """
    if isinstance(data, Mapping):
        data = data.values()
    elif not isinstance(data, (list, tuple, set, frozenset)):
        yield data
        return
    for item in data:
        yield from leaves(item)


def map_children(item: Any, visit: Callable[[Any], Any]) -> Any:
    """Rebuilds a container from its visited children, or returns the same object if no child changed."""
    kind = type(item)
    if kind is tuple or kind is list:
        new = [visit(child) for child in item]
        if all(a is b for a, b in zip(new, item, strict=True)):
            return item
        return tuple(new) if kind is tuple else new
    if kind is dict:
        values = {key: visit(value) for key, value in item.items()}
        return item if all(values[key] is value for key, value in item.items()) else values
    if isinstance(item, PLAIN):
        return item
    if isinstance(item, Mapping):
        return _map_mapping(item, visit)
    if isinstance(item, (list, tuple, set, frozenset)):
        return _map_subclass(item, visit)
    if dataclasses.is_dataclass(item):
        return _map_dataclass(item, visit)
    return item


def _map_mapping(item: Mapping[Any, Any], visit: Callable[[Any], Any]) -> Any:
    changed = {key: new for key, value in item.items() if (new := visit(value)) is not value}
    if not changed:
        return item
    try:
        # A copy keeps state that a constructor would lose, such as a default factory or a subclass's attributes.
        result: Any = copy(item)
        for key, value in changed.items():
            result[key] = value
    except TypeError:
        kind: Any = type(item)
        return kind({**item, **changed})
    return result


def _map_subclass(item: Any, visit: Callable[[Any], Any]) -> Any:
    old = list(item)
    new = [visit(child) for child in old]
    if all(a is b for a, b in zip(new, old, strict=True)):
        return item
    if isinstance(item, list):
        result = copy(item)
        result[:] = new
        return result
    kind: Any = type(item)
    return kind._make(new) if hasattr(kind, "_make") else kind(new)


def _map_dataclass(item: Any, visit: Callable[[Any], Any]) -> Any:
    result = item
    for field in dataclasses.fields(item):
        if not hasattr(item, field.name):
            continue
        value = getattr(item, field.name)
        new = visit(value)
        if new is not value:
            if result is item:
                result = copy(item)
            # Frozen dataclasses refuse setattr.
            object.__setattr__(result, field.name, new)
    return result


def batch_size_of(batch: Any) -> int:
    """Returns the number of samples in a batch: the first dimension of its first tensor that has one.

    Tensors without dimensions, such as a temperature for the whole batch, are passed over; a batch of only these is 1.

    Raises:
        ConfigurationError: if the batch contains no tensor.

    Example:
        >>> batch_size_of({"name": ["a", "b"], "x": torch.zeros(2, 3)})
        2
    """
    # Common structures, without the cost of a generator.
    first = batch
    kind = type(first)
    if (kind is tuple or kind is list) and first:
        first = first[0]
    elif kind is dict:
        first = next(iter(first.values()), None)
    if isinstance(first, Tensor) and first.ndim:
        return first.shape[0]
    has_tensor = False
    for size in _sizes(batch):
        if size is not None:
            return size
        has_tensor = True
    if has_tensor:
        return 1
    raise ConfigurationError(
        f"A batch of type {type(batch).__name__} contains no tensor, so its size is unknown. Pass batch_size= to "
        "self.log."
    )


def widest_float(device: torch.device) -> torch.dtype:
    """Returns the widest floating-point dtype that a device supports."""
    return torch.float32 if device.type == "mps" else torch.float64


def shape_and_dtype(tensor: Tensor) -> str:
    """Describes a tensor in error messages by its shape and dtype."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def in_one_line(data: Any, of_tensor: Callable[[Tensor], str] = shape_and_dtype, shortened: bool = False) -> str:
    """Describes a nested structure in one line.

    Args:
        data: the structure. Anything but containers and tensors appears as its type's name.
        of_tensor: function that describes a tensor.
        shortened: show three elements of a container with more than eight.

    Example:
        >>> in_one_line({"x": torch.zeros(2, 3), "ids": [7]})
        '{x: (2, 3) float32, ids: [int]}'
        >>> in_one_line([7] * 64, shortened=True)
        '[int, int, int, and 61 more]'
    """
    if isinstance(data, Tensor):
        return of_tensor(data)
    if isinstance(data, Mapping):
        items = list(data.items())
        most = 3 if shortened and len(items) > 8 else len(items)
        shown = [f"{key}: {in_one_line(value, of_tensor, shortened)}" for key, value in items[:most]]
        return "{" + ", ".join(shown + [f"and {len(items) - most} more"] * (most < len(items))) + "}"
    if isinstance(data, (list, tuple)):
        most = 3 if shortened and len(data) > 8 else len(data)
        shown = [in_one_line(value, of_tensor, shortened) for value in data[:most]]
        return "[" + ", ".join(shown + [f"and {len(data) - most} more"] * (most < len(data))) + "]"
    return type(data).__name__


def _sizes(item: Any) -> Iterator[int | None]:
    """Yields the first dimension of each tensor; None for one without dimensions."""
    if isinstance(item, PackedSequence):
        yield int(item.batch_sizes[0])
    elif isinstance(item, Tensor):
        yield item.size(0) if item.ndim else None
    elif isinstance(item, PLAIN):
        return
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _sizes(value)
    elif isinstance(item, (list, tuple, set, frozenset)):
        for value in item:
            yield from _sizes(value)
    elif dataclasses.is_dataclass(item):
        for field in dataclasses.fields(item):
            yield from _sizes(getattr(item, field.name, None))
    elif isinstance(getattr(item, "batch_size", None), int):
        yield item.batch_size
    elif isinstance(getattr(item, "shape", None), tuple):
        yield int(item.shape[0]) if item.shape else None
