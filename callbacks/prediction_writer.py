"""BasePredictionWriter, the base class of callbacks that write predictions during `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from leyden.callbacks.base import Callback
from leyden.core.checks import check_choice
from leyden.core.errors import ConfigurationError
from leyden.core.tree import move_to_device
from leyden.data.combined import loaders_in_turn
from leyden.data.sharding import block

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class WriteInterval(Enum):
    """When predictions are written."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        return self is not WriteInterval.EPOCH

    @property
    def on_epoch(self) -> bool:
        return self is not WriteInterval.BATCH


class BasePredictionWriter(Callback):
    """Base class of callbacks that write predictions after each batch, at the end of `predict`, or both.

    Each rank writes the predictions for its own samples: include `trainer.global_rank`, or the samples' indices, in the
    file name. With `predict(return_predictions=False)` no rank keeps or gathers predictions for the caller. "epoch"
    keeps this rank's predictions on the CPU.

    Args:
        write_interval: "batch" calls `write_on_batch_end`, "epoch" `write_on_epoch_end`, "batch_and_epoch" both.

    Raises:
        ConfigurationError: for an unknown interval; at the start of `predict`, if the method to call is not overridden.

    Example:
        >>> class Writer(BasePredictionWriter):
        ...     def write_on_batch_end(
        ...         self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx
        ...     ):
        ...         torch.save(prediction, f"{trainer.default_root_dir}/{dataloader_idx}-{batch_indices[0]}.pt")
        >>> Writer("batch").interval.on_epoch
        False
    """

    state_per_rank = False

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        intervals = [interval.value for interval in WriteInterval]
        check_choice(type(self).__name__, intervals, write_interval=write_interval)
        self.interval = WriteInterval(write_interval)
        self._predictions: list[list[Any]] = []
        self._indices: list[list[list[int] | None]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Writes the predictions for one batch. Override it.

        Args:
            trainer: the Trainer.
            module: the module.
            prediction: the return value of `predict_step`, on its device.
            batch_indices: the indices of the batch's samples in the data set; None if the loader shuffles, has a custom
                sampler, or reads an iterable.
            batch: the batch.
            batch_idx: the index of the batch, the same for the ranks' parts of a global batch.
            dataloader_idx: the index of its loader.
        """

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Writes all predictions of this rank. Override it.

        Args:
            trainer: the Trainer.
            module: the module.
            predictions: the return value of `predict_step` for each batch, on the CPU; with several loaders, a list for
                each loader.
            batch_indices: a list for each loader with the `batch_indices` of each batch, as in `write_on_batch_end`.
        """

    # a run ------------------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "predict":
            return
        needed = {"write_on_batch_end": self.interval.on_batch, "write_on_epoch_end": self.interval.on_epoch}
        for name, is_called in needed.items():
            if is_called and getattr(type(self), name) is getattr(BasePredictionWriter, name):
                raise ConfigurationError(
                    f"{type(self).__name__}(write_interval={self.interval.value!r}) needs {name}: override it, or use "
                    "another interval."
                )

    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        count = len(loaders_in_turn(trainer.predict_dataloaders))
        self._predictions = [[] for _ in range(count)]
        self._indices = [[] for _ in range(count)]

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        loader, _ = loaders_in_turn(trainer.predict_dataloaders)[dataloader_idx]
        indices = _indices(trainer, loader, batch_idx)
        if self.interval.on_batch:
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval.on_epoch:
            self._predictions[dataloader_idx].append(move_to_device(outputs, torch.device("cpu")))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.interval.on_epoch:
            predictions = self._predictions[0] if len(self._predictions) == 1 else self._predictions
            self.write_on_epoch_end(trainer, module, predictions, self._indices)
        self._predictions, self._indices = [], []


def _indices(trainer: Trainer, loader: Any, batch_idx: int) -> list[int] | None:
    """Returns the indices of this rank's samples in a batch; None unless the loader follows its data set's order."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if not isinstance(loader.sampler, SequentialSampler) or type(loader.batch_sampler) is not BatchSampler:
        return None
    if loader.batch_size is None:
        return None
    strategy = trainer.strategy
    # If the loader is not sharded, every rank gets all samples.
    is_sharded = trainer.accelerator.share is not None and trainer.arguments.use_distributed_sampler
    ranks = strategy.data_size if is_sharded else 1
    start = batch_idx * loader.batch_size * ranks
    whole = range(start, min(start + loader.batch_size * ranks, len(loader.dataset)))  # type: ignore[arg-type]
    return list(whole[block(len(whole), strategy.data_rank, ranks)] if is_sharded else whole)
