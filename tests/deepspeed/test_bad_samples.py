"""on_bad_sample="skip" under DeepSpeed: the weights of one process with batches twice as large."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from models import QUIET, Squares, sgd_with_momentum
from ranks.world import run_world
from samples import Broken
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy

pytestmark = pytest.mark.timeout(300)
# No good samples on rank 1; in the batch that opens a window of three; in the one that closes it; in all three.
CASES: list[set[int]] = [{4, 5, 6, 7, 9}, set(range(8)), set(range(16, 24)) | {1}, set(range(24))]


class Module(Squares):
    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), sgd_with_momentum)


def trained(bad: set[int], size: int, **arguments: Any) -> tuple[list[Any], list[int]]:
    module = Module()
    settings = {**QUIET, "max_epochs": 2, "on_bad_sample": "skip", "accumulate_grad_batches": 3, **arguments}
    trainer = Trainer(**settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(Broken(bad, 48), size))
        weights = [value.tolist() for value in trainer.strategy.full_state_dict(module, rank0_only=False).values()]
    progress = trainer.progress
    return weights, [progress.samples, progress.bad_samples, progress.global_step, progress.stepped, progress.batches]


def train_at_every_stage() -> list[Any]:
    return [
        [trained(bad, 4, strategy=DeepSpeedStrategy(stage=stage)) for bad in (CASES if stage == 2 else CASES[2:])]
        for stage in (0, 1, 2, 3)
    ]


def test_two_ranks_match_one_process_on_the_remaining_samples() -> None:
    alone = [trained(bad, 8) for bad in CASES]
    for stages in run_world(2, train_at_every_stage):
        for found in stages:
            for (weights, counts), (expected, expected_counts) in zip(found, alone[-len(found) :], strict=True):
                assert counts == expected_counts
                for weight, other in zip(weights, expected, strict=True):
                    assert_close(torch.tensor(weight), torch.tensor(other), rtol=1e-5, atol=1e-6)
