"""The folder of a run: where it is, which run "auto" continues, and that runs in one place never meet."""

from __future__ import annotations

import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import forge
from models import QUIET, SAVED, Line
from programs import run_in_fork
from ranks.world import run_world

from leyden import CheckpointError, Trainer
from leyden.callbacks import Callback, CSVLogger, Logger, ModelCheckpoint, TensorBoardLogger
from leyden.checkpoint.folder import all_checkpoints
from leyden.checkpoint.reader import CheckpointReader

DATA = [torch.ones(1, 2)] * 4


class Trial(Line):
    """A trial of a sweep."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", float(self.trainer.global_step), on_step=True)
        return super().training_step(batch, batch_idx)


class Service(Logger):
    """A logger to a service, without files, whose experiments have names with slashes."""

    def __init__(self, save_dir: str | None = None) -> None:
        self._dir = save_dir

    @property
    def name(self) -> str:
        return "team/digits"

    @property
    def save_dir(self) -> str | None:
        return self._dir

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...


class AtStep(Callback):
    """Calls a function before a step, counted from 0."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.step, self.action = step, action

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.action()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def trainer_in(root: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    options = {**QUIET, "enable_checkpointing": True, "default_root_dir": root, "max_epochs": 1, "log_every_n_steps": 1}
    return Trainer(**{**options, **arguments}, callbacks=list(callbacks))


def fitted(root: Path, *callbacks: Callback, rate: float = 0.1, **arguments: Any) -> Trainer:
    fit = {name: arguments.pop(name) for name in ("ckpt_path", "restore", "same_run") if name in arguments}
    trainer = trainer_in(root, *callbacks, **arguments)
    trainer.fit(Trial(rate), DATA, **fit)
    return trainer


# where it is ----------------------------------------------------------------------------------------------------------
LOGGERS: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: False, "version_0"),
    "the default": (lambda: True, "logs/version_0"),
    "a name": (lambda: CSVLogger(name="digits"), "digits/version_0"),
    "no name": (lambda: CSVLogger(name=""), "version_0"),
    "a save_dir": (lambda: CSVLogger("elsewhere"), "elsewhere/logs/version_0"),
    "a version": (lambda: CSVLogger(version="first try"), "logs/first try"),
    "two in one folder": (lambda: [CSVLogger(), TensorBoardLogger()], "logs/version_0"),
    "two of one class": (lambda: [CSVLogger(), CSVLogger(".")], "logs/version_0"),
    "a service": (Service, "team_digits/version_0"),
    "a service with a save_dir": (lambda: Service("elsewhere"), "elsewhere/team_digits/version_0"),
    "a service before files": (lambda: [Service(), CSVLogger()], "logs/version_0"),
}


@pytest.mark.parametrize("case", LOGGERS)
def test_checkpoints_logs_and_records_of_a_run_are_in_one_folder(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make, expected = LOGGERS[case]
    trainer = trainer_in(Path("."), logger=make(), digest_every_n_steps=1)
    loggers = trainer.loggers
    trainer.fit(Trial(), DATA)
    assert trainer.run_folder == expected
    assert f"run folder  {expected}\n" in capsys.readouterr().out
    assert [path.name for path in all_checkpoints(Path(expected, "checkpoints"))] == ["epoch=0-step=4"]
    assert {"run.json", "digests.jsonl"} <= {path.name for path in Path(expected).iterdir()}
    if isinstance(loggers[0] if loggers else None, CSVLogger):
        assert Path(loggers[0].log_dir) == Path(expected)
        assert Path(expected, "metrics.csv").exists()
    if case == "two of one class":
        assert Path(loggers[1].log_dir) == Path("logs/version_1")
    # Nothing but these folders was made.
    assert {path.name for path in Path().iterdir()} == {Path(expected).parts[0]}


def test_a_second_fit_goes_on_in_the_folder_and_a_second_trainer_takes_the_next(tmp_path: Path) -> None:
    trainer = fitted(tmp_path)
    trainer.fit(Trial(), DATA)
    assert trainer.run_folder == str(tmp_path / "version_0")
    assert sorted(path.name for path in all_checkpoints(tmp_path / SAVED)) == ["epoch=0-step=4", "epoch=0-step=4-v1"]
    assert fitted(tmp_path).run_folder == str(tmp_path / "version_1")


def test_runs_that_write_nothing_have_no_folder(tmp_path: Path) -> None:
    for arguments in ({"enable_checkpointing": False}, {"fast_dev_run": True}):
        assert fitted(tmp_path, **arguments).run_folder is None
    trainer = trainer_in(tmp_path)
    trainer.predict(Trial(), DATA)
    assert (trainer.run_folder, os.listdir(tmp_path)) == (None, [])


def test_an_explicit_dirpath_stays_what_it_is(tmp_path: Path) -> None:
    trainer = fitted(tmp_path, ModelCheckpoint(tmp_path / "mine"), logger=CSVLogger(tmp_path))
    assert trainer.last_checkpoint == tmp_path / "mine" / "epoch=0-step=4"
    assert not (tmp_path / "logs" / "version_0" / "checkpoints").exists()
    # Its checkpoints lead back to the folder of their run.
    again = fitted(
        tmp_path, ModelCheckpoint(tmp_path / "mine"), logger=CSVLogger(tmp_path), max_epochs=2, resume="auto"
    )
    assert (again.global_step, os.listdir(tmp_path / "logs")) == (8, ["version_0"])
    rows = (tmp_path / "logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", *map(str, range(1, 9))]


# which run is continued -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("logger", [False, True])
def test_auto_continues_a_killed_run_in_its_folder_and_not_a_newer_one_of_other_training(
    tmp_path: Path, logger: bool
) -> None:
    def options() -> dict[str, Any]:
        return {"resume": "auto", "logger": CSVLogger() if logger else False, "digest_every_n_steps": 1}

    root = tmp_path / "logs" if logger else tmp_path
    assert run_in_fork(lambda: fitted(tmp_path, AtStep(6, killed), max_epochs=2, **options())) == -signal.SIGKILL
    other = fitted(tmp_path, rate=0.2, **options())
    trainer = fitted(tmp_path, max_epochs=2, **options())
    assert (other.run_folder, trainer.run_folder) == (str(root / "version_1"), str(root / "version_0"))
    assert trainer.ckpt_path == str(root / SAVED / "epoch=0-step=4")
    assert (trainer.global_step, sorted(os.listdir(root))) == (8, ["version_0", "version_1"])
    steps = [json.loads(line)["step"] for line in (root / "version_0" / "digests.jsonl").read_text().splitlines()[1:]]
    assert sorted(set(steps)) == steps == list(range(9))


def test_last_takes_the_newest_run_whoever_saved_it(tmp_path: Path) -> None:
    fitted(tmp_path, rate=0.1)
    fitted(tmp_path, rate=0.2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fit continues .*, whose run differed")
        trainer = fitted(tmp_path, rate=0.1, max_epochs=2, ckpt_path="last")
    assert (trainer.run_folder, trainer.global_step) == (str(tmp_path / "version_1"), 8)


def test_a_path_leads_back_to_the_folder_of_its_run_and_weights_start_the_next(tmp_path: Path) -> None:
    path = fitted(tmp_path).last_checkpoint
    fitted(tmp_path)
    assert fitted(tmp_path, max_epochs=2, ckpt_path=path).run_folder == str(tmp_path / "version_0")
    assert fitted(tmp_path, ckpt_path=tmp_path / SAVED / "epoch=1-step=8", restore="weights").run_folder == str(
        tmp_path / "version_2"
    )
    # A copy elsewhere still names the folder of its run by the run's identifier, but does not reach it.
    shutil.copytree(tmp_path / SAVED / "epoch=1-step=8", tmp_path / "copies" / "one")
    assert fitted(tmp_path, max_epochs=3, ckpt_path=tmp_path / "copies" / "one").run_folder == str(
        tmp_path / "version_3"
    )


@pytest.mark.parametrize("place", ["../../..", "/", "version_0/checkpoints"])
def test_a_forged_record_never_leads_out_of_the_folder_of_runs(tmp_path: Path, place: str) -> None:
    root = tmp_path / "here" / "there"
    path = fitted(root).last_checkpoint
    assert path is not None
    record = CheckpointReader(path).json("run")
    (tmp_path / "run.json").write_text(json.dumps({"run": record["run"]}))
    forge(path, "run.json", json.dumps({**record, "folder": place}).encode())
    assert fitted(root, max_epochs=2, ckpt_path=path).run_folder == str(root / "version_1")


@pytest.mark.parametrize("record", [[], {"folder": 1, "run": "x"}, {"folder": ".."}, {"folder": "a\0b", "run": "x"}])
def test_the_error_for_a_damaged_record_names_its_file(tmp_path: Path, record: Any) -> None:
    path = fitted(tmp_path).last_checkpoint
    assert path is not None
    forge(path, "run.json", json.dumps(record).encode())
    with pytest.raises(CheckpointError, match=r"run\.json: does not name the folder of a run"):
        fitted(tmp_path, max_epochs=2, ckpt_path=path)


def test_a_version_with_only_damaged_checkpoints_stops_auto(tmp_path: Path) -> None:
    path = fitted(tmp_path).last_checkpoint
    assert path is not None
    (path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"all damaged.*epoch=0-step=4.manifest\.json"):
        fitted(tmp_path, resume="auto")
    # Another run of this training counts, with a warning.
    fitted(tmp_path)
    (tmp_path / "version_1").rename(tmp_path / "version_2")
    (tmp_path / "version_0").rename(tmp_path / "version_3")
    with pytest.warns(UserWarning, match="skipping a damaged checkpoint"):
        assert fitted(tmp_path, resume="auto", max_epochs=2).run_folder == str(tmp_path / "version_2")


def test_checkpoints_of_an_earlier_layout_go_on_if_they_are_named(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {"logger": CSVLogger(), "max_epochs": 2}

    path = fitted(tmp_path, ModelCheckpoint(tmp_path / "checkpoints"), logger=CSVLogger()).last_checkpoint
    assert path is not None
    forge(path, "run.json", None)
    with pytest.warns(UserWarning, match=r"by an earlier version of Leyden.*fit\(ckpt_path='.*epoch=0-step=4'\)"):
        assert fitted(tmp_path, resume="auto", logger=CSVLogger()).run_folder == str(tmp_path / "logs" / "version_1")
    with pytest.warns(UserWarning, match="new ones go to"):
        trainer = fitted(tmp_path, ckpt_path=path, **options())
    # The logs go on where they were, and new checkpoints join them.
    assert trainer.run_folder == str(tmp_path / "logs" / "version_0")
    assert trainer.last_checkpoint == tmp_path / "logs" / SAVED / "epoch=1-step=8"
    rows = (tmp_path / "logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", *map(str, range(1, 9))]


# several ModelCheckpoints ---------------------------------------------------------------------------------------------
class Worse(Trial):
    """Its metric is best in the first epoch."""

    def on_train_epoch_end(self) -> None:
        self.log("score", float(self.current_epoch))


@pytest.mark.parametrize("default", ["first", "second", "neither"])
@pytest.mark.parametrize("word", ["auto", "last"])
def test_a_killed_run_goes_on_from_the_newest_checkpoint_of_all_its_folders(
    tmp_path: Path, default: str, word: str
) -> None:
    def both() -> list[ModelCheckpoint]:
        best = None if default == "first" else tmp_path / "best"
        newest = None if default == "second" else tmp_path / "newest"
        return [ModelCheckpoint(best, monitor="score"), ModelCheckpoint(newest, every_n_train_steps=3)]

    def run(*callbacks: Callback) -> Trainer:
        trainer = trainer_in(tmp_path, *both(), *callbacks, max_epochs=5)
        trainer.fit(Worse(), DATA, ckpt_path=None if callbacks and word == "last" else word)
        return trainer

    assert run_in_fork(lambda: run(AtStep(17, killed))) == -signal.SIGKILL
    # Another run with the same second folder saves later; its checkpoints are not this run's.
    trainer = run()
    assert trainer.ckpt_path is not None and Path(trainer.ckpt_path).name == "epoch=3-step=15"
    assert trainer.global_step == 20
    assert {path.name for path in tmp_path.iterdir()} & {"version_1"} == set()


def test_trials_that_share_a_dirpath_beside_their_folders_never_meet(tmp_path: Path) -> None:
    def run(rate: float, epochs: int, *callbacks: Callback) -> Trainer:
        own = [ModelCheckpoint(every_n_train_steps=3), ModelCheckpoint(tmp_path / "best", filename="{epoch}-best")]
        return fitted(tmp_path, *own, *callbacks, rate=rate, max_epochs=epochs, resume="auto")

    assert run_in_fork(lambda: run(0.1, 2, AtStep(5, killed))) == -signal.SIGKILL
    assert run(0.2, 2).run_folder == str(tmp_path / "version_1")
    trainer = run(0.1, 2)
    # The newest of this run is in the shared folder, below newer ones of the other run.
    assert trainer.run_folder == str(tmp_path / "version_0")
    assert trainer.ckpt_path == str(tmp_path / "best" / "epoch=0-best")
    assert trainer.global_step == 8


# processes and ranks --------------------------------------------------------------------------------------------------
class WaitsForOthers(Callback):
    """Begins to train when all processes have their folders: a run that starts later may continue a finished one."""

    def __init__(self, begun: int, release: int) -> None:
        self._begun, self._release = begun, release

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        os.write(self._begun, b"x")
        os.read(self._release, 1)


def test_processes_that_start_at_once_take_different_versions(tmp_path: Path) -> None:
    (counted, begun), (release, hold) = os.pipe(), os.pipe()

    def wait_and_fit(rate: float) -> None:
        os.close(hold)
        fitted(tmp_path, WaitsForOthers(begun, release), rate=rate, resume="auto")

    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            try:
                wait_and_fit(0.1 * (number % 2 + 1))
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    os.close(begun)
    arrived = b""
    while len(arrived) < 4 and (more := os.read(counted, 4)):
        arrived += more
    for end in (counted, release, hold):
        os.close(end)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert sorted(os.listdir(tmp_path)) == [f"version_{number}" for number in range(4)]
    assert all(len(all_checkpoints(tmp_path / f"version_{number}" / "checkpoints")) == 1 for number in range(4))


def on_ranks(root: Path) -> list[Any]:
    first = fitted(root, strategy="ddp", resume="auto", logger=CSVLogger())
    second = fitted(root, strategy="ddp", resume="auto", logger=CSVLogger(), max_epochs=2)
    third = fitted(root, strategy="ddp", resume="auto", logger=CSVLogger(), rate=0.2)
    return [(one.run_folder, one.log_dir, one.checkpoint_callback.dirpath) for one in (first, second, third)]


def test_all_ranks_use_the_folder_that_rank_0_chooses(tmp_path: Path) -> None:
    found, other = run_world(2, on_ranks, tmp_path)
    assert found == other
    folders = [str(tmp_path / "logs" / f"version_{number}") for number in (0, 0, 1)]
    assert found == [(folder, folder, f"{folder}/checkpoints") for folder in folders]
    assert sorted(os.listdir(tmp_path / "logs")) == ["version_0", "version_1"]
