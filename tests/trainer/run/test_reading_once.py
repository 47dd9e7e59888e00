"""How often a resumed fit reads the bytes of its checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, SAVED, Squares
from torch import nn

from leyden import Trainer


class Wide(Squares):
    """2 MiB of weights, and 4 MiB of AdamW's state."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(512, 1024), lambda module: torch.optim.AdamW(module.parameters(), 0.01))

    def train_dataloader(self) -> Any:
        return [torch.ones(2, 512)]


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="counts the bytes by /proc")
def test_resuming_reads_optimizer_state_once_and_weights_twice(tmp_path: Path) -> None:
    trainer = Trainer(**{**QUIET, "default_root_dir": tmp_path, "max_epochs": 1})
    trainer.fit(Wide())
    path = tmp_path / SAVED / "one"
    trainer.save_checkpoint(path)
    saved = trainer.optimizers[0].state_dict()["state"][0]["exp_avg"]
    size = sum(file.stat().st_size for file in path.iterdir())
    # The first resume also reads modules it imports.
    for number, ckpt_path in enumerate((path, path, "last", "auto")):
        resumed = Trainer(**{**QUIET, "default_root_dir": tmp_path, "max_epochs": 1})
        before = bytes_read()
        resumed.fit(Wide(), ckpt_path=ckpt_path)
        passes = (bytes_read() - before) / size
        assert torch.equal(resumed.optimizers[0].state_dict()["state"][0]["exp_avg"], saved)
        assert number == 0 or 1.3 < passes < 1.5, passes
