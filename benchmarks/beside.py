"""What benchmarks beside hand-written loops share: their ranks, their clock, and rounds of all contestants."""

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from peak import Peak
from torch.utils.data import DataLoader, Dataset

from leyden import Trainer, TrainModule


class Timed(Dataset[Any]):
    """Serves the same samples again and again; reads the clock when a rank's loader asks for a new batch.

    Args:
        samples: the samples.
        steps: measured steps.
        batch_size: samples of a batch.
        readers: ranks that read different samples.
        warm_up: steps before the measured ones.
    """

    def __init__(
        self, samples: Sequence[Any], steps: int, batch_size: int = 1, readers: int = 1, warm_up: int = 5
    ) -> None:
        self.samples, self.steps, self.batch_size = samples, steps, batch_size
        self.readers, self.warm_up = readers, warm_up
        self.served, self.times, self.processor_times = 0, list[float](), list[float]()

    def __len__(self) -> int:
        return (self.warm_up + self.steps + 1) * self.batch_size * self.readers

    def __getitem__(self, index: int) -> Any:
        if self.served % self.batch_size == 0:
            self.times.append(time.perf_counter())
            self.processor_times.append(time.process_time())
        self.served += 1
        return self.samples[index % len(self.samples)]

    @property
    def steps_per_second(self) -> float:
        return self.steps / (self.times[self.warm_up + self.steps] - self.times[self.warm_up])

    @property
    def processor_seconds(self) -> float:
        """This rank's processor time, which other work on the machine changes less."""
        return self.processor_times[self.warm_up + self.steps] - self.processor_times[self.warm_up]


Run = Callable[[Timed], None]


def leyden(module: TrainModule, data: Timed, strategy: Any) -> None:
    """Trains with a Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            strategy=strategy,
            max_epochs=1,
            gradient_clip_val=1.0,
            barebones=True,
            default_root_dir=folder,
        )
        trainer.fit(module, DataLoader(data, data.batch_size))


def rounds(runs: Mapping[str, Run], make: Callable[[str], Timed], repeats: int) -> dict[str, list[Timed]]:
    """Runs every contestant in turn, repeatedly. Returns their data, with the times of each round.

    Args:
        runs: contestants by name.
        make: returns the data of a contestant.
        repeats: rounds.
    """
    found: dict[str, list[Timed]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            data = make(name)
            with contextlib.redirect_stdout(io.StringIO()):
                run(data)
            found[name].append(data)
    return found


def peak_of(run: Run, data: Timed) -> int:
    """Returns the largest number of bytes that this rank's tensors held at one time."""
    with contextlib.redirect_stdout(io.StringIO()), Peak() as peak:
        run(data)
    return peak.most


def row(name: str, found: Mapping[str, list[Timed]], peaks: Mapping[str, int]) -> str:
    """Returns a line of figures: of "x leyden", also beside those of "x by hand"."""
    base = f"{name.split()[0]} by hand"
    text = f"{name:<16} peak {peaks[name] / 2**20:8.2f} MiB   × {peaks[name] / peaks[base]:.3f}"
    if found[name]:
        pairs = list(zip(found[name], found[base], strict=True))
        speeds = sorted(own.steps_per_second / other.steps_per_second for own, other in pairs)
        work = statistics.median(own.processor_seconds / other.processor_seconds for own, other in pairs)
        text += f"   {statistics.median(own.steps_per_second for own, _ in pairs):8.2f} steps/s"
        text += f"   × {statistics.median(speeds):.3f} ({speeds[0]:.3f} to {speeds[-1]:.3f})   processor × {work:.3f}"
    return text


def on_ranks(parser: argparse.ArgumentParser, worker: Callable[[argparse.Namespace], None]) -> None:
    """Starts the ranks, with one thread each, and calls `worker` with the arguments on each of them."""
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.worker:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        raise SystemExit(subprocess.run([*start, *sys.argv, "--worker"], env=environment).returncode)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # The ranks of a tp or cp group need the same samples.
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    worker(args)
    dist.destroy_process_group()
