"""MeshStrategy: tensor and sequence parallel on plain modules, alone or within FSDP and HSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import Optimizer

from leyden.strategies.batch import map_tensors
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.fsdp.options import offload_of
from leyden.strategies.fsdp.policy import WrapPolicy
from leyden.strategies.fsdp.sharding import whole
from leyden.strategies.fsdp.strategy import MIXED, FSDPStrategy
from leyden.strategies.fsdp.values import Slot
from leyden.strategies.mesh.alike import check_alike, sum_partial
from leyden.strategies.mesh.checks import check_loaded
from leyden.strategies.mesh.layout import ORDER, Layout
from leyden.strategies.mesh.own_loop import run_in_steps
from leyden.strategies.mesh.plan import Plan, PlanLike, TensorParallel, is_split, plan_of
from leyden.strategies.window import BackwardHooks, Window

T = TypeVar("T")
DATA = ("dp_replicate", "dp_shard")
"""The dimensions over which FSDP and HSDP work."""


class MeshStrategy(FSDPStrategy):
    """A mesh of ranks: copies of the model, each sharded as FSDP does, with layers split over `tp` ranks.

    The ranks of one tp group share their batches. One process's numbers hold: the same loss, the same weights.

    Args:
        dp_replicate: see `Layout`, like the next four.
        dp_shard: -1 fills the world.
        tp: over how many ranks layers are split; "auto" for those of a machine, or for two on a single machine.
        pp: 1 in this version.
        cp: 1 in this version.
        plan: which layers are split, and how: pattern → style (see `Plan`). Left out, the module's `parallel_plan()`,
            or the `tp_plan` of a `transformers` model in it.
        auto_wrap_policy: as FSDPStrategy's.
        **kwargs: FSDPStrategy's other arguments.

    Raises:
        ConfigurationError: for sizes that do not make up the world, or a plan that does not fit the model.

    Example:
        >>> MeshStrategy(tp=2, plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}).name
        'mesh'
    """

    def __init__(
        self,
        dp_replicate: int = 1,
        dp_shard: int = -1,
        tp: int | Literal["auto"] = 1,
        pp: int = 1,
        cp: int = 1,
        *,
        plan: Plan | PlanLike | None = None,
        auto_wrap_policy: WrapPolicy = "auto",
        **kwargs: Any,
    ) -> None:
        if kwargs.get("device_mesh") is not None:
            raise ConfigurationError(
                f"device_mesh={kwargs['device_mesh']!r}: MeshStrategy makes its own of dp_replicate, dp_shard and tp. "
                "Give their sizes."
            )
        super().__init__(auto_wrap_policy, **kwargs)
        self.name = "mesh"
        self._splits_by_machine = tp == "auto"
        self.layout = Layout(dp_replicate, dp_shard, 1 if tp == "auto" else tp, pp, cp)
        self.mesh: DeviceMesh | None = None
        """The mesh of all ranks, with a name for each dimension; None before the ranks have joined."""
        self._plan = plan if isinstance(plan, Plan) or plan is None else Plan(plan)
        self._tensors: list[TensorParallel] = []
        self._has_run = False
        self._checked: set[Optimizer] = set()
        """Optimizers whose first gradients were compared between the ranks of a tp group."""

    @classmethod
    def from_accelerate(cls, config: Mapping[str, Any], **kwargs: Any) -> MeshStrategy:
        """The strategy that an Accelerate YAML file describes.

        Args:
            config: the mapping under `parallelism_config`, with that under `fsdp_config` where copies are sharded.
            **kwargs: further arguments of ours.

        Example:
            >>> MeshStrategy.from_accelerate({"parallelism_config_tp_size": 2, "fsdp_offload_params": True}).layout.tp
            2
        """
        # A key without a value leaves it open.
        given = {name: value for name, value in config.items() if value is not None}
        sizes = {name: given.pop(f"parallelism_config_{name}_size", None) for name in ORDER}
        sizes = {name: size for name, size in sizes.items() if size is not None}
        rest = {name: value for name, value in given.items() if not name.startswith("parallelism_config_")}
        return cls(**sizes, **rest, **kwargs)

    # environment ------------------------------------------------------------------------------------------------------
    @property
    def data_rank(self) -> int:
        return self._filled.data_rank(self.ranks.global_rank)

    @property
    def data_size(self) -> int:
        return self._filled.data_size

    @property
    def data_ranks(self) -> list[int]:
        layout = self._filled
        return [layout.data_rank(rank) for rank in range(layout.size)]

    @property
    def _filled(self) -> Layout:
        if self.mesh is not None:
            return self.layout
        layout = replace(self.layout, tp=self.tp_by_machine) if self._splits_by_machine else self.layout
        return layout.filled(self.ranks.world_size)

    @property
    def tp_by_machine(self) -> int:
        """What tp="auto" means: the ranks of a machine, or two of a single one."""
        return self.ranks.local_size if self.ranks.local_size < self.ranks.world_size else 2

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.layout.tp > 1 and self.precision.form:
            raise ConfigurationError(
                f"tp={self.layout.tp} splits layers, and precision {self.precision.form!r} replaces them by its own: "
                "use precision='bf16-mixed', or tp=1."
            )
        if self.shard_mesh is None:
            self._check_unsharded()

    def _check_unsharded(self) -> None:
        """Refuses arguments that are for the shards that this mesh has none of."""
        offloads = isinstance(offload_of(self.settings["cpu_offload"], self.root_device), CPUOffloadPolicy)
        for name, is_given in {"cpu_offload": offloads, "mp_policy": self.settings["mp_policy"] is not None}.items():
            if is_given:
                raise ConfigurationError(
                    f"{name} is for shards, and tp={self.layout.tp} on {self.ranks.world_size} ranks leaves none: give "
                    f"dp_shard=2 or more its share of the ranks, or leave {name} out (precision sets the dtypes)."
                )

    def make_mesh(self) -> DeviceMesh | None:
        self.layout, self._splits_by_machine = self._filled, False
        self.mesh = self.layout.mesh(self.ranks.device.type)
        names = tuple(name for name in DATA if name in (self.mesh.mesh_dim_names or ()))
        if names and self.layout.tp > 1:
            # So that a norm over all gradients is one message: torch looks for a group of both dimensions.
            self.mesh[("dp_shard", "tp")]._flatten("dp_shard_tp")
        return self.mesh[names] if names else None

    @property
    def device_mesh(self) -> DeviceMesh | None:
        return self.mesh

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The dimension over which layers are split."""
        assert self.mesh is not None
        return self.mesh["tp"]

    def release(self) -> None:
        self._tensors = []
        super().release()

    def teardown(self) -> None:
        self._has_run, self._checked, self._tensors = False, set(), []
        super().teardown()

    @property
    def details(self) -> str:
        world = self.ranks.world_size
        layout = f"{self.layout} of {world} ranks" if world > 1 else "1 rank"
        return f"{layout}, {self.record.line()}" if self.shard_mesh else layout

    # modules and optimizers -------------------------------------------------------------------------------------------
    def add_module(self, module: nn.Module, moves: bool = True) -> nn.Module:
        added = super().add_module(module, moves)
        if self._tensors:
            run_in_steps(added, self._step_of_own_loop)
        return added

    def split_for(self, module: nn.Module) -> Callable[[list[Slot]], None] | None:
        if self.layout.tp == 1:
            return None
        tensor = TensorParallel(self.plan_for(module), self.tensor_mesh, self.root_device)
        tensor.begin(module)
        module.__dict__["_leyden_tensor"] = tensor
        return tensor.split

    def plan_for(self, module: nn.Module) -> Plan:
        """What is split in a module; nothing more in one that is split already, by hand or as it was loaded.

        Raises:
            ConfigurationError: if nothing says what, or it is split otherwise.
        """
        if is_split(module):
            if self._plan is not None:
                raise ConfigurationError(
                    f"{type(module).__name__} has parameters that are split already, and the strategy has a plan: "
                    "leave out one of the two."
                )
            check_loaded(module, self.tensor_mesh)
            return Plan({})
        plan = self._plan or plan_of(module)
        if plan is None:
            raise ConfigurationError(
                f"tp={self.layout.tp} needs a plan of what is split: give MeshStrategy(plan={{pattern: style}}), or "
                "the module a parallel_plan()."
            )
        return plan

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        super().setup_modules(modules)
        found = [module.__dict__.get("_leyden_tensor") for module in self.modules]
        self._tensors += [tensor for tensor in found if tensor is not None and tensor not in self._tensors]
        return self.modules

    def explain(self, error: BaseException) -> str | None:
        if MIXED not in str(error) or self.layout.tp == 1:
            return super().explain(error)
        return (
            "A plain tensor met a DTensor. A split layer returns one under use_local_output=False (the default of "
            "torch's SequenceParallel), as does a head that is 'loss'; and a split parameter is one, read outside of "
            "its own layer's forward. Let the layer return plain tensors (use_local_output=True), take "
            "tensor.to_local() for this rank's part or tensor.full_tensor() for the whole, and read parameters in "
            "their layers, within a step."
        )

    # the step ---------------------------------------------------------------------------------------------------------
    @contextmanager
    def step_context(self, trains: bool = True) -> Iterator[None]:
        """The context of forward and backward passes, in which modules read plain tensors of this rank's.

        A forward pass of the module, a loss of logits that are split, and backward belong in it. `forward_backward`,
        `forward` and `backward` enter it by themselves, as does the forward of a model that an Accelerator prepared.

        Args:
            trains: False for evaluation, whose random numbers are left alone.
        """
        with ExitStack() as stack:
            # Entered once: a loop of the user's own enters it for backward, inside of which a forward may run again.
            for tensor in self._tensors:
                if not tensor.is_running:
                    stack.enter_context(tensor.running(trains))
            yield

    def forward_backward(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], window: Window, hooks: BackwardHooks
    ) -> Any:
        if not self._has_run:
            self._start(batch)
        with self.step_context():
            outputs = super().forward_backward(step_fn, batch, extra, window, hooks)
        return self._whole(outputs)

    def evaluate(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        return self._whole(super().evaluate(step_fn, batch, extra))

    def _whole(self, outputs: T) -> T:
        """A step's outputs; a loss is a DTensor where its logits are split, and so are they."""
        return map_tensors(outputs, whole) if any(tensor.plan.splits_loss for tensor in self._tensors) else outputs

    def forward(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        if not self._has_run:
            self._start(batch)
        with self.step_context(trains=self.modules[0].training):
            return super().forward(step_fn, batch, extra)

    def shadow_batch(self, step_fn: Callable[..., Any], filler: Any, extra: tuple[Any, ...], window: Window) -> None:
        with self.step_context():
            super().shadow_batch(step_fn, filler, extra, window)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.step_context():
            super().backward(loss, *args, **kwargs)

    @contextmanager
    def _step_of_own_loop(self, batch: Any, trains: bool) -> Iterator[None]:
        if trains and not self._has_run:
            self._start(batch)
        with self.step_context(trains):
            yield

    def _start(self, batch: Any) -> None:
        self._has_run = True
        for tensor in self._tensors:
            tensor.start(self.ranks, batch)

    def before_step(self, optimizer: Optimizer) -> None:
        if self._tensors:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            sum_partial(parameters)
            if optimizer not in self._checked:
                check_alike(self.tensor_mesh, self.modules, parameters)
                self._checked.add(optimizer)
        super().before_step(optimizer)


__all__ = ["MeshStrategy"]
