"""Beginners' mistakes that torch does not report: each warns or raises."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input.ground import QUIET, Module, loader, samples
from models import Line

from leyden import Callback, ConfigurationError, DataModule, Trainer, TrainModule
from leyden.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint, TQDMProgressBar


def warnings_of(module: TrainModule, folder: Path, **arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(**{**QUIET, "default_root_dir": folder, **arguments}).fit(module, loader(), loader())
    return [str(warning.message) for warning in caught]


def test_a_fit_without_an_optimizer_warns(tmp_path: Path) -> None:
    class Untrained(Module):
        def configure_optimizers(self) -> None: ...

    [message] = warnings_of(Untrained(), tmp_path)
    assert "Untrained.configure_optimizers returned no optimizer, so this fit trains nothing" in message


def test_lightning_1_hooks_and_misspelled_hooks_warn(tmp_path: Path) -> None:
    class Old(Module):
        def validation_epoch_end(self, outputs: Any) -> None: ...
        def on_train_epoch_ends(self) -> None: ...
        def on_call(self) -> None: ...

    class Watch(Callback):
        def on_epoch_end(self, trainer: Any, module: Any) -> None: ...
        def on_validation_epoch_stop(self) -> None: ...
        def on_vaildation_end(self, trainer: Any, module: Any) -> None: ...
        def on_train_end(self, trainer: Any, module: Any) -> None: ...

    messages = warnings_of(Old(), tmp_path, callbacks=Watch())
    assert [message.partition(" is never called: ")[0] for message in messages] == [
        *("Old.validation_epoch_end", "Old.on_train_epoch_ends", "Watch.on_epoch_end"),
        *("Watch.on_validation_epoch_stop", "Watch.on_vaildation_end"),
    ]
    assert (
        "Override on_validation_epoch_end instead, and" in messages[0]
        and "Did you mean on_train_epoch_end?" in messages[1]
    )
    assert "Override on_train_epoch_end instead." in messages[2] and "Did you mean on_validation_end?" in messages[4]


def test_a_module_without_mistakes_does_not_warn(tmp_path: Path) -> None:
    assert warnings_of(Module(), tmp_path, callbacks=[TQDMProgressBar(), Callback()], enable_progress_bar=True) == []


class Broken(Module):
    """A module whose logged loss is nan from batch `first` until before batch `last`."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.broken = range(first, last)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", float("nan") if batch_idx in self.broken else 1.0)
        return loss


def test_a_loss_that_stays_nan_until_the_end_warns(tmp_path: Path) -> None:
    logged = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    [message] = warnings_of(Broken(1, 9), tmp_path, **logged)
    assert re.search(r"'loss' is nan since step 2\..*detect_anomaly=True", message)
    assert warnings_of(Broken(1, 3), tmp_path, **{**logged, "logger": CSVLogger(tmp_path)}) == []


def test_nan_is_noticed_without_loggers_and_between_the_rows_of_one(tmp_path: Path) -> None:
    [message] = warnings_of(Broken(1, 9), tmp_path)
    assert re.search(r"'loss' is nan since one of the steps 1 to \d", message)
    [message] = warnings_of(Broken(3, 9), tmp_path, logger=CSVLogger(tmp_path), log_every_n_steps=2)
    assert "'loss' is nan since one of the steps 3 to 4" in message


class Diverges(Module):
    """A module that logs nothing and whose weights become nan; it validates."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * float("nan")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def test_weights_that_are_nan_at_the_end_warn(tmp_path: Path) -> None:
    [message] = warnings_of(Diverges(), tmp_path, max_epochs=2)
    assert "weights are nan or infinite" in message
    # An epoch has four steps. Epoch values are checked although nothing shows them.
    assert "'val_loss' is nan since one of the steps 1 to 4" in message


def test_the_best_checkpoint_of_a_nan_loss_is_shown_as_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saves = ModelCheckpoint(tmp_path / "saves", monitor="val_loss")
    arguments = QUIET | {
        "enable_checkpointing": True,
        "callbacks": saves,
        "default_root_dir": tmp_path,
        "max_epochs": 1,
    }
    with pytest.warns(UserWarning, match="'val_loss' is nan since"):
        Trainer(**arguments).fit(Diverges(), loader(), loader())
    assert "(val_loss=nan or infinite)" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["train", "val"])
def test_a_dataset_in_place_of_a_loader_raises(kind: str, tmp_path: Path) -> None:
    loaders = (samples(), None) if kind == "train" else (loader(), samples())
    with pytest.raises(ConfigurationError, match=rf"the {kind} loader is a TensorDataset, a Dataset.*DataLoader\("):
        Trainer(**QUIET, default_root_dir=tmp_path).fit(Module(), *loaders)


def test_two_progress_bars_raise() -> None:
    with pytest.raises(ConfigurationError, match="2 progress bars"):
        Trainer(callbacks=[TQDMProgressBar(), TQDMProgressBar(2)])


def test_misspelled_steps_loaders_and_hooks_warn(tmp_path: Path) -> None:
    class Typos(Line):
        def validaton_step(self, batch: Any, batch_idx: int) -> None: ...
        def val_dataloaders(self) -> None: ...
        def configure_callback(self) -> None: ...
        def configure_optimizer(self) -> None:
            """A part of configure_optimizers, which the module has."""

    class Watch(Callback):
        def on_train_epoch_finish(self, trainer: Any, module: Any) -> None: ...
        def on_fit_begin(self, trainer: Any, module: Any) -> None: ...

    def named(messages: list[str]) -> list[str]:
        return [re.sub(r" is never called.*Did you mean (\w+).*", r" \1", message) for message in messages]

    messages = warnings_of(Typos(4), tmp_path, callbacks=Watch())
    assert named([message for message in messages if "never called" in message]) == [
        *("Typos.validaton_step validation_step", "Typos.val_dataloaders val_dataloader"),
        *("Typos.configure_callback configure_callbacks", "Watch.on_train_epoch_finish on_train_epoch_end"),
        "Watch.on_fit_begin on_fit_start",
    ]


@pytest.mark.parametrize("kind", ["module", "datamodule"])
def test_errors_about_missing_methods_name_the_misspelled_ones(kind: str, tmp_path: Path) -> None:
    class Loaders:
        def train_dataloaders(self) -> Any:
            return loader()

    class Owner(Loaders, Module): ...

    class Data(Loaders, DataModule): ...

    trainer = Trainer(**QUIET, default_root_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=r"there is no train loader.*train_dataloaders\?"):
        trainer.fit(*((Owner(),) if kind == "module" else (Module(), Data())))


@pytest.mark.parametrize(
    ("method", "typo"), [("training_step", "trainin_step"), ("configure_optimizers", "configure_optimizer")]
)
def test_an_error_about_a_missing_step_names_the_misspelled_one(method: str, typo: str, tmp_path: Path) -> None:
    own = {"training_step": Module.training_step, "configure_optimizers": Module.configure_optimizers}
    own[typo] = own.pop(method)
    misspelled = type("Net", (TrainModule,), own)
    with pytest.raises(ConfigurationError, match=rf"Net has no {method}:.*Did you mean it by {typo}\?"):
        Trainer(**QUIET, default_root_dir=tmp_path).fit(misspelled(), loader())


class Monitored(Module):
    """Logs val_loss in validation, train_loss in training, and one value outside of the sanity check."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


@pytest.mark.parametrize("first", [{"num_sanity_val_steps": 1}, {"validate_at_start": True}])
@pytest.mark.parametrize(
    ("monitor", "warns"), [("val_los", True), ("val_f1", True), ("loss_val_loss", True), ("train_loss", False)]
)
def test_monitors_are_compared_with_the_names_of_the_first_validation(
    monitor: str, warns: bool, first: dict[str, Any], tmp_path: Path
) -> None:
    class Stops(Exception): ...

    class Stop(Monitored):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise Stops

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": monitor}}

    callbacks = [EarlyStopping(monitor), ModelCheckpoint(monitor=monitor)]
    arguments = {**QUIET, "enable_checkpointing": True, **first, "callbacks": callbacks}
    with warnings.catch_warnings(record=True) as caught, pytest.raises(Stops):
        warnings.simplefilter("always")
        Trainer(**{**arguments, "default_root_dir": tmp_path}).fit(Stop(), loader(), loader())
    found = [str(w.message) for w in caught if "did not log before training" in str(w.message)]
    who = [message.split()[0] for message in found]
    assert who == (["EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"] if warns else [])
    assert all(monitor in message and "val_loss" in message for message in found)
