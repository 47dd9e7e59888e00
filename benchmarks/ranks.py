"""Measures steps per second on several ranks, hand-written and by Leyden, in one interleaved run.

    python benchmarks/ranks.py --ranks 2 --repeats 7 --steps 30      # DDP, FSDP, TP 2 and PP 2 (1F1B)
    python benchmarks/ranks.py --ranks 4 --repeats 7 --steps 30      # DDP, FSDP and TP 2 × FSDP 2

A small character GPT (examples/lm.py), AdamW, clipping by norm, CPU, gloo, one thread per rank. All contestants run in
the same processes and process group, one after the other in each round. The clock is read when a loader asks for its
first measured batch, and for the one after the last. The table shows the largest number of bytes that rank 0's tensors
held at one time, which is counted in a separate round, each contestant's median steps per second, and, beside the
script, the median over the rounds of the speed, with the lowest and the highest, and that of rank 0's processor time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from beside import Run, Timed, leyden, on_ranks, peak_of, rounds, row
from character_gpt import character_gpt
from split_gpt import PLAN, split_by_hand, split_gpt
from staged_gpt import MICRO_BATCHES, train_by_hand
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

ALPHABET = "".join(map(chr, range(60)))


def build(gpt: Any, args: argparse.Namespace) -> Any:
    """Builds the same model for every contestant."""
    torch.manual_seed(0)
    return gpt(ALPHABET, args.length, args.width, depth=args.depth, lr=3e-4)


def by_hand(gpt: Any, args: argparse.Namespace, data: Timed, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Runs a hand-written loop."""
    module = build(gpt, args)
    model = wrap(module)
    groups = by_mesh(model)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=module.lr)
    reader = dist.get_rank() * data.readers // dist.get_world_size()
    sampler = DistributedSampler(data, data.readers, reader, shuffle=False)
    for batch in DataLoader(data, args.batch_size, sampler=sampler):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        clip(groups)
        optimizer.step()


def by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """Groups parameters by their mesh, or None: torch can step and clip only one mesh's parameters at a time."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def clip(groups: list[list[nn.Parameter]]) -> None:
    """Clips the gradients of all groups by their common norm."""
    if len(groups) == 1:
        nn.utils.clip_grad_norm_(groups[0], 1.0)
        return
    norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    total = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, 1.0, total)


def ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def fsdp(module: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in module.blocks:
        fully_shard(block)
    return fully_shard(module)  # type: ignore[return-value]


def tensor_parallel(module: Any) -> nn.Module:
    """Splits layers over 2 ranks, and shards over the remaining dimension."""
    from torch.distributed.fsdp import fully_shard

    shards = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (shards, 2), mesh_dim_names=("dp_shard", "tp"))
    split_by_hand(module, mesh["tp"])
    if shards > 1:
        # torch suggests this for a norm over both dimensions: one message instead of two.
        mesh._flatten("dp_shard_tp")
        for part in (*module.blocks, module):
            fully_shard(part, mesh=mesh["dp_shard"])
    return module  # type: ignore[no-any-return]


def worker(args: argparse.Namespace) -> None:
    """Runs every contestant in turn, repeatedly, on one rank."""
    gpt, split, world = character_gpt(), split_gpt(), dist.get_world_size()

    def trainer(gpt: Any, strategy: Callable[[], Any]) -> Run:
        return lambda data: leyden(build(gpt, args), data, strategy())

    runs: dict[str, tuple[int, Run]] = {
        "ddp by hand": (world, lambda data: by_hand(gpt, args, data, ddp)),
        "ddp leyden": (world, trainer(gpt, lambda: "ddp")),
        "fsdp by hand": (world, lambda data: by_hand(gpt, args, data, fsdp)),
        "fsdp leyden": (world, trainer(gpt, lambda: "fsdp")),
    }
    if world % 2 == 0:
        from leyden.strategies import MeshStrategy

        runs |= {
            "tp by hand": (world // 2, lambda data: by_hand(split, args, data, tensor_parallel)),
            "tp leyden": (world // 2, trainer(split, lambda: MeshStrategy(tp=2, plan=PLAN))),
        }
    if world == 2:
        runs |= {
            "pp by hand": (1, lambda data: train_by_hand(build(gpt, args), DataLoader(data, args.batch_size))),
            "pp leyden": (1, trainer(gpt, lambda: MeshStrategy(pp=2, microbatches=MICRO_BATCHES))),
        }
    runs = {name: run for name, run in runs.items() if args.only in (None, name.split()[0])}
    window = torch.randint(len(ALPHABET), (args.length + 1,))

    def make(name: str) -> Timed:
        return Timed([window], args.steps, args.batch_size, readers=runs[name][0])

    found = rounds({name: run for name, (_, run) in runs.items()}, make, args.repeats)
    peaks = {name: peak_of(run, make(name)) for name, (_, run) in runs.items()}
    if dist.get_rank() == 0:
        for name in runs:
            print(row(name, found, peaks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--only", help="ddp, fsdp, tp or pp (default: all)")
    on_ranks(parser, worker)


if __name__ == "__main__":
    main()
