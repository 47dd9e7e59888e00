"""Stripes: a rank's shard of a packed weight, which consists of several rectangles.

torch's planner assumes that each shard is one rectangle. A packed weight (gate and up in one) is split matrix by
matrix, so each rank holds a rectangle of every matrix.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.checkpoint.format.tensors import local_part
from leyden.strategies.fragment import Sizes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_striped(tensor: Any) -> bool:
    """Returns True for a DTensor whose shard on this rank is not a single rectangle."""
    placements = getattr(tensor, "placements", ())
    for mesh_dim, placement in enumerate(placements):
        factor = getattr(placement, "split_factor", None)
        if factor is None:
            continue
        # FSDP's placement is strided too, if a later mesh dimension shards the same tensor dimension. Then the stride
        # equals the later dimensions' size, and the shard is one rectangle.
        following = range(mesh_dim + 1, len(placements))
        later = [i for i in following if getattr(placements[i], "dim", None) == placement.dim]
        if factor != math.prod(tensor.device_mesh.size(i) for i in later):
            return True
    return False


def rectangles_of(tensor: DTensor) -> list[tuple[Sizes, Tensor]]:
    """Returns this rank's rectangles of a striped tensor, each with its offsets in the whole."""
    local, rectangles = local_part(tensor), []
    for runs in itertools.product(*(_runs(tensor, dim) for dim in range(tensor.ndim))):
        part = local
        for dim, (_, begin, size) in enumerate(runs):
            part = part.narrow(dim, begin, size)
        rectangles.append((tuple(start for start, _, _ in runs), part))
    return rectangles


def _runs(tensor: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """Returns this rank's runs of consecutive indices in one dimension: start in the whole, start in its part, size."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    rows = torch.arange(tensor.shape[dim]).view([-1 if own == dim else 1 for own in range(tensor.ndim)])
    for mesh_dim, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) == dim:
            shard: Any = placement
            chunks = shard._split_tensor(rows, tensor.device_mesh.size(mesh_dim), with_padding=False)[0]
            rows = chunks[coordinate[mesh_dim]]
    indices = rows.flatten()
    if not len(indices):
        return [(tensor.shape[dim], 0, 0)]
    ends = [*((indices.diff() != 1).nonzero().flatten() + 1).tolist(), len(indices)]
    return [(int(indices[begin]), begin, end - begin) for begin, end in itertools.pairwise([0, *ends])]
