"""Tensors of which each rank holds a shard: who writes which, and which part a rank needs back.

Who writes what is planned by torch.distributed.checkpoint, whose planner knows every placement of a DTensor, writes replicas
once, and checks that the shards fill each tensor. It is shown tensors alone, since all else it would pickle. What is stored, and
how, is ours. Reading goes by the tables of the checkpoint (`shards.py`) without its planner: what a rank needs follows from the
tensor that it fills, there is nothing to agree on, and a process by itself, as one that evaluates, need not import it (0.6 s).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leyden.strategies.errors import ConfigurationError
from leyden.trainer.checkpoint.ranks import Ranks
from leyden.trainer.checkpoint.shards import Sizes, Table, Want, file_name
from leyden.trainer.checkpoint.tensors import dtype_named, is_sharded, local_part


def place_of(tensor: Any) -> tuple[Sizes, Sizes]:
    """Offsets and sizes of this rank's part in the whole tensor."""
    if not is_sharded(tensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(sizes)


def room_for(table: Table, like: Any) -> tuple[Want, Tensor]:
    """Room for this rank's part of a stored tensor, on the ranks and with the placements of another of its shape.

    Returns:
        What is to be read, and the DTensor that it fills.
    """
    from torch.distributed.tensor import DTensor

    offsets, sizes = place_of(like)
    local = torch.empty(sizes, dtype=dtype_named(table["dtype"]), device=like._local_tensor.device)
    shape = torch.Size(table["shape"])
    strides = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=strides)
    return Want(table, offsets, local), whole


def copy_part(name: str, whole: Tensor, target: Tensor) -> None:
    """Copies this rank's part of a whole tensor into a tensor of its shape.

    Raises:
        ConfigurationError: if the shapes differ.
    """
    if whole.shape != target.shape:
        raise ConfigurationError(f"{name!r} has the shape {tuple(whole.shape)} there, and {tuple(target.shape)} here.")
    part = whole
    for dim, (start, size) in enumerate(zip(*place_of(target), strict=True)):
        part = part.narrow(dim, start, size)
    local_part(target).detach().copy_(part)


def plan(
    tensors: Mapping[str, Tensor], stem: str, ranks: Ranks
) -> tuple[dict[str, Table], dict[str, dict[str, Tensor]]]:
    """Agrees on who writes which shard. Plain tensors among them are rank 0's.

    Args:
        tensors: by key, the same keys on every rank.
        stem: of the names of files.
        ranks: those that write.

    Returns:
        The tables of all tensors; and for each file that this rank writes its tensors by key.

    Raises:
        CheckpointError: if the shards do not fill a tensor, or ranks do not hold the same tensors.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

    own = {key: tensor for key, tensor in tensors.items() if is_sharded(tensor) or ranks.rank == 0}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(own, is_coordinator=ranks.rank == 0)
    local = planner.create_local_plan()
    for item in local.items:
        if item.type is WriteItemType.BYTE_IO:
            raise TypeError(f"{item.index.fqn!r} is no tensor, and would have been pickled")
    plans: list[SavePlan] = ranks.gather(local)
    plans, _ = planner.create_global_plan(plans)
    writers = [rank for rank, plan in enumerate(plans) if any(_counts(item) for item in plan.items)]
    names = {rank: file_name(stem, number, len(writers)) for number, rank in enumerate(writers)}
    tables: dict[str, Table] = {}
    mine: dict[str, dict[str, Tensor]] = {}
    for rank, plan_of_rank in enumerate(plans):
        for item in plan_of_rank.items:
            if not _counts(item):
                continue
            key, data = item.index.fqn, item.tensor_data
            assert data is not None
            whole = {"dtype": str(data.properties.dtype).removeprefix("torch."), "shape": list(data.size), "shards": []}
            shards = tables.setdefault(key, whole)["shards"]
            shards.append([names[rank], key, list(data.chunk.offsets), list(data.chunk.sizes)])
            if rank == ranks.rank:
                mine.setdefault(names[rank], {})[key] = local_part(tensors[key])
    return {key: tables[key] for key in tensors}, mine


def _counts(item: Any) -> bool:
    # A tensor with fewer rows than ranks leaves some with nothing; one that is empty everywhere is still written once.
    data = item.tensor_data
    return bool(data.chunk.sizes.numel() or not data.size.numel())
