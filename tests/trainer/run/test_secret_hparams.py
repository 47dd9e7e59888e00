"""Hyperparameters that look like secrets: no file of a run holds them, and a run that resumes still knows them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from models import QUIET, Line

from leyden import DataModule, Trainer
from leyden.callbacks import CSVLogger, Logger, ModelCheckpoint, TensorBoardLogger, WandbLogger
from leyden.checkpoint.folder import newest
from leyden.core.errors import ConfigurationError, LeydenError
from leyden.trainer.saved import identity

SECRET = "hunter2-of-mine"


class Service(Line):
    def __init__(self, api_key: str, width: int = 2, service: dict[str, Any] | None = None, pad_token: str = "<pad>"):
        super().__init__()
        self.save_hyperparameters()
        self.key, self.service = api_key, service


class Whole(Line):
    def __init__(self, config: argparse.Namespace) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.config = config


class Data(DataModule):
    def __init__(self, password: str = "", number: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return [torch.ones(2, 2)] * self.hparams.number


class Keeping(Logger):
    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any, metrics: Any = None) -> None:
        self.kept.update(params)


def fit(folder: Path, module: Any, data: Any = None, steps: int = 2, **given: Any) -> Trainer:
    arguments = {**QUIET, "default_root_dir": folder, "max_steps": steps, "enable_checkpointing": True}
    trainer = Trainer(**{**arguments, **given})
    trainer.fit(module, datamodule=data) if data is not None else trainer.fit(module, [torch.ones(2, 2)] * 4)
    return trainer


def service(**given: Any) -> Service:
    values = {"api_key": SECRET, "service": {"url": f"https://me:{SECRET}@host", "tokens": [1], "secret": SECRET}}
    return Service(**{**values, **given})


def checkpoint_of(folder: Path) -> Path:
    found = newest(folder / "saved")
    assert found is not None
    return Path(getattr(found, "path", found))


def files_with(folder: Path, text: str) -> list[str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path.name for path in paths if text.encode() in path.read_bytes())


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_no_file_and_no_logger_gets_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    os.umask(0o022)
    kept = Keeping()
    loggers = [
        CSVLogger(tmp_path / "csv"),
        TensorBoardLogger(tmp_path / "tb"),
        WandbLogger(save_dir=tmp_path, offline=True),
        kept,
    ]
    module, data = service(), Data(SECRET)
    fit(tmp_path, module, data, logger=loggers, callbacks=[ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1)])
    wandb.finish()
    assert module.key == SECRET and module.hparams.api_key == SECRET and data.hparams.password == SECRET
    assert files_with(tmp_path, SECRET) == []
    # The other values are there, so the files were searched in the form in which they are written.
    assert {"hparams.json", "hparams.yaml", "identity.json"} <= set(files_with(tmp_path, "pad_token"))
    assert kept.kept["api_key"] == kept.kept["password"] == "***masked***"
    assert kept.kept["service"] == {"url": "https://***masked***@host", "tokens": [1], "secret": "***masked***"}
    assert (kept.kept["width"], kept.kept["pad_token"], kept.kept["number"]) == (2, "<pad>", 4)
    saved = checkpoint_of(tmp_path)
    private = [saved / "hparams.json", saved / "identity.json", *tmp_path.rglob("starts/*/*")]
    private += [*tmp_path.rglob("version_0/hparams.json"), *tmp_path.rglob("version_0/hparams.yaml")]
    assert len(private) >= 9 and {mode(path) for path in private} == {0o600}
    assert {mode(saved / name) for name in ("manifest.json", "model.safetensors", "progress.json")} == {0o644}


def test_a_checkpoint_without_secrets_stays_readable_for_others(tmp_path: Path) -> None:
    os.umask(0o022)
    fit(tmp_path, Whole(argparse.Namespace(num_tokens=3)), callbacks=[ModelCheckpoint(tmp_path / "saved")])
    saved = checkpoint_of(tmp_path)
    assert {mode(path) for path in saved.iterdir()} == {0o644}


@pytest.mark.parametrize("earlier", [False, True], ids=["this version", "a version that saved secrets"])
def test_a_resumed_run_is_recognized_by_the_digest(
    earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        if earlier:
            patched.setattr(identity, "_digested", lambda values: values)
        fit(tmp_path, service(), Data(SECRET), callbacks=[ModelCheckpoint(tmp_path / "saved")])
    assert files_with(tmp_path, SECRET) == (["identity.json"] if earlier else [])
    again = {"resume": "auto", "steps": 4, "callbacks": [ModelCheckpoint(tmp_path / "saved")]}
    assert fit(tmp_path, service(), Data(SECRET), **again).ckpt_path is not None
    other = {**again, "steps": 6, "callbacks": [ModelCheckpoint(tmp_path / "saved")]}
    with pytest.raises(
        LeydenError, match=r"hyperparameter api_key was a secret with the digest \w{8} and is"
    ) as caught:
        fit(tmp_path, service(api_key="another-of-mine"), Data(SECRET), **other)
    assert SECRET not in str(caught.value) and "another-of-mine" not in str(caught.value)


def test_load_from_checkpoint_asks_for_the_secret(tmp_path: Path) -> None:
    fit(tmp_path, service(), Data(SECRET), logger=CSVLogger(tmp_path), callbacks=[ModelCheckpoint(tmp_path / "saved")])
    saved, [file] = checkpoint_of(tmp_path), tmp_path.rglob("version_0/hparams.yaml")
    for options in ({}, {"hparams_file": file}):
        with pytest.raises(ConfigurationError, match=r"api_key, service\.url, service\.secret.*api_key=…, service=…"):
            Service.load_from_checkpoint(saved, **options)
        with pytest.raises(ConfigurationError, match=r"Service needs api_key, which.*, api_key=…\)"):
            Service.load_from_checkpoint(saved, service=None, **options)
        module = Service.load_from_checkpoint(saved, api_key="mine", service=None, **options)
        assert (module.key, module.service, module.hparams.width) == ("mine", None, 2)
    with pytest.raises(ConfigurationError, match=r"Data needs password, .*password=…"):
        Data.load_from_checkpoint(saved)
    assert Data.load_from_checkpoint(saved, password="mine").hparams == {"password": "mine", "number": 4}


def test_load_from_checkpoint_asks_for_a_secret_within_the_single_argument(tmp_path: Path) -> None:
    config = argparse.Namespace(api_key=SECRET, width=3)
    fit(tmp_path, Whole(config), callbacks=[ModelCheckpoint(tmp_path / "saved")])
    saved = checkpoint_of(tmp_path)
    with pytest.raises(ConfigurationError, match=r"Whole needs api_key, which.*api_key=…"):
        Whole.load_from_checkpoint(saved)
    assert Whole.load_from_checkpoint(saved, api_key="mine").config == argparse.Namespace(api_key="mine", width=3)
    assert Whole.load_from_checkpoint(saved, config=config).config is config
