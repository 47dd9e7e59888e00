"""A simulated mesh: one process acts as one of its ranks, and parameters have placements but no values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves

from leyden.core.environment import RankEnvironment
from leyden.core.errors import ConfigurationError
from leyden.strategies.fsdp.sharding import unsharded
from leyden.strategies.fsdp.values import Slot, Values, replace
from leyden.strategies.mesh.layout import Layout
from leyden.strategies.mesh.mesh_strategy import MeshStrategy
from leyden.strategies.mesh.pipeline.schedule import Schedule
from leyden.strategies.mesh.pipeline.steps import Rehearsal
from leyden.strategies.mesh.plan import Plan, PlanLike
from leyden.strategies.precision import Precision
from leyden.strategies.process_group import GroupRanks

META = torch.device("meta")


class SimulatedRanks(GroupRanks):
    """Simulated ranks: this process acts as one of them, and collectives send nothing.

    Args:
        size: the number of ranks.
        rank: the rank that this process acts as.
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        super().__init__([torch.device("cpu")])
        self.become_rank(RankEnvironment(rank, rank, size, size, starter="hand"))

    def plan(self, accelerator: str, devices: Any, num_nodes: int) -> None:
        """Ignores the run's devices: the ranks are planned already."""

    def join(self) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if dist.is_initialized():
            raise ConfigurationError(
                "a mesh is simulated in a process of its own, and this process has already joined a process group: "
                "start it without torchrun."
            )
        dist.init_process_group("fake", store=FakeStore(), rank=self.global_rank, world_size=self.world_size)
        self.host_group = dist.group.WORLD

    def _make_mesh(self, sizes: Mapping[str, int]) -> DeviceMesh:
        # A group for each dimension, also for those of the same ranks, so that their messages can be told apart.
        groups: Any = dict.fromkeys(sizes, "fake")
        return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=groups)

    def leave(self) -> None:
        """Leaves the group, so this process can simulate another mesh, or another rank of it."""
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        # It would place the next rank's tensors on this rank's mesh, since meshes of the same sizes are equal.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        self.host_group = None
        dist.destroy_process_group()


class NoValues(Values):
    """Values that are never filled: tensors stay on the meta device and take no memory."""

    def fill(self, slots: Iterable[Slot]) -> None:
        pass


class SimulatedMesh(MeshStrategy):
    """A MeshStrategy that places parameters as on real ranks, and whose steps compute shapes but no values.

    Args:
        layout: the sizes of the mesh.
        plan: as for MeshStrategy.
        precision: the precision; 32-true if None.
        rank: the rank that this process acts as.
        holds_all: whether it holds all stages of a pipeline, as `rehearse` needs.
        **pipeline: as for MeshStrategy, with pp: `schedule` and `microbatches`.
    """

    def __init__(
        self,
        layout: Layout,
        plan: Plan | PlanLike | None,
        precision: Precision | None,
        rank: int = 0,
        holds_all: bool = False,
        **pipeline: Any,
    ) -> None:
        sizes: dict[str, Any] = dict(layout.sizes)
        super().__init__(**sizes, ep=layout.ep, plan=plan, sync_module_states=False, precision=precision, **pipeline)
        self.ranks: SimulatedRanks = SimulatedRanks(layout.size, rank)
        self._values = NoValues()
        self._holds_all = holds_all
        self._device = META
        self._before_backward: Callable[[list[Tensor]], None] | None = None

    @property
    def root_device(self) -> torch.device:
        """The device of the parameters: meta, since they have no values, and the CPU once `begin_steps` was called."""
        return self._device

    @property
    def schedule(self) -> Schedule:
        found = super().schedule
        if self._holds_all:
            # The same stages, on a single rank.
            return Schedule("LoopedBFS", found.micro_batches, 1, found.stages)
        return found

    def setup_environment(self) -> None:
        super().setup_environment()
        # Simulated steps run on the CPU.
        self.precision.check(self.ranks.device)

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        for module in modules:
            # Moves tensors to the meta device if the module was not built there.
            replace(unsharded(module), lambda owner, name: torch.empty_like(getattr(owner, name), device=META))
        return super().setup_modules(modules)

    def _begin_pipeline(self) -> None:
        """Waits for `begin_steps`: FSDP begins with parameters on a device that computes."""
        if self._device != META:
            super()._begin_pipeline()

    def begin_steps(self) -> None:
        """Lets steps run, after `shapes_only` has moved the parameters to the CPU."""
        self._device = self.ranks.device
        self._begin_pipeline()

    def rehearse(self, step_fn: Callable[..., Any], batch: Any) -> Rehearsal:
        """Runs the micro-batches of a batch forward through all stages of a pipeline, all held by this rank."""
        assert self._pipeline is not None
        with self.step_context():
            batch = batch if self._context is None else self._context.cut(batch)
            return self._pipeline.rehearse_alone(step_fn, batch, (0,))

    def expect(self, rehearsal: Rehearsal, before_backward: Callable[[list[Tensor]], None]) -> None:
        """Takes what stages receive, and a function to call before each backward pass of a pipeline.

        It is called with the tensors that the pipeline keeps besides those that autograd saves.
        """
        assert self._pipeline is not None
        self._pipeline.expect(rehearsal)
        self._before_backward = before_backward

    def _begin_backward(self, is_last: bool, outputs: Any) -> None:
        if self._before_backward is not None and self._pipeline is not None:
            self._before_backward([*self._pipeline.pipeline.kept(), *tree_leaves(outputs)])
        super()._begin_backward(is_last, outputs)

    @contextmanager
    def step_context(self, trains: bool = True) -> Iterator[None]:
        # Simulated steps draw no random numbers, so there is nothing to switch.
        with super().step_context(trains=False):
            yield

    def _begin_batch(self, batch: Any) -> bool:
        """Skips the comparison of batches: the other ranks do not exist."""
        return False

    def _rehearse(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], evaluates: bool = False
    ) -> None:
        """Skips the rehearsal, whose losses have no values here."""


@contextmanager
def simulated(
    layout: Layout,
    plan: Plan | PlanLike | None = None,
    precision: Precision | None = None,
    rank: int = 0,
    **options: Any,
) -> Iterator[SimulatedMesh]:
    """Simulates a layout within this context; this process acts as one of its ranks, by default the first.

    The arguments are those of `SimulatedMesh`.

    Raises:
        ConfigurationError: if this process has joined a process group.
    """
    strategy = SimulatedMesh(layout, plan, precision, rank, **options)
    strategy.setup_environment()
    try:
        yield strategy
    finally:
        strategy.teardown()
        strategy.ranks.leave()
