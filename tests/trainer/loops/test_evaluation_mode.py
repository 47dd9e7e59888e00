"""Evaluation runs in eval mode and restores the mode of every part, whatever its hooks are overridden with."""

from __future__ import annotations

from pathlib import Path
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
    """As scripts for Lightning do it: something of their own, and then the default."""

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()

    def on_test_model_eval(self) -> None:
        super().on_test_model_eval()

    def on_predict_model_eval(self) -> None:
        super().on_predict_model_eval()


class KeepsDropout(Module):
    """Monte-Carlo dropout: everything in eval mode but one part."""

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.dropout.train()


class StaysInTraining(Module):
    def on_validation_model_eval(self) -> None:
        """Leaves the modes alone."""


def loader() -> Any:
    return DataLoader(TensorDataset(torch.ones(4, 2)), 2)


@pytest.mark.parametrize(
    ("kind", "dropout"), [(Module, False), (CallsSuper, False), (KeepsDropout, True), (StaysInTraining, True)]
)
def test_fit(kind: type[Module], dropout: bool, tmp_path: Path) -> None:
    module = kind()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", max_epochs=2, num_sanity_val_steps=1, default_root_dir=tmp_path, **quiet)
    trainer.fit(module, loader(), loader())
    assert set(module.modes) == {("training", True, False), ("validation", dropout, False)}
    assert module.training
    assert module.dropout.training
    assert not module.frozen.training


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("kind", [Module, CallsSuper])
def test_alone(kind: type[Module], stage: str, tmp_path: Path) -> None:
    module = kind()
    getattr(Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path), stage)(module, loader())
    assert {mode[1:] for mode in module.modes} == {(False, False)}
    assert module.dropout.training


def test_values_on_both_levels_of_several_loaders(tmp_path: Path) -> None:
    """`_step` and `_epoch` go to the name itself, the loader's index comes last, and each result has its own."""

    class Logs(Module):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("loss", torch.tensor(float(dataloader_idx + 1)), on_step=True, on_epoch=True)

    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    first, second = trainer.validate(Logs(), [loader(), loader()], verbose=False)
    assert first == {"loss_epoch/dataloader_idx_0": 1.0}
    assert second == {"loss_epoch/dataloader_idx_1": 2.0}


def test_a_short_window_scales_parameters_outside_of_the_module_too(tmp_path: Path) -> None:
    """A loader that ends before its length says: 1 batch of an announced window of 2 counts fully."""
    outside = torch.nn.Parameter(torch.zeros(2))

    class Outside(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0] + outside).sum()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.parameters(), outside], 1.0)

    class Short:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            return iter([[torch.ones(1, 2)]] * 1)

    module = Outside()
    before = module.layer.weight.detach().clone()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    with pytest.warns(UserWarning, match="ended after 1"):
        Trainer(accelerator="cpu", max_epochs=1, accumulate_grad_batches=2, default_root_dir=tmp_path, **quiet).fit(
            module, Short()
        )
    assert torch.equal(outside.detach(), -before[0])
