"""Runs on a device that is not the CPU: the weights of the same run on the CPU, bit for bit."""

from __future__ import annotations

import csv
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from models import QUIET
from safetensors.torch import load_file
from same import differences
from samples import labeled
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Accelerator, Callback, Trainer, TrainModule
from leyden.callbacks import (
    CSVLogger,
    DeviceStatsMonitor,
    EMAWeightAveraging,
    ModelCheckpoint,
    TensorBoardLogger,
    TQDMProgressBar,
)
from leyden.checkpoint.format.digests import read_digests

PRECISIONS = ["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]
SIZE = 38
"""Samples: ten batches of 4, the last with 2."""


class Classifier(TrainModule):
    """A network with batch norm; logs in every way.

    Args:
        dropout: draws the device's random numbers.
        shared: the first layer's weights are the second's too.
    """

    def __init__(self, dropout: float = 0.0, shared: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 3))
        )
        if shared:
            self.net[1].weight = self.net[0].weight

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2, eps=1e-4)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(labeled(SIZE), 4, shuffle=True), DataLoader(labeled(9), 4)


def module(**arguments: Any) -> Classifier:
    torch.manual_seed(3)
    return Classifier(**arguments)


def trainer(folder: Path, accelerator: str = "toy", **arguments: Any) -> Trainer:
    own = {"accelerator": accelerator, "max_epochs": 2, "default_root_dir": folder, "enable_checkpointing": None}
    return Trainer(**{**QUIET, **own, **arguments})


def on_host(value: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in value.state_dict().items()}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=["plain", "accumulation_clip_by_norm", "clip_by_value"],
)
def test_weights_and_values_are_those_of_the_cpu(precision: str, arguments: Any, tmp_path: Path) -> None:
    found = []
    # The stand-in's autocast keeps no cache: it would cast a shared weight twice.
    shared = "mixed" not in precision
    for accelerator in ("cpu", "toy"):
        trained = module(shared=shared)
        run = trainer(tmp_path / accelerator, accelerator, precision=precision, **arguments)
        run.fit(trained, *loaders())
        assert (trained.net[0].weight is trained.net[1].weight) == shared
        assert trained.net[0].weight.device == torch.device(accelerator, 0 if accelerator == "toy" else None)
        values = [*run.validate(trained, loaders()[1], verbose=False), *run.test(trained, loaders()[1], verbose=False)]
        predictions = run.predict(trained, loaders()[1])
        found.append((on_host(trained), values, [batch.cpu() for batch in predictions], run.logged_metrics.keys()))
    assert differences(*found) == []
    assert not torch.equal(found[0][0]["net.0.weight"], module().net[0].weight.to(found[0][0]["net.0.weight"].dtype))


def test_dropout_draws_the_devices_random_numbers(tmp_path: Path) -> None:
    """A hand-written loop on the device has the same weights; the CPU's random numbers only shuffle."""
    expected = module(dropout=0.3)
    expected.to("toy")
    [optimizer], [config] = expected.configure_optimizers()
    for _ in range(2):
        for x, y in loaders()[0]:
            optimizer.zero_grad()
            expected.loss((x.to("toy"), y.to("toy"))).backward()
            optimizer.step()
            config["scheduler"].step()
    trained = module(dropout=0.3)
    trainer(tmp_path).fit(trained, loaders()[0])
    assert differences(on_host(expected), on_host(trained)) == []
    other = module(dropout=0.3)
    trainer(tmp_path, "cpu").fit(other, loaders()[0])
    assert differences(on_host(other), on_host(trained)) != []


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_resumed_run_ends_with_the_same_weights_and_a_checkpoint_moves(precision: str, tmp_path: Path) -> None:
    def run(folder: str, accelerator: str = "toy", dropout: float = 0.3, seed: int = 3, **rest: Any) -> Any:
        torch.manual_seed(seed)
        torch.toy.manual_seed(seed)  # type: ignore[attr-defined]
        trained = Classifier(dropout)
        fitted = trainer(tmp_path / folder, accelerator, precision=precision, callbacks=rest.pop("callbacks", None))
        fitted.fit(trained, *loaders(), **rest)
        return on_host(trained)

    saves: Callable[[], Any] = lambda: [ModelCheckpoint(every_n_train_steps=7, save_top_k=-1)]  # noqa: E731
    whole = run("whole", callbacks=saves())
    [saved] = (tmp_path / "whole").rglob("*step=7")
    assert differences(whole, run("resumed", seed=99, ckpt_path=saved)) == []
    # Without dropout, a run may continue on another device, and back.
    whole = run("plain", dropout=0.0, callbacks=saves())
    [saved] = (tmp_path / "plain").rglob("*step=7")
    assert differences(whole, run("moved", "cpu", 0.0, 99, callbacks=saves(), ckpt_path=saved)) == []
    [saved] = (tmp_path / "moved").rglob("*step=14")
    assert differences(whole, run("back", "toy", 0.0, 98, ckpt_path=saved)) == []


class Recorded(Callback):
    """Keeps the weights after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainModule, *rest: Any) -> None:
        self.weights[trainer.global_step] = on_host(pl_module)


def test_digests_are_those_of_the_cpu(tmp_path: Path) -> None:
    found = []
    for accelerator in ("cpu", "toy"):
        run = trainer(tmp_path / accelerator, accelerator, digest_every_n_steps=3)
        run.fit(module(), loaders()[0])
        [file] = (tmp_path / accelerator).rglob("digests.jsonl")
        found.append([{name: digest.value for name, digest in row.digests.items()} for row in read_digests(file)])
    assert found[0] == found[1] and len(found[0]) > 5


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_hold_the_weights_of_their_step(asynchronous: bool, tmp_path: Path) -> None:
    """An asynchronous save copies while the next step runs."""
    recorded = Recorded()
    saves = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, asynchronous=asynchronous)
    trainer(tmp_path, callbacks=[recorded, saves]).fit(module(), loaders()[0])
    files = [*tmp_path.rglob("model.safetensors")]
    assert len(files) == 20
    for file in files:
        step = int(re.search(r"step=(\d+)", str(file))[1])  # type: ignore[index]
        assert differences(dict(sorted(load_file(file).items())), dict(sorted(recorded.weights[step].items()))) == []


def test_averages_of_weights_are_those_of_the_cpu(tmp_path: Path) -> None:
    found = []
    for accelerator in ("cpu", "toy"):
        trained = module()
        trainer(tmp_path, accelerator, callbacks=[EMAWeightAveraging(decay=0.9)]).fit(trained, *loaders())
        found.append(on_host(trained))
    assert differences(*found) == []


def test_loggers_bar_and_device_statistics_show_the_devices_values(tmp_path: Path, capsys: Any) -> None:
    run = trainer(
        tmp_path,
        logger=[CSVLogger(tmp_path), TensorBoardLogger(tmp_path)],
        callbacks=[TQDMProgressBar(), DeviceStatsMonitor()],
        enable_progress_bar=True,
        log_every_n_steps=1,
    )
    run.fit(module(), *loaders())
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["loss_step"]) for row in rows if row.get("loss_step")]
    assert len(losses) == 20 and all(loss == loss for loss in losses)
    peaks = [
        float(value) for row in rows for name, value in row.items() if "allocated_bytes.all.peak" in name and value
    ]
    assert peaks and all(0 < peak <= toy.MEMORY.peak for peak in peaks)
    assert "val_loss=" in capsys.readouterr().err


def test_a_batch_that_does_not_fit_is_split(tmp_path: Path) -> None:
    found = []
    for limit in (2**30, 16_000):
        torch.manual_seed(3)
        trained = Classifier()
        trained.net[2] = nn.Identity()
        run = trainer(tmp_path, max_epochs=1, accumulate_grad_batches="auto")
        # What earlier tests have left must not be freed within the limit.
        gc.collect()
        with toy.MEMORY.limited(toy.MEMORY.used + limit):
            run.fit(trained, DataLoader(labeled(256), 64))
        assert run.global_step == 4
        found.append(on_host(trained))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-6, rtol=1e-5)


def test_an_out_of_memory_error_names_the_batch_and_the_memory_in_use(tmp_path: Path) -> None:
    gc.collect()
    with toy.MEMORY.limited(toy.MEMORY.used + 5_000), pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(tmp_path).fit(module(), DataLoader(labeled(256), 64))
    text = str(caught.value)
    assert "out of memory on toy:0 in step 0, epoch 0, batch 0" in text and "KiB at the peak, of 1.0 GiB" in text


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_loop_of_ones_own_trains_the_cpus_weights(precision: str, tmp_path: Path) -> None:
    found = []
    for cpu in (True, False):
        accelerator = Accelerator(
            cpu=cpu,
            mixed_precision=precision.removesuffix("-mixed").replace("32-true", "no").replace("16", "fp16")
            if precision != "bf16-mixed"
            else "bf16",
            gradient_accumulation_steps=2,
        )
        trained: Any = module()
        optimizer = torch.optim.AdamW(trained.parameters(), 1e-2, eps=1e-4)
        net, optimizer, loader = accelerator.prepare(trained.net, optimizer, loaders()[0])
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.cross_entropy(net(x).float(), y))
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator.device.type == ("cpu" if cpu else "toy")
        folder = tmp_path / str(cpu)
        accelerator.save_state(str(folder))
        weights = on_host(trained)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.zero_()
        accelerator.load_state(str(folder))
        assert differences(weights, on_host(trained)) == []
        found.append(weights)
    assert differences(*found) == []
