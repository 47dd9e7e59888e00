"""MLFlowLogger: MLflow's local store, read back by its client."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from logged import BestAtTwo
from models import QUIET

from leyden import Trainer
from leyden.callbacks import LambdaCallback, MLFlowLogger, ModelCheckpoint
from leyden.core.errors import ConfigurationError, LeydenError


def fit(logger: MLFlowLogger, folder: Path, callbacks: Any = (), **arguments: Any) -> Trainer:
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, monitor="distance", **arguments)
    settings = {**QUIET, "enable_checkpointing": True, "logger": logger, "max_steps": 3}
    trainer = Trainer(**settings, callbacks=[checkpoint, *callbacks])
    trainer.fit(BestAtTwo(), [torch.ones(2, 2)] * 4)
    return trainer


def names(client: Any, run: str | None, path: str | None = None) -> list[str]:
    return sorted(entry.path for entry in client.list_artifacts(run, path))


def test_checkpoints_are_artifacts_that_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the extra leyden[mlflow] is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    store = (tmp_path / "store").as_uri()
    logger = MLFlowLogger(tracking_uri=store, log_model="all", checkpoint_path_prefix="models/")
    fit(logger, tmp_path / "saved", save_last=True)
    client, run = logger.experiment, logger.version
    assert names(client, run, "models") == [
        path for step in (1, 2, 3) for path in (f"models/step={step}", f"models/step={step}.json")
    ]
    tags = client.get_run(run).data.tags
    assert (tags["checkpoint.best"], tags["checkpoint.latest"]) == ("models/step=2", "models/step=3")
    [start] = names(client, run, "starts")
    record = json.loads(Path(client.download_artifacts(run, f"{start}/run.json", str(tmp_path))).read_text())
    assert (record["arguments"]["max_steps"], tags["mlflow.source.name"]) == (3, record["command"])
    folder = client.download_artifacts(run, "models/step=1", str(tmp_path))
    resumed = Trainer(**{**QUIET, "max_steps": 5})
    resumed.fit(BestAtTwo(), [torch.ones(2, 2)] * 4, ckpt_path=folder)
    assert resumed.global_step == 5
    metadata = json.loads(Path(client.download_artifacts(run, "models/step=2.json", str(tmp_path))).read_text())
    assert (metadata["score"], metadata["ModelCheckpoint"]["mode"]) == (0.0, "min")
    assert client.get_run(run).info.status == "FINISHED"

    logger = MLFlowLogger(tracking_uri=store, log_model=True, experiment_name="kept")
    fit(logger, tmp_path / "kept")
    # A checkpoint of the same name from another callback gets a version suffix.
    fit(logger, tmp_path / "other")
    assert names(logger.experiment, logger.version) == [
        *("starts", "step=2", "step=2-v1", "step=2-v1.json", "step=2.json")
    ]
    assert not (tmp_path / "mlruns").exists()


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ConfigurationError, match=r"MLFlowLogger\(synchronous='no'\): use True, False or None"):
        MLFlowLogger(synchronous="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"MLFlowLogger\(log_model='best'\): use True"):
        MLFlowLogger(log_model="best")  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow", reason="the extra leyden[mlflow] is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    return (tmp_path / "store").as_uri()


def call_before_uploads(client: Any, before: Any) -> None:
    """Makes a client call a function before it uploads a folder."""
    upload = client.log_artifacts

    def log_artifacts(*args: Any) -> None:
        before()
        upload(*args)

    client.log_artifacts = log_artifacts


def test_background_uploads_outlive_the_deletion_of_their_checkpoints(store: str, tmp_path: Path) -> None:
    logger, trained = MLFlowLogger(tracking_uri=store, log_model="all"), threading.Event()
    # The first upload begins after training, when two of the checkpoints are already deleted.
    call_before_uploads(logger.experiment, lambda: trained.wait(60) or pytest.fail("training waited for the upload"))
    ends = LambdaCallback(on_train_end=lambda trainer, module: trained.set())
    fit(logger, tmp_path / "saved", callbacks=[ends])
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step=2"]
    client, run = logger.experiment, logger.run_id
    assert [name for name in names(client, run) if name.endswith(".json")] == [
        *("step=1.json", "step=2.json"),
    ]
    folder = client.download_artifacts(run, "step=1", str(tmp_path))
    resumed = Trainer(**{**QUIET, "max_steps": 2})
    resumed.fit(BestAtTwo(), [torch.ones(2, 2)] * 4, ckpt_path=folder)
    assert resumed.global_step == 2


def test_a_failed_upload_raises_at_the_next_save_or_the_end(store: str, tmp_path: Path) -> None:
    def fails() -> None:
        raise OSError("no network")

    for steps in (1, 3):
        logger = MLFlowLogger(tracking_uri=store, log_model="all")
        call_before_uploads(logger.experiment, fails)
        with pytest.raises(LeydenError, match=r"MLFlowLogger could not upload the checkpoint .*: OSError: no network"):
            settings = {**QUIET, "enable_checkpointing": True, "logger": logger, "max_steps": steps}
            Trainer(**settings, callbacks=ModelCheckpoint(tmp_path / f"{steps}", every_n_train_steps=1)).fit(
                BestAtTwo(), [torch.ones(2, 2)] * 4
            )
        assert not [path for path in (tmp_path / f"{steps}").iterdir() if path.name.startswith(".")]


def test_synchronous_decides_which_calls_wait(store: str, tmp_path: Path) -> None:
    threads: list[threading.Thread] = []
    for synchronous in (True, False):
        logger = MLFlowLogger(tracking_uri=store, log_model="all", synchronous=synchronous)
        call_before_uploads(logger.experiment, lambda: threads.append(threading.current_thread()))
        fit(logger, tmp_path / f"{synchronous}")
        history = logger.experiment.get_metric_history(logger.run_id, "x")
        assert history == []
        for step in range(3):
            logger.log_metrics({"x": step / 2}, step)
        logger.save()
        history = logger.experiment.get_metric_history(logger.run_id, "x")
        assert sorted((row.step, row.value) for row in history) == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert threads[:2] == [threading.main_thread()] * 2
    assert threads[2:] and threading.main_thread() not in threads[2:]
    # Errors of MLflow's logging thread are raised by save().
    logger.experiment.delete_run(logger.run_id)
    logger.log_metrics({"x": 1.0}, 4)
    with pytest.raises(Exception, match="must be in 'active' lifecycle_stage"):
        logger.save()


def test_ids_match_mlflows_and_a_pickled_copy_continues_the_run(store: str) -> None:
    logger = MLFlowLogger("digits", tracking_uri=store, tags={"a": "1"})
    run = logger.experiment.get_run(logger.run_id)
    assert (logger.version, logger.experiment_id) == (run.info.run_id, run.info.experiment_id)
    copy = pickle.loads(pickle.dumps(logger))
    copy.log_metrics({"x": 1.0}, 1)
    assert (copy.run_id, copy.experiment_id) == (logger.run_id, logger.experiment_id)
    again = MLFlowLogger("other", tracking_uri=store, run_id=logger.run_id, tags={"b": "2"})
    assert again.experiment_id == logger.experiment_id
    tags = again.experiment.get_run(again.run_id).data.tags
    assert (tags["a"], tags["b"]) == ("1", "2")
    reader = MLFlowLogger("digits", tracking_uri=store)
    reader.is_writer = False
    assert (reader.run_id, reader.experiment_id, reader.version) == (None, None, None)


def test_a_changed_parameter_is_logged_as_a_tag(store: str) -> None:
    logger = MLFlowLogger(tracking_uri=store)
    logger.log_hyperparams({"lr": 0.1, "text": "x" * 7000, "optimizer": {"name": "sgd"}})
    logger.log_hyperparams({"lr": 0.1, "text": "x" * 7000})
    with pytest.warns(
        UserWarning, match=r"MLflow keeps the first value .* of lr are logged as tags of the run, such as changed\.lr"
    ):
        logger.log_hyperparams({"lr": 0.2, "width": 8})
    data = logger.experiment.get_run(logger.run_id).data
    assert (data.params["lr"], data.params["width"], data.params["optimizer/name"]) == ("0.1", "8", "sgd")
    assert data.tags["changed.lr"] == "0.2"
