"""Trackers: the Trainer's loggers and a user's own, through init_trackers, log and end_training."""

from __future__ import annotations

import csv
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from logged import events_in

from leyden import (
    Accelerator,
    ConfigurationError,
    GeneralTracker,
    PartialState,
    ProfileKwargs,
    find_executable_batch_size,
    get_logger,
    notebook_launcher,
    set_seed,
)
from leyden.callbacks import CSVLogger
from leyden.tracking import MLflowTracker, TensorBoardTracker, on_main_process


class Noted(GeneralTracker):
    """Keeps a list of its calls."""

    name = "noted"
    requires_logging_directory = True

    def __init__(self, run: str, logging_dir: str, tag: str = "") -> None:
        self.calls: list[Any] = [run, Path(logging_dir).name, tag]

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((step, values, kwargs))

    def finish(self) -> None:
        self.calls.append("finished")


def test_every_tracker_records_settings_values_and_texts(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", "csv", Noted], project_dir=tmp_path)
    accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"noted": {"tag": "a"}})
    with pytest.warns(UserWarning, match="'csv' records only numbers and drops the text of note"):
        accelerator.log({"loss": torch.tensor(0.5), "note": "text"}, step=3, log_kwargs={"noted": {"commit": True}})
    noted, board = accelerator.get_tracker("noted"), accelerator.get_tracker("tensorboard", unwrap=True)
    board.add_scalar("extra", 1.0, 3)
    with pytest.raises(ConfigurationError, match="no tracker 'wandb'. Known: tensorboard, csv, noted"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()
    assert noted.calls == [
        *("digits", tmp_path.name, "a", {"lr": 0.1}),
        (3, {"loss": torch.tensor(0.5), "note": "text"}, {"commit": True}),
        "finished",
    ]
    events = events_in(tmp_path / "digits")
    assert [event.value for event in events.Scalars("loss")] == [0.5]
    assert events.Scalars("extra")[0].step == 3
    assert "note/text_summary" in events.Tags()["tensors"]
    assert (tmp_path / "digits" / "version_0" / "hparams.json").exists()


class Unfinished(GeneralTracker):
    """Has no log."""

    name = "unfinished"


class Nameless(GeneralTracker):
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Nothing."""


class Decorated(GeneralTracker):
    name = "decorated"

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> str:
        return "logged"


@pytest.mark.parametrize(("rank", "main_only", "found"), [(0, True, "logged"), (1, True, None), (1, False, "logged")])
def test_a_method_for_the_main_process_leaves_other_ranks_out(
    rank: int, main_only: bool, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(Decorated, "main_process_only", main_only)
    assert Decorated().log({}) == found
    assert Decorated.log.__name__ == "log"


@pytest.mark.parametrize("shape", [(2, 3, 8, 6), (2, 1, 8, 6), (2, 8, 6, 3)])
def test_images_have_their_channels_first_or_last(tmp_path: Path, shape: tuple[int, ...]) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.get_tracker("tensorboard").log_images({"seen": torch.rand(shape)}, step=1)
    accelerator.end_training()
    events = events_in(tmp_path / "run")
    image = events.Images("seen")[0]
    assert (image.height, image.width) == (8, 12)


def test_the_form_of_images_that_could_be_either_is_given_by_name(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.get_tracker("tensorboard").log_images({"seen": torch.rand(2, 3, 6, 3)}, step=1, dataformats="NHWC")
    assert isinstance(accelerator.get_tracker("tensorboard"), TensorBoardTracker)
    accelerator.get_tracker("tensorboard").log_table("rows", columns=["a", "b"], data=[[1, 2]], step=1)
    accelerator.end_training()
    events = events_in(tmp_path / "run")
    image = events.Images("seen")[0]
    assert (image.height, image.width) == (3, 12)
    assert b"| 1 | 2 |" in events.Tensors("rows/text_summary")[0].tensor_proto.string_val[0]


def test_a_tracker_of_numbers_refuses_images(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="csv", project_dir=tmp_path)
    accelerator.init_trackers("run")
    with pytest.raises(ConfigurationError, match="the tracker 'csv' cannot record images"):
        accelerator.get_tracker("csv").log_images({"seen": torch.rand(1, 3, 2, 2)}, step=1)
    with pytest.raises(ConfigurationError, match="the tracker 'csv' cannot record tables"):
        accelerator.get_tracker("csv").log_table("rows", ["a"], [[1]])


def test_an_unfinished_tracker_is_refused_before_anything_is_logged() -> None:
    with pytest.raises(TypeError, match="abstract method '?log"):
        Unfinished()
    with pytest.raises(ConfigurationError, match="class Unfinished, which has no log. Define def log"):
        Accelerator(cpu=True, log_with=Unfinished)
    with pytest.raises(ConfigurationError, match='Nameless without a name. Set name = "mine"'):
        Accelerator(cpu=True, log_with=Nameless())


def test_a_logger_is_taken_as_a_tracker(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    accelerator = Accelerator(cpu=True, log_with=logger)
    accelerator.init_trackers("run")
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    with open(logger.metrics_file_path) as file:
        assert list(csv.DictReader(file)) == [{"step": "1", "loss": "0.5"}]


def test_wandb_records_values_and_images_offline(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="wandb", project_dir=tmp_path)
    accelerator.init_trackers("digits", {"lr": 0.1}, {"wandb": {"mode": "offline", "tags": ["test"]}})
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.get_tracker("wandb").log_images({"digits": [torch.rand(1, 8, 6), torch.rand(1, 8, 6)]}, step=2)
    run = accelerator.get_tracker("wandb", unwrap=True)
    assert (run.project, run.config["lr"], run.tags) == ("digits", 0.1, ("test",))
    accelerator.end_training()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert list((tmp_path / "wandb").glob("offline-run-*/files/media/images/digits_*.png"))


def test_a_batch_is_made_smaller_until_it_fits() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    tried = []

    @find_executable_batch_size(starting_batch_size=32, accelerator=accelerator)
    def train(batch_size: int, factor: int) -> int:
        tried.append((batch_size, accelerator.gradient_accumulation_steps))
        if batch_size > 8:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return batch_size * factor

    assert train(2) == 16
    assert tried == [(32, 2), (16, 4), (8, 8)]
    with pytest.raises(ConfigurationError, match="Leave it out"):
        train(32, 2)

    @find_executable_batch_size(starting_batch_size=2)
    def never(batch_size: int) -> None:
        raise MemoryError("none")

    with pytest.raises(RuntimeError, match="down to 1"):
        never()

    @find_executable_batch_size
    def wrong(batch_size: int) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        wrong()


def test_a_seed_of_one_device_is_the_seed_itself() -> None:
    set_seed(3)
    first = torch.rand(2)
    set_seed(3, device_specific=True)
    assert torch.equal(torch.rand(2), first)


def test_a_rank_logger_logs_in_turn_and_names_the_line_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        get_logger("mine", "INFO").info("in order", in_order=True)
        get_logger("mine").warning_once("once")
        get_logger("mine").warning_once("once")
        get_logger("mine").log(logging.INFO, "by level")
    assert [record.message for record in caplog.records] == ["in order", "once", "by level"]
    here = (Path(__file__).name, "test_a_rank_logger_logs_in_turn_and_names_the_line_of_the_call")
    assert {(record.filename, record.funcName) for record in caplog.records} == {here}


def test_one_process_is_the_main_rank_and_gathers_what_it_has() -> None:
    state, accelerator, tensor = PartialState(cpu=True), Accelerator(cpu=True), torch.rand(2)
    assert (state.num_processes, state.is_main_process, state.distributed_type) == (1, True, "NO")
    assert torch.equal(accelerator.gather_for_metrics(tensor), tensor)
    assert accelerator.gather_for_metrics(["a"]) == ["a"] and accelerator.reduce(tensor) is tensor
    assert accelerator.on_process(lambda: 3, process_index=0)() == 3
    with pytest.raises(ConfigurationError, match="from 0 to 0"):
        accelerator.on_process(lambda: 3, process_index=1)


def test_a_notebook_launch_on_one_process_calls_the_function_in_its_precision() -> None:
    assert notebook_launcher(lambda a: a + 1, (1,), num_processes=1) == 2
    # Read by code that runs on Accelerate itself, as transformers' Trainer does.
    variable = "ACCELERATE_MIXED_PRECISION"
    assert notebook_launcher(os.environ.get, (variable,), num_processes=1, mixed_precision="bf16") == "bf16"
    assert variable not in os.environ


def test_a_profile_is_written_for_each_rank(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=tmp_path)])
    with accelerator.profile() as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert any("mm" in event.key for event in profiler.key_averages())
    assert (tmp_path / "profile_0.json").exists()


def test_mlflow_records_settings_and_values_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the extra leyden[mlflow] is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    accelerator = Accelerator(cpu=True, log_with="mlflow", project_dir=tmp_path)
    accelerator.init_trackers("digits", {"optimizer": {"lr": 0.1}}, {"mlflow": {"tracking_uri": tmp_path.as_uri()}})
    for step in (1, 2):
        accelerator.log({"loss": 0.5 / step}, step=step)
    tracker = accelerator.get_tracker("mlflow")
    assert isinstance(tracker, MLflowTracker)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("a")
    tracker.log_artifact(tmp_path / "notes/a.txt")
    tracker.log_artifacts(tmp_path / "notes", "texts")
    tracker.log_figure(pytest.importorskip("matplotlib.figure").Figure(), "plot.png")
    client, run = tracker.tracker, tracker.logger.version
    accelerator.end_training()
    assert client.get_run(run).data.params == {"optimizer/lr": "0.1"}
    assert [file.path for path in (None, "texts") for file in client.list_artifacts(run, path) if not file.is_dir] == [
        *("a.txt", "plot.png", "texts/a.txt"),
    ]
    assert [(row.step, row.value) for row in client.get_metric_history(run, "loss")] == [(1, 0.5), (2, 0.25)]
    assert client.get_run(run).info.status == "FINISHED"


def test_comet_writes_its_archive_offline(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml", reason="the extra leyden[comet_ml] is not installed")
    accelerator = Accelerator(cpu=True, log_with="comet_ml", project_dir=tmp_path)
    accelerator.init_trackers("digits", {"lr": 0.1}, {"comet_ml": {"online": False}})
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    assert list(tmp_path.glob("*.zip"))
