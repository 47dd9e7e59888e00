"""Ranks that run out of batches first: streams and own loaders of different lengths, under every strategy."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import QUIET, finish_step
from ranks.world import run_world
from samples import Unsized
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from leyden import CombinedLoader, LeydenError, Trainer, TrainModule
from leyden.strategies.base import Strategy
from leyden.strategies.ddp import DDPStrategy
from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy
from leyden.strategies.fsdp.sharding import whole

SIZE = 3


class Net(TrainModule):
    """Records the samples that it trains on and validates on; counts backward passes and batches."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.register_buffer("passes", torch.zeros(()))
        self.automatic_optimization = not manual
        self.seen: list[int] = []
        self.evaluated: list[int] = []
        self.backwards = self.batches_done = 0

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        _, x = batch
        return (self.net(x) - x.sum(1, keepdim=True).sin()).square().mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.passes += 1
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return finish_step(self, loss)

    def on_before_backward(self, loss: Tensor) -> None:
        self.backwards += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += batch[0].tolist()
        self.batches_done += 1

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.evaluated += batch[0].tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def sample(number: int) -> tuple[int, Tensor]:
    return number, torch.randn(2, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def batches(sizes: list[int], first: int = 0) -> list[list[Tensor]]:
    found = []
    for size in sizes:
        numbers = list(range(first, first + size))
        found.append([torch.tensor(numbers), torch.stack([sample(number)[1] for number in numbers])])
        first += size
    return found


class Stream(IterableDataset[Any]):
    """Samples in order; several workers take turns with whole batches."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return (sample(index) for index in range(self.count) if index // SIZE % workers == number)


def strategy_of(name: str) -> Strategy | str:
    if name.startswith("fsdp"):
        return FSDPStrategy()
    return DDPStrategy(find_unused_parameters=True) if name == "unused" else "ddp"


def fitted(strategy: Any, manual: bool, train: Any, val: Any, **arguments: Any) -> dict[str, Any]:
    module = Net(manual)
    trainer = Trainer(
        strategy=strategy,
        precision="64-true",
        max_epochs=2,
        num_sanity_val_steps=0,
        **QUIET,
        **arguments,
    )
    trainer.fit(module, train, val)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    state = {name: whole(value.detach()).flatten().tolist() for name, value in module.net.state_dict().items()}
    progress = trainer.progress
    return {
        "weights": state,
        "metrics": metrics,
        "seen": module.seen,
        "evaluated": module.evaluated,
        "passes": int(module.passes),
        "idle_backwards": module.backwards - module.batches_done,
        "progress": (progress.batches, progress.samples, progress.global_step),
    }


# the sizes of each rank's own batches, or the length of a stream
OWN = {"training": ([3, 1], [3, 3, 3, 2]), "validation": ([2], [3, 3, 1])}
STREAM = {"training": 10, "validation": 4}
NAMES = ("ddp", "unused", "ddp, manual", "fsdp", "fsdp, manual")
CASES = [
    *((name, kind) for name in NAMES for kind in ("sized", "unsized", "stream")),
    ("fsdp", "workers"),
    ("ddp", "workers"),
]


def train_all() -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    rank, found = int(os.environ["RANK"]), []
    for name, kind in CASES:
        if kind in ("sized", "unsized"):
            loaders: list[Any] = [batches(sizes[rank], 100 * rank) for sizes in OWN.values()]
            if kind == "unsized":
                loaders = [Unsized(loader) for loader in loaders]
        else:
            workers = {"num_workers": 2, "multiprocessing_context": "fork"} if kind == "workers" else {}
            loaders = [DataLoader(Stream(count), SIZE, **workers) for count in STREAM.values()]
        own = kind in ("sized", "unsized")
        strategy = strategy_of(name)
        found.append(fitted(strategy, name.endswith("manual"), *loaders, use_distributed_sampler=not own))
    gc.collect()
    dist.destroy_process_group()
    return found


def global_loaders(kind: str) -> list[Any]:
    """Returns the global batches, as one process would read them."""
    if kind in ("sized", "unsized"):
        loaders = []
        for first, second in OWN.values():
            pairs = [batches(sizes, start) for sizes, start in ((first, 0), (second, 100))]
            steps = [[part[step] for part in pairs if step < len(part)] for step in range(max(map(len, pairs)))]
            loaders.append([[torch.cat(column) for column in zip(*step)] for step in steps])
        return loaders
    return [DataLoader(Stream(count), 2 * SIZE) for count in STREAM.values()]


def test_each_sample_counts_once_and_ranks_train_like_one_process() -> None:
    results = run_world(2, train_all)
    for number, (name, kind) in enumerate(CASES):
        expected = fitted("single_device", name.endswith("manual"), *global_loaders(kind))
        ranks = [own[number] for own in results]
        for key in ("seen", "evaluated"):
            assert sorted(ranks[0][key] + ranks[1][key]) == sorted(expected[key]), (name, kind, key)
        for rank, found in enumerate(ranks):
            assert found["progress"] == expected["progress"], (name, kind, rank)
            assert found["idle_backwards"] == 0, (name, kind, rank)
            # A batch run only for the other ranks leaves no trace in buffers; after a validation all are rank 0's.
            assert found["passes"] == len([*first_samples(ranks[0]["seen"], kind)]), (name, kind, rank)
            for parameter, values in expected["weights"].items():
                assert found["weights"][parameter] == pytest.approx(values, rel=0, abs=1e-9), (name, kind, rank)
            assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-9), (name, kind, rank)


def first_samples(seen: list[int], kind: str) -> Iterator[int]:
    """Returns the first sample of each batch that rank 0 saw."""
    if kind in ("sized", "unsized"):
        sizes = OWN["training"][0]
        starts = {sum(sizes[:place]) for place in range(len(sizes))}
    else:
        starts = set(range(0, STREAM["training"], SIZE))
    return (number for number in seen if number in starts)


# a rank without any batch ---------------------------------------------------------------------------------------------
def fit_with_an_empty_rank(name: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    loader = Unsized(batches([3, 3] if rank == 0 else [], 0))
    return fitted(strategy_of(name), False, loader, None, use_distributed_sampler=False)


def test_a_rank_without_batches_takes_part_under_ddp_and_raises_under_fsdp() -> None:
    expected = fitted("single_device", False, batches([3, 3]), None)
    for found in run_world(2, fit_with_an_empty_rank, "ddp"):
        assert found["progress"] == expected["progress"]
        for parameter, values in expected["weights"].items():
            assert found["weights"][parameter] == pytest.approx(values, rel=0, abs=1e-9)
    results = run_world(2, fit_with_an_empty_rank, "fsdp", timeout=60, may_fail=True)
    assert results[0] == 1 and "a rank has no sample of its own, and FSDP needs every rank" in results[1]


# implausible lengths --------------------------------------------------------------------------------------------------
def fit_with_lengths(first: int, second: int) -> list[str]:
    import warnings

    sizes = [2] * (second if os.environ["RANK"] == "1" else first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted("ddp", False, batches(sizes), None, use_distributed_sampler=False)
    return [str(warning.message) for warning in caught if "own loaders" in str(warning.message)]


@pytest.mark.parametrize(("first", "second"), [(2, 5), (3, 2)])
def test_very_different_lengths_warn_once(first: int, second: int) -> None:
    messages, other = run_world(2, fit_with_lengths, first, second)
    assert other == []
    assert len(messages) == (second - first > 1)
    assert all(text.startswith(f"the ranks' own loaders have {first}, {second} batches") for text in messages)


class Branches(TrainModule):
    """Two layers, each for the batches of one loader."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(2, 1) for name in "ab"})

    def training_step(self, batch: dict[str, Tensor | None], batch_idx: int) -> Any:
        return sum(self.layers[name](x).square().mean() for name, x in batch.items() if x is not None)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def train_branches(strategy: str, length: int) -> dict[str, list[float]]:
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    loaders = {"a": DataLoader(x, 1), "b": DataLoader(x[:length], 1)}  # type: ignore[arg-type]
    module = Branches()
    trainer = Trainer(**QUIET, strategy=strategy, devices=2, max_epochs=1)
    trainer.fit(module, CombinedLoader(loaders, "max_size"))
    return {name: tensor.tolist() for name, tensor in module.named_parameters()}


def train_without_a_branch(length: int) -> Any:
    found = train_branches("ddp_find_unused_parameters_true", length)
    try:
        train_branches("ddp", length)
    except (LeydenError, SystemExit) as error:
        return found, str(error)
    return found, "no error"


@pytest.mark.parametrize("length", [4, 5])
def test_a_branch_that_the_last_step_does_not_use_is_an_error_under_ddp(length: int) -> None:
    """In the last of three steps, the exhausted loader yields None: on both ranks, or on the second alone."""
    (first, error), (second, other) = run_world(2, train_without_a_branch, length, may_fail=True)
    assert first == second
    said = error + other
    assert "Some parameters did not contribute to the loss" in said and "ddp_find_unused_parameters_true" in said
    assert "no error" not in said
