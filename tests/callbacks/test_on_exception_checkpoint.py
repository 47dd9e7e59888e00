"""OnExceptionCheckpoint, and ModelCheckpoint(save_on_exception=True)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, SAVED, Squares
from samples import numbered
from torch import Tensor, nn

from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.callbacks.checkpointing.on_exception_checkpoint import OnExceptionCheckpoint
from leyden.checkpoint.reader import CheckpointReader
from leyden.core.errors import ConfigurationError
from leyden.trainer.trainer import Trainer

DATA = numbered(6, size=2)


class Failing(Squares):
    """Raises, or is interrupted, in one training batch."""

    def __init__(self, fails_at: int = -1, interrupts: bool = False, fails_in_validation: bool = False) -> None:
        super().__init__(configure=lambda module: torch.optim.SGD(module.parameters(), lr=0.01))
        for parameter in self.parameters():
            nn.init.ones_(parameter)
        self.fails_at = fails_at
        self.interrupts = interrupts
        self.fails_in_validation = fails_in_validation

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == self.fails_at:
            if not self.interrupts:
                raise ArithmeticError("the user's own error")
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.fails_in_validation:
            raise ArithmeticError("the user's own error")


def make(root: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    options = {"default_root_dir": root, "max_epochs": 1, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    return Trainer(callbacks=list(callbacks), **{**QUIET, **options, **arguments})


def saved_progress(path: str | Path) -> dict[str, Any]:
    reader = CheckpointReader(path)
    reader.verify()
    return reader.progress()


def test_an_error_saves_the_last_complete_step(tmp_path: Path) -> None:
    callback = OnExceptionCheckpoint(tmp_path)
    trainer = make(tmp_path, callback)
    with pytest.raises(ArithmeticError, match="the user's own error"):
        trainer.fit(Failing(fails_at=4), DATA)
    assert callback.ckpt_path == str(tmp_path / "on_exception")
    assert callback.saved_path == tmp_path / "on_exception"
    progress = saved_progress(callback.ckpt_path)
    assert (progress["global_step"], progress["batch"]) == (4, 4)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_resume_after_an_error_equals_an_uninterrupted_run(tmp_path: Path, accumulate: int) -> None:
    """The error occurs inside an accumulation window, which the resume repeats from its start."""
    whole = Failing()
    make(tmp_path / "whole", accumulate_grad_batches=accumulate).fit(whole, DATA)
    callback = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ArithmeticError):
        make(tmp_path, callback, accumulate_grad_batches=accumulate).fit(Failing(fails_at=5), DATA)
    progress = saved_progress(callback.ckpt_path)
    # The resume is not exact even with windows of one batch: the failed batch may have drawn random numbers.
    assert (progress["global_step"], progress["batch"]) == ((5, 5) if accumulate == 1 else (1, 4))
    assert progress["samples"] == 2 * progress["batch"]
    assert not progress["exact"]
    resumed = Failing()
    make(tmp_path, accumulate_grad_batches=accumulate).fit(resumed, DATA, ckpt_path=callback.ckpt_path)
    for ours, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, expected)


def test_ctrl_c_saves_a_checkpoint(tmp_path: Path) -> None:
    callback = OnExceptionCheckpoint(tmp_path, filename="stopped")
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, callback).fit(Failing(fails_at=2, interrupts=True), DATA)
    assert saved_progress(tmp_path / "stopped")["global_step"] == 3


def test_an_existing_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    for fails_at in (2, 3):
        with pytest.raises(ArithmeticError):
            make(tmp_path, OnExceptionCheckpoint(tmp_path)).fit(Failing(fails_at), DATA)
    assert saved_progress(tmp_path / "on_exception")["global_step"] == 2
    assert saved_progress(tmp_path / "on_exception-v1")["global_step"] == 3


def test_errors_outside_of_training_save_nothing(tmp_path: Path) -> None:
    failing = Failing(fails_in_validation=True)
    for trainer, method in (
        (make(tmp_path, OnExceptionCheckpoint(tmp_path)), "validate"),
        (make(tmp_path, OnExceptionCheckpoint(tmp_path), num_sanity_val_steps=2), "fit"),
        (make(tmp_path, OnExceptionCheckpoint(tmp_path), fast_dev_run=True), "fit"),
    ):
        with pytest.raises(ArithmeticError):
            trainer.validate(failing, DATA) if method == "validate" else trainer.fit(failing, DATA, DATA)
    assert not (tmp_path / "on_exception").exists()


def test_a_failed_save_does_not_hide_the_original_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    callback = OnExceptionCheckpoint(tmp_path / "file" / "inside")
    with (
        pytest.warns(UserWarning, match="no checkpoint could be saved after ArithmeticError: .*file/inside"),
        pytest.raises(ArithmeticError, match="the user's own error"),
    ):
        make(tmp_path, callback).fit(Failing(fails_at=4), DATA)
    assert callback.saved_path is None


@pytest.mark.parametrize("filename", ["", "a/b", "/a", ".."])
def test_invalid_filenames_raise(tmp_path: Path, filename: str) -> None:
    with pytest.raises(ConfigurationError, match="use a plain name, and put folders in dirpath"):
        OnExceptionCheckpoint(tmp_path, filename)


def test_model_checkpoint_saves_on_an_exception(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = ModelCheckpoint(every_n_train_steps=2, save_on_exception=True, verbose=True)
    with pytest.raises(ArithmeticError):
        make(tmp_path, callback).fit(Failing(fails_at=5), DATA)
    assert sorted(os.listdir(tmp_path / SAVED)) == ["epoch=0-step=4", "epoch=0-step=5"]
    assert "epoch=0-step=5 after ArithmeticError" in capsys.readouterr().out
    assert saved_progress(tmp_path / SAVED / "epoch=0-step=5")["global_step"] == 5


def test_model_checkpoint_does_not_save_a_step_twice(tmp_path: Path) -> None:
    callback = ModelCheckpoint(every_n_train_steps=2, save_on_exception=True)
    with pytest.raises(ArithmeticError):
        make(tmp_path, callback).fit(Failing(fails_at=4), DATA)
    assert os.listdir(tmp_path / SAVED) == ["epoch=0-step=4"]


def test_model_checkpoint_does_not_save_on_an_exception_by_default(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        make(tmp_path, ModelCheckpoint(every_n_train_steps=2)).fit(Failing(fails_at=5), DATA)
    assert os.listdir(tmp_path / SAVED) == ["epoch=0-step=4"]


def test_model_checkpoint_uses_its_filename_template_on_an_exception(tmp_path: Path) -> None:
    class Logs(Failing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", float(batch_idx))
            return super().training_step(batch, batch_idx)

    callback = ModelCheckpoint(every_n_epochs=1, filename="mine-{step}-{value:.1f}", save_on_exception=True)
    with pytest.raises(ArithmeticError):
        make(tmp_path, callback).fit(Logs(fails_at=5), DATA)
    [name] = os.listdir(tmp_path / SAVED)
    assert name.startswith("mine-step=5-value=")

    class Broken(ModelCheckpoint):
        """Simulates a device error, after which no metric can be read."""

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            def fails(values: Any) -> Any:
                raise RuntimeError("device error")

            trainer.read_metrics = fails
            super().on_exception(trainer, module, exception)

    broken = Broken(tmp_path / "broken", every_n_epochs=1, filename="mine-{step}-{value:.1f}", save_on_exception=True)
    with pytest.raises(ArithmeticError), pytest.warns(UserWarning, match="'value', which was not logged"):
        make(tmp_path, broken).fit(Logs(fails_at=5), DATA)
    assert os.listdir(tmp_path / "broken") == ["mine-step=5-value=none"]
