"""DeviceStatsMonitor, a callback that logs what the device and the machine have left."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import torch

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.run_loggers import check_has_logger, is_logged, log_to_all
from leyden.strategies.errors import ConfigurationError, needs

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class DeviceStatsMonitor(Callback):
    """Logs statistics of rank 0's device, and of its machine, at the start and the end of batches.

    Of a CPU these are `cpu_percent`, `cpu_vm_percent` and `cpu_swap_percent` (percent of all cores, of the memory and
    of the swap space, in use on the whole machine); of a CUDA device all of `torch.cuda.memory_stats` (bytes and counts
    of the caching allocator); of MPS `allocated_bytes` and `driver_allocated_bytes`. Names are
    `DeviceStatsMonitor.on_train_batch_start/cpu_percent` and the like. They are read on the host; the device is not
    waited for.

    A training batch is logged if its step is (`log_every_n_steps`), under the number of the step. Of an evaluation the
    first batch is logged, and each `log_every_n_steps`-th after it, under the current step.

    Args:
        cpu_stats: log those of the CPU beside a GPU's too; False never, None where the CPU is the device.

    Raises:
        ConfigurationError: if `cpu_stats` is invalid, or a run starts without a logger.
        MissingExtraError: if a run starts that needs `psutil`, and it is not installed.

    Example:
        >>> DeviceStatsMonitor(cpu_stats=True).cpu_stats
        True
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        if cpu_stats not in (None, True, False):
            raise ConfigurationError(f"DeviceStatsMonitor(cpu_stats={cpu_stats!r}): use True, False or None.")
        self.cpu_stats = cpu_stats
        self._step: int | None = None
        """The step that the batch belongs to, if it is logged."""

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        check_has_logger(self, trainer)
        if self._has_cpu(trainer.strategy.root_device):
            # The first call has nothing to compare with, and returns 0.
            cpu_statistics()

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1
        if is_logged(trainer, step) and trainer.window.index == 0:
            self._step = step
            self._log(trainer, "on_train_batch_start", step)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._step is not None and trainer.global_step >= self._step:
            self._log(trainer, "on_train_batch_end", self._step)
            self._step = None

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log_evaluation(trainer, "start", batch_idx)

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log_evaluation(trainer, "end", batch_idx)

    on_test_batch_start, on_test_batch_end = on_validation_batch_start, on_validation_batch_end

    def _log_evaluation(self, trainer: Trainer, end: str, batch_idx: int) -> None:
        if is_logged(trainer, batch_idx) and not trainer.sanity_checking:
            self._log(trainer, f"on_{trainer.state.pass_of}_batch_{end}", trainer.global_step)

    def _log(self, trainer: Trainer, hook: str, step: int) -> None:
        if not trainer.is_global_zero:
            return
        device = trainer.strategy.root_device
        found = device_statistics(device)
        if self._has_cpu(device):
            found |= cpu_statistics()
        log_to_all(trainer, {f"{type(self).__name__}.{hook}/{name}": value for name, value in found.items()}, step)

    def _has_cpu(self, device: torch.device) -> bool:
        return device.type == "cpu" if self.cpu_stats is None else self.cpu_stats


def cpu_statistics() -> dict[str, float]:
    """Returns what is in use of this machine: its cores since the last call, its memory and its swap space, in percent.

    Raises:
        MissingExtraError: if `psutil` is not installed.
    """
    with needs("psutil", None, "DeviceStatsMonitor of a CPU"):
        import psutil  # type: ignore[import-untyped]
    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }


def device_statistics(device: torch.device) -> dict[str, float]:
    """Returns statistics of a device's allocator: in bytes and counts; none of a CPU's."""
    if device.type == "cuda":
        found = torch.cuda.memory_stats(device)
        return {name: float(value) for name, value in found.items() if isinstance(value, numbers.Real)}
    if device.type == "mps":
        return {
            "allocated_bytes": float(torch.mps.current_allocated_memory()),
            "driver_allocated_bytes": float(torch.mps.driver_allocated_memory()),
        }
    return {}
