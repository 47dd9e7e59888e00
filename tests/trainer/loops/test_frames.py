"""No frame without a reason: at most six of Leyden's between `fit()` and the user's `training_step`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from models import result_of
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.callbacks import CSVLogger, TQDMProgressBar


def frames_since_fit() -> list[str]:
    """The functions on the stack from `fit` down to the caller of `training_step`, outermost first."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
        if frame.f_code is Trainer.fit.__code__:
            return found[::-1]
        frame = frame.f_back
    raise AssertionError("fit is not on the stack")


class Module(TrainModule):
    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.automatic_optimization = not manual
        self.seen: set[tuple[str, ...]] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.add(tuple(frames_since_fit()))
        loss = self.layer(batch[0]).sum()
        self.log("loss", loss, prog_bar=True)
        return result_of(self, loss)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "automatic": (False, {}),
    "manual": (True, {}),
    "accumulation": (False, {"accumulate_grad_batches": 3}),
    "clipping": (False, {"gradient_clip_val": 1.0}),
    "autocast": (False, {"precision": "bf16-mixed"}),
    "scaler": (False, {"precision": "16-mixed"}),
    "float64": (False, {"precision": "64-true"}),
    "barebones": (False, {"barebones": True}),
}


def fit(module: Module, folder: Path, loader: Any = None, **arguments: Any) -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **(quiet | arguments))
    trainer.fit(module, loader or DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))


@pytest.mark.parametrize("case", CASES)
def test_at_most_six_frames(case: str, tmp_path: Path) -> None:
    manual, arguments = CASES[case]
    module = Module(manual)
    fit(module, tmp_path, **arguments)
    [frames] = module.seen
    assert len(frames) <= 6, frames


def test_with_bar_logger_and_checkpoints(tmp_path: Path) -> None:
    module = Module()
    fit(
        module,
        tmp_path,
        logger=CSVLogger(tmp_path),
        callbacks=[TQDMProgressBar()],
        enable_progress_bar=True,
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    [frames] = module.seen
    assert len(frames) <= 6, frames


def test_with_a_loader_without_a_length(tmp_path: Path) -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter([[torch.ones(2, 2)]] * 4)

    module = Module()
    fit(module, tmp_path, loader=Stream(), accumulate_grad_batches=3)
    [frames] = module.seen
    assert len(frames) <= 6, frames


def test_a_step_passes_these_frames_alone(tmp_path: Path) -> None:
    """Every frame counts, whoever it belongs to; this is the whole way."""
    module = Module()
    fit(module, tmp_path)
    assert module.seen == {
        (
            "trainer.py:fit",
            "trainer.py:_carry_out",
            "fit.py:run",
            "fit.py:_epoch",
            "step.py:run",
            "base.py:forward_backward",
        )
    }
