"""Strategies: where the model lives and how ranks talk. `find_strategy` turns a name into one."""

from __future__ import annotations

from leyden.strategies.base import Strategy, Window
from leyden.strategies.errors import ConfigurationError, nearest
from leyden.strategies.precision import Precision
from leyden.strategies.single import SingleDeviceStrategy, find_device

NAMES = ("auto", "single_device", "ddp", "fsdp", "fsdp_shard_grad_op", "fsdp_cpu_offload", "hsdp")


def find_strategy(
    strategy: str | Strategy, accelerator: str = "auto", device: int = 0, precision: Precision | None = None
) -> Strategy:
    """The strategy that a name means on this machine.

    Args:
        strategy: a name of `NAMES`, or a strategy.
        accelerator: "cpu", "gpu", "cuda", "mps" or "auto".
        device: index of the device.
        precision: the Precision plugin it runs in; None leaves a given strategy's own.

    Raises:
        ConfigurationError: if the name is unknown, or the device is not there.
    """
    if isinstance(strategy, Strategy):
        if precision is not None:
            strategy.precision = precision
        return strategy
    if strategy not in NAMES:
        raise ConfigurationError(f"strategy={strategy!r} is not known in this version. {nearest(strategy, NAMES)}")
    if strategy == "ddp":
        # Imported here: torch.distributed costs a run that does not use it some time.
        from leyden.strategies.ddp import DDPStrategy

        return DDPStrategy(devices=[find_device(accelerator, device)], precision=precision)
    if strategy in NAMES[3:]:
        from leyden.strategies.fsdp import named_strategy

        return named_strategy(strategy, devices=[find_device(accelerator, device)], precision=precision)
    return SingleDeviceStrategy(find_device(accelerator, device), precision)


__all__ = ["Precision", "SingleDeviceStrategy", "Strategy", "Window", "find_device", "find_strategy"]
