# /// script
# requires-python = ">=3.10"
# dependencies = ["leyden"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Trains a mixture of experts on six of Shakespeare's plays; with --ep, each rank holds some of the experts.

python examples/mixture.py                                             one process
torchrun --nproc-per-node 2 examples/mixture.py --ep 2                 half of the experts on each rank
torchrun --nproc-per-node 4 examples/mixture.py --ep 2                 in two pairs; the rest is sharded over four
python examples/mixture.py --devices 2 --ep 2                          starts its own ranks

The printed loss is the same on every mesh, because --batch-size is the total over all ranks.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from lm import PLAYS, Characters
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Trainer, TrainModule
from leyden.callbacks import ExpertBalancing
from leyden.strategies import MeshStrategy, balance_loss, routers_in_float32


class Experts(nn.Module):
    """Feed-forward layers, stacked along the first dimension of two weights."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) * (2 * width) ** -0.5)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # (T, D), (T, k), (T, k)
        chosen = index.flatten()
        order = chosen.argsort(stable=True)  # the (token, expert) pairs of each expert, one after another
        counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
        rows = x[order // index.shape[1]].split(counts)
        outputs = torch.cat(
            [F.gelu(own @ up.T) @ down.T for own, up, down in zip(rows, self.up, self.down, strict=True)]
        )
        pairs = torch.zeros_like(outputs).index_copy(0, order, outputs).view(*index.shape, -1)  # (T, k, D)
        return (pairs * weights.unsqueeze(2)).sum(1).to(x.dtype)


class Block(nn.Module):
    """Causal attention, then a mixture: a router chooses `top_k` experts for each token."""

    def __init__(self, width: int, heads: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.heads, self.top_k = heads, top_k
        self.attention_norm, self.experts_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (B, T, D)
        parts = self.qkv(self.attention_norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # (B, H, T, D/H)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        tokens = self.experts_norm(x).flatten(0, 1)  # (B·T, D)
        probabilities = self.router(tokens).softmax(-1)  # (B·T, E)
        weights, index = probabilities.topk(self.top_k)
        return x + self.experts(tokens, index, weights).view_as(x), probabilities


class Mixture(TrainModule):
    """A small language model over characters.

    Args:
        characters: how many there are.
        length: characters in a window.
        width: of the residual stream.
        depth: blocks.
        experts: experts in each block.
        top_k: experts that process a token.
    """

    def __init__(
        self, characters: int, length: int, width: int = 64, depth: int = 2, experts: int = 8, top_k: int = 2
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4, experts, top_k) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)
        routers_in_float32(self)

    def parallel_plan(self) -> dict[str, str]:
        return {"blocks.*.experts": "expert_parallel"}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        ids, targets = batch[:, :-1], batch[:, 1:]
        x, routed = self.characters(ids) + self.places.weight, []
        for block in self.blocks:
            x, probabilities = block(x)
            routed.append(probabilities)
        loss = F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        # Over the tokens of all ranks and layers. Perfect balance is 2, the number of experts of a token.
        probabilities = torch.cat(routed)
        balance = balance_loss(probabilities, probabilities.topk(self.top_k).indices, self.trainer.strategy)
        self.log("balance", balance, on_step=True, on_epoch=True)
        return loss + 0.01 * balance

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, betas=(0.9, 0.95))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, default=1, help="ranks that divide the experts (default: %(default)s)")
    parser.add_argument("--devices", default="auto", help="ranks on this machine (default: %(default)s)")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="windows per step on all ranks")
    parser.add_argument("--length", type=int, default=64, help="characters in a window (default: %(default)s)")
    parser.add_argument("--root", default="runs/mixture", help="folder of logs and checkpoints (default: %(default)s)")
    args = parser.parse_args()

    torch.manual_seed(0)
    text = PLAYS.read_text(encoding="ascii")
    alphabet = "".join(sorted(set(text)))
    data = Characters(text, alphabet, args.length)
    strategy = MeshStrategy(ep=args.ep)
    trainer = Trainer(
        strategy=strategy,
        devices=args.devices,
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        default_root_dir=args.root,
        log_every_n_steps=10,
        callbacks=[ExpertBalancing()],  # logs the load of the experts
    )
    trainer.fit(
        Mixture(len(alphabet), args.length), DataLoader(data, args.batch_size // strategy.data_size, shuffle=True)
    )
    for name in ("loss", "balance"):
        trainer.print(f"mean {name} of the steps {float(trainer.callback_metrics[f'{name}_epoch']):.4f}")


if __name__ == "__main__":
    main()
