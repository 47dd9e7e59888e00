"""SentBytes: counts the bytes that a rank sends to others, for each dimension of a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = ("allreduce", "reducescatter", "allgather", "alltoall", "send")
"""Parts of the names of torch's operations, without underscores."""
SHARDS = {"dp_shard_cp": "dp_shard", "expert_shard": "dp_shard"}
"""Dimensions of the meshes that stand for a layout's dp_shard."""


class SentBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the bytes that this rank sends, in collectives and between the stages of a pipeline.

    They are counted as by algorithms that send the least: with n ranks, an all-gather sends a rank's part n - 1 times,
    a reduce-scatter (n - 1) / n of the whole, an all-reduce twice as much, and an all-to-all the rows of other ranks. A
    rank that sends to one other rank sends a tensor once; single numbers are left out.

    Args:
        meshes: the meshes whose dimensions are counted.

    Example:
        >>> with SentBytes([]) as sent:
        ...     total = torch.ones(2) + 1
        >>> sent.bytes
        Counter()
    """

    def __init__(self, meshes: Iterable[DeviceMesh]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()
        """The bytes sent over each dimension; those over other groups count as "world"."""
        names = [(mesh.get_group(name).group_name, name) for mesh in meshes for name in mesh.mesh_dim_names or ()]
        self._names = {group: SHARDS.get(name, name) for group, name in names}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # Its own collectives arrive here later, with plain tensors.
            return NotImplemented
        results = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            name = func._schema.name.partition("::")[2].replace("_", "")
            for kind in COLLECTIVES:
                if kind in name:
                    self._count(kind, func.namespace == "c10d", args)
        return results

    def _count(self, kind: str, is_c10d: bool, args: Sequence[Any]) -> None:
        # c10d passes outputs before inputs, except in an all-reduce.
        inputs = args[1] if is_c10d and kind not in ("allreduce", "send") else args[0]
        size = sum(tensor.nbytes for tensor in tree_leaves(inputs) if isinstance(tensor, Tensor))
        group = _group_of(args)
        ranks = group.size()
        if kind == "send":
            sent = sum(tensor.nbytes for tensor in inputs if tensor.numel() > 1)
        elif kind == "allgather":
            sent = (ranks - 1) * size
        elif kind == "alltoall" and (splits := _splits(args)):
            sent = size - size * splits[group.rank()] // max(1, sum(splits))
        else:
            sent = (2 if kind == "allreduce" else 1) * size * (ranks - 1) // ranks
        if sent:
            self.bytes[self._names.get(group.group_name, "world")] += sent


def _group_of(args: Sequence[Any]) -> Any:
    """Returns the process group among the arguments of a collective: an object of C++, or its name, the last text."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group([arg for arg in args if isinstance(arg, str)][-1])


def _splits(args: Sequence[Any]) -> list[int]:
    """Returns the rows that an all-to-all sends to each rank, its last list of numbers; none if they are equal."""
    lists = [arg for arg in args if isinstance(arg, list) and all(isinstance(entry, int) for entry in arg)]
    return lists[-1] if lists else []
