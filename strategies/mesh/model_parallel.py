"""ModelParallelStrategy: a mesh for models that `configure_model` splits and shards itself, as in Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.core.tree import map_tensors
from leyden.strategies.base import Strategy
from leyden.strategies.fsdp.sharding import whole
from leyden.strategies.mesh.filling import fill
from leyden.strategies.mesh.layout import ORDER
from leyden.strategies.mesh.mesh_strategy import MeshStrategy
from leyden.strategies.mesh.plan import Plan, is_split
from leyden.strategies.mesh.plan_checks import check_loaded
from leyden.strategies.window import BackwardHooks, Window


class ModelParallelStrategy(MeshStrategy):
    """Tensor parallelism and FSDP, applied by the module's own `configure_model` under Lightning's names.

    `configure_model` passes `self.device_mesh["tensor_parallel"]` to torch's `parallelize_module`, and
    `self.device_mesh["data_parallel"]` to `fully_shard`. Both dimensions exist even if their size is 1. Parameters that
    it neither splits nor shards are replicated over the first and sharded over the second, so their numbers are those
    of a single process. Tensors built on the meta device are filled by `reset_parameters`, as in a single process.

    Args:
        data_parallel_size: number of ranks with different batches; "auto" for the number of machines.
        tensor_parallel_size: number of ranks that share a batch; "auto" for the ranks of one machine. If only the other
            size is given, "auto" fills the world.
        save_distributed_checkpoint: accepted for compatibility. Checkpoints are always sharded and load under every
            strategy; `leyden merge` joins one into a single file.
        **kwargs: arguments of `ProcessGroupStrategy`: `process_group_backend`, `timeout`, …

    Raises:
        ConfigurationError: for sizes whose product is not the world size, or arguments of MeshStrategy.

    Example:
        >>> ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=4).layout.size
        8
    """

    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = True,
        **kwargs: Any,
    ) -> None:
        if foreign := [name for name in (*ORDER, "ep", "plan") if name in kwargs]:
            raise ConfigurationError(
                f"{foreign[0]}={kwargs[foreign[0]]!r} is an argument of MeshStrategy. A ModelParallelStrategy has the "
                "sizes data_parallel_size and tensor_parallel_size only, and configure_model splits the layers itself: "
                f"leave out {foreign[0]}, or use MeshStrategy with dp_shard, tp and a plan."
            )
        data = -1 if data_parallel_size == "auto" else data_parallel_size
        split = -1 if tensor_parallel_size == "auto" and data != -1 else tensor_parallel_size
        super().__init__(dp_shard=data, tp=split, auto_wrap_policy=None, **kwargs)
        self.name = "model_parallel"
        if not save_distributed_checkpoint:
            warn(
                "save_distributed_checkpoint=False has no effect: a checkpoint loads under every strategy, and `leyden "
                "merge` joins it into one file.",
            )

    @property
    def tp_by_machine(self) -> int:
        return self.ranks.local_size

    def make_mesh(self) -> DeviceMesh | None:
        self.layout, self._splits_by_machine = self.filled, False
        sizes = {"data_parallel": self.layout.dp_shard, "tensor_parallel": self.layout.tp}
        self.mesh = self.ranks.mesh(sizes, joined=tuple(sizes))
        return self.mesh["data_parallel"] if self.layout.dp_shard > 1 else None

    @property
    def tensor_mesh(self) -> DeviceMesh:
        assert self.mesh is not None
        return self.mesh["tensor_parallel"]

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        # No deferred build: the module's own code splits its layers as it builds them.
        with Strategy.init_module(self, empty_init):
            yield

    @contextmanager
    def model_context(self) -> Iterator[None]:
        yield

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        for module in modules:
            fill(module, self.root_device, self.ranks.host_group if self.ranks.world_size > 1 else None)
        return super().setup_modules(modules)

    def forward_backward(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], window: Window, hooks: BackwardHooks
    ) -> Any:
        # A loss computed under the script's own loss_parallel is a DTensor.
        return map_tensors(super().forward_backward(step_fn, batch, extra, window, hooks), whole)

    def plan_for(self, module: nn.Module) -> Plan:
        if not is_split(module):
            raise ConfigurationError(
                f"tensor_parallel_size={self.layout.tp}, and {type(module).__name__}.configure_model splits no layer: "
                'call parallelize_module(…, self.device_mesh["tensor_parallel"], …) in it, or use MeshStrategy with a '
                "plan."
            )
        check_loaded(module, self.tensor_mesh)
        return Plan({})
