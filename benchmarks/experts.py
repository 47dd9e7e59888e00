"""Measures expert parallelism beside a hand-written loop: steps per second, and memory.

    python benchmarks/experts.py --ranks 2 --repeats 7 --steps 20     # ep 2
    python benchmarks/experts.py --ranks 4 --repeats 3 --steps 10     # ep 2; two ranks shard each half of the experts

A language model of 4 blocks, each with attention and a mixture of 8 experts of which a token takes 2, in float32,
AdamW, clipping by norm, CPU, gloo, one thread per rank. The loops by hand shard the other weights by FSDP, and send
tokens to their experts and back as Leyden does, by torch's functional collectives. They weight the outputs after they
are back; Leyden sends the weights along, since a module may use them earlier. The experts of "ep by hand" are plain
tensors, which no other number of ranks can load; those of "ep as DTensors" are parts of one DTensor, as in torchtitan
and Leyden. All contestants run in the same processes, one after the other in each round. The table shows the largest
number of bytes that rank 0's tensors held at one time, the median steps per second, and, beside the first loop by
hand, the median over the rounds of the speed, with the lowest and the highest, and that of rank 0's processor time
per step.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside import Run, Timed, leyden, on_ranks, peak_of, rounds, row
from split_gpt import Attention
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, DistributedSampler

from leyden import TrainModule
from leyden.strategies import MeshStrategy

TOKENS, EXPERTS, TOP_K, EP = 60, 8, 2, 2


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 4 * width, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, 4 * width) * (4 * width) ** -0.5)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # (T, D), (T, k), (T, k)
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        ups, downs = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        rows = x[order // index.shape[1]].split(torch.bincount(chosen, minlength=len(ups)).tolist())
        pairs = torch.cat([F.gelu(own @ up.T) @ down.T for own, up, down in zip(rows, ups, downs, strict=True)])
        return weighted(pairs, order, weights)


def weighted(pairs: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted sum over the experts of each token, for their outputs in the order of experts."""
    pairs = torch.empty_like(pairs).index_copy(0, order, pairs).view(*weights.shape, -1)  # (T, k, D)
    return (pairs * weights.unsqueeze(2)).sum(1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.router = Attention(width, 4), nn.Linear(width, EXPERTS, bias=False)
        self.experts: nn.Module = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        tokens = self.norm2(x).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(TOP_K)
        return x + self.experts(tokens, index, weights).view_as(x)  # type: ignore[no-any-return]


class Mixture(TrainModule):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS)

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        x = self.tokens(batch[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())

    forward = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)

    def parallel_plan(self) -> dict[str, str]:
        return {"blocks.*.experts": "expert_parallel"}


def build(args: argparse.Namespace) -> Mixture:
    torch.manual_seed(0)
    return Mixture(args.length, args.width)


# by hand --------------------------------------------------------------------------------------------------------------
class Exchanged(nn.Module):
    """Keeps this rank's experts, and sends each row to the rank of its expert and back."""

    def __init__(self, experts: Experts, mesh: DeviceMesh, as_dtensors: bool) -> None:
        super().__init__()
        self.experts, self.group = experts, mesh.get_group()
        for name, whole in list(experts.named_parameters()):
            part = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            setattr(experts, name, nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)]) if as_dtensors else part))

    def exchange(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return collectives.wait_tensor(  # type: ignore[no-any-return, no-untyped-call]
            collectives.all_to_all_single_autograd(rows, received, sent, self.group)
        )

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        chosen = index.flatten()
        order, sent = chosen.argsort(stable=True), torch.bincount(chosen, minlength=EXPERTS).view(EP, -1)
        received = collectives.wait_tensor(  # type: ignore[no-untyped-call]
            collectives.all_to_all_single(sent, None, None, self.group)
        )
        rows_sent, rows_received = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        rows = self.exchange(x[order // TOP_K], rows_received, rows_sent)
        expert = torch.arange(EXPERTS // EP).repeat(EP).repeat_interleave(received.flatten()).unsqueeze(1)
        outputs = self.experts(rows, expert, rows.new_ones(len(rows), 1))
        return weighted(self.exchange(outputs, rows_sent, rows_received), order, weights)


def divided(args: argparse.Namespace, as_dtensors: bool) -> tuple[Mixture, list[nn.Parameter], list[nn.Parameter]]:
    """Returns the model with its experts divided and sharded, its experts' parameters, and all others."""
    module, world = build(args), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // EP, EP), mesh_dim_names=("shard", "ep"))
    for block in module.blocks:
        block.experts = Exchanged(block.experts, mesh["ep"], as_dtensors)
        if world > EP:
            fully_shard(block.experts.experts, mesh=mesh["shard"])
        fully_shard(block, ignored_params=set(block.experts.parameters()))
    experts = [p for block in module.blocks for p in block.experts.parameters()]
    fully_shard(module, ignored_params=set(experts))
    return module, experts, [p for p in module.parameters() if all(p is not q for q in experts)]


def clip(experts: list[nn.Parameter], rest: list[nn.Parameter]) -> None:
    """Clips by the norm over all ranks."""
    grads: list[Any] = [p.grad for p in experts]
    # Tokens of all ranks of a pair add to these.
    torch._foreach_div_(grads, EP)
    of_rest = nn.utils.get_total_norm([p.grad for p in rest if p.grad is not None])
    of_experts = nn.utils.get_total_norm([g.to_local() if isinstance(g, DTensor) else g for g in grads]).square()
    dist.all_reduce(of_experts)
    total = (of_rest.full_tensor().square() + of_experts).sqrt()  # type: ignore[attr-defined]
    for group in (experts, rest):
        nn.utils.clip_grads_with_norm_(group, 1.0, total)


def by_hand(args: argparse.Namespace, data: Timed, as_dtensors: bool = False) -> None:
    """Runs a hand-written loop."""
    module, experts, rest = divided(args, as_dtensors)
    optimizer = torch.optim.AdamW([{"params": experts}, {"params": rest}], lr=3e-4)
    for batch in DataLoader(data, args.batch_size, sampler=DistributedSampler(data, shuffle=False)):
        optimizer.zero_grad()
        module(batch).backward()
        clip(experts, rest)
        optimizer.step()


def worker(args: argparse.Namespace) -> None:
    """Runs the contestants in turn, repeatedly, on one rank."""
    runs: dict[str, Run] = {
        "ep by hand": lambda data: by_hand(args, data),
        "ep as DTensors": lambda data: by_hand(args, data, as_dtensors=True),
        "ep leyden": lambda data: leyden(build(args), data, MeshStrategy(ep=EP)),
    }
    windows = torch.randint(TOKENS, (64, args.length + 1))

    def make(name: str) -> Timed:
        return Timed(list(windows), args.steps, args.batch_size, dist.get_world_size())

    found = rounds(runs, make, args.repeats)
    peaks = {name: peak_of(run, make(name)) for name, run in runs.items()}
    if dist.get_rank() == 0:
        for name in runs:
            print(row(name, found, peaks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    on_ranks(parser, worker)


if __name__ == "__main__":
    main()
