"""Routers of mixtures of experts: a loss that balances them over the tokens of all ranks, and logits in float32."""

from __future__ import annotations

import functools
import types
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leyden.core.errors import ConfigurationError
from leyden.strategies.base import Strategy
from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy

PRODUCTS = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.einsum)
"""The functions by which a router may compute its logits."""


def balance_loss(
    probabilities: Tensor, indices: Tensor, strategy: Strategy | None = None, mask: Tensor | None = None
) -> Tensor:
    """Returns the loss that balances a router, as in Switch Transformers (Fedus et al., 2021, arXiv:2101.03961).

    It is the number of experts times the sum over experts of (the fraction of tokens sent there) × (the mean
    probability). With top-k routing the fractions add up to k, as in `transformers`. On several ranks the fractions are
    those of the whole global batch, so the mean of the ranks' losses is the loss of one process; a mean of fractions
    times probabilities per rank is not. Every rank must call it in the same forward, in training.

    Args:
        probabilities: the router's probabilities, (tokens, experts). Those of several layers may be concatenated.
        indices: the experts chosen for each token, (tokens, k).
        strategy: the run's strategy, `trainer.strategy` or `accelerator.strategy`. None counts this rank's tokens only.
        mask: nonzero for tokens that count, (tokens,); None counts all, padding included.

    Returns:
        The loss, as a 0-d float32 tensor, or float64 for float64 probabilities. Its minimum is k, at perfect balance.

    Raises:
        ConfigurationError: on several ranks of a strategy other than FSDP or a mesh, or with pipeline stages.

    Example:
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
        >>> float(balance_loss(probabilities, probabilities.topk(1).indices))
        1.0
    """
    probabilities = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
    experts = probabilities.shape[-1]
    counted = probabilities.new_ones(len(indices)) if mask is None else mask.reshape(-1).to(probabilities.dtype)
    mean = (probabilities * counted.unsqueeze(1)).sum(0) / counted.sum().clamp(min=1)
    # The last number is the tokens.
    counts = torch.cat([probabilities.new_zeros(experts), counted.sum().reshape(1)])
    counts.index_add_(0, indices.reshape(-1), counted.repeat_interleave(indices.shape[-1]))
    if strategy is not None and strategy.ranks.world_size > 1:
        trains = torch.is_grad_enabled()
        if trains or strategy.outputs.are_rehearsed:
            _check(strategy)
        if trains and strategy.is_filling:
            counts.zero_()
        if trains:
            # The ranks of a tp group count the same tokens, which leaves the fractions as they are.
            dist.all_reduce(counts)
    fractions = counts[:-1] / counts[-1].clamp(min=1)
    return experts * (fractions.detach() * mean).sum()


def _check(strategy: Strategy) -> None:
    stages = getattr(getattr(strategy, "layout", None), "pp", 1)
    if not isinstance(strategy, FSDPStrategy) or stages > 1:
        how = f"pp={stages}" if stages > 1 else f"strategy={strategy.name!r}"
        raise ConfigurationError(
            f"balance_loss with {how}: its counts are summed over the ranks in every forward, and here some ranks may "
            "not run it. Use strategy='fsdp' or a MeshStrategy without pp, or balance by the callback ExpertBalancing, "
            "which needs no loss."
        )


def routers_in_float32(module: nn.Module, names: Collection[str] = ("router", "gate")) -> list[str]:
    """Makes routers compute their logits in float32 under every precision, and returns the names of these routers.

    Logits are those of a linear layer or a matrix product: `@`, `matmul`, `mm` or `einsum`. Rounded to bfloat16, logits
    that differ become equal, and ties decide about experts. Without this, routers of `transformers` have logits in 16
    bits under mixed precision, and only their softmax in float32. What a router returns is float32 too, and in float64
    nothing changes. Under FSDP the weights are gathered in 16 bits, and the logits are computed from the rounded
    weights in float32.

    Call it once the module is built, before the run.

    Args:
        module: the model, or a part of it.
        names: the last part of the routers' names.

    Raises:
        ConfigurationError: if no module has such a name.

    Example:
        >>> model = nn.ModuleDict({"router": nn.Linear(8, 4, bias=False)}).bfloat16()
        >>> routers_in_float32(model)
        ['router']
        >>> model["router"](torch.ones(2, 8, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    found = {name: part for name, part in module.named_modules() if name.rpartition(".")[2] in names}
    routers = {name: part for name, part in found.items() if any(True for _ in part.parameters())}
    if not routers:
        raise ConfigurationError(
            f"routers_in_float32: {type(module).__name__} has no module with parameters that is named "
            f"{' or '.join(map(repr, names))}. Pass the last part of the names of your routers: names={{…}}."
        )
    for router in routers.values():
        own = type(router).forward

        @functools.wraps(own)
        def forward(self: nn.Module, *args: Any, _own: Any = own, **kwargs: Any) -> Any:
            with torch.autocast(next(self.parameters()).device.type, enabled=False), _Float32Products():
                return _own(self, *args, **kwargs)

        # A bound method, so that a deep copy of the model is bound to the copy.
        router.forward = types.MethodType(forward, router)  # type: ignore[method-assign]
    return list(routers)


class _Float32Products(TorchFunctionMode):
    """Computes linear layers and matrix products in float32 or wider."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            args = tuple(_widened(value) for value in args)
            kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _widened(value: Any) -> Any:
    return value.to(torch.promote_types(value.dtype, torch.float32)) if isinstance(value, Tensor) else value
