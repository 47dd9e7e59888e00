"""Training on ranks: one global order, each sample exactly once, the weights of one process with a larger batch."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import QUIET
from ranks.world import run_world
from samples import Unsized
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from leyden import Trainer, TrainModule
from leyden.strategies.ddp import DDPStrategy

SAMPLES = 103


class Regression(TrainModule):
    """A small network in float64; records the indices of the samples that it trains on, by epoch."""

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


def fitted(module: TrainModule, loader: Any, strategy: Any, **arguments: Any) -> Trainer:
    settings = {**QUIET, "max_epochs": 2, "precision": "64-true", "barebones": True}
    trainer = Trainer(strategy=strategy, **{**settings, **arguments})
    trainer.fit(module, loader)
    return trainer


@contextmanager
def one_group() -> Iterator[None]:
    """Shares one process group among many fits, since joining and leaving one takes longer than a fit."""
    dist.init_process_group("gloo")
    yield
    gc.collect()
    dist.destroy_process_group()


def weights(module: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()  # type: ignore[no-any-return]


# one process with a larger batch --------------------------------------------------------------------------------------
CASES: list[dict[str, Any]] = [
    {"batch_size": 8, "shuffle": True},
    {"batch_size": 8, "shuffle": True, "optimizer": "adamw", "accumulate_grad_batches": 3},
    {"batch_size": 5, "shuffle": False, "accumulate_grad_batches": 3, "max_epochs": 1},
    {"batch_size": 17, "shuffle": True, "drop_last": True, "optimizer": "adamw"},
    # 103 = 17 · 6 + 1 = 8 · 12 + 7 = 4 · 25 + 3: on four ranks, one or three have no sample in the last batch.
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
    counters = (progress.epoch, progress.batch, progress.batches, progress.samples, progress.global_step)
    counters = (*counters, int(torch.randint(2**31, ())))
    return weights(module), module.seen, counters


def train_all(cases: list[dict[str, Any]]) -> list[tuple[list[float], list[list[int]], tuple[int, ...]]]:
    with one_group():
        return [trained(case, 1, "ddp") for case in cases]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_weights_match_one_process_with_a_larger_batch(ranks: int) -> None:
    results = run_world(ranks, train_all, CASES)
    for number, case in enumerate(CASES):
        expected, order, counters = trained(case, ranks, "auto")
        for rank in range(ranks):
            found, _, counted = results[rank][number]
            assert found == pytest.approx(expected, rel=0, abs=1e-9), (case, rank)
            # Each rank's random generator is in the state of that of one process.
            assert counted == counters, (case, rank)
        for epoch in range(len(order)):
            seen = [index for rank in range(ranks) for index in results[rank][number][1][epoch]]
            assert Counter(seen) == Counter(order[epoch]), (case, epoch)
            assert case.get("drop_last") or sorted(seen) == list(range(case.get("samples", SAMPLES)))


# loaders of every kind ------------------------------------------------------------------------------------------------
class Streamed(IterableDataset[Any]):
    """The samples in order; several workers take turns with whole batches of eight."""

    def __init__(self) -> None:
        self.data = samples()

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.data[index] for index in range(SAMPLES) if index // 8 % count == number)


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


def in_batches() -> list[Any]:
    return list(DataLoader(samples(), 8))


def own_share(sized: bool) -> Any:
    """Returns this rank's share of data sharded by hand: every n-th batch, so some ranks have one more."""
    share = in_batches()[dist.get_rank() :: dist.get_world_size()]
    return share if sized else Unsized(share)


LOADERS: dict[str, Any] = {
    "iterable dataset": lambda: DataLoader(Streamed(), 8),
    "in two workers": lambda: DataLoader(Streamed(), 8, num_workers=2, multiprocessing_context="fork"),
    "list": in_batches,
    "generator": lambda: Unsized(in_batches()),
    "own batch sampler": lambda: DataLoader(
        samples(), batch_sampler=list(BatchSampler(SequentialSampler(range(SAMPLES)), 8, False))
    ),
    "own batch sampler, persistent workers": lambda: DataLoader(
        samples(),
        batch_sampler=BatchSampler(SequentialSampler(range(SAMPLES)), 8, False),
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    ),
    "own __iter__": lambda: OwnIteration(samples(), 8),
    "own shares": lambda: own_share(True),
    "own shares, unsized": lambda: own_share(False),
}


def train_on_every_kind() -> dict[str, Any]:
    found = {}
    with one_group():
        for name, make in LOADERS.items():
            module = Regression()
            torch.manual_seed(5)
            own = name.startswith("own shares")
            trainer = fitted(module, make(), "ddp", max_epochs=1, use_distributed_sampler=not own)
            found[name] = weights(module), module.seen[0], trainer.progress.batch, trainer.progress.samples
        torch.manual_seed(5)
        module = Regression()
        sampler = DistributedSampler(samples(), shuffle=False)
        trainer = fitted(module, DataLoader(samples(), 8, sampler=sampler), "ddp", max_epochs=1)
        found["DistributedSampler"] = module.seen[0], trainer.progress.samples
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_any_loader_yields_each_sample_once_and_trains_like_one_process(ranks: int) -> None:
    results = run_world(ranks, train_on_every_kind)
    module = Regression()
    fitted(module, DataLoader(samples(), 8 * ranks), "auto", max_epochs=1)
    expected = weights(module)
    for name in LOADERS:
        seen = [index for rank in range(ranks) for index in results[rank][name][1]]
        assert sorted(seen) == list(range(SAMPLES)), name
        for rank in range(ranks):
            found, _, batches, count = results[rank][name]
            assert count == SAMPLES, (name, rank)
            assert found == pytest.approx(expected, rel=0, abs=1e-9), (name, rank)
            assert batches == -(-SAMPLES // (8 * ranks)), (name, rank)
    # A user's own DistributedSampler is kept: it repeats samples to make the ranks even.
    own = [index for rank in range(ranks) for index in results[rank]["DistributedSampler"][0]]
    assert set(own) == set(range(SAMPLES)) and len(own) == 104
    assert {results[rank]["DistributedSampler"][1] for rank in range(ranks)} == {104}


# steps in which a rank has no sample ----------------------------------------------------------------------------------
class TwoHeads(Regression):
    """Uses one of two heads in each batch, so that DDP must find out which."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 1).double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        index, x, y = batch
        self.seen[-1] += index.tolist()
        head = self.net if batch_idx < 1 else self.other
        return ((head(x).squeeze(-1) - y) ** 2).mean()


def skip_with_unused_parameters() -> Any:
    with one_group():
        module = TwoHeads()
        torch.manual_seed(5)
        strategy = DDPStrategy(find_unused_parameters=True)
        trainer = fitted(module, DataLoader(samples(21), 2, shuffle=True), strategy, max_epochs=2)
        return weights(module), trainer.global_step


def test_a_rank_without_samples_uses_the_same_parameters_as_the_others() -> None:
    results = run_world(4, skip_with_unused_parameters)
    module = TwoHeads()
    torch.manual_seed(5)
    trainer = fitted(module, DataLoader(samples(21), 8, shuffle=True), "auto", max_epochs=2)
    for found, steps in results:
        assert found == pytest.approx(weights(module), rel=0, abs=1e-9)
        assert steps == trainer.global_step
