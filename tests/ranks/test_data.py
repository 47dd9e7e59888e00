"""Training on ranks: one global order, each sample exactly once, and the weights of one process with the batch multiplied."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule

SAMPLES = 103


class Regression(TrainModule):
    """A small network in float64; remembers the indices of the samples that it was trained on, epoch by epoch."""

    def __init__(self, optimizer: str = "sgd", items: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.optimizer, self.items = optimizer, items
        self.seen: list[list[int]] = []
        self.ends: list[tuple[int, int]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def loss(self, batch: list[Tensor]) -> Any:
        index, x, y = batch
        self.seen[-1] += index.tolist()
        error = (self.net(x).squeeze(-1) - y) ** 2
        return {"loss": error.sum(), "num_items": len(index)} if self.items else error.mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append((batch_idx, len(batch[0])))

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.02)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def samples(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(count), x, x.sum(1).sin())


def fitted(module: TrainModule, loader: Any, strategy: str, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {"max_epochs": 2, "precision": "64-true", "logger": False, "accelerator": "cpu"}
    settings |= {"enable_checkpointing": False, "enable_progress_bar": False, "barebones": True}
    trainer = Trainer(strategy=strategy, **(settings | arguments))
    trainer.fit(module, loader)
    return trainer


@contextmanager
def one_group() -> Iterator[None]:
    """One process group for many fits: to join and leave one takes longer than they do."""
    dist.init_process_group("gloo")
    yield
    gc.collect()
    dist.destroy_process_group()


def weights(module: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()  # type: ignore[no-any-return]


# one process with the batch multiplied -------------------------------------------------------------------------------
CASES: list[dict[str, Any]] = [
    {"batch_size": 8, "shuffle": True},
    {"batch_size": 8, "shuffle": True, "optimizer": "adamw", "accumulate_grad_batches": 3},
    {"batch_size": 5, "shuffle": False, "accumulate_grad_batches": 3, "max_epochs": 1},
    {"batch_size": 17, "shuffle": True, "drop_last": True, "optimizer": "adamw"},
    # 103 = 17 · 6 + 1 = 8 · 12 + 7 = 4 · 25 + 3: on four ranks a rank or three have nothing at the end.
    {"batch_size": 1, "shuffle": True, "max_epochs": 1, "samples": 23},
    {"batch_size": 1, "shuffle": True, "max_epochs": 1, "samples": 25, "items": True, "accumulate_grad_batches": 2},
    {"batch_size": 17, "shuffle": True, "items": True},
    {"batch_size": 17, "shuffle": True, "items": True, "accumulate_grad_batches": 3, "optimizer": "adamw"},
    {"batch_size": 25, "shuffle": True, "gradient_clip_val": 0.05},
    {"batch_size": 25, "shuffle": True, "num_workers": 2, "persistent_workers": True},
]


def trained(case: dict[str, Any], factor: int, strategy: str) -> tuple[list[float], list[list[int]], tuple[int, ...]]:
    loading = {"batch_size", "shuffle", "drop_last", "num_workers", "persistent_workers"}
    arguments = {name: value for name, value in case.items() if name not in loading | {"optimizer", "items", "samples"}}
    module = Regression(case.get("optimizer", "sgd"), case.get("items", False))
    options = {name: value for name, value in case.items() if name in loading} | {
        "batch_size": case["batch_size"] * factor
    }
    torch.manual_seed(5)
    trainer = fitted(module, DataLoader(samples(case.get("samples", SAMPLES)), **options), strategy, **arguments)
    progress = trainer.progress
    counters = (progress.epoch, progress.batch, progress.batches, progress.global_step, int(torch.randint(2**31, ())))
    return weights(module), module.seen, counters


def train_all(cases: list[dict[str, Any]]) -> list[tuple[list[float], list[list[int]], tuple[int, ...]]]:
    with one_group():
        return [trained(case, 1, "ddp") for case in cases]


@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_equal_one_process_with_the_batch_multiplied(ranks: int) -> None:
    results = run_world(ranks, train_all, CASES)
    for number, case in enumerate(CASES):
        expected, order, counters = trained(case, ranks, "auto")
        for rank in range(ranks):
            found, _, counted = results[rank][number]
            assert found == pytest.approx(expected, rel=0, abs=1e-9), (case, rank)
            # Each rank's own random numbers stand where those of one process do.
            assert counted == counters, (case, rank)
        for epoch in range(len(order)):
            seen = [index for rank in range(ranks) for index in results[rank][number][1][epoch]]
            assert Counter(seen) == Counter(order[epoch]), (case, epoch)
            assert case.get("drop_last") or sorted(seen) == list(range(case.get("samples", SAMPLES)))
