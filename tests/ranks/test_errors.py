"""When a rank fails: its error shown once, with rank and step; all ranks gone in seconds; the last checkpoint whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, SAVED
from ranks.world import run_world
from torch import Tensor, nn

from leyden import Trainer, TrainModule
from leyden.callbacks import EarlyStopping
from leyden.checkpoint.folder import newest

DEADLINE = 15.0
"""Seconds after which no process may be left; only a hang takes that long."""

SCRIPT = """
import multiprocessing, os, signal, sys, threading, time
from datetime import timedelta
import torch
from leyden import Trainer, TrainModule
from leyden.callbacks import ModelCheckpoint
from leyden.strategies.ddp import DDPStrategy
from torch.utils.data import DataLoader

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 5 and self.trainer.global_rank == int(sys.argv[2]):
            how = sys.argv[1]
            if how == "raise":
                raise ZeroDivisionError("of this rank")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(7)
            if how == "leave":
                sys.exit(0)
            if how == "vanish":
                os._exit(0)
            if how == "sleep":
                threading.Event().wait()
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "worker":
                multiprocessing.active_children()[0].kill()
            if how == "agent":
                os.kill(int(os.environ["LEYDEN_AGENT"]), signal.SIGKILL)
                time.sleep(60)
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self):
        return DataLoader(torch.ones(400, 4), batch_size=2, num_workers=sys.argv[1] in ("agent", "worker"))

hangs = sys.argv[1] in ("sleep", "stop")
trainer = Trainer(
    devices=2, strategy=DDPStrategy(timeout=timedelta(seconds=8)) if hangs else "ddp", accelerator="cpu", max_epochs=1,
    logger=False, enable_progress_bar=False,
    callbacks=ModelCheckpoint(every_n_train_steps=1, save_top_k=-1),
)
trainer.fit(Module())
print("after fit")
"""


def processes(token: str) -> list[int]:
    """Returns the processes that were started with this token in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                f"TOKEN={token}".encode() in (entry / "environ").read_bytes()
                and (entry / "stat").read_text().split()[2] != "Z"
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def run_script(how: str, folder: Path, rank: int = 1) -> tuple[int, str, str]:
    """Runs the script, in which one rank fails at step 5; returns its exit code, stdout and stderr.

    Asserts that no process is left and that the newest checkpoint was written by the step before the failure. A rank
    whose loader's worker was killed may still train on the batches that were loaded ahead.
    """
    (folder / "script.py").write_text(SCRIPT)
    token = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "script.py", how, str(rank)],
        cwd=folder,
        env={**os.environ, "TOKEN": token, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    deadline = time.monotonic() + DEADLINE
    while processes(token) and time.monotonic() < deadline:
        os.sched_yield()
    assert not processes(token), "a process is still running"
    found = newest(folder / SAVED)
    assert found is not None and found.name in [
        f"epoch=0-step={step}" for step in ((5, 6, 7) if how == "worker" else (5,))
    ]
    return done.returncode, done.stdout, done.stderr


READS_PROC = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def in_full(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.full)


@READS_PROC
def test_an_error_on_one_rank_is_shown_once_with_rank_and_step(tmp_path: Path) -> None:
    code, out, err = run_script("raise", tmp_path)
    assert code == 1 and "after fit" not in out
    assert err.count("ZeroDivisionError: of this rank") == 1
    assert err.count("Traceback") == 1, err
    assert "rank 1, step 5 (epoch 0, batch 5) in fit" in err
    # The line of the user's file.
    assert 'raise ZeroDivisionError("of this rank")' in err
    assert "Connection closed" not in err and "SIGTERM" not in err


@READS_PROC
@pytest.mark.parametrize(
    ("how", "rank", "code", "message"),
    [
        ("kill", 1, 137, "rank 1 was killed by signal 9 (SIGKILL)"),
        in_full("exit", 1, 7, "rank 1 exited with code 7"),
        ("leave", 0, 1, "rank 0 exited with code 0, at step 5 (epoch 0, batch 5) in fit. Rank 1 was waiting for it"),
        in_full("leave", 1, 1, "rank 1 exited with code 0, at step 5"),
        in_full("vanish", 0, 1, "rank 0 exited with code 0 while the others"),
        in_full("vanish", 1, 1, "rank 1 exited with code 0 while the others"),
    ],
)
def test_the_error_names_a_rank_that_exits_early(how: str, rank: int, code: int, message: str, tmp_path: Path) -> None:
    found, _, err = run_script(how, tmp_path, rank)
    assert found == code
    assert err.count(f"leyden: {message}") == 1 and "Traceback" not in err, err


@READS_PROC
@pytest.mark.parametrize(
    ("how", "rank", "message"),
    [
        in_full("stop", 0, "rank 0 does not answer: it has exited or is stopped"),
        in_full("stop", 1, "rank 1 does not answer"),
        in_full("sleep", 0, "in training_step: threading.Event().wait()"),
        in_full("sleep", 1, "in training_step: threading.Event().wait()"),
    ],
)
def test_the_timeout_error_names_the_rank_that_hangs(how: str, rank: int, message: str, tmp_path: Path) -> None:
    code, _, err = run_script(how, tmp_path, rank)
    assert code == 1
    place = f"raised on rank {1 - rank}, step 5 (epoch 0, batch 5) in fit"
    assert f"leyden: {place}; the other ranks were terminated. Of these, rank {rank}" in err, err
    assert message in err and err.count("Traceback") == 1, err


@READS_PROC
def test_a_killed_loader_worker_is_reported_once_with_its_rank(tmp_path: Path) -> None:
    code, _, err = run_script("worker", tmp_path)
    assert code == 1 and err.count("was killed by SIGKILL") == 1, err
    assert "WorkerDied: worker 0 of 1 of a DataLoader" in err and "raised on rank 1, step " in err, err


@READS_PROC
def test_ranks_end_with_their_agent(tmp_path: Path) -> None:
    code, _, _ = run_script("agent", tmp_path)
    assert code == -signal.SIGKILL


# checks at setup ------------------------------------------------------------------------------------------------------
class Module(TrainModule):
    def __init__(
        self, width: int = 3, bias: bool = True, dtype: Any = None, optimizer: str = "SGD", lr: float = 0.1
    ) -> None:
        super().__init__()
        self.net = nn.Linear(4, width, bias=bias, dtype=dtype)
        self.optimizer, self.lr = optimizer, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch.to(self.net.weight.dtype)).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.net.parameters(), lr=self.lr)


def trainer(**arguments: Any) -> Trainer:
    return Trainer(**{**QUIET, "max_epochs": 1, "strategy": "ddp", "use_distributed_sampler": False, **arguments})


def fit_with_differences(module: dict[str, Any], arguments: dict[str, Any], batches: int) -> None:
    """Fits with another module, other arguments, or fewer batches in the loader that Leyden shards, on rank 1."""
    other = os.environ["RANK"] == "1"
    fitted = trainer(**{"use_distributed_sampler": batches < 6, **(arguments if other else {})})
    fitted.fit(Module(**module if other else {}), [torch.ones(2, 4)] * (batches if other else 6))


FULL = pytest.mark.full
SHAPE = "rank 0 has net.weight (3, 4) float32 trained, and rank 1 has net.weight (5, 4) float32 trained"
NAME = "rank 0 has net.bias (3,) float32 trained, and rank 1 has nothing more"
EPOCHS = "rank 0 has the Trainer's max_epochs=1, and rank 1 has the Trainer's max_epochs=2"
ADAM = "rank 0 has optimizer 0 of type SGD, and rank 1 has optimizer 0 of type Adam"
BATCHES = "rank 0 has 3 training batches, and rank 1 has 2 training batches"


@pytest.mark.parametrize(
    ("module", "arguments", "batches", "message"),
    [
        pytest.param({"width": 5}, {}, 6, SHAPE, id="shape"),
        pytest.param({"bias": False}, {}, 6, NAME, id="name", marks=FULL),
        pytest.param(
            {"dtype": torch.float64}, {}, 6, "rank 1 has net.weight (3, 4) float64 trained", id="dtype", marks=FULL
        ),
        pytest.param({}, {"max_epochs": 2}, 6, EPOCHS, id="argument"),
        pytest.param(
            {},
            {"callbacks": EarlyStopping("loss")},
            6,
            "rank 1 has the callback EarlyStopping",
            id="callback",
            marks=FULL,
        ),
        pytest.param({"optimizer": "Adam"}, {}, 6, ADAM, id="optimizer"),
        pytest.param({"lr": 0.2}, {}, 6, "lr=0.2", id="option", marks=FULL),
        pytest.param({}, {}, 4, BATCHES, id="batches"),
    ],
)
def test_differing_ranks_raise_one_error(
    module: dict[str, Any], arguments: dict[str, Any], batches: int, message: str
) -> None:
    found = run_world(2, fit_with_differences, module, arguments, batches, may_fail=True)
    reported = [text for text in found if isinstance(text, str)]
    # Once: the other rank exits silently with code 1.
    assert len(reported) == 1 and found.count(1) == 1
    assert reported[0].startswith("ConfigurationError: the ranks differ") and message in reported[0]


def fit_with_different_displays() -> int:
    """Fits with a progress bar and a folder that differ by rank."""
    first = os.environ["RANK"] == "0"
    fitted = trainer(enable_progress_bar=first, default_root_dir="." if first else "elsewhere")
    fitted.fit(Module(), [torch.ones(2, 4)] * 3)
    return fitted.global_step


def test_display_and_folder_arguments_may_differ_by_rank() -> None:
    assert run_world(2, fit_with_different_displays) == [3, 3]


def raise_outside_of_a_run() -> None:
    fitted = trainer()
    fitted.fit(Module(), [torch.ones(2, 4)] * 3)
    if fitted.global_rank == 1:
        fitted.strategy.report_failure(ValueError("between two runs"))
        raise ValueError("between two runs")
    fitted.fit(Module(), [torch.ones(2, 4)] * 3)


def test_an_error_between_two_runs_ends_all_ranks() -> None:
    assert run_world(2, raise_outside_of_a_run, may_fail=True) == [1, "ValueError: between two runs"]
