"""Measures how long a save stalls training: Leyden, torch.save, DCP's async_save and Lightning's plugin.

    python benchmarks/stalls.py --megabytes 200 --rounds 5 --folder /somewhere/on/a/disk

The stall of a save is the time of the next 20 steps, including the call of the save, minus the time of the 20 steps
before it. A step computes for `--step` seconds on one thread, so it takes at least as long as a copy; its weights and
AdamW's state have the given size. Contestants take turns in rounds. The first round warms up and allocates the buffers
for copies; it does not count. Before each measurement, the disk is flushed and the previous one's files are deleted.
The table shows medians: milliseconds, and the ratio to Leyden's synchronous save in the same round. Contestants whose
package is not installed are skipped. Measure on a quiet machine, since other work slows steps by more than a stall.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from character_gpt import now
from torch import Tensor, nn
from torch.optim import AdamW

from leyden import Trainer, TrainModule
from leyden.callbacks import Callback

STEPS = 20
WIDTH = 1024


def layers(megabytes: float) -> nn.Sequential:
    """A module whose weights and AdamW state together have the given size."""
    count = max(1, round(megabytes * 1e6 / (12 * WIDTH * WIDTH)))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


class Work:
    """Computes for a given time, in addition to the layers' own forward pass."""

    def __init__(self, seconds: float) -> None:
        self.matrix = torch.randn(256, 256)
        began, self.turns = time.perf_counter(), 0
        while time.perf_counter() - began < 0.5:
            self.matrix @ self.matrix
            self.turns += 1
        self.turns = int(self.turns * seconds / 0.5)

    def __call__(self) -> None:
        for _ in range(self.turns):
            self.matrix @ self.matrix


class Steps:
    """Times steps, and starts the saves between them.

    Args:
        saves: functions that start a save, and return a function that waits for its end.
        folder: where they save.
        rounds: the number of rounds that count.
        steps: the number of steps that a save may delay, and of steps before it.
    """

    def __init__(
        self, saves: dict[str, Callable[[Path], Callable[[], Any]]], folder: Path, rounds: int, steps: int = STEPS
    ) -> None:
        self.names, self.saves, self.folder, self.rounds, self.steps = list(saves), saves, folder, rounds, steps
        self.stalls: dict[str, list[float]] = {name: [] for name in saves}
        self.count = 0
        self.wait: Callable[[], Any] | None = None
        self.began = self.without = 0.0
        self.path = folder / "none"

    @property
    def total(self) -> int:
        """The number of steps in all rounds; half of them are the steps before each save."""
        return (self.rounds + 1) * len(self.names) * 2 * self.steps

    def begin(self) -> None:
        """Called before the first step."""
        self.began = now()

    def end_step(self) -> None:
        """Called after each step: starts a save, or ends its measurement."""
        self.count += 1
        place, turn = self.count % (2 * self.steps), (self.count - 1) // (2 * self.steps)
        if place == self.steps:
            self.without = now() - self.began
            name = self.names[turn % len(self.names)]
            self.path = self.folder / f"{name.replace(' ', '-')}-{turn}"
            self.began = now()
            self.wait = self.saves[name](self.path)
        elif place == 0:
            stall = now() - self.began - self.without
            assert self.wait is not None
            self.wait()
            if turn >= len(self.names):
                self.stalls[self.names[turn % len(self.names)]].append(stall)
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.sync()
            self.began = now()

    def report(self) -> None:
        base = self.stalls["leyden, synchronous"]
        for name, stalls in self.stalls.items():
            ratio = statistics.median(stall / other for stall, other in zip(stalls, base, strict=True))
            print(f"{name:<28} {1000 * statistics.median(stalls):8.0f} ms   {ratio:6.3f}", flush=True)


class Net(TrainModule):
    def __init__(self, megabytes: float, seconds: float) -> None:
        super().__init__()
        self.net, self.work = layers(megabytes), Work(seconds)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.work()
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> AdamW:
        return AdamW(self.parameters(), lr=1e-4)


class Measuring(Callback):
    order = 300

    def __init__(self, make: Callable[[Trainer, TrainModule], Steps]) -> None:
        self.make = make
        self.steps: Steps | None = None

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.steps = self.make(trainer, module)
        self.steps.begin()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.steps is not None
        self.steps.end_step()
        if self.steps.count == self.steps.total:
            trainer.should_stop = True


def contestants(trainer: Any, module: Any, only: list[str] | None) -> dict[str, Callable[[Path], Callable[[], Any]]]:
    """Returns the saves that can be measured with the installed packages."""

    def synchronous(path: Path) -> Callable[[], Any]:
        trainer.save_checkpoint(path, asynchronous=False)
        return lambda: None

    def asynchronous(path: Path) -> Callable[[], Any]:
        trainer.save_checkpoint(path, asynchronous=True)
        return trainer.finish_saving

    def torch_save(path: Path) -> Callable[[], Any]:
        torch.save({"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}, path)
        return lambda: None

    def dcp(path: Path) -> Callable[[], Any]:
        import torch.distributed.checkpoint as distributed
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(module, trainer.optimizers[0])
        future: Any = distributed.async_save({"model": weights, "optimizer": moments}, checkpoint_id=path, no_dist=True)
        return lambda: future.result()

    found: dict[str, Callable[[Path], Callable[[], Any]]] = {
        "leyden, synchronous": synchronous,
        "leyden, asynchronous": asynchronous,
        "torch.save": torch_save,
        "DCP async_save": dcp,
    }
    if importlib.util.find_spec("lightning") is not None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        def lightning(path: Path) -> Callable[[], Any]:
            # The plugin's work in Trainer.save_checkpoint: it clones all tensors, then runs torch.save in a thread.
            plugin = AsyncCheckpointIO(TorchCheckpointIO())
            plugin.save_checkpoint(
                {"state_dict": module.state_dict(), "optimizer_states": [trainer.optimizers[0].state_dict()]}, path
            )
            return plugin.teardown

        found["Lightning AsyncCheckpointIO"] = lightning
    return {name: save for name, save in found.items() if not only or name in only or name == "leyden, synchronous"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--step", type=float, default=0.1, help="seconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--folder", type=Path, help="where to write; choose the disk to measure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measuring = Measuring(lambda t, m: Steps(contestants(t, m, args.only), Path(folder), args.rounds))
        trainer = Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=measuring,
            max_epochs=1,
            default_root_dir=folder,
        )
        trainer.fit(Net(args.megabytes, args.step), [torch.randn(4, WIDTH)] * 1_000_000)
        assert measuring.steps is not None
        print(f"{args.megabytes:g} MB, {STEPS} steps of {1000 * args.step:g} ms and more")
        measuring.steps.report()


if __name__ == "__main__":
    main()
