"""URLs where a path is expected: what cannot take one refuses it, before a run and before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares

from leyden import Accelerator, ConfigurationError, DataModule, Trainer, TrainModule
from leyden.callbacks import (
    CometLogger,
    CSVLogger,
    MLFlowLogger,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    SpikeDetection,
    TensorBoardLogger,
    WandbLogger,
)
from leyden.checkpoint.merge import merge
from leyden.cli.main import main
from leyden.strategies import DeepSpeedStrategy
from leyden.trainer.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from leyden.utils import ProfileKwargs, ProjectConfiguration

URL = "s3://bucket/run"
NET = torch.nn.Linear(2, 1)


def fitted() -> Trainer:
    trainer = Trainer(**{**QUIET, "max_epochs": 1})
    trainer.fit(Squares(torch.nn.Linear(2, 1)), [torch.ones(1, 2)])
    return trainer


BUCKETS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda url: Trainer(**QUIET).fit(Squares(NET), [torch.ones(1, 2)], ckpt_path=url),
    "test": lambda url: Trainer(**QUIET).test(Squares(NET), [torch.ones(1, 2)], ckpt_path=url),
    "TrainModule.load_from_checkpoint": TrainModule.load_from_checkpoint,
    "DataModule.load_from_checkpoint": DataModule.load_from_checkpoint,
    "merge": lambda url: merge(url, "model.safetensors"),
    "load_state": lambda url: Accelerator(cpu=True).load_state(url),
    "Trainer": lambda url: Trainer(default_root_dir=url),
    "ModelCheckpoint": ModelCheckpoint,
    "OnExceptionCheckpoint": OnExceptionCheckpoint,
    "save_checkpoint": lambda url: fitted().save_checkpoint(url),
    "project_dir": lambda url: ProjectConfiguration(project_dir=url),
    "Accelerator": lambda url: Accelerator(project_dir=url),
    "save_state": lambda url: Accelerator(cpu=True).save_state(url),
    "to_yaml": lambda url: ModelCheckpoint().to_yaml(url),
}
"""These also take a URL in a bucket."""
CALLS: dict[str, Callable[[Any], Any]] = {
    "SpikeDetection": lambda url: SpikeDetection(exclude_batches_path=url),
    "CSVLogger": CSVLogger,
    "TensorBoardLogger": TensorBoardLogger,
    "TensorBoardLogger, sub_dir": lambda url: TensorBoardLogger(sub_dir=url),
    "WandbLogger": lambda url: WandbLogger(save_dir=url),
    "MLFlowLogger": lambda url: MLFlowLogger(save_dir=url),
    "SimpleProfiler": SimpleProfiler,
    "SimpleProfiler, filename": lambda url: SimpleProfiler(filename=url),
    "PyTorchProfiler": PyTorchProfiler,
    "CometLogger": lambda url: CometLogger(save_dir=url),
    "WandbLogger, dir": lambda url: WandbLogger(dir=url),
    "AdvancedProfiler": AdvancedProfiler,
    "ProfileKwargs": lambda url: ProfileKwargs(output_trace_dir=url),
    "DeepSpeedStrategy": lambda url: DeepSpeedStrategy(stage=3, offload_parameters="nvme", nvme_path=url),
    "DeepSpeedStrategy, config": lambda url: DeepSpeedStrategy(config=url),
    "to_onnx": lambda url: Squares(NET).to_onnx(url, torch.ones(1, 2)),
    "logging_dir": lambda url: ProjectConfiguration(logging_dir=url),
    "save_model": lambda url: Accelerator(cpu=True).save_model(NET, url),
    "save": lambda url: Accelerator(cpu=True).save({}, url),
}


@pytest.mark.parametrize("url", [URL, "file:///tmp/run", Path(URL)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_url_is_refused(name: str, url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"(s3|file):/.* is a URL"):
        CALLS[name](url)
    assert not [path for path in tmp_path.iterdir() if ":" in path.name]


@pytest.mark.parametrize("url", ["https://host/run", "file:///tmp/run", Path(URL)], ids=str)
@pytest.mark.parametrize("name", BUCKETS)
def test_a_url_that_is_in_no_bucket_is_refused(
    name: str, url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"(s3|file|https):/.* is a URL"):
        BUCKETS[name](url)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("merge", "memory://bucket/one", URL),
        ("bisect", URL, "."),
        ("replay", URL, "--step", "1"),
        ("convert", "ftp://bucket/run"),
        ("config", "--config_file", URL),
        ("config", "default", "--config_file", URL),
        ("launch", "--config_file", URL, "train.py"),
        ("launch", "--cpu", "--num_processes", "2", "--log_dir", URL, "train.py"),
    ],
    ids=" ".join,
)
def test_a_command_refuses_a_url(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) != 0
    captured = capsys.readouterr()
    assert re.search("(s3|ftp):/+bucket/run' is a URL", captured.out + captured.err)
    assert not list(tmp_path.iterdir())


def test_a_drive_of_windows_and_a_colon_are_no_url(tmp_path: Path) -> None:
    assert ModelCheckpoint(tmp_path / "lr:0.1").dirpath == str(tmp_path / "lr:0.1")
    assert ModelCheckpoint("C:/runs").dirpath
