"""A run's folder from elsewhere: a resume continues plain files only, and never follows a link out of the folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares

from leyden import LeydenError, Trainer
from leyden.callbacks import CSVLogger, ModelCheckpoint, TensorBoardLogger
from leyden.checkpoint.lock import NAME, FolderLock
from leyden.core.paths import check_plain, opener


def as_link(path: Path) -> Path:
    """Moves a file out of the run's folder, and leaves a link; returns the file."""
    outside = path.parents[3] / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)
    return outside


def as_pipe(path: Path) -> Path:
    """Replaces a file by a FIFO, which would keep a reader waiting; returns a copy of the file."""
    outside = path.parents[3] / "outside"
    shutil.move(path, outside)
    os.mkfifo(path)
    return outside


def train(root: Path, max_epochs: int, ckpt_path: Any = None) -> None:
    options = {"default_root_dir": root, "max_epochs": max_epochs, "log_every_n_steps": 1, "enable_checkpointing": True}
    parts = {"logger": [CSVLogger(root), TensorBoardLogger(root)], "digest_every_n_steps": 1}
    callback = ModelCheckpoint(root / "kept", save_top_k=-1)
    trainer = Trainer(**{**QUIET, **options, **parts}, callbacks=[callback])
    trainer.fit(Squares(torch.nn.Linear(2, 1)), [torch.ones(1, 2)] * 3, ckpt_path=ckpt_path)


@pytest.mark.parametrize("change", [as_link, as_pipe])
@pytest.mark.parametrize("name", ["metrics.csv", "run.json", "digests.jsonl", "events.out.tfevents.*"])
def test_a_resume_refuses_links_and_pipes_in_the_place_of_a_loggers_file(
    tmp_path: Path, name: str, change: Callable[[Path], Path]
) -> None:
    root = tmp_path / "runs"
    train(root, 2)
    (path,) = (root / "logs" / "version_0").glob(name)
    outside = change(path)
    before = outside.read_bytes()
    with pytest.raises(LeydenError, match=f"{path.name} is (a link|not a plain file)"):
        train(root, 3, ckpt_path=root / "kept" / "epoch=0-step=3")
    assert outside.read_bytes() == before


def test_hyperparameters_are_not_merged_with_a_file_outside(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text('{"secret": 1}')
    logger = CSVLogger(tmp_path / "runs", version="mine")
    logger.log_metrics({"loss": 1.0}, step=1)
    (Path(logger.log_dir or "") / "hparams.json").symlink_to(tmp_path / "outside")
    with pytest.raises(LeydenError, match=r"hparams\.json is a link"):
        logger.log_hyperparams({"lr": 0.1})


@pytest.mark.parametrize("call", [FolderLock.acquire, FolderLock.check_free])
def test_a_lock_that_is_no_plain_file_is_refused_at_once(tmp_path: Path, call: Callable[[FolderLock], None]) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(LeydenError, match=f"{NAME} is not a plain file"):
        call(FolderLock(tmp_path))
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LeydenError, match=f"{NAME} is a link"):
        call(FolderLock(tmp_path))


def test_a_plain_file_opens_in_every_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    check_plain(path)
    for mode in ("a", "r+", "r"):
        with open(path, mode, opener=opener) as file:
            assert mode != "r" or file.read() == "a"
            if mode == "a":
                file.write("a")
    with pytest.raises(LeydenError, match="is a folder"):
        opener(str(tmp_path), os.O_RDONLY)
