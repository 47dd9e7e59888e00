"""The data of a run: loaders from arguments, DataModule or module, and the transfer of batches to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from leyden.callbacks.base import Callback, in_order
from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.ported import ported
from leyden.core.rank_zero import warn
from leyden.trainer.datamodule import DataModule
from leyden.trainer.events.hooks import overrides
from leyden.trainer.module import TrainModule

if TYPE_CHECKING:
    from leyden.data.cursor import LoaderCursor
    from leyden.strategies.base import Strategy
    from leyden.trainer.arguments.arguments import Arguments
    from leyden.trainer.profilers import Profiler

Transfer = Callable[[Any, int], Any]
"""Moves a batch to the device. The second argument is the index of its loader."""
STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}
STAGES = {"train": "fit", "val": "validate", "test": "test", "predict": "predict"}


class Loaders:
    """The loaders of one run, fetched lazily.

    Loaders passed to the Trainer take precedence over those of the DataModule, and these over the module's.

    Args:
        module: the module, which may define loaders.
        datamodule: the DataModule, which may define loaders; None without one.
        strategy: the strategy, whose ranks the loaders are sharded over.
        arguments: the Trainer's arguments, which limit the loaders.
        fits: True for the loaders of a fit, in which validation is optional.
        given: the loaders passed to `fit`, `validate`, `test` or `predict`, by "train", "val", "test", "predict".
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
        """Number of batches of each kind of loader, after limits. Filled when the loaders are fetched."""
        self.train_loader: Any = None
        self.samples_per_batch: int | None = 0
        """Samples in a training batch of all ranks together; None if unknown, 0 before the loader is fetched."""
        self.cursor: LoaderCursor | None = None
        """The cursor over the training loader; None until the loader is fetched."""
        self._overfitted: Any = None
        """The training loader under `overfit_batches`, which is validated in place of the validation loaders."""
        self.fetched: dict[str, Any] = {}
        """The loaders of each kind, as passed in or as returned by their owner."""
        self.transfer: Transfer | None = None
        """Moves a batch to the device; None before setup, and if there is nothing to do."""
        self.train_transfer: Transfer | None = None
        """The same for training batches, which callbacks may transform."""

    def prepare_transfer(self, profiler: Profiler | None, callbacks: list[Callback]) -> None:
        """Finds out, once the module is set up, what moves a batch to the device."""
        self.transfer = transfer_of(self._strategy, self._module, self._datamodule, profiler)
        self.train_transfer = transformed(self.transfer, callbacks, self._module)

    @property
    def given(self) -> Mapping[str, Any]:
        """The loaders passed to the Trainer, by kind."""
        return self._given

    def has(self, kind: str) -> bool:
        """Returns True if there is a loader of that kind, and a step to run on it."""
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
            from leyden.trainer.starting.uncalled_hooks import misspelled

            stage, module = STAGES[kind], type(self._module).__name__
            hints = (misspelled(each, f"{kind}_dataloader") for each in (self._datamodule, self._module) if each)
            raise ConfigurationError(
                f"there is no {kind} loader: pass one to Trainer.{stage}, or define {kind}_dataloader in {module} or "
                f"in a DataModule.{next(filter(None, hints), '')}"
            )
        loaders = self._given[kind] if owner is self._given else getattr(owner, f"{kind}_dataloader")()
        if loaders is None:
            fix = "return a loader" if kind == "train" else "return a loader, or [] for none"
            raise ConfigurationError(f"{type(owner).__name__}.{kind}_dataloader returned None: {fix}.")
        self.fetched[kind] = loaders
        return loaders

    def training(self) -> tuple[LoaderCursor, int | None]:
        """Fetches the training loader.

        Returns:
            The cursor over this rank's shard of it, and the number of batches in an epoch (None if it has no length).
        """
        from leyden.data.combined import CombinedLoader, holds_loaders
        from leyden.data.cursor import LoaderCursor
        from leyden.data.limits import batches_of, check_not_empty, without_shuffle
        from leyden.data.sharding import DataRanks
        from leyden.data.sifted import sifting

        arguments = self._arguments
        loader = self._fetch("train")
        if isinstance(loader, (dict, list, tuple)) and holds_loaders(loader):
            loader = CombinedLoader(loader, "max_size_cycle")
        _check_iterable("train", loader)
        if arguments.overfit_batches:
            loader = self._overfitted = without_shuffle(loader)
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
        self.sizes["train"] = count
        return cursor, None if cursor.length is None else count

    def _check_skipping(self) -> None:
        """Refuses `on_bad_sample="skip"` if ranks could end up with different batches."""
        strategy = self._strategy
        if strategy.data_size != strategy.ranks.world_size:
            raise ConfigurationError(
                f"on_bad_sample='skip' does not work with strategy={strategy.name!r}, in which several ranks load the "
                "same samples: an error on only one of them would leave them with different batches. Use 'raise'."
            )
        if strategy.data_size > 1 and not self._arguments.use_distributed_sampler:
            raise ConfigurationError(
                "on_bad_sample='skip' does not work with use_distributed_sampler=False on several ranks: it is a "
                "collective in every batch, but the ranks' own loaders may differ in length. Use "
                "use_distributed_sampler=True (it keeps your own DistributedSampler), or on_bad_sample='raise'."
            )

    def _sharded(self, loader: Any, trains: bool) -> Any:
        """Returns this rank's shard of a loader; the loader itself on a single rank without a fixed global batch."""
        from leyden.data.sharding import DataRanks
        from leyden.data.streams import shard

        strategy, arguments = self._strategy, self._arguments
        even, global_batch_size = (arguments.even_batches, arguments.global_batch_size) if trains else (False, None)
        # Not data_size: ranks of one tp group read the same samples, and must agree on their shuffled order.
        if strategy.ranks.world_size == 1 and global_batch_size is None:
            return loader
        ranks = DataRanks.of(strategy, even, global_batch_size)
        # A rank that has finished an evaluation may stop, unless the other ranks' forward passes wait for it.
        exchanges_sizes = trains or not strategy.replicates
        return shard(loader, ranks, not arguments.use_distributed_sampler, exchanges_sizes=exchanges_sizes)

    def _samples_of(self, loader: Any) -> int | None:
        if self._arguments.global_batch_size is not None:
            return self._arguments.global_batch_size
        sizes = batch_sizes(loader)
        return sum(sizes) * self._strategy.data_size if sizes else None

    def limited(self, length: int) -> int | None:
        """Returns how many training batches of an epoch of that length remain under `limit_train_batches`."""
        from leyden.data.limits import batches_of

        return batches_of(self._arguments.limit_train_batches, length, "limit_train_batches")

    def evaluation(self, kind: str) -> list[tuple[LoaderCursor, int | None]]:
        """Returns the cursors over the loaders of an evaluation, each with its limit in batches.

        The list is empty if the limit is 0, or if fit has no validation loader or no validation step.
        """
        from leyden.data.combined import loaders_in_turn
        from leyden.data.cursor import LoaderCursor
        from leyden.data.limits import apart, batches_of, check_not_empty, warn_if_shuffled

        self.sizes[kind] = []
        optional = kind == "val" and self._fits
        name = f"limit_{kind}_batches"
        limit = getattr(self._arguments, name)
        if limit == 0 or (optional and self._owner(kind) is None):
            return []
        if not self._has_step(kind):
            message = f"there is a {kind} loader, but {type(self._module).__name__} has no {STEPS[kind]}: define one."
            if not optional:
                raise ConfigurationError(message)
            if self._module.validation_step is not None:
                warn(message)
            return []
        found = self._fetch(kind)
        if isinstance(found, (list, tuple, Mapping)) and not found:
            if not optional:
                warn(f"Trainer.{STAGES[kind]} got no loader, so it runs nothing.")
            return []
        result: list[tuple[LoaderCursor, int | None]] = []
        for loader, own_limit in loaders_in_turn(found):
            _check_iterable(kind, loader)
            check_not_empty(loader, kind)
            if optional and self._overfitted is not None and not isinstance(self._overfitted, Iterator):
                # With workers of its own, since a validation may run inside of an epoch.
                loader = apart(self._overfitted)
            if kind == "val":
                warn_if_shuffled(loader, kind)
            cursor = LoaderCursor(self._sharded(loader, False))
            limits = [count for count in (batches_of(limit, cursor.length, name), own_limit) if count is not None]
            result.append((cursor, min(limits, default=None)))
        self.sizes[kind] = [count for _, count in result]
        return result


def _check_iterable(kind: str, loader: Any) -> None:
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ConfigurationError(
            f"the {kind} loader is {kind_of(loader)}, which is not iterable: "
            f"{ported(loader, 'pass a DataLoader, or any iterable of batches')}."
        )
    if isinstance(loader, Dataset) and not hasattr(type(loader), "__iter__"):
        raise ConfigurationError(
            f"the {kind} loader is {kind_of(loader)}, a Dataset, and iterating over it yields samples, not batches: "
            "pass DataLoader(dataset, batch_size=…)."
        )


def transformed(transfer: Transfer | None, callbacks: list[Callback], module: TrainModule) -> Transfer | None:
    """Returns a function that moves a training batch, then has callbacks transform it; None if there is nothing to do.

    Args:
        transfer: the function that moves a batch; None if there is nothing to move.
        callbacks: the callbacks of the run.
        module: the module, which is passed to the callbacks.
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
    """Returns the batch size of a loader, or the sizes of all loaders that are read in parallel; empty if unknown.

    Loaders that are read one after the other count as one, if all have the same size.
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
    """Returns the function that moves a batch; None if there is nothing to do.

    A transfer hook of the DataModule replaces the module's.
    """

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
