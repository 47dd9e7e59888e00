"""Invalid arguments of the Trainer, callbacks and precisions: the constructor raises one error, which names the fix."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET

from leyden import Callback, ConfigurationError, Trainer, TrainModule
from leyden.callbacks import EarlyStopping, GradientAccumulation, GradientAccumulationScheduler, ModelCheckpoint
from leyden.strategies import ModelParallelStrategy
from leyden.strategies.precision import HalfPrecision, MixedPrecision

TABLE: list[tuple[str, str, Callable[[Path], Any]]] = []


def argument(name: str, match: str, **arguments: Any) -> None:
    """Adds a mistake that the Trainer's constructor rejects."""
    settings = {**QUIET, "accelerator": "auto", **arguments}
    TABLE.append((name, match, lambda folder: Trainer(**{"default_root_dir": folder, **settings})))


def mistake(match: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    """Adds a mistake that another call rejects."""

    def add(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        TABLE.append((function.__name__, match, function))
        return function

    return add


argument("unknown precision", r"precision='bf61' is not known\. Did you mean 'bf16'\?", precision="bf61")
argument("two precisions", r"more than once.*set it once", precision="bf16", plugins=MixedPrecision("16"))
argument("unknown plugin", r"plugins.*pass a Precision", plugins=object())
argument("misspelled strategy", r"strategy='single_devise'.*Did you mean 'single_device'\?", strategy="single_devise")
argument("misspelled accelerator", r"accelerator='cpuu' is not known\. Did you mean 'cpu'\?", accelerator="cpuu")
argument(
    "several devices on one-device strategy",
    r"'single_device' contradicts devices=3.*devices=1.*'ddp'",
    devices=3,
    strategy="single_device",
)
argument("repeated device", r"devices=\[1, 1\] names a device twice", devices=[1, 1])
argument("zero devices", r"devices=0: use a whole number from 1", devices=0)
argument("devices as a string", r"devices='one': use a whole number", devices="one")
argument("no devices", r"devices=\[\].*devices=1", devices=[])
argument(
    "several nodes on one-device strategy", r"num_nodes=2.*num_nodes=1.*'ddp'", num_nodes=2, strategy="single_device"
)
argument("negative max_steps", r"max_steps=-5: use a whole number from -1", max_steps=-5)
argument("max_epochs as a float", r"max_epochs=1\.5: use a whole number", max_epochs=1.5)
argument("max_epochs as a bool", r"max_epochs=True: use a whole number", max_epochs=True)
argument("negative min_steps", r"min_steps=-1: use a whole number from 0", min_steps=-1)
argument("max_time in an unknown format", r"max_time='1h'.*DD:HH:MM:SS", max_time="1h")
argument("max_time in a misspelled unit", r"max_time.*'hour'.*Did you mean 'hours'\?", max_time={"hour": 1})
argument("max_time as a number", r"max_time=60.*timedelta", max_time=60)
argument("negative max_time", r"max_time.*negative", max_time=timedelta(seconds=-1))
argument(
    "limit as a fraction above one",
    r"limit_train_batches=1\.5.*limit_train_batches=1 for a number",
    limit_train_batches=1.5,
)
argument("negative limit", r"limit_val_batches=-1: use a whole number of batches from 0", limit_val_batches=-1)
argument("limit as a string", r"limit_test_batches='all': use a fraction", limit_test_batches="all")
argument("limit of nan", r"limit_predict_batches=nan", limit_predict_batches=float("nan"))
argument(
    "val_check_interval of zero", r"val_check_interval=0: use a whole number of batches from 1", val_check_interval=0
)
argument(
    "val_check_interval as a fraction above one",
    r"val_check_interval=1\.5: a float is a fraction",
    val_check_interval=1.5,
)
argument(
    "val_check_interval in an unknown time format", r"val_check_interval='30s'.*DD:HH:MM:SS", val_check_interval="30s"
)
argument("check_val_every_n_epoch of None", r"set val_check_interval to a whole number", check_val_every_n_epoch=None)
argument(
    "check_val_every_n_epoch of zero",
    r"check_val_every_n_epoch=0: use a whole number from 1",
    check_val_every_n_epoch=0,
)
argument(
    "accumulate_grad_batches of zero",
    r"accumulate_grad_batches=0: use a whole number from 1",
    accumulate_grad_batches=0,
)
argument(
    "accumulation set twice",
    r"accumulation is set more than once",
    accumulate_grad_batches=2,
    callbacks=GradientAccumulation(4),
)
argument("gradient_clip_val as a string", r"gradient_clip_val='1': use a number", gradient_clip_val="1")
argument("gradient_clip_val of nan", r"gradient_clip_val=nan: use a number", gradient_clip_val=float("nan"))
argument("misspelled clip algorithm", r"'nrom' is not known\. Did you mean 'norm'\?", gradient_clip_algorithm="nrom")
argument("misspelled profiler", r"'simpel' is not known\. Did you mean 'simple'\?", profiler="simpel")
argument("profiler of the wrong type", r"profiler=3: use 'simple'", profiler=3)
argument("invalid resume", r"resume='last': use 'auto', or None.*fit\(ckpt_path=…\)", resume="last")
argument("invalid deterministic", r"deterministic='yes': use True, False or 'warn'", deterministic="yes")
argument("string for a bool", r"detect_anomaly='no': use True or False", detect_anomaly="no")
argument(
    "logger as a string",
    r"logger='csv': a str is not a logger: use True, False, or loggers such as CSVLogger\(\)",
    logger="csv",
)
argument("URL as default_root_dir", r"default_root_dir='ftp://host/run' is a URL", default_root_dir="ftp://host/run")
argument("barebones with a logger", r"barebones=True disables logger.*choose one", barebones=True, logger=True)
argument(
    "callback class instead of an instance",
    r"the class EarlyStopping: pass an instance, EarlyStopping\(\)",
    callbacks=EarlyStopping,
)
argument(
    "callback of the wrong type", r"holds an int, which is not a Callback: subclass leyden\.Callback", callbacks=[1]
)
argument(
    "precision of the wrong type",
    r"precision=None_: use one of",
    precision=type("N", (), {"__repr__": lambda self: "None_"})(),
)
argument("misspelled argument", r"Trainer has no argument 'max_epoch'\. Did you mean 'max_epochs'\?", max_epoch=1)
argument("epochs for max_epochs", r"Trainer has no argument 'epochs': use max_epochs\.", epochs=1)
argument("gpus for devices", r"Trainer has no argument 'gpus': use devices, with accelerator='gpu'\.", gpus=1)
argument("strategy name close to several", r"Did you mean 'ddp'\? Similar: hsdp, fsdp, tp, cp\.$", strategy="dp")
argument("strategy name close to none", r"Known names include auto, .*xla\.$", strategy="horovod")


def lightning_class(name: str, *bases: type, module: str = "lightning.pytorch.anything") -> Any:
    """Returns a stand-in for a class of Lightning, which is not installed."""
    return type(name, bases, {"__module__": module})


USE_LEYDENS = r"it belongs to PyTorch Lightning\. Use Leyden's instead, `from {}`\.$"
argument(
    "Lightning callback",
    "holds an EarlyStopping, which.*" + USE_LEYDENS.format("leyden.callbacks import EarlyStopping"),
    callbacks=lightning_class("EarlyStopping")(),
)
argument(
    "subclass of a Lightning callback",
    r"PyTorch Lightning's Callback\. Inherit from Leyden's instead, `from leyden import Callback`\.$",
    callbacks=lightning_class("Mine", lightning_class("Callback"), module="train")(),
)
argument(
    "Lightning callback without a counterpart",
    r"PyTorch Lightning and has no counterpart in Leyden\. See docs/from-lightning\.md\.$",
    callbacks=lightning_class("SpikeDetection", module="pytorch_lightning.callbacks")(),
)
argument(
    "Lightning logger", USE_LEYDENS.format("leyden.callbacks import CSVLogger"), logger=lightning_class("CSVLogger")()
)
argument(
    "Lightning strategy",
    USE_LEYDENS.format("leyden.strategies import DDPStrategy"),
    strategy=lightning_class("DDPStrategy")(),
)
argument(
    "Lightning plugin",
    USE_LEYDENS.format("leyden.strategies.precision import MixedPrecision"),
    plugins=lightning_class("MixedPrecision")(),
)
argument(
    "Lightning profiler",
    USE_LEYDENS.format("leyden.trainer.profilers import SimpleProfiler"),
    profiler=lightning_class("SimpleProfiler")(),
)
CALLBACK = Callback()
argument("same callback twice", r"the same callback twice: pass it once", callbacks=[CALLBACK, CALLBACK])
argument(
    "ModelCheckpoint with checkpointing disabled",
    r"enable_checkpointing=False.*choose one",
    callbacks=ModelCheckpoint(),
)


@mistake(r"there is no GPU here|torch finds no GPU on this machine\. Use accelerator='auto' or 'cpu'")
def unavailable_accelerator(folder: Path) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has a GPU")
    Trainer(accelerator="gpu")


@mistake(r"GradientAccumulation: 0 is not a number of batches")
def accumulation_of_zero(folder: Path) -> None:
    GradientAccumulation(0)


@mistake(r"give a dict such as \{0: 4\}")
def schedule_as_a_number(folder: Path) -> None:
    GradientAccumulationScheduler(4)  # type: ignore[arg-type]


@mistake(r"MixedPrecision\(dtype='fp16'\) is not valid\. Use '16-mixed' or 'bf16-mixed'")
def unknown_mixed_precision_dtype(folder: Path) -> None:
    MixedPrecision("fp16")  # type: ignore[arg-type]


@mistake(r"HalfPrecision\(dtype='32'\) is not valid\. Use '16-true' or 'bf16-true'")
def unknown_half_precision_dtype(folder: Path) -> None:
    HalfPrecision("32")  # type: ignore[arg-type]


@mistake(r"mode='mni'.*Did you mean 'min'\?")
def misspelled_early_stopping_mode(folder: Path) -> None:
    EarlyStopping("val_loss", mode="mni")  # type: ignore[arg-type]


@mistake(r"give only one of the three")
def two_checkpoint_triggers(folder: Path) -> None:
    ModelCheckpoint(every_n_train_steps=2, every_n_epochs=1)


@mistake(r"Lightning's LightningModule\. Inherit from Leyden's instead, `from leyden import TrainModule`\.$")
def lightning_module(folder: Path) -> None:
    module = lightning_class("Mine", lightning_class("LightningModule", torch.nn.Module), module="train")()
    Trainer(logger=False, enable_checkpointing=False).fit(module, [1])


@mistake(USE_LEYDENS.format("leyden import DataModule"))
def lightning_datamodule(folder: Path) -> None:
    Trainer(logger=False, enable_checkpointing=False).fit(
        TrainModule(), datamodule=lightning_class("LightningDataModule")()
    )


@mistake(r"datamodule is a list: pass an instance of a leyden\.DataModule")
def loader_as_datamodule(folder: Path) -> None:
    Trainer(logger=False, enable_checkpointing=False).validate(TrainModule(), datamodule=[1])  # type: ignore[arg-type]


@mistake(r"Trainer\.fit has no argument 'epochs': use max_epochs\.")
def unknown_fit_argument(folder: Path) -> None:
    Trainer(logger=False, enable_checkpointing=False).fit(TrainModule(), [1], epochs=3)  # type: ignore[arg-type]


@mistake(r"Trainer\.fit has no argument 'train_dataloader'\. Did you mean 'train_dataloaders'\?")
def misspelled_fit_argument(folder: Path) -> None:
    Trainer(logger=False, enable_checkpointing=False).fit(TrainModule(), train_dataloader=[1])  # type: ignore[arg-type]


@mistake(r"Trainer takes its arguments by name")
def positional_arguments(folder: Path) -> None:
    Trainer(10)  # type: ignore[misc]


@mistake(r"ep=2 is an argument of MeshStrategy.*leave out ep, or use MeshStrategy")
def experts_of_a_model_parallel_strategy(folder: Path) -> None:
    ModelParallelStrategy(ep=2)


@mistake(r"cp=2 is an argument of MeshStrategy.*leave out cp, or use MeshStrategy")
def sequences_of_a_model_parallel_strategy(folder: Path) -> None:
    ModelParallelStrategy(cp=2)


@pytest.mark.parametrize(("match", "make"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_a_bad_argument_raises_one_clear_error(tmp_path: Path, match: str, make: Callable[[Path], Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make(tmp_path)
    assert re.search(match, str(caught.value), re.DOTALL), caught.value
    assert [*tmp_path.iterdir()] == []
