"""Trackers, both the Trainer's loggers and custom classes, through init_trackers, log and end_training."""

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


class RecordingTracker(GeneralTracker):
    """A tracker that records its calls."""

    name = "recording"
    requires_logging_directory = True

    def __init__(self, run: str, logging_dir: str, tag: str = "") -> None:
        self.calls: list[Any] = [run, Path(logging_dir).name, tag]

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((step, values, kwargs))

    def finish(self) -> None:
        self.calls.append("finished")


def test_trackers_record_settings_values_and_text(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", "csv", RecordingTracker], project_dir=tmp_path)
    accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"recording": {"tag": "a"}})
    with pytest.warns(UserWarning, match="'csv' records only numbers and drops the text of note"):
        accelerator.log({"loss": torch.tensor(0.5), "note": "text"}, step=3, log_kwargs={"recording": {"commit": True}})
    recording, board = accelerator.get_tracker("recording"), accelerator.get_tracker("tensorboard", unwrap=True)
    board.add_scalar("extra", 1.0, 3)
    with pytest.raises(ConfigurationError, match="no tracker 'wandb'. Known: tensorboard, csv, recording"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()
    assert recording.calls == [
        *("digits", tmp_path.name, "a", {"lr": 0.1}),
        (3, {"loss": torch.tensor(0.5), "note": "text"}, {"commit": True}),
        "finished",
    ]
    events = events_in(tmp_path / "digits")
    assert [event.value for event in events.Scalars("loss")] == [0.5]
    assert events.Scalars("extra")[0].step == 3
    assert "note/text_summary" in events.Tags()["tensors"]
    assert (tmp_path / "digits" / "version_0" / "hparams.json").exists()


class WithoutLog(GeneralTracker):
    """A tracker without a log method."""

    name = "without_log"


class Nameless(GeneralTracker):
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None: ...


class MainProcessTracker(GeneralTracker):
    name = "decorated"

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> str:
        return "logged"


@pytest.mark.parametrize(("rank", "main_only", "found"), [(0, True, "logged"), (1, True, None), (1, False, "logged")])
def test_on_main_process_skips_other_ranks_if_main_process_only(
    rank: int, main_only: bool, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(MainProcessTracker, "main_process_only", main_only)
    assert MainProcessTracker().log({}) == found
    assert MainProcessTracker.log.__name__ == "log"


@pytest.mark.parametrize("shape", [(2, 3, 8, 6), (2, 1, 8, 6), (2, 8, 6, 3)])
def test_images_may_have_channels_first_or_last(tmp_path: Path, shape: tuple[int, ...]) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.get_tracker("tensorboard").log_images({"seen": torch.rand(shape)}, step=1)
    accelerator.end_training()
    events = events_in(tmp_path / "run")
    image = events.Images("seen")[0]
    assert (image.height, image.width) == (8, 12)


def test_dataformats_resolves_an_ambiguous_image_layout(tmp_path: Path) -> None:
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


def test_a_tracker_for_numbers_rejects_images_and_tables(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="csv", project_dir=tmp_path)
    accelerator.init_trackers("run")
    with pytest.raises(ConfigurationError, match="the tracker 'csv' cannot record images"):
        accelerator.get_tracker("csv").log_images({"seen": torch.rand(1, 3, 2, 2)}, step=1)
    with pytest.raises(ConfigurationError, match="the tracker 'csv' cannot record tables"):
        accelerator.get_tracker("csv").log_table("rows", ["a"], [[1]])


def test_an_incomplete_tracker_class_raises_at_construction() -> None:
    with pytest.raises(TypeError, match="abstract method '?log"):
        WithoutLog()
    with pytest.raises(ConfigurationError, match="class WithoutLog, which has no log. Define def log"):
        Accelerator(cpu=True, log_with=WithoutLog)
    with pytest.raises(ConfigurationError, match='Nameless without a name. Set name = "mine"'):
        Accelerator(cpu=True, log_with=Nameless())


def test_a_logger_works_as_a_tracker(tmp_path: Path) -> None:
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


def test_find_executable_batch_size_halves_the_batch_until_it_fits() -> None:
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
    with pytest.raises(ConfigurationError, match="Leave it out") as refused:
        train(32, 2)
    assert isinstance(refused.value, TypeError)

    @find_executable_batch_size(starting_batch_size=2)
    def never_fits(batch_size: int) -> None:
        raise MemoryError("none")

    with pytest.raises(RuntimeError, match="reached zero.* down to 1"):
        never_fits()

    @find_executable_batch_size
    def failing(batch_size: int) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        failing()


def test_a_device_specific_seed_on_one_process_is_the_seed_itself() -> None:
    set_seed(3)
    first = torch.rand(2)
    set_seed(3, device_specific=True)
    assert torch.equal(torch.rand(2), first)


def test_find_executable_batch_size_shrinks_by_a_tenth_as_in_accelerate() -> None:
    def sizes_tried(decorator: Any) -> list[int]:
        tried = []

        @decorator(starting_batch_size=128)
        def train(batch_size: int) -> None:
            tried.append(batch_size)
            if batch_size > 2:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")

        train()
        return tried

    found = sizes_tried(find_executable_batch_size)
    assert found[:4] == [128, 115, 103, 92] and found[-1] == 2
    theirs = pytest.importorskip("accelerate").utils.find_executable_batch_size
    assert found == sizes_tried(theirs)


def test_a_rank_logger_logs_in_order_and_records_the_callers_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        get_logger("mine", "INFO").info("in order", in_order=True)
        get_logger("mine").warning_once("once")
        get_logger("mine").warning_once("once")
        get_logger("mine").log(logging.INFO, "by level")
    assert [record.message for record in caplog.records] == ["in order", "once", "by level"]
    here = (Path(__file__).name, "test_a_rank_logger_logs_in_order_and_records_the_callers_line")
    assert {(record.filename, record.funcName) for record in caplog.records} == {here}


def test_stacklevel_counts_as_in_accelerates_logger(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("mine", "INFO")

    def helper() -> None:
        logger.warning("own line", stacklevel=2)
        logger.warning("caller's line", stacklevel=3)
        logger.warning_once("once, caller's line", stacklevel=3)

    helper()
    names = [record.funcName for record in caplog.records]
    assert names == ["helper"] + ["test_stacklevel_counts_as_in_accelerates_logger"] * 2


def test_a_single_process_is_the_main_process_and_gathers_its_own_data() -> None:
    state, accelerator, tensor = PartialState(cpu=True), Accelerator(cpu=True), torch.rand(2)
    assert (state.num_processes, state.is_main_process, state.distributed_type) == (1, True, "NO")
    assert torch.equal(accelerator.gather_for_metrics(tensor), tensor)
    assert accelerator.gather_for_metrics(["a"]) == ["a"] and accelerator.reduce(tensor) is tensor
    assert accelerator.on_process(lambda: 3, process_index=0)() == 3
    with pytest.raises(ConfigurationError, match="from 0 to 0"):
        accelerator.on_process(lambda: 3, process_index=1)


def test_notebook_launcher_on_one_process_calls_the_function_with_its_precision() -> None:
    assert notebook_launcher(lambda a: a + 1, (1,), num_processes=1) == 2
    # Code that runs on Accelerate, such as transformers' Trainer, reads the variable.
    variable = "ACCELERATE_MIXED_PRECISION"
    assert notebook_launcher(os.environ.get, (variable,), num_processes=1, mixed_precision="bf16") == "bf16"
    assert variable not in os.environ


def test_notebook_launcher_accepts_the_defaults_of_accelerates_launcher() -> None:
    defaults: dict[str, Any] = {"max_restarts": 0, "monitor_interval": 0.1, "rdzv_backend": "static", "rdzv_id": "none"}
    assert notebook_launcher(max, ([1, 2],), num_processes=1, **defaults) == 2
    with pytest.raises(ConfigurationError, match=r"max_restarts=3.*leyden launch"):
        notebook_launcher(max, ([1, 2],), num_processes=1, max_restarts=3)


def test_a_profile_is_written_for_each_rank(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=tmp_path)])
    with accelerator.profile() as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert any("mm" in event.key for event in profiler.key_averages())
    assert (tmp_path / "profile_0.json").exists()


def test_mlflow_records_settings_values_and_artifacts_locally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_comet_writes_an_archive_offline(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml", reason="the extra leyden[comet_ml] is not installed")
    accelerator = Accelerator(cpu=True, log_with="comet_ml", project_dir=tmp_path)
    accelerator.init_trackers("digits", {"lr": 0.1}, {"comet_ml": {"online": False}})
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    assert list(tmp_path.glob("*.zip"))
