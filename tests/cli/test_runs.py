"""`leyden runs` on the folders of real runs: killed, failed, damaged and foreign ones, and on two ranks."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from programs import run_in_fork
from ranks.world import run_world
from torch.utils.data import DataLoader

from leyden import Callback, LeydenError, Trainer
from leyden.callbacks import CSVLogger, ModelCheckpoint
from leyden.checkpoint.status import FILE, RunStatus
from leyden.report.runs import RunSummary, runs_below

DATA = [torch.ones(1, 2)] * 4


class Net(Line):
    """Logs a loss, equal to the number of steps that are left.

    Args:
        action: is called before the third step.
    """

    def __init__(self, action: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.action = action

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 2:
            self.action()
        self.log("loss", 4.0 - self.trainer.global_step)
        return super().training_step(batch, batch_idx)


def fitted(root: Path, action: Callable[[], Any] = lambda: None, *callbacks: Callback, **arguments: Any) -> Trainer:
    fit = {name: arguments.pop(name) for name in ("ckpt_path",) if name in arguments}
    checkpoint = ModelCheckpoint(monitor="loss", every_n_train_steps=1)
    options = {**QUIET, "enable_checkpointing": True, "default_root_dir": root, "max_epochs": 1}
    trainer = Trainer(**{**options, **arguments}, callbacks=list(callbacks) or [checkpoint])
    trainer.fit(Net(action), DATA, **fit)
    return trainer


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise ValueError("the data is bad")


def only(root: Path) -> RunSummary:
    found, errors = runs_below(root)
    assert len(found) == 1 and not errors
    return found[0]


# states ---------------------------------------------------------------------------------------------------------------
def test_a_finished_run_has_its_step_best_value_size_and_checkpoint(tmp_path: Path) -> None:
    trainer, run = fitted(tmp_path), only(tmp_path)
    assert (run.state, run.step, run.metric, run.best, run.mode) == ("finished", 4, "loss", 1.0, "min")
    assert (str(run.path), str(run.checkpoint)) == (trainer.run_folder, str(trainer.last_checkpoint))
    assert run.pid == os.getpid()
    assert run.started is not None and run.ended is not None and run.started <= run.ended
    assert run.size == sum(path.lstat().st_size for path in Path(run.path).rglob("*") if path.is_file())


def test_a_run_that_fails_or_is_interrupted_says_so_and_where(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the data is bad"):
        fitted(tmp_path / "failed", fail)
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "interrupted", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "twice", lambda: (interrupt(), interrupt()))
    failed, interrupted = only(tmp_path / "failed"), only(tmp_path / "interrupted")
    assert only(tmp_path / "twice").state == "interrupted"
    assert (failed.state, failed.step) == ("failed", 2)
    assert (interrupted.state, interrupted.step) == ("interrupted", 3)


@pytest.mark.filterwarnings("ignore:while the run failed")
def test_a_run_whose_logger_cannot_close_has_failed(tmp_path: Path) -> None:
    class Full(CSVLogger):
        def finalize(self, status: str) -> None:
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fitted(tmp_path, lambda: None, ModelCheckpoint(), Full(tmp_path))
    assert only(tmp_path).state == "failed"


def test_a_run_is_running_until_its_process_is_killed(tmp_path: Path) -> None:
    waiting, ready = os.pipe()
    child = os.fork()
    if child == 0:

        def report_and_wait() -> None:
            os.write(ready, b".")
            signal.pause()

        fitted(tmp_path, report_and_wait)
        os._exit(1)
    assert os.read(waiting, 1) == b"."
    running = only(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    killed = only(tmp_path)
    assert (running.state, running.pid, running.step, running.ended) == ("running", child, 2, None)
    assert (killed.state, killed.pid, killed.step, killed.best) == ("killed", child, 2, 3.0)


def test_a_killed_run_that_is_resumed_is_finished(tmp_path: Path) -> None:
    assert run_in_fork(lambda: fitted(tmp_path, kill)) == -signal.SIGKILL
    before = only(tmp_path)
    fitted(tmp_path, ckpt_path="auto")
    after = only(tmp_path)
    assert (before.state, after.state, after.path) == ("killed", "finished", before.path)
    assert before.started is not None and after.started is not None and before.started < after.started


def test_a_run_of_another_host_is_unknown_until_it_has_ended(tmp_path: Path) -> None:
    run_in_fork(lambda: fitted(tmp_path / "killed", kill))
    fitted(tmp_path / "finished")
    states = []
    for name in ("killed", "finished"):
        file = tmp_path / name / "version_0" / FILE
        status = json.loads(file.read_text())
        status["owner"]["place"] = "elsewhere"
        file.write_text(json.dumps(status))
        states.append(only(tmp_path / name).state)
    assert states == ["unknown", "finished"]


def test_a_run_without_a_status_is_unknown(tmp_path: Path) -> None:
    """As that of an earlier version, or of a logger outside a Trainer."""
    fitted(tmp_path)
    (tmp_path / "version_0" / FILE).unlink()
    run = only(tmp_path)
    assert (run.state, run.step, run.best) == ("unknown", 4, 1.0) and run.started is not None
    logger = CSVLogger(tmp_path / "own")
    logger.log_metrics({"loss": 1.0})
    logger.save()
    assert (only(tmp_path / "own").state, only(tmp_path / "own").step) == ("unknown", None)


def test_a_second_run_that_is_refused_leaves_the_status_of_the_first(tmp_path: Path) -> None:
    def second() -> None:
        with pytest.raises(LeydenError, match="under way"):
            fitted(tmp_path, ckpt_path="auto")
        states.append(only(tmp_path).state)

    states: list[str] = []
    fitted(tmp_path, second, ckpt_path="auto")
    assert [*states, only(tmp_path).state] == ["running", "finished"]


def test_a_run_does_not_end_the_status_of_one_that_took_its_folder(tmp_path: Path) -> None:
    fitted(tmp_path, lambda: RunStatus.begin(tmp_path / "version_0", []))
    assert only(tmp_path).state == "running"


def test_evaluations_and_runs_without_a_folder_write_no_status(tmp_path: Path) -> None:
    trainer = Trainer(**QUIET, default_root_dir=tmp_path, max_epochs=1)
    trainer.fit(Net(), DATA)
    fitted(tmp_path, fast_dev_run=True)
    assert runs_below(tmp_path) == ([], [])


# checkpoints ----------------------------------------------------------------------------------------------------------
def test_runs_that_save_to_one_folder_have_their_own_checkpoints(tmp_path: Path) -> None:
    for name, steps in (("one", 2), ("two", 3)):
        checkpoint = ModelCheckpoint(tmp_path / "shared", filename="of/{step}", monitor="loss", every_n_train_steps=1)
        fitted(tmp_path / name, lambda: None, checkpoint, CSVLogger(tmp_path / name), max_steps=steps)
    one, two = only(tmp_path / "one"), only(tmp_path / "two")
    assert (one.best, one.checkpoint) == (3.0, tmp_path / "shared" / "of" / "step=2")
    assert (two.best, two.checkpoint) == (2.0, tmp_path / "shared" / "of" / "step=3")


def test_the_best_value_is_of_the_newest_checkpoint_that_has_one(tmp_path: Path) -> None:
    weights = ModelCheckpoint(filename="weights", save_weights_only=True)
    fitted(tmp_path, lambda: None, ModelCheckpoint(monitor="loss", every_n_train_steps=2), weights)
    run = only(tmp_path)
    assert run.checkpoint is not None
    assert (run.checkpoint.name, run.best) == ("weights", 1.0)


# damage ---------------------------------------------------------------------------------------------------------------
def test_damaged_folders_are_listed_as_far_as_they_can_be_read(tmp_path: Path) -> None:
    fitted(tmp_path / "whole")
    chance = random.Random(3)
    files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*.json")]
    assert len(files) > 8
    for number, name in enumerate(files):
        shutil.copytree(tmp_path / "whole", tmp_path / f"damaged{number}")
        data = bytearray((tmp_path / "whole" / name).read_bytes())
        del data[chance.randrange(len(data)) :]
        (tmp_path / f"damaged{number}" / name).write_bytes(data)
    found, errors = runs_below(tmp_path)
    assert len(found) == len(files) + 1 and not errors
    whole = only(tmp_path / "whole")
    assert {run.state for run in found} == {"finished", "unknown"}
    assert all(run.best in (whole.best, None) and run.step in (whole.step, None) for run in found)


@pytest.mark.parametrize("content", ["[]", "3", '{"run": 3}', '{"run": ["a"]}', "[" * 100_000, '{"started": "now"}'])
def test_foreign_files_of_the_same_names_are_no_runs(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    assert runs_below(tmp_path) == ([], [])
    (tmp_path / FILE).write_text(content)
    assert only(tmp_path).state == "unknown"


def test_special_files_and_links_are_not_opened(tmp_path: Path) -> None:
    fitted(tmp_path / "run")
    os.mkfifo(tmp_path / "run.json")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path / "run")
    assert only(tmp_path).path == tmp_path / "run" / "version_0"
    (tmp_path / "run" / "version_0" / FILE).unlink()
    os.mkfifo(tmp_path / "run" / "version_0" / FILE)
    assert only(tmp_path).state == "unknown"


@pytest.mark.parametrize("places", [[["\0", 0]], [["checkpoints", "x"]], 3, [[]], [["../..", 1]], [["/proc", 2]]])
def test_a_forged_status_names_no_folder_that_matters(places: Any, tmp_path: Path) -> None:
    fitted(tmp_path)
    file = tmp_path / "version_0" / FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "places": places}))
    assert only(tmp_path).state in ("finished", "unknown")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, invoke: Any) -> None:
    fitted(tmp_path / "run")
    (tmp_path / "closed").mkdir(mode=0)
    done = invoke("runs")
    assert done.returncode == 0 and "run/version_0" in done.stdout and "closed (Permission denied)" in done.stderr


# the command ----------------------------------------------------------------------------------------------------------
def test_the_table_is_sorted_and_limited(tmp_path: Path, invoke: Any) -> None:
    fitted(tmp_path / "old", max_steps=2)
    fitted(tmp_path / "new", lambda: None, ModelCheckpoint())
    head, first, second = invoke("runs").stdout.splitlines()
    assert head.split() == ["run", "state", "step", "best", "started", "size", "last", "checkpoint"]
    assert first.split()[:3] == ["new/version_0", "finished", "4"]
    assert second.split()[:4] == ["old/version_0", "finished", "2", "loss=3"]
    assert "ago" in first and "KiB" in first and first.endswith("epoch=0-step=4")

    def names(*arguments: str) -> list[str]:
        return [line.split("/")[0] for line in invoke("runs", *arguments).stdout.splitlines()[1:]]

    assert names("--sort", "best") == ["old", "new"]
    assert names("--limit=1") == ["new"]
    assert names("--sort", "size", "--limit=1") == ["old"]
    assert names("--sort", "step") == names("--sort", "run") == ["new", "old"]


def test_json_has_raw_values(tmp_path: Path, invoke: Any) -> None:
    trainer = fitted(tmp_path)
    [run] = json.loads(invoke("runs", tmp_path, "--json").stdout)
    assert (run["path"], run["checkpoint"]) == (trainer.run_folder, str(trainer.last_checkpoint))
    assert (run["state"], run["step"], run["metric"], run["best"]) == ("finished", 4, "loss", 1.0)
    assert isinstance(run["started"], float) and isinstance(run["size"], int)
    assert json.loads(invoke("runs", "--json", tmp_path / "version_0" / "checkpoints").stdout) == []


def test_control_characters_in_names_are_escaped(tmp_path: Path, invoke: Any) -> None:
    fitted(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "bad\x1b[2K\nname")
    shutil.copytree(os.fsencode(tmp_path / "plain"), os.fsencode(tmp_path) + b"/\xff")
    done = invoke("runs", "--sort", "run")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 4
    assert lines[1].startswith("bad\\x1b[2K\\nname/version_0 ") and lines[3].startswith("\\udcff/version_0 ")
    assert len(json.loads(invoke("runs", "--json").stdout)) == 3


def test_what_is_no_folder_is_refused_and_an_empty_one_is_not(tmp_path: Path, invoke: Any) -> None:
    done = invoke("runs", "missing")
    assert (done.returncode, done.stderr) == (2, "leyden: missing is not a folder: give one that holds runs.\n")
    assert invoke("runs").stdout == ". holds no runs\n"


def test_it_loads_no_torch(tmp_path: Path, leyden: Any) -> None:
    fitted(tmp_path)
    done = leyden("runs", PYTHONPROFILEIMPORTTIME="1")
    assert "finished" in done.stdout and "leyden.report.runs" in done.stderr
    assert "| torch\n" not in done.stderr and " torch\n" not in done.stderr


# ranks ----------------------------------------------------------------------------------------------------------------
def fit_of_rank(root: str, fails: bool) -> None:
    class Ranked(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if fails and self.trainer.global_rank == 1 and batch_idx == 2:
                raise ValueError("the data is bad")
            return super().training_step(batch, batch_idx)

    arguments = {**QUIET, "enable_checkpointing": True, "default_root_dir": root, "max_epochs": 1}
    Trainer(**arguments, strategy="ddp", devices=2).fit(Ranked(), DataLoader(torch.ones(8, 2), 1))


def test_rank_0_writes_the_status_for_all(tmp_path: Path) -> None:
    run_world(2, fit_of_rank, str(tmp_path), False)
    run = only(tmp_path)
    assert (run.state, run.step) == ("finished", 4)


def test_a_run_whose_other_rank_fails_has_failed(tmp_path: Path) -> None:
    run_world(2, fit_of_rank, str(tmp_path), True, may_fail=True)
    assert only(tmp_path).state == "failed"
