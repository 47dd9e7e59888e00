"""Evaluation runs in eval mode and restores every submodule's mode, with and without overridden hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule


class Module(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout, self.frozen = torch.nn.Linear(2, 1), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(2)
        self.frozen.eval()
        self.modes: list[tuple[str, bool, bool]] = []

    def _step(self, where: str, batch: Any) -> torch.Tensor:
        self.modes.append((where, self.dropout.training, self.frozen.training))
        loss: torch.Tensor = self.layer(self.dropout(self.frozen(batch[0]))).sum()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._step("training", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._step("validation", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._step("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self._step("predict", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class CallsSuper(Module):
    """Overrides the hooks and calls the default, as scripts for Lightning do."""

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()

    def on_test_model_eval(self) -> None:
        super().on_test_model_eval()

    def on_predict_model_eval(self) -> None:
        super().on_predict_model_eval()


class KeepsDropout(Module):
    """Monte Carlo dropout: all but the dropout in eval mode."""

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.dropout.train()


class StaysInTraining(Module):
    def on_validation_model_eval(self) -> None:
        """Changes no mode."""


def loader() -> Any:
    return DataLoader(TensorDataset(torch.ones(4, 2)), 2)


@pytest.mark.parametrize(
    ("kind", "dropout"), [(Module, False), (CallsSuper, False), (KeepsDropout, True), (StaysInTraining, True)]
)
def test_fit_validates_in_eval_mode_unless_the_module_overrides_it(kind: type[Module], dropout: bool, fit: Any) -> None:
    module = kind()
    fit(module, loader(), loader(), max_epochs=2, num_sanity_val_steps=1)
    assert set(module.modes) == {("training", True, False), ("validation", dropout, False)}
    assert module.training
    assert module.dropout.training
    assert not module.frozen.training


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("kind", [Module, CallsSuper])
def test_validate_test_and_predict_run_in_eval_mode(kind: type[Module], stage: str, quiet: Any) -> None:
    module = kind()
    getattr(Trainer(**quiet), stage)(module, loader())
    assert {mode[1:] for mode in module.modes} == {(False, False)}
    assert module.dropout.training
