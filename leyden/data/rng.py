"""Saves, restores and seeds all random generators of a process, and isolates blocks of code that draw from them."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from leyden.core.devices import current_index, runtime_of, types_in_use
from leyden.core.errors import ConfigurationError, StateError
from leyden.core.rank_zero import inform
from leyden.core.saved_state import SavedState, brief
from leyden.data.generators import (
    Generators,
    check_numpy_state,
    check_random_state,
    on_cpu,
    plain,
    plain_python,
    set_random_state,
    with_arrays,
)
from leyden.strategies.xla import runtime

SEED_VARIABLE = "LEYDEN_SEED"
MAX_SEED = 2**32 - 1
"""The largest seed that NumPy accepts."""


def rng_state(devices: bool = True) -> dict[str, Any]:
    """Returns the state of Python's, NumPy's and torch's generators as tensors and plain Python.

    Leaves out NumPy if it is not imported, and the generators of GPUs, other accelerators and XLA if they are not in
    use, or without `devices`.
    """
    return plain_state(live_state(devices))


def live_state(devices: bool = True) -> dict[str, Any]:
    """Returns the state in each library's own form, which is cheaper than `rng_state`; see `plain_state`."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy.random" in sys.modules:
        import numpy as np

        state["numpy"] = np.random.get_state(legacy=False)
    for kind in types_in_use() if devices else ():
        state[kind] = [runtime_of(kind).get_rng_state(index) for index in _indices(kind)]
    if devices and runtime.is_used():
        state["xla"] = runtime.rng_state()
    return state


def _indices(kind: str) -> list[int]:
    """Returns this rank's GPU first, then the others, because a resumed rank may use a GPU with another index."""
    own = current_index(kind)
    return [own, *(index for index in range(runtime_of(kind).device_count()) if index != own)]


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """Converts a `live_state` to tensors and plain Python."""
    converted = {"python": plain_python(state["python"])}
    if "numpy" in state:
        converted["numpy"] = plain(state["numpy"])
    return {**state, **converted}


def set_live_state(state: dict[str, Any]) -> None:
    """Sets the generators of the host to a `live_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])


def check_rng_state(state: Any, where: str = "rng") -> None:
    """Checks that `rng_state` could have returned a state. Changes nothing.

    Raises:
        StateError: if not; names the entry.
    """
    saved = SavedState(state, where)
    check_random_state(random, saved.value("python"), saved.path("python"))
    check_random_state(torch.default_generator, saved.value("torch"), saved.path("torch"))
    if "numpy" in saved:
        import numpy as np

        check_numpy_state(saved.nested("numpy"), plain(np.random.get_state(legacy=False)))
    for key in set(state) - {"python", "numpy", "torch", "xla"}:
        for value in _listed(saved.value(key)):
            if not isinstance(value, Tensor) or value.dim() != 1:
                raise StateError(saved.path(key), f"is {brief(value)}, and must be a tensor of bytes")


def set_rng_state(state: dict[str, Any]) -> None:
    """Sets the generators to a state that `rng_state` returned, except those of devices that this machine lacks.

    Raises:
        StateError: if the state is invalid; all generators are unchanged.
    """
    check_rng_state(state)
    set_random_state(random, state["python"])
    torch.set_rng_state(on_cpu(state["torch"]))
    if "numpy" in state:
        import numpy as np

        np.random.set_state(with_arrays(state["numpy"]))
    for kind in types_in_use():
        for index, value in zip(_indices(kind), _listed(state.get(kind, [])), strict=False):
            runtime_of(kind).set_rng_state(on_cpu(value), index)
    if "xla" in state and runtime.is_used():
        runtime.set_rng_state(state["xla"])


def _listed(states: Any) -> list[Any]:
    """Returns the states of a type of device in a list. Earlier versions saved that of MPS by itself."""
    return states if isinstance(states, list) else [states]


class RandomNumbers:
    """The owner of the random state that a checkpoint saves for this process."""

    def state_dict(self) -> dict[str, Any]:
        return rng_state()

    def check_state_dict(self, state: Any) -> None:
        check_rng_state(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_rng_state(state)

    def regroup(self, states: Sequence[Any], rank: int, seed: int) -> dict[str, Any] | None:
        """Returns rank 0's saved state on rank 0, from which the order of samples is drawn; reseeds other ranks."""
        if rank == 0:
            return states[0]  # type: ignore[no-any-return]
        with isolated_rng():
            seed_everything(seed)
            return rng_state()


@contextmanager
def isolated_rng(loaders: Iterable[Any] = ()) -> Iterator[None]:
    """Restores all generators after this block, so numbers drawn in it have no effect afterwards.

    Args:
        loaders: the loaders read in the block. Their own generators are restored too, and workers started in the block
            are shut down. The next pass would otherwise reuse them and draw no seed, which would shift all later draws.

    Example:
        >>> with isolated_rng():
        ...     _ = torch.rand(3)
    """
    undo = undoing(loaders)
    try:
        yield
    finally:
        undo()


def undoing(loaders: Iterable[Any] = ()) -> Callable[[], None]:
    """Saves the state of the generators, and returns a function that restores it like `isolated_rng`."""
    loaders = list(loaders)
    workers = [getattr(loader, "_iterator", None) for loader in loaders]
    owned = [Generators(loader) for loader in loaders]
    states = [generators.states() for generators in owned]
    state = rng_state()

    def undo() -> None:
        for loader, before in zip(loaders, workers, strict=True):
            if isinstance(loader, DataLoader) and before is None:
                loader._iterator = None
        for generators, values in zip(owned, states, strict=True):
            generators.restore(values)
        set_rng_state(state)

    return undo


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = False) -> int:
    """Seeds Python, NumPy and torch on every device.

    Args:
        seed: a seed from 0 to 2**32 - 1. None reads the environment variable LEYDEN_SEED, and defaults to 0.
        workers: ignored, for compatibility with Lightning. torch seeds Python, NumPy and torch in each worker from a
            number that the loader draws, so they already depend on this seed.
        verbose: True to print the seed.

    Returns:
        The seed.

    Raises:
        ConfigurationError: if the seed is not an integer, or out of range.

    Example:
        >>> seed_everything(1)
        1
    """
    origin = "seed"
    value: Any = seed
    if value is None:
        origin, value = SEED_VARIABLE, os.environ.get(SEED_VARIABLE, "0")
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise ConfigurationError(f"{origin}={value!r} is not an integer: use one from 0 to {MAX_SEED}.") from None
    if not 0 <= number <= MAX_SEED:
        raise ConfigurationError(f"{origin}={number} is out of range: use an integer from 0 to {MAX_SEED}.")
    random.seed(number)
    torch.manual_seed(number)
    if runtime.is_used():
        runtime.follow_torch()
    try:
        import numpy as np
    except ImportError:
        pass
    else:
        np.random.seed(number)
    if verbose:
        inform(f"Seed set to {number}", every_rank=True)
    return number
