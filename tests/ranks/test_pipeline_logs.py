"""A pipeline logs what one process logs, on every rank: step and epoch values, metrics, and monitored values."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import QUIET
from ranks.mesh_gpt import GPT, VOCABULARY, data
from ranks.world import run_world
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from leyden import Callback, Trainer
from leyden.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from leyden.callbacks.loggers.csv_logger import CSVLogger
from leyden.strategies import MeshStrategy


class Logged(GPT):
    """Logs by step and by epoch, in every way, and updates metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.right = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100)
        self.train_right = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, labels = batch
        logits = self(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("tokens", (labels != -100).sum().float(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("largest", logits.detach().max(), reduce_fx="max", on_epoch=True)
        if batch_idx % 2:
            self.log("odd", float(batch_idx), on_step=True, on_epoch=False)
        if batch_idx == 3:
            # More values than one message holds.
            self.log_dict({f"many {number}": float(number) for number in range(80)}, on_step=True, on_epoch=False)
        self.train_right.update(logits, labels.flatten())
        self.log("train_right", self.train_right, on_step=False, on_epoch=True)
        return {"loss": loss, "first": tokens[:, 0]}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, labels = batch
        logits = self(tokens).flatten(0, 1)
        self.right.update(logits, labels.flatten())
        self.log("val", F.cross_entropy(logits, labels.flatten(), ignore_index=-100))
        self.log("right", self.right)

    def on_validation_epoch_end(self) -> None:
        self.log("right_again", self.right.compute())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if outputs is not None:
            assert (outputs["first"] == batch[0][:, 0]).all(), "outputs are not those of the whole batch"

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        if self.global_step % 3 == 1:
            self.seen.append(float(self.trainer.callback_metrics["loss_step"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=0.2)
        by_step = {
            "scheduler": plateau,
            "monitor": "loss_step",
            "interval": "step",
            "frequency": 2,
            "reduce_on_plateau": True,
        }
        return {"optimizer": optimizer, "lr_scheduler": by_step}


def train(sizes: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Logged()
    strategy: Any = "single_device" if sizes is None else MeshStrategy(**sizes)
    best = ModelCheckpoint(monitor="val", save_top_k=1, filename="{epoch}")
    callbacks = [best, EarlyStopping("val", patience=1, min_delta=0.05), LearningRateMonitor("step")]
    settings = {**QUIET, "enable_checkpointing": True, "callbacks": callbacks, "default_root_dir": folder}
    settings["logger"] = CSVLogger(folder, name="logs", version="only")
    trainer = Trainer(strategy=strategy, max_epochs=6, log_every_n_steps=1, **settings)
    readers = trainer.strategy.data_size
    trainer.fit(module, DataLoader(data(39), 8 // readers), DataLoader(data(20), 8 // readers))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "metrics": found,
        "epochs": trainer.current_epoch,
        "best": Path(best.best_model_path).name,
        "seen": module.seen,
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
    }


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "logs" / "only" / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("sizes", [{"pp": 2}, pytest.param({"pp": 2, "dp_shard": 2}, marks=pytest.mark.full)], ids=str)
def test_every_rank_has_the_values_that_one_process_logs(sizes: dict[str, int], tmp_path: Path) -> None:
    world = 2 * sizes.get("dp_shard", 1)
    single = train(None, str(tmp_path / "single"))
    ranks = run_world(world, train, {**sizes, "microbatches": 2}, str(tmp_path / "ranks"))
    names = single["metrics"].keys()
    if world > 2:
        # Step values are a rank's own.
        names = {name for name in names if not name.endswith("_step")}
    for rank in ranks:
        assert rank["metrics"].keys() >= names
        for name in names:
            assert rank["metrics"][name] == pytest.approx(single["metrics"][name], rel=1e-4, abs=1e-5), name
        assert (rank["epochs"], rank["best"]) == (single["epochs"], single["best"])
        assert rank["rates"] == ranks[0]["rates"]
    if world == 2:
        assert ranks[0]["rates"] == single["rates"]
        assert ranks[0]["seen"] == ranks[1]["seen"] == pytest.approx(single["seen"], rel=1e-4)
        ours, theirs = rows(tmp_path / "ranks"), rows(tmp_path / "single")
        assert len(ours) == len(theirs) and ours[0].keys() == theirs[0].keys()
        for row, expected in zip(ours, theirs, strict=True):
            for name, value in expected.items():
                assert (row[name] == "") == (value == ""), (name, expected["step"])
                assert value == "" or float(row[name]) == pytest.approx(float(value), rel=1e-3, abs=1e-4), name


def train_without_reading(sizes: dict[str, Any] | None) -> dict[str, float]:
    torch.manual_seed(0)
    strategy: Any = "single_device" if sizes is None else MeshStrategy(**sizes)
    trainer = Trainer(strategy=strategy, max_steps=13, barebones=True)
    trainer.fit(LogsEarly(), DataLoader(data(64), 4))
    return metrics_of(trainer)


def metrics_of(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class MetricsReader(Callback):
    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self.found.append(metrics_of(trainer))


def train_with_validations(sizes: dict[str, Any] | None) -> list[dict[str, float]]:
    torch.manual_seed(0)
    strategy: Any = "single_device" if sizes is None else MeshStrategy(**sizes)
    reader = MetricsReader()
    trainer = Trainer(
        **{**QUIET, "callbacks": [reader]},
        strategy=strategy,
        max_epochs=2,
        val_check_interval=2,
        num_sanity_val_steps=0,
    )
    trainer.fit(Logged(), DataLoader(data(24), 4), DataLoader(data(8), 4))
    return reader.found


class LogsEarly(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx < 2:
            # Missing from the messages of later steps.
            self.log("early", float(batch_idx))
        self.log("index", float(batch_idx))
        return loss


def test_a_validation_within_an_epoch_keeps_the_step_values() -> None:
    single = train_with_validations(None)
    assert len(single) == 6 and all("loss_step" in found for found in single)
    for rank in run_world(2, train_with_validations, {"pp": 2, "microbatches": 2}):
        for found, expected in zip(rank, single, strict=True):
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_values_not_read_during_the_run_are_available_after_it() -> None:
    single = train_without_reading(None)
    assert single.keys() >= {"early", "index"} and single["index"] == 12
    for rank in run_world(2, train_without_reading, {"pp": 2, "microbatches": 2}):
        assert rank == pytest.approx(single, rel=1e-4)
