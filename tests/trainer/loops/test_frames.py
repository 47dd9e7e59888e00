"""At most six of Leyden's frames lie between `fit()` and the user's `training_step`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from models import Line, finish_step
from samples import Unsized

from leyden import Trainer
from leyden.callbacks import CSVLogger


def frames_since_fit() -> list[str]:
    """Returns the functions on the stack from `fit` to the caller of `training_step`, outermost first."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
        if frame.f_code is Trainer.fit.__code__:
            return found[::-1]
        frame = frame.f_back
    raise AssertionError("fit is not on the stack")


class RecordsFrames(Line):
    """Records the frames above each of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, ...]] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.add(tuple(frames_since_fit()))
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return finish_step(self, loss)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...


BAR_AND_FILES = {
    "logger": CSVLogger(),
    "enable_progress_bar": True,
    "enable_checkpointing": True,
    "log_every_n_steps": 1,
}
CASES: dict[str, dict[str, Any]] = {
    "automatic": {},
    "manual": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "micro-batches": {"accumulate_grad_batches": "auto"},
    "a loader without a length": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 1.0},
    "autocast": {"precision": "bf16-mixed"},
    "scaler": {"precision": "16-mixed"},
    "float64": {"precision": "64-true"},
    "barebones": {"barebones": True},
    "bar, logger and checkpoints": BAR_AND_FILES,
}


@pytest.mark.parametrize("case", CASES)
def test_at_most_six_frames_lie_between_fit_and_a_step(case: str, fit: Any) -> None:
    module = RecordsFrames()
    module.automatic_optimization = case != "manual"
    batches = [torch.ones(2, 2)] * 4
    fit(module, Unsized(batches) if case == "a loader without a length" else batches, **CASES[case])
    [frames] = module.seen
    assert len(frames) <= 6, frames


def test_the_frames_between_fit_and_a_step_are_the_expected_ones(fit: Any) -> None:
    """Frames outside Leyden would count too."""
    module = RecordsFrames()
    fit(module, [torch.ones(2, 2)] * 4)
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
