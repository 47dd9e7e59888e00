"""Stripes: the rows of a sharded tensor that a rank has of each of the matrices that a packed weight stacks.

torch's planner knows one rectangle for each shard. A packed weight (gate and up in one) is split matrix by matrix, so
that a rank has a rectangle of each.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.strategies.fragment import Sizes
from leyden.trainer.format.tensors import local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_striped(tensor: Any) -> bool:
    """Returns True for a DTensor of which this rank has no single rectangle."""
    placements = getattr(tensor, "placements", ())
    for place, placement in enumerate(placements):
        factor = getattr(placement, "split_factor", None)
        if factor is None:
            continue
        # FSDP shards what later dimensions of the mesh have split, and its placement is strided, too.
        later = [i for i in range(place + 1, len(placements)) if getattr(placements[i], "dim", None) == placement.dim]
        if factor != math.prod(tensor.device_mesh.size(i) for i in later):
            return True
    return False


def rectangles_of(tensor: DTensor) -> list[tuple[Sizes, Tensor]]:
    """Returns the rectangles that this rank has of a striped tensor: offsets in the whole, and memory."""
    local, found = local_part(tensor), []
    for runs in itertools.product(*(_runs(tensor, dim) for dim in range(tensor.ndim))):
        part = local
        for dim, (_, begin, size) in enumerate(runs):
            part = part.narrow(dim, begin, size)
        found.append((tuple(start for start, _, _ in runs), part))
    return found


def _runs(tensor: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """Returns the runs of rows that this rank has: where each begins in the whole and in its part, and its size."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    rows = torch.arange(tensor.shape[dim]).view([-1 if own == dim else 1 for own in range(tensor.ndim)])
    for place, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) == dim:
            shard: Any = placement
            rows = shard._split_tensor(rows, tensor.device_mesh.size(place), with_padding=False)[0][coordinate[place]]
    numbers = rows.flatten()
    if not len(numbers):
        return [(tensor.shape[dim], 0, 0)]
    ends = [*((numbers.diff() != 1).nonzero().flatten() + 1).tolist(), len(numbers)]
    return [(int(numbers[begin]), begin, end - begin) for begin, end in itertools.pairwise([0, *ends])]
