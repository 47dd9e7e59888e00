"""A small GPT for tests of the mesh: grouped-query attention, tied weights, ignored labels; and plans that split it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from leyden import TrainModule

VOCABULARY, TOKENS = 64, 16


class Attention(nn.Module):
    def __init__(self, width: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_width = n_heads, n_kv_heads, width // n_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, n_kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, n_kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(width, width)
        self.dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query = self.query(x).view(batch, tokens, self.n_heads, self.head_width).transpose(1, 2)
        key = self.key(x).view(batch, tokens, self.n_kv_heads, self.head_width).transpose(1, 2)
        value = self.value(x).view(batch, tokens, self.n_kv_heads, self.head_width).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, None, dropout, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int, n_kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, n_heads, n_kv_heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.feed_norm(x)))))


class GPT(TrainModule):
    def __init__(
        self,
        width: int = 32,
        depth: int = 2,
        n_heads: int = 4,
        n_kv_heads: int = 2,
        dropout: float = 0.0,
        counts_items: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, n_heads, n_kv_heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.counts_items = counts_items
        self.losses: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, labels = batch
        reduction = "sum" if self.counts_items else "mean"
        loss = F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction=reduction)
        if self.counts_items:
            return {"loss": loss, "num_items": int((labels != -100).sum())}
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs is None:
            # Another stage of a pipeline has the loss.
            return
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(float(loss))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def data(samples: int = 40) -> TensorDataset:
    """Samples of `TOKENS` tokens, whose last three labels are ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (samples, TOKENS), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -3:] = -100
    return TensorDataset(tokens, labels)


PLAN = {
    "tokens": "rowwise",
    "blocks.*.attention": "heads",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "gather",
}
SEQUENCE_PLAN = {
    **PLAN,
    "places": "rowwise",
    "blocks.*.attention_norm": "sequence",
    "blocks.*.feed_norm": "sequence",
    "norm": "sequence",
    "head": "loss",
}
