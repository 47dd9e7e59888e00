"""Encodes state as tagged JSON: any nest of plain values, with its tensors stored separately.

Numbers, strings, None, lists and dicts with string keys are written unchanged. Everything else becomes a JSON object
whose key "$" names its type. Decoding never imports or calls anything that a checkpoint names. An Enum, a dataclass or
a namedtuple is restored as its class only if the caller passes that class. Otherwise it becomes its plain value, a
SimpleNamespace or a tuple.
"""

from __future__ import annotations

import argparse
import base64
import collections
import dataclasses
import datetime
import enum
import math
import pathlib
import sys
import types as pytypes
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from leyden.checkpoint.format.configs import config_of, is_config, resolved
from leyden.checkpoint.format.errors import CheckpointError, UnsupportedStateError, blame
from leyden.checkpoint.format.tensors import Spec, check_tensor
from leyden.core.errors import with_article

# One step of a key path: as shown in an error, and as used in the name of a tensor.
Step: TypeAlias = tuple[str, Any]
KeyPath: TypeAlias = tuple[Step, ...]

# Each level takes up to three levels of JSON, and Python's JSON parser stops at about 1000.
MAX_DEPTH = 100
MAX_EMPTY = 2**20
_INT_LIMIT = 2**63
_TAG = "$"
FACTORIES: dict[str, Any] = {
    factory.__name__: factory
    for factory in (list, dict, int, float, str, bool, tuple, set, collections.Counter, collections.deque)
}


class TensorSink(Protocol):
    """Receives the tensors of a tree that is being encoded."""

    def put(self, tensor: Tensor, where: str, key: str) -> Spec: ...


class TensorSupply(Protocol):
    """Supplies the tensors of a tree that is being decoded."""

    def get(self, spec: Spec) -> Tensor: ...


def encode(tree: Any, tensors: TensorSink, where: str = "state") -> Any:
    """Encodes a tree, any nest of the types listed in this module, as a JSON value.

    `tensors` receives its tensors. `where` is the name of the root in errors, such as `callbacks['EarlyStopping']`.

    Raises:
        UnsupportedStateError: if a part cannot be saved; names its key path and type.

    Example:
        >>> from leyden.checkpoint.format.tensors import TensorCollector
        >>> encode({"best": float("inf"), "shape": (2, 3)}, TensorCollector())
        {'best': {'$': 'float', 'value': 'inf'}, 'shape': {'$': 'tuple', 'items': [2, 3]}}
    """
    return _Encoder(tensors, where).encode(tree, ())


def decode(value: Any, tensors: TensorSupply, *, like: Any = None, where: str = "state") -> Any:
    """Decodes a tree from the JSON value that `encode` returned.

    The Enum classes, dataclasses and namedtuples of the current tree `like` are used for saved ones of the same name.

    Raises:
        CheckpointError: if `encode` did not write the value.
    """
    with blame(where):
        return _Decoder(tensors, known_classes(like), where).decode(value, 0)


def check_encodable(tree: Any, where: str = "state", sharded: bool = False) -> None:
    """Raises early if a tree cannot be saved. Encodes it in memory, without its tensors' data.

    `sharded` accepts DTensors and Fragments.

    Raises:
        UnsupportedStateError: names the key path and the type of the first part that cannot be saved.

    Example:
        >>> check_encodable({"queue": [1, open]}, where="user")
        Traceback (most recent call last):
        ...
        leyden.checkpoint.format.errors.UnsupportedStateError: user['queue'][1] is a builtin_function_or_method, ...
    """
    encode(tree, _CheckingSink(sharded), where)


class _CheckingSink:
    """A sink that checks tensors and drops them."""

    def __init__(self, sharded: bool) -> None:
        self._sharded = sharded

    def put(self, tensor: Tensor, where: str, key: str) -> Spec:
        check_tensor(tensor, where, self._sharded)
        return {}


def name_of(cls: type) -> str:
    """Returns the name by which a checkpoint records a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


# Writing --------------------------------------------------------------------------------------------------------------
class _Encoder:
    def __init__(self, tensors: TensorSink, where: str) -> None:
        self._tensors = tensors
        self._where = where
        self._ancestors: set[int] = set()
        """The ids of the containers around the current value, to detect cycles."""

    def encode(self, value: Any, path: KeyPath) -> Any:
        kind = type(value)
        if kind in _UNCHANGED:
            return value
        if len(path) > MAX_DEPTH:
            raise self._refusal(path[:8], f"nested more than {MAX_DEPTH} levels deep", "Flatten it.")
        encode_exact = _ENCODERS.get(kind)
        if encode_exact is not None:
            return encode_exact(self, value, path)
        for base, encode_as in _BASE_ENCODERS:
            if isinstance(value, base):
                return encode_as(self, value, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value, path)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return self._tag("namedtuple", type=name_of(kind), items=self.items(value, path))
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic, numpy.dtype)):
            return self._numpy(value, path)
        if is_config(value):
            return self._tag("omegaconf", value=self.encode(resolved(value, self.where(path)), path))
        raise self._refusal(path, *_describe(value))

    def where(self, path: KeyPath) -> str:
        return self._where + "".join(shown for shown, _ in path)

    def _refusal(self, path: KeyPath, kind: str, hint: str) -> UnsupportedStateError:
        return UnsupportedStateError(self.where(path), kind, hint)

    def _tag(self, tag: str, /, **entries: Any) -> dict[str, Any]:
        return {_TAG: tag, **entries}

    def _enter(self, value: Any, path: KeyPath) -> None:
        if id(value) in self._ancestors:
            raise self._refusal(path, "a container that contains itself", "Break the cycle.")
        self._ancestors.add(id(value))

    def _leave(self, value: Any) -> None:
        self._ancestors.discard(id(value))

    def items(self, values: Iterable[Any], path: KeyPath) -> list[Any]:
        self._enter(values, path)
        encoded = [
            value if type(value) in _UNCHANGED else self.encode(value, (*path, (f"[{index}]", index)))
            for index, value in enumerate(values)
        ]
        self._leave(values)
        return encoded

    def pairs(self, values: Mapping[Any, Any], path: KeyPath) -> list[list[Any]]:
        self._enter(values, path)
        encoded = []
        for key, value in values.items():
            step = (*path, (f"[{key!r}]", key))
            encoded.append([self._key(key, step), self.encode(value, step)])
        self._leave(values)
        return encoded

    def _key(self, key: Any, path: KeyPath) -> Any:
        if isinstance(key, Tensor):
            raise self._refusal(path, "a dict key that is a tensor", "Use its name as the key.")
        return self.encode(key, path)

    def mapping(self, value: dict[Any, Any], path: KeyPath) -> Any:
        if not all(type(key) is str for key in value) or _TAG in value:
            return self._tag("dict", items=self.pairs(value, path))
        self._enter(value, path)
        encoded = {
            key: item if type(item) in _UNCHANGED else self.encode(item, (*path, (f"[{key!r}]", key)))
            for key, item in value.items()
        }
        self._leave(value)
        return encoded

    def integer(self, value: int, path: KeyPath) -> Any:
        return value if -_INT_LIMIT <= value < _INT_LIMIT else self._tag("int", hex=hex(value))

    def number(self, value: float, path: KeyPath) -> Any:
        return value if math.isfinite(value) else self._tag("float", value=repr(value))

    def complex(self, value: complex, path: KeyPath) -> Any:
        return self._tag("complex", real=self.number(value.real, path), imag=self.number(value.imag, path))

    def bytes(self, value: bytes | bytearray, path: KeyPath) -> Any:
        return self._tag(type(value).__name__, base64=base64.b64encode(value).decode())

    def sequence(self, value: Any, path: KeyPath) -> Any:
        return self._tag(type(value).__name__, items=self.items(value, path))

    def unordered(self, value: Any, path: KeyPath) -> Any:
        # Sorted, because the order of a set of strings differs between processes.
        return self._tag(type(value).__name__, items=sorted(self.items(value, path), key=repr))

    def deque(self, value: collections.deque[Any], path: KeyPath) -> Any:
        return self._tag("deque", items=self.items(value, path), maxlen=value.maxlen)

    def tagged_pairs(self, value: Any, path: KeyPath) -> Any:
        return self._tag(type(value).__name__, items=self.pairs(value, path))

    def defaultdict(self, value: collections.defaultdict[Any, Any], path: KeyPath) -> Any:
        factory = value.default_factory
        name = getattr(factory, "__name__", str(factory))
        if factory is not None and FACTORIES.get(name) is not factory:
            hint = f"Use one of {', '.join(FACTORIES)} as the factory, or save dict(...) of it."
            raise self._refusal(path, f"a defaultdict with the factory {name}", hint)
        return self._tag("defaultdict", factory=None if factory is None else name, items=self.pairs(value, path))

    def by_name(self, value: Any, path: KeyPath) -> Any:
        return self._tag(_SAVED_BY_NAME[type(value)], value=str(value))

    def path(self, value: pathlib.PurePath, path: KeyPath) -> Any:
        return self._tag("path", value=str(value))

    def date_or_time(self, value: Any, path: KeyPath) -> Any:
        return self._tag(type(value).__name__, value=value.isoformat())

    def duration(self, value: datetime.timedelta, path: KeyPath) -> Any:
        return self._tag("timedelta", value=[value.days, value.seconds, value.microseconds])

    def slices(self, value: Any, path: KeyPath) -> Any:
        parts = [value.start, value.stop, value.step]
        return self._tag(type(value).__name__, items=self.items(parts, path))

    def attributes(self, value: Any, path: KeyPath) -> Any:
        return self._tag(type(value).__name__, fields=self._fields(value, vars(value), path))

    def _dataclass(self, value: Any, path: KeyPath) -> Any:
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return self._tag("dataclass", type=name_of(type(value)), fields=self._fields(value, fields, path))

    def _fields(self, value: Any, fields: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
        self._enter(value, path)
        encoded = {name: self.encode(item, (*path, (f".{name}", name))) for name, item in fields.items()}
        self._leave(value)
        return encoded

    def enumeration(self, value: enum.Enum, path: KeyPath) -> Any:
        encoded = self.encode(value.value, (*path, (".value", "value")))
        return self._tag("enum", type=name_of(type(value)), name=value.name, value=encoded)

    def tensor(self, value: Tensor, path: KeyPath) -> Any:
        spec = self._tensors.put(value, self.where(path), ".".join(str(name) for _, name in path))
        spec[_TAG] = "tensor"
        return spec

    def generator(self, value: torch.Generator, path: KeyPath) -> Any:
        state = self.tensor(value.get_state(), (*path, (".get_state()", "generator")))
        return self._tag("generator", device=str(value.device), state=state)

    def _numpy(self, value: Any, path: KeyPath) -> Any:
        import numpy

        dtype = value if isinstance(value, numpy.dtype) else value.dtype
        if dtype.kind not in _NUMPY_KINDS:
            hint = "Save it as a list, or as one array for each field."
            raise self._refusal(path, f"a NumPy {type(value).__name__} of dtype {dtype}", hint)
        if isinstance(value, numpy.dtype):
            return self._tag("numpy.dtype", dtype=dtype.str)
        if isinstance(value, numpy.generic):
            return self._tag("numpy.scalar", dtype=dtype.str, base64=base64.b64encode(value.tobytes()).decode())
        if type(value) is not numpy.ndarray:
            raise self._refusal(path, f"an array of the class {type(value).__name__}", "Save numpy.asarray(...) of it.")
        # Look the dtype up by name: C's long and long long are two NumPy types of one name, and torch accepts only one.
        native = numpy.dtype(dtype.newbyteorder("=").str)
        as_tensor = native.str[1:] in _NUMPY_AS_TENSOR
        # Dtypes that torch lacks are stored as bytes. Memory that torch cannot share is copied.
        plain = _native(value, native) if as_tensor else numpy.frombuffer(value.tobytes(), "u1")
        if not plain.flags.writeable or any(stride < 0 for stride in plain.strides):
            plain = plain.copy()
        entries = {"dtype": dtype.str, "tensor": self.tensor(torch.from_numpy(plain), path)}
        return self._tag("numpy.array", **entries, **({} if as_tensor else {"shape": list(value.shape)}))


def _native(array: Any, dtype: Any) -> Any:
    """Returns the array in native byte order."""
    return array.view(dtype) if array.dtype.isnative else array.astype(dtype)


def _describe(value: Any) -> tuple[str, str]:
    """Returns a description of an object that cannot be saved, and a hint for what to save instead."""
    kind = type(value)
    hint = "Save tensors, numbers, strings or nests of them instead."
    for base in (dict, list, tuple, set, frozenset, str, bytes, int, float):
        if isinstance(value, base):
            return f"{with_article(kind.__name__)}, a subclass of {base.__name__}", f"Save {base.__name__}(...) of it."
    if isinstance(value, type):
        return f"the class {value.__qualname__}", "Save its name, a string, instead."
    name = getattr(value, "__qualname__", None)
    if callable(value) and name:
        return f"{with_article(kind.__name__)}, {name}", "Save its name, a string, instead."
    if isinstance(value, torch.nn.Module):
        return f"a module, {kind.__name__}", "Save its state_dict()."
    return f"of the kind {kind.__module__}.{kind.__qualname__}", hint


_UNCHANGED = frozenset({str, bool, type(None)})
_SCALARS = _UNCHANGED | {int, float}
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_SAVED_BY_NAME: dict[type, str] = {kind: kind.__name__ for kind in _NAMED}
_ENCODERS: dict[type, Callable[[_Encoder, Any, KeyPath], Any]] = {
    int: _Encoder.integer,
    float: _Encoder.number,
    list: lambda encoder, value, path: encoder.items(value, path),
    dict: _Encoder.mapping,
    tuple: _Encoder.sequence,
    torch.Size: _Encoder.sequence,
    set: _Encoder.unordered,
    frozenset: _Encoder.unordered,
    collections.deque: _Encoder.deque,
    collections.OrderedDict: _Encoder.tagged_pairs,
    collections.Counter: _Encoder.tagged_pairs,
    collections.defaultdict: _Encoder.defaultdict,
    complex: _Encoder.complex,
    bytes: _Encoder.bytes,
    bytearray: _Encoder.bytes,
    range: _Encoder.slices,
    slice: _Encoder.slices,
    datetime.datetime: _Encoder.date_or_time,
    datetime.date: _Encoder.date_or_time,
    datetime.time: _Encoder.date_or_time,
    datetime.timedelta: _Encoder.duration,
    argparse.Namespace: _Encoder.attributes,
    pytypes.SimpleNamespace: _Encoder.attributes,
    torch.Generator: _Encoder.generator,
    **dict.fromkeys(_SAVED_BY_NAME, _Encoder.by_name),
}
"""Encoders for exactly these types."""
_BASE_ENCODERS: tuple[tuple[type, Callable[[_Encoder, Any, KeyPath], Any]], ...] = (
    (enum.Enum, _Encoder.enumeration),
    (Tensor, _Encoder.tensor),
    (pathlib.PurePath, _Encoder.path),
)
"""Encoders for these types and their subclasses."""
_NUMPY_KINDS = frozenset("biufcSUMm")
_NUMPY_AS_TENSOR = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"})


# Reading --------------------------------------------------------------------------------------------------------------
class _Decoder:
    def __init__(self, tensors: TensorSupply, known: Mapping[str, type], where: str) -> None:
        self._tensors = tensors
        self._known = known
        self._where = where

    def decode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if depth > MAX_DEPTH + 1:
            raise CheckpointError(self._where, f"is nested more than {MAX_DEPTH} levels deep.")
        if kind is list:
            return [item if type(item) in _SCALARS else self.decode(item, depth + 1) for item in value]
        if _TAG not in value:
            return {key: self.decode(item, depth + 1) for key, item in value.items()}
        build = _BUILDERS.get(value[_TAG])
        if build is None:
            raise CheckpointError(self._where, f"holds the unknown type {value[_TAG]!r}. A newer Leyden may read it.")
        return build(self, value, depth + 1)

    def items(self, value: Any, depth: int) -> list[Any]:
        return [self.decode(item, depth) for item in value["items"]]

    def pairs(self, value: Any, depth: int) -> dict[Any, Any]:
        return {self.decode(key, depth): self.decode(item, depth) for key, item in value["items"]}

    def fields(self, value: Any, depth: int) -> dict[str, Any]:
        return {name: self.decode(item, depth) for name, item in value["fields"].items()}

    def class_named(self, name: str, base: type | None) -> type | None:
        """Returns the known class of a saved name, if it is a subclass of `base`; otherwise None."""
        known = self._known.get(name)
        if known is None:
            # A script's own classes are `__main__.X` when it runs, and `train.X` when it is imported.
            matches = [
                cls
                for cls in self._known.values()
                if name.endswith(f".{cls.__qualname__}") and "__main__" in (cls.__module__, name.split(".")[0])
            ]
            known = matches[0] if len(matches) == 1 else None
        return known if known is not None and (base is None or issubclass(known, base)) else None

    def enumeration(self, value: Any, depth: int) -> Any:
        plain = self.decode(value["value"], depth)
        cls = self.class_named(value["type"], enum.Enum)
        if cls is None:
            return plain
        members: Mapping[str, Any] = cls.__members__  # type: ignore[attr-defined]
        return members[value["name"]] if value["name"] in members else cls(plain)

    def namedtuple(self, value: Any, depth: int) -> Any:
        items = self.items(value, depth)
        cls = self.class_named(value["type"], tuple)
        return tuple(items) if cls is None else cls._make(items)  # type: ignore[attr-defined]

    def dataclass(self, value: Any, depth: int) -> Any:
        saved = self.fields(value, depth)
        cls = self.class_named(value["type"], None)
        if cls is None or not dataclasses.is_dataclass(cls):
            return pytypes.SimpleNamespace(**saved)
        # Like copy and pickle, do not call __init__: the saved fields are its result, not its arguments.
        rebuilt = cls.__new__(cls)
        for field in dataclasses.fields(cls):
            if field.name in saved:
                item = saved[field.name]
            elif field.default is not dataclasses.MISSING:
                item = field.default
            elif field.default_factory is not dataclasses.MISSING:
                item = field.default_factory()
            else:
                raise CheckpointError(
                    self._where,
                    f"holds {with_article(cls.__name__)} without the field {field.name!r}. Give the field a default.",
                )
            object.__setattr__(rebuilt, field.name, item)
        return rebuilt

    def defaultdict(self, value: Any, depth: int) -> Any:
        name = value["factory"]
        return collections.defaultdict(None if name is None else FACTORIES[name], self.pairs(value, depth))

    def complex(self, value: Any, depth: int) -> Any:
        return complex(self.decode(value["real"], depth), self.decode(value["imag"], depth))

    def tensor(self, value: Any, depth: int) -> Tensor:
        return self._tensors.get(value)

    def generator(self, value: Any, depth: int) -> torch.Generator:
        generator = torch.Generator(torch.device(value["device"]))
        return generator.set_state(self.tensor(value["state"], depth))

    def numpy_scalar(self, value: Any, depth: int) -> Any:
        import numpy

        dtype = _numpy_dtype(value["dtype"])
        data = base64.b64decode(value["base64"])
        return numpy.frombuffer(data, dtype)[0] if dtype.itemsize else numpy.zeros((), dtype)[()]

    def numpy_array(self, value: Any, depth: int) -> Any:
        import numpy

        dtype = _numpy_dtype(value["dtype"])
        array = self.tensor(value["tensor"], depth).numpy()
        if "shape" not in value:
            return array.astype(dtype, copy=False)
        if dtype.itemsize == 0:
            # Empty strings take no bytes in the file, so the file's size does not limit the shape.
            if math.prod(value["shape"]) > MAX_EMPTY:
                raise ValueError(f"an array of {math.prod(value['shape'])} empty strings")
            return numpy.zeros(value["shape"], dtype)
        return numpy.frombuffer(array.tobytes(), dtype).reshape(value["shape"]).copy()


def _numpy_dtype(text: str) -> Any:
    import numpy

    if text[1:2] not in _NUMPY_KINDS or "," in text:
        raise ValueError(f"{text!r} is not the dtype of a plain array")
    return numpy.dtype(text)


def _torch_constant(kind: type) -> Callable[[_Decoder, Any, int], Any]:
    """Returns a decoder for torch's constants of a type, such as `torch.float32`, from their names."""

    def decode_name(decoder: _Decoder, value: Any, depth: int) -> Any:
        constants = {str(constant): constant for constant in vars(torch).values() if type(constant) is kind}
        return constants[value["value"]]

    return decode_name


_BUILDERS: dict[str, Callable[[_Decoder, Any, int], Any]] = {
    "int": lambda decoder, value, depth: int(value["hex"], 16),
    "float": lambda decoder, value, depth: float(value["value"]),
    "complex": _Decoder.complex,
    "bytes": lambda decoder, value, depth: base64.b64decode(value["base64"], validate=True),
    "bytearray": lambda decoder, value, depth: bytearray(base64.b64decode(value["base64"], validate=True)),
    "tuple": lambda decoder, value, depth: tuple(decoder.items(value, depth)),
    "Size": lambda decoder, value, depth: torch.Size(decoder.items(value, depth)),
    "set": lambda decoder, value, depth: set(decoder.items(value, depth)),
    "frozenset": lambda decoder, value, depth: frozenset(decoder.items(value, depth)),
    "deque": lambda decoder, value, depth: collections.deque(decoder.items(value, depth), value["maxlen"]),
    "dict": _Decoder.pairs,
    "OrderedDict": lambda decoder, value, depth: collections.OrderedDict(decoder.pairs(value, depth)),
    "Counter": lambda decoder, value, depth: collections.Counter(decoder.pairs(value, depth)),
    "defaultdict": _Decoder.defaultdict,
    "range": lambda decoder, value, depth: range(*decoder.items(value, depth)),
    "slice": lambda decoder, value, depth: slice(*decoder.items(value, depth)),
    "path": lambda decoder, value, depth: pathlib.Path(value["value"]),
    "datetime": lambda decoder, value, depth: datetime.datetime.fromisoformat(value["value"]),
    "date": lambda decoder, value, depth: datetime.date.fromisoformat(value["value"]),
    "time": lambda decoder, value, depth: datetime.time.fromisoformat(value["value"]),
    "timedelta": lambda decoder, value, depth: datetime.timedelta(*value["value"]),
    "Namespace": lambda decoder, value, depth: argparse.Namespace(**decoder.fields(value, depth)),
    "SimpleNamespace": lambda decoder, value, depth: pytypes.SimpleNamespace(**decoder.fields(value, depth)),
    "dataclass": _Decoder.dataclass,
    "enum": _Decoder.enumeration,
    "namedtuple": _Decoder.namedtuple,
    "dtype": _torch_constant(torch.dtype),
    "layout": _torch_constant(torch.layout),
    "memory_format": _torch_constant(torch.memory_format),
    "device": lambda decoder, value, depth: torch.device(value["value"]),
    "tensor": _Decoder.tensor,
    "generator": _Decoder.generator,
    "numpy.dtype": lambda decoder, value, depth: _numpy_dtype(value["dtype"]),
    "numpy.scalar": _Decoder.numpy_scalar,
    "numpy.array": _Decoder.numpy_array,
    "omegaconf": lambda decoder, value, depth: config_of(decoder.decode(value["value"], depth)),
}


def class_names(encoded: Any) -> set[str]:
    """Returns the classes of the Enums, dataclasses and namedtuples in an encoded tree, by name without module."""
    found: set[str] = set()
    pending = [encoded]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
            if value.get(_TAG) in ("enum", "dataclass", "namedtuple") and isinstance(value.get("type"), str):
                found.add(value["type"].rpartition(".")[2])
    return found


def known_classes(like: Any) -> dict[str, type]:
    """Returns the classes in the current tree, which saved values are restored as, by their names in a checkpoint."""
    known: dict[str, type] = {}
    pending, seen = [like], set()
    while pending:
        value = pending.pop()
        if type(value) in _UNCHANGED or id(value) in seen or is_config(value):
            continue
        seen.add(id(value))
        if isinstance(value, enum.Enum):
            known[name_of(type(value))] = type(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            known[name_of(type(value))] = type(value)
            pending += [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        elif isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            if hasattr(type(value), "_fields"):
                known[name_of(type(value))] = type(value)
            pending += value
        elif isinstance(value, (argparse.Namespace, pytypes.SimpleNamespace)):
            pending += vars(value).values()
    return known
