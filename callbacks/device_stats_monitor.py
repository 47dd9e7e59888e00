"""DeviceStatsMonitor, a callback that logs memory and utilization statistics of the device and the machine."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import torch

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.logger import check_has_logger, is_logged, log_to_all
from leyden.core.devices import runtime_of
from leyden.core.errors import ConfigurationError, needs

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class DeviceStatsMonitor(Callback):
    """Logs statistics of rank 0's device and machine at the start and the end of batches.

    CPU: `cpu_percent`, `cpu_vm_percent` and `cpu_swap_percent` (usage of all cores, memory and swap on the whole
    machine, in percent). CUDA: all of `torch.cuda.memory_stats` (bytes and counts of the caching allocator). MPS:
    `allocated_bytes` and `driver_allocated_bytes`. Names have the form
    `DeviceStatsMonitor.on_train_batch_start/cpu_percent`. Values are read on the host, without waiting for the device.

    In training, batches are logged at the steps that the Trainer logs (`log_every_n_steps`), under that step. In an
    evaluation, the first batch and every `log_every_n_steps`-th one after it are logged, under the current step.

    Args:
        cpu_stats: whether to log the CPU's statistics. None: only if the CPU is the device.

    Raises:
        ConfigurationError: if `cpu_stats` is invalid, or a run starts without a logger.
        MissingExtraError: if a run needs `psutil` and it is not installed.

    Example:
        >>> DeviceStatsMonitor(cpu_stats=True).cpu_stats
        True
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        if cpu_stats not in (None, True, False):
            raise ConfigurationError(f"DeviceStatsMonitor(cpu_stats={cpu_stats!r}): use True, False or None.")
        self.cpu_stats = cpu_stats
        self._step: int | None = None
        """The step of the current window, if it is logged; else None."""

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        check_has_logger(self, trainer)
        if self._has_cpu(trainer.strategy.root_device):
            # Usage is measured since the previous call, so the first call always returns 0.
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
    """Returns this machine's usage in percent: of its cores since the last call, its memory and its swap space.

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
    """Returns statistics of a device's allocator, in bytes and counts; empty for a CPU."""
    runtime = runtime_of(device)
    if hasattr(runtime, "memory_stats"):
        found = runtime.memory_stats(device)
        return {name: float(value) for name, value in found.items() if isinstance(value, numbers.Real)}
    if device.type == "mps":
        return {
            "allocated_bytes": float(torch.mps.current_allocated_memory()),
            "driver_allocated_bytes": float(torch.mps.driver_allocated_memory()),
        }
    return {}
