"""Measures a pipeline's bubble, the share of a step that ranks spend waiting, against its formula; and its memory.

    python benchmarks/bubble.py                                  # GPipe, 1F1B and Interleaved1F1B over 4 ranks
    python benchmarks/bubble.py --picture docs/pictures/1f1b.svg # also draws one step of 1F1B with 8 micro-batches

Runs real fits of a Trainer over gloo. Every block takes `--work` milliseconds forward and twice as long backward. It
sleeps for that time, as a host does while its accelerator computes, so ranks do not compete for this machine's cores. A
step lasts from the start of the first block to the end of the last block on any rank. The idle share is the part of the
step in which no block runs; the table shows the minimum over steps, since other work on the machine only adds to it.
"holds" is the largest number of micro-batches whose activations a rank holds. The peak is measured in fits without
sleeping: the largest number of bytes that the tensors of any rank held at one time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peak import Peak
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.strategies import MeshStrategy
from leyden.strategies.mesh.pipeline.schedule import Schedule

BLOCKS_PER_RANK = 2
ROWS, TOKENS, WIDTH = 4, 64, 128
WARM_UP = 2
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")
"""Those whose bubble has a formula."""


@dataclass(frozen=True, slots=True)
class Span:
    """The start and end of a block's run, in seconds of the machine's clock."""

    is_forward: bool
    start: float
    end: float


class Work(torch.autograd.Function):
    """Sleeps for some time in forward and twice as long in backward, and records both spans."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, spans: list[Span]) -> Tensor:
        ctx.seconds, ctx.spans = seconds, spans
        spans.append(slept(True, seconds))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.spans.append(slept(False, 2 * ctx.seconds))
        return grad, None, None


def slept(is_forward: bool, seconds: float) -> Span:
    start = time.monotonic()
    time.sleep(seconds)
    return Span(is_forward, start, time.monotonic())


class Block(nn.Module):
    def __init__(self, seconds: float, spans: list[Span]) -> None:
        super().__init__()
        self.seconds, self.spans = seconds, spans
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return Work.apply(x, self.seconds, self.spans)  # type: ignore[no-any-return, no-untyped-call]


class Stack(TrainModule):
    """Blocks of equal work."""

    def __init__(self, blocks: int, seconds: float) -> None:
        super().__init__()
        self.spans: list[Span] = []
        self.steps: list[list[Span]] = []
        self.blocks = nn.Sequential(*(Block(seconds, self.spans) for _ in range(blocks)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.blocks(batch[0]).square().mean()  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(list(self.spans))
        self.spans.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(schedule: str, micro_batches: int, steps: int, seconds: float) -> list[list[Span]]:
    """Trains, and returns the spans of this rank's blocks in each step after the warm-up."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    module = Stack(BLOCKS_PER_RANK * ranks, seconds)
    data = TensorDataset(torch.randn(ROWS * micro_batches * (WARM_UP + steps), TOKENS, WIDTH))
    strategy = MeshStrategy(pp=ranks, schedule=schedule, microbatches=micro_batches)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, barebones=True, default_root_dir=folder)
        trainer.fit(module, DataLoader(data, ROWS * micro_batches))
    return module.steps[WARM_UP:]


# figures from spans ---------------------------------------------------------------------------------------------------
def idle_share(ranks: list[list[Span]]) -> float:
    """Returns the share of one step in which no block runs, over all ranks."""
    spans = [span for rank in ranks for span in rank]
    length = max(span.end for span in spans) - min(span.start for span in spans)
    return 1 - sum(span.end - span.start for span in spans) / (length * len(ranks))


def held(rank: list[Span]) -> float:
    """Returns the largest number of micro-batches whose activations a rank holds at one time."""
    changes = sorted((span.start if span.is_forward else span.end, 1 if span.is_forward else -1) for span in rank)
    return max(itertools.accumulate(change for _, change in changes)) / BLOCKS_PER_RANK


# the picture ----------------------------------------------------------------------------------------------------------
WIDE, HIGH, LEFT = 612, 38, 72
COLORS = {True: "#8ecae6", False: "#ffc44d"}
FRAME = 'stroke="#334155" stroke-width="0.7"'


def picture(ranks: list[list[Span]]) -> str:
    """One step as an SVG: a row for each rank, a box for each pass of a micro-batch through its blocks."""
    begin = min(span.start for rank in ranks for span in rank)
    scale = WIDE / (max(span.end for rank in ranks for span in rank) - begin)
    width, height = LEFT + WIDE + 16, HIGH * len(ranks) + 56
    # A ground of its own: the picture looks the same on light and dark pages.
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="13" fill="#0f172a">',
        f'<rect width="{width}" height="{height}" rx="10" fill="#f8fafc"/>',
    ]
    for place, rank in enumerate(ranks):
        top = 14 + place * HIGH
        lines.append(f'<text x="14" y="{top + 20}">stage {place}</text>')
        lines.append(f'<rect x="{LEFT}" y="{top}" width="{WIDE}" height="{HIGH - 8}" fill="#e2e8f0"/>')
        for number, span in passes(rank):
            x, wide = LEFT + (span.start - begin) * scale, (span.end - span.start) * scale
            lines.append(
                f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{HIGH - 8}" fill="{COLORS[span.is_forward]}" '
                f'{FRAME}/><text x="{x + wide / 2:.1f}" y="{top + 20}" text-anchor="middle">{number}</text>'
            )
    legend = [(COLORS[True], "forward"), (COLORS[False], "backward"), ("#e2e8f0", "the stage waits")]
    x, y = LEFT, height - 32
    for color, name in legend:
        lines.append(
            f'<rect x="{x}" y="{y}" width="16" height="16" fill="{color}" {FRAME}/>'
            f'<text x="{x + 22}" y="{y + 13}">{name}</text>'
        )
        x += 116
    lines.append(f'<text x="{width - 16}" y="{y + 13}" text-anchor="end">time →</text>')
    return "\n".join([*lines, "</svg>", ""])


def passes(rank: list[Span]) -> Iterator[tuple[int, Span]]:
    """The passes of micro-batches through all blocks of a rank with one stage, each with its micro-batch's number."""
    for is_forward in (True, False):
        spans = sorted((span for span in rank if span.is_forward is is_forward), key=lambda span: span.start)
        for number in range(len(spans) // BLOCKS_PER_RANK):
            own = spans[number * BLOCKS_PER_RANK : (number + 1) * BLOCKS_PER_RANK]
            yield number, Span(is_forward, own[0].start, own[-1].end)


# the runs -------------------------------------------------------------------------------------------------------------
def worker(args: argparse.Namespace) -> None:
    """Runs every schedule on one rank; rank 0 prints."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, seconds = dist.get_world_size(), args.work / 1000
    if dist.get_rank() == 0:
        print(f"{'schedule':<16} {'micro-batches':>13} {'formula':>8} {'measured':>9} {'holds':>6} {'peak':>10}")
    for schedule in args.schedules.split(","):
        for count in map(int, args.micro_batches.split(",")):
            steps = gathered(fit(schedule, count, args.steps, seconds))
            with Peak() as peak:
                fit(schedule, count, 1, 0.0)
            most = max(gathered(peak.most))
            if dist.get_rank() == 0:
                by_step = [list(step) for step in zip(*steps, strict=True)]
                share = min(map(idle_share, by_step))
                most_held = max(held(rank) for rank in by_step[-1])
                print(
                    f"{schedule:<16} {count:>13} {Schedule(schedule, count, ranks).bubble:>8.3f} {share:>9.3f} "
                    f"{most_held:>6.1f} {most / 2**20:>6.1f} MiB",
                    flush=True,
                )
    if args.picture:
        steps = gathered(fit("1F1B", 8, args.steps, seconds))
        if dist.get_rank() == 0:
            by_step = [list(step) for step in zip(*steps, strict=True)]
            # The step that other work on this machine has disturbed least.
            Path(args.picture).write_text(picture(min(by_step, key=idle_share)), encoding="utf-8")
    dist.destroy_process_group()


def gathered(own: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--schedules", default="GPipe,1F1B,Interleaved1F1B", help=f"any of {', '.join(SCHEDULES)}")
    parser.add_argument("--micro-batches", default="4,8,16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--work", type=float, default=15.0, help="milliseconds of a block's forward")
    parser.add_argument("--picture", help="an SVG file to write")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    raise SystemExit(subprocess.run([*start, *sys.argv, "--worker"], env=environment).returncode)


if __name__ == "__main__":
    main()
