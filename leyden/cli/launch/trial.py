"""The checks that `leyden test` runs on each rank: real fits of a small model, compared with a plain PyTorch loop."""

from __future__ import annotations

import contextlib
import io
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden.callbacks.lambda_callback import LambdaCallback
from leyden.core.errors import LeydenError
from leyden.trainer.launched import read_launched
from leyden.trainer.module import TrainModule
from leyden.trainer.trainer import Trainer

STEPS, PER_RANK, CLOSE = 6, 2, 1e-5


class Net(TrainModule):
    """Two layers, the same on every rank."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))
        self.losses: list[Tensor] = []
        self.found: dict[str, Any] = {}

    def parallel_plan(self) -> dict[str, str]:
        """What tensor parallelism splits."""
        return {"layers.0": "colwise", "layers.2": "rowwise"}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss: Tensor = nn.functional.mse_loss(self.layers(inputs).float(), targets)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_fit_start(self) -> None:
        """Runs each collective once and keeps the results."""
        strategy = self.trainer.strategy
        rank, one = strategy.ranks.global_rank, torch.ones(1, device=strategy.root_device)
        self.found["objects"] = strategy.ranks.all_gather_object({"rank": rank})
        self.found["sum"] = float(strategy.ranks.reduce(one * (rank + 1), reduction="sum"))
        self.found["broadcast"] = strategy.ranks.broadcast(f"from {rank}")
        strategy.ranks.barrier()

    def on_train_end(self) -> None:
        weights = self.trainer.strategy.full_state_dict(self, rank0_only=False)
        self.found["weights"] = {name: value.detach().float().cpu().clone() for name, value in weights.items()}


def samples(count: int) -> TensorDataset:
    """Returns random samples that are the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randn(count, 16, generator=generator))


def plain_loop(data: TensorDataset, batch_size: int) -> dict[str, Tensor]:
    """Trains the same model in one process, in a hand-written loop, and returns its weights."""
    net = Net().layers
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in DataLoader(data, batch_size=batch_size):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {f"layers.{name}": value.detach() for name, value in net.state_dict().items()}


def trained(net: Net, data: TensorDataset, batch_size: int, *, path: Any = None, **arguments: Any) -> Trainer:
    """Runs one fit without output."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    plain: dict[str, Any] = {"precision": "32-true", "accumulate_grad_batches": 1, "gradient_clip_val": None}
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(**{"max_epochs": 1, **quiet, **plain, **arguments})
        trainer.fit(net, DataLoader(data, batch_size=batch_size), ckpt_path=path)
    return trainer


def largest_gap(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in right)


def main(folder: str) -> None:
    """Runs all checks; the first one that fails ends the test with its name."""
    probe = Net()
    first = trained(probe, samples(1), 1, max_steps=1)
    ranks = first.world_size
    readers = first.strategy.data_size
    data = samples(STEPS * PER_RANK * readers)
    check_here = partial(check, speaks=first.is_global_zero)
    expected = [{"rank": rank} for rank in range(ranks)]
    total = ranks * (ranks + 1) / 2
    found = probe.found
    holds = found["objects"] == expected and found["sum"] == total and found["broadcast"] == "from 0"
    words = f"{ranks} rank{'s' * (ranks > 1)}, {first.strategy.name} on {first.strategy.root_device}"
    check_here("collectives", holds, words)
    plain, net = plain_loop(data, PER_RANK * readers), Net()
    trained(net, data, PER_RANK)
    gap = largest_gap(net.found["weights"], plain)
    check_here("parity", gap < CLOSE, f"weights differ from a plain loop's by {gap:.1e} at most after {STEPS} steps")
    slower = Net()
    trained(slower, data, PER_RANK // 2, accumulate_grad_batches=2)
    gap = largest_gap(slower.found["weights"], plain)
    check_here("accumulation", gap < CLOSE, f"half the batch, twice: {gap:.1e} at most")
    half = Path(folder) / "half"
    saver = LambdaCallback(on_train_batch_end=lambda trainer, *_: _save_at(trainer, half))
    trained(Net(), data, PER_RANK, max_steps=STEPS // 2, callbacks=saver)
    resumed = Net(seed=5)
    trained(resumed, data, PER_RANK, path=half)
    gap = largest_gap(resumed.found["weights"], net.found["weights"])
    check_here("resume", gap == 0.0, f"saved at step {STEPS // 2}, resumed, and the same weights at step {STEPS}")
    launched = read_launched()
    precision = launched.precision if launched is not None and launched.precision else "32-true"
    if precision != "32-true":
        lower = Net()
        trained(lower, data, PER_RANK, precision=precision)
        gap = largest_gap(lower.found["weights"], net.found["weights"])
        finite = bool(torch.stack(lower.losses).isfinite().all()) and gap < float("inf")
        check_here(
            "precision", finite, f"{precision}: finite losses, weights differ from 32-true's by {gap:.1e} at most"
        )


def _save_at(trainer: Any, path: Path) -> None:
    if trainer.global_step == STEPS // 2:
        trainer.save_checkpoint(path)


def check(name: str, holds: bool, words: str, speaks: bool = True) -> None:
    """Prints the result of a check if this rank speaks.

    Raises:
        LeydenError: if it does not hold.
    """
    if not holds:
        raise LeydenError(f"leyden test: {name} does not hold: {words}")
    if speaks:
        print(f"ok  {name:<13} {words}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
