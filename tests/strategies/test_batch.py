"""Moving, converting and measuring batches of every structure."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from leyden.core.errors import ConfigurationError
from leyden.core.tree import batch_size_of, convert_floats, map_tensors, move_to_device

META = torch.device("meta")
Pair = namedtuple("Pair", "left right")


@dataclass
class Plain:
    x: Tensor
    name: str = "n"
    rest: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "y", self.x + 1)


class MyList(list):  # type: ignore[type-arg]
    note: str


class MyDict(dict):  # type: ignore[type-arg]
    note: str


class Graph:
    """Moves itself to a device, as graphs and tokenizer encodings do."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.batch_size = 7

    def to(self, device: torch.device) -> Graph:
        moved = Graph()
        moved.device = device
        return moved


class MovesInPlace:
    """Moves in place; its `to` returns None."""

    def __init__(self) -> None:
        self.x = torch.zeros(1)

    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)


def x(*shape: int) -> Tensor:
    return torch.zeros(shape or (2,))


def build() -> dict[str, Any]:
    ordered, mapping, listed = OrderedDict(b=x(), a=x()), MyDict(x=x()), MyList([x()])
    mapping.note = listed.note = "kept"
    return {
        "tensor": x(),
        "list": [x(), "s", None, 3],
        "tuple": (x(), (x(),)),
        "pair": Pair(x(), {"deep": x()}),
        "ordered": ordered,
        "default": defaultdict(list, a=[x()]),
        "mapping": mapping,
        "listed": listed,
        "user": UserDict(x=x()),
        "proxy": MappingProxyType({"x": x()}),
        "set": {x()},
        "frozenset": frozenset([x()]),
        "plain": Plain(x(), rest=[x()]),
        "frozen": Frozen(x()),
    }


def tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)
    return found


@pytest.mark.parametrize("name", build())
def test_every_container_moves_and_keeps_its_type(name: str) -> None:
    value = build()[name]
    moved = move_to_device(value, META)
    assert type(moved) is type(value)
    assert len(tensors(moved)) == len(tensors(value)) > 0
    assert all(tensor.is_meta for tensor in tensors(moved))
    assert not any(tensor.is_meta for tensor in tensors(value))


def test_moving_keeps_order_attributes_and_other_values() -> None:
    moved = move_to_device(build(), "meta")
    assert moved["list"][1:] == ["s", None, 3]
    assert list(moved["ordered"]) == ["b", "a"]
    assert moved["default"].default_factory is list
    assert moved["mapping"].note == moved["listed"].note == "kept"
    assert moved["plain"].name == "n"
    assert moved["frozen"].y.is_meta


@pytest.mark.parametrize("name", build())
def test_a_batch_already_in_place_is_returned_as_is(name: str) -> None:
    value = build()[name]
    assert move_to_device(value, torch.device("cpu")) is value
    assert convert_floats(value, torch.float32) is value


def test_objects_with_a_to_method_move_themselves() -> None:
    graph, in_place = Graph(), MovesInPlace()
    moved = move_to_device([graph, in_place, Graph], META)
    assert moved[0].device == META and graph.device.type == "cpu"
    assert moved[1] is in_place and in_place.x.is_meta
    assert moved[2] is Graph


def test_packed_sequences_keep_batch_sizes_on_the_cpu() -> None:
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)])
    assert move_to_device(packed, "cpu") is packed
    moved = move_to_device({"p": packed}, META)["p"]
    assert isinstance(moved, PackedSequence) and moved.data.is_meta and not moved.batch_sizes.is_meta
    assert convert_floats(packed, torch.float64).data.dtype == torch.float64
    assert batch_size_of(packed) == 2


def test_a_repeated_tensor_is_moved_once() -> None:
    tensor = x()
    first, second, third = move_to_device((tensor, [tensor], x()), META)
    assert first is second[0] and first is not third


def test_objects_of_unknown_types_are_left_alone() -> None:
    unknown, counted = SimpleNamespace(x=x()), Counter("aab")
    values = [unknown, counted, np.zeros(2), "text", b"bytes", 1.5, None, torch.float32]
    moved = move_to_device([*values, x()], META)
    assert all(a is b for a, b in zip(moved, values))


def test_only_floats_are_converted() -> None:
    batch = {"f": x(), "h": x().half(), "i": x().long(), "b": x().bool(), "c": x().to(torch.complex64)}
    dtypes = {name: tensor.dtype for name, tensor in convert_floats(batch, torch.float64).items()}
    assert dtypes == {"f": torch.float64, "h": torch.float64, "i": torch.int64, "b": torch.bool, "c": torch.complex64}


def test_a_moved_batch_is_freed_without_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        batch = {"x": [x()]}
        moved = move_to_device(batch, META)
        seen = weakref.ref(batch["x"][0]), weakref.ref(moved["x"][0])
        del batch, moved
        assert [reference() for reference in seen] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (x(5, 2), 5),
        (torch.tensor(3.0), 1),
        ((x(4, 2), x(4)), 4),
        ([x(4, 2)], 4),
        ({"name": ["a", "b", "c"], "none": None, "x": x(3)}, 3),
        ([["text", {"deep": x(6)}], x(2)], 6),
        (Plain(x(8)), 8),
        (Graph(), 7),
        (np.zeros((9, 2)), 9),
        ((np.float32(1.0), x(3)), 3),
        ({"temperature": torch.tensor(0.5), "x": x(3)}, 3),
        ((torch.tensor(0.5), torch.tensor(1.0)), 1),
        (torch.nested.nested_tensor([x(2), x(3)], layout=torch.jagged), 2),
    ],
)
def test_batch_size_comes_from_the_first_tensor_with_a_dimension(batch: Any, size: int) -> None:
    assert batch_size_of(batch) == size


@pytest.mark.parametrize("batch", [None, "text", [], {}, ["a", "b"], {"a": 1}, object()])
def test_a_batch_without_a_size_raises_and_suggests_batch_size(batch: Any) -> None:
    with pytest.raises(ConfigurationError, match="batch_size="):
        batch_size_of(batch)
