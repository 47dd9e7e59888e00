"""Wrong arguments of the Trainer, its callbacks and precisions: one error from the constructor, which names the fix."""

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
from leyden.strategies.precision import HalfPrecision, MixedPrecision

TABLE: list[tuple[str, str, Callable[[Path], Any]]] = []


def argument(name: str, match: str, **arguments: Any) -> None:
    """A mistake that the Trainer's constructor finds."""
    settings = {**QUIET, "accelerator": "auto", **arguments}
    TABLE.append((name, match, lambda folder: Trainer(**{"default_root_dir": folder, **settings})))


def mistake(match: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    """A mistake that another constructor finds."""

    def add(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        TABLE.append((function.__name__, match, function))
        return function

    return add


argument("precision unknown", r"precision='bf61' is not known\. Did you mean 'bf16'\?", precision="bf61")
argument("precision twice", r"more than once.*set it once", precision="bf16", plugins=MixedPrecision("16"))
argument("plugin unknown", r"plugins.*pass a Precision", plugins=object())
argument("strategy unknown", r"strategy='single_devise'.*Did you mean 'single_device'\?", strategy="single_devise")
argument("accelerator unknown", r"accelerator='cpuu' is not known\. Did you mean 'cpu'\?", accelerator="cpuu")
argument(
    "devices several", r"'single_device' contradicts devices=3.*devices=1.*'ddp'", devices=3, strategy="single_device"
)
argument("devices twice", r"devices=\[1, 1\] names a device twice", devices=[1, 1])
argument("devices zero", r"devices=0: use a whole number from 1", devices=0)
argument("devices a word", r"devices='one': use a whole number", devices="one")
argument("devices empty", r"devices=\[\].*devices=1", devices=[])
argument("num_nodes single", r"num_nodes=2.*num_nodes=1.*'ddp'", num_nodes=2, strategy="single_device")
argument("max_steps negative", r"max_steps=-5: use a whole number from -1", max_steps=-5)
argument("max_epochs a float", r"max_epochs=1\.5: use a whole number", max_epochs=1.5)
argument("max_epochs a bool", r"max_epochs=True: use a whole number", max_epochs=True)
argument("min_steps negative", r"min_steps=-1: use a whole number from 0", min_steps=-1)
argument("max_time a word", r"max_time='1h'.*DD:HH:MM:SS", max_time="1h")
argument("max_time unit", r"max_time.*'hour'.*Did you mean 'hours'\?", max_time={"hour": 1})
argument("max_time a number", r"max_time=60.*timedelta", max_time=60)
argument("max_time negative", r"max_time.*negative", max_time=timedelta(seconds=-1))
argument("limit above one", r"limit_train_batches=1\.5.*limit_train_batches=1 for a number", limit_train_batches=1.5)
argument("limit negative", r"limit_val_batches=-1: use a whole number of batches from 0", limit_val_batches=-1)
argument("limit a word", r"limit_test_batches='all': use a fraction", limit_test_batches="all")
argument("limit nan", r"limit_predict_batches=nan", limit_predict_batches=float("nan"))
argument("val_check_interval zero", r"val_check_interval=0: use a whole number of batches from 1", val_check_interval=0)
argument("val_check_interval fraction", r"val_check_interval=1\.5: a float is a fraction", val_check_interval=1.5)
argument("val_check_interval time", r"val_check_interval='30s'.*DD:HH:MM:SS", val_check_interval="30s")
argument("check_val None", r"set val_check_interval to a whole number", check_val_every_n_epoch=None)
argument("check_val zero", r"check_val_every_n_epoch=0: use a whole number from 1", check_val_every_n_epoch=0)
argument("accumulation zero", r"accumulate_grad_batches=0: use a whole number from 1", accumulate_grad_batches=0)
argument(
    "accumulation twice",
    r"accumulation is set more than once",
    accumulate_grad_batches=2,
    callbacks=GradientAccumulation(4),
)
argument("clip value", r"gradient_clip_val='1': use a number", gradient_clip_val="1")
argument("clip nan", r"gradient_clip_val=nan: use a number", gradient_clip_val=float("nan"))
argument("clip algorithm", r"'nrom' is not known\. Did you mean 'norm'\?", gradient_clip_algorithm="nrom")
argument("profiler unknown", r"'simpel' is not known\. Did you mean 'simple'\?", profiler="simpel")
argument("profiler of no kind", r"profiler=3: use 'simple'", profiler=3)
argument("resume", r"resume='last': use 'auto', or None.*fit\(ckpt_path=…\)", resume="last")
argument("deterministic", r"deterministic='yes': use True, False or 'warn'", deterministic="yes")
argument("a word for a bool", r"detect_anomaly='no': use True or False", detect_anomaly="no")
argument(
    "logger a word",
    r"logger='csv': a str is not a logger: use True, False, or loggers such as CSVLogger\(\)",
    logger="csv",
)
argument("root dir a URL", r"writes only to local and mounted folders", default_root_dir="s3://bucket/run")
argument("barebones and a logger", r"barebones=True disables logger.*choose one", barebones=True, logger=True)
argument("a callback's class", r"the class EarlyStopping: pass an instance, EarlyStopping\(\)", callbacks=EarlyStopping)
argument("no callback", r"holds an int, which is not a Callback: subclass leyden\.Callback", callbacks=[1])
argument("no precision", r"precision=None_: use one of", precision=type("N", (), {"__repr__": lambda self: "None_"})())
argument("an argument's near name", r"Trainer has no argument 'max_epoch'\. Did you mean 'max_epochs'\?", max_epoch=1)
argument("epochs", r"Trainer has no argument 'epochs': use max_epochs\.", epochs=1)
argument("gpus", r"Trainer has no argument 'gpus': use devices, with accelerator='gpu'\.", gpus=1)
argument("a strategy that is near several", r"Did you mean 'ddp'\? Similar: hsdp, fsdp, tp\.$", strategy="dp")
argument("a strategy that is near none", r"Known names include auto, .*xla\.$", strategy="horovod")


def of_lightning(name: str, *bases: type, module: str = "lightning.pytorch.anything") -> Any:
    """A class as Lightning's own, which is not installed here."""
    return type(name, bases, {"__module__": module})


OURS = r"it belongs to PyTorch Lightning\. Use Leyden's instead, `from {}`\.$"
argument(
    "a callback of Lightning's",
    "holds an EarlyStopping, which.*" + OURS.format("leyden.callbacks import EarlyStopping"),
    callbacks=of_lightning("EarlyStopping")(),
)
argument(
    "a callback that inherits from Lightning's",
    r"PyTorch Lightning's Callback\. Inherit from Leyden's instead, `from leyden import Callback`\.$",
    callbacks=of_lightning("Mine", of_lightning("Callback"), module="train")(),
)
argument(
    "a callback that only Lightning has",
    r"PyTorch Lightning and has no counterpart in Leyden\. See docs/from-lightning\.md\.$",
    callbacks=of_lightning("SpikeDetection", module="pytorch_lightning.callbacks")(),
)
argument(
    "a logger of Lightning's", OURS.format("leyden.callbacks import CSVLogger"), logger=of_lightning("CSVLogger")()
)
argument(
    "a strategy of Lightning's",
    OURS.format("leyden.strategies import DDPStrategy"),
    strategy=of_lightning("DDPStrategy")(),
)
argument(
    "a plugin of Lightning's",
    OURS.format("leyden.strategies.precision import MixedPrecision"),
    plugins=of_lightning("MixedPrecision")(),
)
argument(
    "a profiler of Lightning's",
    OURS.format("leyden.trainer.profilers import SimpleProfiler"),
    profiler=of_lightning("SimpleProfiler")(),
)
ONE = Callback()
argument("a callback twice", r"the same callback twice: pass it once", callbacks=[ONE, ONE])
argument("checkpointing off and on", r"enable_checkpointing=False.*choose one", callbacks=ModelCheckpoint())


@mistake(r"there is no GPU here|torch finds no GPU on this machine\. Use accelerator='auto' or 'cpu'")
def an_accelerator_that_is_not_there(folder: Path) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has a GPU")
    Trainer(accelerator="gpu")


@mistake(r"GradientAccumulation: 0 is not a number of batches")
def an_accumulation_of_none(folder: Path) -> None:
    GradientAccumulation(0)


@mistake(r"give a dict such as \{0: 4\}")
def a_schedule_that_is_a_number(folder: Path) -> None:
    GradientAccumulationScheduler(4)  # type: ignore[arg-type]


@mistake(r"MixedPrecision\(dtype='fp16'\) is not valid\. Use '16' or 'bf16'")
def a_dtype_of_mixed_precision(folder: Path) -> None:
    MixedPrecision("fp16")  # type: ignore[arg-type]


@mistake(r"HalfPrecision\(dtype='32'\) is not valid\. Use '16' or 'bf16'")
def a_dtype_of_half_precision(folder: Path) -> None:
    HalfPrecision("32")  # type: ignore[arg-type]


@mistake(r"mode='mni'.*Did you mean 'min'\?")
def an_early_stopping_mode(folder: Path) -> None:
    EarlyStopping("val_loss", mode="mni")  # type: ignore[arg-type]


@mistake(r"give only one of the three")
def two_triggers_of_a_checkpoint(folder: Path) -> None:
    ModelCheckpoint(every_n_train_steps=2, every_n_epochs=1)


@mistake(r"Lightning's LightningModule\. Inherit from Leyden's instead, `from leyden import TrainModule`\.$")
def a_module_of_lightning(folder: Path) -> None:
    module = of_lightning("Mine", of_lightning("LightningModule", torch.nn.Module), module="train")()
    Trainer(logger=False, enable_checkpointing=False).fit(module, [1])


@mistake(OURS.format("leyden import DataModule"))
def a_datamodule_of_lightning(folder: Path) -> None:
    Trainer(logger=False, enable_checkpointing=False).fit(
        TrainModule(), datamodule=of_lightning("LightningDataModule")()
    )


@mistake(r"datamodule is a list: pass an instance of a leyden\.DataModule")
def a_loader_for_a_datamodule(folder: Path) -> None:
    Trainer(logger=False, enable_checkpointing=False).validate(TrainModule(), datamodule=[1])  # type: ignore[arg-type]


@mistake(r"Trainer\.fit has no argument 'epochs': use max_epochs\.")
def a_name_that_fit_does_not_know(folder: Path) -> None:
    Trainer(logger=False, enable_checkpointing=False).fit(TrainModule(), [1], epochs=3)  # type: ignore[arg-type]


@mistake(r"Trainer\.fit has no argument 'train_dataloader'\. Did you mean 'train_dataloaders'\?")
def a_near_name_of_fit(folder: Path) -> None:
    Trainer(logger=False, enable_checkpointing=False).fit(TrainModule(), train_dataloader=[1])  # type: ignore[arg-type]


@mistake(r"Trainer takes its arguments by name")
def arguments_by_place(folder: Path) -> None:
    Trainer(10)  # type: ignore[misc]


@pytest.mark.parametrize(("match", "make"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_a_bad_argument_raises_one_clear_error(tmp_path: Path, match: str, make: Callable[[Path], Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make(tmp_path)
    assert re.search(match, str(caught.value), re.DOTALL), caught.value
    assert [*tmp_path.iterdir()] == []
