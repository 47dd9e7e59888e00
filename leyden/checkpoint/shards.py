"""The parts of sharded tensors that a rank writes and reads back.

All kinds of sharded tensors are stored alike: as rectangles of the whole tensor, which readers find through the
checkpoint's tables (`format/shard_table.py`). The tensor to be filled determines what a rank reads, so reading needs no
collective. `shard_plan.py` plans which rank writes which rectangle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.format.safefile import room
from leyden.checkpoint.format.shard_table import Sizes, Table, Want
from leyden.checkpoint.format.tensors import dtype_named, is_sharded, local_part
from leyden.checkpoint.shard_plan import Box, ShardPlan, ShardPlans
from leyden.checkpoint.stripes import is_striped, rectangles_of
from leyden.core.errors import ConfigurationError
from leyden.strategies.fragment import Fragment


def parts_of(tensor: Any) -> list[tuple[Sizes, Tensor]]:
    """Returns this rank's rectangles of a tensor, each with its offsets. A plain tensor is one rectangle."""
    if isinstance(tensor, Fragment):
        return tensor.parts()
    if not is_sharded(tensor):
        return [((0,) * tensor.dim(), tensor)]
    if is_striped(tensor):
        return rectangles_of(tensor)
    return [(_local_box(tensor)[0], local_part(tensor))]


def _local_box(tensor: Any) -> Box:
    """Returns the offsets and sizes of this rank's part of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(sizes)


def room_for(table: Table, entry: str, like: Any) -> tuple[list[Want], Tensor]:
    """Allocates this rank's part of a stored tensor, sharded like its parameter, a DTensor or a Fragment.

    `entry` is the tensor's name in the optimizer's state.

    Returns:
        The parts to read, and the tensor that they fill, of the class of `like`.
    """
    dtype, shape = dtype_named(table["dtype"]), torch.Size(table["shape"])
    if isinstance(like, Fragment):
        if like.state is None:
            flat = room(like.flat.shape, dtype, like.flat.device)
        else:
            flat = like.state(entry, dtype)
        fragment = like.like(flat)
        return [Want(table, offsets, part) for offsets, part in parts_of(fragment)], fragment
    from torch.distributed.tensor import DTensor

    _, sizes = _local_box(like)
    local = room(sizes, dtype, like._local_tensor.device)
    strides = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=strides)
    return [Want(table, offsets, part) for offsets, part in parts_of(whole)], whole


def copy_part(name: str, whole: Tensor, target: Tensor) -> None:
    """Copies this rank's part of a whole tensor into a sharded or plain tensor of the same shape.

    Raises:
        ConfigurationError: if the shapes differ.
    """
    if whole.shape != target.shape:
        raise ConfigurationError(
            f"{name!r} has shape {tuple(whole.shape)} in the checkpoint, and {tuple(target.shape)} in the module."
        )
    for offsets, own in parts_of(target):
        part = whole
        for dim, (start, size) in enumerate(zip(offsets, own.shape, strict=True)):
            part = part.narrow(dim, start, size)
        own.detach().copy_(part)


def part_like(name: str, entry: str, whole: Tensor, like: Any) -> Tensor:
    """Returns this rank's part of a whole tensor of optimizer state, sharded like its parameter.

    `name` is the parameter's, for messages, and `entry` the tensor's in the optimizer's state.
    """
    table: Table = {"dtype": str(whole.dtype).removeprefix("torch."), "shape": list(whole.shape), "shards": []}
    _, target = room_for(table, entry, like)
    copy_part(name, whole, target)
    return target


def plan(
    tensors: Mapping[str, Tensor], stem: str, ranks: CheckpointRanks, plans: ShardPlans
) -> tuple[ShardPlan, dict[str, dict[str, Tensor]]]:
    """Plans with the other ranks which rank writes which shard. Rank 0 writes tensors that are not sharded.

    The keys are the same on every rank. `stem` is that of the file names.

    Returns:
        The plan, and the files that this rank writes: for each, its tensors by name.

    Raises:
        CheckpointError: if the shards do not cover a tensor, or ranks do not hold the same tensors.
    """
    own = {key: held_parts(tensor) for key, tensor in tensors.items() if is_sharded(tensor) or ranks.rank == 0}
    held = [
        (key, str(tensors[key].dtype).removeprefix("torch."), tuple(tensors[key].shape), _boxes(parts))
        for key, parts in own.items()
    ]
    planned = plans.of(stem, held, ranks)
    files = {file: {name: own[key][offsets] for name, key, offsets in parts} for file, parts in planned.files.items()}
    return planned, files


def held_parts(tensor: Any) -> dict[Sizes, Tensor]:
    """Returns this rank's rectangles of a tensor, by their offsets."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None and mesh.get_coordinate() is None:
        # The tensor is sharded over other ranks.
        return {}
    # With fewer rows than ranks, some ranks hold an empty part and skip it. A tensor without elements is still written.
    parts = parts_of(tensor)
    return {tuple(offsets): part for offsets, part in parts if part.numel() or not tensor.numel()}


def _boxes(parts: Mapping[Sizes, Tensor]) -> tuple[Box, ...]:
    return tuple((offsets, tuple(part.shape)) for offsets, part in parts.items())
