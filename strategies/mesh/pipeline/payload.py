"""Payload specs: the structure, shapes and dtypes of the values that a pipeline stage sends to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.saved_state import brief


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

    def check(self, payload: Any) -> None:
        """Checks the payload of another micro-batch with the same input sizes.

        Raises:
            ConfigurationError: if a shape, a dtype, the structure or the value of a non-tensor differs.
        """
        if self._single is not None and isinstance(payload, Tensor) and TensorSpec.of(payload) == self._single:
            return
        leaves, structure = tree_flatten(payload)
        matches = structure == self._structure
        for leaf, expected in zip(leaves, self._leaves, strict=False):
            found = TensorSpec.of(leaf)
            if found is not expected and not (type(found) is type(expected) and bool(found == expected)):
                matches = False
        if not matches:
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
