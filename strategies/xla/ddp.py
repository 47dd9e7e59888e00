"""Data parallel on TPU hosts and pods: one rank per XLA device, with gradients averaged over the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from leyden.strategies.base import shadow_items
from leyden.strategies.precision import Precision
from leyden.strategies.process_group import GroupRanks, remember
from leyden.strategies.ranks import Ranks
from leyden.strategies.window import Window
from leyden.strategies.xla import runtime
from leyden.strategies.xla.xla_strategy import KINDS, XLA_DEVICE, XLALoop, XLAStrategy


class XLARanks(GroupRanks):
    """Ranks with one XLA device each. Tensors are exchanged between devices, host decisions over gloo."""

    start_methods = ("script", "xla")
    _kind: str | None = None

    def __init__(self, devices: int | None, num_nodes: int | None, timeout: timedelta, start_method: str) -> None:
        planned = None if devices is None else [XLA_DEVICE] * devices
        super().__init__(planned, num_nodes, timeout=timeout, start_method=start_method)

    def plan(self, accelerator: str, devices: Any, num_nodes: int) -> None:
        self._kind = KINDS.get(accelerator)
        super().plan(accelerator, devices, num_nodes)

    def _find_devices(self, accelerator: str, devices: Any) -> list[torch.device]:
        return [XLA_DEVICE] * runtime.ranks_of_host(devices)

    @property
    def are_planned(self) -> bool:
        # torch_xla also starts a single rank.
        return self.environment is None and (self.world_size > 1 or self.start_method == "xla")

    def _init_group(self, backend: str) -> bool:
        import torch_xla.distributed.xla_backend  # noqa: F401  (it registers "xla" and "xla://")

        if self._kind is not None:
            os.environ.setdefault("PJRT_DEVICE", self._kind)
        if self.environment is None:
            is_host = super()._init_group("gloo")
        else:
            dist.init_process_group("xla", init_method="xla://", timeout=self.timeout)
            # The runtime numbers devices by their position, which may differ from the order of the ranks.
            self.environment = replace(self.environment, rank=dist.get_rank(), world_size=dist.get_world_size())
            is_host = self.environment.rank == 0
        self.devices = [runtime.start_rank()] * len(self.devices)
        return is_host


class XLADDPStrategy(XLAStrategy):
    """Data parallel on XLA with one process per device.

    Each rank has its own batches, as under DDP. Gradients are averaged on the device, in the step that closes a window.

    Written against torch_xla's documented interface, but only run with a single device: XLA's CPU has no collectives
    between processes, so several devices need a TPU host. On one host `XLAStrategy`, which drives all devices from one
    process, does the same work and is tested.

    Args:
        devices: number of ranks on this machine. Default: the Trainer's `devices`, where "auto" means one per TPU chip.
        num_nodes: number of machines. Default: the Trainer's `num_nodes`.
        precision: see `XLAStrategy`.
        timeout: how long a message over gloo waits for the other ranks.
        start_method: "script" runs the script again for each rank, as torchrun does. With "xla", `torch_xla.launch`
            starts the ranks of this machine, which run functions of this process.

    Example:
        >>> XLADDPStrategy(devices=4).world_size
        4
    """

    name = "xla_ddp"
    ranks: XLARanks

    def __init__(
        self,
        devices: int | None = None,
        num_nodes: int | None = None,
        precision: Precision | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: str = "script",
    ) -> None:
        super().__init__(precision=precision)
        self.ranks = XLARanks(devices, num_nodes, timeout, start_method)
        self._averaged: set[int] = set()
        self.own_loop = XLADDPLoop(self.ranks, self._averaged)

    # devices ----------------------------------------------------------------------------------------------------------
    def place_on(self, accelerator: str, devices: Any, num_nodes: int) -> None:
        self.check_accelerator(accelerator)
        self.ranks.plan(accelerator, devices, num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        remember(self)

    def _start_devices(self) -> None:
        """No-op, since ranks start their devices when they join."""

    # modules ----------------------------------------------------------------------------------------------------------
    def synchronize(self, module: nn.Module) -> None:
        _broadcast(module, self.ranks)

    def synchronize_buffers(self) -> None:
        buffers = [buffer for module in self.modules for buffer in module.buffers()]
        if self.ranks.world_size > 1 and buffers:
            from torch_xla.core import xla_model

            xla_model.collective_broadcast(buffers)

    # the step ---------------------------------------------------------------------------------------------------------
    def before_step(self, optimizer: Optimizer) -> None:
        """Averages the optimizer's gradients over the ranks, once per step, before hooks and clipping read them."""
        super().before_step(optimizer)
        if id(optimizer) not in self._averaged:
            self._averaged.add(id(optimizer))
            from torch_xla.core import xla_model

            xla_model.reduce_gradients(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        # A custom loop calls it earlier only if it clips.
        self.before_step(optimizer)
        self._averaged.discard(id(optimizer))
        return super().step(optimizer, closure, **kwargs)

    def shadow_batch(self, step_fn: Callable[..., Any], filler: Any, extra: tuple[Any, ...], window: Window) -> None:
        """Only creates zero gradients for the step's all-reduce, since nothing is exchanged earlier."""
        self._sync_between_batches(window)
        shadow_items(self, window)
        for module in self.modules:
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


class XLADDPLoop(XLALoop):
    """A custom loop with one rank per XLA device.

    Args:
        ranks: the strategy's ranks.
        averaged: ids of optimizers whose gradients are already averaged for the current step.
    """

    def __init__(self, ranks: Ranks, averaged: set[int]) -> None:
        self._ranks, self._averaged = ranks, averaged

    def wrap(self, module: nn.Module) -> nn.Module:
        # DDP's wrapper would broadcast the weights, but XLA needs no wrapper.
        _broadcast(module, self._ranks)
        return module

    def end_turn(self) -> None:
        # If the loop clips but skips the step, the next step must still exchange gradients.
        self._averaged.clear()
        super().end_turn()


def _broadcast(module: nn.Module, ranks: Ranks) -> None:
    """Broadcasts the weights and buffers of rank 0 to every rank."""
    if ranks.world_size > 1:
        from torch_xla.core import xla_model

        xla_model.broadcast_master_param(module)
