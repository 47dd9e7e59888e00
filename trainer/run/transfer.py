"""How a batch is moved to the device: the transfer hooks of DataModule and module, composed once per run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leyden.trainer.datamodule import DataModule
from leyden.trainer.events.hooks import overrides
from leyden.trainer.module import TrainModule

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

Transfer = Callable[[Any, int], Any]


def transfer_of(trainer: Trainer) -> Transfer | None:
    """The function that moves a batch; None where nothing is to be done. A DataModule's hooks replace the module's."""
    strategy, device = trainer.strategy, trainer.strategy.root_device
    before, move, after = (
        _owner(trainer, name)
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    )
    if before is None and move is None and after is None:
        if strategy.leaves_batches:
            return None
        return _measured(trainer, lambda batch, index: strategy.to_device(batch))

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if before is not None:
            batch = before(batch, dataloader_idx)
        batch = strategy.to_device(batch) if move is None else move(batch, device, dataloader_idx)
        return batch if after is None else after(batch, dataloader_idx)

    return _measured(trainer, transfer)


def _measured(trainer: Trainer, transfer: Transfer) -> Transfer:
    return transfer if trainer.profiler is None else trainer.profiler.wrap("transfer_batch_to_device", transfer)


def _owner(trainer: Trainer, name: str) -> Callable[..., Any] | None:
    if trainer.datamodule is not None and overrides(trainer.datamodule, name, DataModule):
        return getattr(trainer.datamodule, name)  # type: ignore[no-any-return]
    return getattr(trainer.module, name) if overrides(trainer.module, name, TrainModule) else None
