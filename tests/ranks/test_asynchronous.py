"""Asynchronous saves on two ranks: a checkpoint holds the step at which it was requested."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from ranks.late import delay_copies
from ranks.world import run_world
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.callbacks import Callback, Logger, ModelCheckpoint
from leyden.checkpoint.folder import newest
from leyden.checkpoint.format.staging import is_staging
from leyden.strategies import FSDPStrategy, MeshStrategy

ARGUMENTS: dict[str, Any] = {**QUIET, "enable_checkpointing": True}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: FSDPStrategy({nn.Linear}),
    "mesh": lambda: MeshStrategy(dp_shard=2),
}
CASES = {"ddp": "ddp", "fsdp": "fsdp", "mesh": "mesh", "ddp-validated": "ddp", "fsdp-validated": "fsdp"}
"""Strategies by the name of the folder; "-validated" cases save at the end of a validation."""


class Net(Squares):
    """A net with dropout, and under DDP with batch norm, whose statistics differ by rank."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 64), nn.BatchNorm1d(64) if norm else nn.Identity(), nn.Dropout(0.2), nn.Linear(64, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=0.01)


def fit(
    folder: Path, strategy: str, asynchronous: bool, *callbacks: Callback, validates: bool = False, **arguments: Any
) -> Trainer:
    torch.manual_seed(1)
    module, data = Net(strategy == "ddp"), torch.randn(88, 8)
    monitor = {"monitor": "val_loss", "mode": "max"} if validates else {}
    checkpoint = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, asynchronous=asynchronous, **monitor
    )
    settings = {"max_steps": 7, "precision": "bf16-mixed", "default_root_dir": folder.parent / "runs", **arguments}
    trainer = Trainer(**ARGUMENTS, strategy=STRATEGIES[strategy](), callbacks=[checkpoint, *callbacks], **settings)
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data[:16], batch_size=4) if validates else None)
    return trainer


class SaveRecorder(Logger):
    """Records the checkpoints that it is notified of, and checks that they are complete."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert Path(checkpoint_callback.last_model_path, "manifest.json").is_file()
        self.names.append(Path(checkpoint_callback.last_model_path).name)


def save_both_ways(folder: Path) -> None:
    for case, strategy in CASES.items():
        validates: dict[str, Any] = {"validates": True, "val_check_interval": 2} if case != strategy else {}
        loggers = [SaveRecorder(), SaveRecorder(), SaveRecorder()]
        fit(folder / case / "sync", strategy, False, loggers[2], **validates)
        for begun in (0, 1):
            with pytest.MonkeyPatch.context() as patch:
                delay_copies(patch, begun)
                trainer = fit(folder / case / f"async-{begun}", strategy, True, loggers[begun], **validates)
            assert trainer.pending_save is None
        expected = ["step=2", "step=4", "step=6"] if trainer.is_global_zero else []
        assert [logger.names for logger in loggers] == [expected] * 3


def content(checkpoint: Path) -> dict[str, Any]:
    """Returns the bytes of every file, without values that hold a time or a path."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in sorted(checkpoint.iterdir())}
    del found["manifest.json"], found["progress.json"], found["run.json"]
    found["callbacks.json"] = [
        {key: value for key, value in state.items() if key not in ("dirpath", "seconds_since_save", "doomed")}
        for state in json.loads(found["callbacks.json"])["tree"].values()
    ]
    return found


def test_asynchronous_saves_write_the_same_files_as_synchronous_ones(tmp_path: Path) -> None:
    run_world(2, save_both_ways, tmp_path)
    for case, strategy in CASES.items():
        names = ["step=2", "step=4", "step=6"]
        for kind in ("sync", "async-0", "async-1"):
            assert sorted(os.listdir(tmp_path / case / kind)) == names
        for name in names:
            sync = content(tmp_path / case / "sync" / name)
            assert len([file for file in sync if file.startswith(("model-", "optimizer-0"))]) >= 2 - (strategy == "ddp")
            for kind in ("async-0", "async-1"):
                assert content(tmp_path / case / kind / name) == sync


class Preempt(Callback):
    """Sends SIGTERM to rank 1 in the step after a save began."""

    order = 300

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def preempted(folder: Path) -> str:
    try:
        fit(folder, "fsdp", True, Preempt(), preemption=True)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def test_a_preempted_run_commits_its_pending_save(tmp_path: Path) -> None:
    found = run_world(2, preempted, tmp_path)
    assert found == ["SystemExit: 75"] * 2
    assert not [name for name in os.listdir(tmp_path) if is_staging(name)]
    last = newest(tmp_path)
    assert last is not None
    assert last.name in ("step=4", "step=6")


def fail(folder: Path) -> None:
    """Rank 1 cannot write its shard of the second checkpoint."""
    from leyden.checkpoint import copies

    write = copies.write_stream

    def full(path: Path, *args: Any, **kwargs: Any) -> Any:
        if ".step=4." in path.parent.name and os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device")
        return write(path, *args, **kwargs)

    copies.write_stream = full
    fit(folder, "fsdp", True, max_steps=40)


def test_a_failed_shard_write_ends_the_run_with_its_error(tmp_path: Path) -> None:
    found = run_world(2, fail, tmp_path, may_fail=True)
    assert [text for text in found if "No space left on device" in str(text)], found
    assert sorted(name for name in os.listdir(tmp_path) if not is_staging(name)) == ["step=2"]
