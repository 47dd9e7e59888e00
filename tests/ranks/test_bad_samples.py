"""on_bad_sample="skip" on two ranks: the weights of one process with batches twice as large, and no rank waits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from models import QUIET, Squares, finish_step, sgd_with_momentum
from ranks.world import run_world
from samples import Broken
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.strategies import MeshStrategy

CASES: list[tuple[set[int], dict[str, Any]]] = [
    ({2, 9, 15}, {}),
    # No good sample on rank 1; on any rank; in the first batch of a window; in its last batch.
    ({4, 5, 6, 7, 9}, {}),
    (set(range(8, 16)), {}),
    (set(range(8)), {"accumulate_grad_batches": 2}),
    (set(range(8, 16)) | {17}, {"accumulate_grad_batches": 2}),
]
MANUAL: tuple[set[int], dict[str, Any]] = (set(range(12)) | {17}, {})


class Module(Squares):
    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), sgd_with_momentum)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        finish_step(self, self.loss(batch))


def trained(bad: set[int], size: int, kind: type[Module] = Module, **arguments: Any) -> tuple[list[Any], list[int]]:
    module = kind()
    settings = {**QUIET, "max_epochs": 2, "precision": "64-true", "on_bad_sample": "skip", **arguments}
    trainer = Trainer(**settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(Broken(bad, 29, dtype=torch.float64), size))
    progress = trainer.progress
    counts = [progress.samples, progress.bad_samples, progress.global_step, progress.stepped, progress.batches]
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return [weight.tolist() for weight in weights], counts


def on_ranks(strategy: str) -> list[Any]:
    found = [trained(bad, 4, strategy=strategy, **arguments) for bad, arguments in CASES]
    found.append(trained(MANUAL[0], 4, Manual, strategy=strategy))
    return found


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_two_ranks_train_like_one_process_on_the_good_samples(strategy: str) -> None:
    alone = [trained(bad, 8, **arguments) for bad, arguments in CASES] + [trained(MANUAL[0], 8, Manual)]
    for found in run_world(2, on_ranks, strategy):
        for (weights, counts), (expected, expected_counts) in zip(found, alone, strict=True):
            assert counts == expected_counts
            for weight, other in zip(weights, expected, strict=True):
                torch.testing.assert_close(tensor64(weight), tensor64(other), rtol=1e-9, atol=1e-12)


def tensor64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def fit_unsupported(own_loaders: bool) -> None:
    if own_loaders:
        trained({1}, 4, strategy="ddp", use_distributed_sampler=False)
    trained({1}, 4, strategy=MeshStrategy(tp=2, plan={"net.0": "colwise", "net.2": "rowwise"}))


@pytest.mark.parametrize(
    ("own_loaders", "match"),
    [(False, "in which several ranks load the same samples"), (True, "not work with use_distributed_sampler=False on")],
    ids=["shared samples", "own loaders"],
)
def test_skipping_raises_if_ranks_could_get_different_batches(own_loaders: bool, match: str) -> None:
    found = run_world(2, fit_unsupported, own_loaders, may_fail=True)
    assert any(match in str(error) for error in found), found
