"""Tuner: searches a learning rate or a batch size before a run, with Lightning's names."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from leyden.strategies.errors import ConfigurationError, nearest
from leyden.trainer.datamodule import DataModule
from leyden.trainer.tuning.batch_size import LIMITS, BatchSizeSearch
from leyden.trainer.tuning.learning_rate import LRFinder, RateSearch
from leyden.trainer.tuning.trial import Subject, assign

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

Method: TypeAlias = Literal["fit", "validate", "test", "predict"]


class Tuner:
    """Searches with short runs of copies of a module, on the devices and in the precision of a Trainer.

    A run after a search is bit for bit the run without it, but for the value that was found: weights, optimizers,
    random numbers, the order of samples, loggers and folders stay as they were.

    Args:
        trainer: whose arguments the trials have; callbacks, loggers and checkpoints are left out.

    Example:
        >>> import torch, leyden
        >>> class Line(leyden.TrainModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.lr, self.layer = 0.1, torch.nn.Linear(2, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=self.lr)
        >>> module, trainer = Line(), leyden.Trainer(accelerator="cpu", logger=False)
        >>> found = Tuner(trainer).lr_find(module, torch.ones(4, 3, 2), num_training=20, update_attr=False)
        >>> len(found.results["lr"]), found.suggestion() < 1
        (20, True)
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Method = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LRFinder | None:
        """Trains a copy with a learning rate that grows in each step, and notes the loss.

        Args:
            model: the module, with one optimizer.
            train_dataloaders: a loader, or a dict or list of loaders; or a DataModule.
            val_dataloaders: taken as by `fit`, and not read.
            dataloaders: must be None: for other methods than fit.
            datamodule: gives the loaders.
            method: "fit".
            min_lr: the first rate.
            max_lr: the last one.
            num_training: steps.
            mode: how the rate grows: "exponential" or "linear".
            early_stop_threshold: ends the search once the loss is so many times the best; None for no end.
            update_attr: give the module the suggested rate.
            attr_name: which attribute or hyperparameter; `lr` or `learning_rate` if empty.

        Returns:
            What was found; None under fast_dev_run, which searches nothing.

        Raises:
            ConfigurationError: for what cannot be searched; names the fix.
        """
        if method != "fit":
            raise ConfigurationError(f"lr_find(method={method!r}): a learning rate is searched by fit alone.")
        search = RateSearch(min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name)
        subject = self._subject(model, method, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        return find_rate(search, subject)[0]

    def scale_batch_size(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Method = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int | None = 8192,
    ) -> int | None:
        """Searches the largest batch that fits into memory, and gives it to the module or DataModule.

        Args:
            model: the module, whose loaders are made by the size.
            train_dataloaders: a DataModule; a loader is refused, as its batches are made already.
            val_dataloaders: must be None, likewise.
            dataloaders: must be None, likewise.
            datamodule: gives the loaders.
            method: "fit", "validate", "test" or "predict".
            mode: "power" doubles the size until it is too large; "binsearch" halves the interval then.
            steps_per_trial: steps that must fit.
            init_val: the first size.
            max_trials: sizes tried at most.
            batch_arg_name: the attribute or hyperparameter that is the size.
            margin: what "binsearch" leaves free of the size that it found, as a fraction.
            max_val: no larger one is tried; None for no limit.

        Returns:
            The size; None under fast_dev_run, which searches nothing.

        Raises:
            ConfigurationError: for what cannot be searched; names the fix.
        """
        search = BatchSizeSearch(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        subject = self._subject(model, method, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        return find_batch_size(search, subject)

    def _subject(
        self, model: TrainModule, method: str, train: Any, val: Any, dataloaders: Any, datamodule: DataModule | None
    ) -> Subject:
        if method not in LIMITS:
            raise ConfigurationError(f"method={method!r}: {nearest(str(method), LIMITS)}")
        if isinstance(train, DataModule):
            train, datamodule = None, train
        if method == "fit" and dataloaders is not None:
            raise ConfigurationError("dataloaders is for validate, test and predict: give train_dataloaders for fit.")
        if method != "fit" and (train is not None or val is not None):
            raise ConfigurationError(f"train_dataloaders and val_dataloaders are for fit: give {method} dataloaders.")
        loaders = (
            {"train_dataloaders": train, "val_dataloaders": val} if method == "fit" else {"dataloaders": dataloaders}
        )
        return Subject(self._trainer, method, model, loaders, datamodule)


def find_rate(search: RateSearch, subject: Subject) -> tuple[LRFinder | None, float | None]:
    """Searches a learning rate, and gives the module what is suggested.

    Returns:
        What was found, None under fast_dev_run; and the rate that the module was given, None if it was not.
    """
    if subject.trainer.fast_dev_run:
        warnings.warn("fast_dev_run skips the search for a learning rate.", stacklevel=3)
        return None, None
    name, owners = search.owners(subject) if search.update_attr else ("", [])
    found = search.search(subject)
    rate = found.suggestion() if owners else None
    if rate is not None:
        assign(name, rate, owners)
        subject.trainer.print(f"found learning rate {rate:.3g} and set {name}")
    return found, rate


def find_batch_size(search: BatchSizeSearch, subject: Subject) -> int | None:
    """Searches a batch size, and gives it to those who have it; None under fast_dev_run."""
    if subject.trainer.fast_dev_run:
        warnings.warn("fast_dev_run skips the search for a batch size.", stacklevel=3)
        return None
    if subject.method == "fit" and any(getattr(one, "counts_samples", False) for one in subject.trainer.callbacks):
        raise ConfigurationError(
            "a search for a batch size does not go with BatchSizeScheduler, whose sizes are multiples of the loader's: "
            "search with a Trainer without it, and choose its sizes by what was found."
        )
    owners = search.owners(subject)
    size = search.search(subject)
    assign(search.batch_arg_name, size, owners)
    subject.trainer.print(f"found batch size {size} and set {search.batch_arg_name}")
    return size
