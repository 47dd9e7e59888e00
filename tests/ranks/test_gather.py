"""self.all_gather in a step: correct if all ranks hold the same shapes, an error that names the fix otherwise."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from models import QUIET, finish_step
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.strategies.ddp import DDPStrategy

TIMEOUT = 60
"""Timeout for ranks that wait for each other; only a hang takes that long."""


class Gathering(TrainModule):
    """Gathers `what` in the steps `where`; records the gathered rows."""

    def __init__(self, what: str, where: str, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(1, 1)
        self.what, self.where = what, where
        self.automatic_optimization = not manual
        self.rows: list[list[float]] = []

    def gather(self, where: str, x: Tensor) -> None:
        if where != self.where:
            return
        if self.what == "ragged":
            # Like texts that each rank pads to its own longest.
            x = x.expand(-1, 2 + self.global_rank)
        tensors = {"one": x.sum(), "rows": x, "nest": [x, {"sum": x.sum()}], "ragged": x}[self.what]
        found = self.all_gather(tensors)
        first = found[0] if self.what == "nest" else found
        self.rows.append(first.flatten().tolist())

    def step(self, where: str, batch: Any) -> Tensor:
        [x] = batch
        self.gather(where, x)
        return self.net(x).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return finish_step(self, self.step("training", batch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step("validation", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step("predict", batch)

    def on_validation_epoch_end(self) -> None:
        self.gather("end", torch.full((2, 1), float(self.global_rank)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(count: int, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(1.0, count + 1).reshape(-1, 1)), 2, **arguments)


def run(case: dict[str, Any]) -> list[list[float]]:
    """Runs one pass over `samples` in batches of two per rank."""
    where, strategy = case.get("where", "training"), case.get("strategy", "ddp")
    module = Gathering(case.get("what", "rows"), where, case.get("manual", False))
    if strategy == "unused":
        strategy = DDPStrategy(find_unused_parameters=True)
    arguments = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0, **case.get("arguments", {})}
    trainer = Trainer(strategy=strategy, **arguments)
    samples = case["samples"]
    if isinstance(samples, list):
        samples = samples[int(os.environ["RANK"])]
    data = loader(samples, **case.get("loader", {}))
    if where == "predict":
        trainer.predict(module, data)
    else:
        trainer.fit(module, *((data,) if where == "training" else (loader(8), data)))
    return module.rows


def run_all(cases: list[dict[str, Any]]) -> list[list[list[float]]]:
    return [run(case) for case in cases]


EVERY = [[1, 2, 3, 4], [5, 6, 7, 8]]
RIGHT: list[tuple[dict[str, Any], list[list[float]]]] = [
    ({"samples": 8}, EVERY),
    ({"samples": 8, "what": "nest"}, EVERY),
    # The last global batch has three samples.
    ({"samples": 7, "what": "one"}, [[3, 7], [11, 7]]),
    ({"samples": 7, "loader": {"drop_last": True}}, EVERY[:1]),
    ({"samples": 7, "arguments": {"even_batches": True}}, [*EVERY[:1], [5, 6, 7, 5]]),
    ({"samples": 5, "arguments": {"even_batches": True}}, [*EVERY[:1], [5, 5]]),
    ({"samples": 8, "where": "validation"}, EVERY),
    ({"samples": 7, "where": "validation", "what": "one"}, [[3, 7], [11, 7]]),
    ({"samples": 5, "where": "validation", "loader": {"drop_last": True}}, EVERY[:1]),
    ({"samples": 5, "where": "end"}, [[0, 0, 1, 1]]),
    ({"samples": 8, "where": "predict"}, EVERY),
    # Each rank's own share: the same four samples.
    (
        {"samples": 4, "where": "validation", "arguments": {"use_distributed_sampler": False}},
        [[1, 2, 1, 2], [3, 4, 3, 4]],
    ),
]


def test_all_gather_returns_the_values_of_all_ranks() -> None:
    for found in run_world(2, run_all, [case for case, _ in RIGHT]):
        for (case, expected), rows in zip(RIGHT, found, strict=True):
            assert rows == expected, case


def run_with_warnings(cases: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the warnings of each case."""
    messages = []
    for case in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(case)
        messages.append([str(warning.message) for warning in caught if "all_gather" in str(warning.message)])
    return messages


def test_a_short_last_batch_warns_at_the_start_of_the_epoch() -> None:
    limit = {"limit_train_batches": 2}
    uneven, idle = {"samples": 11, "arguments": limit}, {"samples": 9, "what": "one", "arguments": limit}
    fine = [
        {"samples": 12, "arguments": limit},
        {"samples": 11, "what": "one"},
        {"samples": 11, "loader": {"drop_last": True}},
        {"samples": 11, "arguments": {"even_batches": True}},
    ]
    first, other = run_world(2, run_with_warnings, [uneven, idle, *fine])
    assert other == [[]] * 6 and first[2:] == [[]] * 4
    for messages, samples in zip(first, (3, 1), strict=False):
        assert len(messages) == 1
        assert f"which has {samples} samples for 2 ranks. Use Trainer(even_batches=True)" in messages[0]


FOREIGN = {"use_distributed_sampler": False}
UNEVEN = "all_gather needs tensors of the same shape, but rank 0 has (2, 1) float32 and rank 1 has (1, 1) float32."
IDLE = "this global batch has 1 sample for 2 ranks, and a rank without a sample cannot take part."
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "uneven": ({"samples": 7}, UNEVEN),
    "idle": ({"samples": 5, "what": "one"}, IDLE),
    "idle, unused parameters": ({"samples": 5, "strategy": "unused"}, IDLE),
    "idle, manual": ({"samples": 5, "manual": True}, IDLE),
    "idle, fsdp": ({"samples": 5, "strategy": "fsdp"}, IDLE),
    "validation, uneven": ({"samples": 7, "where": "validation"}, UNEVEN),
    "validation, idle": ({"samples": 5, "where": "validation"}, IDLE),
    "validation, idle, fsdp": ({"samples": 5, "where": "validation", "strategy": "fsdp"}, IDLE),
    "predict, idle": ({"samples": 5, "where": "predict"}, IDLE),
    "own shares of different lengths": (
        {"samples": [4, 2], "where": "validation", "arguments": FOREIGN},
        "this global batch has 2 samples for 2 ranks",
    ),
    "ragged in an even batch": ({"samples": 8, "what": "ragged"}, "rank 0 has (2, 2) float32 and rank 1 has (2, 3)"),
}
DEFAULT = ("idle", "validation, uneven", "own shares of different lengths")


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.full) for name in WRONG]
)
def test_all_gather_raises_if_shapes_differ_between_ranks(name: str) -> None:
    case, message = WRONG[name]
    found = run_world(2, run, case, timeout=TIMEOUT, may_fail=True)
    messages = [text for text in found if isinstance(text, str)]
    # One rank reports the error; the other exits silently with code 1.
    assert len(messages) == 1 and found.count(1) == 1, found
    assert messages[0].startswith("ConfigurationError: all_gather") and message in messages[0]
    assert "Trainer(even_batches=True)" in messages[0] and "drop_last=True" in messages[0]
