"""Tuner: searches for a learning rate or a batch size before a run, with Lightning's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from leyden.core.errors import ConfigurationError, nearest
from leyden.core.rank_zero import inform, warn
from leyden.trainer.datamodule import DataModule
from leyden.trainer.tuning.batch_size import BatchSizeSearch
from leyden.trainer.tuning.learning_rate import LRFinder, RateSearch
from leyden.trainer.tuning.trial import LOADERS, Subject, assign

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

Method: TypeAlias = Literal["fit", "validate", "test", "predict"]


class Tuner:
    """Searches with short runs of module copies, on the devices and in the precision of a Trainer.

    Except for the value found, a run after a search is bit for bit the run without it: weights, optimizers, random
    states, the order of samples, loggers and folders are unchanged.

    Args:
        trainer: the Trainer whose arguments the trials use, without its callbacks, loggers and checkpoints.

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
        >>> finder = Tuner(trainer).lr_find(module, torch.ones(4, 3, 2), num_training=20, update_attr=False)
        >>> len(finder.results["lr"]), finder.suggestion() < 1
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
        """Trains a copy of the module with a learning rate that grows in each step, and records the loss.

        Args:
            model: the module, with one optimizer.
            train_dataloaders: a loader, a dict or list of loaders, or a DataModule.
            val_dataloaders: accepted as in `fit`, but not used.
            dataloaders: must be None; only for methods other than fit.
            datamodule: provides the loaders.
            method: must be "fit".
            min_lr: the first rate.
            max_lr: the last rate.
            num_training: number of steps.
            mode: growth of the rate: "exponential" or "linear".
            early_stop_threshold: stop once the loss exceeds this multiple of the best loss; None to never stop early.
            update_attr: set the module's rate to the suggestion.
            attr_name: the attribute or hyperparameter to set; "" for `lr` or `learning_rate`.

        Returns:
            The recorded rates and losses; None under fast_dev_run, which skips the search.

        Raises:
            ConfigurationError: if an argument or the module does not allow a search; the message names the fix.
        """
        if method != "fit":
            raise ConfigurationError(f"lr_find(method={method!r}): a learning rate search needs method='fit'.")
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
        """Searches for the largest batch size that fits into memory, and sets it on the module or DataModule.

        Args:
            model: the module; its loader methods must use the batch size.
            train_dataloaders: a DataModule. A loader is rejected because its batch size is fixed.
            val_dataloaders: must be None, for the same reason.
            dataloaders: must be None, for the same reason.
            datamodule: provides the loaders.
            method: "fit", "validate", "test" or "predict".
            mode: "power" doubles the size until it is too large; "binsearch" then bisects the remaining interval.
            steps_per_trial: number of steps that must fit.
            init_val: the first size.
            max_trials: maximum number of sizes to try.
            batch_arg_name: the attribute or hyperparameter with the batch size.
            margin: the fraction by which "binsearch" reduces the size it found, as a safety margin.
            max_val: the largest size to try; None for no limit.

        Returns:
            The batch size; None under fast_dev_run, which skips the search.

        Raises:
            ConfigurationError: if an argument or the module does not allow a search; the message names the fix.
        """
        search = BatchSizeSearch(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        subject = self._subject(model, method, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        return find_batch_size(search, subject)

    def _subject(
        self, model: TrainModule, method: str, train: Any, val: Any, dataloaders: Any, datamodule: DataModule | None
    ) -> Subject:
        if method not in LOADERS:
            raise ConfigurationError(f"method={method!r}: {nearest(str(method), LOADERS)}")
        if isinstance(train, DataModule):
            train, datamodule = None, train
        if method == "fit" and dataloaders is not None:
            raise ConfigurationError("dataloaders is for validate, test and predict: use train_dataloaders for fit.")
        if method != "fit" and (train is not None or val is not None):
            raise ConfigurationError(
                f"train_dataloaders and val_dataloaders are for fit: use dataloaders for {method}."
            )
        loaders = (
            {"train_dataloaders": train, "val_dataloaders": val} if method == "fit" else {"dataloaders": dataloaders}
        )
        return Subject(self._trainer, method, model, loaders, datamodule)


def find_rate(search: RateSearch, subject: Subject) -> tuple[LRFinder | None, float | None]:
    """Searches for a learning rate, and sets the suggestion on the module.

    Returns:
        The result, None under fast_dev_run; and the rate set on the module, None if none was set.
    """
    if subject.trainer.fast_dev_run:
        warn("fast_dev_run skips the search for a learning rate.")
        return None, None
    name, owners = search.owners(subject) if search.update_attr else ("", [])
    finder = search.search(subject)
    rate = finder.suggestion() if owners else None
    if rate is not None:
        assign(name, rate, owners)
        if subject.trainer.arguments.verbose:
            inform(f"found learning rate {rate:.3g} and set {name}", subject.trainer.print)
    return finder, rate


def find_batch_size(search: BatchSizeSearch, subject: Subject) -> int | None:
    """Searches for a batch size, and sets it on its owners; returns None under fast_dev_run."""
    if subject.trainer.fast_dev_run:
        warn("fast_dev_run skips the search for a batch size.")
        return None
    if subject.method == "fit" and any(getattr(one, "counts_samples", False) for one in subject.trainer.callbacks):
        raise ConfigurationError(
            "a batch size cannot be searched with BatchSizeScheduler, whose sizes are multiples of the loader's. "
            "Search with a Trainer without it, and choose its sizes from the result."
        )
    owners = search.owners(subject)
    size = search.search(subject)
    assign(search.batch_arg_name, size, owners)
    if subject.trainer.arguments.verbose:
        inform(f"found batch size {size} and set {search.batch_arg_name}", subject.trainer.print)
    return size
