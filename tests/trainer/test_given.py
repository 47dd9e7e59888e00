"""Arguments of the Trainer: defaults in the signature, `given`, and suggestions for unknown names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input.ground import QUIET, Module, loader

import leyden
from leyden import Trainer
from leyden.core.errors import UnknownArgumentError
from leyden.core.ported import OURS
from leyden.trainer.arguments.arguments import NONE_MEANS_SOMETHING, Arguments


def test_the_trainers_signature_shows_the_real_defaults() -> None:
    declared = {name: p.default for name, p in inspect.signature(Trainer).parameters.items()}
    used = {field.name: field.default for field in dataclasses.fields(Arguments)}
    assert declared == used


def test_trainer_arguments_are_typed_and_trainer_is_listed_first() -> None:
    parameters = inspect.signature(Trainer).parameters.values()
    assert [p.name for p in parameters if p.annotation == "Any"] == []
    assert [name for name in leyden.__all__ if name.startswith("Tr")] == ["Trainer", "TrainModule"]


def test_given_includes_arguments_equal_to_their_default() -> None:
    assert Trainer(**QUIET, log_every_n_steps=50).given == {*QUIET, "log_every_n_steps"}


def test_none_means_the_default() -> None:
    names = {field.name for field in dataclasses.fields(Arguments)} - set(NONE_MEANS_SOMETHING)
    trainer, plain = Trainer(**dict.fromkeys(names)), Trainer()
    assert trainer.arguments == plain.arguments and trainer.given == frozenset()
    assert Trainer(check_val_every_n_epoch=None, val_check_interval=5).check_val_every_n_epoch is None


def test_a_trainer_subclass_forwards_its_arguments() -> None:
    class Mine(Trainer):
        def __init__(self, folder: str, **arguments: Any) -> None:
            super().__init__(default_root_dir=folder, **arguments)

    trainer = Mine("here", **QUIET)
    assert trainer.given == {*QUIET, "default_root_dir"}
    with pytest.raises(UnknownArgumentError, match="Trainer has no argument 'max_step'. Did you mean 'max_steps'"):
        Mine("here", max_step=1)


def test_an_unknown_argument_raises_a_type_error() -> None:
    with pytest.raises(TypeError):
        Trainer(max_epoch=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "instead"), [("distributed_backend", "strategy"), ("auto_lr_find", "Tuner"), ("patience", "Early")]
)
def test_the_error_for_a_misplaced_argument_names_its_replacement(name: str, instead: str) -> None:
    with pytest.raises(UnknownArgumentError, match=f"use .*{instead}"):
        Trainer(**{name: 1})


@pytest.mark.parametrize("method", ["log", "log_dict"])
def test_a_misspelled_log_argument_gets_a_suggestion(method: str, tmp_path: Path) -> None:
    class Misspelled(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if method == "log":
                self.log("loss", 1.0, progbar=True)  # type: ignore[call-arg]
            else:
                self.log_dict({"loss": 1.0}, progbar=True)
            return self.loss(batch)

    with pytest.raises(
        UnknownArgumentError, match=r"TrainModule.log has no argument 'progbar'. Did you mean 'prog_bar'"
    ):
        Trainer(**QUIET, default_root_dir=tmp_path).fit(Misspelled(), loader())


def test_other_type_errors_in_a_step_pass_through_unchanged(tmp_path: Path) -> None:
    class Wrong(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.zeros(()).sum(dims=1)  # type: ignore[call-overload]

    with pytest.raises(TypeError) as caught:
        Trainer(**QUIET, default_root_dir=tmp_path).fit(Wrong(), loader())
    assert type(caught.value) is TypeError


def test_the_error_for_a_missing_hyperparameter_suggests_save_hyperparameters() -> None:
    with pytest.raises(AttributeError, match=r"no hyperparameter 'lr'.*call self\.save_hyperparameters\(\) first"):
        _ = Module().hparams.lr


@pytest.mark.parametrize("path", sorted(OURS.values()))
def test_replacements_suggested_for_lightning_objects_are_importable(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name).__name__ == name
