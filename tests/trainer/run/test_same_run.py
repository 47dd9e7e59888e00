"""ckpt_path="auto" resumes only the same run; another run's checkpoint must be requested by its path."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import forge
from models import Line, sgd
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from leyden import ConfigurationError, DataModule, Trainer
from leyden.callbacks import ModelCheckpoint
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.reader import CheckpointReader
from leyden.trainer.saved.identity import Identity, plain

Optimizers = Callable[["Net"], Any]


class Net(Line):
    """A trial of a sweep, whose hyperparameters and optimizers a test chooses."""

    def __init__(self, optimizers: Optimizers = sgd, **hparams: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.optimizers_of = optimizers
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self)


class Other(Net): ...


class Data(DataModule):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return [torch.ones(self.hparams.size, 2)] * 3


def fitted(
    folder: Path, module: Net, ckpt_path: Any = "auto", epochs: int = 1, shared: Path | None = None, **fit: Any
) -> Trainer:
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    trainer = Trainer(**quiet, max_epochs=epochs, default_root_dir=folder, callbacks=ModelCheckpoint(shared))
    trainer.fit(module, datamodule=fit.pop("datamodule", None) or Data(), ckpt_path=ckpt_path, **fit)
    return trainer


def with_sgd(**options: Any) -> Optimizers:
    return lambda net: SGD(net.parameters(), **{"lr": 0.1, **options})


def two_optimizers(net: Net) -> Any:
    return [SGD([net.layer.weight], lr=0.1), SGD([net.layer.bias], lr=0.1)]


def with_two_groups(net: Net) -> Any:
    return SGD([{"params": [net.layer.weight]}, {"params": [net.layer.bias], "lr": 1.0}], lr=0.1)


DIFFERENT = {
    "a hyperparameter": (Net(rate=0.1), Net(rate=0.001), "the hyperparameter rate was 0.1 and is 0.001"),
    "a nested hyperparameter": (
        Net(net={"width": [1, 2]}),
        Net(net={"width": [1, 3]}),
        r"net\['width'\]\[1\] was 2 and is 3",
    ),
    "a new hyperparameter": (Net(), Net(deep=True), "the hyperparameter deep was absent and is True"),
    "a tensor": (Net(of=torch.ones(2)), Net(of=torch.zeros(2)), r"of was a tensor float32 \(2,\) \[1.0, 1.0\] and is"),
    "a large tensor": (Net(of=torch.ones(99)), Net(of=torch.zeros(99)), r"of was a tensor .* with the digest"),
    "the module's class": (Net(), Other(), "the module's class was 'Net' and is 'Other'"),
    "a learning rate": (Net(with_sgd()), Net(with_sgd(lr=0.001)), r"lr of optimizer 0 \(SGD\) was 0.1 and is 0.001"),
    "another optimizer option": (
        Net(with_sgd()),
        Net(with_sgd(momentum=0.9)),
        r"momentum of optimizer 0 \(SGD\) was 0 and is 0.9",
    ),
    "the optimizer's class": (
        Net(),
        Net(lambda net: AdamW(net.parameters())),
        "optimizer 0's class was 'SGD' and is 'AdamW'",
    ),
    "the number of groups": (Net(), Net(with_two_groups), "optimizer 0's number of groups was 1 and is 2"),
    "the number of optimizers": (Net(), Net(two_optimizers), "the number of optimizers was 1 and is 2"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_auto_does_not_resume_a_different_run(case: str, tmp_path: Path) -> None:
    first, second, text = DIFFERENT[case]
    fitted(tmp_path, first, shared=tmp_path / "shared")
    with pytest.raises(ConfigurationError, match=f"saved by another run.*{text}.*a folder.*same_run=True"):
        fitted(tmp_path, second, epochs=2, shared=tmp_path / "shared")
    assert second.steps == 0


@pytest.mark.parametrize("case", [case for case in DIFFERENT if "optimizer" not in case and "groups" not in case])
def test_a_different_run_in_the_same_place_gets_the_next_folder(case: str, tmp_path: Path) -> None:
    first, second, text = DIFFERENT[case]
    of_first = fitted(tmp_path, copy.deepcopy(first)).last_checkpoint
    second, kept = copy.deepcopy(second), CheckpointReader(of_first).manifest
    if case == "a learning rate":
        # What configure_optimizers returns is known only when the weights are loaded.
        with pytest.raises(ConfigurationError, match=f"saved by another run.*{text}.*run_identity"):
            fitted(tmp_path, second, epochs=2)
        return
    trainer = fitted(tmp_path, second, epochs=2)
    assert (trainer.run_folder, second.steps) == (str(tmp_path / "version_1"), 6)
    # Each goes on in its own folder.
    for module, version in ((first, 0), (second, 1)):
        again = copy.deepcopy(module)
        trainer = fitted(tmp_path, again, epochs=3)
        assert trainer.run_folder == str(tmp_path / f"version_{version}")
        assert (trainer.global_step, again.steps - module.steps) == (9, 6 if version == 0 else 3)
    assert kept.progress["global_step"] == 3


def test_auto_does_not_resume_with_a_different_data_module(tmp_path: Path) -> None:
    fitted(tmp_path, Net(), datamodule=Data(1))
    assert fitted(tmp_path, Net(), epochs=2, datamodule=Data(2)).run_folder == str(tmp_path / "version_1")
    shared = tmp_path / "shared"
    fitted(tmp_path, Net(), datamodule=Data(1), shared=shared)
    with pytest.raises(ConfigurationError, match="the DataModule's hyperparameter size was 1 and is 2"):
        fitted(tmp_path, Net(), epochs=2, datamodule=Data(2), shared=shared)


def test_hyperparameters_are_compared_before_anything_is_loaded(tmp_path: Path) -> None:
    fitted(tmp_path, Net(rate=0.1), shared=tmp_path / "shared")
    second = Net(rate=0.2)
    before = second.layer.weight.detach().clone()
    with pytest.raises(ConfigurationError, match="another run"):
        fitted(tmp_path, second, shared=tmp_path / "shared")
    assert torch.equal(second.layer.weight, before)


def with_warmup(net: Net) -> Any:
    optimizer = SGD(net.parameters(), lr=0.1)
    steps = net.trainer.estimated_stepping_batches
    return [optimizer], [LambdaLR(optimizer, lambda step: (step + 1) / steps)]


def with_one_cycle(net: Net) -> Any:
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.5)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=100 * net.trainer.max_epochs)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Elsewhere(Net): ...


Elsewhere.__qualname__, Elsewhere.__module__ = "Net", "__main__"

SAME = {
    "nothing": (Net(), Net()),
    "a schedule by the number of epochs": (Net(with_warmup), Net(with_warmup)),
    "a schedule that changes momentum": (Net(with_one_cycle), Net(with_one_cycle)),
    "options that only change how a step is computed": (
        Net(with_sgd(foreach=True)),
        Net(with_sgd(foreach=False, differentiable=False)),
    ),
    "the file that defines the class": (Net(), Elsewhere()),
    "nan": (Net(rate=float("nan")), Net(rate=float("nan"))),
    "tensors": (Net(of=torch.arange(3), to=torch.ones(50)), Net(of=torch.arange(3), to=torch.ones(50))),
    "a learning rate in a tensor": (Net(with_sgd(lr=torch.tensor(0.1))), Net(with_sgd(lr=torch.tensor(0.1)))),
    "a list instead of a tuple": (Net(sizes=(1, 2)), Net(sizes=[1, 2])),
}


@pytest.mark.parametrize("case", SAME)
def test_auto_resumes_the_same_run_without_a_warning(case: str, tmp_path: Path) -> None:
    first, second = SAME[case]
    fitted(tmp_path, first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(tmp_path, second, epochs=2)
    assert second.steps == 3 and [str(w.message) for w in caught if "saved" in str(w.message)] == []


def test_a_different_path_in_the_hyperparameters_only_warns(tmp_path: Path) -> None:
    fitted(tmp_path, Net(data=Path("here")))
    module = Net(data=Path("there"))
    with pytest.warns(UserWarning, match="data was here and is there.*continues with its own values"):
        fitted(tmp_path, module, epochs=2)
    assert module.steps == 3


@pytest.mark.parametrize("ckpt_path", ["auto", "last", "path"])
def test_resuming_a_different_run_warns(ckpt_path: str, tmp_path: Path) -> None:
    first = fitted(tmp_path, Net(with_sgd(), rate=1))
    module = Net(with_sgd(lr=0.001), rate=2)
    source = first.last_checkpoint if ckpt_path == "path" else ckpt_path
    expected = r"rate was 1 and is 2; lr of optimizer 0 \(SGD\) was 0.1 and is 0.001.*options replace those"
    with pytest.warns(UserWarning, match=expected):
        trainer = fitted(tmp_path, module, source, epochs=2, same_run=ckpt_path == "auto")
    assert module.steps == 3 and trainer.optimizers[0].param_groups[0]["lr"] == 0.1


def test_restoring_only_weights_accepts_any_run(tmp_path: Path) -> None:
    path = fitted(tmp_path, Net(rate=1)).last_checkpoint
    module = Net(with_sgd(lr=0.001), rate=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fitted(tmp_path, module, restore="weights")
    assert (trainer.ckpt_path, trainer.run_folder) == (str(path), str(tmp_path / "version_1"))
    assert [w for w in caught if "differed" in str(w.message)] == []
    assert module.steps == 3 and trainer.optimizers[0].param_groups[0]["lr"] == 0.001


class Named(Net):
    def run_identity(self) -> Any:
        return {"trial": self.hparams.trial}


def test_run_identity_of_a_module_decides_which_runs_are_the_same(tmp_path: Path) -> None:
    fitted(tmp_path, Named(trial=1, rate=0.1))
    again = Named(with_sgd(lr=0.2), trial=1, rate=0.2)
    fitted(tmp_path, again, epochs=2)
    assert again.steps == 3
    assert fitted(tmp_path, Named(trial=2, rate=0.1), epochs=3).run_folder == str(tmp_path / "version_1")


def test_a_checkpoint_without_an_identity_resumes_with_a_warning(tmp_path: Path) -> None:
    path = fitted(tmp_path, Net(rate=1)).last_checkpoint
    assert path is not None
    forge(path, "identity.json", None)
    module = Net(rate=1)
    with pytest.warns(UserWarning, match="did not record its run"):
        fitted(tmp_path, module, epochs=2)
    assert module.steps == 3


@pytest.mark.parametrize(
    "record", [[], {"own": None}, {"own": None, "module": "Net", "hparams": {}, "optimizers": [1]}]
)
def test_the_error_for_a_forged_identity_names_its_file(record: Any, tmp_path: Path) -> None:
    path = fitted(tmp_path, Net()).last_checkpoint
    assert path is not None
    forge(path, "identity.json", json.dumps(record).encode())
    with pytest.raises(CheckpointError, match=r"identity\.json: is not the identity of a run"):
        fitted(tmp_path, Net(), epochs=2)


def test_an_identity_survives_a_round_trip(tmp_path: Path) -> None:
    path = fitted(tmp_path, Net(with_two_groups, rate=float("inf"), of=torch.ones(2), at=Path("a"))).last_checkpoint
    assert path is not None
    found = Identity.read(CheckpointReader(path))
    assert found is not None and found.optimizers is not None
    assert [group["lr"] for group in found.optimizers[0]["groups"]] == [0.1, 1.0]
    assert found.hparams["module"]["rate"] == {"$number": "inf"}
    assert plain({1: {2, 1}, "f": len, "b": b"a"}) == {"1": [1, 2], "f": {"$skipped": "len"}, "b": {"$value": "b'a'"}}


def test_resuming_a_finished_run_prints_that_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted(tmp_path, Net())
    assert "nothing is left" not in capsys.readouterr().out
    module = Net()
    trainer = fitted(tmp_path, module)
    assert (
        "nothing is left to do: the run is at epoch 0, step 3, and has reached max_epochs=1" in capsys.readouterr().out
    )
    assert (module.steps, trainer.global_step) == (0, 3)


# Trainer(resume="auto") ----------------------------------------------------------------------------------------------
def resumed(folder: Path, module: Net, epochs: int, ckpt_path: Any = None, **arguments: Any) -> Trainer:
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, **arguments}
    trainer = Trainer(max_epochs=epochs, default_root_dir=folder, resume="auto", **settings)
    trainer.fit(module, [torch.ones(1, 2)] * 3, ckpt_path=ckpt_path)
    return trainer


def test_resume_auto_starts_a_run_and_then_continues_it(tmp_path: Path) -> None:
    first, second, third = Net(), Net(), Net()
    assert resumed(tmp_path, first, 1).global_step == 3
    trainer = resumed(tmp_path, second, 2)
    assert (trainer.global_step, second.steps) == (6, 3)
    # Every fit of this Trainer continues the run.
    trainer.fit(second, [torch.ones(1, 2)] * 3, max_epochs=3)
    assert (trainer.global_step, second.steps) == (9, 6)
    resumed(tmp_path, third, 3)
    assert third.steps == 0
    # Other training goes to another folder, also when the same Trainer fits it.
    other = Net(rate=1)
    trainer.fit(other, [torch.ones(1, 2)] * 3, max_epochs=1)
    assert (trainer.run_folder, other.steps) == (str(tmp_path / "version_1"), 3)


def test_ckpt_path_takes_precedence_over_the_trainers_resume(tmp_path: Path) -> None:
    trainer = resumed(tmp_path, Net(), 1)
    again = Net()
    resumed(tmp_path, again, 2, ckpt_path=trainer.last_checkpoint)
    assert again.steps == 3
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        resumed(tmp_path / "empty", Net(), 1, ckpt_path="last")


def test_a_fast_dev_run_does_not_resume(tmp_path: Path) -> None:
    resumed(tmp_path, Net(), 1)
    trial = Net()
    resumed(tmp_path, trial, 1, fast_dev_run=True)
    assert trial.steps == 1
