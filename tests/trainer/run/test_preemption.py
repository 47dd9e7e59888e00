"""A preempted run saves a checkpoint and exits with 75; the next start continues at the same step."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SAVED, Regression
from programs import run_program
from ranks.world import run_world
from same import same_weights
from samples import labeled
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Callback, ConfigurationError, Trainer
from leyden.callbacks import CSVLogger, ModelCheckpoint, PreemptionCheckpoint
from leyden.checkpoint.folder import all_checkpoints
from leyden.checkpoint.format.errors import CheckpointError
from leyden.trainer import Preemption

RANK = int(os.environ.get("RANK", "0"))
QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}


class Net(Regression):
    """A net with dropout: a resume without the random state would give another result."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.3), nn.Linear(4, 3)))
        self.steps: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.append(self.trainer.global_step)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


class At(Callback):
    """Calls a function on the n-th call of a hook."""

    def __init__(self, hook: str, number: int, action: Callable[[], Any]) -> None:
        self.left, self.action = number, action
        setattr(self, hook, self._called)

    def _called(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.action()


def raising(*numbers: int) -> Callable[[], None]:
    return lambda: [signal.raise_signal(number) for number in numbers] and None


def start(folder: Path, *callbacks: Callback, **arguments: Any) -> tuple[Net, Trainer, Any]:
    """Runs the same training command; returns the module, its Trainer and the exit code."""
    torch.manual_seed(3)
    net = Net()
    settings = {**QUIET, "max_epochs": 2, "resume": "auto", **arguments}
    trainer = Trainer(default_root_dir=folder, callbacks=list(callbacks), **settings)
    code = None
    try:
        trainer.fit(net, DataLoader(labeled(40), 4, shuffle=True), DataLoader(labeled(9), 4))
    except SystemExit as end:
        code = end.code
    return net, trainer, code


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Net:
    net, _, code = start(tmp_path_factory.mktemp("uninterrupted"))
    assert code is None and net.steps == list(range(20))
    return net


POINTS = {
    "in a step, by SIGTERM": ("on_train_batch_start", 7, raising(signal.SIGTERM)),
    "in a step, by SIGUSR1": ("on_train_batch_start", 7, raising(signal.SIGUSR1)),
    "in the first step": ("on_train_batch_start", 1, raising(signal.SIGUSR1)),
    "in the sanity check": ("on_validation_batch_start", 1, raising(signal.SIGUSR1)),
    "in validation": ("on_validation_batch_start", 4, raising(signal.SIGUSR1)),
    "at the end of an epoch": ("on_train_epoch_end", 1, raising(signal.SIGUSR1)),
    "after the last step": ("on_train_end", 1, raising(signal.SIGTERM)),
    "repeatedly": ("on_train_batch_end", 5, raising(*[signal.SIGUSR1, signal.SIGTERM] * 3)),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_preempted_run_continues_at_the_same_step(point: str, tmp_path: Path, uninterrupted: Net) -> None:
    hook, number, action = POINTS[point]
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)]
    first, trainer, code = start(tmp_path, At(hook, number, action))
    assert code == 75
    assert trainer.last_checkpoint is not None and trainer.last_checkpoint.is_dir()
    assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    second, _, code = start(tmp_path)
    assert code is None
    assert first.steps + second.steps == uninterrupted.steps
    assert same_weights(second, uninterrupted)


def test_repeated_preemptions_keep_only_one_preemption_checkpoint(tmp_path: Path, uninterrupted: Net) -> None:
    steps: list[int] = []
    for _ in range(3):
        net, _, code = start(tmp_path, At("on_train_batch_start", 4, raising(signal.SIGUSR1)))
        steps += net.steps
        assert code == 75
    assert steps == list(range(12))
    # The first epoch's checkpoint and the last preemption's; those of earlier preemptions are gone.
    assert sorted(path.name for path in all_checkpoints(tmp_path / SAVED)) == [
        "epoch=0-step=10",
        "preempted",
    ]
    net, _, code = start(tmp_path)
    assert code is None and same_weights(net, uninterrupted)


def test_an_already_saved_step_is_not_saved_again(tmp_path: Path) -> None:
    _, trainer, code = start(
        tmp_path, ModelCheckpoint(save_last=True), At("on_train_batch_start", 4, raising(signal.SIGTERM))
    )
    assert code == 75
    assert [path.name for path in all_checkpoints(tmp_path / SAVED)] == ["epoch=0-step=4"]
    assert trainer.last_checkpoint == tmp_path / SAVED / "epoch=0-step=4"
    every = ModelCheckpoint(every_n_train_steps=1)
    _, _, code = start(tmp_path / "each step", every, At("on_train_batch_end", 3, raising(signal.SIGTERM)))
    assert [path.name for path in all_checkpoints(tmp_path / "each step" / SAVED)] == ["epoch=0-step=3"]


def test_preemption_saves_before_other_hooks_and_without_other_checkpoints(tmp_path: Path) -> None:
    seen: list[bool] = []
    record = At("on_train_end", 1, lambda: seen.append((tmp_path / SAVED / "preempted").is_dir()))
    stop = At("on_train_batch_start", 2, raising(signal.SIGTERM))
    assert start(tmp_path, record, stop, enable_checkpointing=False)[2] == 75
    assert seen == [True]


def test_another_runs_preemption_checkpoint_is_kept(tmp_path: Path) -> None:
    stop = ("on_train_batch_start", 2, raising(signal.SIGTERM))
    for name in ("preempted", "preempted-v1"):
        # Each starts from scratch, unaware of the run before.
        shared = ModelCheckpoint(tmp_path / "shared")
        _, trainer, _ = start(tmp_path, At(*stop), shared, resume=None, preemption=True)
        assert trainer.last_checkpoint is not None and trainer.last_checkpoint.name == name


def test_without_preemption_signals_keep_their_usual_effect(tmp_path: Path) -> None:
    stop = At("on_train_batch_start", 4, raising(signal.SIGTERM))
    _, trainer, code = start(tmp_path, stop, preemption=False)
    assert code == 143
    assert trainer.last_checkpoint is None
    assert signal.SIGUSR1 not in trainer.signals.kinds
    assert not any(isinstance(callback, PreemptionCheckpoint) for callback in trainer.callbacks)
    # It is added automatically only if the next start would resume.
    assert not any(isinstance(callback, PreemptionCheckpoint) for callback in Trainer(**QUIET).callbacks)


def test_ctrl_c_interrupts_without_saving(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, At("on_train_batch_start", 4, raising(signal.SIGINT)))
    assert all_checkpoints(tmp_path / SAVED) == []


class Closing(CSVLogger):
    """Receives a signal as it closes, after the last step."""

    def __init__(self, number: int, folder: Path) -> None:
        super().__init__(folder)
        self.number = number

    def finalize(self, status: str) -> None:
        super().finalize(status)
        signal.raise_signal(self.number)


@pytest.mark.parametrize(
    ("number", "arguments", "code"),
    [
        (signal.SIGTERM, {"resume": None}, 143),
        (signal.SIGTERM, {}, 75),
        (signal.SIGUSR1, {}, 75),
        (signal.SIGINT, {}, None),
    ],
)
def test_a_signal_while_the_loggers_close_is_not_lost(
    number: int, arguments: dict[str, Any], code: int | None, scontrol: Path, tmp_path: Path
) -> None:
    arguments = {**arguments, "logger": Closing(number, tmp_path / "logs")}
    if code is None:
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, **arguments)
    else:
        assert start(tmp_path, **arguments)[2] == code
    assert scontrol.exists() == (number == signal.SIGUSR1)


def test_a_fit_in_a_thread_catches_no_signal_and_says_so(tmp_path: Path) -> None:
    codes: list[int | None] = []
    caught: list[threading.Thread] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: caught.append(threading.current_thread()))
    stop = At("on_train_batch_start", 4, lambda: os.kill(os.getpid(), signal.SIGUSR1))

    def in_thread(*args: Any, **arguments: Any) -> None:
        thread = threading.Thread(target=lambda: codes.append(start(tmp_path, *args, **arguments)[2]))
        thread.start()
        thread.join()

    try:
        with pytest.warns(UserWarning, match="no signal preempts this run.*main thread.*should_preempt"):
            in_thread(stop)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (codes, caught) == ([None], [threading.main_thread()])
    # A notice is no signal.
    notice = Preemption(signals=(), should_preempt=lambda: True, poll_every=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_thread(max_epochs=-1, preemption=notice)
    assert codes == [None, 75]


def test_custom_signals_and_exit_code(tmp_path: Path, uninterrupted: Net) -> None:
    preemption = Preemption(signals=("SIGUSR2", "hup"), exit_code=42)
    first, _, code = start(tmp_path, At("on_train_batch_start", 4, raising(signal.SIGUSR2)), preemption=preemption)
    assert code == 42
    second, _, code = start(tmp_path, At("on_train_batch_start", 4, raising(signal.SIGHUP)), preemption=preemption)
    assert code == 42 and first.steps + second.steps == list(range(8))
    # SIGTERM still ends the run in the usual way.
    assert start(tmp_path, At("on_train_batch_start", 4, raising(signal.SIGTERM)), preemption=preemption)[2] == 143
    assert same_weights(start(tmp_path, preemption=preemption)[0], uninterrupted)


def test_should_preempt_preempts_like_a_signal(tmp_path: Path, uninterrupted: Net) -> None:
    asked = threading.Event()
    calls: list[str] = []

    def notice() -> bool:
        calls.append(threading.current_thread().name)
        if len(calls) == 1:
            raise OSError("no route to host")
        asked.set()
        return True

    # The step waits for a call by the thread, since a real step takes longer than one.
    wait = At("on_train_batch_start", 3, lambda: asked.wait(60))
    preemption = Preemption(should_preempt=notice, poll_every=0.01)
    with pytest.warns(UserWarning, match="should_preempt raised OSError: no route to host"):
        first, trainer, code = start(tmp_path, wait, preemption=preemption)
    assert code == 75
    assert set(calls) == {"leyden-preempt"}
    assert trainer.signals.name == "should_preempt"
    second, _, code = start(tmp_path)
    assert code is None and first.steps + second.steps == uninterrupted.steps and same_weights(second, uninterrupted)


def test_a_failed_save_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Trainer, *_: Any, **__: Any) -> Path:
        raise CheckpointError("preempted", "the disk is full.")

    monkeypatch.setattr(Trainer, "save_checkpoint", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        start(tmp_path, At("on_train_batch_start", 4, raising(signal.SIGTERM)))


# SLURM ----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs a fake scontrol that records its arguments; returns the file of records."""
    requests, folder = tmp_path / "requests.txt", tmp_path / "bin"
    folder.mkdir()
    program = folder / "scontrol"
    saved = tmp_path / "run" / SAVED
    program.write_text(f'#!/bin/sh\necho "$@ $(ls {saved})" >> {requests}\nexit ${{REFUSES:-0}}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    return requests


def stopped_by(number: int, folder: Path, **arguments: Any) -> Any:
    return start(folder, At("on_train_batch_start", 2, raising(number)), **arguments)[2]


def test_a_slurm_job_is_requeued_after_its_save(
    scontrol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stopped_by(signal.SIGUSR1, tmp_path / "run") == 75
    assert scontrol.read_text() == "requeue 4712 preempted\n"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert stopped_by(signal.SIGUSR1, tmp_path / "run") == 75
    assert scontrol.read_text().splitlines()[1] == "requeue 4711_3 preempted"
    # SIGTERM comes from scancel, or from SLURM's own preemption, which requeues the job.
    assert stopped_by(signal.SIGTERM, tmp_path / "run") == 75
    assert stopped_by(signal.SIGUSR1, tmp_path / "run", preemption=Preemption(requeue=False)) == 75
    assert len(scontrol.read_text().splitlines()) == 2
    assert stopped_by(signal.SIGTERM, tmp_path / "run", preemption=Preemption(requeue=True)) == 75
    assert len(scontrol.read_text().splitlines()) == 3
    monkeypatch.setenv("REFUSES", "1")
    with pytest.warns(UserWarning, match=r"scontrol requeue 4711_3 failed: exit code 1.*The run is saved"):
        assert stopped_by(signal.SIGUSR1, tmp_path / "run") == 75


def test_slurm_without_scontrol_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(UserWarning, match="scontrol requeue 1 failed"):
        assert stopped_by(signal.SIGUSR1, tmp_path / "run") == 75


# time and processes ---------------------------------------------------------------------------------------------------
HANGS = """
import os, signal, sys, threading
import torch
from leyden import Trainer, TrainModule
from leyden.callbacks import ModelCheckpoint
from leyden.trainer import Preemption

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
            threading.Event().wait()
        return self.net(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

Trainer(
    accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=sys.argv[1], max_epochs=1,
    callbacks=ModelCheckpoint(every_n_train_steps=1), resume="auto", preemption=Preemption(grace_period=0.2),
).fit(Net(), [torch.ones(1, 1)] * 4)
"""


def test_a_step_that_outlasts_the_grace_period_is_abandoned(scontrol: Path, tmp_path: Path) -> None:
    done = run_program(["-c", HANGS, tmp_path / "run"])
    assert done.returncode == 75, done.stderr
    assert "the grace period of 0.2 s has ended (rank 0, step 2, epoch 0). The run is not saved" in done.stderr
    # The previous checkpoint is complete, so the job resumes from it.
    assert scontrol.read_text() == "requeue 4712 epoch=0-step=2\n"


def train_in_signaled_group(folder: Path, method: str) -> None:
    """Trains while every process of the job is signaled, as by a cluster scheduler, including loader workers."""
    os.setpgrp()
    torch.manual_seed(3)
    net = Net()
    stop = At("on_train_batch_start", 2, lambda: os.killpg(0, signal.SIGUSR1))
    trainer = Trainer(**QUIET, max_epochs=2, default_root_dir=folder, resume="auto", callbacks=stop)
    loader = DataLoader(labeled(400), 4, num_workers=2, multiprocessing_context=method)
    with pytest.raises(SystemExit, match="75"):
        trainer.fit(net, loader)
    # The run stops right after the signaled step, so the workers survived the signal.
    assert trainer.global_step == 2
    assert len(all_checkpoints(folder / SAVED)) == 1


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_loader_workers_survive_a_signal_to_the_whole_job(method: str, tmp_path: Path) -> None:
    run_world(1, train_in_signaled_group, tmp_path, method)


def on_two_ranks(folder: Path) -> None:
    steps: list[list[int]] = []
    for attempt in range(3):
        torch.manual_seed(3)
        net = Net()
        # A different rank receives the signal each time.
        stop = [At("on_train_batch_start", 3, raising(signal.SIGUSR1))] if attempt == RANK and attempt < 2 else []
        loader = DataLoader(labeled(40), 4, shuffle=True)
        trainer = Trainer(**QUIET, strategy="ddp", max_epochs=2, default_root_dir=folder, resume="auto", callbacks=stop)
        code = None
        try:
            trainer.fit(net, loader)
        except SystemExit as end:
            code = end.code
        assert code == (75 if attempt < 2 else None)
        steps.append(net.steps)
    assert [step for part in steps for step in part] == list(range(10))
    (folder / f"rank-{RANK}.json").write_text(json.dumps(steps))
    torch.manual_seed(3)
    uninterrupted = Net()
    Trainer(**QUIET, strategy="ddp", max_epochs=2, default_root_dir=folder / "uninterrupted").fit(
        uninterrupted, DataLoader(labeled(40), 4, shuffle=True)
    )
    assert same_weights(net, uninterrupted)


def test_a_preempted_rank_stops_all_ranks_at_the_same_step_and_they_resume_exactly(tmp_path: Path) -> None:
    run_world(2, on_two_ranks, tmp_path)
    assert (tmp_path / "rank-0.json").read_text() == (tmp_path / "rank-1.json").read_text()


PREEMPTED = """
import os, signal, sys
import torch
from leyden import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.is_global_zero and self.trainer.ckpt_path is None:
            os.kill(int(os.environ["LEYDEN_AGENT"]), signal.SIGUSR1)
        return self.net(batch).mean()
    def on_train_start(self):
        print(f"from step {self.trainer.global_step}", flush=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

Trainer(
    accelerator="cpu", devices=2, logger=False, enable_progress_bar=False, max_epochs=1, use_distributed_sampler=False,
    **({} if "LEYDEN_RESUME" in os.environ else {"resume": "auto"}),
).fit(Net(), [torch.ones(1, 1)] * 400)
print("done", flush=True)
"""


@pytest.mark.parametrize(
    "starter",
    [
        (),
        pytest.param(
            ("-m", "leyden", "launch", "--cpu", "--num_processes", "2", "--max_restarts", "2", "--resume", "auto"),
            marks=pytest.mark.full,
        ),
    ],
    ids=["a script", "leyden launch"],
)
def test_an_agent_forwards_a_signal_and_exits_with_its_ranks_status(starter: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PREEMPTED)
    command = [sys.executable, *starter, "train.py"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    first, again = (
        subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
        for _ in range(2)
    )
    assert first.returncode == 75, first.stderr
    assert "preempted by SIGUSR1" in first.stdout and "restart" not in first.stderr and "done" not in first.stdout
    assert "failed" not in first.stderr
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("from step 0") == 0 and again.stdout.count("from step ") == 2
    assert again.stdout.count("done") == 2


# arguments ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"signals": "SIGFOO"}, "'SIGFOO' is not a signal on this platform"),
        ({"signals": 999}, "999 is not a signal on this platform"),
        ({"signals": (True,)}, "True is not a signal on this platform"),
        ({"signals": "SIGKILL"}, "SIGKILL cannot announce a preemption: no process can catch it"),
        ({"signals": [signal.SIGINT]}, "Ctrl-C, which keeps its own meaning"),
        ({"signals": ()}, r"signals=\(\) without should_preempt"),
        ({"grace_period": 0}, "grace_period=0: use a number of seconds above 0"),
        ({"grace_period": timedelta(seconds=-1)}, "grace_period=-1.0"),
        ({"grace_period": "soon"}, "grace_period='soon'"),
        ({"poll_every": None}, "poll_every=None"),
        ({"exit_code": 256}, "exit_code=256: use a whole number from 0 to 255"),
        ({"requeue": "yes"}, "requeue='yes': use True, False or None"),
        ({"should_preempt": True}, "should_preempt=True: use a function"),
    ],
    ids=str,
)
def test_invalid_arguments_raise(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Preemption(**arguments)


def test_an_invalid_preemption_argument_of_the_trainer_raises() -> None:
    with pytest.raises(ConfigurationError, match=r"preemption='SIGTERM': use True, False, or Preemption"):
        Trainer(preemption="SIGTERM", **QUIET)  # type: ignore[arg-type]
    assert Preemption(signals=[], should_preempt=bool, grace_period=timedelta(minutes=1)).grace == 60


def test_a_forged_checkpoint_name_raises() -> None:
    with pytest.raises(ValueError, match="which PreemptionCheckpoint never uses"):
        PreemptionCheckpoint().check_state_dict({"name": "../../etc"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PreemptionCheckpoint().load_state_dict({})
