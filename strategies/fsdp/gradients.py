"""Gradient scaling, gradient clipping and optimizer checks for sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from leyden.core.errors import ConfigurationError
from leyden.strategies.base import multiply
from leyden.strategies.fsdp.sharding import local, whole

UNSHARDABLE = {
    "Adafactor": "takes means over whole rows and columns, and a rank holds only some",
    "Rprop": "writes to single elements by index, which torch cannot do on shards",
    "LBFGS": "takes dot products over all parameters, and evaluates the loss again",
    "Shampoo": "preconditions whole matrices, and a rank holds only a part",
    "SOAP": "preconditions whole matrices, and a rank holds only a part",
    "SparseAdam": "needs sparse gradients, which are not sharded",
}
"""Names of optimizers that do not work on shards → the reason."""


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuses an optimizer whose step fails or computes wrong values on shards.

    Raises:
        ConfigurationError: gives the reason.
    """
    for kind in type(optimizer).__mro__:
        if kind is getattr(torch.optim, "Muon", None):
            raise ConfigurationError(
                "torch.optim.Muon orthogonalizes whole matrices, and a rank holds only some rows: use "
                "leyden.optim.Muon, which gathers them. It takes the same arguments."
            )
        known = kind.__module__.startswith("torch.optim") or kind.__name__ in ("Shampoo", "SOAP")
        if known and kind.__name__ in UNSHARDABLE:
            raise ConfigurationError(
                f"{kind.__name__} {UNSHARDABLE[kind.__name__]}: use an elementwise optimizer such as AdamW or SGD, or "
                "strategy='ddp'."
            )


def clip_norm(parameters: Sequence[Tensor], value: float, norm_type: float = 2.0) -> Tensor:
    """Clips gradients to a total norm, over sharded and unsharded parameters.

    Returns:
        The norm before clipping, the same on every rank.
    """
    if len(_by_mesh(parameters)) < 2:
        return whole(nn.utils.clip_grad_norm_(parameters, value, norm_type))
    total = total_norm(parameters, norm_type)
    clip_by(parameters, value, total)
    return total


def clip_by(parameters: Sequence[Tensor], value: float, norm: Tensor) -> None:
    """Scales gradients as torch's `clip_grad_norm_` does, given their total norm."""
    factor = (value / (norm + 1e-6)).clamp(max=1.0)
    multiply([local(p.grad) for p in parameters if p.grad is not None], factor)


def total_norm(parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    """Returns the norm of the parameters' gradients, over sharded and unsharded parameters."""
    # torch cannot stack norms from different meshes, so each mesh is reduced separately.
    norms = [
        whole(nn.utils.get_total_norm([p.grad for p in own if p.grad is not None], norm_type))
        for own in _by_mesh(parameters).values()
    ]
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    return total


def _by_mesh(parameters: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return kinds
