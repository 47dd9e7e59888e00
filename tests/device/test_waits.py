"""Where the host waits for the device: nowhere in a step, but for what is documented.

| wait | why |
|---|---|
| 16-mixed: one per step | whether the gradients overflowed decides whether the optimizer steps |
| bar and loggers: none | a row or a redraw reads all its values by one copy, and waits for that copy alone |
| `gradient_clip_val`, accumulation, EMA, `num_items`, schedulers: none | |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from models import QUIET
from samples import labeled
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Accelerator, Callback, Trainer, TrainModule
from leyden.callbacks import CSVLogger, EMAWeightAveraging, GradNormMonitor, ModelCheckpoint, TQDMProgressBar


class Net(TrainModule):
    """Logs in every way, and returns its loss as a mean, or as a sum with the number of its items."""

    def __init__(self, items: str = "none") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.items = items

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        mean = self.items == "none"
        loss = nn.functional.cross_entropy(self.net(x), y, reduction="mean" if mean else "sum")
        for reduction in ("mean", "sum", "max", "min"):
            self.log(reduction, loss, prog_bar=True, on_step=True, on_epoch=True, reduce_fx=reduction)
        self.log("number", len(x), on_epoch=True)
        counts = {"number": len(x), "host": torch.tensor(len(x)), "device": torch.full((), len(x), device=self.device)}
        return loss if mean else {"loss": loss, "num_items": counts[self.items]}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class DuringSteps(Callback):
    """Records waits from the first training batch to the last. Setting up and ending a run may wait."""

    def __init__(self) -> None:
        self.waits = toy.Waits()

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int) -> None:
        toy.Waits.active = self.waits

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        toy.Waits.active = None


def waits_of(folder: Path, module: TrainModule | None = None, **arguments: Any) -> list[tuple[str, str]]:
    """Returns the waits during the steps of two epochs of ten batches."""
    recorder = DuringSteps()
    callbacks = [recorder, *arguments.pop("callbacks", [])]
    own = {"accelerator": "toy", "max_epochs": 2, "default_root_dir": folder, "callbacks": callbacks}
    trainer = Trainer(**{**QUIET, **own, **arguments})
    try:
        trainer.fit(module or Net(), DataLoader(labeled(40), 4, shuffle=True), DataLoader(labeled(8), 4))
    finally:
        toy.Waits.active = None
    return recorder.waits.found


@pytest.mark.parametrize("items", ["none", "number", "host", "device"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 1.0}, {"gradient_clip_algorithm": "value"}],
    ids=["plain", "accumulation_clip_by_norm", "clip_by_value"],
)
def test_no_step_waits(items: str, precision: str, arguments: Any, tmp_path: Path) -> None:
    if "gradient_clip_algorithm" in arguments:
        arguments = {**arguments, "gradient_clip_val": 0.1}
    assert waits_of(tmp_path, Net(items), precision=precision, **arguments) == []


def test_no_step_waits_with_logger_bar_and_averages(tmp_path: Path) -> None:
    found = waits_of(
        tmp_path,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        digest_every_n_steps=2,
        enable_progress_bar=True,
        callbacks=[
            TQDMProgressBar(),
            EMAWeightAveraging(decay=0.9),
            GradNormMonitor(per="parameter", after_clipping=True),
        ],
    )
    assert found == []


def test_an_asynchronous_save_does_not_wait(tmp_path: Path) -> None:
    saves = ModelCheckpoint(every_n_train_steps=2, asynchronous=True)
    assert waits_of(tmp_path, enable_checkpointing=None, callbacks=[saves]) == []


def test_a_scaled_step_waits_once(tmp_path: Path) -> None:
    found = waits_of(tmp_path, precision="16-mixed")
    assert [what for what, _ in found] == ["aten._local_scalar_dense.default"] * 20
    assert {line.partition(":")[0] for _, line in found} == {"strategies/precision/amp.py"}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_of_ones_own_does_not_wait(precision: str) -> None:
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
    net: Any = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    loader = DataLoader(labeled(40), 4, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    total: Any = torch.zeros((), device=accelerator.device)
    with toy.Waits() as waits:
        for x, y in loader:
            with accelerator.accumulate(net):
                loss: Tensor = nn.functional.cross_entropy(net(x), y, reduction="sum")
                accelerator.backward(loss, num_items=len(x))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.detach()
    assert waits.found == []
    assert accelerator.device.type == "toy" and float(total) > 0


# what the recorder would find -----------------------------------------------------------------------------------------
class Mistaken(Net):
    """Makes one mistake in each step."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.mistake == "item":
            loss.detach().item()
        elif self.mistake == "if":
            assert loss > -1
        elif self.mistake == "print":
            f"{loss.detach():.3f}"
        elif self.mistake == "blocking copy":
            torch.ones(3).to(self.device)
        elif self.mistake == "number":
            torch.tensor(1.0, device=self.device)
        elif self.mistake == "mask":
            batch[0][batch[0] > 0].sum()
        return loss


@pytest.mark.parametrize("mistake", ["item", "if", "print", "blocking copy", "number", "mask"])
def test_a_mistake_is_found_with_its_line(mistake: str, tmp_path: Path) -> None:
    found = waits_of(tmp_path, Mistaken(mistake))
    assert len(found) == 20
    assert {line.partition(":")[0] for _, line in found} == {"tests/device/test_waits.py"}


def test_a_tensor_of_the_cpu_in_a_step_raises(tmp_path: Path) -> None:
    class Mixed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * torch.ones(2).sum(0, keepdim=True)

    with pytest.raises(RuntimeError, match="same device.*toy:0 and cpu"):
        waits_of(tmp_path, Mixed())


def test_a_copy_that_is_read_too_early_is_nan() -> None:
    values = torch.ones(3, device="toy")
    host = values.to("cpu", non_blocking=True)
    assert host.isnan().all()
    torch.toy.current_stream().synchronize()  # type: ignore[attr-defined]
    assert host.tolist() == [1.0, 1.0, 1.0]


def test_a_copy_on_another_stream_sees_a_later_write_unless_that_waits() -> None:
    found = []
    for waits in (False, True):
        values, host = torch.ones(3, device="toy"), torch.empty(3)
        side = toy.Stream()
        side.wait_stream(toy.current_stream())
        with side:
            host.copy_(values, non_blocking=True)
        if waits:
            toy.current_stream().wait_stream(side)
        values.zero_()
        side.synchronize()
        found.append(host.tolist())
    assert found == [[0.0] * 3, [1.0] * 3]


def test_a_stream_must_wait_for_the_work_that_writes_what_it_copies() -> None:
    side = toy.Stream()
    values = torch.ones(3, device="toy")
    with side, pytest.raises(RuntimeError, match="has not waited"):
        torch.empty(3).copy_(values, non_blocking=True)
