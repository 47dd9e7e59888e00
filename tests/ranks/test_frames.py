"""On ranks too, at most six of Leyden's frames lie between `fit()` and the user's `training_step`."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from models import QUIET, Squares, finish_step
from ranks.world import run_world

from leyden import Trainer
from leyden.core.user_code import LEYDEN


class FrameRecorder(Squares):
    """Records Leyden's stack frames above its training step."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.frames: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        stack = traceback.extract_stack()[:-1]
        names = [frame.name for frame in stack if frame.filename.startswith(LEYDEN)]
        self.frames = names[names.index("fit") :]
        return finish_step(self, self.loss(batch))


CASES = [(strategy, manual) for strategy in ("ddp", "fsdp") for manual in (False, True)]


def record_frames() -> dict[tuple[str, bool], list[str]]:
    found = {}
    for strategy, manual in CASES:
        module = FrameRecorder(manual)
        trainer = Trainer(**QUIET, strategy=strategy, max_epochs=1, use_distributed_sampler=False)
        trainer.fit(module, [torch.ones(2, 2)])
        found[strategy, manual] = module.frames
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, bool], list[str]]]:
    """Returns the frames recorded on two ranks."""
    return run_world(2, record_frames)


@pytest.mark.parametrize(("strategy", "manual"), CASES)
def test_at_most_six_frames_lie_between_fit_and_training_step(ranks: Any, strategy: str, manual: bool) -> None:
    last = "forward" if manual else "forward_backward"
    for found in ranks:
        assert found[strategy, manual] == ["fit", "_carry_out", "run", "_epoch", "run", last]
