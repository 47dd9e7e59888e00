"""A job that makes no progress: the watchdog ends it, names the odd rank once, and writes all stacks down."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from ranks.test_errors import DEADLINE, READS_PROC, in_full, members

SCRIPT = """
import os, signal, sys, threading
import torch
from leyden import Trainer, TrainModule
from torch.utils.data import DataLoader, Dataset

how, odd = sys.argv[1], int(sys.argv[2])

class Samples(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        if how == "loader" and index >= 20 and os.environ.get("RANK", "0") == str(odd):
            threading.Event().wait()
        return torch.ones(4)

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 5 and self.trainer.global_rank == odd:
            if how == "sleep":
                threading.Event().wait()
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=2, num_workers=int(os.environ.get("WORKERS", "0")))

if __name__ == "__main__":
    trainer = Trainer(
        devices=int(os.environ.get("DEVICES", "2")), strategy=os.environ.get("STRATEGY", "auto"), accelerator="cpu",
        max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False, hang_timeout=1,
    )
    trainer.fit(Module())
    print("after fit")
"""


def hang(how: str, odd: int, folder: Path, command: tuple[str, ...] = (), **environ: str) -> tuple[str, str]:
    """The error and the report of a script in which one rank hangs in its sixth batch; nobody is left of it."""
    (folder / "script.py").write_text(SCRIPT)
    token = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, *command, "script.py", how, str(odd)],
        cwd=folder,
        env={**os.environ, "TOKEN": token, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    deadline = time.monotonic() + DEADLINE
    while members(token) and time.monotonic() < deadline:
        os.sched_yield()
    assert not members(token), "somebody is left behind"
    assert done.returncode == 1 and "after fit" not in done.stdout, done.stderr
    [report] = folder.glob("hang-*.txt")
    return done.stderr, report.read_text()


@READS_PROC
@pytest.mark.parametrize(
    ("how", "odd", "environ", "words"),
    [
        ("sleep", 1, {}, "in training_step: threading.Event().wait(); rank 0 waits for it in backward"),
        ("stop", 0, {}, "is stopped (/proc says T (stopped)"),
        in_full("sleep", 0, {}, "in training_step: threading.Event().wait(); rank 1 waits for it in backward"),
        in_full("stop", 1, {}, "is stopped (/proc says T (stopped)"),
        in_full("loader", 1, {}, "in __getitem__: threading.Event().wait()"),
        in_full("loader", 1, {"WORKERS": "1"}, "waits for its loader, whose worker (process"),
    ],
)
def test_the_odd_rank_is_named_once_and_all_are_ended(
    how: str, odd: int, environ: dict[str, str], words: str, tmp_path: Path
) -> None:
    error, report = hang(how, odd, tmp_path, **environ)
    assert error.count("leyden: no progress for") == 1 and "Traceback" not in error, error
    assert f"rank {odd}, at step " in error and words in error, error
    for rank in range(2):
        assert f"rank {rank} (process" in report
    # The line of the one that waits, and its source.
    assert "_engine_run_backward" in report and "trainer.fit(Module())" in report
