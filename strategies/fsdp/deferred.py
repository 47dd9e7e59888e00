"""Builds modules without memory and computes their values group by group, bit for bit as in an eager build.

A module built in `Deferred.recording()` is on the meta device. Every operation that creates or changes its tensors is
recorded, along with the random generator's state before each draw. The draw itself runs once and is discarded, so the
generator advances as in an eager build. Later, `values` replays on the CPU only the operations that the requested
tensors depend on, so only those tensors are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from leyden.core.errors import ConfigurationError
from leyden.strategies.base import IS_META

_EMPTY = {torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.empty_like, torch.ops.aten.new_empty}
"""Operations that allocate memory and leave its values open."""
META, CPU = torch.device("meta"), torch.device("cpu")
CONSTANTS: tuple[Callable[..., Tensor], ...] = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that take values from Python. A meta tensor would lose the values, so they run on the CPU first."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where to find a tensor's values: a strided view of one of the recorded storages."""

    storage: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Recipe:
        return cls(_key(tensor), tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        """Returns the tensor as a view of a CPU storage."""
        empty: Any = torch.empty(0, dtype=self.dtype, device=CPU)
        view: Tensor = empty.set_(storage, self.offset, self.shape, self.strides)
        return view


@dataclass(slots=True)
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    outputs: list[Any]
    reads: set[int]
    """The storages that it reads."""
    changes: set[int]
    """The storages that it creates or writes to."""
    state: Tensor | None
    """The random generator's state before the operation, if it draws."""


class Deferred:
    """Records how modules are built on the meta device, and computes their values on demand."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._known: dict[int, torch.UntypedStorage] = {}
        self._filled: set[int] = set()
        """The storages that have values, and are not only allocated."""
        self._scratch = _memory(0)

    @contextmanager
    def recording(self, draws: bool = True) -> Iterator[None]:
        """Builds modules on the meta device within this context, and records how.

        Args:
            draws: False skips random initialization, for weights that a checkpoint replaces.
        """
        with _Record(self, draws), _OnMeta(draws):
            yield
        self._scratch = _memory(0)

    def recipe(self, tensor: Tensor) -> Recipe | None:
        """Returns the recipe of a tensor's values; None if the tensor was not built in `recording`."""
        return Recipe.of(tensor) if _is_meta(tensor) and _key(tensor) in self._known else None

    def is_filled(self, recipe: Recipe) -> bool:
        """Returns False for memory that was allocated and never written, such as that of weights yet to be read."""
        return recipe.storage in self._filled

    @torch.no_grad()
    def values(self, recipes: Iterable[Recipe]) -> dict[Recipe, Tensor]:
        """Computes the tensors on the CPU, as an eager build would have."""
        wanted = list(recipes)
        needed = {recipe.storage for recipe in wanted}
        replayed = []
        for operation in reversed(self._operations):
            if operation.changes & needed:
                replayed.append(operation)
                needed |= operation.reads
        replayed.reverse()
        last_use = {key: i for i, operation in enumerate(replayed) for key in operation.changes | operation.reads}
        last_use |= {recipe.storage: len(replayed) for recipe in wanted}
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=[]):
            for i, operation in enumerate(replayed):
                _replay(operation, storages)
                # Frees each storage after its last use: rejection sampling creates many temporary tensors.
                for key in operation.changes | operation.reads:
                    if last_use[key] == i:
                        del storages[key]
        return {recipe: recipe.view(storages[recipe.storage]) for recipe in wanted}

    def draw_and_discard(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        """Runs a draw only to advance the generator; returns the generator's previous state."""
        generator = kwargs.get("generator") or torch.default_generator
        state: Tensor = generator.get_state()
        zeros = _on_cpu((args, kwargs), self._zeros_like)
        try:
            function(*zeros[0], **zeros[1])
        except RuntimeError as error:
            raise ConfigurationError(
                f"{function} draws random numbers that depend on values, and tensors on the meta device have none "
                f"({error}). Build this module outside configure_model and init_module."
            ) from error
        return state

    def _zeros_like(self, tensor: Tensor) -> Tensor:
        """Returns zeros in memory that all draws share: memory that is freed for each would not all be given back."""
        size = tensor.untyped_storage().nbytes()
        if self._scratch.nbytes() < size:
            self._scratch = _memory(size)
        zeros: Any = torch.empty(0, dtype=tensor.dtype, device=CPU)
        return zeros.set_(self._scratch, 0, tensor.shape, tensor.stride()).zero_()  # type: ignore[no-any-return]

    def note(self, function: Any, args: Any, kwargs: Any, outputs: Any, state: Tensor | None) -> None:
        """Records an operation on meta tensors."""
        inputs = {_key(t) for t in tree_flatten((args, kwargs))[0] if _is_meta(t)}
        created = {_key(t) for t in tree_flatten(outputs)[0] if _is_meta(t)} - inputs
        changes = created | _written(function, args, kwargs)
        if not changes:
            return
        if function.overloadpacket not in _EMPTY:
            self._filled |= changes
        # Stored as recipes, because converting the module may later swap a parameter's memory.
        args, kwargs, outputs = tree_map(self._to_recipe, (args, kwargs, outputs))
        self._operations.append(_Operation(function, args, kwargs, tree_flatten(outputs)[0], inputs, changes, state))

    def _to_recipe(self, item: Any) -> Any:
        if not _is_meta(item):
            return item
        recipe = Recipe.of(item)
        # A reference to the storage keeps its address, the key, from being reused.
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
            state = self.deferred.draw_and_discard(func, args, kwargs) if draws and self.draws else None
            self.deferred.note(func, args, kwargs, outputs, state)
        return outputs


class _OnMeta(TorchFunctionMode):
    """Creates tensors on the meta device, without a sign of it to code that builds a module.

    Libraries skip initialization on that device: torch.nn.init for some functions if `is_meta`, and transformers if it
    is the default device, so it is not made the default. transformers compares that with the device of an empty tensor.
    """

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self._create: Callable[..., Any] = DeviceContext(META).__torch_function__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == IS_META:
            return not self.draws
        if func in CONSTANTS and torch.device(kwargs.get("device") or META) == META:
            constant = func(*args, **{**kwargs, "device": CPU})
            return constant.to(META) if constant.numel() or not self.draws else constant
        return self._create(func, types, args, kwargs)


def _memory(size: int) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8, device=CPU).untyped_storage()


def _replay(operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
    """Runs a recorded operation on CPU tensors."""
    args, kwargs = _on_cpu((operation.args, operation.kwargs), lambda recipe: recipe.view(storages[recipe.storage]))
    if operation.state is not None:
        generator = torch.default_generator
        if kwargs.get("generator") is not None:
            generator = torch.Generator()
            kwargs = {**kwargs, "generator": generator}
        generator.set_state(operation.state)
    outputs = tree_flatten(operation.function(*args, **kwargs))[0]
    for recipe, real in zip(operation.outputs, outputs, strict=True):
        if isinstance(recipe, Recipe) and recipe.storage in operation.changes - operation.reads:
            if real.stride() != recipe.strides:
                real = torch.empty_strided(recipe.shape, recipe.strides, dtype=recipe.dtype, device=CPU).copy_(real)
            storages[recipe.storage] = real.untyped_storage()


def _on_cpu(tree: Any, make: Callable[[Any], Tensor]) -> Any:
    """Replaces each meta tensor or recipe in a structure by `make` of it, and the meta device by the CPU."""

    def convert(item: Any) -> Any:
        if isinstance(item, Recipe) or _is_meta(item):
            return make(item)
        return CPU if isinstance(item, torch.device) and item.type == "meta" else item

    return tree_map(convert, tree)


def _written(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """Returns the storages of the arguments that an operation writes to, according to its schema."""
    written = set()
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        written |= {_key(t) for t in tree_flatten(value)[0] if _is_meta(t)}
    return written


def _is_meta(item: Any) -> bool:
    return isinstance(item, Tensor) and item.device == META


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
