"""Every supported kind of state survives a round trip; any other is refused by its key path."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import json
import pathlib
import random
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from same import differences

from leyden.checkpoint.format.codec import MAX_DEPTH, check_encodable, decode, encode
from leyden.checkpoint.format.errors import CheckpointError, UnsupportedStateError
from leyden.checkpoint.format.tensors import TensorCollector, TensorSource
from leyden.core.errors import ConfigurationError


class Color(enum.Enum):
    RED = "red"
    BLUE = (0, 0, 255)


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: float


@dataclass
class Inner:
    color: Color = Color.RED


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    late: int = field(init=False, default=7)


@dataclass
class Slotted:
    __slots__ = ("value",)
    value: int


PLAIN = [
    None,
    True,
    0,
    -(2**63),
    2**63,
    -(3**5000),
    0.1,
    -0.0,
    float("nan"),
    float("inf"),
    -float("inf"),
    5e-324,
    1.7976931348623157e308,
    complex(2, -0.5),
    complex(float("-inf"), 0.0),
    "",
    "ü\0\ud800 \u2028",
    b"",
    b"\x00\xff",
    bytearray(b"ab"),
    [],
    [1, [2.5, None, "x"]],
    (),
    (1, (2, [3])),
    set(),
    {1, "a", None, (2, 3)},
    frozenset({b"x", 1.5}),
    collections.deque([1, 2, (3,)], maxlen=5),
    collections.deque(),
    {},
    {"a": 1, "$": "tuple", "items": [1]},
    {1: "int", "1": "str", 1.5: "float", None: "none", (1, "a"): "tuple", b"k": "bytes"},
    {False: 0, 2: 1},
    {frozenset({1}): {"deep": {2: [3]}}},
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.OrderedDict([(3, 1)]),
    collections.Counter("abracadabra"),
    range(3, 30, 4),
    slice(None, 4, 2),
    torch.float32,
    torch.bfloat16,
    torch.strided,
    torch.channels_last,
    torch.device("cpu"),
    torch.device("cuda", 3),
    torch.Size([2, 0, 3]),
    pathlib.Path("runs") / "a b",
    datetime.timedelta(days=-1, seconds=3, microseconds=7),
    datetime.datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
    datetime.date(2024, 2, 29),
    datetime.time(1, 2, 3),
    argparse.Namespace(lr=0.1, path=pathlib.Path("x")),
    types.SimpleNamespace(a=[1, {2}]),
    random.Random(3).getstate(),
    {"step": -1, "nested": [{"a": ({"b": {1: (float("inf"),)}},)}]},
]


@pytest.mark.parametrize("value", PLAIN, ids=[f"{number}-{type(value).__name__}" for number, value in enumerate(PLAIN)])
def test_plain_values_survive_a_round_trip(value: Any, disk: Any) -> None:
    assert not differences(disk({"value": value})["value"], value)
    assert not differences(disk(value), value)


@pytest.mark.parametrize("factory", [list, dict, int, float, set, None])
def test_defaultdict_keeps_its_factory(factory: Any, disk: Any) -> None:
    value = collections.defaultdict(factory, {"a": 1, 2: [3]})
    back = disk(value)
    assert not differences(back, value)
    assert back.default_factory is factory


def test_deque_keeps_its_maxlen(disk: Any) -> None:
    assert disk(collections.deque([1], maxlen=1)).maxlen == 1
    assert disk(collections.deque([1])).maxlen is None


NUMPY = [
    *(numpy.ones((), dtype)[()] for dtype in "?bhilqBHILQefdFD"),
    numpy.longdouble("0.1"),
    numpy.float32("nan"),
    numpy.str_("text"),
    numpy.str_(""),
    numpy.bytes_(b"ab"),
    numpy.datetime64("2024-02-29T01:02:03", "ms"),
    numpy.timedelta64(5, "h"),
    *(numpy.arange(6).astype(dtype).reshape(2, 3) for dtype in "?bhiqBHIQefdFD"),
    numpy.arange(6, dtype=">i4"),
    numpy.arange(4, dtype=numpy.longdouble),
    numpy.array(3.5),
    numpy.zeros((0, 3)),
    numpy.array(["a", "längst"]),
    numpy.array([b"a", b"bc"]),
    numpy.array(["2024-01-01", "NaT"], dtype="M8[D]"),
    numpy.arange(10)[::-2],
    numpy.array([], dtype="U"),
    numpy.dtype("float32"),
]


@pytest.mark.parametrize("value", NUMPY, ids=repr)
def test_numpy_values_survive_a_round_trip(value: Any, disk: Any) -> None:
    back = disk({"value": value})["value"]
    assert isinstance(back, numpy.ndarray) == isinstance(value, numpy.ndarray)
    if isinstance(value, numpy.dtype):
        assert back == value
    else:
        assert back.dtype == value.dtype
        assert back.shape == value.shape
        assert back.tobytes() == value.tobytes()


def test_numpy_arrays_are_restored_writable_even_if_saved_read_only(disk: Any) -> None:
    array = numpy.arange(4.0)
    array.flags.writeable = False
    back = disk([array, numpy.asfortranarray(numpy.ones((2, 3))), numpy.array(["x"])])
    for item in back:
        item[...] = item
    assert back[1].flags.f_contiguous


def test_classes_are_taken_from_the_live_structure(disk: Any) -> None:
    tree = {
        "colors": [Color.RED, Color.BLUE],
        "level": Level.LOW,
        "flags": Access.READ | Access.WRITE,
        "point": Point(1, 2.5),
        "outer": Outer("x", Inner(Color.BLUE)),
        "slotted": Slotted(3),
        Color.RED: 1,
    }
    back = disk(tree, like=tree)
    assert not differences(back, tree)
    assert type(back["point"]) is Point
    assert back["level"] is Level.LOW


def test_unknown_classes_are_restored_as_plain_values(disk: Any) -> None:
    back = disk({"c": Color.BLUE, "level": Level.LOW, "p": Point(1, 2.5), "o": Outer("x")})
    assert not differences(back["c"], (0, 0, 255))
    assert not differences(back["level"], 1)
    assert not differences(back["p"], (1, 2.5))
    assert back["o"] == types.SimpleNamespace(name="x", inner=types.SimpleNamespace(color="red"), late=7)


def test_class_names_in_a_checkpoint_are_never_imported(disk: Any) -> None:
    value = {"$": "enum", "type": "os.system", "name": "x", "value": "echo hello"}
    assert decode(value, TensorSource({})) == "echo hello"
    fields = {"$": "dataclass", "type": "subprocess.Popen", "fields": {"args": "true"}}
    assert decode(fields, TensorSource({})) == types.SimpleNamespace(args="true")


def test_a_class_saved_from_main_is_found_under_its_module() -> None:
    saved = encode(Color.RED, TensorCollector())
    saved["type"] = "__main__.Color"
    assert decode(saved, TensorSource({}), like=Color.BLUE) is Color.RED


def test_a_missing_field_takes_its_default_or_raises_by_name() -> None:
    saved = encode(Outer("x"), TensorCollector())
    del saved["fields"]["late"]
    assert decode(saved, TensorSource({}), like=Outer("y")).late == 7
    del saved["fields"]["name"]
    with pytest.raises(CheckpointError, match="'name'"):
        decode(saved, TensorSource({}), like=Outer("y"))


def test_a_restored_generator_continues_its_sequence(disk: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    back = disk({"g": generator})["g"]
    assert torch.equal(torch.rand(4, generator=back), torch.rand(4, generator=generator))


def test_a_set_of_tensors_survives_a_round_trip(disk: Any) -> None:
    tensor = torch.arange(3)
    assert torch.equal(disk({tensor}).pop(), tensor)


class Text(str):
    __slots__ = ()


class Bag(dict):  # type: ignore[type-arg]
    pass


REFUSED = [
    (lambda: None, "lambda"),
    (open, "open"),
    (torch.nn.Linear(1, 1), "state_dict"),
    (object(), "object"),
    (Color, "the class Color"),
    (Text("x"), "subclass of str"),
    (Bag(), "subclass of dict"),
    (iter([]), "list_iterator"),
    (numpy.array([object()]), "object"),
    (numpy.zeros(2, "i4,f4"), "dtype"),
    (numpy.ma.masked_array([1]), "MaskedArray"),
    (collections.defaultdict(lambda: 3), "factory"),
    (torch.empty(2, device="meta"), "meta"),
    (torch.nn.UninitializedParameter(), "lazy"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
    (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    ({torch.ones(1): 2}, "key"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("value", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_unsupported_values_are_refused_by_key_path(value: Any, words: str) -> None:
    if words in ("quantized", "nested"):
        value = value()  # created here, since creating them warns
    tree = {"MyCallback": {"queue": [0, 1, 2, value]}}
    with pytest.raises(UnsupportedStateError, match=words) as caught:
        check_encodable(tree, where="callbacks")
    assert str(caught.value).startswith("callbacks['MyCallback']['queue'][3]")
    assert isinstance(caught.value, ConfigurationError)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("kind", [list, dict, argparse.Namespace])
def test_cycles_are_refused(kind: Any) -> None:
    value: Any = kind()
    if kind is list:
        value.append((value,))
    elif kind is dict:
        value["self"] = [value]
    else:
        value.me = value
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        check_encodable({"a": value})
    shared = [1]
    check_encodable([shared, shared])


def test_depth_is_bounded_and_the_deepest_allowed_value_survives(disk: Any) -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH - 1):
        value = {(1,): value}
    assert not differences(disk(value), value)
    for _ in range(3):
        value = [value]
    with pytest.raises(UnsupportedStateError, match="levels deep"):
        check_encodable(value)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "os.system", "value": "true"},
        {"$": "tuple"},
        {"$": ["tuple"]},
        {"$": "set", "items": [[1]]},
        {"$": "dict", "items": [[1]]},
        {"$": "range", "items": [0, 1, 0]},
        {"$": "dtype", "value": "__builtins__"},
        {"$": "defaultdict", "factory": "eval", "items": []},
        {"$": "numpy.array", "dtype": "O", "tensor": {}},
        {"$": "numpy.dtype", "dtype": "i4,f4"},
        {"$": "int", "hex": "zz"},
        {"$": "tensor", "key": "no", "dtype": "float32", "shape": [1]},
        {"$": "deque", "items": [], "maxlen": -1},
        {"$": "timedelta", "value": [10**30, 0, 0]},
        {"$": "bytes", "base64": "*"},
        {"$": "device", "value": "nowhere"},
        {"$": "dataclass", "type": "x", "fields": [1]},
    ],
    ids=lambda value: str(value)[:50],
)
def test_forged_values_raise_one_clear_error(value: Any) -> None:
    with pytest.raises(CheckpointError, match="here"):
        decode({"a": value}, TensorSource({}), where="here")


def test_deeply_nested_json_raises_instead_of_crashing() -> None:
    value: Any = 0
    for _ in range(500):
        value = [value]
    with pytest.raises(CheckpointError, match="levels deep"):
        decode(value, TensorSource({}))


def test_encoding_is_strict_json_and_deterministic() -> None:
    tree = {"nan": float("nan"), "set": {"b", "a", "c"}, "x": (1, 2)}
    text = json.dumps(encode(tree, TensorCollector()), allow_nan=False)
    assert text == json.dumps(encode({**tree, "set": {"c", "a", "b"}}, TensorCollector()), allow_nan=False)
