"""Behavior shared by all loggers: run folders, resumes, numbers and hyperparameters."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import multiprocessing
import sys
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from logged import scalars_in, set_up
from models import QUIET, Line, Squares
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.callbacks.loggers.csv_logger import CSVLogger
from leyden.callbacks.loggers.logger import Logger, claim_version
from leyden.callbacks.loggers.plain import flatten_hparams, plain_numbers
from leyden.callbacks.loggers.silent import DummyLogger
from leyden.callbacks.loggers.tensorboard import TensorBoardLogger
from leyden.core.errors import ConfigurationError
from leyden.trainer.trainer import Trainer


def _claim(root: str, count: int, taken: Any) -> None:
    for _ in range(count):
        taken.put(claim_version(root))


class TestRunFolder:
    def test_versions_continue_past_gaps_and_unrelated_folders(self, tmp_path: Path) -> None:
        (tmp_path / "version_7").mkdir()
        (tmp_path / "version_x").mkdir()
        (tmp_path / "other").mkdir()
        assert [claim_version(tmp_path) for _ in range(3)] == [8, 9, 10]

    def test_processes_never_share_a_number(self, tmp_path: Path) -> None:
        context = multiprocessing.get_context("fork")
        taken: Any = context.SimpleQueue()
        workers = [context.Process(target=_claim, args=(str(tmp_path), 40, taken)) for _ in range(3)]
        for worker in workers:
            worker.start()
        numbers = [taken.get() for _ in range(120)]
        for worker in workers:
            worker.join()
        assert sorted(numbers) == list(range(120))

    def test_no_folder_is_created_before_it_is_needed(self, tmp_path: Path) -> None:
        logger = CSVLogger(tmp_path / "runs")
        set_up(tmp_path, logger)
        assert logger.state_dict() == {}
        assert list(tmp_path.iterdir()) == []
        assert logger.version == 0
        assert logger.log_dir == str(tmp_path / "runs" / "logs" / "version_0")
        assert (tmp_path / "runs" / "logs" / "version_0").is_dir()

    def test_save_dir_defaults_to_the_trainers_folder(self, tmp_path: Path) -> None:
        logger = CSVLogger()
        set_up(tmp_path, logger)
        assert logger.log_dir == str(tmp_path / "logs" / "version_0")

    def test_save_dir_without_a_trainer_is_the_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert CSVLogger(name="").log_dir == str(tmp_path / "version_0")

    @pytest.mark.parametrize(
        ("name", "version", "folder"),
        [("mine", None, "mine/version_0"), (None, 3, "version_3"), ("mine", "baseline", "mine/baseline")],
    )
    def test_name_and_version_choose_the_folder(
        self, tmp_path: Path, name: str | None, version: Any, folder: str
    ) -> None:
        assert CSVLogger(tmp_path, name=name, version=version).log_dir == str(tmp_path / folder)

    def test_loggers_of_one_trainer_share_a_folder(self, tmp_path: Path) -> None:
        table, board, elsewhere = CSVLogger(), TensorBoardLogger(), CSVLogger(name="other")
        set_up(tmp_path, table, board, elsewhere)
        assert board.log_dir == table.log_dir == str(tmp_path / "logs" / "version_0")
        assert elsewhere.log_dir == str(tmp_path / "other" / "version_0")

    def test_two_loggers_of_one_class_get_two_folders(self, tmp_path: Path) -> None:
        first, second = CSVLogger(), CSVLogger()
        set_up(tmp_path, first, second)
        assert (first.version, second.version) == (0, 1)

    def test_a_second_trainer_takes_the_next_folder(self, tmp_path: Path) -> None:
        for expected in range(2):
            logger = CSVLogger()
            set_up(tmp_path, logger)
            assert logger.version == expected

    def test_non_writing_ranks_create_no_files(self, tmp_path: Path) -> None:
        loggers: list[Logger] = [CSVLogger(), TensorBoardLogger()]
        set_up(tmp_path, *loggers, zero=False)
        for logger in loggers:
            logger.log_metrics({"loss": 1.0}, 1)
            logger.log_hyperparams({"lr": 0.1})
            logger.save()
            logger.finalize("success")
            assert logger.log_dir is None
        assert loggers[1].experiment.add_text("note", "never written") is None
        assert list(tmp_path.iterdir()) == []


class TestResume:
    def saved(self, root: Path) -> dict[str, Any]:
        logger = CSVLogger()
        set_up(root, logger)
        logger.log_metrics({"loss": 1.0}, 1)
        logger.save()
        return json.loads(json.dumps(logger.state_dict()))  # type: ignore[no-any-return]

    def test_a_resumed_run_logs_to_its_folder_again(self, tmp_path: Path) -> None:
        state = self.saved(tmp_path)
        logger = CSVLogger()
        set_up(tmp_path, logger)
        logger.load_state_dict(state)
        assert logger.version == 0
        assert [entry.name for entry in (tmp_path / "logs").iterdir()] == ["version_0"]

    def test_a_folder_claimed_before_the_resume_is_discarded(self, tmp_path: Path) -> None:
        state = self.saved(tmp_path)
        logger = CSVLogger()
        set_up(tmp_path, logger)
        assert logger.version == 1
        logger.load_state_dict(state)
        assert logger.version == 0
        assert [entry.name for entry in (tmp_path / "logs").iterdir()] == ["version_0"]

    def test_another_runs_folder_of_the_same_number_is_left_alone(self, tmp_path: Path) -> None:
        state = self.saved(tmp_path / "here")
        self.saved(tmp_path / "there")
        logger = CSVLogger()
        set_up(tmp_path / "there", logger)
        logger.load_state_dict(state)
        assert logger.version == 1
        assert len((tmp_path / "there/logs/version_0/metrics.csv").read_text().splitlines()) == 2

    def test_a_lost_folder_is_created_again(self, tmp_path: Path) -> None:
        state = self.saved(tmp_path / "here")
        logger = CSVLogger()
        set_up(tmp_path / "there", logger)
        logger.load_state_dict(state)
        logger.log_metrics({"loss": 2.0}, 2)
        logger.save()
        assert (tmp_path / "there/logs/version_0/metrics.csv").read_text() == "step,loss\n2,2.0\n"

    def test_an_explicit_version_takes_precedence(self, tmp_path: Path) -> None:
        state = self.saved(tmp_path)
        logger = CSVLogger(version="new")
        set_up(tmp_path, logger)
        logger.load_state_dict(state)
        assert logger.log_dir == str(tmp_path / "logs" / "new")

    def test_state_keys_tell_loggers_apart(self) -> None:
        loggers = [CSVLogger(), CSVLogger(name="b"), CSVLogger("d"), CSVLogger(version=1), TensorBoardLogger()]
        assert len({logger.state_key for logger in loggers}) == len(loggers)
        assert CSVLogger().state_key == CSVLogger().state_key


class TestNumbers:
    def test_every_kind_of_number_becomes_an_int_or_a_float(self) -> None:
        plain = plain_numbers(
            {
                "float": 0.5,
                "int": 3,
                "bool": True,
                "tensor": torch.tensor([2.5]),
                "half": torch.tensor(1.5, dtype=torch.bfloat16),
                "scalar": np.float32(0.25),
                "array": np.array([4]),
                "inf": -float("inf"),
                "outer": {"inner": 1},
            }
        )
        assert plain == {
            "float": 0.5,
            "int": 3,
            "bool": 1,
            "tensor": 2.5,
            "half": 1.5,
            "scalar": 0.25,
            "array": 4,
            "inf": -float("inf"),
            "outer/inner": 1,
        }
        assert {type(value) for value in plain.values()} == {int, float}

    def test_a_prefix_precedes_every_name(self) -> None:
        assert plain_numbers({"a": 1, "b": {"c": 2}}, "run") == {"run-a": 1, "run-b/c": 2}

    @pytest.mark.parametrize("value", ["0.5", None, torch.ones(2), np.ones(3), [1.0], 1 + 2j])
    def test_non_numeric_values_raise_with_the_metrics_name(self, value: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"the metric 'loss' is .* single numbers"):
            plain_numbers({"loss": value})


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Optim:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


class TestHparams:
    params: ClassVar[dict[str, Any]] = {
        "optim": Optim(),
        "data": {"path": Path("a/b"), "size": np.int64(3), "deep": Namespace(x=None)},
        "color": Color.RED,
        "act": torch.relu,
        "nan": float("nan"),
        "flag": True,
    }

    def test_nested_hyperparameters_become_flat_names(self) -> None:
        assert flatten_hparams(self.params) == {
            "optim/lr": 0.1,
            "optim/betas": "(0.9, 0.99)",
            "data/path": "a/b",
            "data/size": 3,
            "data/deep/x": "None",
            "color": "RED",
            "act": "relu",
            "nan": "nan",
            "flag": True,
        }

    def test_hparams_json_is_strict_and_keeps_the_nesting(self, tmp_path: Path) -> None:
        logger = CSVLogger(tmp_path)
        logger.log_hyperparams(self.params)
        logger.log_hyperparams(Namespace(more={1, 2}))
        text = (tmp_path / "logs/version_0/hparams.json").read_text()
        read = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert read["optim"] == {"lr": 0.1, "betas": [0.9, 0.99]}
        assert read["data"] == {"path": "a/b", "size": 3, "deep": {"x": None}}
        assert (read["nan"], read["color"], read["more"]) == ("nan", "RED", [1, 2])

    def test_hparams_yaml_equals_hparams_json(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
        logger.log_hyperparams({**self.params, "name": "1e-3", "größe": "é\n", "none": None, 3: 4})
        folder = tmp_path / "logs/version_0"
        text = (folder / "hparams.yaml").read_text(encoding="utf-8")
        assert yaml.safe_load(text) == json.loads((folder / "hparams.json").read_text())
        assert "größe" in text
        monkeypatch.setitem(sys.modules, "yaml", None)
        CSVLogger(tmp_path).log_hyperparams(self.params)
        assert sorted(path.name for path in (tmp_path / "logs/version_1").iterdir()) == ["hparams.json", "run.json"]

    def test_loggers_in_one_folder_merge_their_hyperparameters(self, tmp_path: Path) -> None:
        table, board = CSVLogger(), TensorBoardLogger()
        set_up(tmp_path, table, board)
        table.log_hyperparams({"a": 1})
        board.log_hyperparams({"b": 2})
        board.finalize("success")
        assert json.loads((tmp_path / "logs/version_0/hparams.json").read_text()) == {"a": 1, "b": 2}

    def test_hyperparameters_without_names_raise(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"not a list. Call log_hyperparams\(\{'name': value\}\)"):
            CSVLogger(tmp_path).log_hyperparams([1, 2])  # type: ignore[arg-type]


def test_a_custom_logger_needs_only_log_metrics() -> None:
    class MinimalLogger(Logger):
        def __init__(self) -> None:
            self.seen: list[tuple[dict[str, float], int | None]] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.seen.append((dict(metrics), step))

    mine = MinimalLogger()
    mine.log_metrics({"a": 1.0}, 2)
    mine.log_hyperparams({"lr": 1})
    mine.save()
    mine.log_graph(nn.Linear(1, 1))
    mine.after_save_checkpoint(ModelCheckpoint())
    mine.finalize("success")
    assert mine.seen == [({"a": 1.0}, 2)]
    assert mine.experiment is mine
    assert (mine.name, mine.version, mine.log_dir, mine.state_dict()) == (None, None, None, {})
    assert (mine.save_dir, mine.root_dir, mine.group_separator) == (None, None, "/")


def test_a_dummy_logger_accepts_any_call_and_iterates_as_empty() -> None:
    logger: Any = DummyLogger()
    logger.log_metrics("1", 2, three="three")
    logger.log_hyperparams(1, 2, three="three")
    logger.log_image("key", [], 3)
    logger.experiment[0]["deep"].add_image("x", 1)
    logger.experiment["variable"] = "value"
    assert logger[3] is logger and list(logger) == list(logger.experiment) == []
    assert (logger.name, logger.version, logger.root_dir) == ("", "", None)
    assert isinstance(copy.deepcopy(logger), DummyLogger)


class CheckpointRecorder(Logger):
    """Records the checkpoints it is notified of, which of them exist at that time, and the status of the run."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[str]]] = []
        self.status = ""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        assert threading.current_thread() is threading.main_thread()
        last = Path(checkpoint_callback.last_model_path)
        assert (last / "manifest.json").is_file() and self.status == ""
        self.seen.append((last.name, sorted(path.name for path in last.parent.glob("step=*"))))

    def finalize(self, status: str) -> None:
        self.status = status


class JoinsPendingSave(Callback):
    """Lets a background save finish within the next step."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.pending_save is not None:
            trainer.pending_save.join()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_after_save_checkpoint_runs_once_a_checkpoint_is_committed(tmp_path: Path, asynchronous: bool) -> None:
    def fit(recorder: CheckpointRecorder, *callbacks: Callback) -> None:
        checkpoint = ModelCheckpoint(
            tmp_path, filename="{step}", every_n_train_steps=2, save_last=True, asynchronous=asynchronous
        )
        settings = {**QUIET, "enable_checkpointing": True, "logger": recorder, "max_steps": 5}
        trainer = Trainer(**settings, default_root_dir=tmp_path / "runs", callbacks=[checkpoint, *callbacks])
        trainer.fit(Line(), DataLoader(torch.ones(20, 2), batch_size=2))

    recorder = CheckpointRecorder()
    fit(recorder, JoinsPendingSave())
    # By then the previous checkpoint is deleted. The final one, of save_last, is not ranked.
    assert recorder.seen == [("step=2", ["step=2"]), ("step=4", ["step=4"]), ("step=5", ["step=4", "step=5"])]
    assert recorder.status == "success"

    class Fails(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 5:
                raise ValueError("the data is bad")

    recorder = CheckpointRecorder()
    with pytest.raises(ValueError, match="the data is bad"):
        fit(recorder, Fails())
    assert [name for name, _ in recorder.seen] == ["step=2", "step=4-v1"]
    assert recorder.status == "failed"


def test_loggers_do_not_change_the_random_state(tmp_path: Path) -> None:
    import random

    def states() -> tuple[Any, ...]:
        return random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())

    before = states()
    table, board = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
    for logger in (table, board):
        logger.log_hyperparams({"lr": 0.1})
        logger.log_metrics({"loss": 1.0}, 1)
        logger.finalize("success")
    assert before == states()


class Net(Squares):
    def __init__(self, width: int = 2) -> None:
        super().__init__(nn.Linear(width, 1))
        self.save_hyperparameters()
        self.example_input_array = torch.ones(1, width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def run(root: Path, seed: int = 0, **arguments: Any) -> Trainer:
    torch.manual_seed(seed)
    data = DataLoader(torch.rand(12, 2), batch_size=2, shuffle=True)
    held_out = DataLoader(torch.rand(4, 2), batch_size=2)
    trainer = Trainer(
        logger=[CSVLogger(), TensorBoardLogger()],
        default_root_dir=root,
        log_every_n_steps=1,
        val_check_interval=2,
        enable_progress_bar=False,
        callbacks=arguments.pop("callbacks", None),
    )
    trainer.fit(Net(), data, held_out, **arguments)
    return trainer


class FailsAfterCheckpoint(Callback):
    """Raises some steps after a checkpoint, once loggers have written more values."""

    order = 200

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "here")
        if trainer.global_step == 9:
            raise RuntimeError("the run is over")


def test_a_resumed_run_logs_the_same_values_as_an_uninterrupted_one(tmp_path: Path) -> None:
    run(tmp_path / "whole", max_epochs=3)
    with pytest.raises(RuntimeError, match="the run is over"):
        run(tmp_path / "broken", max_epochs=3, callbacks=[FailsAfterCheckpoint()])
    broken = (tmp_path / "broken/logs/version_0/metrics.csv").read_text()
    assert len(broken.splitlines()) > 9
    trainer = run(tmp_path / "broken", max_epochs=3, ckpt_path=tmp_path / "broken/here")
    assert trainer.log_dir == str(tmp_path / "broken/logs/version_0")
    assert [entry.name for entry in (tmp_path / "broken/logs").iterdir()] == ["version_0"]
    whole, resumed = ((tmp_path / name / "logs/version_0/metrics.csv").read_text() for name in ("whole", "broken"))
    assert resumed == whole
    first, second = (scalars_in(tmp_path / name / "logs/version_0") for name in ("whole", "broken"))
    assert second.keys() == first.keys()
    for name in ("loss_step", "loss_epoch", "val_loss"):
        assert second[name] == first[name]
    assert json.loads((tmp_path / "broken/logs/version_0/hparams.json").read_text()) == {"width": 2}


def test_a_failing_finalize_does_not_keep_other_loggers_from_closing(tmp_path: Path) -> None:
    class FinalizeRecorder(DummyLogger):
        def __init__(self, name: str, fails: bool = False) -> None:
            super().__init__()
            self.label, self.fails = name, fails

        @property
        def state_key(self) -> str:
            return self.label

        def finalize(self, status: str) -> None:
            finalized.append(self.label)
            if self.fails:
                raise OSError(f"{self.label} is full")

    finalized: list[str] = []
    loggers = [FinalizeRecorder("first"), FinalizeRecorder("second", fails=True), FinalizeRecorder("third")]
    trainer = Trainer(**{**QUIET, "logger": loggers}, max_steps=1, default_root_dir=tmp_path)
    with pytest.raises(OSError, match="second is full"):
        trainer.fit(Line(), [torch.ones(1, 2)])
    assert finalized[:3] == ["first", "second", "third"]
