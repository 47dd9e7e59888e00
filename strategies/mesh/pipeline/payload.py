"""Payload specs: the structure, shapes and dtypes of the values that a pipeline stage sends to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from leyden.core.errors import ConfigurationError
from leyden.core.saved_state import brief

BOOK_SIZE = 256
"""Number of specs in a SpecBook, from which it starts over."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor in a payload."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, leaf: Any) -> Any:
        """Returns the spec of a tensor; any other value as it is."""
        return cls(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


class PayloadSpec:
    """The structure of a payload, with a TensorSpec in place of each tensor.

    Args:
        payload: any nested structure of tensors, or of their specs.
    """

    def __init__(self, payload: Any) -> None:
        self.tree = tree_map(TensorSpec.of, payload)
        self._leaves, self._structure = tree_flatten(self.tree)
        self._single = self.tree if isinstance(self.tree, TensorSpec) else None
        """The tensor's spec, if the payload is a single tensor."""

    def matches(self, payload: Any) -> bool:
        """Returns True if a payload has this spec: equal shapes, dtypes, structure and values other than tensors."""
        if self._single is not None and isinstance(payload, Tensor) and TensorSpec.of(payload) == self._single:
            return True
        leaves, structure = tree_flatten(payload)
        if structure != self._structure:
            return False
        pairs = zip(map(TensorSpec.of, leaves), self._leaves, strict=True)
        return all(found is own or (type(found) is type(own) and bool(found == own)) for found, own in pairs)

    def check(self, payload: Any) -> None:
        """Checks the payload of another micro-batch with the same input sizes.

        Raises:
            ConfigurationError: if it does not match.
        """
        if not self.matches(payload):
            raise ConfigurationError(
                f"a block returned {brief(tree_map(TensorSpec.of, payload))} for a micro-batch, and "
                f"{brief(self.tree)} for another of the same sizes. Stages agree on shapes and on values other than "
                "tensors in advance: return tensors whose shapes depend only on the batch's shapes, and return "
                "changing numbers as tensors."
            )

    @property
    def tensors(self) -> list[TensorSpec]:
        """The specs of the payload's tensors."""
        return [leaf for leaf in self._leaves if isinstance(leaf, TensorSpec)]

    def allocate(self, device: torch.device) -> list[Tensor]:
        """Returns uninitialized tensors of the payload's shapes and dtypes."""
        return [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in self.tensors]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the payload with these tensors, each cropped to its shape."""
        if self._single is not None:
            return _cropped(tensors[0], self._single.shape)
        remaining = iter(tensors)
        leaves = [
            _cropped(next(remaining), leaf.shape) if isinstance(leaf, TensorSpec) else leaf for leaf in self._leaves
        ]
        return tree_unflatten(leaves, self._structure)


class SpecBook:
    """The specs of the payloads that one stage has sent to the next, in the order of their first use.

    Both ranks of the two stages keep it, so that a spec travels once, and its place in the book from then on.
    """

    def __init__(self) -> None:
        self._specs: list[PayloadSpec] = []
        self._places: dict[tuple[TensorSpec, ...], int] = {}
        """Specs of the payload's tensors → the place of the latest payload with such tensors."""

    def place_of(self, payload: Any) -> int | None:
        """Returns the place of a payload's spec; None if the book does not have it."""
        tensors = tuple(TensorSpec.of(leaf) for leaf in tree_leaves(payload) if isinstance(leaf, Tensor))
        place = self._places.get(tensors)
        return place if place is not None and self._specs[place].matches(payload) else None

    def at(self, place: int) -> PayloadSpec:
        """Returns the spec at a place."""
        return self._specs[place]

    def add(self, spec: PayloadSpec) -> None:
        """Adds a spec. A full book starts over, since a payload with a changing number has a new spec each time."""
        if len(self._specs) == BOOK_SIZE:
            self._specs, self._places = [], {}
        self._places[tuple(spec.tensors)] = len(self._specs)
        self._specs.append(spec)


def enclosing(payloads: Sequence[PayloadSpec]) -> tuple[TensorSpec, ...]:
    """Returns, for each tensor, the smallest shape that holds it in every payload."""
    found = []
    for specs in zip(*(payload.tensors for payload in payloads), strict=True):
        sizes_by_dim = zip(*(spec.shape for spec in specs), strict=True)
        found.append(TensorSpec(torch.Size(max(sizes) for sizes in sizes_by_dim), specs[0].dtype))
    return tuple(found)


def padded(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Returns a tensor padded to a shape by zeros at the end of each dimension."""
    if tensor.shape == shape:
        return tensor
    missing = [wanted - size for size, wanted in zip(tensor.shape, shape, strict=True)]
    return torch.nn.functional.pad(tensor, [size for gap in reversed(missing) for size in (0, gap)])


def _cropped(tensor: Tensor, shape: torch.Size) -> Tensor:
    return tensor if tensor.shape == shape else tensor[tuple(slice(size) for size in shape)]


def detached(tree: Any) -> Any:
    """Returns a structure with detached tensors."""
    if isinstance(tree, Tensor):
        return tree.detach()
    return tree_map(lambda item: item.detach() if isinstance(item, Tensor) else item, tree)


def has_nan(tree: Any) -> bool:
    """Returns True if a floating-point tensor in the structure contains nan."""
    return any(
        isinstance(leaf, Tensor) and leaf.is_floating_point() and bool(leaf.isnan().any()) for leaf in tree_leaves(tree)
    )
