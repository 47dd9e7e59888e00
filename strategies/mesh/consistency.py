"""Consistency of a tp group: checks that batches and replicated gradients agree, and sums partial gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from leyden.core.errors import ConfigurationError
from leyden.core.tree import map_tensors
from leyden.strategies.local_weights import digest_of
from leyden.strategies.process_group import GroupRanks

TOLERANCE = 1e-3
"""Largest relative difference between gradients that ranks compute from the same numbers."""


EVERY = 1024
"""From this batch or step on, one of as many is checked."""


def is_sampled(number: int) -> bool:
    """Returns True if the batch or step with this number, from 1, is checked: 1, 2, 4, 8, …, and every 1024th."""
    return number & (number - 1) == 0 or number % EVERY == 0


def let_anomaly_mode_check() -> None:
    """Lets torch's `detect_anomaly` check the gradients of split parameters, for which DTensor has no rule.

    Each rank checks its own part: the one with a nan raises.
    """

    @register_sharding(torch.ops.aten._is_any_true.default)  # type: ignore[untyped-decorator]
    def places(checked: Any) -> list[tuple[list[Placement], list[Placement]]]:
        parts: list[Placement] = [Replicate(), *map(Shard, range(checked.ndim))]
        return [([Replicate()], [part]) for part in parts]


def check_batch(ranks: GroupRanks, mesh: DeviceMesh, batch: Any) -> None:
    """Checks that the ranks of one model received the same batch. Reads the batch back from the device.

    Args:
        ranks: the ranks of the run.
        mesh: the dimension along which ranks share batches: `tp`, `cp` or `pp`.
        batch: this rank's batch.

    Raises:
        ConfigurationError: if batches differ; on every rank of the group.
    """
    digests: list[str] = []
    map_tensors(batch, lambda tensor: digests.append(f"{tuple(tensor.shape)} {tensor.dtype} {digest_of([tensor])}"))
    if ranks.differing("; ".join(digests), mesh.get_group()):
        name = "cp" if "cp" in (mesh.mesh_dim_names or ()) else "tp"
        group = "pipeline" if "pp" in (mesh.mesh_dim_names or ()) else f"{name} group"
        raise ConfigurationError(
            f"the ranks of a {group} received different batches, and they share one model: let the Trainer shard the "
            "loader, or shard by strategy.data_rank and strategy.data_size. If samples are drawn at random, call "
            "seed_everything() first."
        )


def sum_partial(parameters: Iterable[Tensor]) -> None:
    """Sums partial gradients over the ranks, in one all-reduce per dtype."""
    groups: dict[tuple[DeviceMesh, torch.dtype], list[tuple[DTensor, Tensor]]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            assert isinstance(parameter, DTensor)
            groups.setdefault((grad.device_mesh, grad.dtype), []).append((parameter, grad.to_local()))
    for (mesh, _), pairs in groups.items():
        flat = torch.cat([partial.reshape(-1) for _, partial in pairs])
        dist.all_reduce(flat, group=mesh.get_group())
        sums = torch.split(flat, [partial.numel() for _, partial in pairs])
        for (parameter, partial), total in zip(pairs, sums, strict=True):
            local = total.view(partial.shape).clone()
            parameter.grad = DTensor.from_local(local, mesh, parameter.placements, run_check=False)


def check_replicated_gradients(mesh: DeviceMesh, modules: Sequence[nn.Module], parameters: Sequence[Tensor]) -> None:
    """Checks that gradients of replicated parameters agree across a tp group. Waits for the device.

    They differ if the parameter's layer works on split activations, and the plan does not mark it accordingly.

    Raises:
        ConfigurationError: if gradients differ; names the parameter. Raised on every rank of the group.
    """
    checked = {id(parameter) for parameter in parameters}
    grads = [
        (name, parameter.grad)
        for module in modules
        for name, parameter in module.named_parameters()
        if id(parameter) in checked
    ]
    # tp is the innermost dimension of every mesh.
    named = [
        (name, grad.to_local())
        for name, grad in grads
        if isinstance(grad, DTensor) and grad.placements[-1].is_replicate()
    ]
    if not named:
        return
    # Two numbers per gradient: its sum and its norm.
    numbers = torch.stack([x for _, grad in named for x in (grad.sum(), torch.linalg.vector_norm(grad))]).double()
    extremes = torch.stack([numbers, -numbers])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group())
    largest, smallest = extremes[0], -extremes[1]
    # A sum may cancel to near zero, so its difference is compared with the norm too.
    scale = torch.maximum(extremes.abs().amax(0), largest[1::2].repeat_interleave(2))
    differs = (largest - smallest) > TOLERANCE * scale
    if differs.any():
        name = named[int(differs.nonzero()[0]) // 2][0]
        raise ConfigurationError(
            f"the gradients of {name!r} differ between the ranks of a tp group, although each rank holds it whole. If "
            "its layer works on split activations (heads, the sequence), make it 'replicate_sum' or 'sequence' in the "
            "plan. Otherwise its forward draws random numbers from a generator other than torch's: seed it identically."
        )
