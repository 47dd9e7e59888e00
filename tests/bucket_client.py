"""Trains in forks of this process, one at a time, as the lines on standard input say; see `buckets.Client`."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from typing import Any

import torch
from models import Squares, sgd_with_momentum
from programs import PRELOAD
from torch import nn
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.callbacks import ModelCheckpoint


def train(url: str, root: str, strategy: str = "auto", environ: dict[str, str] | None = None, **options: Any) -> None:
    """Trains six steps with a checkpoint after every second one, or continues such a run.

    Args:
        url: the folder of the checkpoints.
        root: the folder of the run's local files.
        strategy: the Trainer's.
        environ: the variables that make this process a rank.
        **options: further arguments of ModelCheckpoint.
    """
    os.environ.update(environ or {})
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    module = Squares(nn.Linear(4, 2), sgd_with_momentum)
    checkpoint = ModelCheckpoint(dirpath=url, every_n_train_steps=2, **options)
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        callbacks=checkpoint,
        enable_progress_bar=False,
        default_root_dir=root,
        verbose=False,
    )
    trainer.fit(module, DataLoader(torch.randn(6 * ranks, 4), batch_size=2, shuffle=True), ckpt_path="auto")


def main() -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    while line := _line():
        pid = os.fork()
        if pid == 0:
            _line()
            try:
                train(**json.loads(line))
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _line() -> str:
    """Reads a line without buffering what follows it, which is for the child."""
    found = b""
    while not found.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return ""
        found += byte
    return found.decode()


if __name__ == "__main__":
    main()
