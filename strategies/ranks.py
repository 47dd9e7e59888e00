"""Ranks: this process's identity among the processes of a run, and their collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from leyden.core.devices import make_current
from leyden.core.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.core.environment import RankEnvironment

T = TypeVar("T")


class Ranks:
    """The ranks of a run, seen from one of them. Here: a single process, whose collectives are no-ops.

    A strategy holds its ranks as `strategy.ranks`. `GroupRanks` are the processes of a torch process group. A process
    that drives several devices, as with XLA's SPMD, is a single rank.

    All ranks must call the same collectives in the same order. `group` restricts a collective to the ranks of a process
    group, such as one dimension of a device mesh (`mesh["shard"].get_group()`). None means all ranks.

    Args:
        device: this process's device.

    Attributes:
        devices: the devices of the ranks on this machine.

    Example:
        >>> Ranks().world_size, Ranks().all_gather_object("mine")
        (1, ['mine'])
    """

    num_nodes: int = 1
    """Number of machines in the run."""
    start_method: str = "script"
    """How ranks that are not running yet are started: "script", "spawn", "fork", "notebook" or "xla"."""
    host_group: Any = None
    """The process group for decisions on the host, which never waits for the device. None if there is none."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.devices = [torch.device(device)]

    # this rank --------------------------------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.devices[self.local_rank % len(self.devices)]

    @property
    def global_rank(self) -> int:
        """This rank's index among all ranks, from 0."""
        return 0

    @property
    def local_rank(self) -> int:
        """This rank's index on its machine, from 0."""
        return 0

    @property
    def node_rank(self) -> int:
        """The index of this rank's machine, from 0."""
        return 0

    @property
    def world_size(self) -> int:
        """The number of ranks, or the planned number before they are started."""
        return 1

    @property
    def local_size(self) -> int:
        """The number of ranks on this machine."""
        return 1

    @property
    def is_global_zero(self) -> bool:
        """True on the first rank."""
        return self.global_rank == 0

    # from the plan to the end -----------------------------------------------------------------------------------------
    @property
    def are_planned(self) -> bool:
        """True if this process must still start the other ranks."""
        return False

    def become_rank(self, environment: RankEnvironment | None) -> None:
        """Makes this process one of the ranks, if they were started after this object was created."""

    def configure_group(self, backend: str | None = None, timeout: timedelta | None = None) -> None:
        """Sets the backend and the timeout of the process group, before ranks join it."""

    def join(self) -> None:
        """Makes this rank's device current and joins the other ranks."""
        make_current(self.device)

    @property
    def is_joined(self) -> bool:
        """True while ranks can communicate. False if they are only planned."""
        return True

    def report_failure(self, error: BaseException, where: str = "") -> bool:
        """Reports an error to the other ranks. Returns False if the error is a consequence of another rank's."""
        return True

    def end_run(self) -> None:
        """Ends a run. Ranks stay joined for the next one."""

    def beside(self) -> Ranks:
        """Returns the same ranks with a separate process group, for a background thread.

        The thread's collectives on objects then never interleave with the run's. Every rank must call it.

        Raises:
            ConfigurationError: if these ranks do not support a second process group.
        """
        if self.world_size > 1:
            raise ConfigurationError(
                f"{type(self).__name__} has no process group for a background thread. Override beside(), or save with "
                "asynchronous=False."
            )
        return self

    # collectives ------------------------------------------------------------------------------------------------------
    def barrier(self) -> None:
        """Waits for every rank."""

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Returns the object of rank `src` on every rank."""
        return obj

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stacks the tensors of all ranks: shape (ranks, *tensor.shape).

        Args:
            tensor: this rank's tensor. All ranks need the same shape.
            group: the process group.
            sync_grads: whether backward sends each rank the gradients of its part.
        """
        return tensor.unsqueeze(0)

    def reduce(self, tensor: Tensor, group: Any = None, reduction: str = "mean") -> Tensor:
        """Reduces a tensor over the ranks by "mean", "sum", "max" or "min". Every rank gets the result."""
        return tensor

    def all_gather_object(self, obj: T) -> list[T]:
        """Returns the objects of all ranks, in rank order, on every rank."""
        return [obj]

    def gather_object(self, obj: T, dst: int = 0) -> list[T] | None:
        """Returns the objects of all ranks, in rank order, on rank `dst`, and None on the other ranks."""
        return [obj]

    def any(self, flag: bool) -> bool:
        """Returns True on every rank if the flag is true on any rank."""
        return flag

    def exchange_flags(self, flags: Sequence[bool]) -> Callable[[], list[bool]]:
        """Starts an exchange of flags. Returns a function that waits and returns which flags are true on any rank."""
        own_flags = list(flags)
        return lambda: own_flags

    def differing(self, text: str, group: Any = None) -> list[str]:
        """Returns the texts of all ranks, in rank order, if they differ; an empty list if they are equal."""
        return []

    def aborts_on_shapes(self, tensors: Sequence[Tensor], group: Any = None) -> bool:
        """Returns True if a collective would abort the process, not raise, when tensor shapes differ between ranks."""
        return False
