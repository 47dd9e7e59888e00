"""Applies a function to whole matrices of which each rank holds a shard."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from leyden.core.errors import LeydenError
from leyden.strategies.fsdp.sharding import local


@dataclass(frozen=True, eq=False)
class Matrix:
    """A parameter with two dimensions, or a batch of such with three, and its optimizer group."""

    parameter: Tensor
    group: dict[str, Any]


@dataclass(frozen=True)
class Hop:
    """A dimension of a mesh, over which rows or columns of matrices are split.

    Attributes:
        mesh_dim: the dimension of the mesh.
        dim: the dimension of the matrix, -2 or -1.
    """

    mesh_dim: int
    dim: int


def map_matrices(
    matrices: Sequence[Matrix], shard_of: Callable[[Matrix], Tensor], function: Callable[[Matrix, Tensor], Tensor]
) -> Iterator[tuple[Matrix, Tensor]]:
    """Yields each matrix with this rank's shard of `function(matrix, whole)`.

    Matrices that ranks share are gathered on one of these ranks each, in groups of as many matrices as there are ranks,
    so that all ranks compute at the same time. While they do, the next group is gathered and the last one scattered.
    All ranks of a mesh call it with the same matrices in the same order.

    Args:
        matrices: the matrices, sharded or not.
        shard_of: returns a rank's shard of the tensor that is gathered, which has the layout of the parameter.
        function: gets a matrix and the gathered tensor in bfloat16, (R, C) or (N, R, C); returns one of that shape and
            dtype.
    """
    shared: dict[tuple[DeviceMesh, tuple[Hop, ...]], list[Matrix]] = {}
    for matrix in matrices:
        hops = _hops(matrix.parameter)
        if hops:
            mesh = matrix.parameter.device_mesh  # type: ignore[attr-defined]
            shared.setdefault((mesh, hops), []).append(matrix)
        else:
            yield matrix, function(matrix, shard_of(matrix))
    for (mesh, hops), own in shared.items():
        size = math.prod(mesh.size(hop.mesh_dim) for hop in hops)
        # Matrices of one size meet in a group, so its ranks finish together.
        own.sort(key=lambda matrix: -matrix.parameter.numel())
        rounds = (_Round(mesh, hops, own[i : i + size], shard_of) for i in range(0, len(own), size))
        gathered: _Round | None = next(rounds)
        scattered: _Round | None = None
        while gathered is not None:
            following = next(rounds, None)
            gathered.compute(function)
            if scattered is not None:
                yield from scattered.results()
            gathered, scattered = following, gathered
        if scattered is not None:
            yield from scattered.results()


def _hops(tensor: Tensor) -> tuple[Hop, ...]:
    """Returns the dimensions over which the rows or columns of a tensor are split, in the order to gather them in."""
    if not isinstance(tensor, DTensor):
        return ()
    split = [
        (not isinstance(placement, _StridedShard), Hop(mesh_dim, placement.dim - tensor.ndim))
        for mesh_dim, placement in enumerate(tensor.placements)
        if isinstance(placement, (Shard, _StridedShard)) and tensor.device_mesh.size(mesh_dim) > 1
    ]
    # A strided shard is a shard of what the mesh's later dimensions split first. Of others, the last is split last.
    inner = [hop for is_plain, hop in split if not is_plain]
    plain = [hop for is_plain, hop in split if is_plain]
    # Matrices that are split between ranks as a batch stay where they are.
    return tuple(hop for hop in (*inner, *reversed(plain)) if hop.dim >= -2)


class _Round:
    """Matrices of which each rank gathers one, computes with it, and scatters the result.

    A hop exchanges shards over one dimension of the mesh. After the first, a rank holds joined shards of the matrices
    whose owners have its place in that dimension; after the last, the whole matrix that it owns.
    """

    def __init__(
        self, mesh: DeviceMesh, hops: tuple[Hop, ...], matrices: Sequence[Matrix], shard_of: Callable[[Matrix], Tensor]
    ) -> None:
        self.device, self.hops, self.matrices = mesh.device_type, hops, matrices
        self.groups = [mesh.get_group(hop.mesh_dim) for hop in hops]
        self.places = [mesh.get_local_rank(hop.mesh_dim) for hop in hops]
        sizes = [mesh.size(hop.mesh_dim) for hop in hops]
        self.owners = list(itertools.islice(itertools.product(*map(range, sizes)), len(matrices)))
        self.shards: list[Any] = [local(matrix.parameter) for matrix in matrices]
        self.lengths = [self._lengths(matrix.parameter, sizes) for matrix in matrices]
        pieces = [shard_of(matrix).to(self.device, torch.bfloat16) for matrix in matrices]
        self.gathered = self._gather(0, dict(enumerate(pieces)))

    def _lengths(self, tensor: Tensor, sizes: Sequence[int]) -> list[list[int]]:
        """Returns how many rows or columns each rank of each hop has."""
        shape = list(tensor.shape)
        lengths: list[list[int]] = []
        for hop, size, place in reversed([*zip(self.hops, sizes, self.places, strict=True)]):
            step = -(-shape[hop.dim] // size)
            lengths.insert(0, [max(0, min(step, shape[hop.dim] - step * i)) for i in range(size)])
            shape[hop.dim] = lengths[0][place]
        if tuple(shape[-2:]) != local(tensor).shape[-2:]:
            raise LeydenError(f"Muon cannot gather the shards of a matrix of shape {tuple(tensor.shape)}: {tensor}.")
        return lengths

    def compute(self, function: Callable[[Matrix, Tensor], Tensor]) -> None:
        """Waits for the gathered matrices, computes, and begins to scatter the results."""
        pieces = self.gathered()
        for index in range(1, len(self.hops)):
            pieces = self._gather(index, pieces)()
        pieces = {number: function(self.matrices[number], whole) for number, whole in pieces.items()}
        for index in reversed(range(1, len(self.hops))):
            pieces = self._scatter(index, pieces)()
        self.scattered = self._scatter(0, pieces)

    def results(self) -> Iterator[tuple[Matrix, Tensor]]:
        """Waits for the scattered results, and yields this rank's shard of each."""
        for number, piece in self.scattered().items():
            yield self.matrices[number], piece.to(self.shards[number].device)

    def _gather(self, index: int, pieces: dict[int, Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Begins to send each piece to its owner's place in a hop; returns a function that returns the joined ones."""
        own = [n for n in pieces if self.owners[n][index] == self.places[index]]
        ranks = range(len(self.lengths[0][index]))
        sent = [[pieces[n] for n in pieces if self.owners[n][index] == rank] for rank in ranks]
        received = _exchange(
            self.groups[index], self.device, sent, [[self._shape(n, index, rank) for n in own] for rank in ranks]
        )
        dim = self.hops[index].dim
        return lambda: {n: torch.cat(parts, dim) for n, parts in zip(own, zip(*received(), strict=True), strict=True)}

    def _scatter(self, index: int, pieces: dict[int, Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Begins to send each rank of a hop its part of the pieces; returns a function that returns this rank's."""
        ranks = range(len(self.lengths[0][index]))
        parts = [torch.split(piece, self.lengths[n][index], self.hops[index].dim) for n, piece in pieces.items()]
        sent = [[part[rank] for part in parts] for rank in ranks]
        # In the hops before this one, the owner has this rank's place.
        here = [n for n, owner in enumerate(self.owners) if [*owner[:index]] == self.places[:index]]
        own = [[n for n in here if self.owners[n][index] == rank] for rank in ranks]
        shapes = [[self._shape(n, index, self.places[index]) for n in numbers] for numbers in own]
        received = _exchange(self.groups[index], self.device, sent, shapes)
        return lambda: dict(zip(itertools.chain(*own), itertools.chain(*received()), strict=True))

    def _shape(self, number: int, index: int, place: int) -> list[int]:
        """Returns the shape of the piece that a rank of a hop sends in it."""
        shape = list(self.shards[number].shape)
        for hop, lengths in zip(self.hops[:index], self.lengths[number], strict=False):
            shape[hop.dim] = sum(lengths)
        shape[self.hops[index].dim] = self.lengths[number][index][place]
        return shape


def _exchange(
    group: dist.ProcessGroup,
    device: str,
    sent: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
) -> Callable[[], list[list[Tensor]]]:
    """Begins to send tensors to each rank of a group; returns a function that waits for those of the given shapes."""
    outgoing = torch.cat(
        [torch.empty(0, dtype=torch.bfloat16, device=device), *(t.flatten() for own in sent for t in own)]
    )
    numels = [[math.prod(shape) for shape in own] for own in shapes]
    incoming = outgoing.new_empty(sum(map(sum, numels)))
    counts = [sum(own) for own in numels], [sum(t.numel() for t in own) for own in sent]
    work = dist.all_to_all_single(incoming, outgoing, *counts, group=group, async_op=True)

    def received() -> list[list[Tensor]]:
        work.wait()
        flat = iter(torch.split(incoming, [numel for own in numels for numel in own]))
        return [[next(flat).view(shape) for shape in own] for own in shapes]

    return received
