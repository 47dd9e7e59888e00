"""Measures steps per second on several ranks: DDP and FSDP, hand-written and by Leyden, in one interleaved run.

    python benchmarks/ranks.py --ranks 2 --repeats 7 --steps 30

A small character GPT (examples/lm.py), AdamW, clipping by norm, CPU, gloo, one thread per rank. All contestants
run in the same processes and process group, one after the other in each round. The clock is read when the data set
returns batch `warm-up` and batch `warm-up + steps`. The table shows the median steps per second of each, and the
median over the rounds of Leyden's divided by the script's.
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
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ALPHABET = "".join(map(chr, range(60)))
WARM_UP = 5
TAIL = 2


class Windows(Dataset[Tensor]):
    """Windows of random characters; records when the first and the last window of the measurement are read."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.size, self.length, self.steps = args.batch_size, args.length, args.steps
        self.ids = torch.randint(len(ALPHABET), (self.length + 1,))
        self.served, self.start, self.end = 0, 0.0, 0.0

    def __len__(self) -> int:
        return (WARM_UP + self.steps + TAIL) * self.size * dist.get_world_size()

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
    """Runs the loop that a user would write."""
    module = build(gpt, args)
    model = wrap(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=module.lr)
    for batch in DataLoader(data, args.batch_size, sampler=DistributedSampler(data, shuffle=False)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def fsdp(module: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in module.blocks:
        fully_shard(block)
    return fully_shard(module)  # type: ignore[return-value]


def leyden(gpt: Any, args: argparse.Namespace, data: Windows, strategy: str) -> None:
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
    gpt = character_gpt()
    runs: dict[str, Callable[[Windows], None]] = {
        "ddp by hand": lambda data: by_hand(gpt, args, data, ddp),
        "ddp leyden": lambda data: leyden(gpt, args, data, "ddp"),
        "fsdp by hand": lambda data: by_hand(gpt, args, data, fsdp),
        "fsdp leyden": lambda data: leyden(gpt, args, data, "fsdp"),
    }
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            data = Windows(args)
            with contextlib.redirect_stdout(io.StringIO()):
                run(data)
            speeds[name].append(data.steps_per_second)
    if dist.get_rank() == 0:
        for name, values in speeds.items():
            base = speeds[name.split()[0] + " by hand"]
            ratio = statistics.median(value / other for value, other in zip(values, base, strict=True))
            print(f"{name:<14} {statistics.median(values):8.2f} steps/s   × {ratio:.3f}")
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
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    raise SystemExit(subprocess.run([*start, *sys.argv, "--worker"], env=environment).returncode)


if __name__ == "__main__":
    main()
