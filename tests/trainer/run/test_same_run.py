"""ckpt_path="auto" continues the same run and no other; another run's checkpoint needs to be asked for by its path."""

from __future__ import annotations

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
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.format.errors import CheckpointError
from leyden.trainer.run.saved.identity import Identity, plain

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


def fitted(folder: Path, module: Net, ckpt_path: Any = "auto", epochs: int = 1, **fit: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False, default_root_dir=folder
    )
    trainer.fit(module, datamodule=fit.pop("datamodule", None) or Data(), ckpt_path=ckpt_path, **fit)
    return trainer


def of_sgd(**options: Any) -> Optimizers:
    return lambda net: SGD(net.parameters(), **{"lr": 0.1, **options})


def two(net: Net) -> Any:
    return [SGD([net.layer.weight], lr=0.1), SGD([net.layer.bias], lr=0.1)]


def in_groups(net: Net) -> Any:
    return SGD([{"params": [net.layer.weight]}, {"params": [net.layer.bias], "lr": 1.0}], lr=0.1)


DIFFERENT = {
    "a hyperparameter": (Net(rate=0.1), Net(rate=0.001), "the hyperparameter rate was 0.1 and is 0.001"),
    "one inside another": (
        Net(net={"width": [1, 2]}),
        Net(net={"width": [1, 3]}),
        r"net\['width'\]\[1\] was 2 and is 3",
    ),
    "a new hyperparameter": (Net(), Net(deep=True), "the hyperparameter deep was absent and is True"),
    "a tensor": (Net(of=torch.ones(2)), Net(of=torch.zeros(2)), r"of was a tensor float32 \(2,\) \[1.0, 1.0\] and is"),
    "a large tensor": (Net(of=torch.ones(99)), Net(of=torch.zeros(99)), r"of was a tensor .* with the digest"),
    "the module's class": (Net(), Other(), "the module's class was 'Net' and is 'Other'"),
    "a rate": (Net(of_sgd()), Net(of_sgd(lr=0.001)), r"lr of optimizer 0 \(SGD\) was 0.1 and is 0.001"),
    "another option": (Net(of_sgd()), Net(of_sgd(momentum=0.9)), r"momentum of optimizer 0 \(SGD\) was 0 and is 0.9"),
    "the optimizer": (Net(), Net(lambda net: AdamW(net.parameters())), "optimizer 0's class was 'SGD' and is 'AdamW'"),
    "groups": (Net(), Net(in_groups), "optimizer 0's number of groups was 1 and is 2"),
    "their number": (Net(), Net(two), "the number of optimizers was 1 and is 2"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_auto_does_not_continue_another_run(what: str, tmp_path: Path) -> None:
    first, second, text = DIFFERENT[what]
    fitted(tmp_path, first)
    with pytest.raises(ConfigurationError, match=f"saved by another run.*{text}.*its own folder.*same_run=True"):
        fitted(tmp_path, second, epochs=2)
    assert second.steps == 0


def test_auto_does_not_continue_with_another_data_module(tmp_path: Path) -> None:
    fitted(tmp_path, Net(), datamodule=Data(1))
    with pytest.raises(ConfigurationError, match="the DataModule's hyperparameter size was 1 and is 2"):
        fitted(tmp_path, Net(), epochs=2, datamodule=Data(2))


def test_hyperparameters_are_compared_before_anything_is_loaded(tmp_path: Path) -> None:
    fitted(tmp_path, Net(rate=0.1))
    second = Net(rate=0.2)
    before = second.layer.weight.detach().clone()
    with pytest.raises(ConfigurationError, match="another run"):
        fitted(tmp_path, second)
    assert torch.equal(second.layer.weight, before)


def warmed_up(net: Net) -> Any:
    optimizer = SGD(net.parameters(), lr=0.1)
    steps = net.trainer.estimated_stepping_batches
    return [optimizer], [LambdaLR(optimizer, lambda step: (step + 1) / steps)]


def one_cycle(net: Net) -> Any:
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.5)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=100 * net.trainer.max_epochs)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Elsewhere(Net): ...


Elsewhere.__qualname__, Elsewhere.__module__ = "Net", "__main__"

SAME = {
    "nothing": (Net(), Net()),
    "a schedule by the number of epochs": (Net(warmed_up), Net(warmed_up)),
    "one that changes momentum too": (Net(one_cycle), Net(one_cycle)),
    "how a step is computed": (Net(of_sgd(foreach=True)), Net(of_sgd(foreach=False, differentiable=False))),
    "the file of the class": (Net(), Elsewhere()),
    "nan": (Net(rate=float("nan")), Net(rate=float("nan"))),
    "tensors": (Net(of=torch.arange(3), to=torch.ones(50)), Net(of=torch.arange(3), to=torch.ones(50))),
    "a rate in a tensor": (Net(of_sgd(lr=torch.tensor(0.1))), Net(of_sgd(lr=torch.tensor(0.1)))),
    "a list in place of a tuple": (Net(sizes=(1, 2)), Net(sizes=[1, 2])),
}


@pytest.mark.parametrize("what", SAME)
def test_auto_continues_the_same_run_without_a_word(what: str, tmp_path: Path) -> None:
    first, second = SAME[what]
    fitted(tmp_path, first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(tmp_path, second, epochs=2)
    assert second.steps == 3 and [str(w.message) for w in caught if "saved" in str(w.message)] == []


def test_a_path_that_differs_is_another_place_and_no_other_run(tmp_path: Path) -> None:
    fitted(tmp_path, Net(data=Path("here")))
    module = Net(data=Path("there"))
    with pytest.warns(UserWarning, match="data was here and is there.*continues with its own values"):
        fitted(tmp_path, module, epochs=2)
    assert module.steps == 3


@pytest.mark.parametrize("ckpt_path", ["auto", "last", "path"])
def test_who_asks_for_another_run_gets_it_with_a_warning(ckpt_path: str, tmp_path: Path) -> None:
    first = fitted(tmp_path, Net(of_sgd(), rate=1))
    module = Net(of_sgd(lr=0.001), rate=2)
    which = first.last_checkpoint if ckpt_path == "path" else ckpt_path
    expected = r"rate was 1 and is 2; lr of optimizer 0 \(SGD\) was 0.1 and is 0.001.*options replace those"
    with pytest.warns(UserWarning, match=expected):
        trainer = fitted(tmp_path, module, which, epochs=2, same_run=ckpt_path == "auto")
    assert module.steps == 3 and trainer.optimizers[0].param_groups[0]["lr"] == 0.1


def test_weights_alone_may_be_any_runs(tmp_path: Path) -> None:
    fitted(tmp_path, Net(rate=1))
    module = Net(of_sgd(lr=0.001), rate=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fitted(tmp_path, module, restore="weights")
    assert [w for w in caught if "differed" in str(w.message)] == []
    assert module.steps == 3 and trainer.optimizers[0].param_groups[0]["lr"] == 0.001


class Named(Net):
    def run_identity(self) -> Any:
        return {"trial": self.hparams.trial}


def test_a_module_may_say_what_its_run_is(tmp_path: Path) -> None:
    fitted(tmp_path, Named(trial=1, rate=0.1))
    again = Named(of_sgd(lr=0.2), trial=1, rate=0.2)
    fitted(tmp_path, again, epochs=2)
    assert again.steps == 3
    with pytest.raises(ConfigurationError, match=r"run_identity\(\)\['trial'\] was 1 and is 2"):
        fitted(tmp_path, Named(trial=2, rate=0.1), epochs=3)


def test_a_checkpoint_that_does_not_say_whose_it_is_is_taken_with_a_warning(tmp_path: Path) -> None:
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
def test_a_forged_record_is_refused_by_its_name(record: Any, tmp_path: Path) -> None:
    path = fitted(tmp_path, Net()).last_checkpoint
    assert path is not None
    forge(path, "identity.json", json.dumps(record).encode())
    with pytest.raises(CheckpointError, match=r"identity\.json: is not the identity of a run"):
        fitted(tmp_path, Net(), epochs=2)


def test_what_is_recorded_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = fitted(tmp_path, Net(in_groups, rate=float("inf"), of=torch.ones(2), at=Path("a"))).last_checkpoint
    assert path is not None
    found = Identity.read(CheckpointReader(path))
    assert found is not None and found.optimizers is not None
    assert [group["lr"] for group in found.optimizers[0]["groups"]] == [0.1, 1.0]
    assert found.hparams["module"]["rate"] == {"$number": "inf"}
    assert plain({1: {2, 1}, "f": len, "b": b"a"}) == {"1": [1, 2], "f": {"$skipped": "len"}, "b": {"$value": "b'a'"}}


def test_a_run_that_has_nothing_left_to_do_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_trainer_that_resumes_begins_a_run_and_then_continues_it(tmp_path: Path) -> None:
    first, second, third = Net(), Net(), Net()
    assert resumed(tmp_path, first, 1).global_step == 3
    trainer = resumed(tmp_path, second, 2)
    assert (trainer.global_step, second.steps) == (6, 3)
    # Each fit of it continues the run.
    trainer.fit(second, [torch.ones(1, 2)] * 3, max_epochs=3)
    assert (trainer.global_step, second.steps) == (9, 6)
    resumed(tmp_path, third, 3)
    assert third.steps == 0
    with pytest.raises(ConfigurationError, match="saved by another run"):
        resumed(tmp_path, Net(rate=1), 3)


def test_what_fit_is_given_stands_before_the_trainers_resume(tmp_path: Path) -> None:
    trainer = resumed(tmp_path, Net(), 1)
    again = Net()
    resumed(tmp_path, again, 2, ckpt_path=trainer.last_checkpoint)
    assert again.steps == 3
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        resumed(tmp_path / "empty", Net(), 1, ckpt_path="last")


def test_a_trial_run_resumes_nothing(tmp_path: Path) -> None:
    resumed(tmp_path, Net(), 1)
    trial = Net()
    resumed(tmp_path, trial, 1, fast_dev_run=True)
    assert trial.steps == 1
