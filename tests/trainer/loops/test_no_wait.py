"""No step waits for the device, by reading a value or by copying: tested on a device without values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from silent_device import SILENT, RecordDuringTraining, WaitRecorder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Accelerator, Trainer
from leyden.strategies import SingleDeviceStrategy


class Net(Squares):
    """Logs in every way, and weights its loss by a number of items."""

    def __init__(self, items: str) -> None:
        super().__init__(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1)))
        self.items = items

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).square().sum()
        for reduction in ("mean", "sum", "max", "min"):
            self.log(reduction, loss, prog_bar=True, on_step=True, on_epoch=True, reduce_fx=reduction)
        self.log("number", len(batch[0]), on_epoch=True)
        counts = {"number": len(batch[0]), "host": torch.tensor(4), "device": torch.full((), 4, device=self.device)}
        return loss if self.items == "none" else {"loss": loss, "num_items": counts[self.items]}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


@pytest.mark.parametrize("items", ["none", "number", "host", "device"])
@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_fit_reads_no_value_from_the_device(items: str, clip: Any, precision: str, tmp_path: Path) -> None:
    waits = WaitRecorder()
    trainer = Trainer(
        **{**QUIET, "accelerator": "auto"},
        strategy=SingleDeviceStrategy(SILENT),
        precision=precision,
        accumulate_grad_batches=3,
        gradient_clip_val=1.0,
        gradient_clip_algorithm=clip,
        max_epochs=2,
        callbacks=[RecordDuringTraining(waits)],
        default_root_dir=tmp_path,
    )
    with waits:
        trainer.fit(Net(items), DataLoader(TensorDataset(torch.ones(40, 3, device=SILENT)), 4, shuffle=True))
    # 10 batches: windows of 3, 3, 3 and 1.
    assert trainer.global_step == 8
    assert waits.found == []


def test_a_users_own_loop_reads_no_value_from_the_device() -> None:
    accelerator = Accelerator(strategy=SingleDeviceStrategy(SILENT), gradient_accumulation_steps=2)
    # The model comes first: moving it to this device gives it new parameters.
    model = accelerator.prepare(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(torch.ones(10, 3, device=SILENT)), 2)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    with WaitRecorder() as waits:
        waits.recording = True
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum(), num_items=len(x))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    assert waits.found == []


@pytest.mark.parametrize(
    "wait",
    [
        lambda loss: loss.item(),
        lambda loss: loss > 0 or None,
        lambda loss: loss.cpu(),
        lambda loss: torch.tensor(1.0, device=SILENT),
        lambda loss: torch.ones(2).to(SILENT),
    ],
)
def test_every_kind_of_wait_is_found(wait: Any) -> None:
    """Proves that the tests above can fail."""
    loss: Tensor = torch.ones((), device=SILENT)
    with WaitRecorder() as waits:
        waits.recording = True
        try:
            wait(loss)
        except (RuntimeError, NotImplementedError) as error:
            waits.found.append(str(error))
    assert len(waits.found) == 1
