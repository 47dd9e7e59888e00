"""A loop of one's own that is preempted goes on in the same step at its next start, and holds its folder alone."""

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
from leyden.trainer import Preemption
from leyden.trainer.checkpoint.folder import all_checkpoints
from leyden.trainer.checkpoint.lock import NAME, FolderLock

RANK = int(os.environ.get("RANK", "0"))


class Own:
    """One start of a script with a loop of its own: 2 epochs of 10 batches on one process.

    Args:
        folder: of the run.
        at: what happens in the n-th batch of this start, before its step.
    """

    def __init__(
        self, folder: Path, at: Mapping[int, Callable[[], Any]] | None = None, workers: int = 0, **arguments: Any
    ) -> None:
        torch.manual_seed(3)
        settings = {"resume": "auto", "preemption": True, "project_dir": folder, **arguments}
        self.accelerator = Accelerator(cpu=True, **settings)
        model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.3), nn.Linear(4, 3))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        loader = DataLoader(labeled(40), 4, shuffle=True, num_workers=workers)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.at = dict(at or {})
        self.batches = 0
        self.steps: list[int] = []
        self.code: Any = None

    def run(self, asynchronous: bool = False) -> Own:
        accelerator = self.accelerator
        if accelerator.options.resumes:
            accelerator.load_state()
        try:
            for _ in range(self.loader.iteration, 2):
                for batch in self.loader:
                    self.batches += 1
                    self.at.get(self.batches, lambda: None)()
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


def raising(*numbers: int) -> Callable[[], None]:
    return lambda: [signal.raise_signal(number) for number in numbers] and None


def same(one: Own, other: Own) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one.weights(), other.weights(), strict=True))


@pytest.fixture(autouse=True)
def _puts_handlers_back() -> Iterator[None]:
    """What a test leaves of a loop catches no signal of the next one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Own:
    run = Own(tmp_path_factory.mktemp("whole"), resume=None, preemption=None).run()
    assert run.code is None and run.steps == list(range(1, 21))
    return run


# preempted ------------------------------------------------------------------------------------------------------------
POINTS = {
    "by SIGTERM": (7, raising(signal.SIGTERM)),
    "by SIGUSR1": (7, raising(signal.SIGUSR1)),
    "in the first step": (1, raising(signal.SIGUSR1)),
    "in an epoch's last step": (10, raising(signal.SIGTERM)),
    "in the last step": (20, raising(signal.SIGTERM)),
    "again and again": (13, raising(*[signal.SIGUSR1, signal.SIGTERM] * 3)),
}


@pytest.mark.parametrize("point", POINTS)
def test_the_next_start_goes_on_in_the_same_step(
    point: str, tmp_path: Path, whole: Own, capsys: pytest.CaptureFixture[str]
) -> None:
    number, action = POINTS[point]
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)]
    first = Own(tmp_path, {number: action}).run()
    assert first.code == 75 and first.steps == list(range(1, number + 1))
    assert f"at step {number}\n" in capsys.readouterr().out
    assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    second = Own(tmp_path).run()
    assert second.code is None and first.steps + second.steps == whole.steps and same(second, whole)
    assert "continues from" in capsys.readouterr().out


def test_a_loop_that_is_preempted_often_ends_as_one_that_is_not(tmp_path: Path, whole: Own) -> None:
    limit = ProjectConfiguration(total_limit=1)
    steps: list[int] = []
    for _ in range(4):
        run = Own(tmp_path, {4: raising(signal.SIGUSR1)}, project_config=limit).run(asynchronous=True)
        assert run.code == 75
        steps += run.steps
        assert len(all_checkpoints(tmp_path / "checkpoints")) == 1
    last = Own(tmp_path).run()
    assert steps + last.steps == whole.steps and same(last, whole)


def test_a_window_that_is_open_is_closed_first(tmp_path: Path) -> None:
    whole = Own(tmp_path / "whole", gradient_accumulation_steps=3).run()
    first = Own(tmp_path / "run", {4: raising(signal.SIGTERM)}, gradient_accumulation_steps=3).run()
    assert first.code == 75 and first.batches == 6 and first.steps == [1, 2]
    second = Own(tmp_path / "run", gradient_accumulation_steps=3).run()
    assert first.steps + second.steps == whole.steps == list(range(1, 9)) and same(second, whole)


def test_a_save_that_waits_for_its_window_is_written_before_the_end(tmp_path: Path) -> None:
    run = Own(tmp_path, gradient_accumulation_steps=2)
    accelerator = run.accelerator
    for index, (x, y) in enumerate(run.loader):
        with accelerator.accumulate(run.model):
            accelerator.backward(F.cross_entropy(run.model(x), y))
            run.optimizer.step()
            run.optimizer.zero_grad()
            if index == 2:
                accelerator.save_state()
                signal.raise_signal(signal.SIGTERM)
            # Inside the block: the window's last batch is not done with.
            if accelerator.check_preemption():
                with pytest.raises(SystemExit, match="75"):
                    accelerator.leave()
                break
    assert index == 3
    again = Own(tmp_path, gradient_accumulation_steps=2)
    again.accelerator.load_state()
    assert again.accelerator.steps == 2


def test_a_notice_preempts_as_a_signal_does(tmp_path: Path, whole: Own) -> None:
    preemption = Preemption(signals=(), should_preempt=lambda: True, poll_every=0.01)
    run = Own(tmp_path, preemption=preemption)

    def wait() -> None:
        while not run.accelerator.check_preemption():
            pass

    run.at[3] = wait
    run.run()
    assert run.code == 75 and len(run.steps) <= 3
    second = Own(tmp_path).run()
    assert run.steps + second.steps == whole.steps and same(second, whole)


def test_signals_and_exit_code_of_ones_own(tmp_path: Path) -> None:
    own, term = Preemption(signals="SIGUSR2", exit_code=42), signal.getsignal(signal.SIGTERM)
    run = Own(tmp_path, {2: raising(signal.SIGUSR2)}, preemption=own)
    # What is not named keeps its meaning.
    assert signal.getsignal(signal.SIGTERM) == term
    assert run.run().code == 42


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_keeps_its_meaning(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        run = Own(tmp_path, {2: raising(signal.SIGTERM, signal.SIGINT)})
        with pytest.raises(KeyboardInterrupt):
            run.run()
        assert seen == []
        # The loop never heard of the first one.
        run.accelerator.end_training()
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_the_loop_never_hears_of_is_not_lost(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        run = Own(tmp_path)
        signal.raise_signal(signal.SIGUSR1)
        assert seen == []
        run.accelerator.end_training()
        assert seen == [signal.SIGUSR1]
        # Once: a script may end twice.
        run.accelerator.end_training()
        # One that the loop was told of is the loop's business.
        heard = Own(tmp_path, {1: raising(signal.SIGUSR1)})
        for batch in heard.loader:
            heard.at[1]()
            heard.step(batch)
            assert heard.accelerator.check_preemption()
            break
        heard.accelerator.end_training()
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


class Closed(GeneralTracker):
    """Notes when it is closed."""

    name = "closed"
    requires_logging_directory = False

    def __init__(self) -> None:
        self.count = 0

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None: ...

    def finish(self) -> None:
        self.count += 1


class Recording(Logger):
    """Notes how the run ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...

    def finalize(self, status: str) -> None:
        self.ended.append(status)


def test_leaving_closes_the_trackers_and_may_be_followed_by_end_training(tmp_path: Path) -> None:
    tracker = Closed()
    run = Own(tmp_path, {1: raising(signal.SIGTERM)}, log_with=tracker)
    run.accelerator.init_trackers("own")
    assert run.run().code == 75 and tracker.count == 1
    run.accelerator.end_training()


@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_a_logger_notes_whether_the_loop_was_preempted(tmp_path: Path, number: int | None) -> None:
    logger = Recording()
    run = Own(tmp_path, {1: raising(number)} if number else {}, log_with=logger)
    run.accelerator.init_trackers("own")
    assert run.run().code == (75 if number else None)
    assert logger.ended == ["interrupted" if number else "success"]


def test_a_loop_that_asks_for_nothing_catches_nothing(tmp_path: Path) -> None:
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)]
    run = Own(tmp_path, resume=None, preemption=None)
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
def test_what_cannot_be_is_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Accelerator(cpu=True, **arguments)


# SLURM, time, processes -----------------------------------------------------------------------------------------------
@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that writes down what it is asked, and what is in the folder then; returns the file."""
    asked, folder = tmp_path / "asked.txt", tmp_path / "bin"
    folder.mkdir()
    program = folder / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" $(ls -A {tmp_path}/run/checkpoints) >> {asked}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    return asked


def test_a_job_of_slurm_goes_back_to_the_queue_when_all_is_saved_and_the_folder_is_free(
    scontrol: Path, tmp_path: Path
) -> None:
    assert Own(tmp_path / "run", {2: raising(signal.SIGUSR1)}).run().code == 75
    assert scontrol.read_text() == "requeue 4712 checkpoint_0\n"
    # scancel, and SLURM's own preemption, which requeues by itself.
    assert Own(tmp_path / "run", {2: raising(signal.SIGTERM)}).run().code == 75
    assert len(scontrol.read_text().splitlines()) == 1


HANGS = """
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


def test_a_step_that_outlasts_the_grace_period_is_left(scontrol: Path, tmp_path: Path) -> None:
    done = run_program(["-c", HANGS, tmp_path / "run"])
    assert done.returncode == 75, done.stderr
    assert "the grace period of 0.2 s has ended (rank 0, step 0). The run is not saved" in done.stderr
    assert scontrol.read_text().startswith("requeue 4712")
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["checkpoint_0"]


CLOSES = """
import os, signal, sys, threading
import torch
from leyden import Accelerator, GeneralTracker
from leyden.callbacks import Logger
from leyden.trainer import Preemption

class Slow(GeneralTracker):
    name, requires_logging_directory = "slow", False
    def log(self, values, step=None, **kwargs): ...
    def finish(self):
        threading.Event().wait()

accelerator = Accelerator(
    cpu=True, project_dir="run", resume="auto", preemption=Preemption(grace_period=4), log_with=Slow()
)
accelerator.init_trackers("run")
model = accelerator.prepare(torch.nn.Linear(1, 1))
os.kill(os.getpid(), signal.SIGUSR1)
assert accelerator.check_preemption()
accelerator.save_state(asynchronous=True)
accelerator.leave()
"""


def test_an_end_that_outlasts_the_grace_period_is_cut_off_after_the_save(tmp_path: Path) -> None:
    done = run_program(["-c", CLOSES], tmp_path)
    assert done.returncode == 75, done.stderr
    assert "(rank 0, step 0). The run is saved, but its shutdown was cut short" in done.stderr
    assert [path.name for path in all_checkpoints(tmp_path / "run" / "checkpoints")] == ["checkpoint_0"]


def in_a_group(folder: Path) -> None:
    """A scheduler signals every process of a job, and so the workers of a loader."""
    os.setpgrp()
    run = Own(folder, {3: lambda: os.killpg(0, signal.SIGUSR1)}, workers=2).run()
    assert run.code == 75 and run.steps == [1, 2, 3]
    assert len(all_checkpoints(folder / "checkpoints")) == 1


def test_a_signal_to_all_processes_of_a_job_does_not_take_the_workers(tmp_path: Path) -> None:
    run_world(1, in_a_group, tmp_path)


# several ranks --------------------------------------------------------------------------------------------------------
def on_two_ranks(folder: Path, strategy: str) -> None:
    parts: list[list[int]] = []
    # Each time another rank receives the signal; the others hear of it one call later, or in an epoch's last batch.
    for attempt, batch in enumerate((2, 2, 1, None)):
        stop = {batch: raising(signal.SIGUSR1)} if attempt % 2 == RANK and batch is not None else {}
        run = Own(folder / strategy, stop, strategy=strategy).run()
        assert run.code == (None if batch is None else 75)
        parts.append(run.steps)
    assert parts == [[1, 2, 3], [4, 5], [6, 7], [8, 9, 10]], parts
    whole = Own(folder / f"{strategy} whole", strategy=strategy, resume=None, preemption=None).run()
    assert same(run, whole)


def uneven(folder: Path) -> None:
    """Ranks with different numbers of batches exchange nothing but gradients, and hear of the signal afterwards."""
    run = Own(folder / "uneven", strategy="ddp", even_batches=False)
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


def late(folder: Path) -> None:
    """A signal that came to one rank after its last call is not lost, and keeps no rank waiting."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    run = Own(folder / "late", strategy="ddp")
    assert not run.accelerator.check_preemption()
    if RANK == 1:
        signal.raise_signal(signal.SIGUSR1)
    run.accelerator.end_training()
    assert len(seen) == RANK
    signal.signal(signal.SIGUSR1, before)


def refused(folder: Path) -> None:
    """Every rank is refused, with the owner's name."""
    if RANK == 0:
        lock = FolderLock(folder / "held" / "checkpoints")
        lock.acquire()
    with pytest.raises(LeydenError, match="belongs to a run that is under way"):
        Own(folder / "held", strategy="ddp")
    if RANK == 0:
        lock.release()


def several(folder: Path) -> None:
    on_two_ranks(folder, "ddp")
    on_two_ranks(folder, "fsdp")
    uneven(folder)
    late(folder)
    refused(folder)


def test_ranks_that_one_of_them_preempts_end_at_the_same_step_and_go_on_exactly(tmp_path: Path) -> None:
    run_world(2, several, tmp_path)


LAUNCHED = """
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
def test_an_agent_passes_a_signal_on_and_exits_as_its_ranks_do(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LAUNCHED)
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


# the folder -----------------------------------------------------------------------------------------------------------
def in_a_fork(work: Callable[[], Any]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except LeydenError as error:
            os._exit(1 if "belongs to a run that is under way: process" in str(error) else 2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def hold(folder: Path, **arguments: Any) -> Accelerator:
    return Accelerator(cpu=True, project_dir=folder, resume="auto", **arguments)


def test_a_loop_that_continues_by_itself_holds_its_folder_until_it_ends(tmp_path: Path) -> None:
    one = hold(tmp_path)
    with pytest.raises(LeydenError, match=r"this very process.*Accelerator\(project_dir=…\).*end_training\(\) rel"):
        hold(tmp_path)
    assert in_a_fork(lambda: hold(tmp_path)) == 1
    # Loops that do not continue by themselves may share it, as ever.
    Accelerator(cpu=True, project_dir=tmp_path)
    one.end_training()
    one.end_training()
    assert os.listdir(tmp_path / "checkpoints") == []
    hold(tmp_path).end_training()


def test_what_a_killed_loop_held_is_taken_over(tmp_path: Path) -> None:
    assert in_a_fork(lambda: (hold(tmp_path), os.kill(os.getpid(), signal.SIGKILL))) == -signal.SIGKILL
    assert (tmp_path / "checkpoints" / NAME).exists()
    hold(tmp_path).end_training()


def test_a_script_that_ends_or_fails_gives_its_folder_up(tmp_path: Path) -> None:
    code = "import sys; from leyden import Accelerator; Accelerator(cpu=True, project_dir='run', resume='auto'); "
    for end, status in (("", 0), ("raise OSError", 1)):
        assert run_program(["-c", code + end], tmp_path).returncode == status
        assert os.listdir(tmp_path / "run" / "checkpoints") == []


def test_a_loop_that_is_dropped_before_its_end_holds_nothing(tmp_path: Path) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    hold(tmp_path, preemption=True)
    later = Accelerator(cpu=True, preemption=True)
    gc.collect()
    assert os.listdir(tmp_path / "checkpoints") == []
    signal.raise_signal(signal.SIGTERM)
    assert later.check_preemption() and not heard
    # It puts back the handler of the one that was dropped.
    later.end_training()
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_a_constructor_that_fails_holds_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        hold(tmp_path, log_with="no tracker")
    hold(tmp_path).end_training()


def test_a_loop_whose_folder_went_to_another_saves_no_more(tmp_path: Path) -> None:
    run = hold(tmp_path)
    lock = tmp_path / "checkpoints" / NAME
    lock.write_text(json.dumps({**json.loads(lock.read_bytes()), "token": "another's"}))
    with pytest.raises(LeydenError, match="was taken over by"):
        run.save_state()
    run.end_training()
    assert lock.exists()


def test_where_it_saves_and_what_it_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Own(tmp_path, project_config=ProjectConfiguration(total_limit=2))
    accelerator = run.accelerator
    accelerator.load_state()
    assert f"starts from scratch: no checkpoint in {tmp_path / 'checkpoints'} yet" in capsys.readouterr().out
    names = [Path(accelerator.save_state()).name for _ in range(3)]
    # A path of one's own is used, kept, and not continued from.
    assert accelerator.save_state(tmp_path / "best") == str(tmp_path / "best")
    assert names == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert {path.name for path in all_checkpoints(tmp_path / "checkpoints")} == {"checkpoint_1", "checkpoint_2"}
    accelerator.end_training()
    (tmp_path / "checkpoints" / "checkpoint_2" / "model.safetensors").write_bytes(b"damaged")
    again = Own(tmp_path)
    with pytest.warns(UserWarning, match="skipping a damaged checkpoint"):
        again.accelerator.load_state()
    assert f"continues from {tmp_path / 'checkpoints' / 'checkpoint_1'}" in capsys.readouterr().out
    assert Path(again.accelerator.save_state()).name == "checkpoint_3"
    again.accelerator.load_state(tmp_path / "best")
    assert Path(again.accelerator.save_state()).name == "checkpoint_4"
    again.accelerator.end_training()


def test_a_relative_folder_stays_where_it_was_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = Own(Path("run"), project_config=ProjectConfiguration(total_limit=2))
    accelerator = run.accelerator
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = tmp_path / "run" / "checkpoints"
    assert [accelerator.save_state() for _ in range(3)][-1] == str(folder / "checkpoint_2")
    assert os.path.lexists(folder / NAME) and len(all_checkpoints(folder)) == 2
    accelerator.load_state()
    assert f"continues from {folder / 'checkpoint_2'}" in capsys.readouterr().out
    # A path of one's own is the caller's, as in any other program.
    accelerator.save_state("own")
    assert os.listdir() == ["own"] and accelerator.project_dir == Path("run")
    accelerator.end_training()
    monkeypatch.chdir(tmp_path)
    config = ProjectConfiguration("run", automatic_checkpoint_naming=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert config.checkpoint_folder == folder


def test_a_save_after_the_end_keeps_out_of_the_released_folder(tmp_path: Path) -> None:
    accelerator = Own(tmp_path).accelerator
    accelerator.save_state()
    accelerator.end_training()
    later = hold(tmp_path)
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


def test_a_loop_may_end_in_another_thread(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        for came in (False, True):
            tracker = Closed()
            run = Own(tmp_path, log_with=tracker)
            run.accelerator.init_trackers("own")
            if came:
                # A signal that the loop has not been told of acts as without Leyden.
                signal.raise_signal(signal.SIGTERM)
                assert seen == [signal.SIGTERM] * 2
            errors: list[Any] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(threading, "excepthook", errors.append)
                thread = threading.Thread(target=run.accelerator.end_training)
                thread.start()
                thread.join()
            assert not errors and tracker.count == 1 and os.listdir(tmp_path / "checkpoints") == []
            if not came:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM] * 3
    finally:
        signal.signal(signal.SIGTERM, before)
