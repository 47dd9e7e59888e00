"""A loader's workers end when the Trainer is released or the main process is killed; dead workers raise."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data._utils as data_utils
from models import Line
from programs import run_program
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset
from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails  # type: ignore[attr-defined]
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from leyden import Trainer
from leyden.data.combined import CombinedLoader
from leyden.data.workers import WorkerDied, died
from leyden.launch.heartbeat import Heartbeat, Phase


class Module(Line):
    """Records the workers running during its last step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.workers = multiprocessing.active_children()
        return super().training_step(batch, batch_idx)


def workers_of_run(persistent: bool, **limit: Any) -> list[BaseProcess]:
    batches = BatchSampler(SequentialSampler(range(32)), 4, False)
    data = TensorDataset(torch.ones(32, 2))
    loader = DataLoader(
        data, batch_sampler=batches, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    module = Module()
    others = multiprocessing.active_children()
    Trainer(accelerator="cpu", barebones=True, **limit).fit(module, loader)
    return [worker for worker in module.workers if worker not in others]


@pytest.mark.parametrize(
    ("persistent", "limit"),
    [(True, {"max_epochs": 2}), (True, {"max_steps": 3}), (False, {"max_steps": 3})],
    ids=["persistent", "persistent, within an epoch", "within an epoch"],
)
def test_workers_end_when_the_trainer_is_released(
    persistent: bool, limit: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch waits this long for a worker: one still alive afterwards was never asked to end.
    monkeypatch.setattr(data_utils, "MP_STATUS_CHECK_INTERVAL", 30.0)
    monkeypatch.setattr(data_utils.worker, "MP_STATUS_CHECK_INTERVAL", 90.0)
    join, timed_out = BaseProcess.join, []

    def record_timeout(self: BaseProcess, timeout: float | None = None) -> None:
        join(self, timeout)
        if self.is_alive():
            timed_out.append(self.pid)

    monkeypatch.setattr(BaseProcess, "join", record_timeout)
    # An early collection of a reference cycle would hide that the cycle keeps workers alive.
    gc.disable()
    try:
        workers = workers_of_run(persistent, **limit)
    finally:
        gc.enable()
    gc.collect()
    for worker in workers:
        worker.join()
    assert len(workers) == 2 and timed_out == []


class DiesAtSample21(Dataset[Any]):
    """Ends the worker that loads sample 21, by calling `end`."""

    def __init__(self, end: Callable[[], Any]) -> None:
        self.end = end

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index == 21:
            self.end()
        return torch.ones(2)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_normally() -> None:
    os._exit(0)


def exit_with_3() -> None:
    os._exit(3)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (kill, "was killed by SIGKILL"),
        (exit_normally, "ended with exit code 0"),
        (exit_with_3, "ended with exit code 3"),
    ],
)
def test_a_dead_worker_raises_with_its_number_exit_and_fix(
    end: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    loader = DataLoader(DiesAtSample21(end), 4, num_workers=2)
    trainer = Trainer(accelerator="cpu", barebones=True, max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(WorkerDied) as caught:
        trainer.fit(Line(), loader)
    text = str(caught.value)
    assert text.startswith("worker 1 of 2 of a DataLoader (pid ") and message in text and "resume='auto'" in text
    assert "/dev/shm" in text or sys.platform == "darwin"


class Nested:
    """A user's loader around a DataLoader whose worker dies."""

    def __init__(self, end: Callable[[], Any]) -> None:
        self.loader = self
        self.parts = DataLoader(DiesAtSample21(end), 4, num_workers=2), [torch.ones(1, 2)] * 64

    def __iter__(self) -> Any:
        for loaded, constant in zip(*self.parts, strict=False):
            yield loaded + constant


@pytest.mark.parametrize("combined", [False, True])
def test_a_dead_worker_of_a_nested_loader_raises_too(combined: bool, tmp_path: Path) -> None:
    loader = CombinedLoader([Nested(kill), [torch.ones(1, 2)] * 16]) if combined else Nested(kill)
    trainer = Trainer(accelerator="cpu", barebones=True, max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(WorkerDied, match="worker 1 of 2 of a DataLoader .* was killed by SIGKILL"):
        trainer.fit(Line(), loader)


def test_a_dead_worker_is_named_if_sigchld_arrives_after_its_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(iterator: Any) -> None:
        replaced.append(signal.signal(signal.SIGCHLD, lambda *frame: None))
        os.kill(iterator._workers[1].pid, signal.SIGKILL)
        raise EOFError

    def interrupted(heartbeat: Heartbeat, phase: Phase) -> None:
        if phase is Phase.ENDING:
            time.sleep(0.5)
            _error_if_any_worker_fails()  # as torch's handler does
        mark(heartbeat, phase)

    mark = Heartbeat.mark
    replaced: list[Any] = []
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_get_data", cut_off)
    monkeypatch.setattr(Heartbeat, "mark", interrupted)
    trainer = Trainer(accelerator="cpu", barebones=True, max_epochs=1, default_root_dir=tmp_path)
    try:
        with pytest.raises(WorkerDied, match="worker 1 of 2 of a DataLoader .* was killed by SIGKILL"):
            trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(32, 2)), 4, num_workers=2))
    finally:
        signal.signal(signal.SIGCHLD, replaced[0])


def test_other_errors_are_not_taken_for_dead_workers() -> None:
    assert died(RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")) is None
    assert died(ValueError("the user's own error")) is None and died(FileNotFoundError("the user's own error")) is None


KILLED = """
import multiprocessing, os, signal, sys
import torch
from leyden import Trainer, TrainModule
from torch.utils.data import DataLoader, Dataset

class LargeSamples(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        # More than a pipe holds, so the worker blocks until the main process reads.
        return b"x" * 2**20

def print_pid(worker_id):
    print("WORKER", os.getpid(), flush=True)

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.net(torch.ones(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    loader = DataLoader(
        LargeSamples(), 1, num_workers=2, collate_fn=list, worker_init_fn=print_pid, multiprocessing_context=sys.argv[1]
    )
    Trainer(accelerator="cpu", barebones=True).fit(Module(), loader)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize(
    "context", ["fork", *(pytest.param(name, marks=pytest.mark.full) for name in ("forkserver", "spawn"))]
)
def test_workers_end_when_their_main_process_is_killed(context: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(KILLED)
    done = run_program(["script.py", context], tmp_path)
    workers = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("WORKER")]
    deadline = time.monotonic() + 30.0
    left = workers
    while left and time.monotonic() < deadline:
        os.sched_yield()
        left = [worker for worker in workers if is_running(worker)]
    for worker in left:
        os.kill(worker, signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL and len(workers) == 2 and left == []


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
