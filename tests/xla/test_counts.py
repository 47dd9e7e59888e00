"""Costs of a step on XLA, counted by its metrics: compiled programs and transfers to the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from torch import Tensor
from torch.utils.data import DataLoader
from xla.model import BATCH, Regression
from xla.process import on_xla

from leyden import Trainer, TrainModule
from leyden.callbacks import Callback
from leyden.callbacks.loggers.csv_logger import CSVLogger

WINDOWS = 8
ONE = {"accelerator": "xla", "devices": 1}
SHARDED = {"accelerator": "xla", "strategy": "xla_fsdp", "devices": 4}


class Counts(Callback):
    """Counts, from batch end to batch end, compiled programs, transfers to the host and operations left to the CPU."""

    def __init__(self) -> None:
        self.before = (0, 0, 0)
        self.of_batches: list[tuple[int, int, int]] = []
        self.of_validations: list[tuple[int, int, int]] = []

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.before = read_counters()

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.of_batches.append(since(self.before))
        self.before = read_counters()

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.before = read_counters()

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.of_validations.append(since(self.before))


def read_counters() -> tuple[int, int, int]:
    from torch_xla.debug import metrics

    def number(name: str) -> int:
        data = metrics.metric_data(name)
        return 0 if data is None else int(data[0])

    left = sum(int(metrics.counter_value(name)) for name in metrics.counter_names() if name.startswith("aten::"))
    return number("CompileTime"), number("TransferFromDeviceTime"), left


def since(before: tuple[int, int, int]) -> tuple[int, int, int]:
    compiled, read, left = (after - earlier for after, earlier in zip(read_counters(), before, strict=True))
    return compiled, read, left


LOGGED = "logging in every third step"
CASES: dict[str, dict[str, Any]] = {
    "a scheduler and an epoch mean": {},
    "windows of three, clipped by norm": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "autocast": {"precision": "bf16"},
    "bf16": {"precision": "bf16-true"},
    LOGGED: {"log_every_n_steps": 3},
}


def batches_of(arguments: dict[str, Any]) -> int:
    """Returns the batches of eight windows and one that is a batch shorter."""
    length: int = arguments.get("accumulate_grad_batches", 1)
    return WINDOWS * length + length - 1


def count(root: Path, strategy: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        arguments = {**QUIET, **strategy, **CASES[name]}
        batches = batches_of(arguments)
        data = torch.randn(batches * BATCH, 5)
        counts = Counts()
        logger = CSVLogger(root) if "log_every_n_steps" in arguments else False
        trainer = Trainer(
            **{**arguments, "logger": logger, "callbacks": [counts], "max_epochs": 1, "default_root_dir": root}
        )
        loader: DataLoader[Tensor] = DataLoader(data, BATCH)  # type: ignore[arg-type]
        trainer.fit(Regression(num_items="tensor" if name.startswith("windows") else None), loader, loader)
        found.append({"batches": counts.of_batches, "validations": counts.of_validations[2:]})
    return found


@pytest.mark.parametrize("where", ["one", "sharded"])
def test_only_the_first_two_steps_compile_and_none_copies_to_the_host(where: str, tmp_path: Path) -> None:
    names = [name for name in CASES if name != LOGGED] if where == "one" else list(CASES)[:2]
    found = on_xla(count, tmp_path, ONE if where == "one" else SHARDED, names)
    for name, counts in zip(names, found, strict=True):
        length = CASES[name].get("accumulate_grad_batches", 1)
        assert len(counts["batches"]) == batches_of(CASES[name])
        later = counts["batches"][2 * length :]
        assert later == [(0, 0, 0)] * len(later), f"{name}: {counts['batches']}"
        assert all(read == 0 for _, read, _ in counts["batches"]), name
        assert sum(compiled for compiled, _, _ in counts["batches"]) > 0 or name != names[0], (
            "the counter saw no compilation"
        )
        assert [read for _, read, _ in counts["validations"]] == [0] * len(counts["validations"]), name
        assert [compiled for compiled, _, _ in counts["validations"][2:]] == [0] * (len(counts["validations"]) - 2), (
            name
        )


def test_logging_copies_to_the_host_once_per_row_and_compiles_once(tmp_path: Path) -> None:
    [counts] = on_xla(count, tmp_path, ONE, [LOGGED])
    reads = [read for _, read, _ in counts["batches"]]
    # A row is written after the batch's end, so what it reads is counted with the next one.
    assert reads == [0, 0, 0, 1, 0, 0, 1, 0]
    assert [compiled for compiled, _, _ in counts["batches"]][2:] == [0, 1, 0, 0, 0, 0]
