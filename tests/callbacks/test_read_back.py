"""Each callback, finder, logger and command has a test that reads back what it wrote; monitors write to all loggers."""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from logged import scalars_in
from models import QUIET, Line
from wandb_files import files, history

import leyden.callbacks
from leyden import Callback, Trainer
from leyden.callbacks import (
    CSVLogger,
    DeviceStatsMonitor,
    GradNormMonitor,
    LearningRateMonitor,
    MLFlowLogger,
    TensorBoardLogger,
    ThroughputMonitor,
    WandbLogger,
)
from leyden.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
Rows = dict[tuple[str, int], float]


class Logs(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self(batch).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def of_tensorboard(logger: TensorBoardLogger) -> Rows:
    return {(name, step): value for name, rows in scalars_in(logger.log_dir).items() for step, value in rows}


def of_csv(logger: CSVLogger) -> Rows:
    with Path(str(logger.log_dir), "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {(name, int(row["step"])): float(row[name]) for row in rows for name in row if name != "step" and row[name]}


def of_wandb(folder: Path) -> Rows:
    [file] = files(folder)
    found: Rows = {}
    for row in history(file):
        step = row.pop("trainer/global_step")
        found |= {(name, step): value for name, value in row.items()}
    return found


def of_mlflow(logger: MLFlowLogger) -> Rows:
    client, run = logger.experiment, logger.version
    names = client.get_run(run).data.metrics
    return {(name, row.step): row.value for name in names for row in client.get_metric_history(run, name)}


@pytest.fixture
def mlflow_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MLFlowLogger]]:
    """Yields a list with an MLFlowLogger if MLflow is installed, else an empty list."""
    try:
        import mlflow  # noqa: F401
    except ImportError:
        yield []
        return
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    yield [MLFlowLogger(tracking_uri=(tmp_path / "store").as_uri())]


def test_monitors_write_the_same_numbers_to_the_files_of_every_logger(
    tmp_path: Path, mlflow_logger: list[MLFlowLogger]
) -> None:
    board, table = TensorBoardLogger(tmp_path), CSVLogger(tmp_path)
    loggers = [board, table, WandbLogger(save_dir=tmp_path, offline=True), *mlflow_logger]
    monitors: list[Callback] = [
        LearningRateMonitor(),
        GradNormMonitor(),
        DeviceStatsMonitor(cpu_stats=True),
        ThroughputMonitor(batch_size_fn=len, window_size=2),
    ]
    trainer = Trainer(**{**QUIET, "logger": loggers, "max_epochs": 2, "log_every_n_steps": 2}, callbacks=monitors)
    trainer.fit(Logs(), [torch.ones(3, 2)] * 4, [torch.ones(3, 2)])
    wandb.finish()
    first, *others = [of_csv(table), of_tensorboard(board), of_wandb(tmp_path), *map(of_mlflow, mlflow_logger)]
    names = {name for name, _ in first}
    assert {"loss_step", "loss_epoch", "val/loss", "lr-SGD", "grad_2.0_norm_total", "epoch"} <= names
    assert any("cpu_percent" in name for name in names) and any("samples_per_sec" in name for name in names)
    assert {step: value for (name, step), value in first.items() if name == "lr-SGD"}.keys() == {2, 4, 6, 8}
    for other in others:
        assert {key for key in other if "hp_metric" not in key} == set(first)
        for key, value in first.items():
            assert other[key] == pytest.approx(value, rel=1e-6), key


def test_every_callback_logger_and_command_is_tried_by_a_test() -> None:
    """A test calls each class, and passes each command's name."""
    called, words = set[str](), set[str]()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called.add(ast.unparse(node.func).rpartition(".")[2])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value.split()[0] if node.value.split() else "")
    public = [name for name in leyden.callbacks.__all__ if isinstance(getattr(leyden.callbacks, name), type)]
    made = {name for name in public if issubclass(getattr(leyden.callbacks, name), Callback)}
    assert len(made) > 40 and sorted(made - called - {"Callback", "Logger", "ProgressBar"}) == []
    assert sorted(set(COMMANDS) - words) == []
