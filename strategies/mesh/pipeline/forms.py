"""What passes between the stages of a pipeline: its structure, shapes and dtypes."""

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
class Shape:
    """Shape and dtype of a tensor that passes between two stages."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, leaf: Any) -> Any:
        """The shape and dtype of a tensor; anything else as it is."""
        return cls(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


class Form:
    """What passes between two stages, as a structure of shapes.

    Args:
        passed: any nested structure of tensors, or of their shapes.
    """

    def __init__(self, passed: Any) -> None:
        self.tree = tree_map(Shape.of, passed)
        self._leaves, self._spec = tree_flatten(self.tree)
        self._only = self.tree if isinstance(self.tree, Shape) else None
        """The shape of the tensor, where blocks return nothing else."""

    def check(self, passed: Any) -> None:
        """Checks that another micro-batch of the same sizes passes the same.

        Raises:
            ConfigurationError: for another shape, or another value of what is no tensor.
        """
        if self._only is not None and isinstance(passed, Tensor) and Shape.of(passed) == self._only:
            return
        leaves, spec = tree_flatten(passed)
        same = spec == self._spec
        for leaf, known in zip(leaves, self._leaves, strict=False):
            found = Shape.of(leaf)
            if found is not known and not (type(found) is type(known) and bool(found == known)):
                same = False
        if not same:
            raise ConfigurationError(
                f"a block returned {brief(tree_map(Shape.of, passed))} for a micro-batch, and {brief(self.tree)} for "
                "one of the same sizes: the stages of a pipeline agree on shapes, and on what is no tensor, in "
                "advance. Let blocks return tensors whose shapes follow from the batch's, and numbers that change as "
                "tensors."
            )

    @property
    def tensors(self) -> list[Shape]:
        """Shape and dtype of each tensor."""
        return [leaf for leaf in self._leaves if isinstance(leaf, Shape)]

    def room(self, device: torch.device) -> list[Tensor]:
        """Memory for the tensors."""
        return [torch.empty(found.shape, dtype=found.dtype, device=device) for found in self.tensors]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The structure with these tensors, each cut to its shape."""
        if self._only is not None:
            return _cut_to(tensors[0], self._only.shape)
        rest = iter(tensors)
        leaves = [_cut_to(next(rest), leaf.shape) if isinstance(leaf, Shape) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._spec)


def largest(forms: Sequence[Form]) -> tuple[Shape, ...]:
    """For each tensor the smallest shape in which those of all forms have room."""
    columns = zip(*(form.tensors for form in forms), strict=True)
    return tuple(
        Shape(torch.Size(max(sizes) for sizes in zip(*(found.shape for found in column), strict=True)), column[0].dtype)
        for column in columns
    )


def padded(tensor: Tensor, shape: torch.Size) -> Tensor:
    """A tensor with zeros after its end in each dimension, up to a shape."""
    if tensor.shape == shape:
        return tensor
    missing = [wanted - here for here, wanted in zip(tensor.shape, shape, strict=True)]
    return torch.nn.functional.pad(tensor, [size for gap in reversed(missing) for size in (0, gap)])


def _cut_to(tensor: Tensor, shape: torch.Size) -> Tensor:
    return tensor if tensor.shape == shape else tensor[tuple(slice(size) for size in shape)]


def detached(tree: Any) -> Any:
    """A structure whose tensors have no graph."""
    if isinstance(tree, Tensor):
        return tree.detach()
    return tree_map(lambda item: item.detach() if isinstance(item, Tensor) else item, tree)


def has_nan(tree: Any) -> bool:
    """True if a structure has a tensor of floats with a nan in it."""
    return any(
        isinstance(leaf, Tensor) and leaf.is_floating_point() and bool(leaf.isnan().any()) for leaf in tree_leaves(tree)
    )
