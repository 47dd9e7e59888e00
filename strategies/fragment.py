"""Fragment: the stretch of a tensor's elements that one rank holds, where an engine cuts flat memory and not rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Sizes: TypeAlias = "tuple[int, ...]"


class Fragment(Tensor):
    """This rank's part of a tensor whose elements, in row-major order, are dealt out in stretches.

    It has the shape of the whole tensor and none of its operations: the part is in `flat`, and is written and read
    there. A checkpoint knows it as it knows a DTensor: each rank writes its own part, replicas once, and reads of any
    stored tensor what belongs to it. The stretches of all ranks must fill the tensor.

    Args:
        flat: the elements, one dimension and contiguous; empty on a rank that has none of them.
        shape: of the whole tensor.
        start: place of the first of them in the whole tensor.
        state: gives the memory of an optimizer's state that belongs to these elements, by its name and dtype. What is
            read from a checkpoint goes there; without it into new memory.

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
                f"{tuple(flat.shape)} elements from {start} on are no stretch of a tensor of {tuple(shape)}"
            )
        made: Fragment = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, torch.Size(shape), dtype=flat.dtype, device=flat.device
        )
        made.flat, made.start, made.state = flat.detach(), start, state
        return made

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
        raise NotImplementedError(f"{func} of a Fragment, of which this rank has a part: use its `flat`.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Fragment({self.flat.numel()} elements from {self.start} on, shape={tuple(self.shape)}, {self.dtype})"

    def parts(self) -> list[tuple[Sizes, Tensor]]:
        """The rectangles that it consists of, in their order: where each begins in the whole tensor, and its memory."""
        found, position = [], 0
        for offsets, sizes in rectangles(tuple(self.shape), self.start, self.flat.numel()):
            count = math.prod(sizes)
            found.append((offsets, self.flat.narrow(0, position, count).view(sizes)))
            position += count
        return found

    def like(self, flat: Tensor) -> Fragment:
        """The same stretch of another tensor of this shape."""
        return Fragment(flat, self.shape, self.start)


def rectangles(shape: Sizes, start: int, count: int) -> list[tuple[Sizes, Sizes]]:
    """The fewest rectangles, at most 2 * dimensions - 1, that a stretch of elements in row-major order consists of.

    Returns:
        Offsets and sizes of each, in the order of their elements. A tensor without elements is one rectangle.

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
