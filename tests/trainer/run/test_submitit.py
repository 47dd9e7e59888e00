"""submitit signals its jobs and requeues them; a requeued job resumes exactly, under Trainer and Accelerator."""

from __future__ import annotations

import json
import os
import pickle
import re
import stat
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from programs import run_program
from ranks.world import free_port, run_world

from leyden import ConfigurationError, Trainer
from leyden.core.environment import RankEnvironment, rank_environment
from leyden.trainer import Preemption

submitit = pytest.importorskip("submitit")

CHECKPOINTS = Path(__file__).parents[3] / "docs" / "checkpoints.md"
PROJECT = """
import json, os, signal, threading
import submitit
import torch
from leyden import Accelerator, Trainer, TrainModule
from leyden.trainer import Preemption
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def reach(rank, step):
    with open(f"steps-{rank}.txt", "a") as steps:
        print(step, file=steps)
    for name in json.loads(os.environ.get("SIGNALS", "{}")).get(f"rank {rank}, step {step}", []):
        threading.Event().wait() if name == "hang" else signal.raise_signal(signal.Signals[name])

class Model(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.3), nn.Linear(4, 3))
    def training_step(self, batch, batch_idx):
        if self.trainer.training:
            reach(self.trainer.global_rank, self.trainer.global_step)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.05)

def loader():
    made = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(40, 6, generator=made), torch.randint(3, (40,), generator=made))
    return DataLoader(data, 4, shuffle=True)

class Fit(submitit.helpers.Checkpointable):
    def __call__(self, **arguments):
        trainer = Trainer(accelerator="cpu", max_epochs=2, logger=False, default_root_dir="runs/digits", **arguments)
        trainer.fit(Model(), loader())
        return trainer.signals.kinds

class Loop(submitit.helpers.Checkpointable):
    def __call__(self, **arguments):
        accelerator = Accelerator(cpu=True, project_dir="runs/digits", preemption=True, **arguments)
        model = Model()
        model, optimizer, batches = accelerator.prepare(model.net, model.configure_optimizers(), loader())
        accelerator.load_state()
        for epoch in range(batches.iteration, 2):
            for x, y in batches:
                reach(0, accelerator.steps)
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.check_preemption():
                    accelerator.save_state()
                    accelerator.leave()
        accelerator.save_state()
        accelerator.end_training()

def fit(**arguments):
    return Fit()(**arguments)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder from which jobs are submitted, with the module `project`."""
    (tmp_path / "project.py").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "project", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def saved(folder: Path) -> list[str]:
    """Returns the names of a run's checkpoints, the newest last."""
    found = sorted(folder.glob("runs/**/manifest.json"), key=lambda path: path.stat().st_mtime_ns)
    return [path.parent.name for path in found]


def trained(folder: Path, rank: int = 0) -> tuple[list[int], bytes]:
    """Returns the steps that a rank has trained, over all starts, and the bytes of the final weights."""
    steps = [int(step) for step in (folder / f"steps-{rank}.txt").read_text().split()]
    (weights,) = folder.glob(f"runs/**/{saved(folder)[-1]}/model.safetensors")
    return steps, weights.read_bytes()


def fit_in(folder: Path) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder.parent))
    from project import fit

    fit()


@pytest.fixture
def whole(folder: Path, request: pytest.FixtureRequest) -> tuple[list[int], bytes]:
    """The steps and weights of a fit without submitit, which nothing interrupts."""
    (folder / "whole").mkdir()
    run_world(getattr(request, "param", 1), fit_in, folder / "whole")
    return trained(folder / "whole")


# submitit's own executor ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("whole", "signals"),
    [
        (1, {"rank 0, step 3": ["SIGUSR2"]}),
        # Ranks agree on the signal, whichever of them gets it.
        (2, {"rank 1, step 2": ["SIGUSR2"]}),
        pytest.param(
            2,
            {f"rank {rank}, step {step}": ["SIGTERM", "SIGUSR2"] for rank in (0, 1) for step in (2, 7)},
            marks=pytest.mark.full,
        ),
    ],
    indirect=["whole"],
)
def test_the_documented_job_is_requeued_and_ends_with_the_weights_of_an_uninterrupted_run(
    whole: tuple[list[int], bytes], signals: dict[str, list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"```python\n(import submitit\n.*?)```", CHECKPOINTS.read_text(encoding="utf-8"), re.DOTALL)
    tasks = 1 + any("rank 1" in place for place in signals)
    monkeypatch.setenv("SIGNALS", json.dumps(signals))
    submission = ModuleType("submission")
    exec(
        compile(block.replace("tasks_per_node=2", f"tasks_per_node={tasks}"), "checkpoints.md", "exec"),
        vars(submission),
    )
    job = vars(submission)["job"]
    assert isinstance(job, submitit.LocalJob)
    job.results()
    times = len({place.split()[-1] for place in signals})
    assert job.stdout().count("preempted by SIGUSR2 at step") == job.stdout().count("Requeued job") == times
    for rank in range(tasks):
        assert trained(folder, rank) == whole


# submitit on SLURM ----------------------------------------------------------------------------------------------------
class Task:
    """A task that submitit starts on SLURM, which is only an scontrol that records its arguments."""

    def __init__(self, folder: Path) -> None:
        program, self.requests = folder / "bin" / "scontrol", folder / "requests.txt"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\necho "$@" $(ls runs/digits/*/checkpoints) >> {self.requests}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.environ = {
            **os.environ,
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "4712",
            "SUBMITIT_EXECUTOR": "slurm",
        }
        self.paths = submitit.core.utils.JobPaths(folder / "jobs", "4712", 0)

    def submit(self, function: Any, timeout_min: int = 60, **arguments: Any) -> None:
        call = submitit.core.utils.DelayedSubmission(function, **arguments)
        call.set_timeout(timeout_min, 0)
        self.paths.folder.mkdir()
        call.dump(self.paths.submitted_pickle)

    def start(self, signals: Mapping[str, list[str]], **variables: str) -> tuple[int, str]:
        """Runs the task, as srun does; returns its exit code and output."""
        environ = {**self.environ, **variables, "SIGNALS": json.dumps(signals)}
        done = run_program(["-m", "submitit.core._submit", self.paths.folder], environ=environ)
        return done.returncode, done.stdout + done.stderr

    def result(self) -> Any:
        status, result = pickle.loads(self.paths.result_pickle.read_bytes())
        assert status == "success", result
        return result

    def requeued(self) -> list[str]:
        return self.requests.read_text().splitlines() if self.requests.exists() else []


@pytest.fixture
def task(folder: Path) -> Task:
    return Task(folder)


@pytest.mark.parametrize(
    "names",
    [["SIGUSR2"], ["SIGTERM", "SIGUSR2"], ["SIGUSR1"], ["SIGUSR2", "SIGUSR2", "SIGTERM"]],
    ids=lambda names: " ".join(names),
)
def test_a_job_on_slurm_is_requeued_once_and_by_submitit(
    names: list[str], task: Task, folder: Path, whole: tuple[list[int], bytes]
) -> None:
    from project import Fit

    task.submit(Fit(), resume="auto")
    signals = {"rank 0, step 6": names}
    code, output = task.start(signals)
    # The code with which submitit exits.
    assert code == 255, output
    assert f"preempted by {names[-1] if names[-1] != 'SIGTERM' else names[0]} at step 7" in output
    assert task.requeued() == ["requeue 4712 preempted"]
    assert "Requeued job 4712" in output and not task.paths.result_pickle.exists()
    code, output = task.start(signals)
    assert code == 0, output
    assert task.requeued() == ["requeue 4712 preempted"] and trained(folder) == whole


@pytest.mark.parametrize("whole", [2], indirect=True)
def test_tasks_of_srun_agree_and_only_the_first_requeues(
    task: Task, folder: Path, whole: tuple[list[int], bytes]
) -> None:
    from project import Fit

    task.submit(Fit(), resume="auto")

    def start_both(signals: Mapping[str, list[str]]) -> list[int]:
        step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
        step |= {"MASTER_PORT": str(free_port())}
        with ThreadPoolExecutor() as pool:
            places = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
            return [code for code, _ in pool.map(lambda place: task.start(signals, **step, **place), places)]

    assert start_both({"rank 1, step 1": ["SIGTERM", "SIGUSR2"]}) == [255, 75]
    assert task.requeued() == ["requeue 4712 preempted"]
    assert start_both({}) == [0, 0]
    assert trained(folder, 0) == trained(folder, 1) == whole


def test_an_accelerators_loop_is_requeued_by_submitit(task: Task, folder: Path) -> None:
    from project import Loop

    (folder / "whole").mkdir()
    task.submit(Loop(), resume="auto")
    code, output = task.start({"rank 0, step 6": ["SIGTERM", "SIGUSR2"]})
    assert code == 255 and len(task.requeued()) == 1, output
    assert "preempted by SIGUSR2 at step 7" in output
    code, output = task.start({})
    assert code == 0, output
    interrupted = trained(folder)
    for name in ("steps-0.txt", "runs"):
        (folder / name).rename(folder / "whole" / name)
    task.paths.submitted_pickle.unlink()
    task.paths.folder.rename(folder / "earlier")
    task.submit(Loop(), resume="auto")
    assert task.start({})[0] == 0
    assert trained(folder) == interrupted and interrupted[0] == list(range(20))


def test_sigterm_alone_does_nothing_as_without_leyden(task: Task) -> None:
    from project import Fit

    for arguments in ({"resume": "auto"}, {}):
        task.submit(Fit(), **arguments)
        code, output = task.start({"rank 0, step 6": ["SIGTERM"]})
        assert code == 0 and "Bypassing signal SIGTERM" in output, output
        assert "SIGTERM" not in [getattr(kind, "name", kind) for kind in task.result()]
        task.paths.folder.rename(task.paths.folder.with_name(f"jobs {len(arguments)}"))
    assert task.requeued() == []


@pytest.mark.parametrize(
    ("preemption", "name", "code", "requeued"),
    [
        (Preemption(requeue=False), "SIGUSR2", 75, 0),
        (Preemption(signals="SIGTERM"), "SIGTERM", 75, 0),
        (Preemption(signals="SIGTERM", requeue=True), "SIGTERM", 255, 1),
        (Preemption(signals="SIGHUP"), "SIGUSR2", 255, 1),
        # submitit requeues at once, and the run starts from scratch.
        (False, "SIGUSR2", 255, 1),
    ],
    ids=str,
)
def test_a_preemption_decides_whether_submitit_requeues(
    preemption: Any, name: str, code: int, requeued: int, task: Task, folder: Path
) -> None:
    from project import Fit

    task.submit(Fit(), resume="auto", preemption=preemption)
    found, output = task.start({"rank 0, step 6": [name]})
    assert found == code and len(task.requeued()) == requeued, output
    assert saved(folder) == ([] if preemption is False else ["preempted"])


def test_the_signal_that_submitit_was_told_to_use_is_handed_back(task: Task) -> None:
    from project import Fit

    task.environ["SUBMITIT_PREEMPT_SIGNAL"] = "TERM"
    task.submit(Fit(), resume="auto")
    code, output = task.start({"rank 0, step 6": ["SIGTERM"]})
    assert code == 255 and task.requeued() == ["requeue 4712 preempted"], output


def test_a_job_that_submitit_does_not_requeue_fails_with_submitits_reason(task: Task, folder: Path) -> None:
    from project import Fit

    task.submit(Fit(), timeout_min=0, resume="auto")
    code, output = task.start({"rank 0, step 6": ["SIGUSR2"]})
    assert code == 1 and task.requeued() == [], output
    status, trace = pickle.loads(task.paths.result_pickle.read_bytes())
    assert status == "error" and "Job not requeued because: timed-out too many times." in trace
    assert saved(folder) == ["preempted"]


def test_a_step_that_outlasts_the_grace_period_is_abandoned_and_requeued(
    task: Task, folder: Path, whole: tuple[list[int], bytes]
) -> None:
    from project import Fit

    task.submit(Fit(), resume="auto", preemption=Preemption(grace_period=0.2))
    code, output = task.start({"rank 0, step 13": ["SIGUSR2", "hang"]})
    assert code == 255 and "The run is not saved" in output, output
    # The checkpoint of the first epoch.
    assert task.requeued() == ["requeue 4712 epoch=0-step=10"]
    code, output = task.start({})
    assert code == 0, output
    steps, weights = trained(folder)
    assert weights == whole[1] and steps == [*range(14), *range(10, 20)]


def test_a_program_that_a_task_starts_saves_and_leaves_the_requeue_to_its_task(task: Task, folder: Path) -> None:
    program = "from project import fit; fit(resume='auto')"
    for step, name in ((6, "SIGUSR2"), (12, "SIGTERM")):
        environ = {**task.environ, "SIGNALS": json.dumps({f"rank 0, step {step}": [name]})}
        done = run_program(["-c", program], environ=environ)
        assert done.returncode == 75 and f"preempted by {name} at step {step + 1}" in done.stdout, done.stderr
    assert task.requeued() == []


def test_a_trainer_does_not_start_ranks_in_a_task(task: Task) -> None:
    from project import Fit

    task.submit(Fit(), devices=3)
    code, output = task.start({})
    assert code == 1 and not Path("runs").exists()
    assert re.search(r"ConfigurationError: the Trainer would start 3 ranks in one task.*tasks_per_node=3\)", output)


# ranks ----------------------------------------------------------------------------------------------------------------
LOCAL = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_JOB_ID": "4711",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_GLOBALID": "1",
}


def test_tasks_of_the_local_executor_are_ranks() -> None:
    assert rank_environment(LOCAL) == RankEnvironment(1, 1, 2, 2, 0, "submitit", ("127.0.0.1", 19711))
    assert rank_environment({**LOCAL, "SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0"}) is None
    # The variables of the job that submitted this one are left over.
    assert rank_environment({**LOCAL, "SUBMITIT_EXECUTOR": "slurm"}) is None


def test_devices_that_contradict_the_tasks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LOCAL.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="submitit started 2 ranks.*SUBMITIT_LOCAL_NTASKS.*Leave both out"):
        Trainer(accelerator="cpu", devices=3)
