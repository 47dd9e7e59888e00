"""WandbLogger in offline mode: the run's file, read back."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from logged import BestAtTwo, set_up
from models import QUIET, Line
from PIL import Image
from ranks.world import run_world
from wandb_files import config, files, history, records

from leyden import Trainer
from leyden.callbacks import ModelCheckpoint
from leyden.callbacks.loggers.wandb_logger import WandbLogger
from leyden.core.errors import ConfigurationError

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def finish_open_runs() -> Iterator[None]:
    yield
    wandb.finish()


def test_an_offline_run_without_an_account_records_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    logger = WandbLogger("mine", project="digits", offline=True, prefix="p")
    set_up(tmp_path, logger)
    assert (logger.version, logger.state_dict(), list(tmp_path.iterdir())) == (None, {}, [])
    drawn = (random.getstate(), torch.get_rng_state().tolist())
    logger.log_hyperparams({"optim": {"lr": 0.1}, "layers": [1, 2]})
    logger.log_run({"started": "2026-02-01T12:30:00.250Z", "world_size": 2, "git": {"commit": None}}, "+x = 1\r\n")
    logger.log_metrics({"loss": 0.5, "bad": float("nan"), "huge": -float("inf")}, 10)
    logger.log_metrics({"loss": torch.tensor(0.25)}, 20)
    logger.save()
    logger.finalize("success")
    logger.log_metrics({"test": 1}, 20)
    assert logger.name == "digits"
    folder = logger.log_dir
    logger.finish()
    assert drawn == (random.getstate(), torch.get_rng_state().tolist())
    (path,) = files(tmp_path)
    assert str(path.parent) == folder
    rows = history(path)
    assert rows[0].pop("p-bad") != 0
    assert rows == [
        {"p-loss": 0.5, "p-huge": -float("inf"), "trainer/global_step": 10},
        {"p-loss": 0.25, "trainer/global_step": 20},
        {"p-test": 1, "trainer/global_step": 20},
    ]
    assert {name: value for name, value in config(path).items() if not name.startswith("_")} == {
        "optim/lr": 0.1,
        "layers": "[1, 2]",
        "leyden": {"started": "2026-02-01T12:30:00.250Z", "world_size": 2, "git": {"commit": None}},
    }
    start = path.parent / "files/starts/2026-02-01T12-30-00.250Z"
    assert json.loads((start / "run.json").read_text())["world_size"] == 2
    assert (start / "diff.patch").read_bytes() == b"+x = 1\r\n"


def test_a_disabled_run_writes_nothing(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path, mode="disabled")
    logger.log_run({"started": "2026-02-01T12:30:00.250Z"}, "diff")
    assert not os.path.exists(os.path.join(logger.experiment.dir, "starts"))
    assert list(tmp_path.iterdir()) == []


def test_a_resume_logs_to_the_same_run_id(tmp_path: Path) -> None:
    first = WandbLogger(save_dir=tmp_path, mode="offline")
    first.log_metrics({"loss": 1.0}, 5)
    state = first.state_dict()
    first.finalize("failed")
    second = WandbLogger(save_dir=tmp_path, mode="offline")
    second.load_state_dict(json.loads(json.dumps(state)))
    assert second.version == state["id"]
    second.log_metrics({"loss": 0.5})
    second.finish()
    assert [path.name for path in files(tmp_path)] == [f"run-{state['id']}.wandb"] * 2
    assert history(files(tmp_path)[1]) == [{"loss": 0.5, "trainer/global_step": 6}]


def test_an_explicit_id_takes_precedence(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path, id="mine", offline=True)
    logger.load_state_dict({"id": "other", "last_step": 5})
    assert logger.version == "mine"
    logger.log_metrics({"x": 1})
    assert logger.experiment.id == "mine"


def test_a_failed_run_is_marked_as_failed(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    logger.log_metrics({"x": 1}, 1)
    logger.finalize("failed")
    exits = [
        record.exit.exit_code for record in records(files(tmp_path)[0]) if record.WhichOneof("record_type") == "exit"
    ]
    assert exits == [1]


def test_an_existing_run_is_used_and_left_open(tmp_path: Path) -> None:
    run = wandb.init(dir=tmp_path, mode="offline", id="users")
    logger = WandbLogger(experiment=run)
    logger.log_metrics({"x": 1}, 1)
    logger.finalize("failed")
    assert logger.experiment is run
    with pytest.warns(UserWarning, match="continues the open run users"):
        assert WandbLogger(save_dir=tmp_path, offline=True).experiment.id == "users"
    run.finish()
    assert history(files(tmp_path)[0]) == [{"x": 1, "trainer/global_step": 1}]


def test_images_tables_and_watched_gradients_are_recorded(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    net = torch.nn.Linear(2, 2)
    logger.watch(net, log_freq=1, log_graph=False)
    net(torch.ones(1, 2)).sum().backward()
    logger.log_metrics({"loss": 1.0}, 3)
    logger.log_image("image", [torch.rand(3, 4, 4)], caption=["one"])
    logger.log_table("table", ["a"], [[1], [2]], step=4)
    logger.unwatch(net)
    Image.new("L", (4, 4)).save(tmp_path / "a.gif", save_all=True, append_images=[Image.new("L", (4, 4), 9)])
    logger.log_video("video", [str(tmp_path / "a.gif")], 6, caption=["two frames"])
    logger.log_text("text", ["in", "out"], [["a", "b"]], step=7)
    logger.log_text("note", "a text alone", step=8)
    logger.finish()
    rows = history(files(tmp_path)[0])
    assert any(name.startswith("gradients/weight") for name in rows[0])
    assert (rows[1]["image/_type"], rows[1]["trainer/global_step"]) == ("images/separated", 3)
    assert (rows[2]["table/nrows"], rows[2]["trainer/global_step"]) == (2, 4)
    assert (rows[3]["video/_type"], rows[3]["video/captions"]) == ("videos", ["two frames"])
    assert (rows[4]["text/ncols"], rows[5]["note/ncols"], rows[5]["trainer/global_step"]) == (2, 1, 8)
    (note,) = tmp_path.glob("wandb/offline-run-*/files/media/table/note_*.json")
    assert json.loads(note.read_text()) == {"columns": ["text"], "data": [["a text alone"]]}
    with pytest.raises(ConfigurationError, match="got 1 images but 2 values for caption"):
        logger.log_image("image", [torch.rand(3, 4, 4)], caption=["one", "two"])
    with pytest.raises(ConfigurationError, match=r"log_image takes a list.*log_image\(key, \[image\]\)"):
        logger.log_image("image", torch.rand(3, 4, 4))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="caption='x'. Pass a list with one caption per audio, 1 in total"):
        logger.log_audio("sound", ["a.wav"], caption="x")


def test_audio_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("soundfile", reason="wandb.Audio needs it")
    with wave.open(str(tmp_path / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(200))
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    logger.log_audio("sound", [str(tmp_path / "a.wav")], 5, caption=["silence"])
    logger.finish()
    (row,) = history(files(tmp_path)[0])
    assert (row["sound/captions"], row["trainer/global_step"]) == (["silence"], 5)


def test_non_writing_ranks_start_no_run(tmp_path: Path) -> None:
    logger = WandbLogger(offline=True)
    set_up(tmp_path, logger, zero=False)
    logger.log_hyperparams({"a": 1})
    logger.log_metrics({"x": 1.0}, 1)
    logger.log_table("table", ["a"], [[1]])
    logger.watch(torch.nn.Linear(1, 1))
    logger.finalize("failed")
    assert wandb.run is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_model": "best"}, r"WandbLogger\(log_model='best'\): use True .*, 'all' .* or False"),
        ({"checkpoint_name": "a/b"}, "use at most 128 letters"),
        ({"add_file_policy": "copy"}, "use 'mutable' or 'immutable'"),
        ({"offline": True, "mode": "online"}, "contradict each other"),
        ({"id": "a", "version": "b"}, "both name the run"),
    ],
)
def test_invalid_and_contradictory_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        WandbLogger(**arguments)


# checkpoints ----------------------------------------------------------------------------------------------------------
def fit_and_save(logger: WandbLogger, folder: Path, steps: int = 4, **arguments: Any) -> Trainer:
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, monitor="distance", **arguments)
    settings = {**QUIET, "enable_checkpointing": True, "logger": logger, "max_steps": steps}
    trainer = Trainer(**settings, callbacks=checkpoint)
    trainer.fit(BestAtTwo(), [torch.ones(2, 2)] * 4)
    return trainer


def artifacts(path: Path) -> list[Any]:
    found = [record for record in records(path) if record.WhichOneof("record_type") == "request"]
    return [record.request.log_artifact.artifact for record in found if record.request.HasField("log_artifact")] + [
        record.artifact for record in records(path) if record.WhichOneof("record_type") == "artifact"
    ]


def test_every_checkpoint_becomes_a_version_of_an_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    logger = WandbLogger(save_dir=tmp_path, offline=True, log_model="all", checkpoint_name="digits")
    trainer = fit_and_save(logger, tmp_path / "saved", save_last=True, asynchronous=True)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["last", "step=2", "step=4"]
    logger.finish()
    found = artifacts(files(tmp_path)[0])
    assert {(one.name, one.type) for one in found} == {("digits", "model")}
    described = [(json.loads(one.metadata), sorted(one.aliases)) for one in found]
    assert [(text["original_filename"], text["score"], aliases) for text, aliases in described] == [
        ("step=1", 1.0, ["best", "latest"]),
        ("step=2", 0.0, ["best", "latest"]),
        ("step=3", None, ["latest"]),
        ("step=4", None, ["latest"]),
    ]
    assert described[0][0]["ModelCheckpoint"]["monitor"] == "distance"
    for one in (found[0], found[2]):
        # The checkpoint's folder is already deleted; W&B's copies of its files form a complete checkpoint.
        name = json.loads(one.metadata)["original_filename"]
        for entry in one.manifest.contents:
            target = tmp_path / "downloaded" / name / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(entry.local_path, target)
        resumed = Trainer(**{**QUIET, "max_steps": 5})
        resumed.fit(BestAtTwo(), [torch.ones(2, 2)] * 4, ckpt_path=tmp_path / "downloaded" / name)
        assert resumed.global_step == 5
    assert trainer.global_step == 4


def test_kept_checkpoints_are_uploaded_at_the_end_of_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    logger = WandbLogger(save_dir=tmp_path, offline=True, log_model=True)
    trainer = fit_and_save(logger, tmp_path / "saved", save_top_k=2)
    trainer.predict(BestAtTwo(), [torch.ones(2, 2)])
    fit_and_save(logger, tmp_path / "all", steps=1, save_top_k=-1)
    run = logger.version
    with pytest.raises(TypeError, match="offline"):
        logger.use_artifact("model:best", "model")
    with pytest.raises(TypeError, match="offline"):
        WandbLogger.download_artifact("model:best", tmp_path, "model")
    logger.finish()
    found = artifacts(files(tmp_path)[0])
    assert [one.name for one in found] == [f"model-{run}"] * 3
    assert [(json.loads(one.metadata)["original_filename"], sorted(one.aliases)) for one in found] == [
        ("step=1", ["latest"]),
        ("step=2", ["best", "latest"]),
        ("step=1", ["best", "latest"]),
    ]


def test_a_failed_fit_uploads_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))

    class Fails(WandbLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            super().log_metrics(metrics, step)
            raise ValueError("the disk is full")

    logger = Fails(save_dir=tmp_path, offline=True, log_model=True)
    checkpoint = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1)
    settings = {**QUIET, "enable_checkpointing": True, "logger": logger, "log_every_n_steps": 3}
    with pytest.raises(ValueError, match="the disk is full"):
        Trainer(**settings, callbacks=checkpoint).fit(BestAtTwo(), [torch.ones(2, 2)] * 4)
    assert artifacts(files(tmp_path)[0]) == []


def test_wandb_is_not_imported_before_the_first_write() -> None:
    code = (
        "import sys; from leyden.callbacks.loggers.wandb_logger import WandbLogger as L; l = L(offline=True);"
        "l.state_dict(); l.save(); l.finalize('success'); assert 'wandb' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# several ranks --------------------------------------------------------------------------------------------------------
def fit_on_a_rank(folder: str) -> tuple[str | None, list[str | None]]:
    from leyden import Callback, Trainer

    class LogDirRecorder(Callback):
        def __init__(self) -> None:
            self.found: list[str | None] = []

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.found.append(trainer.log_dir)

    # The service of the test process is inherited, and may have ended.
    os.environ.pop("WANDB_SERVICE", None)
    recorder = LogDirRecorder()
    logger = WandbLogger(save_dir=folder, offline=True)
    trainer = Trainer(**{**QUIET, "logger": logger}, strategy="ddp", max_epochs=1, callbacks=recorder)
    trainer.fit(Line(), [torch.ones(2, 2)] * 2)
    folder_after = trainer.log_dir
    wandb.finish()
    return folder_after, recorder.found


def test_all_ranks_have_the_log_dir_of_the_run(tmp_path: Path) -> None:
    first, second = run_world(2, fit_on_a_rank, str(tmp_path))
    assert first == second
    folder, [at_start] = first
    assert folder == at_start and Path(folder).is_relative_to(tmp_path) and Path(folder).is_dir()
