"""MLFlowLogger, with MLflow's own folder of files, read back by its client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line

from leyden import Trainer
from leyden.callbacks import MLFlowLogger, ModelCheckpoint
from leyden.strategies.errors import ConfigurationError


class Worse(Line):
    """Its metric is the best after the second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("distance", abs(self.trainer.global_step - 1.0))
        return super().training_step(batch, batch_idx)


def fit(logger: MLFlowLogger, folder: Path, **arguments: Any) -> Trainer:
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, monitor="distance", **arguments)
    given = {**QUIET, "enable_checkpointing": True, "logger": logger, "max_steps": 3}
    trainer = Trainer(**given, callbacks=checkpoint)
    trainer.fit(Worse(), [torch.ones(2, 2)] * 4)
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
    resumed.fit(Worse(), [torch.ones(2, 2)] * 4, ckpt_path=folder)
    assert resumed.global_step == 5
    metadata = json.loads(Path(client.download_artifacts(run, "models/step=2.json", str(tmp_path))).read_text())
    assert (metadata["score"], metadata["ModelCheckpoint"]["mode"]) == (0.0, "min")
    assert client.get_run(run).info.status == "FINISHED"

    logger = MLFlowLogger(tracking_uri=store, log_model=True, experiment_name="kept")
    fit(logger, tmp_path / "kept")
    # Another callback's checkpoint of the same name keeps its own.
    fit(logger, tmp_path / "other")
    assert names(logger.experiment, logger.version) == [
        *("starts", "step=2", "step=2-v1", "step=2-v1.json", "step=2.json")
    ]
    assert not (tmp_path / "mlruns").exists()


def test_a_log_model_without_meaning_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"MLFlowLogger\(log_model='best'\): use True"):
        MLFlowLogger(log_model="best")  # type: ignore[arg-type]
