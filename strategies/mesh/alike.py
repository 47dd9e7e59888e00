"""What the ranks of a tp group must have in common, and gradients of which each rank has a part of the sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from leyden.strategies.batch import map_tensors
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.local_weights import digest_of
from leyden.strategies.process_group import GroupRanks

APART = 1e-3
"""How far gradients may differ, relative to their size, that kernels of the same numbers compute."""


def check_batch(ranks: GroupRanks, mesh: DeviceMesh, batch: Any) -> None:
    """Finds ranks of one model that were given different batches, once in a run.

    Args:
        ranks: of the run.
        mesh: the dimension of those that share batches: `tp`, or `pp`.
        batch: this rank's.

    Raises:
        ConfigurationError: on every rank of the group.
    """
    seen: list[str] = []
    map_tensors(batch, lambda tensor: seen.append(f"{tuple(tensor.shape)} {tensor.dtype} {digest_of([tensor])}"))
    if ranks.differing("; ".join(seen), mesh.get_group()):
        group = "pipeline" if "pp" in (mesh.mesh_dim_names or ()) else "tp group"
        raise ConfigurationError(
            f"the ranks of a {group} were given different batches, and they share one model: let the Trainer shard the "
            "loader, or deal samples to strategy.data_size readers, of which this rank is strategy.data_rank. Where "
            "samples are drawn at random, call seed_everything() first."
        )


def sum_partial(parameters: Iterable[Tensor]) -> None:
    """Sums partial gradients over the ranks, in one message for each dtype."""
    groups: dict[tuple[DeviceMesh, torch.dtype], list[DTensor]] = {}
    owners: dict[int, Tensor] = {}
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            groups.setdefault((grad.device_mesh, grad.dtype), []).append(grad)
            owners[id(grad)] = parameter
    for (mesh, _), grads in groups.items():
        flat = torch.cat([grad.to_local().reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=mesh.get_group())
        parts = torch.split(flat, [grad.to_local().numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            owner = owners[id(grad)]
            assert isinstance(owner, DTensor)
            local = part.view(grad.to_local().shape).clone()
            owner.grad = DTensor.from_local(local, mesh, owner.placements, run_check=False)


def check_alike(mesh: DeviceMesh, modules: Sequence[nn.Module], parameters: Sequence[Tensor]) -> None:
    """Finds a replicated parameter whose gradients differ between the ranks of a tp group, once for each optimizer.

    Such a parameter works on what differs between them, and the plan does not say so.

    Raises:
        ConfigurationError: on every rank of the group; names the parameter.
    """
    own = {id(parameter) for parameter in parameters}
    grads = [
        (name, parameter.grad)
        for module in modules
        for name, parameter in module.named_parameters()
        if id(parameter) in own
    ]
    # tp is the innermost dimension of every mesh.
    named = [
        (name, grad.to_local())
        for name, grad in grads
        if isinstance(grad, DTensor) and grad.placements[-1].is_replicate()
    ]
    if not named:
        return
    numbers = torch.stack([number for _, grad in named for number in _numbers(grad)]).double()
    ends = torch.stack([numbers, -numbers])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=mesh.get_group())
    largest, smallest = ends[0], -ends[1]
    # A sum may cancel out, so the norm is its scale too.
    scale = torch.maximum(ends.abs().amax(0), largest[1::2].repeat_interleave(2))
    apart = (largest - smallest) > APART * scale
    if apart.any():
        name = named[int(apart.nonzero()[0]) // 2][0]
        raise ConfigurationError(
            f"the gradients of {name!r} differ between the ranks of a tp group, which have it whole. Either its layer "
            "works on what a rank has a part of (heads, the sequence): make it 'replicate_sum' or 'sequence' in the "
            "plan. Or its forward draws random numbers of its own, which are not torch's."
        )


def _numbers(grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad.sum(), torch.linalg.vector_norm(grad)
