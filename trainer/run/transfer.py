"""How a batch is moved to the device: the transfer hooks of DataModule and module, composed once per run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leyden.trainer.datamodule import DataModule
from leyden.trainer.events.hooks import overrides
from leyden.trainer.module import TrainModule

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy
    from leyden.trainer.profilers import Profiler

Transfer = Callable[[Any, int], Any]


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
