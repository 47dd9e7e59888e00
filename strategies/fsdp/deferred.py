"""Modules that are built without memory, and given their values part by part: the same values as if built whole.

A module built in `Deferred.recording()` is on the meta device. Every operation that made or changed its tensors is
noted, and the random generator's state before each draw; the draw itself is made once and thrown away, so that whatever
comes after finds the generator as a plain build would have left it. `values` then repeats, on the CPU, only those
operations that a few tensors depend on. At no time is more in memory than these tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from leyden.strategies.empty_init import IS_META
from leyden.strategies.errors import ConfigurationError

META, CPU = torch.device("meta"), torch.device("cpu")
CONSTANTS: tuple[Callable[..., Tensor], ...] = (torch.tensor, torch.as_tensor, torch.asarray)
"""These take values from Python, which a tensor on the meta device would lose: they are made on the CPU and then noted.
"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where the values of a tensor are to be found: a stretch of one of the noted storages."""

    storage: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Recipe:
        return cls(_key(tensor), tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def cut(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, in a storage of the CPU."""
        empty: Any = torch.empty(0, dtype=self.dtype, device=CPU)
        cut: Tensor = empty.set_(storage, self.offset, self.shape, self.strides)
        return cut


@dataclass(slots=True)
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    outputs: list[Any]
    reads: set[int]
    changes: set[int]
    """The storages that it made or wrote to."""
    state: Tensor | None
    """The state of the random generator, if the operation draws."""


class Deferred:
    """Records how modules are built on the meta device, and makes their values when they are needed."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._known: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def recording(self, draws: bool = True) -> Iterator[None]:
        """Builds modules on the meta device, which can be given their values later.

        Args:
            draws: False skips random initialisation, for weights that a checkpoint replaces.
        """
        with _Record(self, draws), _Constants(draws), META:
            yield

    def recipe(self, tensor: Tensor) -> Recipe | None:
        """Returns the recipe of a tensor's values; None if it was not built here."""
        return Recipe.of(tensor) if _is_meta(tensor) and _key(tensor) in self._known else None

    @torch.no_grad()
    def values(self, recipes: Iterable[Recipe]) -> dict[Recipe, Tensor]:
        """Makes the tensors, on the CPU, as a plain build would have made them."""
        wanted = list(recipes)
        needed = {recipe.storage for recipe in wanted}
        chosen = []
        for operation in reversed(self._operations):
            if operation.changes & needed:
                chosen.append(operation)
                needed |= operation.reads
        chosen.reverse()
        last_use = {key: place for place, operation in enumerate(chosen) for key in operation.changes | operation.reads}
        last_use |= {recipe.storage: len(chosen) for recipe in wanted}
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=[]):
            for place, operation in enumerate(chosen):
                _repeat(operation, storages)
                # A draw with rejections makes many tensors: none of them may be kept.
                for key in operation.changes | operation.reads:
                    if last_use[key] == place:
                        del storages[key]
        return {recipe: recipe.cut(storages[recipe.storage]) for recipe in wanted}

    def note(self, function: Any, args: Any, kwargs: Any, outputs: Any, state: Tensor | None) -> None:
        """Records an operation on meta tensors."""
        inputs = {_key(t) for t in tree_flatten((args, kwargs))[0] if _is_meta(t)}
        made = {_key(t) for t in tree_flatten(outputs)[0] if _is_meta(t)} - inputs
        changes = made | _written(function, args, kwargs)
        if not changes:
            return
        # As recipes: a parameter's memory may be exchanged later, by a conversion of its module.
        args, kwargs, outputs = tree_map(self._described, (args, kwargs, outputs))
        self._operations.append(_Operation(function, args, kwargs, tree_flatten(outputs)[0], inputs, changes, state))

    def _described(self, item: Any) -> Any:
        if not _is_meta(item):
            return item
        recipe = Recipe.of(item)
        # While it is held on to, no other storage takes its address.
        self._known[recipe.storage] = item.untyped_storage()
        return recipe


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, deferred: Deferred, draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.deferred, self.draws = deferred, draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and _is_meta(args[0]):
            return self.deferred.values([Recipe.of(args[0])])[Recipe.of(args[0])].item()
        outputs = func(*args, **kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws and not self.draws and outputs is args[0]:
            return outputs
        if any(_is_meta(t) for t in tree_flatten((args, kwargs, outputs))[0]):
            state = _draw(func, args, kwargs) if draws and self.draws else None
            self.deferred.note(func, args, kwargs, outputs, state)
        return outputs


class _Constants(TorchFunctionMode):
    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == IS_META:
            # Some of torch.nn.init leave a meta tensor as it is, which would go unnoticed here; without draws they may.
            return not self.draws
        if func in CONSTANTS and torch.device(kwargs.get("device") or META) == META:
            return func(*args, **{**kwargs, "device": CPU}).to(META)
        return func(*args, **kwargs)


def _draw(function: Any, args: Any, kwargs: Any) -> Tensor:
    """Makes a draw only to move the generator on; returns its state before."""
    generator = kwargs.get("generator") or torch.default_generator
    state: Tensor = generator.get_state()
    zeros = _on_cpu(
        (args, kwargs), lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=CPU).zero_()
    )
    try:
        function(*zeros[0], **zeros[1])
    except RuntimeError as error:
        raise ConfigurationError(
            f"{function} draws random numbers by values that a module on the meta device does not have ({error}). "
            "Build this module outside of configure_model and init_module."
        ) from error
    return state


def _repeat(operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
    """Runs a noted operation for real, on tensors of the CPU."""
    args, kwargs = _on_cpu((operation.args, operation.kwargs), lambda recipe: recipe.cut(storages[recipe.storage]))
    if operation.state is not None:
        generator = kwargs.get("generator")
        if generator is not None:
            kwargs = {**kwargs, "generator": torch.Generator()}
        (kwargs["generator"] if generator is not None else torch.default_generator).set_state(operation.state)
    outputs = tree_flatten(operation.function(*args, **kwargs))[0]
    for recipe, real in zip(operation.outputs, outputs, strict=True):
        if isinstance(recipe, Recipe) and recipe.storage in operation.changes - operation.reads:
            if real.stride() != recipe.strides:
                real = torch.empty_strided(recipe.shape, recipe.strides, dtype=recipe.dtype, device=CPU).copy_(real)
            storages[recipe.storage] = real.untyped_storage()


def _on_cpu(tree: Any, make: Callable[[Any], Tensor]) -> Any:
    def convert(item: Any) -> Any:
        if isinstance(item, Recipe) or _is_meta(item):
            return make(item)
        return CPU if isinstance(item, torch.device) and item.type == "meta" else item

    return tree_map(convert, tree)


def _written(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """The storages of the arguments that an operation writes to, as its schema says."""
    written = set()
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        written |= {_key(t) for t in tree_flatten(value)[0] if _is_meta(t)}
    return written


def _is_meta(item: Any) -> bool:
    return isinstance(item, Tensor) and item.device == META


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
