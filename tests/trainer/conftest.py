"""Fixtures for tests of the Trainer: a Trainer that writes nothing, one call that fits with it, and a disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import QUIET

from leyden import Trainer, TrainModule
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter

Fit = Callable[..., Trainer]


@pytest.fixture
def quiet(tmp_path: Path) -> dict[str, Any]:
    """Arguments of a Trainer that shows and writes nothing."""
    return {**QUIET, "default_root_dir": tmp_path}


@pytest.fixture
def fit(quiet: dict[str, Any]) -> Fit:
    """Returns a function that fits for one epoch, unless its arguments say otherwise."""

    def run(module: TrainModule, train: Any, val: Any = None, **arguments: Any) -> Trainer:
        trainer = Trainer(**{"max_epochs": 1, **quiet, **arguments})
        trainer.fit(module, train, val)
        return trainer

    return run


@pytest.fixture
def disk(tmp_path: Path) -> Callable[..., Any]:
    """Returns a function that writes a tree to a checkpoint on disk and reads it back."""

    def round_trip(tree: Any, **reading: Any) -> Any:
        with CheckpointWriter(tmp_path / "tree") as writer:
            writer.state("user", tree)
            path = writer.commit(progress={})
        return CheckpointReader(path).state("user", **reading)

    return round_trip
