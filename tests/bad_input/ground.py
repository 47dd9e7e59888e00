"""Shared by the cases of bad input: a correct module, and the tables of mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from leyden import ConfigurationError, DataModule, Trainer, TrainModule

QUIET = {**models.QUIET, "max_epochs": 1}
"""Arguments of a Trainer that trains for one epoch, and shows and writes nothing."""


class Module(TrainModule):
    """A correct module, to which each case adds one mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(count: int = 8) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4), torch.randint(0, 2, (count,)))


def loader(count: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=2, **options)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.randn(4), torch.tensor(1)


class NoBatch:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Numbers(DataModule):
    def train_dataloader(self) -> Any:
        return loader()


@dataclass
class Ground:
    """Makes a case's modules, whose training steps are counted, and its Trainers, which write to one folder."""

    folder: Path
    modules: list[Module] = field(default_factory=list)

    def module(self, base: type[Module] = Module, **methods: Callable[..., Any]) -> Module:
        module = type("Broken", (base,), methods)()
        self.modules.append(module)
        return module

    def trainer(self, **arguments: Any) -> Trainer:
        return Trainer(**{**QUIET, "default_root_dir": self.folder, **arguments})

    def fit(self, module: Any = None, *data: Any, **arguments: Any) -> Trainer:
        trainer = self.trainer(**arguments)
        trainer.fit(self.module() if module is None else module, *(data or (loader(),)))
        return trainer

    def saved(self) -> Path:
        """Returns a checkpoint of a complete run."""
        trainer = self.fit()
        path = trainer.save_checkpoint(self.folder / "saved")
        self.modules.clear()
        return path

    @property
    def steps(self) -> int:
        return sum(module.steps for module in self.modules)


Case = tuple[str, type[Exception], str, Callable[[Ground], Any]]
BEFORE: list[Case] = []
DURING: list[Case] = []


def mistake(
    match: str, error: type[Exception] = ConfigurationError, when: list[Case] = BEFORE
) -> Callable[[Callable[[Ground], Any]], Callable[[Ground], Any]]:
    """Adds the function, and the error it raises, to the mistakes found before training or during it."""

    def add(function: Callable[[Ground], Any]) -> Callable[[Ground], Any]:
        when.append((function.__name__, error, match, function))
        return function

    return add


def returns(name: str, match: str, wrong: Callable[[Module, Any], Any], **arguments: Any) -> None:
    """Adds a mistake in the return value of training_step, which only training can reveal."""

    def run(ground: Ground) -> None:
        def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
            self.steps += 1
            return wrong(self, batch)

        ground.fit(ground.module(training_step=training_step), **arguments)

    DURING.append((name, ConfigurationError, match, run))


def optimizers(name: str, match: str, configured: Callable[[Module], Any], **arguments: Any) -> None:
    """Adds a mistake in the return value of configure_optimizers."""
    BEFORE.append(
        (
            name,
            ConfigurationError,
            match,
            lambda ground: ground.fit(ground.module(configure_optimizers=configured), **arguments),
        )
    )


def logs(name: str, match: str, call: Callable[[Module], Any]) -> None:
    """Adds a mistake in a call of self.log."""

    def run(ground: Ground) -> None:
        def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
            call(self)
            return self.loss(batch)

        ground.fit(ground.module(training_step=training_step))

    DURING.append((name, ConfigurationError, match, run))
