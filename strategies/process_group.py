"""What strategies of several ranks share: their place, the process group, collectives, and the way out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from leyden.strategies.base import Strategy
from leyden.strategies.launch.environment import rank_environment
from leyden.strategies.precision import Precision

T = TypeVar("T")
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class ProcessGroupStrategy(Strategy):
    """Base class of the strategies whose ranks talk through torch.distributed.

    Before its ranks are started it answers for the plan: `world_size` ranks, of which this process is the first.

    Args:
        devices: the devices of this machine's ranks, one each; the first of them is this process's where it was not
            started as a rank.
        num_nodes: machines.
        precision: what parameters, inputs and the forward pass are held in; 32-true if left out.
        process_group_backend: "gloo", "nccl", …; what suits the device if left out.
        timeout: how long a collective waits for the others.
    """

    def __init__(
        self,
        devices: Sequence[torch.device] = (torch.device("cpu"),),
        num_nodes: int = 1,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(precision)
        self.devices = list(devices)
        self.num_nodes = num_nodes
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self.place = rank_environment()
        self.host_group: Any = None
        """A gloo group for what is decided on the host, so that it never waits for the device."""
        self._owns_group = False

    # its place --------------------------------------------------------------------------------------------------------
    @property
    def root_device(self) -> torch.device:
        return self.devices[self.local_rank % len(self.devices)]

    @property
    def global_rank(self) -> int:
        return self.place.rank if self.place is not None else 0

    @property
    def local_rank(self) -> int:
        return self.place.local_rank if self.place is not None else 0

    @property
    def node_rank(self) -> int:
        return self.place.node_rank if self.place is not None else 0

    @property
    def world_size(self) -> int:
        return self.place.world_size if self.place is not None else len(self.devices) * self.num_nodes

    @property
    def is_launched(self) -> bool:
        return self.place is not None

    @property
    def is_joined(self) -> bool:
        return self.host_group is not None

    def setup_environment(self) -> None:
        super().setup_environment()
        device = self.root_device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            backend = self.process_group_backend or ("nccl" if device.type == "cuda" else "gloo")
            bound = device if backend == "nccl" else None
            dist.init_process_group(backend, timeout=self.timeout, device_id=bound)
            self._owns_group = True
        if self.host_group is None:
            self.host_group = (
                dist.group.WORLD
                if dist.get_backend() == "gloo"
                else dist.new_group(backend="gloo", timeout=self.timeout)
            )

    def teardown(self) -> None:
        super().teardown()
        self.host_group = None
        if self._owns_group and dist.is_initialized():
            # gloo's threads must end before the interpreter does, and objects such as DDP's reducer hold on to them.
            gc.collect()
            dist.destroy_process_group()
        self._owns_group = False

    # collectives ------------------------------------------------------------------------------------------------------
    def barrier(self) -> None:
        dist.barrier(group=self.host_group)

    def broadcast(self, obj: T, src: int = 0) -> T:
        box = [obj]
        dist.broadcast_object_list(box, src=src, group=self.host_group)
        return box[0]

    def all_gather_object(self, obj: T) -> list[T]:
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, obj, group=self.host_group)
        return found

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        size = dist.get_world_size(group)
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, tensor.detach().contiguous(), group=group)
        return torch.stack(parts)

    def reduce(self, tensor: Tensor, group: Any = None, reduction: str = "mean") -> Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total, REDUCTIONS[reduction], group=group)
        return total / dist.get_world_size(group) if reduction in ("mean", "avg") else total

    def any(self, flag: bool) -> bool:
        return self.exchange_flags([flag])()[0]

    def exchange_flags(self, flags: Sequence[bool]) -> Callable[[], list[bool]]:
        sent = torch.tensor([int(flag) for flag in flags], dtype=torch.uint8)
        work = dist.all_reduce(sent, dist.ReduceOp.MAX, group=self.host_group, async_op=True)

        def answer() -> list[bool]:
            work.wait()
            return [bool(flag) for flag in sent.tolist()]

        return answer
