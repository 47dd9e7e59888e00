"""A simulated mesh: one process stands for its first rank, and parameters have places but no values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.fsdp.sharding import unsharded
from leyden.strategies.fsdp.values import Slot, Values, replace
from leyden.strategies.launch.environment import RankEnvironment
from leyden.strategies.mesh.layout import Layout
from leyden.strategies.mesh.plan import Plan, PlanLike
from leyden.strategies.mesh.strategy import MeshStrategy
from leyden.strategies.precision import Precision
from leyden.strategies.process_group import GroupRanks

META = torch.device("meta")


class SimulatedRanks(GroupRanks):
    """Simulated ranks, of which this process stands for the first: what they exchange goes nowhere.

    Args:
        size: how many there are.
    """

    def __init__(self, size: int) -> None:
        super().__init__([torch.device("cpu")])
        self.become_rank(RankEnvironment(0, 0, size, size, starter="hand"))

    def join(self) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if dist.is_initialized():
            raise ConfigurationError(
                "a mesh is simulated in a process of its own, and this one has joined a process group: start it by "
                "itself, without torchrun."
            )
        dist.init_process_group("fake", store=FakeStore(), rank=self.global_rank, world_size=self.world_size)
        self.host_group = dist.group.WORLD

    def leave(self) -> None:
        """Leaves the group, so that this process can stand for a rank of another."""
        self.host_group = None
        dist.destroy_process_group()


class NoValues(Values):
    """Leaves tensors on the meta device, where they take no memory."""

    def fill(self, slots: Iterable[Slot]) -> None:
        pass


class SimulatedMesh(MeshStrategy):
    """A MeshStrategy that places the parameters of a model as on real ranks; its steps compute shapes, no values.

    Args:
        layout: the sizes of the mesh.
        plan: as MeshStrategy's.
        precision: 32-true if None.
    """

    def __init__(self, layout: Layout, plan: Plan | PlanLike | None, precision: Precision | None) -> None:
        sizes: dict[str, Any] = dict(layout.sizes)
        super().__init__(**sizes, plan=plan, sync_module_states=False, precision=precision)
        self.ranks: SimulatedRanks = SimulatedRanks(layout.size)
        self._values = NoValues()

    @property
    def root_device(self) -> torch.device:
        """The device of parameters, which have no values; the mesh itself consists of CPUs."""
        return META

    def setup_environment(self) -> None:
        super().setup_environment()
        # Steps run there.
        self.precision.check(self.ranks.device)

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        for module in modules:
            # One that could not be built without memory.
            replace(unsharded(module), lambda owner, name: torch.empty_like(getattr(owner, name), device=META))
        return super().setup_modules(modules)

    @contextmanager
    def step_context(self, trains: bool = True) -> Iterator[None]:
        # There are no random numbers to switch.
        with super().step_context(trains=False):
            yield

    def _start(self, batch: Any) -> None:
        """Skips the comparison of batches: the other ranks have none."""
        self._has_run = True


@contextmanager
def simulated(
    layout: Layout, plan: Plan | PlanLike | None = None, precision: Precision | None = None
) -> Iterator[SimulatedMesh]:
    """The ranks of a layout, of which this process stands for the first in this context.

    Raises:
        ConfigurationError: if this process has joined real ranks.
    """
    strategy = SimulatedMesh(layout, plan, precision)
    strategy.setup_environment()
    try:
        yield strategy
    finally:
        strategy.teardown()
        strategy.ranks.leave()
