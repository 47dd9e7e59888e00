"""The parts of sharded tensors that a rank holds: what it writes, and what it reads back.

What is stored, and how, is the same for all kinds: rectangles of the whole tensor, which readers find by the tables of
the checkpoint (`format/shard_table.py`). What a rank reads follows from the tensor that it fills, so ranks need no
agreement. Who writes what is planned in `shard_plan.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.fragment import Fragment
from leyden.trainer.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.trainer.checkpoint.shard_plan import Box, ShardPlan, ShardPlans
from leyden.trainer.checkpoint.stripes import is_striped, rectangles_of
from leyden.trainer.format.memory import room
from leyden.trainer.format.shard_table import Sizes, Table, Want
from leyden.trainer.format.tensors import dtype_named, is_sharded, local_part


def parts_of(tensor: Any) -> list[tuple[Sizes, Tensor]]:
    """Returns this rank's rectangles of a tensor, each as its offsets in the whole and its memory; all of it if not
    sharded.
    """
    if isinstance(tensor, Fragment):
        return tensor.parts()
    if not is_sharded(tensor):
        return [((0,) * tensor.dim(), tensor)]
    if is_striped(tensor):
        return rectangles_of(tensor)
    return [(_place_of(tensor)[0], local_part(tensor))]


def _place_of(tensor: Any) -> tuple[Sizes, Sizes]:
    """Returns the offsets and sizes of this rank's part of a DTensor in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(sizes)


def room_for(table: Table, entry: str, like: Any) -> tuple[list[Want], Tensor]:
    """Allocates this rank's part of a stored tensor, with the ranks and placements of its parameter.

    Args:
        table: the table of the stored tensor.
        entry: its name in the state of an optimizer.
        like: the parameter that it belongs to, a DTensor or a Fragment.

    Returns:
        What to read, and the tensor that it fills, of the class of `like`.
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

    _, sizes = _place_of(like)
    local = room(sizes, dtype, like._local_tensor.device)
    strides = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=strides)
    return [Want(table, offsets, part) for offsets, part in parts_of(whole)], whole


def copy_part(name: str, whole: Tensor, target: Tensor) -> None:
    """Copies this rank's part of a whole tensor into a tensor of its shape.

    Raises:
        ConfigurationError: if the shapes differ.
    """
    if whole.shape != target.shape:
        raise ConfigurationError(
            f"{name!r} has shape {tuple(whole.shape)} in the checkpoint, and {tuple(target.shape)} here."
        )
    for offsets, place in parts_of(target):
        part = whole
        for dim, (start, size) in enumerate(zip(offsets, place.shape, strict=True)):
            part = part.narrow(dim, start, size)
        place.detach().copy_(part)


def part_like(name: str, entry: str, whole: Tensor, like: Any) -> Tensor:
    """Returns this rank's part of a whole tensor of an optimizer's state, sharded as its parameter is.

    Args:
        name: of the parameter, for messages.
        entry: its name in the state of an optimizer.
        whole: the tensor.
        like: the parameter that it belongs to, a DTensor or a Fragment.
    """
    table: Table = {"dtype": str(whole.dtype).removeprefix("torch."), "shape": list(whole.shape), "shards": []}
    _, target = room_for(table, entry, like)
    copy_part(name, whole, target)
    return target


def plan(
    tensors: Mapping[str, Tensor], stem: str, ranks: CheckpointRanks, plans: ShardPlans
) -> tuple[ShardPlan, dict[str, dict[str, Tensor]]]:
    """Agrees with the other ranks on who writes which shard; rank 0 writes tensors that are not sharded.

    Args:
        tensors: by key, with the same keys on every rank.
        stem: of the file names.
        ranks: the ranks that write.
        plans: of earlier saves.

    Returns:
        The plan, and for each file that this rank writes, its tensors by name.

    Raises:
        CheckpointError: if the shards do not fill a tensor, or ranks do not hold the same tensors.
    """
    own = {key: held_parts(tensor) for key, tensor in tensors.items() if is_sharded(tensor) or ranks.rank == 0}
    held = [
        (key, str(tensors[key].dtype).removeprefix("torch."), tuple(tensors[key].shape), _boxes(parts))
        for key, parts in own.items()
    ]
    made = plans.of(stem, held, ranks)
    files = {file: {name: own[key][offsets] for name, key, offsets in named} for file, named in made.files.items()}
    return made, files


def held_parts(tensor: Any) -> dict[Sizes, Tensor]:
    """Returns this rank's rectangles of a tensor by their offsets."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None and mesh.get_coordinate() is None:
        # It is sharded over other ranks.
        return {}
    # With fewer rows than ranks, some ranks have nothing to write; a tensor without elements is still written once.
    parts = parts_of(tensor)
    return {tuple(offsets): part for offsets, part in parts if part.numel() or not tensor.numel()}


def _boxes(parts: Mapping[Sizes, Tensor]) -> tuple[Box, ...]:
    return tuple((offsets, tuple(part.shape)) for offsets, part in parts.items())
