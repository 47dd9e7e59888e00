"""Generator objects that draw random numbers: their states, and those that a loader owns."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

from leyden.strategies.errors import StateError
from leyden.strategies.saved_state import SavedState, brief

PARTS = ("sampler", "batch_sampler", "dataset", "datasets")
"""Attributes through which a loader reaches its samplers and data sets, and these what they wrap."""


class Generators:
    """The generator objects that a loader, its samplers and its data sets own, by their path."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def _found(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        seen: set[int] = set()
        for path, part in _named_parts(self.loader):
            for name, value in _attributes(part).items():
                if is_random_source(value) and id(value) not in seen:
                    seen.add(id(value))
                    found[f"{path}.{name}"] = value
        return found

    def states(self) -> dict[str, Any]:
        """Their states, by path."""
        return {path: random_state(source) for path, source in self._found().items()}

    def restore(self, states: dict[str, Any]) -> None:
        """Sets those that this process has."""
        for path, source in self._found().items():
            if path in states:
                set_random_state(source, states[path], f"generators.{path}")


def parts_of(loader: Any) -> list[Any]:
    """The loader, its samplers and its data sets."""
    return [part for _, part in _named_parts(loader)]


def _named_parts(loader: Any) -> list[tuple[str, Any]]:
    """Breadth first. (A function that calls itself through a closure would keep the loader alive in a cycle.)"""
    named: list[tuple[str, Any]] = []
    seen: set[int] = set()
    ahead: list[tuple[str, Any]] = [("loader", loader)]
    for path, part in ahead:
        if id(part) in seen or part is None:
            continue
        seen.add(id(part))
        named.append((path, part))
        attributes = _attributes(part)
        for name in PARTS:
            inner = attributes.get(name)
            if name == "datasets" and isinstance(inner, (list, tuple)):
                ahead.extend((f"{path}.{name}.{index}", item) for index, item in enumerate(inner))
            else:
                ahead.append((f"{path}.{name}", inner))
    return named


def _attributes(part: Any) -> dict[str, Any]:
    return getattr(part, "__dict__", {}) if not isinstance(part, type) else {}


def is_random_source(item: object) -> bool:
    """True for a generator object of torch, Python or NumPy."""
    if isinstance(item, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(item, (numpy.Generator, numpy.RandomState))


def random_state(source: Any) -> Any:
    """The state of one generator object (or of the module `random`), as tensors and plain Python."""
    if isinstance(source, torch.Generator):
        return source.get_state()
    if isinstance(source, random.Random) or source is random:
        return plain_python(source.getstate())
    if hasattr(source, "bit_generator"):
        return plain(source.bit_generator.state)
    return plain(source.get_state(legacy=False))


def check_random_state(source: Any, state: Any, where: str) -> None:
    """Refuses what `random_state` cannot have returned for a generator. Some crash the process that is set to it.

    Raises:
        StateError: names the entry.
    """
    if isinstance(source, torch.Generator):
        _check_torch(state, where, source.get_state() if source.device.type == "cpu" else None)
    elif isinstance(source, random.Random) or source is random:
        _check_python(SavedState(state, where))
    else:
        check_numpy_state(SavedState(state, where), random_state(source))


def _check_torch(state: Any, where: str, now: Tensor | None) -> None:
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.dim() != 1:
        raise StateError(where, f"is {brief(state)}, and must be a tensor of bytes")
    if now is None:
        return
    try:
        # torch checks the state that it is given; a generator of its own takes the blow.
        torch.Generator().set_state(on_cpu(state))
    except RuntimeError as error:
        raise StateError(where, f"is no state of a generator of torch ({error})") from error


def _check_python(saved: SavedState) -> None:
    saved.integer("version", least=3, most=3)
    words = saved.value("words")
    if not isinstance(words, Tensor) or words.dtype != torch.int64 or tuple(words.shape) != (625,):
        raise StateError(saved.path("words"), f"is {brief(words)}, and must be 625 whole numbers")
    if bool((words < 0).any()) or bool((words >= 2**32).any()) or int(words[-1]) > 624:
        raise StateError(saved.path("words"), "holds a number out of range")
    if not saved.is_none("gauss"):
        saved.number("gauss")


# What an index into the words of a generator of NumPy may be; NumPy does not look.
_POSITIONS = {"pos": 624, "buffer_pos": 4, "has_gauss": 1, "has_uint32": 1}


def check_numpy_state(saved: SavedState, now: Any) -> None:
    """Compares with the state of a generator of the same kind: the same entries, of the same kinds and sizes."""
    for key, present in now.items():
        if key == "bytes":
            if not isinstance(saved.value(key), bytes) or len(saved.value(key)) != len(present):
                raise StateError(saved.path(key), f"must be {len(present)} bytes")
        elif isinstance(present, dict):
            check_numpy_state(saved.nested(key), present)
        elif isinstance(present, (str, list)):
            if saved.value(key) != present:
                raise StateError(saved.path(key), f"is {brief(saved.value(key))}, and must be {present!r}")
        elif isinstance(present, int):
            saved.integer(key, least=0, most=_POSITIONS.get(key, 2**128))
        else:
            saved.number(key)


def set_random_state(source: Any, state: Any, where: str = "generator") -> None:
    """Sets one generator object to what `random_state` returned.

    Raises:
        StateError: if it cannot have; the generator is as it was.
    """
    check_random_state(source, state, where)
    if isinstance(source, torch.Generator):
        source.set_state(on_cpu(state))
    elif isinstance(source, random.Random) or source is random:
        source.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    elif hasattr(source, "bit_generator"):
        source.bit_generator.state = with_arrays(state)
    else:
        source.set_state(with_arrays(state))


def plain_python(state: tuple[Any, ...]) -> dict[str, Any]:
    """The state of a generator of Python, its words as a tensor."""
    version, words, gauss = state
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}


def plain(value: Any) -> Any:
    """A NumPy state without arrays: their bytes are kept, since torch has no unsigned integers to hold them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "tobytes"):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "bytes": value.tobytes()}
    return value


def with_arrays(value: Any) -> Any:
    """The NumPy state that `plain` took apart."""
    import numpy as np

    if not isinstance(value, dict):
        return value
    if set(value) == {"dtype", "shape", "bytes"}:
        return np.frombuffer(value["bytes"], dtype=value["dtype"]).reshape(value["shape"]).copy()
    return {key: with_arrays(item) for key, item in value.items()}


def on_cpu(state: Tensor) -> Tensor:
    """A generator's state as torch wants it, wherever it was loaded to."""
    return state.detach().to("cpu", torch.uint8)
