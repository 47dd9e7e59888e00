"""A small language model with a mixture of experts, for tests of expert parallelism."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from leyden import TrainModule
from leyden.strategies import balance_loss, routers_in_float32

VOCABULARY, TOKENS, WIDTH, TOP_K = 32, 8, 16, 2
SGD = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)


class Experts(nn.Module):
    """Experts with weights stacked along the first dimension. As in Mixtral, those without a token do not run.

    Args:
        experts: the number of experts.
        has_bias: whether an expert has a bias.
        scales_inputs: whether a routing weight scales an expert's input, as in Llama 4, rather than its output.
    """

    def __init__(self, experts: int, has_bias: bool, scales_inputs: bool) -> None:
        super().__init__()
        self.num_experts, self.scales_inputs = experts, scales_inputs
        self.up = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(experts, 2 * WIDTH) / 10) if has_bias else None
        self.down = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        assert index.numel() == 0 or int(index.max()) < self.num_experts
        y = torch.zeros_like(x)
        for expert in index.unique().tolist():
            row, slot = (index == expert).nonzero(as_tuple=True)
            weight = weights[row, slot].unsqueeze(1)
            own = x[row] * weight if self.scales_inputs else x[row]
            inner = F.gelu(F.linear(own, self.up[expert], None if self.bias is None else self.bias[expert]))
            outputs = F.linear(inner, self.down[expert])
            y = y.index_add(0, row, (outputs if self.scales_inputs else outputs * weight).to(y.dtype))
        return y


class Block(nn.Module):
    def __init__(
        self, experts: int, has_bias: bool, scales_inputs: bool, starved: int, jitter: float, drift: float
    ) -> None:
        super().__init__()
        self.starved, self.jitter, self.drift, self.narrow = starved, jitter, drift, scales_inputs
        self.noises = [torch.Generator().manual_seed(seed) for seed in range(2)] if drift else []
        self.expert_bias: Tensor
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = Experts(experts, has_bias, scales_inputs)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Each token sees the mean of those before it.
        seen = torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(1)
        x = x + self.mix(x.cumsum(1) / seen)
        tokens = self.norm(x).flatten(0, 1)
        noise = 1 + self.jitter * torch.randn_like(tokens) if self.jitter else 1
        logits = self.router(tokens * noise)
        self.logits_dtype = logits.dtype
        logits[:, : self.starved] = -torch.inf
        probabilities = logits.softmax(-1)
        scores = probabilities + self.expert_bias
        if self.drift:
            # Those of a recomputation differ from those of the forward pass.
            own = self.noises[torch._C._current_graph_task_id() != -1]
            scores = scores + self.drift * torch.rand(scores.shape, generator=own).to(scores.dtype)
        index = scores.topk(TOP_K, 1, True).indices
        weights = probabilities.gather(1, index)
        index = index.int() if self.narrow else index
        return x + self.experts(tokens, index, weights).view_as(x), probabilities


class Mixture(TrainModule):
    """A language model with a mixture of experts in every block.

    Args:
        experts: number of experts in each block.
        has_bias: whether an expert has a bias.
        scales_inputs: whether routing weights scale the experts' inputs rather than their outputs, and the numbers of
            experts are int32.
        starved: the number of experts, from the first one, that no token chooses.
        jitter: the standard deviation of noise on the routers' inputs.
        drift: the size of noise on the scores by which routers choose, from generators that no recomputation restores.
        trains: part of the names of the parameters that train; all others are frozen.
        by_items: whether a step returns a sum and the number of tokens.
        balances: the weight of the balance loss.
        float32: whether routers compute in float32 under every precision.
        optimizer: creates the optimizer.
        depth: number of blocks.
    """

    def __init__(
        self,
        experts: int = 4,
        has_bias: bool = True,
        scales_inputs: bool = False,
        starved: int = 0,
        jitter: float = 0.0,
        drift: float = 0.0,
        trains: str = "",
        by_items: bool = False,
        balances: float = 0.0,
        float32: bool = False,
        optimizer: Any = SGD,
        depth: int = 2,
    ) -> None:
        super().__init__()
        self.by_items, self.balances, self.optimizer = by_items, balances, optimizer
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            Block(experts, has_bias, scales_inputs, starved, jitter, drift) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(trains in name)
        if float32:
            routers_in_float32(self)
        self.losses: list[float] = []

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, routed = self.tokens(tokens), []
        for block in self.blocks:
            x, probabilities = block(x)
            routed.append(probabilities)
        return self.head(self.norm(x)), torch.cat(routed)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, labels = batch
        logits, probabilities = self(tokens)
        logits, labels = logits.flatten(0, 1), labels.flatten()
        if self.by_items:
            return {"loss": F.cross_entropy(logits, labels, reduction="sum"), "num_items": labels.numel()}
        loss = F.cross_entropy(logits, labels)
        if self.balances:
            indices = probabilities.topk(TOP_K).indices
            loss = loss + self.balances * balance_loss(probabilities, indices, self.trainer.strategy)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])[0]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # In a pipeline the last stage has the loss.
        if outputs is not None:
            self.losses.append(float(outputs["loss"] if self.by_items else outputs))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def data(samples: int) -> TensorDataset:
    tokens = torch.randint(0, VOCABULARY, (samples, TOKENS), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens, tokens.roll(-1, 1))


PLAN = {"blocks.*.experts": "expert_parallel"}
TENSOR_PLAN = {"tokens": "rowwise", "head": "gather"}
SPLIT_PLAN = {**TENSOR_PLAN, "blocks.*.experts.up": "colwise", "blocks.*.experts.down": "rowwise"}
"""Splits each expert too; their biases would have to be split along the experts, so they have none."""
