"""A program that trains and is killed while it saves, for test_killed_saves.py.

    python killed_saves.py KIND FOLDER POINT STEP

The kill happens when the last ModelCheckpoint saves the step. POINT is "link" (before the link moves), "before" or
"after" (the commit).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import QUIET, Line
from torch import Tensor

from leyden import Trainer, seed_everything
from leyden.callbacks import ModelCheckpoint
from leyden.callbacks.checkpointing import checkpoint_commit
from leyden.checkpoint.writer import CheckpointWriter

VALUES = [0.5, 0.3, 0.9, 0.2]
KINDS: dict[str, dict[str, Any]] = {
    "linked": {"monitor": "val", "save_top_k": 2, "save_last": True},
    "steps": {"every_n_train_steps": 2, "save_top_k": -1},
    "monitored": {"monitor": "val", "save_top_k": 3, "every_n_train_steps": 4},
    "epochs": {"every_n_epochs": 1, "save_on_train_epoch_end": True, "save_top_k": 3},
    "validations": {"save_on_train_epoch_end": False, "save_top_k": -1},
    "one folder": {"every_n_train_steps": 4, "save_top_k": 3},
    "weights": {"every_n_train_steps": 4, "save_weights_only": True, "save_top_k": 3},
}


class Scripted(Line):
    """Logs `val` from a list, one value per validation, and `train` at each step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("train", float(self.trainer.global_step), on_step=True, on_epoch=True)
        return super().training_step(batch + torch.rand(()), batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", VALUES[self.trainer.progress.validations % len(VALUES)])


def callbacks(kind: str, root: Path) -> list[ModelCheckpoint]:
    """Returns one ModelCheckpoint for the kind "linked"; else two, which save in the same hook."""
    first, second, arguments = root / "first", root / "second", KINDS[kind]
    if kind == "linked":
        return [ModelCheckpoint(first, **arguments)]
    resumable = {**arguments, "save_top_k": 1, "save_weights_only": False}
    last = ModelCheckpoint(first if kind == "one folder" else second, "second-{step}", **arguments)
    return [ModelCheckpoint(first, **resumable), last]


def train(root: Path, own: list[ModelCheckpoint], ckpt_path: Any = "auto", max_epochs: int = 4) -> None:
    """Trains epochs of four steps, from a checkpoint on."""
    seed_everything(0)
    options = {"default_root_dir": root, "max_epochs": max_epochs, "enable_checkpointing": True}
    trainer = Trainer(callbacks=list(own), **{**QUIET, **options})
    loader = torch.utils.data.DataLoader(torch.rand(8, 2), 2, shuffle=True)
    trainer.fit(Scripted(), loader, [torch.ones(2, 2)] * 4, ckpt_path=ckpt_path)


def main() -> None:
    kind, root, point, step = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    own = callbacks(kind, root)

    def dies(function: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **arguments: Any) -> Any:
            result = function(*args, **arguments) if after else None
            if own[-1]._saved_step == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return result if after else function(*args, **arguments)

        return call

    if point == "link":
        checkpoint_commit._point = dies(checkpoint_commit._point)  # type: ignore[assignment]
    else:
        CheckpointWriter._commit = dies(CheckpointWriter._commit, point == "after")  # type: ignore[method-assign]
    train(root, own)


if __name__ == "__main__":
    main()
