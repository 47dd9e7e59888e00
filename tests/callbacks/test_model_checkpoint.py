"""ModelCheckpoint in short runs with scripted metrics: saving, ranking, retention and deletion."""

from __future__ import annotations

import math
import os
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from models import QUIET, SAVED, Line
from programs import run_program
from torch import Tensor, nn

from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing import checkpoint_commit
from leyden.callbacks.checkpointing.checkpoint_name import format_name
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.checkpoint.folder import delete
from leyden.checkpoint.format.errors import CheckpointError, UnsupportedStateError
from leyden.checkpoint.reader import CheckpointReader
from leyden.core.errors import ConfigurationError
from leyden.trainer.module import TrainModule
from leyden.trainer.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
NAN = math.nan
BATCHES = 4
DATA = [torch.ones(2, 2)] * BATCHES
VALUES = [0.5, 0.3, 0.9, 0.2, 0.4, 0.25]


class Scripted(Line):
    """Logs `val` from a list, one value per validation, and `train` at each step."""

    def __init__(self, values: Sequence[float] = VALUES, unsavable_at: int = -1) -> None:
        super().__init__()
        self.values = list(values)
        self.unsavable_at = unsavable_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("train", float(self.trainer.global_step), on_step=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.values[self.trainer.progress.validations % len(self.values)])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint["global_step"] == self.unsavable_at:
            checkpoint["mine"] = lambda: None


def make(root: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    options = {"default_root_dir": root, "max_epochs": len(VALUES), "enable_checkpointing": True}
    return Trainer(callbacks=list(callbacks), **{**QUIET, **options, **arguments})


def fit(
    root: Path,
    *callbacks: Callback,
    module: TrainModule | None = None,
    val: Any = DATA,
    ckpt_path: Any = None,
    **arguments: Any,
) -> Trainer:
    trainer = make(root, *callbacks, **arguments)
    trainer.fit(module or Scripted(), DATA, val, ckpt_path=ckpt_path)
    return trainer


def names(folder: Path) -> list[str]:
    """Returns the folder's entries, with symlinks as `name -> target`."""
    return sorted(f"{p.name} -> {p.readlink()}" if p.is_symlink() else p.name for p in folder.iterdir())


def steps(folder: Path) -> list[int]:
    """Verifies the checkpoints in the folder and returns their steps."""
    found = []
    for path in folder.iterdir():
        if not path.is_symlink():
            reader = CheckpointReader(path)
            reader.verify()
            found.append(reader.progress()["global_step"])
    return sorted(found)


def saved_state(path: str | Path, callback: ModelCheckpoint) -> dict[str, Any]:
    """Returns the callback's state in a checkpoint."""
    state: dict[str, Any] = CheckpointReader(path).state("callbacks")[callback.state_key]
    return state


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "ModelCheckpoint monitors 'val', which is nan")
        yield


# retention ------------------------------------------------------------------------------------------------------------
def test_only_the_newest_checkpoint_is_kept_by_default(tmp_path: Path) -> None:
    callback = ModelCheckpoint()
    trainer = fit(tmp_path, callback, max_epochs=3)
    assert names(tmp_path / SAVED) == ["epoch=2-step=12"]
    assert callback.best_model_path == callback.last_model_path == str(tmp_path / SAVED / "epoch=2-step=12")
    assert callback.best_model_score is None
    assert callback.best_k_models == {}
    assert trainer.last_checkpoint == Path(callback.best_model_path)


@pytest.mark.parametrize(
    ("arguments", "kept", "best"),
    [
        ({"save_top_k": 3}, [16, 20, 24], 24),
        ({"save_top_k": -1}, [4, 8, 12, 16, 20, 24], 24),
        ({"save_top_k": 0}, [], None),
        ({"monitor": "val"}, [16], 16),
        ({"monitor": "val", "mode": "max"}, [12], 12),
        ({"monitor": "val", "save_top_k": 3}, [8, 16, 24], 16),
        ({"monitor": "val", "save_top_k": 3, "mode": "max"}, [4, 12, 20], 12),
        ({"monitor": "val", "save_top_k": -1}, [4, 8, 12, 16, 20, 24], 16),
        ({"monitor": "val", "save_top_k": 0}, [], None),
        ({"monitor": "val", "save_last": True}, [16, 24], 16),
        ({"monitor": "val", "save_top_k": 0, "save_last": True}, [24], None),
        ({"save_top_k": 2, "save_last": "link"}, [20, 24], 24),
    ],
)
def test_retention_follows_monitor_save_top_k_and_save_last(
    tmp_path: Path, arguments: dict[str, Any], kept: list[int], best: int | None
) -> None:
    callback = ModelCheckpoint(**arguments)
    fit(tmp_path, callback)
    assert steps(tmp_path / SAVED) == kept
    assert callback.best_model_path.endswith("" if best is None else f"-step={best}")
    assert bool(callback.best_model_path) == (best is not None)
    if arguments.get("monitor") and best is not None:
        assert callback.best_model_score is not None
        assert float(callback.best_model_score) == pytest.approx(VALUES[best // BATCHES - 1])
        k = arguments.get("save_top_k", 1)
        assert len(callback.best_k_models) == (len(VALUES) if k == -1 else k)


def test_the_kth_best_is_the_worst_kept_checkpoint(tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val", save_top_k=2)
    assert callback.kth_best_model_path == ""
    fit(tmp_path, callback, max_epochs=5)
    assert callback.kth_best_model_path.endswith("step=8")
    assert float(callback.kth_value) == pytest.approx(0.3)
    assert {path[-6:]: float(score) for path, score in callback.best_k_models.items()} == pytest.approx(
        {"step=8": 0.3, "tep=16": 0.2}
    )
    assert callback.current_score is not None
    assert float(callback.current_score) == pytest.approx(0.4)


def test_to_yaml_writes_the_ranking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = ModelCheckpoint(monitor="val", save_top_k=2)
    with pytest.raises(ConfigurationError, match="no default folder before a fit: pass a filepath"):
        callback.to_yaml()
    fit(tmp_path, callback)
    monkeypatch.chdir(tmp_path)
    callback.to_yaml()
    callback.to_yaml("mine.yaml")
    expected = {path: float(score) for path, score in callback.best_k_models.items()}
    for path in (tmp_path / SAVED / "best_k_models.yaml", tmp_path / "mine.yaml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8")) == expected
    assert len(expected) == 2


def test_the_kth_best_is_the_worst_of_all_if_all_are_kept(tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val", save_top_k=-1, filename="same")
    assert callback.kth_best_model_path == ""
    fit(tmp_path, callback, max_epochs=5)
    scores = {path: float(score) for path, score in callback.best_k_models.items()}
    assert len(scores) == 5 == len(steps(tmp_path / SAVED))
    assert callback.kth_best_model_path == max(scores, key=lambda path: scores[path])
    assert float(callback.kth_value) == max(scores.values())


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_ranks_worst(tmp_path: Path, mode: Any) -> None:
    callback = ModelCheckpoint(monitor="val", mode=mode)
    fit(tmp_path, callback, module=Scripted([NAN, 0.5, NAN]), max_epochs=3)
    assert steps(tmp_path / SAVED) == [8]
    assert callback.best_model_score is not None
    assert float(callback.best_model_score) == 0.5
    assert callback.current_score is not None
    assert float(callback.current_score) == (math.inf if mode == "min" else -math.inf)


def test_monitoring_nan_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="monitors 'val', which is nan and ranks worst"):
        fit(tmp_path, ModelCheckpoint(monitor="val"), module=Scripted([NAN, NAN]), max_epochs=2)


def test_unknown_arguments_raise_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match="ModelCheckpoint has no argument 'save_topk'. Did you mean 'save_top_k'"):
        ModelCheckpoint(save_topk=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="ModelCheckpoint has no argument 'period': use every_n_epochs"):
        ModelCheckpoint(period=3)  # type: ignore[call-arg]


def test_ties_keep_the_earlier_checkpoints(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(monitor="val", save_top_k=2), module=Scripted([0.5, 0.5, 0.5]), max_epochs=3)
    assert steps(tmp_path / SAVED) == [4, 8]


def test_save_weights_only_omits_optimizer_and_callback_states(tmp_path: Path) -> None:
    callback = ModelCheckpoint(save_weights_only=True)
    fit(tmp_path, callback, max_epochs=1)
    files = os.listdir(callback.best_model_path)
    assert "model.safetensors" in files
    assert not any("optimizer" in name or "rank" in name or "callbacks" in name for name in files)


# save_last ------------------------------------------------------------------------------------------------------------
def test_save_last_links_to_the_newest_checkpoint(tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val", save_last=True)
    seen: list[list[str]] = []

    class Recorder(Callback):
        order = 300

        def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
            seen.append(names(tmp_path / SAVED))

    fit(tmp_path, callback, Recorder(), max_epochs=3)
    assert seen == [
        ["epoch=0-step=4", "last -> epoch=0-step=4"],
        ["epoch=1-step=8", "last -> epoch=1-step=8"],
        ["epoch=1-step=8", "epoch=2-step=12", "last -> epoch=2-step=12"],
    ]
    assert callback.last_model_path.endswith("epoch=2-step=12")
    assert CheckpointReader(tmp_path / SAVED / "last").progress()["global_step"] == 12


def test_save_last_saves_when_a_run_ends_between_triggers(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(every_n_train_steps=5, save_last=True), max_epochs=2)
    assert names(tmp_path / SAVED) == [
        "epoch=1-step=5",
        "epoch=1-step=8",
        "last -> epoch=1-step=8",
    ]
    fit(tmp_path / "other", ModelCheckpoint(every_n_train_steps=5), max_epochs=2)
    assert names(tmp_path / "other" / SAVED) == ["epoch=1-step=5"]


def test_save_last_keeps_the_newest_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("this file system has no links")

    monkeypatch.setattr(os, "symlink", refuse)
    callback = ModelCheckpoint(monitor="val", save_last=True)
    fit(tmp_path, callback, max_epochs=3)
    assert names(tmp_path / SAVED) == ["epoch=1-step=8", "epoch=2-step=12"]
    assert callback.last_model_path.endswith("epoch=2-step=12")


def test_save_last_leaves_a_users_folder_named_last_alone(tmp_path: Path) -> None:
    mine = tmp_path / SAVED / "last"
    mine.mkdir(parents=True)
    (mine / "note").write_text("mine")
    fit(tmp_path, ModelCheckpoint(save_last=True), max_epochs=2)
    assert (mine / "note").read_text() == "mine"


def test_subclasses_can_rename_the_last_link(tmp_path: Path) -> None:
    class Named(ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "newest of the run"

    fit(tmp_path, Named(save_last=True), max_epochs=1)
    assert names(tmp_path / SAVED) == ["epoch=0-step=4", "newest of the run -> epoch=0-step=4"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_last_link_with_values_in_its_name_replaces_the_previous_one(tmp_path: Path, asynchronous: bool) -> None:
    class Named(ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "{epoch}-last"

    fit(tmp_path, Named(save_last=True, asynchronous=asynchronous), max_epochs=3)
    assert names(tmp_path / SAVED) == ["epoch=2-last -> epoch=2-step=12", "epoch=2-step=12"]


def test_subclasses_can_change_separators_extension_and_first_version(tmp_path: Path) -> None:
    class Named(ModelCheckpoint):
        CHECKPOINT_JOIN_CHAR, CHECKPOINT_EQUALS_CHAR, FILE_EXTENSION, STARTING_VERSION = "_", "", ".ckpt", 2

    callback = Named(tmp_path / "found", save_last=True)
    fit(tmp_path, callback, max_epochs=1)
    fit(tmp_path, Named(tmp_path / "found", filename="{epoch}_{step}"), max_epochs=1)
    kept = ["epoch0_step4.ckpt", "epoch0_step4_v2.ckpt", "last.ckpt -> epoch0_step4.ckpt"]
    assert names(tmp_path / "found") == kept
    fit(tmp_path, ModelCheckpoint(tmp_path / "more"), max_epochs=2, ckpt_path=tmp_path / "found" / "last.ckpt")
    assert names(tmp_path / "more") == ["epoch=1-step=8"]


@pytest.mark.parametrize(
    ("name", "value"), [("FILE_EXTENSION", None), ("FILE_EXTENSION", "/x"), ("CHECKPOINT_JOIN_CHAR", 1)]
)
def test_invalid_name_constants_raise(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}={value!r}: use a string without slashes"):
        type("Named", (ModelCheckpoint,), {name: value})()


# file names -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("template", "insert", "name"),
    [
        ("{epoch}-{step}", True, "epoch=3-step=120"),
        ("{epoch}-{step}", False, "3-120"),
        ("{epoch:03d}-{val_loss:.2f}", True, "epoch=003-val_loss=0.12"),
        ("run-{epoch:02d}_{val_loss:.3e}", False, "run-03_1.235e-01"),
        ("{val/acc:.1%}", True, "val_acc=98.4%"),
        ("{val/acc:.1f}", False, "1.0"),
        ("best", True, "best"),
        ("{bad}", True, "bad=nan"),
        ("{step}{step}", False, "120120"),
    ],
)
def test_filename_templates_are_formatted(template: str, insert: bool, name: str) -> None:
    values = {"epoch": 3, "step": 120, "val_loss": 0.12345, "val/acc": 0.984, "bad": NAN}
    assert format_name(template, values, "=" if insert else None) == name
    callback = ModelCheckpoint(filename=template, auto_insert_metric_name=insert)
    assert callback.format_checkpoint_name(values) == name
    tensors: dict[str, Any] = {**values, "val_loss": torch.tensor(0.12345, dtype=torch.float64)}
    assert callback.format_checkpoint_name(tensors, ver=2, prefix="a") == f"a-{name}-v2"


def test_an_unlogged_metric_becomes_none_in_the_filename_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="names 'vall', which was not logged. Did you mean 'val'"):
        assert format_name("{epoch}-{vall:.2f}", {"epoch": 0, "val": 1.0}) == "epoch=0-vall=none"


def test_filenames_contain_logged_metrics(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "here", "{epoch:02d}-{val:.2f}-{train:.0f}", monitor="val")
    fit(tmp_path, callback, max_epochs=2)
    assert names(tmp_path / "here") == ["epoch=01-val=0.30-train=7"]
    assert not (tmp_path / SAVED).exists()


def test_a_taken_filename_gets_a_version_suffix(tmp_path: Path) -> None:
    for _ in range(3):
        fit(tmp_path, ModelCheckpoint(tmp_path / "shared"), max_epochs=1)
    assert names(tmp_path / "shared") == ["epoch=0-step=4", "epoch=0-step=4-v1", "epoch=0-step=4-v2"]


def test_a_taken_filename_is_overwritten_without_the_version_counter(tmp_path: Path) -> None:
    for lr in (1, 2):
        module = Scripted()
        nn.init.constant_(module.layer.weight, lr)
        callback = ModelCheckpoint(tmp_path / "shared", filename="model", enable_version_counter=False)
        fit(tmp_path, callback, max_epochs=lr, module=module)
    assert names(tmp_path / "shared") == ["model"]
    assert steps(tmp_path / "shared") == [8]


def test_a_better_checkpoint_takes_over_a_fixed_filename(tmp_path: Path) -> None:
    callback = ModelCheckpoint(filename="best", monitor="val")
    fit(tmp_path, callback)
    assert names(tmp_path / SAVED) == ["best"]
    assert steps(tmp_path / SAVED) == [16]
    last = ModelCheckpoint(filename="best", monitor="val", save_last=True, enable_version_counter=False)
    fit(tmp_path / "last", last)
    assert names(tmp_path / "last" / SAVED) == ["best", "best-v1", "last -> best-v1"]
    assert CheckpointReader(last.best_model_path).progress()["global_step"] == 16
    assert CheckpointReader(last.last_model_path).progress()["global_step"] == 24


def test_a_folder_that_is_not_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "shared" / "model"
    mine.mkdir(parents=True)
    (mine / "note").write_text("mine")
    with pytest.raises(CheckpointError, match="is not a checkpoint and is not overwritten"):
        fit(tmp_path, ModelCheckpoint(mine.parent, filename="model", enable_version_counter=False), max_epochs=1)
    assert (mine / "note").read_text() == "mine"


# triggers -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ({"every_n_train_steps": 3}, {}, [3, 6]),
        ({"every_n_train_steps": 3}, {"accumulate_grad_batches": 2, "max_epochs": 4}, [3, 6]),
        ({"every_n_epochs": 2}, {"max_epochs": 5}, [8, 16]),
        ({"every_n_epochs": 0}, {}, []),
        ({"train_time_interval": timedelta(0)}, {"max_epochs": 1}, [1, 2, 3, 4]),
        ({"train_time_interval": "01:00:00:00"}, {}, []),
        ({"train_time_interval": {"days": 1}, "save_last": True}, {}, [8]),
        ({}, {"val_check_interval": 0.5}, [2, 4, 6, 8]),
        ({}, {"val_check_interval": 1, "max_epochs": 1}, [1, 2, 3, 4]),
        ({}, {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 3}, [3, 6, 9, 12]),
        ({"save_on_train_epoch_end": True}, {"val_check_interval": 0.5}, [4, 8]),
        ({}, {"check_val_every_n_epoch": 2, "max_epochs": 4}, [8, 16]),
        ({"save_on_train_epoch_end": True}, {"check_val_every_n_epoch": 2, "max_epochs": 3}, [4, 8, 12]),
        ({"save_on_train_epoch_end": False}, {}, [4, 8]),
        ({}, {"limit_val_batches": 0}, [4, 8]),
        ({}, {"max_steps": 6}, [4, 6]),
        ({"every_n_train_steps": 4, "save_last": True}, {}, [4, 8]),
    ],
)
def test_triggers_save_at_their_steps(
    tmp_path: Path, arguments: dict[str, Any], options: dict[str, Any], expected: list[int]
) -> None:
    fit(tmp_path, ModelCheckpoint(save_top_k=-1, **arguments), **{"max_epochs": 2, **options})
    assert steps(tmp_path / SAVED) == expected


class StepsEveryNth(Scripted):
    """Takes an optimizer step after every n-th batch."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every = every

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        assert self.trainer is not None
        self.log("train", float(self.trainer.progress.batches), on_step=True)
        if (batch_idx + 1) % self.every == 0:
            self.manual_backward(self.layer(batch).mean())
            self.optimizers().step()


def test_batches_without_an_optimizer_step_trigger_no_save(tmp_path: Path) -> None:
    # The metric grows with every batch, so a second check at the same step would find a better score than that saved.
    saves = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, monitor="train", mode="max")
    fit(tmp_path, saves, module=StepsEveryNth(2), val=None, max_epochs=1)
    assert names(tmp_path / SAVED) == ["epoch=0-step=1", "epoch=0-step=2"]


def test_epochs_without_an_optimizer_step_are_saved(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(save_top_k=-1), module=StepsEveryNth(99), val=None, max_epochs=3)
    assert names(tmp_path / SAVED) == [f"epoch={epoch}-step=0" for epoch in range(3)]


def test_checkpoints_are_saved_at_epoch_ends_without_validation(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(save_top_k=-1), val=None, max_epochs=2, check_val_every_n_epoch=2)
    assert steps(tmp_path / SAVED) == [4, 8]


def test_a_monitored_save_waits_for_the_validation_at_its_step(tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, callback, max_epochs=2, val_check_interval=0.5)
    scores = {path.rpartition("=")[2]: round(float(score), 3) for path, score in callback.best_k_models.items()}
    assert scores == {"2": 0.5, "4": 0.3, "6": 0.9, "8": 0.2}


@pytest.mark.parametrize("arguments", [{"fast_dev_run": True}, {"fast_dev_run": 3}])
def test_fast_dev_run_saves_nothing(tmp_path: Path, arguments: dict[str, Any]) -> None:
    fit(tmp_path, ModelCheckpoint(save_last=True, every_n_train_steps=1, save_on_train_epoch_end=False), **arguments)
    assert names(tmp_path) == []


def test_validate_saves_nothing(tmp_path: Path) -> None:
    callback = ModelCheckpoint(save_on_train_epoch_end=False)
    make(tmp_path, callback).validate(Scripted(), DATA, verbose=False)
    assert names(tmp_path) == []


def test_train_time_interval_spans_a_resume(tmp_path: Path) -> None:
    callback = ModelCheckpoint(train_time_interval=timedelta(hours=1))
    callback._saved_at = time.monotonic() - 1800
    again = ModelCheckpoint(train_time_interval=timedelta(hours=1))
    again.load_state_dict(callback.state_dict())
    assert again._saved_at is not None
    assert time.monotonic() - again._saved_at == pytest.approx(1800, abs=60)


# missing metrics ------------------------------------------------------------------------------------------------------
def test_monitoring_an_unlogged_metric_raises(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"ModelCheckpoint monitors 'vla', which was not logged\. Did you mean 'val'\?"
    ):
        fit(tmp_path, ModelCheckpoint(monitor="vla"))
    with pytest.raises(ConfigurationError, match="ModelCheckpoint monitors 'val', which was not logged"):
        fit(tmp_path, ModelCheckpoint(monitor="val"), val=None)


def test_a_save_before_the_first_validation_is_not_ranked(tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val", every_n_train_steps=3, save_top_k=-1)
    with pytest.warns(UserWarning, match="This checkpoint is not ranked"):
        fit(tmp_path, callback, max_epochs=2, num_sanity_val_steps=0)
    assert steps(tmp_path / SAVED) == [6]


# errors while saving --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("counter", [True, False])
def test_a_failed_save_changes_nothing(tmp_path: Path, counter: bool) -> None:
    filename = None if counter else "model"
    callback = ModelCheckpoint(filename=filename, save_last=True, enable_version_counter=counter)
    before: dict[str, Any] = {}

    class Recorder(Callback):
        order = 199

        def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
            if trainer.global_step == 12:
                before.update(callback.state_dict())

    with pytest.raises(UnsupportedStateError, match="mine"):
        fit(tmp_path, callback, Recorder(), module=Scripted(unsavable_at=12))
    name = "epoch=1-step=8" if counter else "model"
    assert names(tmp_path / SAVED) == sorted([name, f"last -> {name}"])
    assert steps(tmp_path / SAVED) == [8]
    after = callback.state_dict()
    del before["seconds_since_save"], after["seconds_since_save"]
    assert after == before
    assert after["best_model_path"] == after["last_model_path"] == name


def test_a_folder_that_cannot_be_created_raises_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    module = Scripted()
    trainer = make(tmp_path, ModelCheckpoint(tmp_path / "file" / "inside"))
    with pytest.raises(CheckpointError, match=r"file/inside: cannot be created \(Not a directory\). Change dirpath"):
        trainer.fit(module, DATA)
    assert trainer.global_step == 0


def test_a_failed_deletion_warns_and_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def fail_first_time(path: str) -> None:
        if not refused:
            refused.append(path)
            raise CheckpointError(path, "cannot be deleted: a file in it is in use.")
        delete(path)

    monkeypatch.setattr(checkpoint_commit, "delete", fail_first_time)
    with pytest.warns(UserWarning, match="an old checkpoint was not deleted: .*epoch=0-step=4: cannot be deleted"):
        fit(tmp_path, ModelCheckpoint(), max_epochs=3)
    assert [Path(path).name for path in refused] == ["epoch=0-step=4"]
    assert names(tmp_path / SAVED) == ["epoch=2-step=12"]


# the ranking in the checkpoint ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("arguments", [{}, {"filename": "model", "enable_version_counter": False, "save_last": True}])
def test_the_old_checkpoint_stays_until_the_new_one_is_complete(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """This holds even if both have the same name."""
    seen: list[list[int]] = []

    class Recorder(Callback):
        def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
            if trainer.global_step:
                paths = [path for path in (tmp_path / SAVED).iterdir() if path.name[0] != "." and path.name != "last"]
                seen.append(sorted(CheckpointReader(path).progress()["global_step"] for path in paths))

    fit(tmp_path, ModelCheckpoint(**arguments), Recorder(), max_epochs=3)
    assert seen == [[], [4], [8]]
    assert steps(tmp_path / SAVED) == [12]


def test_save_checkpoint_overwrites_the_same_path_by_default(tmp_path: Path) -> None:
    trainer = fit(tmp_path, max_epochs=1)
    path = tmp_path / "here"
    path.mkdir()
    assert trainer.save_checkpoint(path) == path
    trainer.fit(Scripted(), DATA, DATA, max_epochs=2)
    assert trainer.save_checkpoint(path) == path
    assert CheckpointReader(path).progress()["global_step"] == 8
    assert trainer.save_checkpoint(path, overwrite=False) == tmp_path / "here-v1"
    assert sorted(entry for entry in os.listdir(tmp_path) if "here" in entry) == ["here", "here-v1"]
    (tmp_path / "link").symlink_to("here")
    with pytest.raises(CheckpointError, match="is a link and is not overwritten"):
        trainer.save_checkpoint(tmp_path / "link")


def test_a_checkpoint_includes_itself_in_its_ranking(tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val", save_top_k=2, save_last=True)
    fit(tmp_path, callback, max_epochs=4)
    state = saved_state(callback.last_model_path, callback)
    assert state["best_model_path"] == state["last_model_path"] == "epoch=3-step=16"
    assert set(state["best_k_models"]) == {"epoch=1-step=8", "epoch=3-step=16"}
    assert state["saved_step"] == 16
    # Checkpoints to delete, so that a run killed before their deletion can delete them later.
    assert set(state["doomed"]) == {"epoch=2-step=12", "epoch=0-step=4"}


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"save_top_k": 2},
    {"monitor": "val"},
    {"monitor": "val", "save_top_k": 2, "save_last": True},
    {"monitor": "val", "mode": "max", "save_last": True},
    {"monitor": "val", "filename": "best"},
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("epochs", [2, 4])
def test_a_resumed_run_ends_with_the_same_checkpoints(tmp_path: Path, arguments: dict[str, Any], epochs: int) -> None:
    arguments = {**arguments, "save_last": True}
    whole, first, second = (ModelCheckpoint(**arguments) for _ in range(3))
    fit(tmp_path / "whole", whole)
    fit(tmp_path / "cut", first, max_epochs=epochs)
    fit(tmp_path / "cut", second, ckpt_path="last")
    assert names(tmp_path / "cut" / SAVED) == names(tmp_path / "whole" / SAVED)
    assert steps(tmp_path / "cut" / SAVED) == steps(tmp_path / "whole" / SAVED)
    one, other = whole.state_dict(), second.state_dict()
    for state in (one, other):
        del state["dirpath"], state["seconds_since_save"]
    assert one == other


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_model_checkpoint import Scripted, ModelCheckpoint, fit
from leyden.callbacks.checkpointing import checkpoint_commit

delete_each = checkpoint_commit.delete_each
checkpoint = ModelCheckpoint(monitor="val", save_top_k=2, save_last=True, asynchronous=sys.argv[4] == "asynchronous")

def killed(doomed, place):
    if checkpoint._saved_step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return delete_each(doomed, place)

checkpoint_commit.delete_each = killed
fit(Path(sys.argv[1]), checkpoint)
"""


@pytest.mark.parametrize("how", ["synchronous", "asynchronous"])
@pytest.mark.parametrize(("step", "left"), [(16, [4, 8, 12, 16]), (24, [8, 16, 20, 24])])
def test_a_resume_completes_deletions_that_a_kill_prevented(
    tmp_path: Path, step: int, left: list[int], how: str
) -> None:
    """The resumed run ends with the same checkpoints as an uninterrupted one."""
    whole = ModelCheckpoint(monitor="val", save_top_k=2, save_last=True)
    fit(tmp_path / "whole", whole)
    done = run_program(["-c", KILLED, tmp_path / "cut", step, Path(__file__).parent, how])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert steps(tmp_path / "cut" / SAVED) == left
    resumed = ModelCheckpoint(monitor="val", save_top_k=2, save_last=True)
    fit(tmp_path / "cut", resumed, ckpt_path="last")
    assert names(tmp_path / "cut" / SAVED) == names(tmp_path / "whole" / SAVED)


def test_pending_deletions_spare_another_runs_checkpoint_of_the_same_name(tmp_path: Path) -> None:
    first, shared = ModelCheckpoint(tmp_path / "shared"), tmp_path / "shared"
    fit(tmp_path, first, max_epochs=2)
    kept = first.last_model_path
    assert list(saved_state(kept, first)["doomed"]) == ["epoch=0-step=4"]
    fit(tmp_path, ModelCheckpoint(shared), max_epochs=1)
    assert names(shared) == ["epoch=0-step=4", "epoch=1-step=8"]
    fit(tmp_path, ModelCheckpoint(shared), max_epochs=3, ckpt_path=kept)
    assert names(shared) == ["epoch=0-step=4", "epoch=2-step=12"]


def test_ranking_and_deletion_work_after_the_folder_is_moved(tmp_path: Path) -> None:
    fit(tmp_path / "before", ModelCheckpoint(monitor="val", save_top_k=2), max_epochs=3)
    os.rename(tmp_path / "before", tmp_path / "after")
    moved = ModelCheckpoint(monitor="val", save_top_k=2)
    fit(tmp_path / "after", moved, max_epochs=4, ckpt_path="last")
    assert steps(tmp_path / "after" / SAVED) == [8, 16]
    assert moved.best_model_path == str(tmp_path / "after" / SAVED / "epoch=3-step=16")


def test_a_resume_into_another_folder_leaves_the_earlier_checkpoints_alone(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "one", monitor="val", save_top_k=2)
    fit(tmp_path, first, max_epochs=2)
    second = ModelCheckpoint(tmp_path / "two", monitor="val", save_top_k=2)
    with pytest.warns(UserWarning, match="The earlier ones are neither ranked nor deleted"):
        fit(tmp_path, second, ckpt_path=first.last_model_path)
    assert steps(tmp_path / "one") == [4, 8]
    assert steps(tmp_path / "two") == [16, 24]


def test_a_manually_deleted_checkpoint_is_not_an_error(tmp_path: Path) -> None:
    first = ModelCheckpoint(monitor="val", save_top_k=2)
    fit(tmp_path, first, max_epochs=2)
    delete(tmp_path / SAVED / "epoch=0-step=4")
    fit(tmp_path, ModelCheckpoint(monitor="val", save_top_k=2), max_epochs=3, ckpt_path="last")
    assert steps(tmp_path / SAVED) == [8, 12]


def test_a_second_fit_keeps_the_checkpoints_of_the_first(tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val")
    trainer = fit(tmp_path, callback, max_epochs=2)
    trainer.fit(Scripted([0.7, 0.8]), DATA, DATA)
    assert names(tmp_path / SAVED) == ["epoch=0-step=4", "epoch=1-step=8"]
    assert callback.best_model_path.endswith("epoch=0-step=4")


def test_two_model_checkpoints_manage_separate_files(tmp_path: Path) -> None:
    def both() -> list[Callback]:
        return [
            ModelCheckpoint(filename="best-{epoch}", monitor="val"),
            ModelCheckpoint(filename="all-{epoch}", save_top_k=-1, every_n_epochs=2),
        ]

    fit(tmp_path, *both(), max_epochs=2)
    fit(tmp_path, *both(), max_epochs=4, ckpt_path="last")
    assert names(tmp_path / SAVED) == ["all-epoch=1", "all-epoch=3", "best-epoch=3"]


def test_verbose_prints_each_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ModelCheckpoint(monitor="val", verbose=True, save_last=True), max_epochs=3)
    printed = capsys.readouterr().out
    folder = tmp_path / SAVED
    assert f"step 8: val = 0.30000, among the best 1: saved {folder}/epoch=1-step=8\n" in printed
    assert f"step 12: val = 0.90000, not among the best: saved {folder}/epoch=2-step=12\n" in printed
    fit(tmp_path, ModelCheckpoint(), max_epochs=1)
    assert "saved" not in capsys.readouterr().out


# arguments ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "maximum"}, "Known: min, max"),
        ({"mode": "mx"}, "Did you mean 'max'"),
        ({"save_top_k": -2}, "a whole number from 0, or -1 for all"),
        ({"save_top_k": 1.5}, "a whole number from 0, or -1 for all"),
        ({"save_top_k": True}, "a whole number from 0, or -1 for all"),
        ({"save_last": "copy"}, "use True, False or 'link'"),
        ({"monitor": ""}, "use the name of a logged metric"),
        ({"every_n_train_steps": -1}, "a whole number from 1, or 0 for never"),
        ({"every_n_epochs": 1.0}, "a whole number from 1, or 0 for never"),
        ({"every_n_train_steps": 5, "every_n_epochs": 1}, "give only one of the three"),
        ({"every_n_train_steps": 5, "train_time_interval": timedelta(hours=1)}, "give only one of the three"),
        ({"every_n_epochs": 1, "train_time_interval": timedelta(hours=1)}, "give only one of the three"),
        ({"train_time_interval": 60}, "train_time_interval=60 is an int: give 'DD:HH:MM:SS'"),
        ({"filename": ""}, "use a template"),
        ({"filename": "../{epoch}"}, "not a path below dirpath"),
        ({"filename": "/{epoch}"}, "not a path below dirpath"),
        ({"filename": "a//{epoch}"}, "not a path below dirpath"),
        ({"filename": "a\\{epoch}"}, "not a path below dirpath"),
        ({"filename": "{epoch"}, "has an unmatched brace"),
        ({"filename": "{val_loss:2d}"}, "'2d' cannot format 'val_loss'"),
        ({"filename": "{epoch:q}"}, "'q' cannot format 'epoch'"),
    ],
)
def test_invalid_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelCheckpoint(**arguments)


def test_zero_disables_a_trigger() -> None:
    assert ModelCheckpoint(every_n_epochs=0, every_n_train_steps=10).every_n_epochs == 0
    assert ModelCheckpoint(every_n_epochs=2, every_n_train_steps=0).every_n_epochs == 2


class FailsOnTraining(Callback):
    """Asserts that a run resumed at its end trains nothing."""

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        raise AssertionError(f"trains batch {batch_idx} of epoch {trainer.current_epoch}")


def test_filenames_with_slashes_create_folders_that_resumes_search(tmp_path: Path) -> None:
    home = tmp_path / SAVED

    def nested(fold: str) -> ModelCheckpoint:
        return ModelCheckpoint(filename=f"{fold}/{{epoch}}-{{val/loss:.1f}}", save_top_k=2, save_last=True)

    with pytest.warns(UserWarning, match="which was not logged"):
        first = fit(tmp_path, nested("b"), max_epochs=3)
    assert [names(home), names(home / "b")] == [
        ["b", "last -> b/epoch=2-val_loss=none"],
        ["epoch=1-val_loss=none", "epoch=2-val_loss=none"],
    ]
    assert first.checkpoint_callback is not None
    assert first.checkpoint_callback.best_model_path == str(home / "b" / "epoch=2-val_loss=none")
    # The newest checkpoint is in the folder that sorts first by name and holds fewer checkpoints.
    with pytest.warns(UserWarning, match="which was not logged"):
        second = fit(tmp_path, nested("a"), ckpt_path="auto", max_epochs=4)
    assert (second.global_step, names(home / "a")) == (16, ["epoch=3-val_loss=none"])
    fit(tmp_path, nested("a"), FailsOnTraining(), ckpt_path="last", max_epochs=4)
    assert second.checkpoint_callback is not None
    resumed = fit(tmp_path, nested("a"), ckpt_path=second.checkpoint_callback.best_model_path, max_epochs=4)
    assert resumed.checkpoint_callback is not None
    assert resumed.checkpoint_callback.best_model_path == second.checkpoint_callback.best_model_path


@pytest.mark.parametrize("name", ["x" * 230, "{epoch}-" + "x" * 215, "fold/" + "ä" * 120])
def test_names_too_long_for_a_save_are_refused_at_construction(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"bytes, and at most \d+ fit"):
        ModelCheckpoint(filename=name)


def test_a_name_of_the_greatest_length_can_be_saved(tmp_path: Path) -> None:
    name = "x" * 255
    while True:
        try:
            callback = ModelCheckpoint(tmp_path, name, every_n_train_steps=1, save_top_k=-1)
            break
        except ConfigurationError:
            name = name[:-1]
    fit(tmp_path, callback, max_epochs=3)
    assert len(names(tmp_path)) == 12 and len(name) > 100


def test_the_folders_own_limit_of_names_is_checked_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pathconf", lambda folder, name: 143)
    with pytest.raises(ConfigurationError, match="at most"):
        fit(tmp_path, ModelCheckpoint(tmp_path, "x" * 120))
    assert names(tmp_path) == []
