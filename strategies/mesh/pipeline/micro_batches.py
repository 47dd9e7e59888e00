"""Micro-batches: a batch is cut into parts of its samples, and what a step returned for each is put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from leyden.strategies.batch import batch_size_of
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.micro_batches import together
from leyden.strategies.saved_state import brief


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        batch: the samples, as the batch has them.
        rows: how many there are; 0 for one that only fills the schedule, with the batch's first sample.
        share: of the batch's samples.
        signature: what the shapes that pass between stages depend on.
    """

    batch: Any
    rows: int
    share: float
    signature: tuple[Any, ...]


def cut(batch: Any, count: int) -> list[MicroBatch]:
    """Cuts a batch into micro-batches whose sizes differ by one at most.

    Tensors and lists of as many entries as the batch has samples are cut along their first dimension; everything else
    is the same in each part. A batch with fewer samples than parts is filled up with parts that do not count.

    Args:
        batch: any nested structure.
        count: of the micro-batches.

    Raises:
        ConfigurationError: for a list of tensors of several lengths, as of a sample each.

    Example:
        >>> [(part.batch.tolist(), part.rows) for part in cut(torch.arange(5), 3)]
        [([0, 1], 2), ([2, 3], 2), ([4], 1)]
    """
    rows = batch_size_of(batch)
    _check_lists(batch)

    def is_list(item: Any) -> bool:
        """A list of one entry for each sample, as of strings."""
        return isinstance(item, (list, tuple)) and len(item) == rows and not any(isinstance(i, Tensor) for i in item)

    leaves, spec = tree_flatten(batch, is_leaf=is_list)
    is_cut = [leaf.ndim > 0 and leaf.shape[0] == rows if isinstance(leaf, Tensor) else is_list(leaf) for leaf in leaves]
    parts, start = [], 0
    for place in range(count):
        size = rows // count + (place < rows % count)
        begin, end = (start, start + size) if size else (0, 1)
        own = [leaf[begin:end] if cuts else leaf for leaf, cuts in zip(leaves, is_cut, strict=True)]
        parts.append(MicroBatch(tree_unflatten(own, spec), size, size / rows, _signature(own)))
        start += size
    return parts


def _check_lists(batch: Any) -> None:
    """Refuses a list of samples of several lengths, of which the first would be cut instead of the list."""
    for item in (batch, *batch.values()) if isinstance(batch, dict) else (batch,):
        if not isinstance(item, (list, tuple)):
            continue
        lengths = {len(tensor) for tensor in item if isinstance(tensor, Tensor) and tensor.ndim}
        if len(lengths) > 1:
            raise ConfigurationError(
                f"a batch has a list of tensors of the lengths {sorted(lengths)}, and a pipeline cuts batches by "
                "samples: have the loader's collate_fn put samples of several lengths into one padded tensor, and give "
                "what all samples share a name in a dict."
            )


def _signature(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in tree_leaves(leaves))


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape and dtype of a tensor that passes between two stages."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, leaf: Any) -> Any:
        """Those of a tensor; anything else as it is."""
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
        """The structure, with these tensors, of which each may be larger than it is to be."""
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


__all__ = ["Form", "MicroBatch", "Shape", "cut", "detached", "has_nan", "largest", "padded", "together"]
