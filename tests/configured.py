"""Modules, data and callbacks that configurations name by import path, such as `configured.OwnNet`."""

from __future__ import annotations

from typing import Any

import torch
from samples import pairs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Callback, DataModule, TrainModule
from leyden.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau, instantiate_class


class Bare(TrainModule):
    """Two layers, trained towards y, without an optimizer.

    Args:
        width: of the hidden layer.
    """

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


class OwnNet(Bare):
    """A `Bare` module with an optimizer.

    Args:
        width: of the hidden layer.
        rate: learning rate.
    """

    def __init__(self, width: int = 4, rate: float = 0.1) -> None:
        super().__init__(width)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)


class Composed(Bare):
    """Takes its encoder, optimizer and scheduler as arguments."""

    def __init__(
        self,
        encoder: nn.Module,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable = lambda made: torch.optim.lr_scheduler.StepLR(made, step_size=3),
    ) -> None:
        super().__init__()
        self.encoder, self.optimizer, self.scheduler = encoder, optimizer, scheduler

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        scheduler = self.scheduler(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": scheduler.monitor}}
        return [optimizer], [scheduler]


class Described(Bare):
    """Takes the descriptions of its two optimizers as arguments."""

    def __init__(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        super().__init__()
        self.first, self.second = first, second

    def configure_optimizers(self) -> Any:
        layers = self.net[0], self.net[2]
        pairs = zip(layers, (self.first, self.second), strict=True)
        return [instantiate_class(layer.parameters(), described) for layer, described in pairs]


PARTS = (nn.ReLU(), 1)


class HoldsParts(Bare):
    """Has a default value that contains an object."""

    def __init__(self, parts: Any = PARTS, width: int = 4) -> None:
        super().__init__(width)
        self.parts = parts


class Caused(Bare):
    """Its constructor raises an error with a cause."""

    def __init__(self) -> None:
        super().__init__()
        raise RuntimeError("no table") from LookupError("the word is missing")


class Points(DataModule):
    """Random points.

    Args:
        count: samples.
        batch_size: samples of a batch.
    """

    def __init__(self, count: int = 32, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.data = pairs(count)
        self.wide = 6

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class OwnNotes(Callback):
    """A callback with two arguments."""

    def __init__(self, text: str = "nothing", often: int = 1) -> None:
        self.text, self.often = text, often
