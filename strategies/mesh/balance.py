"""balance_loss: keeps a router from sending most tokens to a few experts, with fractions of all ranks' tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from leyden.core.errors import ConfigurationError
from leyden.strategies.base import Strategy
from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy


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
    if strategy is not None and strategy.ranks.world_size > 1 and torch.is_grad_enabled():
        _check(strategy)
        if strategy.is_filling:
            counts.zero_()
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
            "not run it. Use strategy='fsdp' or a MeshStrategy without pp, or leave out the argument `strategy`, which "
            "counts the tokens of each rank by itself."
        )
