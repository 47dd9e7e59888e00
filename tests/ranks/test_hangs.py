"""A job that makes no progress: the watchdog ends it, names the stuck rank once, and reports all stacks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.test_errors import DEADLINE, READS_PROC, in_full, processes

from leyden import Trainer, TrainModule
from leyden.callbacks import Callback
from leyden.launch.heartbeat import HEARTBEATS

SCRIPT = """
import os, signal, subprocess, sys, threading, time
import torch
from leyden import Trainer, TrainModule
from leyden.callbacks import Callback
from torch.utils.data import DataLoader, Dataset

how, stuck = sys.argv[1], int(sys.argv[2])

class Samples(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        if how == "loader" and index >= 20 and os.environ.get("RANK", "0") == str(stuck):
            threading.Event().wait()
        if how == "one" and index == 45:
            print("asleep:", os.getpid(), flush=True)
            threading.Event().wait()
        return torch.ones(4)

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 5 and self.trainer.global_rank == stuck:
            if how == "sleep":
                threading.Event().wait()
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "debug":
                breakpoint()
        if how == "suspend" and batch_idx == 5:
            # Stops all ranks, as Ctrl-Z or a cluster's suspension would; another process continues them.
            pause = f"kill -STOP {os.getpid()}; sleep 2.5; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", pause], start_new_session=True)
            time.sleep(0.5)
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self):
        workers, method = int(os.environ.get("WORKERS", "0")), os.environ.get("METHOD")
        return DataLoader(Samples(), batch_size=2, num_workers=workers, multiprocessing_context=method)

    def on_fit_start(self):
        time.sleep(3 if how == "slow" else 0)

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            time.sleep(3 if how == "slow" else 0)

    def val_dataloader(self):
        return [torch.ones(2, 4)] * 2

class SlowSave(Callback):
    def on_save_checkpoint(self, trainer, module, checkpoint):
        time.sleep(3)

if __name__ == "__main__":
    trainer = Trainer(
        devices=int(os.environ.get("DEVICES", "2")), strategy=os.environ.get("STRATEGY", "auto"), accelerator="cpu",
        max_epochs=1, limit_train_batches=30, logger=False, enable_progress_bar=False, hang_timeout=2,
        default_root_dir="run", callbacks=SlowSave() if how == "slow" else None,
    )
    trainer.fit(Module())
    print("after fit")
"""


def run_script(
    how: str, stuck: int, folder: Path, command: tuple[str, ...] = (), typed: str | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs the script, in which one rank hangs or is held in its sixth batch; asserts that no process is left."""
    (folder / "script.py").write_text(SCRIPT)
    token = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, *command, "script.py", how, str(stuck)],
        cwd=folder,
        env={**os.environ, "TOKEN": token, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        input=typed,
        stdin=subprocess.DEVNULL if typed is None else None,
    )
    deadline = time.monotonic() + DEADLINE
    while processes(token) and time.monotonic() < deadline:
        os.sched_yield()
    assert not processes(token), "a process is still running"
    return done


def reports(folder: Path) -> list[str]:
    return [path.read_text() for path in (folder / "run").rglob("hang-*.txt")]


@READS_PROC
@pytest.mark.parametrize(
    ("how", "stuck", "environ", "words"),
    [
        ("sleep", 1, {}, "in training_step: threading.Event().wait(); rank 0 waits for it in backward"),
        ("stop", 0, {}, "is stopped (state T (stopped) in /proc"),
        in_full("sleep", 0, {}, "in training_step: threading.Event().wait(); rank 1 waits for it in backward"),
        in_full("stop", 1, {}, "is stopped (state T (stopped) in /proc"),
        in_full("loader", 1, {}, "in __getitem__: threading.Event().wait()"),
        in_full("loader", 1, {"WORKERS": "1"}, "waits for its loader, whose worker (process"),
    ],
)
def test_the_watchdog_names_the_stuck_rank_once_and_ends_all(
    how: str, stuck: int, environ: dict[str, str], words: str, tmp_path: Path
) -> None:
    done = run_script(how, stuck, tmp_path, **environ)
    error = done.stderr
    assert done.returncode == 1 and "after fit" not in done.stdout, error
    assert error.count("leyden: no progress for") == 1 and "Traceback" not in error, error
    assert f"rank {stuck}, at step " in error and words in error, error
    [report] = reports(tmp_path)
    for rank in range(2):
        assert f"rank {rank} (process" in report
    # The line at which the other rank waits, and the user's line.
    assert "_engine_run_backward" in report and "trainer.fit(Module())" in report


@READS_PROC
def test_a_single_process_watches_itself(tmp_path: Path) -> None:
    done = run_script("loader", 0, tmp_path, DEVICES="1", WORKERS="1")
    assert done.returncode == 1
    assert "rank 0, at step" in done.stderr and "waits for its loader, whose worker (process" in done.stderr
    assert "This process was terminated." in done.stderr and len(reports(tmp_path)) == 1


@READS_PROC
@pytest.mark.parametrize("method", ["fork", in_full("spawn")])
def test_of_several_workers_the_one_that_the_loader_waits_for_is_named(method: str, tmp_path: Path) -> None:
    done = run_script("one", 0, tmp_path, DEVICES="1", WORKERS="3", METHOD=method)
    asleep = re.search(r"asleep: (\d+)", done.stdout)
    assert asleep is not None, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "no progress" in line]
    assert f"waits for its loader, whose worker (process {asleep[1]}) is at " in line
    assert "in __getitem__: threading.Event().wait()" in line and "trainer.fit" not in line
    [report] = reports(tmp_path)
    # The stacks of all workers.
    assert report.count("in _worker_loop") == 3


@READS_PROC
@pytest.mark.full
def test_setup_validation_and_saving_get_more_time(tmp_path: Path) -> None:
    done = run_script("slow", 0, tmp_path, DEVICES="1")
    assert done.returncode == 0 and "after fit" in done.stdout, done.stderr
    assert not reports(tmp_path) and "no progress" not in done.stderr


@READS_PROC
@pytest.mark.parametrize(
    ("how", "typed"),
    [
        ("debug", "import time; time.sleep(2.5)\nc\n"),
        pytest.param("suspend", None, marks=pytest.mark.full),
    ],
)
def test_a_job_in_the_debugger_or_suspended_is_not_ended(how: str, typed: str | None, tmp_path: Path) -> None:
    done = run_script(how, 0, tmp_path, typed=typed)
    assert done.returncode == 0 and done.stdout.count("after fit") == 2, done.stderr
    assert not reports(tmp_path) and "no progress" not in done.stderr


@READS_PROC
@pytest.mark.full
@pytest.mark.parametrize("how", ["sleep", "stop"])
def test_under_torchrun_one_rank_reports_a_hang(how: str, tmp_path: Path) -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_script(how, 1, tmp_path, command)
    assert done.returncode == 1 and done.stderr.count("leyden: no progress for") == 1, done.stderr
    # A stopped rank reports nothing; the other one reports that it waits itself.
    words = "rank 1, at step 5 (epoch 0, batch 5)" if how == "sleep" else "rank 0 waits in backward, at step 5"
    assert words in done.stderr


@READS_PROC
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_fit_raises_if_it_started_the_ranks(strategy: str, tmp_path: Path) -> None:
    done = run_script("sleep", 1, tmp_path, STRATEGY=strategy)
    assert done.returncode == 1 and "after fit" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert "LeydenError: no progress for" in last and "rank 1, at step 5" in last, done.stderr
    assert len(reports(tmp_path)) == 1


OWN_LOOP = """
import os, sys, threading, time
import torch
from torch.utils.data import DataLoader
from leyden import Accelerator

how = sys.argv[1]
accelerator = Accelerator(cpu=True, project_dir="run")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(torch.ones(40, 4), batch_size=1 if how == "slow" else 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for number, batch in enumerate(loader):
        if how == "slow":
            # A pass takes three times the limit, and no batch does.
            time.sleep(0.2)
        if how == "hang" and accelerator.process_index == 1 and epoch == 1 and number == 5:
            threading.Event().wait()
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    if how == "slow":
        time.sleep(3)
        accelerator.save_state("run/state")
if how == "alone":
    if accelerator.is_main_process:
        accelerator.backward(model(batch).mean())
    accelerator.wait_for_everyone()
if how == "patient":
    if accelerator.is_main_process:
        time.sleep(8)
        weight, began = torch.ones(400, 400, requires_grad=True), time.monotonic()
        while time.monotonic() - began < 8:
            (weight @ weight).sum().backward()
    accelerator.wait_for_everyone()
print("after training")
"""


@READS_PROC
@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("hang", ("--cpu", "--num_processes", "2", "--hang_timeout", "2")),
        pytest.param("slow", ("--cpu", "--num_processes", "1", "--hang_timeout", "1.3"), marks=pytest.mark.full),
    ],
)
def test_an_accelerator_loop_is_watched(how: str, options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OWN_LOOP)
    command = [sys.executable, "-m", "leyden", "launch", *options, "script.py", how]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    if how == "slow":
        assert done.returncode == 0 and "after training" in done.stdout, done.stderr
        assert not reports(tmp_path) and "no progress" not in done.stderr
        return
    assert done.returncode == 1 and "after training" not in done.stdout
    assert done.stderr.count("leyden: no progress for") == 1, done.stderr
    assert "rank 1, at step 15 (epoch 1, batch 5), in training" in done.stderr
    assert "threading.Event().wait(); rank 0 waits for it" in done.stderr
    assert len(reports(tmp_path)) == 1


@READS_PROC
@pytest.mark.parametrize("options", [("--hang_timeout", "2"), in_full(())])
def test_a_deadlock_between_two_passes_ends_and_both_lines_are_named(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OWN_LOOP)
    ranks = ("--cpu", "--num_processes", "2")
    command = [sys.executable, "-m", "leyden", "launch", *ranks, *options, "script.py", "alone"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "after training" not in done.stdout
    [line] = [line for line in done.stderr.splitlines() if "no progress for" in line]
    assert "between two passes over its loaders" in line
    assert "in <module>: accelerator.backward(model(batch).mean()); rank 1 waits in barrier" in line
    assert "in <module>: accelerator.wait_for_everyone(); they wait for each other in different collectives" in line


@READS_PROC
@pytest.mark.full
def test_ranks_may_wait_for_one_that_sleeps_or_computes_between_two_passes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OWN_LOOP)
    options = ("--cpu", "--num_processes", "2", "--hang_timeout", "2")
    command = [sys.executable, "-m", "leyden", "launch", *options, "script.py", "patient"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "no progress" not in done.stderr, done.stderr


class WaitsForReport(TrainModule):
    """WaitsForReport in its sixth batch until the watchdog has written a report."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net, self.folder = torch.nn.Linear(4, 1), folder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        while batch_idx == 5 and not list(self.folder.rglob("hang-*.txt")):
            os.sched_yield()
        return self.net(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def test_under_pytest_the_watchdog_only_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(**{**QUIET, "default_root_dir": tmp_path, "max_epochs": 1, "hang_timeout": 0.2})
    trainer.fit(WaitsForReport(tmp_path), [torch.ones(2, 4)] * 8)
    assert trainer.global_step == 8
    first, *_ = tmp_path.rglob("hang-*.txt")
    assert "in training_step" in first.read_text()


class FitsInHook(Callback):
    """Fits another module at the end of an epoch, for longer than a hook may take without progress."""

    def __init__(self, folder: Path, limit: float | None) -> None:
        self.settings = {**QUIET, "default_root_dir": folder, "max_epochs": 1, "hang_timeout": limit}
        self.steps = 0

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        inner = Trainer(**self.settings)
        inner.fit(SlowStep(), [torch.ones(2, 4)] * 30)
        self.steps = inner.global_step


class SlowStep(TrainModule):
    """Takes 0.2 s in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        threading.Event().wait(0.2)
        return self.net(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.parametrize("limit", [None, *(pytest.param(limit, marks=pytest.mark.full) for limit in ("auto", 60.0))])
def test_a_fit_inside_a_hook_is_progress_of_the_outer_run(tmp_path: Path, limit: Any) -> None:
    hook = FitsInHook(tmp_path, limit)
    trainer = Trainer(
        **{**QUIET, "default_root_dir": tmp_path, "max_epochs": 1, "hang_timeout": 1, "callbacks": [hook]}
    )
    trainer.fit(WaitsForReport(tmp_path), [torch.ones(2, 4)] * 4)
    assert hook.steps == 30 and HEARTBEATS not in os.environ
    assert not list(tmp_path.rglob("hang-*.txt"))


@READS_PROC
@pytest.mark.full
@pytest.mark.timeout(1250)
def test_every_hang_ends_the_whole_job_and_names_the_culprit_once() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "hangs.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=1200)
    rows = done.stdout.splitlines()[2:]
    # No process is left, and one line names the culprit. As root there are more cases: two hosts whose cable is cut.
    assert len(rows) >= 14 and all(row.endswith("| 1 | 0 |") for row in rows), done.stdout + done.stderr
