"""Fragment: one rank's contiguous range of a tensor's elements, for engines that shard flat buffers instead of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Sizes: TypeAlias = "tuple[int, ...]"


class Fragment(Tensor):
    """This rank's part of a tensor whose elements, in row-major order, are split into contiguous ranges.

    A Fragment has the shape of the whole tensor but supports no operations: read and write its elements through `flat`.
    Checkpoints treat it like a DTensor: each rank writes its own part, replicas are written once, and each rank reads
    its part of any stored tensor. The ranges of all ranks must cover the tensor.

    Args:
        flat: the elements, contiguous and 1-d; empty on a rank without elements.
        shape: shape of the whole tensor.
        start: index of the first element in the flattened whole tensor.
        state: function of name and dtype that returns the memory of these elements' optimizer state, which a checkpoint
            is loaded into. Without it, new memory is allocated.

    Example:
        >>> fragment = Fragment(torch.tensor([2.0, 3.0, 4.0]), (2, 3), start=2)
        >>> fragment.shape, [(offsets, part.tolist()) for offsets, part in fragment.parts()]
        (torch.Size([2, 3]), [((0, 2), [[2.0]]), ((1, 0), [[3.0, 4.0]])])
    """

    flat: Tensor
    start: int
    state: Callable[[str, torch.dtype], Tensor] | None

    @staticmethod
    def __new__(
        cls,
        flat: Tensor,
        shape: Sequence[int],
        start: int = 0,
        state: Callable[[str, torch.dtype], Tensor] | None = None,
    ) -> Fragment:
        if flat.dim() != 1 or not flat.is_contiguous() or start < 0 or start + flat.numel() > math.prod(shape):
            raise ValueError(
                f"elements of shape {tuple(flat.shape)} from index {start} are not a contiguous range of a tensor of "
                f"shape {tuple(shape)}"
            )
        fragment: Fragment = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, torch.Size(shape), dtype=flat.dtype, device=flat.device
        )
        fragment.flat, fragment.start, fragment.state = flat.detach(), start, state
        return fragment

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"A Fragment, one rank's part of a tensor, does not support {func}. Use its `flat`.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Fragment({self.flat.numel()} elements from {self.start} on, shape={tuple(self.shape)}, {self.dtype})"

    def parts(self) -> list[tuple[Sizes, Tensor]]:
        """Returns the fragment as rectangles, in order: the offsets of each in the whole tensor, and a view of it."""
        views, position = [], 0
        for offsets, sizes in rectangles(tuple(self.shape), self.start, self.flat.numel()):
            count = math.prod(sizes)
            views.append((offsets, self.flat.narrow(0, position, count).view(sizes)))
            position += count
        return views

    def like(self, flat: Tensor) -> Fragment:
        """Returns the same range of another tensor of this shape."""
        return Fragment(flat, self.shape, self.start)


def rectangles(shape: Sizes, start: int, count: int) -> list[tuple[Sizes, Sizes]]:
    """Splits a range of elements in row-major order into the fewest rectangles, at most 2 * dimensions - 1.

    Returns:
        Offsets and sizes of each rectangle, in element order. A tensor without elements is a single rectangle.

    Example:
        >>> rectangles((4, 10), 7, 25)
        [((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 2))]
    """
    if 0 in shape:
        return [((0,) * len(shape), shape)]
    if not count:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, skipped = divmod(start, row)
    last, rest = divmod(start + count, row)

    def within(index: int, begin: int, size: int) -> list[tuple[Sizes, Sizes]]:
        return [((index, *offsets), (1, *sizes)) for offsets, sizes in rectangles(shape[1:], begin, size)]

    if first == last:
        return within(first, skipped, count)
    found = []
    if skipped:
        found += within(first, skipped, row - skipped)
        first += 1
    if last > first:
        found.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + (within(last, 0, rest) if rest else [])
