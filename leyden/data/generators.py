"""Finds the random generators that a loader owns, and saves, checks and restores the states of generators."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

from leyden.core.errors import StateError
from leyden.core.saved_state import SavedState, brief

PARTS = ("sampler", "batch_sampler", "dataset", "datasets")
"""Attributes that lead from a loader to its samplers and datasets, and from these to the ones that they wrap."""


class Generators:
    """The generators that a loader, its samplers and its datasets own, by their path."""

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
        """Returns the states of the generators, by path."""
        return {path: random_state(source) for path, source in self._found().items()}

    def restore(self, states: dict[str, Any]) -> None:
        """Restores the states of generators. Paths that do not exist in this process are ignored."""
        for path, source in self._found().items():
            if path in states:
                set_random_state(source, states[path], f"generators.{path}")


def parts_of(loader: Any) -> list[Any]:
    """Returns the loader, its samplers and its datasets."""
    return [part for _, part in _named_parts(loader)]


def _named_parts(loader: Any) -> list[tuple[str, Any]]:
    """Walks a loader breadth first. Not as a recursive closure, whose reference cycle would keep the loader alive."""
    named: list[tuple[str, Any]] = []
    seen: set[int] = set()
    queue: list[tuple[str, Any]] = [("loader", loader)]
    for path, part in queue:
        if id(part) in seen or part is None:
            continue
        seen.add(id(part))
        named.append((path, part))
        attributes = _attributes(part)
        for name in PARTS:
            inner = attributes.get(name)
            if name == "datasets" and isinstance(inner, (list, tuple)):
                queue.extend((f"{path}.{name}.{index}", item) for index, item in enumerate(inner))
            else:
                queue.append((f"{path}.{name}", inner))
    return named


def _attributes(part: Any) -> dict[str, Any]:
    return getattr(part, "__dict__", {}) if not isinstance(part, type) else {}


def is_random_source(item: object) -> bool:
    """Returns True for a generator object of torch, Python or NumPy."""
    if isinstance(item, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(item, (numpy.Generator, numpy.RandomState))


def random_state(source: Any) -> Any:
    """Returns the state of a generator (or of the module `random`) as tensors and plain Python."""
    if isinstance(source, torch.Generator):
        return source.get_state()
    if isinstance(source, random.Random) or source is random:
        return plain_python(source.getstate())
    if hasattr(source, "bit_generator"):
        return plain(source.bit_generator.state)
    return plain(source.get_state(legacy=False))


def check_random_state(source: Any, state: Any, where: str) -> None:
    """Checks that a state fits a generator, or the module `random`. Setting some invalid ones would crash the process.

    Raises:
        StateError: if not; names the entry.
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
        # torch checks a state only when it is set, so a temporary generator is set.
        torch.Generator().set_state(on_cpu(state))
    except RuntimeError as error:
        raise StateError(where, f"is not the state of a torch generator ({error})") from error


def _check_python(saved: SavedState) -> None:
    saved.integer("version", least=3, most=3)
    words = saved.value("words")
    if not isinstance(words, Tensor) or words.dtype != torch.int64 or tuple(words.shape) != (625,):
        raise StateError(saved.path("words"), f"is {brief(words)}, and must be 625 whole numbers")
    if bool((words < 0).any()) or bool((words >= 2**32).any()) or int(words[-1]) > 624:
        raise StateError(saved.path("words"), "holds a number out of range")
    if not saved.is_none("gauss"):
        saved.number("gauss")


# Upper limits of the indices in a NumPy generator's state, which NumPy does not check.
_POSITIONS = {"pos": 624, "buffer_pos": 4, "has_gauss": 1, "has_uint32": 1}


def check_numpy_state(saved: SavedState, now: Any) -> None:
    """Checks that a NumPy state has the same entries, with the same types and sizes, as a generator's current state."""
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
    """Sets a generator to a state that `random_state` returned.

    Raises:
        StateError: if the state is invalid; the generator is unchanged.
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
    """Converts the state of a Python generator to a dict, with its words as a tensor."""
    version, words, gauss = state
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}


def plain(value: Any) -> Any:
    """Converts a NumPy state. Arrays become bytes, because torch lacks the unsigned integers to hold them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "tobytes"):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "bytes": value.tobytes()}
    return value


def with_arrays(value: Any) -> Any:
    """Reverses `plain`."""
    import numpy as np

    if not isinstance(value, dict):
        return value
    if set(value) == {"dtype", "shape", "bytes"}:
        return np.frombuffer(value["bytes"], dtype=value["dtype"]).reshape(value["shape"]).copy()
    return {key: with_arrays(item) for key, item in value.items()}


def on_cpu(state: Tensor) -> Tensor:
    """Returns a generator's state as the CPU tensor that torch expects, whatever device it was loaded to."""
    return state.detach().to("cpu", torch.uint8)
