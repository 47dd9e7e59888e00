"""Preemption and automatic resumption of custom Accelerator loops, and the lock on their checkpoint folder."""

from __future__ import annotations

import gc
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from programs import run_program
from ranks.world import run_world
from samples import labeled
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Accelerator, ConfigurationError, GeneralTracker, LeydenError, ProjectConfiguration
from leyden.callbacks import Logger
from leyden.checkpoint.folder import all_checkpoints
from leyden.checkpoint.lock import NAME, FolderLock
from leyden.trainer import Preemption

RANK = int(os.environ.get("RANK", "0"))


class Attempt:
    """One start of a training script with a custom loop: 2 epochs of 10 batches on one process.

    Args:
        folder: the project folder.
        actions: functions to call before the step of the n-th batch of this start.
    """

    def __init__(
        self, folder: Path, actions: Mapping[int, Callable[[], Any]] | None = None, workers: int = 0, **arguments: Any
    ) -> None:
        torch.manual_seed(3)
        settings = {"resume": "auto", "preemption": True, "project_dir": folder, **arguments}
        self.accelerator = Accelerator(cpu=True, **settings)
        model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.3), nn.Linear(4, 3))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        loader = DataLoader(labeled(40), 4, shuffle=True, num_workers=workers)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.actions = dict(actions or {})
        self.batches = 0
        self.steps: list[int] = []
        self.code: Any = None

    def run(self, asynchronous: bool = False) -> Attempt:
        accelerator = self.accelerator
        if accelerator.options.resumes:
            accelerator.load_state()
        try:
            for _ in range(self.loader.iteration, 2):
                for batch in self.loader:
                    self.batches += 1
                    self.actions.get(self.batches, lambda: None)()
                    self.step(batch)
                    if accelerator.check_preemption():
                        accelerator.save_state(asynchronous=asynchronous)
                        accelerator.leave()
            accelerator.end_training()
        except SystemExit as end:
            self.code = end.code
        return self

    def step(self, batch: list[Tensor]) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(F.cross_entropy(self.model(batch[0]), batch[1]))
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.accelerator.sync_gradients:
            self.steps.append(self.accelerator.steps)

    def weights(self) -> list[Tensor]:
        return list(self.accelerator.get_state_dict(self.model).values())


def raise_signals(*numbers: int) -> Callable[[], None]:
    return lambda: [signal.raise_signal(number) for number in numbers] and None


def same_weights(one: Attempt, other: Attempt) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one.weights(), other.weights(), strict=True))


@pytest.fixture(autouse=True)
def _restore_signal_handlers() -> Iterator[None]:
    """Keeps handlers that a test leaves installed from catching signals of the next test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    run = Attempt(tmp_path_factory.mktemp("whole"), resume=None, preemption=None).run()
    assert run.code is None and run.steps == list(range(1, 21))
    return run


# preemption -----------------------------------------------------------------------------------------------------------
PREEMPTIONS = {
    "by SIGTERM": (7, raise_signals(signal.SIGTERM)),
    "by SIGUSR1": (7, raise_signals(signal.SIGUSR1)),
    "in the first step": (1, raise_signals(signal.SIGUSR1)),
    "in an epoch's last step": (10, raise_signals(signal.SIGTERM)),
    "in the last step": (20, raise_signals(signal.SIGTERM)),
    "repeatedly": (13, raise_signals(*[signal.SIGUSR1, signal.SIGTERM] * 3)),
}


@pytest.mark.parametrize("case", PREEMPTIONS)
def test_a_preempted_loop_resumes_at_the_same_step(
    case: str, tmp_path: Path, baseline: Attempt, capsys: pytest.CaptureFixture[str]
) -> None:
    number, action = PREEMPTIONS[case]
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)]
    first = Attempt(tmp_path, {number: action}).run()
    assert first.code == 75 and first.steps == list(range(1, number + 1))
    assert f"at step {number}\n" in capsys.readouterr().out
    assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    second = Attempt(tmp_path).run()
    assert second.code is None and first.steps + second.steps == baseline.steps and same_weights(second, baseline)
    assert "continues from" in capsys.readouterr().out


def test_repeated_preemption_does_not_change_the_final_weights(tmp_path: Path, baseline: Attempt) -> None:
    limit = ProjectConfiguration(total_limit=1)
    steps: list[int] = []
    for _ in range(4):
        run = Attempt(tmp_path, {4: raise_signals(signal.SIGUSR1)}, project_config=limit).run(asynchronous=True)
        assert run.code == 75
        steps += run.steps
        assert len(all_checkpoints(tmp_path / "checkpoints")) == 1
    last = Attempt(tmp_path).run()
    assert steps + last.steps == baseline.steps and same_weights(last, baseline)


def test_preemption_waits_for_the_open_accumulation_window(tmp_path: Path) -> None:
    baseline = Attempt(tmp_path / "whole", gradient_accumulation_steps=3).run()
    first = Attempt(tmp_path / "run", {4: raise_signals(signal.SIGTERM)}, gradient_accumulation_steps=3).run()
    assert first.code == 75 and first.batches == 6 and first.steps == [1, 2]
    second = Attempt(tmp_path / "run", gradient_accumulation_steps=3).run()
    assert first.steps + second.steps == baseline.steps == list(range(1, 9)) and same_weights(second, baseline)


def test_leave_writes_a_save_deferred_to_the_end_of_its_window(tmp_path: Path) -> None:
    run = Attempt(tmp_path, gradient_accumulation_steps=2)
    accelerator = run.accelerator
    for index, (x, y) in enumerate(run.loader):
        with accelerator.accumulate(run.model):
            accelerator.backward(F.cross_entropy(run.model(x), y))
            run.optimizer.step()
            run.optimizer.zero_grad()
            if index == 2:
                accelerator.save_state()
                signal.raise_signal(signal.SIGTERM)
            # Still inside the block, so the window's last batch is not finished.
            if accelerator.check_preemption():
                with pytest.raises(SystemExit, match="75"):
                    accelerator.leave()
                break
    assert index == 3
    again = Attempt(tmp_path, gradient_accumulation_steps=2)
    again.accelerator.load_state()
    assert again.accelerator.steps == 2


def test_should_preempt_acts_like_a_signal(tmp_path: Path, baseline: Attempt) -> None:
    preemption = Preemption(signals=(), should_preempt=lambda: True, poll_every=0.01)
    run = Attempt(tmp_path, preemption=preemption)

    def wait() -> None:
        while not run.accelerator.check_preemption():
            pass

    run.actions[3] = wait
    run.run()
    assert run.code == 75 and len(run.steps) <= 3
    second = Attempt(tmp_path).run()
    assert run.steps + second.steps == baseline.steps and same_weights(second, baseline)


def test_signals_and_exit_code_are_configurable(tmp_path: Path) -> None:
    preemption, term = Preemption(signals="SIGUSR2", exit_code=42), signal.getsignal(signal.SIGTERM)
    run = Attempt(tmp_path, {2: raise_signals(signal.SIGUSR2)}, preemption=preemption)
    # A signal that is not configured keeps its handler.
    assert signal.getsignal(signal.SIGTERM) == term
    assert run.run().code == 42


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_raises_keyboard_interrupt(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        run = Attempt(tmp_path, {2: raise_signals(signal.SIGTERM, signal.SIGINT)})
        with pytest.raises(KeyboardInterrupt):
            run.run()
        assert seen == []
        # The loop never polled the first signal.
        run.accelerator.end_training()
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_was_never_polled_is_raised_again_at_the_end(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        run = Attempt(tmp_path)
        signal.raise_signal(signal.SIGUSR1)
        assert seen == []
        run.accelerator.end_training()
        assert seen == [signal.SIGUSR1]
        # Only once: a script may call end_training twice.
        run.accelerator.end_training()
        # A signal that check_preemption reported is not raised again.
        checked = Attempt(tmp_path, {1: raise_signals(signal.SIGUSR1)})
        for batch in checked.loader:
            checked.actions[1]()
            checked.step(batch)
            assert checked.accelerator.check_preemption()
            break
        checked.accelerator.end_training()
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


class CloseCountingTracker(GeneralTracker):
    """A tracker that counts how often it is closed."""

    name = "closed"
    requires_logging_directory = False

    def __init__(self) -> None:
        self.count = 0

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None: ...

    def finish(self) -> None:
        self.count += 1


class StatusLogger(Logger):
    """A logger that records the status with which the run ended."""

    def __init__(self) -> None:
        super().__init__()
        self.statuses: list[str] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...

    def finalize(self, status: str) -> None:
        self.statuses.append(status)


def test_leave_closes_trackers_and_allows_end_training_afterwards(tmp_path: Path) -> None:
    tracker = CloseCountingTracker()
    run = Attempt(tmp_path, {1: raise_signals(signal.SIGTERM)}, log_with=tracker)
    run.accelerator.init_trackers("own")
    assert run.run().code == 75 and tracker.count == 1
    run.accelerator.end_training()


@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_loggers_record_whether_the_loop_was_preempted(tmp_path: Path, number: int | None) -> None:
    logger = StatusLogger()
    run = Attempt(tmp_path, {1: raise_signals(number)} if number else {}, log_with=logger)
    run.accelerator.init_trackers("own")
    assert run.run().code == (75 if number else None)
    assert logger.statuses == ["interrupted" if number else "success"]


def test_without_preemption_no_signals_are_caught(tmp_path: Path) -> None:
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)]
    run = Attempt(tmp_path, resume=None, preemption=None)
    assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    assert not run.accelerator.check_preemption() and os.listdir(tmp_path) == []
    with pytest.raises(ConfigurationError, match=r"leave\(\) ends a preempted loop"):
        run.accelerator.leave()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"resume": "last"}, r"resume='last'\): use 'auto' or None"),
        ({"resume": "auto"}, r"Pass Accelerator\(project_dir=…\)"),
        ({"preemption": "SIGTERM"}, "preemption='SIGTERM': use True, False, or Preemption"),
    ],
    ids=str,
)
def test_invalid_resume_and_preemption_arguments_raise(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Accelerator(cpu=True, **arguments)


# SLURM, grace period, process group -----------------------------------------------------------------------------------
@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a fake `scontrol` on PATH that records its arguments and the folder's content; returns its record."""
    record, folder = tmp_path / "record.txt", tmp_path / "bin"
    folder.mkdir()
    program = folder / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" $(ls -A {tmp_path}/run/checkpoints) >> {record}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    return record


def test_a_slurm_job_is_requeued_after_saving_and_unlocking(scontrol: Path, tmp_path: Path) -> None:
    assert Attempt(tmp_path / "run", {2: raise_signals(signal.SIGUSR1)}).run().code == 75
    assert scontrol.read_text() == "requeue 4712 checkpoint_0\n"
    # SIGTERM comes from scancel, or from SLURM's own preemption, which requeues the job itself.
    assert Attempt(tmp_path / "run", {2: raise_signals(signal.SIGTERM)}).run().code == 75
    assert len(scontrol.read_text().splitlines()) == 1


HANGING_SCRIPT = """
import os, signal, sys, threading
import torch
from leyden import Accelerator
from leyden.callbacks import Logger
from leyden.trainer import Preemption

accelerator = Accelerator(cpu=True, project_dir=sys.argv[1], resume="auto", preemption=Preemption(grace_period=0.2))
model = accelerator.prepare(torch.nn.Linear(1, 1))
accelerator.save_state()
os.kill(os.getpid(), signal.SIGUSR1)
threading.Event().wait()
"""


def test_a_step_exceeding_the_grace_period_is_abandoned(scontrol: Path, tmp_path: Path) -> None:
    done = run_program(["-c", HANGING_SCRIPT, tmp_path / "run"])
    assert done.returncode == 75, done.stderr
    assert "the grace period of 0.2 s has ended (rank 0, step 0). The run is not saved" in done.stderr
    assert scontrol.read_text().startswith("requeue 4712")
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["checkpoint_0"]


SLOW_SHUTDOWN_SCRIPT = """
import os, signal, sys, threading
import torch
from leyden import Accelerator, GeneralTracker
from leyden.callbacks import Logger
from leyden.trainer import Preemption

class SlowTracker(GeneralTracker):
    name, requires_logging_directory = "slow", False
    def log(self, values, step=None, **kwargs): ...
    def finish(self):
        threading.Event().wait()

accelerator = Accelerator(
    cpu=True, project_dir="run", resume="auto", preemption=Preemption(grace_period=4), log_with=SlowTracker()
)
accelerator.init_trackers("run")
model = accelerator.prepare(torch.nn.Linear(1, 1))
os.kill(os.getpid(), signal.SIGUSR1)
assert accelerator.check_preemption()
accelerator.save_state(asynchronous=True)
accelerator.leave()
"""


def test_a_shutdown_exceeding_the_grace_period_is_cut_short_after_the_save(tmp_path: Path) -> None:
    done = run_program(["-c", SLOW_SHUTDOWN_SCRIPT], tmp_path)
    assert done.returncode == 75, done.stderr
    assert "(rank 0, step 0). The run is saved, but its shutdown was cut short" in done.stderr
    assert [path.name for path in all_checkpoints(tmp_path / "run" / "checkpoints")] == ["checkpoint_0"]


def train_through_a_group_signal(folder: Path) -> None:
    """Signals the whole process group in the third batch, as a scheduler signals a job with its loader workers."""
    os.setpgrp()
    run = Attempt(folder, {3: lambda: os.killpg(0, signal.SIGUSR1)}, workers=2).run()
    assert run.code == 75 and run.steps == [1, 2, 3]
    assert len(all_checkpoints(folder / "checkpoints")) == 1


def test_loader_workers_survive_a_signal_to_the_process_group(tmp_path: Path) -> None:
    run_world(1, train_through_a_group_signal, tmp_path)


# several ranks --------------------------------------------------------------------------------------------------------
def check_alternating_preemption(folder: Path, strategy: str) -> None:
    parts: list[list[int]] = []
    # The ranks alternate in receiving the signal; the other stops one call later, or in an epoch's last batch.
    for attempt, batch in enumerate((2, 2, 1, None)):
        stop = {batch: raise_signals(signal.SIGUSR1)} if attempt % 2 == RANK and batch is not None else {}
        run = Attempt(folder / strategy, stop, strategy=strategy).run()
        assert run.code == (None if batch is None else 75)
        parts.append(run.steps)
    assert parts == [[1, 2, 3], [4, 5], [6, 7], [8, 9, 10]], parts
    baseline = Attempt(folder / f"{strategy} whole", strategy=strategy, resume=None, preemption=None).run()
    assert same_weights(run, baseline)


def check_uneven_inputs(folder: Path) -> None:
    """Ranks with different numbers of batches exchange only gradients, and learn of a signal after the loop."""
    run = Attempt(folder / "uneven", strategy="ddp", even_batches=False)
    accelerator = run.accelerator
    loader = accelerator.prepare_data_loader([torch.ones(1, 6)] * (2 if RANK == 0 else 4))
    with accelerator.join_uneven_inputs([run.model]):
        for x in loader:
            accelerator.backward(run.model(x).sum())
            run.optimizer.step()
            if RANK == 1:
                signal.raise_signal(signal.SIGTERM)
            assert not accelerator.check_preemption()
    assert [accelerator.check_preemption() for _ in range(2)] == [False, True]
    with pytest.raises(SystemExit, match="75"):
        accelerator.leave()


def check_late_signal(folder: Path) -> None:
    """A signal that one rank receives after its last check is raised again, and no rank waits for another."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    run = Attempt(folder / "late", strategy="ddp")
    assert not run.accelerator.check_preemption()
    if RANK == 1:
        signal.raise_signal(signal.SIGUSR1)
    run.accelerator.end_training()
    assert len(seen) == RANK
    signal.signal(signal.SIGUSR1, before)


def check_locked_folder(folder: Path) -> None:
    """A locked folder is refused on every rank, with an error that names the owner."""
    if RANK == 0:
        lock = FolderLock(folder / "held" / "checkpoints")
        lock.acquire()
    with pytest.raises(LeydenError, match="belongs to a run that is under way"):
        Attempt(folder / "held", strategy="ddp")
    if RANK == 0:
        lock.release()


def check_two_ranks(folder: Path) -> None:
    check_alternating_preemption(folder, "ddp")
    check_alternating_preemption(folder, "fsdp")
    check_uneven_inputs(folder)
    check_late_signal(folder)
    check_locked_folder(folder)


def test_preempting_one_rank_stops_all_at_the_same_step_and_they_resume_exactly(tmp_path: Path) -> None:
    run_world(2, check_two_ranks, tmp_path)


LAUNCHED_SCRIPT = """
import os, signal
import torch
from leyden import Accelerator

accelerator = Accelerator(cpu=True, project_dir="run", resume="auto", preemption=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = accelerator.prepare(model, optimizer)
loader = accelerator.prepare_data_loader([torch.ones(1, 1)] * 800)
accelerator.load_state()
print(f"from step {accelerator.steps}", flush=True)
first = accelerator.steps == 0
for batch in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
    if first and accelerator.steps == 2 and accelerator.is_main_process:
        os.kill(int(os.environ["LEYDEN_AGENT"]), signal.SIGUSR1)
    if accelerator.check_preemption():
        accelerator.save_state()
        accelerator.leave()
accelerator.end_training()
print("done", flush=True)
"""


@pytest.mark.full
def test_the_launch_agent_forwards_signals_and_exits_with_its_ranks_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LAUNCHED_SCRIPT)
    command = [sys.executable, "-m", "leyden", "launch", "--cpu", "--num_processes", "2", "--max_restarts", "2"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    first, again = (
        subprocess.run([*command, "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
        for _ in range(2)
    )
    assert first.returncode == 75, first.stderr
    assert first.stdout.count("preempted by SIGUSR1") == 1 and "done" not in first.stdout
    assert "failed" not in first.stderr and "restart" not in first.stderr
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("from step 0") == 0 and again.stdout.count("from step ") == 2
    assert again.stdout.count("done") == 2


# the lock on the folder -----------------------------------------------------------------------------------------------
def status_in_fork(work: Callable[[], Any]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except LeydenError as error:
            os._exit(1 if "belongs to a run that is under way: process" in str(error) else 2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def auto_resuming(folder: Path, **arguments: Any) -> Accelerator:
    return Accelerator(cpu=True, project_dir=folder, resume="auto", **arguments)


def test_auto_resume_locks_the_folder_until_the_loop_ends(tmp_path: Path) -> None:
    first = auto_resuming(tmp_path)
    with pytest.raises(LeydenError, match=r"this very process.*Accelerator\(project_dir=…\).*end_training\(\) rel"):
        auto_resuming(tmp_path)
    assert status_in_fork(lambda: auto_resuming(tmp_path)) == 1
    # Loops without resume='auto' may share the folder.
    Accelerator(cpu=True, project_dir=tmp_path)
    first.end_training()
    first.end_training()
    assert os.listdir(tmp_path / "checkpoints") == []
    auto_resuming(tmp_path).end_training()


def test_a_killed_loops_lock_is_taken_over(tmp_path: Path) -> None:
    assert status_in_fork(lambda: (auto_resuming(tmp_path), os.kill(os.getpid(), signal.SIGKILL))) == -signal.SIGKILL
    assert (tmp_path / "checkpoints" / NAME).exists()
    auto_resuming(tmp_path).end_training()


def test_a_script_releases_its_lock_when_it_ends_or_fails(tmp_path: Path) -> None:
    code = "import sys; from leyden import Accelerator; Accelerator(cpu=True, project_dir='run', resume='auto'); "
    for end, status in (("", 0), ("raise OSError", 1)):
        assert run_program(["-c", code + end], tmp_path).returncode == status
        assert os.listdir(tmp_path / "run" / "checkpoints") == []


def test_a_garbage_collected_accelerator_releases_its_lock_and_handlers(tmp_path: Path) -> None:
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    auto_resuming(tmp_path, preemption=True)
    later = Accelerator(cpu=True, preemption=True)
    gc.collect()
    assert os.listdir(tmp_path / "checkpoints") == []
    signal.raise_signal(signal.SIGTERM)
    assert later.check_preemption() and not received
    # The handler from before the collected Accelerator is restored.
    later.end_training()
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_a_failed_constructor_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        auto_resuming(tmp_path, log_with="no tracker")
    auto_resuming(tmp_path).end_training()


def test_saving_after_losing_the_lock_raises(tmp_path: Path) -> None:
    run = auto_resuming(tmp_path)
    lock = tmp_path / "checkpoints" / NAME
    lock.write_text(json.dumps({**json.loads(lock.read_bytes()), "token": "of another process"}))
    with pytest.raises(LeydenError, match="was taken over by"):
        run.save_state()
    run.end_training()
    assert lock.exists()


def test_auto_resume_continues_from_the_newest_intact_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Attempt(tmp_path, project_config=ProjectConfiguration(total_limit=2))
    accelerator = run.accelerator
    accelerator.load_state()
    assert f"starts from scratch: no checkpoint in {tmp_path / 'checkpoints'} yet" in capsys.readouterr().out
    names = [Path(accelerator.save_state()).name for _ in range(3)]
    # An explicit path is kept, and automatic resumption ignores it.
    assert accelerator.save_state(tmp_path / "best") == str(tmp_path / "best")
    assert names == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert {path.name for path in all_checkpoints(tmp_path / "checkpoints")} == {"checkpoint_1", "checkpoint_2"}
    accelerator.end_training()
    (tmp_path / "checkpoints" / "checkpoint_2" / "model.safetensors").write_bytes(b"damaged")
    again = Attempt(tmp_path)
    with pytest.warns(UserWarning, match="skipping a damaged checkpoint"):
        again.accelerator.load_state()
    assert f"continues from {tmp_path / 'checkpoints' / 'checkpoint_1'}" in capsys.readouterr().out
    assert Path(again.accelerator.save_state()).name == "checkpoint_3"
    again.accelerator.load_state(tmp_path / "best")
    assert Path(again.accelerator.save_state()).name == "checkpoint_4"
    again.accelerator.end_training()


def test_a_relative_project_dir_is_resolved_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = Attempt(Path("run"), project_config=ProjectConfiguration(total_limit=2))
    accelerator = run.accelerator
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = tmp_path / "run" / "checkpoints"
    assert [accelerator.save_state() for _ in range(3)][-1] == str(folder / "checkpoint_2")
    assert os.path.lexists(folder / NAME) and len(all_checkpoints(folder)) == 2
    accelerator.load_state()
    assert f"continues from {folder / 'checkpoint_2'}" in capsys.readouterr().out
    # An explicit relative path is relative to the current folder.
    accelerator.save_state("best")
    assert os.listdir() == ["best"] and accelerator.project_dir == tmp_path / "run"
    accelerator.end_training()
    assert not os.path.lexists(folder / NAME)


def test_a_project_dir_that_is_set_later_keeps_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path / "early", project_config=config)
    config.project_dir = "late"
    monkeypatch.chdir(tmp_path)
    for _ in range(4):
        accelerator.save_state()
    assert {path.name for path in all_checkpoints(Path("late/checkpoints"))} == {"checkpoint_2", "checkpoint_3"}
    assert config.iteration == 4


def test_saving_into_the_released_folder_after_end_training_raises(tmp_path: Path) -> None:
    accelerator = Attempt(tmp_path).accelerator
    accelerator.save_state()
    accelerator.end_training()
    later = auto_resuming(tmp_path)
    for path in (None, tmp_path / "checkpoints" / "mine"):
        with pytest.raises(
            LeydenError, match=r"save_state\(\) after end_training\(\), which released .*checkpoints to"
        ):
            accelerator.save_state(path)
    assert [path.name for path in all_checkpoints(tmp_path / "checkpoints")] == ["checkpoint_0"]
    # Reading, and saving elsewhere, work as in Accelerate.
    accelerator.load_state()
    accelerator.save_state(tmp_path / "best")
    later.end_training()
    accelerator.load_state(tmp_path / "best")


def test_end_training_may_be_called_from_another_thread(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        for signaled in (False, True):
            tracker = CloseCountingTracker()
            run = Attempt(tmp_path, log_with=tracker)
            run.accelerator.init_trackers("own")
            if signaled:
                # A signal that the loop never polled reaches the previous handler.
                signal.raise_signal(signal.SIGTERM)
                assert seen == [signal.SIGTERM] * 2
            errors: list[Any] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(threading, "excepthook", errors.append)
                thread = threading.Thread(target=run.accelerator.end_training)
                thread.start()
                thread.join()
            assert not errors and tracker.count == 1 and os.listdir(tmp_path / "checkpoints") == []
            if not signaled:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM] * 3
    finally:
        signal.signal(signal.SIGTERM, before)
