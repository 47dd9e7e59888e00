"""Trials: short runs of copies, that leave the originals, random numbers, loggers and folders as they were."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.utils.data import Dataset

from leyden.strategies.errors import ConfigurationError
from leyden.trainer.data.combined import CombinedLoader
from leyden.trainer.data.rng import isolated_rng
from leyden.trainer.datamodule import DataModule

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

T = TypeVar("T")


@dataclass
class Subject:
    """What is tried: a module and its data, as they are handed to the Trainer's method.

    Attributes:
        trainer: whose arguments a trial has.
        method: "fit", "validate", "test" or "predict".
        module: of which trials run copies.
        loaders: by the names that the method has for them.
        datamodule: of which trials have copies; None without one.
    """

    trainer: Trainer
    method: str
    module: TrainModule
    loaders: Mapping[str, Any]
    datamodule: DataModule | None = None

    def copied(self) -> Subject:
        """The same with copies of module and DataModule, which share their data sets and tensors of data."""
        return Subject(
            self.trainer, self.method, _copy(self.module), self.loaders, self.datamodule and _copy(self.datamodule)
        )

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Within the block random numbers, those of the loaders too, may be drawn: they are restored."""
        with isolated_rng([part for loader in self.loaders.values() for part in _parts(loader)]):
            yield

    def run(self, callbacks: Sequence[Callback], **arguments: Any) -> Trainer:
        """Runs a trial on this module itself; returns its Trainer.

        Args:
            callbacks: of the trial.
            **arguments: of the Trainer, in place of those of the user's.
        """
        trainer = self.trainer.trial(callbacks, **arguments)
        more = {} if self.method in ("fit", "predict") else {"verbose": False}
        getattr(trainer, self.method)(self.module, datamodule=self.datamodule, **self.loaders, **more)
        return trainer


def _copy(owner: T) -> T:
    """Copies an owner and what it has, but for data sets and, in a DataModule, tensors."""
    shared = (Dataset, Tensor) if isinstance(owner, DataModule) else (Dataset,)
    memo = {id(value): value for value in vars(owner).values() if isinstance(value, shared)}
    if isinstance(owner, DataModule):
        # The Trainer that it was with last is no part of it.
        memo |= {id(owner.trainer): None} if owner.trainer is not None else {}  # type: ignore[dict-item]
    try:
        return copy.deepcopy(owner, memo)  # type: ignore[arg-type]
    except Exception as error:
        raise ConfigurationError(
            f"{type(owner).__name__} cannot be copied ({type(error).__name__}: {error}), and a search tries copies so "
            "that it leaves no trace: search before the first fit (Tuner), or give it a __deepcopy__."
        ) from error


def _parts(loader: Any) -> list[Any]:
    """The loaders in what was given for one."""
    if isinstance(loader, CombinedLoader):
        return list(loader.flattened)
    if isinstance(loader, Mapping):
        return [part for value in loader.values() for part in _parts(value)]
    if isinstance(loader, (list, tuple)):
        return [part for value in loader for part in _parts(value)] if loader and not _is_batch(loader[0]) else []
    return [] if loader is None else [loader]


def _is_batch(value: Any) -> bool:
    return isinstance(value, (Tensor, int, float))


def owners_of(name: str, module: Any, datamodule: Any) -> list[Any]:
    """Those among module, its hyperparameters and DataModule that have a value of a name, each as `assign` takes it."""
    found = [owner for owner in (module, datamodule) if owner is not None and name in _fields(owner)]
    hparams = [owner.hparams for owner in (module, datamodule) if owner is not None and name in owner.hparams]
    return [*found, *hparams]


def _fields(owner: Any) -> set[str]:
    settable = {name for kind in type(owner).__mro__ for name, value in vars(kind).items() if not callable(value)}
    return settable | set(vars(owner))


def assign(name: str, value: float, owners: Sequence[Any]) -> None:
    """Gives each owner the value that was found: an attribute, or an entry of hyperparameters."""
    for owner in owners:
        if isinstance(owner, Mapping):
            owner[name] = value  # type: ignore[index]
        else:
            setattr(owner, name, value)
