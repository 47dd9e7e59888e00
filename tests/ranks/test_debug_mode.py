"""Debug mode on two ranks: the arguments of each collective are compared, and the error names a mismatch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from ranks.world import DEBUG, run_world
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def rows() -> TensorDataset:
    return TensorDataset(torch.ones(16, 4))


def mismatched(kind: str) -> str:
    from leyden import Accelerator

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    accelerator.gather(torch.ones(2))
    net = nn.Linear(4, 1)
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    if kind in ("missing", "backward") and rank == 1:
        return "left"
    try:
        if kind == "backward":
            accelerator.backward(model(torch.ones(1, 4)).sum())
        if kind == "other" and rank == 1:
            accelerator.reduce(torch.ones(2))
        dtype = torch.float64 if kind == "dtype" and rank == 1 else torch.float32
        accelerator.gather({"x": torch.ones(2 + (kind == "shape" and rank), dtype=dtype)})
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "shape",
            ["rank 0: gather({x: float32[2]}) at ", "rank 1: gather({x: float32[3]}) at ", "test_debug_mode.py:"],
        ),
        ("dtype", ["rank 1: gather({x: float64[2]})"]),
        ("other", ["rank 0: gather(", "rank 1: reduce(float32[2])"]),
    ],
)
def test_debug_mode_names_a_mismatch(kind: str, words: list[str]) -> None:
    for message in run_world(2, mismatched, kind, environ=DEBUG, timeout=30):
        assert all(word in message for word in words), message


@pytest.mark.parametrize(("kind", "name"), [("missing", "gather"), ("backward", "backward")])
def test_debug_mode_names_a_missing_rank(kind: str, name: str) -> None:
    environ = {"ACCELERATE_DEBUG_MODE": "true", "LEYDEN_DEBUG_TIMEOUT": "3"}
    first, second = run_world(2, mismatched, kind, environ=environ, timeout=30)
    assert f"rank 0 reached {name} at " in first and "rank 1 did not within 3 s" in first
    assert second == "left"


class Gathering(Line):
    """Gathers a tensor whose shape differs on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(torch.ones(2 + batch_idx * self.global_rank))
        return super().training_step(batch, batch_idx)


def debugged_fit(folder: str) -> None:
    from leyden import Trainer

    sys.stderr = open(f"{folder}/{os.environ['RANK']}.txt", "w", buffering=1)  # noqa: SIM115
    trainer = Trainer(**QUIET, strategy="ddp", max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Gathering(inputs=4), DataLoader(rows(), 4))


def test_debug_mode_works_with_a_trainer(tmp_path: Path) -> None:
    found = run_world(2, debugged_fit, str(tmp_path), environ=DEBUG, timeout=30, may_fail=True)
    for rank in range(2):
        printed = (tmp_path / f"{rank}.txt").read_text()
        facts = f"rank {rank} of 2 (local {rank}), device cpu, strategy ddp, precision 32-true, accumulation 2"
        assert f"leyden: {facts}" in printed
        assert f"leyden: rank {rank}: loader of 2 batches by RankBatches, batch_size 4" in printed
    # The first error wins: the other rank may have been ended by it.
    messages = [entry for entry in found if isinstance(entry, str)]
    assert messages
    for message in messages:
        assert "rank 0: all_gather(float32[2]) at " in message and "rank 1: all_gather(float32[3]) at " in message


class Growing(Line):
    """Gathers a different shape in each batch and in each run."""

    def __init__(self, width: int) -> None:
        super().__init__(inputs=4)
        self.width = width

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1:
            # Arrives after rank 0, which would find the entries of an earlier run.
            torch.randn(200, 200) @ torch.randn(200, 200)
        self.all_gather(torch.ones(self.width + batch_idx))
        return super().training_step(batch, batch_idx)


def debugged_twice() -> list[int]:
    from leyden import Trainer

    steps = []
    for width in (1, 20, 300):
        trainer = Trainer(**QUIET, strategy="ddp", max_epochs=1)
        trainer.fit(Growing(width), DataLoader(rows(), 1))
        steps.append(trainer.global_step)
    return steps


def test_debug_mode_ignores_an_earlier_run() -> None:
    assert run_world(2, debugged_twice, environ=DEBUG, timeout=60) == [[8, 8, 8]] * 2
