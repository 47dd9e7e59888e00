"""The data of a run: loaders from arguments, DataModule or module, and how their batches are moved to the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from leyden.callbacks.base import Callback, in_order
from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.strategies.ported import ported
from leyden.trainer.data.combined import CombinedLoader, holds_loaders
from leyden.trainer.data.cursor import LoaderCursor
from leyden.trainer.data.limits import batches_of, check_not_empty, warn_if_shuffled, without_shuffle
from leyden.trainer.data.sharding import DataRanks
from leyden.trainer.data.sifted import sifting
from leyden.trainer.data.streams import shard
from leyden.trainer.datamodule import DataModule
from leyden.trainer.events.hooks import overrides
from leyden.trainer.module import TrainModule

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy
    from leyden.trainer.arguments.arguments import Arguments
    from leyden.trainer.profilers import Profiler

Transfer = Callable[[Any, int], Any]
"""Moves a batch, with the index of its loader."""
STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}
STAGES = {"train": "fit", "val": "validate", "test": "test", "predict": "predict"}


class Loaders:
    """The loaders of one run, fetched when they are first needed.

    Args:
        module: has loaders of its own, where none are given.
        datamodule: has them before the module; None without one.
        strategy: has the ranks over which they are sharded.
        arguments: of the Trainer, which limit them.
        fits: they are those of a fit, in which validation is optional.
        given: loaders handed to `fit`, `validate`, `test` or `predict`, by "train", "val", "test", "predict".
    """

    def __init__(
        self,
        module: TrainModule,
        datamodule: DataModule | None,
        strategy: Strategy,
        arguments: Arguments,
        fits: bool,
        given: Mapping[str, Any],
    ) -> None:
        self._module, self._datamodule = module, datamodule
        self._strategy, self._arguments = strategy, arguments
        self._fits = fits
        self._given = given
        self.sizes: dict[str, int | list[int | None] | None] = {}
        """Batches of each kind of loader, as limited, once they were fetched."""
        self.train_loader: Any = None
        self.samples_per_batch: int | None = 0
        """Samples of a training batch of all ranks together; None where they are not known, 0 before it is loaded."""
        self.cursor: LoaderCursor | None = None
        """Reads the training loader; None until it is fetched."""
        self.fetched: dict[str, Any] = {}
        """The loaders of each kind, as they were given or returned."""

    @property
    def given(self) -> Mapping[str, Any]:
        """The loaders that the run was given, by kind."""
        return self._given

    def has(self, kind: str) -> bool:
        """True if there are loaders of that kind, and a step for them."""
        return self._owner(kind) is not None and self._has_step(kind)

    def _has_step(self, kind: str) -> bool:
        module = self._module
        return module.predict_step is not None if kind == "predict" else overrides(module, STEPS[kind], TrainModule)

    def _owner(self, kind: str) -> Any:
        name = f"{kind}_dataloader"
        if self._given.get(kind) is not None:
            return self._given
        datamodule = self._datamodule
        if datamodule is not None and overrides(datamodule, name, DataModule):
            return datamodule
        return self._module if overrides(self._module, name, TrainModule) else None

    def _fetch(self, kind: str) -> Any:
        owner = self._owner(kind)
        if owner is None:
            stage, module = STAGES[kind], type(self._module).__name__
            raise ConfigurationError(
                f"there is no {kind} loader: give one to Trainer.{stage}, or write {kind}_dataloader in {module} or a "
                "DataModule."
            )
        loaders = self._given[kind] if owner is self._given else getattr(owner, f"{kind}_dataloader")()
        if loaders is None:
            fix = "return a loader" if kind == "train" else "return a loader, or [] for none"
            raise ConfigurationError(f"{type(owner).__name__}.{kind}_dataloader returned None: {fix}.")
        self.fetched[kind] = loaders
        return loaders

    def training(self) -> tuple[LoaderCursor, int | None]:
        """The training data, and its number of batches in an epoch (None where the loader does not know)."""
        arguments = self._arguments
        loader = self._fetch("train")
        if isinstance(loader, (dict, list, tuple)) and holds_loaders(loader):
            loader = CombinedLoader(loader, "max_size_cycle")
        _check_iterable("train", loader)
        if arguments.overfit_batches:
            loader = without_shuffle(loader)
        check_not_empty(loader, "train")
        skips = arguments.on_bad_sample == "skip"
        if skips:
            self._check_skipping()
        loader = self._sharded(loader, True)
        if skips:
            loader = sifting(loader, DataRanks.of(self._strategy) if self._strategy.data_size > 1 else DataRanks())
        cursor = LoaderCursor(loader, allow_replay=arguments.allow_replay, sample_rng=arguments.sample_rng)
        count = batches_of(arguments.limit_train_batches, cursor.length, "limit_train_batches")
        self.train_loader, self.cursor = loader, cursor
        self.samples_per_batch = self._samples_of(loader)
        known = cursor.length is not None
        self.sizes["train"] = count
        return cursor, count if known else None

    def _check_skipping(self) -> None:
        """Refuses `on_bad_sample="skip"` where ranks could come to different batches."""
        strategy = self._strategy
        if strategy.data_size != strategy.ranks.world_size:
            raise ConfigurationError(
                f"on_bad_sample='skip' with strategy={strategy.name!r}, where several ranks load the same samples: an "
                "error that only one of them meets would leave them with different batches. Leave it at 'raise'."
            )
        if strategy.data_size > 1 and not self._arguments.use_distributed_sampler:
            raise ConfigurationError(
                "on_bad_sample='skip' with use_distributed_sampler=False on several ranks, whose own loaders may have "
                "different numbers of batches, while they count each batch together: leave use_distributed_sampler at "
                "True (a DistributedSampler of your own is kept), or on_bad_sample at 'raise'."
            )

    def _sharded(self, loader: Any, trains: bool) -> Any:
        """This rank's share of a loader, where there are several ranks, or a global batch to keep."""
        strategy, arguments = self._strategy, self._arguments
        even, whole = (arguments.even_batches, arguments.global_batch_size) if trains else (False, None)
        # Ranks of one tp group agree on an order too, which they would shuffle each for itself.
        if strategy.ranks.world_size == 1 and whole is None:
            return loader
        foreign = not arguments.use_distributed_sampler
        # A rank that is done with an evaluation may stop, unless the others' forward passes wait for it.
        return shard(loader, DataRanks.of(strategy, even, whole), foreign, asks=trains or not strategy.replicates)

    def _samples_of(self, loader: Any) -> int | None:
        if self._arguments.global_batch_size is not None:
            return self._arguments.global_batch_size
        sizes = batch_sizes(loader)
        return sum(sizes) * self._strategy.data_size if sizes else None

    def limited(self, length: int) -> int | None:
        """How many training batches `limit_train_batches` leaves of an epoch of that length."""
        return batches_of(self._arguments.limit_train_batches, length, "limit_train_batches")

    def evaluation(self, kind: str) -> list[tuple[LoaderCursor, int | None]]:
        """The loaders of an evaluation, each with its limit.

        There are none where the limit is 0, and where a validation in fit has no loader or no step.
        """
        self.sizes[kind] = []
        optional = kind == "val" and self._fits
        name = f"limit_{kind}_batches"
        limit = getattr(self._arguments, name)
        if limit == 0 or (optional and self._owner(kind) is None):
            return []
        if not self._has_step(kind):
            message = f"there is a {kind} loader, and {type(self._module).__name__} has no {STEPS[kind]}: write one."
            if not optional:
                raise ConfigurationError(message)
            if self._module.validation_step is not None:
                warnings.warn(message, stacklevel=2)
            return []
        found = self._fetch(kind)
        if isinstance(found, (list, tuple, Mapping)) and not found:
            if not optional:
                warnings.warn(f"Trainer.{STAGES[kind]} was given no loader, and runs nothing.", stacklevel=2)
            return []
        overfits = optional and self._arguments.overfit_batches
        result: list[tuple[LoaderCursor, int | None]] = []
        for loader, most in _flat(found):
            _check_iterable(kind, loader)
            check_not_empty(loader, kind)
            if overfits:
                loader = without_shuffle(loader)
            if kind == "val":
                warn_if_shuffled(loader, kind)
            cursor = LoaderCursor(self._sharded(loader, False))
            count = batches_of(limit, cursor.length, name)
            result.append((cursor, most if count is None or (most is not None and most < count) else count))
        self.sizes[kind] = [count for _, count in result]
        return result


def _flat(loaders: Any) -> list[tuple[Any, int | None]]:
    """The loaders of an evaluation, which run one after the other, each with its own limit.

    A CombinedLoader of another mode than "sequential" is one loader.
    """
    if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
        return list(zip(loaders.flattened, loaders.limits, strict=True))
    if isinstance(loaders, Mapping):
        return [part for value in loaders.values() for part in _flat(value)]
    if isinstance(loaders, (list, tuple)) and holds_loaders(loaders):
        return [part for value in loaders for part in _flat(value)]
    return [(loaders, None)]


def _check_iterable(kind: str, loader: Any) -> None:
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ConfigurationError(
            f"the {kind} loader is {kind_of(loader)}, over which nothing can iterate: "
            f"{ported(loader, 'give a DataLoader, or any iterable of batches')}."
        )
    if isinstance(loader, Dataset) and not hasattr(type(loader), "__iter__"):
        raise ConfigurationError(
            f"the {kind} loader is {kind_of(loader)}, a data set, whose single samples would be taken for batches: "
            "give DataLoader(dataset, batch_size=…)."
        )


def transformed(transfer: Transfer | None, callbacks: list[Callback], module: TrainModule) -> Transfer | None:
    """The function that moves a training batch, and then has callbacks transform it; None where there is nothing to do.

    Args:
        transfer: moves it.
        callbacks: of the run.
        module: handed to them.
    """
    calls = [c.transform_train_batch for c in in_order(callbacks) if overrides(c, "transform_train_batch", Callback)]
    if not calls:
        return transfer

    def transform(batch: Any, dataloader_idx: int) -> Any:
        if transfer is not None:
            batch = transfer(batch, dataloader_idx)
        for call in calls:
            batch = call(module.trainer, module, batch)
        return batch

    return transform


def batch_sizes(loader: Any) -> list[int]:
    """Batch sizes of a loader, or of each of several that are read side by side; empty where they are not known.

    Loaders that are read one after the other have one size, if all have the same.
    """
    parts = getattr(loader, "flattened", None)
    if parts is not None:
        found = [batch_sizes(part) for part in parts]
        if getattr(loader, "mode", None) == "sequential":
            return found[0] if all(sizes == found[0] for sizes in found) else []
        return [size for sizes in found for size in sizes] if all(found) else []
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return [size] if isinstance(size, int) else []


def transfer_of(
    strategy: Strategy, module: TrainModule, datamodule: DataModule | None, profiler: Profiler | None
) -> Transfer | None:
    """The function that moves a batch; None where there is nothing to do. A DataModule's hooks replace the module's."""

    def hook(name: str) -> Callable[..., Any] | None:
        if datamodule is not None and overrides(datamodule, name, DataModule):
            return getattr(datamodule, name)  # type: ignore[no-any-return]
        return getattr(module, name) if overrides(module, name, TrainModule) else None

    before, after = hook("on_before_batch_transfer"), hook("on_after_batch_transfer")
    move, device = hook("transfer_batch_to_device"), strategy.root_device
    if before is None and move is None and after is None and strategy.leaves_batches:
        return None

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if before is not None:
            batch = before(batch, dataloader_idx)
        batch = strategy.to_device(batch) if move is None else move(batch, device, dataloader_idx)
        return batch if after is None else after(batch, dataloader_idx)

    return transfer if profiler is None else profiler.wrap("transfer_batch_to_device", transfer)
