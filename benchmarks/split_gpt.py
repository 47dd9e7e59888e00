"""The benchmarks' GPT with layers that can be split, by a plan or by hand."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from character_gpt import character_gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

PLAN = {
    "blocks.*.attention": "heads",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.of_head = heads, width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, self.of_head)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """The block of examples/lm.py, with separate layers for query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def split_gpt() -> Any:
    """Returns the class: `character_gpt()` with blocks that can be split."""

    class Split(character_gpt()):  # type: ignore[misc]
        def __init__(self, alphabet: str, length: int, width: int, depth: int, lr: float) -> None:
            super().__init__(alphabet, length, width, depth=depth, lr=lr)
            self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))

    return Split


def split_by_hand(model: Any, mesh: DeviceMesh) -> None:
    """Splits the model like PLAN, with torch's own calls; query, key and value share one collective."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    for block in model.blocks:
        block.attention.num_heads //= mesh.size()
        plan = {
            "attention": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
