"""DataModule, a reusable class for a task's loaders and data preparation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from leyden.core.devices import find_device, pins_memory
from leyden.core.errors import ConfigurationError
from leyden.trainer.hparams import Hyperparameters, arguments_for, class_only

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from leyden.trainer.trainer import Trainer


class DataModule(Hyperparameters):
    """The loaders of a dataset. The Trainer calls `prepare_data` on one rank of each machine, then `setup` on every
    rank. Override the methods that you need.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Numbers(DataModule):
        ...     def setup(self, stage):
        ...         self.data = TensorDataset(torch.arange(10.))
        ...     def train_dataloader(self):
        ...         return DataLoader(self.data, batch_size=2, shuffle=True)
    """

    prepare_data_per_node: bool = True
    """True: the first rank of each machine calls `prepare_data`. False: only global rank 0 calls it."""
    state_per_rank: ClassVar[bool | None] = None
    """True: each rank saves and resumes its own state. False: all ranks resume rank 0's. None: as False, but warns if
    states differ.
    """

    def __init__(self) -> None:
        self.trainer: Trainer | None = None

    def __str__(self) -> str:
        """Returns the class and the number of samples behind each loader method that is overridden.

        Example:
            >>> from torch.utils.data import TensorDataset
            >>> print(DataModule.from_datasets(TensorDataset(torch.ones(6, 1)), [range(4), range(2)]))
            DataModule
              train_dataloader: 6 samples
              val_dataloader: 4 + 2 samples
        """
        lines = [type(self).__name__]
        for kind in ("train", "val", "test", "predict"):
            name = f"{kind}_dataloader"
            if getattr(type(self), name) is not getattr(DataModule, name):
                try:
                    lines.append(f"  {name}: {_samples_of(getattr(self, name)())}")
                except Exception as error:
                    lines.append(f"  {name}: not ready ({type(error).__name__})")
        return "\n".join(lines)

    def _join(self, trainer: Trainer) -> None:
        """Attaches the DataModule to a run."""
        self.trainer = trainer

    def prepare_data(self) -> None:
        """Downloads or preprocesses data on one rank per machine while the others wait. Set no attributes here.

        With `prepare_data_per_node = False` only global rank 0 calls it, for machines that share a file system.
        """

    def setup(self, stage: str) -> None:
        """Builds the datasets. Called on every rank; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Called at the end of a stage."""

    def train_dataloader(self) -> Any:
        """Returns the training loader."""
        raise self._unwritten("train_dataloader", "fit")

    def val_dataloader(self) -> Any:
        """Returns one or several validation loaders."""
        raise self._unwritten("val_dataloader", "validate")

    def test_dataloader(self) -> Any:
        """Returns one or several test loaders."""
        raise self._unwritten("test_dataloader", "test")

    def predict_dataloader(self) -> Any:
        """Returns one or several prediction loaders."""
        raise self._unwritten("predict_dataloader", "predict")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Transforms a batch before it moves to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves a batch to the device."""
        assert self.trainer is not None
        return self.trainer.strategy.to_device(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Transforms a batch on the device."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save in checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state returned by `state_dict`."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when the run fails."""

    def _unwritten(self, name: str, stage: str) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self).__name__} has no {name}: implement it, or pass a loader to Trainer.{stage}."
        )

    @class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        *,
        trust: bool = False,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Builds the DataModule from the hyperparameters in a checkpoint, and restores its state.

        Args:
            checkpoint_path: a checkpoint folder, or a Lightning `.ckpt`, which needs `trust=True`.
            map_location: has no effect; accepted because the module's method has it.
            hparams_file: a file of hyperparameters that replaces those of the checkpoint.
            trust: load a `.ckpt`, which may run code if torch's safe loader cannot read it.
            weights_only: only for a `.ckpt`, as in `Trainer.fit`; True never runs code.
            **kwargs: arguments of `__init__`, which override saved ones. Unknown arguments cause a warning.

        Raises:
            CheckpointError: if the checkpoint is damaged or not a checkpoint.
            ConfigurationError: if an argument of `__init__` was not saved, or the method is called on an instance,
                which it cannot change.
        """
        from leyden.checkpoint.module import load_datamodule

        return load_datamodule(cls, checkpoint_path, hparams_file, trust, weights_only, kwargs, arguments_for)

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | Sequence[Dataset[Any]] | None = None,
        test_dataset: Dataset[Any] | Sequence[Dataset[Any]] | None = None,
        predict_dataset: Dataset[Any] | Sequence[Dataset[Any]] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **init_kwargs: Any,
    ) -> DataModule:
        """Builds a DataModule from datasets; the training set is shuffled unless it is iterable.

        Args:
            train_dataset: the training set.
            val_dataset: one or several validation sets.
            test_dataset: one or several test sets.
            predict_dataset: one or several prediction sets.
            batch_size: samples per batch and rank.
            num_workers: worker processes of each loader.
            **init_kwargs: arguments of `__init__`.
        """

        def loader(data: Dataset[Any], shuffle: bool = False) -> DataLoader[Any]:
            shuffle = shuffle and not isinstance(data, IterableDataset)
            return DataLoader(
                data,
                batch_size=batch_size,
                shuffle=shuffle,
                num_workers=num_workers,
                pin_memory=pins_memory(find_device().type),
            )

        def loaders(data: Any) -> Any:
            return [loader(part) for part in data] if isinstance(data, (list, tuple)) else loader(data)

        methods: dict[str, Any] = {}
        if train_dataset is not None:
            methods["train_dataloader"] = lambda self: loader(train_dataset, shuffle=True)
        for name, data in (("val", val_dataset), ("test", test_dataset), ("predict", predict_dataset)):
            if data is not None:
                methods[f"{name}_dataloader"] = lambda self, data=data: loaders(data)
        given = (train_dataset, val_dataset, test_dataset, predict_dataset, batch_size, num_workers)
        # Spawned ranks cannot import a class that is created here, so instances pickle as the arguments of this method.
        methods["__reduce__"] = lambda self: (partial(cls.from_datasets, *given, **init_kwargs), (), vars(self))
        # A subclass, not instance attributes, because the Trainer finds loaders by the methods that a class overrides.
        return type(cls.__name__, (cls,), methods)(**init_kwargs)  # type: ignore[no-any-return]


def _samples_of(loaders: Any) -> str:
    """Returns "6 samples", or "4 + ? samples" for several loaders of which one has no length."""
    from leyden.data.combined import CombinedLoader

    if loaders is None:
        return "no loader"
    sizes = []
    for loader in CombinedLoader([loaders]).flattened if not isinstance(loaders, CombinedLoader) else loaders.flattened:
        data = getattr(loader, "dataset", loader)
        sizes.append(str(len(data)) if hasattr(type(data), "__len__") else "?")
    return f"{' + '.join(sizes)} samples"
