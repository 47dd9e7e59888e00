"""MeshStrategy: tensor, sequence and pipeline parallel on plain modules, alone or with FSDP and HSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import Optimizer

from leyden.strategies.base import ClipAlgorithm, Refused
from leyden.strategies.batch import map_tensors
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.fsdp.options import offload_of
from leyden.strategies.fsdp.policy import WrapPolicy, choose
from leyden.strategies.fsdp.sharding import whole
from leyden.strategies.fsdp.strategy import MIXED, FSDPStrategy
from leyden.strategies.fsdp.values import Slot
from leyden.strategies.master_weights import parameters_of
from leyden.strategies.mesh.alike import check_alike, check_batch, sum_partial
from leyden.strategies.mesh.checks import check_loaded
from leyden.strategies.mesh.layout import ORDER, Layout
from leyden.strategies.mesh.own_loop import run_in_steps
from leyden.strategies.mesh.pipeline.checks import check_again, check_modules, check_stages
from leyden.strategies.mesh.pipeline.cut import Holdings, find_cut
from leyden.strategies.mesh.pipeline.outputs import PipelineOutputs
from leyden.strategies.mesh.pipeline.schedule import ZERO_BUBBLE, Schedule
from leyden.strategies.mesh.pipeline.state import StageWeights, places_to_load, state_to_save, whole_state
from leyden.strategies.mesh.pipeline.steps import PipelineSteps
from leyden.strategies.mesh.plan import Plan, PlanLike, TensorParallel, is_split, plan_of
from leyden.strategies.saved_state import SavedState
from leyden.strategies.weights import StateWriter, WeightReader, fill_weights
from leyden.strategies.window import BackwardHooks, Window

T = TypeVar("T")
DATA = ("dp_replicate", "dp_shard")
"""The dimensions over which FSDP and HSDP work."""


class MeshStrategy(FSDPStrategy):
    """A mesh of ranks: copies of the model, each sharded as FSDP does, layers split over `tp`, stages over `pp` ranks.

    The ranks of one tp group share their batches, and so do the stages of a pipeline. One process's numbers hold: the
    same loss, the same weights.

    Args:
        dp_replicate: see `Layout`, like the next four.
        dp_shard: -1 fills the world.
        tp: over how many ranks layers are split; "auto" for those of a machine, or for two on a single machine.
        pp: over how many ranks the blocks of the model are dealt out, as stages of a pipeline.
        cp: 1 in this version.
        plan: which layers are split, and how: pattern → style (see `Plan`). Left out, the module's `parallel_plan()`,
            or the `tp_plan` of a `transformers` model in it.
        schedule: the order in which a pipeline runs its micro-batches, by torch's names: "GPipe", "1F1B",
            "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble" or "DualPipeV".
        microbatches: into how many micro-batches a pipeline cuts each batch; 4 per stage if left out.
        stages_per_rank: stages that a rank holds: 1 under GPipe and 1F1B, 2 if left out under the others.
        pipeline_module: name of the list of blocks that is cut, or of a module with it; the largest if left out.
        split: names of the blocks with which the second and each later stage begins; as even as can be if left out.
        first_stage: names of modules or parameters beside the blocks that the first stage holds; if left out, what is
            defined before the list of blocks.
        last_stage: the same of the last stage; if left out, what is defined after it.
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
        schedule: str = "1F1B",
        microbatches: int | None = None,
        stages_per_rank: int | None = None,
        pipeline_module: str | None = None,
        split: Sequence[str] | None = None,
        first_stage: Sequence[str] = (),
        last_stage: Sequence[str] = (),
        auto_wrap_policy: WrapPolicy = "auto",
        **kwargs: Any,
    ) -> None:
        if kwargs.get("device_mesh") is not None:
            raise ConfigurationError(
                f"device_mesh={kwargs['device_mesh']!r}: MeshStrategy makes its own of dp_replicate, dp_shard and tp. "
                "Give their sizes."
            )
        if pp == 1:
            of_pipelines: dict[str, Any] = {
                "schedule": None if schedule == "1F1B" else schedule,
                "microbatches": microbatches,
                "stages_per_rank": stages_per_rank,
                "pipeline_module": pipeline_module,
                "split": split,
                "first_stage": first_stage or None,
                "last_stage": last_stage or None,
            }
            for name, value in of_pipelines.items():
                if value is not None:
                    raise ConfigurationError(
                        f"{name}={value!r} without pp: it is for a pipeline, and this mesh has none. Give pp=2 or "
                        f"more, or leave out {name}."
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
        self._schedule = (schedule, microbatches, stages_per_rank)
        self._cut: dict[str, Any] = {
            "pipeline_module": pipeline_module,
            "split": split,
            "first_stage": tuple(first_stage),
            "last_stage": tuple(last_stage),
        }
        self._pipeline: PipelineSteps | None = None
        self.outputs: PipelineOutputs = PipelineOutputs(self)
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
        return self.filled.data_rank(self.ranks.global_rank)

    @property
    def data_size(self) -> int:
        return self.filled.data_size

    @property
    def data_ranks(self) -> list[int]:
        layout = self.filled
        return [layout.data_rank(rank) for rank in range(layout.size)]

    @property
    def filled(self) -> Layout:
        """The layout for the ranks of this run."""
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
        """Refuses arguments about shards, of which this mesh has none."""
        offloads = isinstance(offload_of(self.settings["cpu_offload"], self.root_device), CPUOffloadPolicy)
        for name, is_given in {"cpu_offload": offloads, "mp_policy": self.settings["mp_policy"] is not None}.items():
            if is_given:
                raise ConfigurationError(
                    f"{name} is for shards, and {self.layout} leaves none on {self.ranks.world_size} ranks: give "
                    f"dp_shard=2 or more its share of the ranks, or leave {name} out (precision sets the dtypes)."
                )

    def make_mesh(self) -> DeviceMesh | None:
        self.layout, self._splits_by_machine = self.filled, False
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
    def copies_along(self) -> int | None:
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return names.index("dp_replicate") if "dp_replicate" in names else None

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The dimension over which layers are split."""
        assert self.mesh is not None
        return self.mesh["tp"]

    def release(self) -> None:
        self._leave_pipeline()
        self._tensors = []
        super().release()

    def teardown(self) -> None:
        self._leave_pipeline()
        self._has_run, self._checked, self._tensors = False, set(), []
        super().teardown()

    def _leave_pipeline(self) -> None:
        if self._pipeline is not None:
            self._pipeline.remove()
            self._pipeline = None
            self.outputs.come_from(None)

    @property
    def details(self) -> str:
        world = self.ranks.world_size
        layout = f"{self.layout} of {world} ranks" if world > 1 else "1 rank"
        return f"{layout}, {self.record.line()}" if self.shard_mesh else layout

    # modules and optimizers -------------------------------------------------------------------------------------------
    def add_module(self, module: nn.Module, moves: bool = True) -> nn.Module:
        if self.layout.pp > 1:
            check_modules([*self.modules, module])
            if not moves:
                raise ConfigurationError(
                    f"device_placement=False leaves a model as it is, and pp={self.layout.pp} leaves on each rank what "
                    "its stages hold: let prepare move it, or use a mesh without pp."
                )
            return super().add_module(module)
        added = super().add_module(module, moves)
        if self._tensors:
            run_in_steps(added, self._step_of_own_loop)
        return added

    def split_for(self, module: nn.Module, ignored: set[nn.Parameter]) -> Callable[[list[Slot]], None] | None:
        holdings = self._hold(module, ignored) if self.layout.pp > 1 else None
        tensor = None
        if self.layout.tp > 1:
            tensor = TensorParallel(self.plan_for(module), self.tensor_mesh, self.root_device)
            tensor.begin(module)
            module.__dict__["_leyden_tensor"] = tensor

        def split(slots: list[Slot]) -> None:
            held = slots if holdings is None else holdings.drop(slots, self.root_device)
            if tensor is not None:
                tensor.split(held)

        return None if holdings is None and tensor is None else split

    def _hold(self, module: nn.Module, ignored: set[nn.Parameter]) -> Holdings:
        """Decides what the stages of this rank hold of a module that is still whole.

        Raises:
            ConfigurationError: if it cannot be cut, or has parts that a pipeline cannot run.
        """
        if ignored:
            raise ConfigurationError(
                f"ignored_modules with pp={self.layout.pp}: their gradients are averaged over all ranks, and a stage "
                "of the pipeline has only its own. Leave them out, or use a mesh without pp."
            )
        schedule = self.schedule
        cut = find_cut(module, schedule.stages, **self._cut)
        check_stages(module, cut, choose(module, self.settings["auto_wrap_policy"], ignored).names)
        holdings = Holdings(module, cut, schedule.stages_of(self.pipeline_mesh.get_local_rank()), ignored)
        module.__dict__["_leyden_holdings"] = holdings
        return holdings

    @property
    def pipeline_mesh(self) -> DeviceMesh:
        """The dimension over which the stages of a pipeline are dealt out."""
        assert self.mesh is not None
        return self.mesh["pp"]

    @property
    def schedule(self) -> Schedule:
        """The order in which the pipeline runs its micro-batches."""
        name, count, stages_per_rank = self._schedule
        ranks = self.filled.pp
        schedule = Schedule(name, 4 * ranks if count is None else count, ranks, stages_per_rank)
        if schedule.name in ZERO_BUBBLE and self.filled.size > ranks:
            raise ConfigurationError(
                f"schedule={schedule.name!r} computes the gradients of weights by themselves, which goes silently "
                "wrong where they are sharded or split: use '1F1B' or 'Interleaved1F1B', or pp alone."
            )
        return schedule

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
        if self.layout.pp > 1:
            check_modules(modules)
        super().setup_modules(modules)
        found = [module.__dict__.get("_leyden_tensor") for module in self.modules]
        self._tensors += [tensor for tensor in found if tensor is not None and tensor not in self._tensors]
        self._check_cut()
        if self.layout.pp > 1:
            self._make_pipeline()
        return self.modules

    def _check_cut(self) -> None:
        """Checks that models are cut as this run cuts them, which an earlier run may have set up."""
        for module in self.modules:
            holdings: Holdings | None = module.__dict__.get("_leyden_holdings")
            if self.layout.pp > 1:
                schedule = self.schedule
                found = find_cut(module, schedule.stages, **self._cut)
                check_again(holdings, found, schedule.stages_of(self.pipeline_mesh.get_local_rank()))
            elif holdings is not None:
                check_again(holdings, None, ())

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

    def _make_pipeline(self) -> None:
        [module] = self.modules
        self._leave_pipeline()
        for root in self._roots:
            # torch does this in the first forward pass, in which it would find the blocks of one stage alone.
            root._get_fsdp_state()._lazy_init()
        group = self.pipeline_mesh.get_group()
        holdings: Holdings = module.__dict__["_leyden_holdings"]
        holdings.watch(module)
        self.master_weights = StageWeights(group, holdings.absent)
        self._pipeline = PipelineSteps(self, module, holdings, self.schedule, group, self._begin_backward)
        self.outputs.come_from(self._pipeline)

    def setup_step(self, step_fn: Callable[..., T], module: nn.Module) -> Callable[..., T]:
        if self._pipeline is not None and module is self._pipeline.root:
            step_fn = self._pipeline.pipeline.passages.around(step_fn)
        return super().setup_step(step_fn, module)

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
        if self._pipeline is not None:
            return self._run_pipeline(step_fn, batch, extra, window, hooks)
        if not self._has_run:
            self._start(batch)
        with self.step_context():
            outputs = super().forward_backward(step_fn, batch, extra, window, hooks)
        return self._whole(outputs)

    def _run_pipeline(
        self,
        step_fn: Callable[..., Any],
        batch: Any,
        extra: tuple[Any, ...],
        window: Window,
        hooks: BackwardHooks | None,
        counts: bool = True,
    ) -> Any:
        assert self._pipeline is not None
        if not self._has_run:
            self._start(batch)
            with self.step_context():
                self._pipeline.start(step_fn, batch, extra)
        self._follow_window(window)
        try:
            with self.step_context():
                outputs = self._pipeline.forward_backward(step_fn, batch, extra, window, hooks, counts)
        finally:
            self._set_backward(True, window.closes)
        return self._whole(outputs)

    def _begin_backward(self, is_last: bool) -> None:
        """Begins a pipeline's backward pass: gradients are exchanged in the last one of a window only."""
        self._set_backward(is_last, is_last and self._syncs)

    def _set_backward(self, is_last: bool, exchanges: bool) -> None:
        for root in self._roots:
            root.set_is_last_backward(is_last)
            root.set_reshard_after_backward(is_last)
            root.set_requires_gradient_sync(exchanges)

    def evaluate(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        if self._pipeline is not None:
            with self.step_context(trains=False):
                return self._whole(self._pipeline.evaluate(step_fn, batch, extra))  # type: ignore[return-value]
        return self._whole(super().evaluate(step_fn, batch, extra))

    def _whole(self, outputs: T) -> T:
        """Returns a step's outputs as whole tensors: split logits, and losses of them, are DTensors."""
        return map_tensors(outputs, whole) if any(tensor.plan.splits_loss for tensor in self._tensors) else outputs

    def forward(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        if not self._has_run:
            self._start(batch)
        with self.step_context(trains=self.modules[0].training):
            return super().forward(step_fn, batch, extra)

    def shadow_batch(self, step_fn: Callable[..., Any], filler: Any, extra: tuple[Any, ...], window: Window) -> None:
        if self._pipeline is not None:
            if filler is None:
                raise ConfigurationError(
                    "a rank without a single sample of its own cannot take part in a pipeline, which exchanges "
                    "activations for each batch: use a larger data set, a smaller batch_size or fewer data ranks."
                )
            self._run_pipeline(step_fn, filler, extra, window, None, counts=False)
            return
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
        if self._pipeline is not None:
            check_batch(self.ranks, self.pipeline_mesh, batch)
            # A scaler makes its scale as it scales the first loss, which the last stage alone has.
            self.precision.scale_loss(torch.zeros((), device=self.root_device))
        for tensor in self._tensors:
            tensor.start(self.ranks, batch)

    def before_step(self, optimizer: Optimizer) -> None:
        if self._tensors:
            parameters = parameters_of(optimizer)
            sum_partial(parameters)
            if optimizer not in self._checked:
                check_alike(self.tensor_mesh, self.modules, parameters)
                self._checked.add(optimizer)
        super().before_step(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        if self._pipeline is not None and self.precision.may_skip:
            self.precision.unscale(optimizer)
            self.precision.share_found_inf(optimizer, self._pipeline.largest)
        return super().step(optimizer, closure, **kwargs)

    def clip_parameters(
        self, parameters: Sequence[Tensor], value: float, algorithm: ClipAlgorithm = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        if self._pipeline is None or algorithm == "value":
            return super().clip_parameters(parameters, value, algorithm, norm_type)
        return self._pipeline.clip_norm(parameters, value, norm_type)

    def counted(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return list(parameters) if self._pipeline is None else self._pipeline.counted(parameters)

    @property
    def refusals(self) -> dict[Refused, str]:
        found = super().refusals
        if self.layout.pp == 1:
            found["micro_batches"] = (
                "ranks that share a batch exchange parts of each layer. Use strategy='fsdp' or 'ddp'"
            )
            return found
        return {
            **found,
            "micro_batches": "a pipeline cuts them itself. Give MeshStrategy(microbatches=…)",
            "compiled": "a stage of a pipeline leaves the step where the next one begins. Give the module as it is, "
            "and MeshStrategy(compile=True), which compiles the blocks",
            "exchange": "a rank has the weights of its own stages alone. Use a mesh without pp",
        }

    # state ------------------------------------------------------------------------------------------------------------
    def save(self, writer: StateWriter, module: nn.Module, optimizers: list[dict[str, Any]] | None) -> None:
        holdings: Holdings | None = module.__dict__.get("_leyden_holdings")
        if holdings is None:
            super().save(writer, module, optimizers)
            return
        writer.model(state_to_save(module, holdings), replicated=list(module.state_dict(keep_vars=True)))
        if optimizers is not None:
            writer.optimizers(optimizers)

    def load_module(self, reader: WeightReader, module: nn.Module, strict: bool = True) -> None:
        holdings: Holdings | None = module.__dict__.get("_leyden_holdings")
        if holdings is None:
            super().load_module(reader, module, strict)
        else:
            fill_weights(module, reader, strict, places_to_load(module, holdings.absent))

    def state_dict(self) -> dict[str, Any]:
        own = {} if self._pipeline is None else {"pipeline_batches": self._pipeline.draws.batches}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._pipeline is not None and "pipeline_batches" in state:
            self._pipeline.draws.resume(SavedState(state, "strategy").integer("pipeline_batches", least=0))

    def full_state_dict(self, module: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
        holdings: Holdings | None = module.__dict__.get("_leyden_holdings")
        if holdings is None:
            return super().full_state_dict(module, rank0_only)
        keeps = not rank0_only or self.ranks.is_global_zero
        return whole_state(module, holdings, self.schedule, self.pipeline_mesh.get_group(), rank0_only, keeps)
