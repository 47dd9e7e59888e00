"""Trackers of Aim, ClearML, DVCLive, SwanLab and Trackio: the data that each stores without a server, read back."""

from __future__ import annotations

import csv
import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from leyden import Accelerator, ConfigurationError
from leyden.accelerator.records.tracking import SERVICES
from leyden.callbacks.loggers.plain import json_value
from leyden.tracking import ClearMLTracker, DVCLiveTracker, GeneralTracker

CONFIG = {"lr": 0.1, "layers": (8, 4), "optimizer": {"name": "sgd", "device": torch.device("cpu")}}


def start_tracker(service: str, folder: Path, **options: Any) -> tuple[Accelerator, Any]:
    """Records settings and two steps of numbers; returns the Accelerator and its tracker, still open."""
    pytest.importorskip(service, reason=f"{service} is not installed")
    accelerator = Accelerator(cpu=True, log_with=service, project_dir=folder)
    accelerator.init_trackers("digits", CONFIG, {service: options})
    for step in (1, 2):
        accelerator.log({"train_loss": torch.tensor(0.5 / step), "acc": numpy.float32(step)}, step=step)
    return accelerator, accelerator.get_tracker(service)


@pytest.mark.parametrize("name", SERVICES)
def test_a_tracker_without_its_package_is_skipped_with_a_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, SERVICES[name][1], None)
    with pytest.warns(UserWarning, match=f"log_with='{name}' records nothing: .*pip install {SERVICES[name][1]}"):
        accelerator = Accelerator(cpu=True, log_with=[name, "csv"], project_dir=tmp_path)
    accelerator.init_trackers("digits", CONFIG, {name: {"anything": 1}})
    accelerator.log({"loss": 0.5}, step=1)
    # Calls on the skipped tracker do nothing.
    accelerator.get_tracker(name).log_images({"seen": torch.rand(2, 2)}, step=1)
    accelerator.get_tracker(name, unwrap=True).add_tags("any")
    accelerator.end_training()
    assert [tracker.name for tracker in accelerator.trackers] == ["csv"]
    with open(next(tmp_path.rglob("metrics.csv"))) as file:
        assert list(csv.DictReader(file)) == [{"step": "1", "loss": "0.5"}]
    assert name not in Accelerator(cpu=True, log_with="all").log_with


def test_init_kwargs_for_an_unused_tracker_raise(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="csv", project_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="init_kwargs has an unknown tracker 'aim'"):
        accelerator.init_trackers("digits", init_kwargs={"aim": {}})


def test_clearml_splits_a_metric_name_into_title_and_series() -> None:
    from leyden.compat.accelerate.trackers import _title_and_series

    names = {"eval_loss": ("loss", "eval"), "loss": ("loss", "train"), "test_": ("test_", "train")}
    assert {name: _title_and_series(name) for name in names} == names
    with pytest.raises(ConfigurationError, match="Pass data or a dataframe"):
        ClearMLTracker("digits").log_table("t")


def test_trackio_records_numbers_text_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    accelerator, tracker = start_tracker("trackio", tmp_path, name="first", embed=False)
    accelerator.log({"note": "a text", "nested": {"a": 1.0}}, step=3)
    assert (tracker.tracker.project, tracker.tracker.name) == ("digits", "first")
    accelerator.end_training()
    [path] = (tmp_path / "trackio").rglob("digits*.db")
    with sqlite3.connect(path) as database:
        rows = [(step, json.loads(values)) for step, values in database.execute("select step, metrics from metrics")]
        [(config,)] = database.execute("select config from configs").fetchall()
    assert rows == [
        (1, {"train_loss": 0.5, "acc": 1.0}),
        (2, {"train_loss": 0.25, "acc": 2.0}),
        (3, {"note": "a text", "nested": {"a": 1.0}}),
    ]
    assert {name: json.loads(config)[name] for name in CONFIG} == json_value(CONFIG)


def test_dvclive_records_numbers_and_settings_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    accelerator, tracker = start_tracker("dvclive", tmp_path, dir="live", save_dvc_exp=False)
    with pytest.warns(
        UserWarning, match="the tracker 'dvclive' records only numbers and texts, and drops weights, which is "
    ):
        accelerator.log({"weights": [1, 2], "note": "a text"}, step=3)
    assert tracker.live is tracker.tracker
    accelerator.end_training()
    with open(tmp_path / "live/plots/metrics/train_loss.tsv") as file:
        rows = [(row["step"], row["train_loss"]) for row in csv.DictReader(file, delimiter="\t")]
    assert rows == [("1", "0.5"), ("2", "0.25")]
    assert json.loads((tmp_path / "live/metrics.json").read_text())["note"] == "a text"
    assert yaml.safe_load((tmp_path / "live/params.yaml").read_text()) == json_value(CONFIG)

    from dvclive import Live

    own = Live("own", save_dvc_exp=False)
    accelerator = Accelerator(cpu=True, log_with=DVCLiveTracker(live=own))
    accelerator.init_trackers("digits")
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    assert json.loads((tmp_path / "own/metrics.json").read_text())["loss"] == 1.0


def test_aim_records_numbers_text_images_and_settings(tmp_path: Path) -> None:
    accelerator, tracker = start_tracker("aim", tmp_path, experiment="mine", log_system_params=False)
    accelerator.log({"note": "a text"}, step=3, log_kwargs={"aim": {"context": {"subset": "val"}}})
    image = numpy.zeros((4, 6, 3), dtype=numpy.uint8)
    options = {"aim_image": {"quality": 50}, "track": {"context": {"subset": "val"}}}
    tracker.log_images({"plain": image, "named": (image, "a cat"), "several": [image, image]}, 2, kwargs=options)
    assert tracker.writer is tracker.tracker
    name = tracker.tracker.hash
    accelerator.end_training()
    import aim
    from aim.storage.context import Context

    # A read-only run would see only what Aim's server has indexed.
    found = aim.Run(name, repo=str(tmp_path), log_system_params=False)
    assert (found.name, found.experiment, found["hparams"]) == ("digits", "mine", json_value(CONFIG))
    assert found.get_metric("train_loss", Context({})).values.sparse_list()[1] == [0.5, 0.25]
    validation = Context({"subset": "val"})
    assert [text.data for text in found.get_text_sequence("note", validation).values.values_list()] == ["a text"]
    [shown] = found.get_image_sequence("named", validation).values.values_list()
    assert (shown.caption, shown.size) == ("a cat", (6, 4))
    [both] = found.get_image_sequence("several", validation).values.values_list()
    assert len(both) == 2
    found.close()


def test_swanlab_records_numbers_text_and_images_offline(tmp_path: Path) -> None:
    accelerator, tracker = start_tracker("swanlab", tmp_path, mode="offline", log_dir=str(tmp_path / "swan"))
    accelerator.log({"note": "a text"}, step=3)
    tracker.log_images({"seen": [numpy.zeros((4, 6, 3), dtype=numpy.uint8)]}, step=3)
    assert tracker.tracker.config["lr"] == 0.1
    accelerator.end_training()
    written = b"".join(path.read_bytes() for path in (tmp_path / "swan").rglob("*") if path.is_file())
    for part in (b"train_loss", b"note", b"seen", b"sgd"):
        assert part in written, part


def test_clearml_records_numbers_text_tables_and_images_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "cache"))
    pytest.importorskip("clearml", reason="clearml is not installed")
    from clearml import Task

    Task.set_offline(True)
    accelerator, tracker = start_tracker(
        "clearml", tmp_path, auto_connect_frameworks=False, auto_connect_arg_parser=False
    )
    accelerator.log({"eval_loss": 1.0, "note": "a text"}, step=3)
    accelerator.log({"final": 2.0})
    tracker.log_images({"seen": [numpy.zeros((4, 6, 3), dtype=numpy.uint8)] * 2}, step=3)
    tracker.log_table("eval_rows", ["a", "b"], [[1, 2]], step=3)
    folder = Path(tracker.task.get_offline_mode_folder())
    accelerator.end_training()
    found = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    rows = [json.loads(line) for line in found.decode("utf-8", "replace").splitlines() if line.startswith("[")]
    scalars = {
        (event["metric"], event["variant"], event["iter"], event["value"])
        for events in rows
        for event in events
        if event.get("type") == "training_stats_scalar"
    }
    assert {("loss", "train", 1, 0.5), ("loss", "train", 2, 0.25), ("loss", "eval", 3, 1.0)} <= scalars
    assert b"step 3, note: a text" in found and b"sgd" in found and b"rows" in found


def test_tracker_names_match_accelerate() -> None:
    import leyden.tracking as tracking

    kinds = [getattr(tracking, kind) for kind, _ in SERVICES.values()]
    assert [kind.name for kind in kinds] == list(SERVICES)
    assert all(issubclass(kind, GeneralTracker) for kind in kinds)
