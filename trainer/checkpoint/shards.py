"""Tensors of which each rank holds a shard: who writes which, and which part a rank needs back.

Who writes what is planned by torch.distributed.checkpoint, whose planner knows every placement of a DTensor, writes replicas
once, and checks that the shards fill each tensor. It is only shown tensors, since it would pickle anything else. What is stored, and
how, is ours: a Fragment is stored as the rectangles that it consists of, so that readers need not know of it.

Reading goes by the tables of the checkpoint (`shards.py`), without the planner: what a rank needs follows from the tensor that
it fills, so there is nothing to agree on, and a single process, such as one that evaluates, need not import it (0.6 s).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.fragment import Fragment
from leyden.trainer.checkpoint.peers import Peers
from leyden.trainer.format.errors import CheckpointError
from leyden.trainer.format.shard_table import Sizes, Table, Want, file_name
from leyden.trainer.format.tensors import dtype_named, is_sharded, local_part

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan


def parts_of(tensor: Any) -> list[tuple[Sizes, Tensor]]:
    """The rectangles that this rank has of a tensor: offsets in the whole one, and memory. The whole, if it is not sharded."""
    if isinstance(tensor, Fragment):
        return tensor.parts()
    if not is_sharded(tensor):
        return [((0,) * tensor.dim(), tensor)]
    return [(_place_of(tensor)[0], local_part(tensor))]


def _place_of(tensor: Any) -> tuple[Sizes, Sizes]:
    """Offsets and sizes of this rank's part of a DTensor in the whole one."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(sizes)


def room_for(table: Table, entry: str, like: Any) -> tuple[list[Want], Tensor]:
    """Room for this rank's part of a stored tensor, on the ranks and with the placements of another of its shape.

    Args:
        table: of the stored tensor.
        entry: its name in the state of an optimizer.
        like: the parameter that it belongs to: a DTensor, or a Fragment.

    Returns:
        What is to be read, and the tensor that it fills, of the kind of `like`.
    """
    dtype, shape = dtype_named(table["dtype"]), torch.Size(table["shape"])
    if isinstance(like, Fragment):
        if like.state is None:
            flat = torch.empty(like.flat.shape, dtype=dtype, device=like.flat.device)
        else:
            flat = like.state(entry, dtype)
        fragment = like.like(flat)
        return wants_of(table, fragment), fragment
    from torch.distributed.tensor import DTensor

    offsets, sizes = _place_of(like)
    local = torch.empty(sizes, dtype=dtype, device=like._local_tensor.device)
    strides = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=strides)
    return [Want(table, offsets, local)], whole


def wants_of(table: Table, target: Any) -> list[Want]:
    """What is to be read to fill this rank's part of a tensor."""
    return [Want(table, offsets, part) for offsets, part in parts_of(target)]


def copy_part(name: str, whole: Tensor, target: Tensor) -> None:
    """Copies this rank's part of a whole tensor into a tensor of its shape.

    Raises:
        ConfigurationError: if the shapes differ.
    """
    if whole.shape != target.shape:
        raise ConfigurationError(f"{name!r} has the shape {tuple(whole.shape)} there, and {tuple(target.shape)} here.")
    for offsets, place in parts_of(target):
        part = whole
        for dim, (start, size) in enumerate(zip(offsets, place.shape, strict=True)):
            part = part.narrow(dim, start, size)
        place.detach().copy_(part)


def plan(
    tensors: Mapping[str, Tensor], stem: str, ranks: Peers
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
    from torch.distributed.checkpoint.planner import WriteItemType

    own = {key: tensor for key, tensor in tensors.items() if is_sharded(tensor) or ranks.rank == 0}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(own, is_coordinator=ranks.rank == 0)
    local = planner.create_local_plan()
    for item in local.items:
        if item.type is WriteItemType.BYTE_IO:
            raise TypeError(f"{item.index.fqn!r} is no tensor, and would have been pickled")
    plans: list[SavePlan] = ranks.gather(local)
    held = plans
    try:
        plans, _ = planner.create_global_plan(plans)
    except ValueError as error:
        raise CheckpointError(
            ranks.path, f"cannot be written: what the ranks hold is no whole tensor ({_uneven(held)}). {error}."
        ) from error
    writers = [rank for rank, plan in enumerate(plans) if any(_counts(item) for item in plan.items)]
    names = {rank: file_name(stem, number, len(writers)) for number, rank in enumerate(writers)}
    tables: dict[str, Table] = {}
    mine: dict[str, dict[str, Tensor]] = {}
    own_parts = {key: dict(parts_of(tensor)) for key, tensor in own.items()}
    for rank, plan_of_rank in enumerate(plans):
        count: Counter[str] = Counter()
        for item in plan_of_rank.items:
            if not _counts(item):
                continue
            name, data = item.index.fqn, item.tensor_data
            assert data is not None
            # A rank may have several rectangles of one tensor, and in a file each has a name of its own.
            key = f"{name}::{count[name]}" if count[name] else name
            count[name] += 1
            whole = {"dtype": str(data.properties.dtype).removeprefix("torch."), "shape": list(data.size), "shards": []}
            shards = tables.setdefault(name, whole)["shards"]
            shards.append([names[rank], key, list(data.chunk.offsets), list(data.chunk.sizes)])
            if rank == ranks.rank:
                mine.setdefault(names[rank], {})[key] = own_parts[name][tuple(data.chunk.offsets)]
    return {key: tables[key] for key in tensors}, mine


def _uneven(plans: Sequence[SavePlan]) -> str:
    """Names the tensors whose parts do not add up, as torch 2.9's own error does not."""
    sizes: dict[str, int] = {}
    parts: dict[str, dict[Any, int]] = {}
    for item in (item for plan in plans for item in plan.items if item.tensor_data is not None):
        data: Any = item.tensor_data
        sizes[item.index.fqn] = math.prod(data.size)
        # Replicas of a part count once.
        parts.setdefault(item.index.fqn, {})[tuple(data.chunk.offsets)] = math.prod(data.chunk.sizes)
    held = {key: sum(own.values()) for key, own in parts.items()}
    return ", ".join(
        f"{held[key]} elements for the {size} of {key}" for key, size in sizes.items() if held[key] != size
    )


def _counts(item: Any) -> bool:
    # A tensor with fewer rows than ranks leaves some with nothing; one that is empty everywhere is still written once.
    data = item.tensor_data
    return bool(data.chunk.sizes.numel() or not data.size.numel())
