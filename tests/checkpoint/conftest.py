"""Checkpoints with every kind of file, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter


def write(path: Path, step: int = 1, overwrite: bool = False) -> Path:
    """Writes a checkpoint with every kind of file; returns its path."""
    with CheckpointWriter(path, overwrite=overwrite) as writer:
        writer.model({"weight": torch.full((4, 3), float(step)), "bias": torch.arange(3)})
        writer.optimizers([{"state": {"weight": {"step": torch.tensor(float(step))}}, "param_groups": []}])
        writer.state("rank-0", {"rng": torch.get_rng_state(), "python": (3, (1, 2), None)})
        writer.state("callbacks", {"best": float("inf")})
        writer.json("hparams", {"lr": 0.1})
        return writer.commit(progress={"epoch": 0, "global_step": step}, world_size=1, strategy="single_device")


def read(path: Path) -> dict[str, Any]:
    """Returns everything that `write` wrote."""
    reader = CheckpointReader(path)
    return {
        "model": reader.model(),
        "optimizers": reader.optimizers(),
        "rank-0": reader.state("rank-0"),
        "callbacks": reader.state("callbacks"),
        "hparams": reader.json("hparams"),
        "progress": reader.progress(),
    }


@pytest.fixture(name="write")
def _write() -> Callable[..., Path]:
    return write


@pytest.fixture(name="read")
def _read() -> Callable[[Path], dict[str, Any]]:
    return read
