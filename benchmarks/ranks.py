"""Measures steps per second on several ranks, hand-written and by Leyden, in one interleaved run.

    python benchmarks/ranks.py --ranks 2 --repeats 7 --steps 30      # DDP, FSDP, TP 2 and PP 2 (1F1B)
    python benchmarks/ranks.py --ranks 4 --repeats 7 --steps 30      # DDP, FSDP and TP 2 × FSDP 2

A small character GPT (examples/lm.py), AdamW, clipping by norm, CPU, gloo, one thread per rank. All contestants run in
the same processes and process group, one after the other in each round. The clock is read when the data set returns
batch `warm-up` and batch `warm-up + steps`. The table shows each contestant's median steps per second, the median over
the rounds of Leyden's speed divided by the script's, and the largest number of bytes that rank 0's tensors held at one
time, which is counted in a separate round.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from character_gpt import character_gpt
from peak import Peak
from split_gpt import PLAN, split_by_hand, split_gpt
from staged_gpt import MICRO_BATCHES, train_by_hand
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ALPHABET = "".join(map(chr, range(60)))
WARM_UP = 5
TAIL = 2


class Windows(Dataset[Tensor]):
    """Windows of random characters; records when the first and the last window of the measurement are read."""

    def __init__(self, args: argparse.Namespace, readers: int) -> None:
        self.size, self.length, self.steps, self.readers = args.batch_size, args.length, args.steps, readers
        self.ids = torch.randint(len(ALPHABET), (self.length + 1,))
        self.served, self.start, self.end = 0, 0.0, 0.0

    def __len__(self) -> int:
        return (WARM_UP + self.steps + TAIL) * self.size * self.readers

    def __getitem__(self, index: int) -> Tensor:
        self.served += 1
        if self.served == WARM_UP * self.size:
            self.start = time.perf_counter()
        elif self.served == (WARM_UP + self.steps) * self.size:
            self.end = time.perf_counter()
        return self.ids

    @property
    def steps_per_second(self) -> float:
        return self.steps / (self.end - self.start)


def build(gpt: Any, args: argparse.Namespace) -> Any:
    """Builds the same model for every contestant."""
    torch.manual_seed(0)
    return gpt(ALPHABET, args.length, args.width, depth=args.depth, lr=3e-4)


def by_hand(gpt: Any, args: argparse.Namespace, data: Windows, wrap: Callable[[nn.Module], nn.Module]) -> None:
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


def leyden(gpt: Any, args: argparse.Namespace, data: Windows, strategy: Any) -> None:
    """Runs the same training with a Trainer."""
    from leyden import Trainer

    module = build(gpt, args)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            strategy=strategy,
            max_epochs=1,
            gradient_clip_val=1.0,
            barebones=True,
            default_root_dir=folder,
        )
        trainer.fit(module, DataLoader(data, args.batch_size))


def worker(args: argparse.Namespace) -> None:
    """Runs every contestant in turn, repeatedly, on one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gpt, split, world = character_gpt(), split_gpt(), dist.get_world_size()
    runs: dict[str, tuple[int, Callable[[Windows], None]]] = {
        "ddp by hand": (world, lambda data: by_hand(gpt, args, data, ddp)),
        "ddp leyden": (world, lambda data: leyden(gpt, args, data, "ddp")),
        "fsdp by hand": (world, lambda data: by_hand(gpt, args, data, fsdp)),
        "fsdp leyden": (world, lambda data: leyden(gpt, args, data, "fsdp")),
    }
    if world % 2 == 0:
        from leyden.strategies import MeshStrategy

        runs |= {
            "tp by hand": (world // 2, lambda data: by_hand(split, args, data, tensor_parallel)),
            "tp leyden": (world // 2, lambda data: leyden(split, args, data, MeshStrategy(tp=2, plan=PLAN))),
        }
    if world == 2:
        stages = {"pp": 2, "microbatches": MICRO_BATCHES}
        runs |= {
            "pp by hand": (1, lambda data: train_by_hand(build(gpt, args), DataLoader(data, args.batch_size))),
            "pp leyden": (1, lambda data: leyden(gpt, args, data, MeshStrategy(**stages))),
        }
    runs = {name: run for name, run in runs.items() if args.only in (None, name.split()[0])}
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, int] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(args.repeats):
            for name, (readers, run) in runs.items():
                data = Windows(args, readers)
                run(data)
                speeds[name].append(data.steps_per_second)
        for name, (readers, run) in runs.items():
            with Peak() as peak:
                run(Windows(args, readers))
            peaks[name] = peak.most
    if dist.get_rank() == 0:
        for name, values in speeds.items():
            base = name.split()[0] + " by hand"
            ratio = statistics.median(value / other for value, other in zip(values, speeds[base], strict=True))
            print(
                f"{name:<14} {statistics.median(values):8.2f} steps/s   × {ratio:.3f}   "
                f"peak {peaks[name] / 2**20:7.2f} MiB   × {peaks[name] / peaks[base]:.3f}"
            )
    dist.destroy_process_group()


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
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    raise SystemExit(subprocess.run([*start, *sys.argv, "--worker"], env=environment).returncode)


if __name__ == "__main__":
    main()
