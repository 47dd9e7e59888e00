"""Plans which rank writes which shard of a sharded tensor, and which parts a rank reads back.

The planner of torch.distributed.checkpoint decides who writes what: it knows every placement of a DTensor, writes
replicas once, and checks that the shards fill each tensor. It only sees tensors, since it would pickle anything else.
What is stored, and how, is our own: a Fragment is stored as the rectangles that it consists of, so readers need not
know about it.

Reading uses the tables of the checkpoint (`format/shard_table.py`) and not the planner. What a rank needs follows from
the tensor that it fills, so ranks need no agreement, and a single process, such as one that evaluates, need not import
the planner (0.6 s).
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
from leyden.trainer.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.trainer.checkpoint.stripes import Stripes, is_striped, rectangles_of
from leyden.trainer.format.errors import CheckpointError
from leyden.trainer.format.shard_table import Sizes, Table, Want, file_name
from leyden.trainer.format.tensors import dtype_named, is_sharded, local_part

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan


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
            flat = torch.empty(like.flat.shape, dtype=dtype, device=like.flat.device)
        else:
            flat = like.state(entry, dtype)
        fragment = like.like(flat)
        return [Want(table, offsets, part) for offsets, part in parts_of(fragment)], fragment
    from torch.distributed.tensor import DTensor

    _, sizes = _place_of(like)
    local = torch.empty(sizes, dtype=dtype, device=like._local_tensor.device)
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


def plan(
    tensors: Mapping[str, Tensor], stem: str, ranks: CheckpointRanks
) -> tuple[dict[str, Table], dict[str, dict[str, Tensor]]]:
    """Agrees with the other ranks on who writes which shard; rank 0 writes tensors that are not sharded.

    Args:
        tensors: by key, with the same keys on every rank.
        stem: of the file names.
        ranks: the ranks that write.

    Returns:
        The tables of all tensors, and for each file that this rank writes, its tensors by key.

    Raises:
        CheckpointError: if the shards do not fill a tensor, or ranks do not hold the same tensors.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import WriteItemType

    own = {key: tensor for key, tensor in tensors.items() if is_sharded(tensor) or ranks.rank == 0}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    known = {key: _planned(tensor) for key, tensor in own.items()}
    planner.set_up_planner(known, is_coordinator=ranks.rank == 0)
    local = planner.create_local_plan()
    for item in local.items:
        if item.type is WriteItemType.BYTE_IO:
            raise TypeError(f"{item.index.fqn!r} is not a tensor, and would have been pickled")
    plans: list[SavePlan] = ranks.gather(local)
    held = plans
    try:
        plans, _ = planner.create_global_plan(plans)
    except ValueError as error:
        raise CheckpointError(
            ranks.path,
            f"cannot be written: the parts of the ranks do not make a whole tensor ({_uneven(held)}). {error}.",
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
            # A rank may have several rectangles of one tensor, and each needs its own name in the file.
            key = f"{name}::{count[name]}" if count[name] else name
            count[name] += 1
            whole = {"dtype": str(data.properties.dtype).removeprefix("torch."), "shape": list(data.size), "shards": []}
            shards = tables.setdefault(name, whole)["shards"]
            shards.append([names[rank], key, list(data.chunk.offsets), list(data.chunk.sizes)])
            if rank == ranks.rank:
                mine.setdefault(names[rank], {})[key] = own_parts[name][tuple(data.chunk.offsets)]
    return {key: tables[key] for key in tensors}, mine


def _planned(tensor: Any) -> Any:
    """Returns what the planner knows how to write."""
    return Stripes(tensor) if is_striped(tensor) else tensor


def _uneven(plans: Sequence[SavePlan]) -> str:
    """Lists the tensors whose parts do not add up, which torch 2.9's own error does not."""
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
    # With fewer rows than ranks, some ranks have nothing to write; a tensor without elements is still written once.
    data = item.tensor_data
    return bool(data.chunk.sizes.numel() or not data.size.numel())
