"""An error in a step keeps its type and message, and adds where it occurred, the batch, and what to try."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input.ground import QUIET, Module, loader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from leyden import ConfigurationError, Trainer

STEPS: dict[str, tuple[Callable[[Module, Any], Any], type[Exception], str]] = {
    "features": (
        lambda m, b: m.net(b[0][:, :3]).sum(),
        RuntimeError,
        "Linear layer with in_features=4 got 3 features: change",
    ),
    "dtype": (lambda m, b: m.net(b[0].double()).sum(), RuntimeError, r"x\.float\(\)"),
    "class": (lambda m, b: F.cross_entropy(m.net(b[0]), b[1] + 5), IndexError, "as many outputs as there are classes"),
    "samples": (
        lambda m, b: F.cross_entropy(m.net(b[0]), b[1][:1]),
        ValueError,
        r"DataLoader stacks samples along the first dimension",
    ),
    "broadcast": (lambda m, b: (b[0] + torch.ones(3)).sum(), RuntimeError, r"compare the two shapes"),
    "channels": (lambda m, b: nn.Conv2d(3, 1, 1)(b[0][None]).sum(), RuntimeError, "images are \\(samples, channels"),
    "token": (lambda m, b: nn.Embedding(2, 2)(b[1] + 7).sum(), IndexError, "num_embeddings"),
    "no advice": (lambda m, b: {}["x"], KeyError, ""),
}


def error_text(run: Callable[[], Any], error: type[Exception], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the text of the error that ends a run, notes included; before Python 3.11 they go to stderr."""
    with pytest.raises(error) as caught:
        run()
    assert type(caught.value) is error
    return "".join(traceback.format_exception_only(caught.value)) + capsys.readouterr().err


@pytest.mark.parametrize("name", STEPS)
def test_an_error_in_a_step_gives_epoch_batch_shapes_and_advice(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, error, fix = STEPS[name]

    class Wrong(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return step(self, batch) if self.current_epoch == 1 and batch_idx == 2 else self.loss(batch)

    trainer = Trainer(**{**QUIET, "max_epochs": 2}, default_root_dir=tmp_path)
    text = error_text(lambda: trainer.fit(Wrong(), loader()), error, capsys)
    place = "this was step 6 (epoch 1, batch 2) in fit; the batch was [(2, 4) float32, (2,) int64]"
    assert f"{place}; its samples are 4, 5 of the data set." in text
    assert re.search(fix, text), text


def test_an_error_shows_three_elements_of_a_long_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Wrong(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError

    trainer = Trainer(**QUIET, default_root_dir=tmp_path)
    text = error_text(lambda: trainer.fit(Wrong(), [[torch.ones(2)] * 64]), ZeroDivisionError, capsys)
    assert "the batch was [(2,) float32, (2,) float32, (2,) float32, and 61 more]" in text


class FailsInValidation(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise ZeroDivisionError


def test_an_error_in_validation_names_the_validation_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = {**QUIET, "default_root_dir": tmp_path}
    fit = Trainer(**quiet, num_sanity_val_steps=0)
    text = error_text(lambda: fit.fit(FailsInValidation(), loader(), loader()), ZeroDivisionError, capsys)
    assert "this was batch 1 in validation, at step 4 (epoch 0, batch 4); the batch was [(2, 4)" in text
    text = error_text(lambda: Trainer(**quiet).fit(FailsInValidation(), loader(), loader()), ZeroDivisionError, capsys)
    assert "this was batch 1 in the sanity check; the batch was" in text
    text = error_text(lambda: Trainer(**quiet).validate(FailsInValidation(), loader()), ZeroDivisionError, capsys)
    assert "this was batch 1 in validation; the batch was" in text


def test_an_error_collating_uneven_samples_gives_step_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Uneven(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return torch.randn(4 if index < 5 else 3), torch.tensor(1)

    trainer = Trainer(**QUIET, default_root_dir=tmp_path)
    text = error_text(lambda: trainer.fit(Module(), DataLoader(Uneven(), batch_size=2)), RuntimeError, capsys)
    assert "this was step 2 (epoch 0, batch 2) in fit." in text
    assert "pass the DataLoader a collate_fn" in text


def test_a_nan_found_by_autograd_comes_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Root(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            zero = self.net(batch[0]).sum() * 0
            return zero.sqrt() * 0

    with torch.autograd.set_detect_anomaly(True):
        trainer = Trainer(**QUIET, default_root_dir=tmp_path)
        text = error_text(lambda: trainer.fit(Root(), loader()), RuntimeError, capsys)
    assert "gradient_clip_val" in text and "add an eps" in text


def test_an_error_before_the_loop_names_no_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class InvalidOptimizer(Module):
        def configure_optimizers(self) -> Any:
            return 3

    trainer = Trainer(**QUIET, default_root_dir=tmp_path)
    assert "leyden: this was" not in error_text(
        lambda: trainer.fit(InvalidOptimizer(), loader()), ConfigurationError, capsys
    )
