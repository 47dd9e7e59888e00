"""Trials: short runs of copies without side effects on the originals, random states, loggers or folders."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.utils.data import Dataset

from leyden.core.errors import ConfigurationError
from leyden.data.combined import CombinedLoader
from leyden.data.rng import isolated_rng
from leyden.trainer.datamodule import DataModule

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

T = TypeVar("T")
LOADERS = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
"""The Trainer's names for the loaders of its methods."""


@dataclass
class Subject:
    """The subject of trials: a module and its data, as passed to a method of the Trainer."""

    trainer: Trainer
    """The Trainer whose arguments trials use."""
    method: str
    module: TrainModule
    loaders: Mapping[str, Any]
    """The loaders, by the names of the method's arguments."""
    datamodule: DataModule | None

    @classmethod
    def of_run(cls, trainer: Trainer, method: str, module: TrainModule) -> Subject:
        """Returns the subject of a method that is running, with the loaders that were passed to it."""
        passed = trainer.given_loaders
        loaders = {"dataloaders": passed.get(LOADERS[method])}
        if method == "fit":
            loaders = {"train_dataloaders": passed.get("train"), "val_dataloaders": passed.get("val")}
        return cls(trainer, method, module, loaders, trainer.datamodule)

    def copied(self) -> Subject:
        """Returns a subject with copies of module and DataModule; data sets and the DataModule's tensors are shared."""
        return Subject(
            self.trainer, self.method, _copy(self.module), self.loaders, self.datamodule and _copy(self.datamodule)
        )

    @contextmanager
    def restoring_rng(self) -> Iterator[None]:
        """Restores random states, including those of the loaders, after the block."""
        with isolated_rng([part for loader in self.loaders.values() for part in _parts(loader)]):
            yield

    def run(self, callbacks: Sequence[Callback], **arguments: Any) -> Trainer:
        """Runs a trial on this module itself, with other arguments than the Trainer's; returns the trial's Trainer."""
        trainer = self.trainer.trial(callbacks, **arguments)
        quiet = {} if self.method in ("fit", "predict") else {"verbose": False}
        getattr(trainer, self.method)(self.module, datamodule=self.datamodule, **self.loaders, **quiet)
        self.trainer.note_trial(trainer)
        return trainer


def _copy(owner: T) -> T:
    """Returns a deep copy of an owner, except for data sets and, in a DataModule, tensors."""
    shared = (Dataset, Tensor) if isinstance(owner, DataModule) else (Dataset,)
    memo = {id(value): value for value in vars(owner).values() if isinstance(value, shared)}
    if isinstance(owner, DataModule):
        # Its last Trainer is not copied.
        memo |= {id(owner.trainer): None} if owner.trainer is not None else {}  # type: ignore[dict-item]
    try:
        return copy.deepcopy(owner, memo)  # type: ignore[arg-type]
    except Exception as error:
        raise ConfigurationError(
            f"{type(owner).__name__} cannot be copied ({type(error).__name__}: {error}), but a search runs copies to "
            "leave the original unchanged. Search before the first fit (Tuner), or implement __deepcopy__."
        ) from error


def _parts(loader: Any) -> list[Any]:
    """Returns all loaders in a value passed as a loader."""
    if isinstance(loader, CombinedLoader):
        return list(loader.flattened)
    if isinstance(loader, Mapping):
        return [part for value in loader.values() for part in _parts(value)]
    if isinstance(loader, (list, tuple)):
        holds_loaders = loader and not isinstance(loader[0], (Tensor, int, float))
        return [part for value in loader for part in _parts(value)] if holds_loaders else []
    return [] if loader is None else [loader]


def owners_of(name: str, module: Any, datamodule: Any) -> list[Any]:
    """Returns the owners of a name for `assign`: module, DataModule, and the hyperparameters of both."""
    owners = [owner for owner in (module, datamodule) if owner is not None and name in _fields(owner)]
    hparams = [owner.hparams for owner in (module, datamodule) if owner is not None and name in owner.hparams]
    return [*owners, *hparams]


def _fields(owner: Any) -> set[str]:
    settable = {name for kind in type(owner).__mro__ for name, value in vars(kind).items() if not callable(value)}
    return settable | set(vars(owner))


def assign(name: str, value: float, owners: Sequence[Any]) -> None:
    """Sets a value on each owner, as an attribute or as an entry of hyperparameters."""
    for owner in owners:
        if isinstance(owner, Mapping):
            owner[name] = value  # type: ignore[index]
        else:
            setattr(owner, name, value)
