"""MeshStrategy: tensor, context and pipeline parallelism for plain modules, alone or combined with FSDP and HSDP."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import Optimizer

from leyden.core.errors import ConfigurationError, nearest
from leyden.core.saved_state import SavedState
from leyden.core.tree import map_tensors
from leyden.strategies.base import ClipAlgorithm, Refused, RunSettings, Strategy
from leyden.strategies.fsdp.fsdp_strategy import MIXED, FSDPStrategy
from leyden.strategies.fsdp.options import offload_of
from leyden.strategies.fsdp.policy import WrapPolicy, choose
from leyden.strategies.fsdp.sharding import Apart, whole
from leyden.strategies.fsdp.values import Slot
from leyden.strategies.local_weights import LocalWeights
from leyden.strategies.master_weights import parameters_of
from leyden.strategies.mesh.consistency import (
    check_batch,
    check_replicated_gradients,
    is_sampled,
    let_anomaly_mode_check,
    sum_partial,
)
from leyden.strategies.mesh.context.attention import METHODS, Method
from leyden.strategies.mesh.context.context_parallel import MANUAL, ContextParallel
from leyden.strategies.mesh.context.own_loop import ContextLoop
from leyden.strategies.mesh.context.sequence import Key
from leyden.strategies.mesh.expert_parallel import WORD, ExpertParallel, check_router_loss
from leyden.strategies.mesh.layout import ORDER, Layout, check_rotation, sequence_ranks, tell_method
from leyden.strategies.mesh.outputs import MeshOutputs
from leyden.strategies.mesh.pipeline.absent import OVERLAPS, AbsentParameter, check_optimizers
from leyden.strategies.mesh.pipeline.cut import Holdings, find_cut
from leyden.strategies.mesh.pipeline.refusals import check_again, check_modules, check_stages, refuse_arguments
from leyden.strategies.mesh.pipeline.schedule import ZERO_BUBBLE, Schedule
from leyden.strategies.mesh.pipeline.stage_state import (
    LocalStages,
    StageWeights,
    load_targets,
    state_to_save,
    whole_state,
)
from leyden.strategies.mesh.pipeline.steps import PipelineSteps
from leyden.strategies.mesh.plan import Plan, PlanLike, TensorParallel, is_split, plan_of
from leyden.strategies.mesh.plan_checks import check_loaded
from leyden.strategies.mesh.styles import gathered
from leyden.strategies.process_group import broadcast_all
from leyden.strategies.recomputing import keep_in_checkpoints
from leyden.strategies.weights import StateWriter, WeightReader, fill_weights
from leyden.strategies.window import BackwardHooks, Window

T = TypeVar("T")
DATA = ("dp_replicate", "dp_shard")
"""The mesh dimensions of FSDP and HSDP."""


class MeshStrategy(FSDPStrategy):
    """A mesh of ranks that combines data, tensor, context and pipeline parallelism.

    The model is replicated over `dp_replicate`, sharded as by FSDP over `dp_shard`, its layers are split over `tp`, and
    its blocks are divided into pipeline stages over `pp`. The sequences of a batch are divided over `cp`, which also
    shards the model. The ranks of a tp or cp group share their batches, and so do the stages of a pipeline. Losses and
    weights are those of a single process.

    Args:
        dp_replicate: number of replicas of the model.
        dp_shard: ranks over which each replica is sharded; -1 fills the world.
        tp: ranks over which layers are split; "auto" for the ranks of one machine, or 2 if there is only one machine.
        pp: ranks over which the model's blocks are divided, as stages of a pipeline.
        cp: ranks over which the sequences of a batch are divided (context parallelism).
        cp_method: how attention reaches the other parts of a sequence: "gather" collects their keys and values,
            "ulysses" divides the heads.
        sequence_dims: the dimension of the sequence in each tensor of a batch, by key or index; None for tensors that
            every rank keeps whole. Names of `transformers` (`input_ids`, `labels`, …) are known.
        sequence_padding: what fills up sequences that 2 · cp · tp does not divide, by the same keys.
        ep: ranks over which experts are divided: each holds some experts whole, and tokens travel to them. It divides
            dp_shard × cp.
        plan: the layers to split and how, as pattern → style (see `Plan`). If omitted, the module's `parallel_plan()`
            or the `tp_plan` of a `transformers` model in it.
        schedule: order in which a pipeline runs its micro-batches, by torch's name: "GPipe", "1F1B",
            "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble" or "DualPipeV".
        microbatches: number of micro-batches per batch in a pipeline; 4 per pipeline rank if omitted.
        stages_per_rank: stages that each rank holds: always 1 under GPipe and 1F1B; 2 under other schedules if omitted.
        pipeline_module: name of the list of blocks to cut into stages, or of a module that contains it; the largest
            list if omitted.
        split: names of the first block of the second and each later stage; an even split if omitted.
        first_stage: names of further modules or parameters that the first stage holds, in addition to those defined
            before the list of blocks.
        last_stage: names of further modules or parameters that the last stage holds, in addition to those defined after
            the list of blocks.
        auto_wrap_policy: as for FSDPStrategy.
        **kwargs: further arguments of FSDPStrategy. With pp, `reshard_after_forward` is False if omitted: a stage keeps
            its parameters gathered for a whole batch. True gathers each group twice for each micro-batch.

    Raises:
        ConfigurationError: for sizes whose product is not the world size, or a plan that does not fit the model.

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
        cp_method: Method = "gather",
        sequence_dims: Mapping[Key, int | None] | None = None,
        sequence_padding: Mapping[Key, float] | None = None,
        ep: int = 1,
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
        if cp_method not in METHODS:
            raise ConfigurationError(f"cp_method={cp_method!r} is not known. {nearest(str(cp_method), METHODS)}")
        if cp == 1:
            refuse_arguments(
                "cp",
                cp_method=None if cp_method == "gather" else cp_method,
                sequence_dims=sequence_dims,
                sequence_padding=sequence_padding,
            )
        for key, dim in (sequence_dims or {}).items() if pp != 1 else ():
            if dim is not None and dim < 1:
                raise ConfigurationError(
                    f"a pipeline splits the first dimension into micro-batches, and sequence_dims has {key!r}: {dim}: "
                    "put the samples first, (B, T, …), and count dimensions from 0."
                )
        if kwargs.get("device_mesh") is not None:
            raise ConfigurationError(
                f"device_mesh={kwargs['device_mesh']!r}: MeshStrategy makes its own mesh. Pass dp_replicate, dp_shard "
                "and tp instead."
            )
        if pp == 1:
            refuse_arguments(
                "pp",
                schedule=None if schedule == "1F1B" else schedule,
                microbatches=microbatches,
                stages_per_rank=stages_per_rank,
                pipeline_module=pipeline_module,
                split=split,
                first_stage=first_stage or None,
                last_stage=last_stage or None,
            )
        super().__init__(auto_wrap_policy, **kwargs)
        if pp > 1 and self.settings["reshard_after_forward"] is None:
            # Freed after each forward, groups would be gathered twice for each micro-batch.
            self.settings["reshard_after_forward"] = False
        self.name = "mesh"
        self._splits_by_machine = tp == "auto"
        self.layout = Layout(dp_replicate, dp_shard, 1 if tp == "auto" else tp, pp, cp, ep)
        self.mesh: DeviceMesh | None = None
        """The mesh of all ranks, with named dimensions; None until the process group exists."""
        self.context_mesh: DeviceMesh | None = None
        """The dimension over which sequences are divided; None without cp."""
        self._expert_mesh: DeviceMesh | None = None
        """The same ranks, with those that shard a replica divided into expert_shard and ep; None without ep."""
        self._plan = plan if isinstance(plan, Plan) or plan is None else Plan(plan)
        self._tensor_parallel: list[TensorParallel] = []
        """The plan of each module with split layers; empty without tp."""
        self._batches = 0
        """The batches that this run has begun."""
        self._schedule = (schedule, microbatches, stages_per_rank)
        self._cut: dict[str, Any] = {
            "pipeline_module": pipeline_module,
            "split": split,
            "first_stage": tuple(first_stage),
            "last_stage": tuple(last_stage),
        }
        self._pipeline: PipelineSteps | None = None
        self._pipeline_batches = 0
        """The training batches of the latest pipeline that has ended."""
        self.outputs: MeshOutputs = MeshOutputs(self)
        self._sequences: tuple[Any, ...] = (cp_method, dict(sequence_dims or {}), dict(sequence_padding or {}))
        self._context: ContextParallel | None = None
        self._own_parts = ContextLoop(self, cp_method) if cp != 1 else None
        if self._own_parts is not None:
            self.own_loop = self._own_parts
        self._steps: Counter[Optimizer] = Counter()
        """The steps of each optimizer in this run."""
        self._compared: Counter[Optimizer] = Counter()
        """The last step before which the gradients of an optimizer were compared across the ranks of a tp group."""

    @classmethod
    def from_accelerate(cls, config: Mapping[str, Any], **kwargs: Any) -> MeshStrategy:
        """Returns the strategy described by an Accelerate YAML file.

        Args:
            config: the mapping under `parallelism_config`, merged with the one under `fsdp_config` if there is one.
            **kwargs: further arguments of this class.

        Example:
            >>> MeshStrategy.from_accelerate({"parallelism_config_tp_size": 2, "fsdp_offload_params": True}).layout.tp
            2
        """
        # A YAML key without a value means the default.
        given = {name: value for name, value in config.items() if value is not None}
        sizes = {name: given.pop(f"parallelism_config_{name}_size", None) for name in (*ORDER, "ep", "sp")}
        sizes = {name: size for name, size in sizes.items() if size is not None}
        check_rotation(str(given.get("parallelism_config_cp_comm_strategy", "allgather")))
        if "sp" in sizes:
            sizes["cp"], method = sequence_ranks(sizes.get("cp", 1), sizes.pop("sp"))
            tell_method(sizes["cp"], method)
            kwargs = {"cp_method": method, **kwargs}
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
    def part_ranks(self) -> list[int]:
        layout = self.filled
        return [layout.part_rank(rank) for rank in range(layout.size)]

    @property
    def pipeline_rank(self) -> int:
        return self.pipeline_mesh.get_local_rank() if self.filled.pp > 1 else 0

    @property
    def filled(self) -> Layout:
        """The layout with every -1 replaced by its size in this run."""
        if self.mesh is not None:
            return self.layout
        layout = replace(self.layout, tp=self.tp_by_machine) if self._splits_by_machine else self.layout
        return layout.filled(self.ranks.world_size)

    @property
    def tp_by_machine(self) -> int:
        """The value of tp="auto": the ranks per machine, or 2 if there is only one machine."""
        return self.ranks.local_size if self.ranks.local_size < self.ranks.world_size else 2

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.layout.tp > 1 and self.precision.form:
            raise ConfigurationError(
                f"tp={self.layout.tp} splits layers, and precision {self.precision.form!r} replaces them with its own: "
                "use precision='bf16-mixed', or tp=1."
            )
        if self.shard_mesh is None:
            self._check_unsharded()

    def _check_unsharded(self) -> None:
        """Refuses arguments that apply to shards only, on a mesh without any."""
        offloads = isinstance(offload_of(self.settings["cpu_offload"], self.root_device), CPUOffloadPolicy)
        for name, is_given in {"cpu_offload": offloads, "mp_policy": self.settings["mp_policy"] is not None}.items():
            if is_given:
                raise ConfigurationError(
                    f"{name} is for shards, and {self.layout} leaves none on {self.ranks.world_size} ranks: use "
                    f"dp_shard=2 or more, or leave out {name} (precision sets the dtypes)."
                )

    def make_mesh(self) -> DeviceMesh | None:
        self.layout, self._splits_by_machine = self.filled, False
        dimensions = self.layout.dimensions
        names = tuple(name for name in DATA if name in dimensions)
        if self.layout.cp > 1:
            # Ranks with parts of the same sequences are shards too: their gradients are summed in the same exchange.
            self.context_mesh = self.ranks.mesh(dimensions)["cp"]
            dimensions = self.layout.with_shards_along_cp
            names = tuple(name for name in (*DATA, "dp_shard_cp") if name in dimensions)
        self.mesh = self.ranks.mesh(dimensions, joined=(names[-1], "tp") if names and self.layout.tp > 1 else ())
        if self.layout.tp > 1 or self.layout.ep > 1:
            let_anomaly_mode_check()
        if self.layout.ep > 1:
            sizes = self.layout.expert_dimensions
            # The norm of gradients is reduced over the first two, and over tp too if it splits experts.
            for joined in (("expert_shard", "ep"), ("expert_shard", "ep", "tp"))[: 1 + ("tp" in sizes)]:
                self._expert_mesh = self.ranks.mesh(sizes, joined)
        return self.mesh[names] if names else None

    @property
    def device_mesh(self) -> DeviceMesh | None:
        # The mesh with a dimension `cp` of its own, which users know by name.
        return self.mesh if self.context_mesh is None else self.context_mesh._get_root_mesh()

    @property
    def meshes(self) -> list[DeviceMesh]:
        """Every DeviceMesh of the ranks: with cp and ep, some dimensions are divided in several ways."""
        return [mesh for mesh in (self.mesh, self.device_mesh, self._expert_mesh) if mesh is not None]

    @property
    def copies_along(self) -> int | None:
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return names.index("dp_replicate") if "dp_replicate" in names else None

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The submesh over which layers are split."""
        assert self.mesh is not None
        return self.mesh["tp"]

    def check_settings(self, settings: RunSettings) -> None:
        super().check_settings(settings)
        if self.layout.cp > 1 and settings.manual:
            raise ConfigurationError(f"cp={self.layout.cp}: {MANUAL}")

    def release(self) -> None:
        self._leave_pipeline()
        self._tensor_parallel = []
        super().release()

    def teardown(self) -> None:
        self._leave_pipeline()
        self._batches, self._steps, self._compared, self._tensor_parallel = 0, Counter(), Counter(), []
        super().teardown()

    def _leave_pipeline(self) -> None:
        if self._pipeline is not None:
            self._pipeline.remove()
            self._pipeline_batches = self._pipeline.rng.batches
        self._pipeline = self._context = None
        self.outputs.follow(None)

    @property
    def details(self) -> str:
        world = self.ranks.world_size
        layout = f"{self.layout} of {world} ranks" if world > 1 else "1 rank"
        for parallel in self._tensor_parallel:
            layout += f", {parallel.share:.0%} of the parameters split"
        return f"{layout}, {self.record.line()}" if self.shard_mesh else layout

    # modules and optimizers -------------------------------------------------------------------------------------------
    def add_module(self, module: nn.Module, moves: bool = True) -> nn.Module:
        if self.layout.pp > 1:
            check_modules([*self.modules, module])
            if not moves:
                raise ConfigurationError(
                    f"device_placement=False leaves a model as it is, and pp={self.layout.pp} must drop from each rank "
                    "what other stages hold. Let prepare place the model, or use a mesh without pp."
                )
            return super().add_module(module)
        added = super().add_module(module, moves)
        if self._own_parts is not None:
            # A loop of the user's own cuts its batches itself.
            self._context = None
            self._own_parts.follow(added)
        if self._tensor_parallel:
            run_in_steps(added, self._custom_loop_step)
        return added

    def split_for(self, module: nn.Module, ignored: set[nn.Parameter]) -> Callable[[list[Slot]], None] | None:
        holdings = self._hold(module, ignored) if self.layout.pp > 1 else None
        parallel = None
        if self.layout.tp > 1:
            parallel = TensorParallel(self.plan_for(module), self.tensor_mesh, self.root_device)
            parallel.begin(module)
            module.__dict__["_leyden_tensor_parallel"] = parallel
        if holdings is None and parallel is None:
            return None

        def split(slots: list[Slot]) -> None:
            held = slots if holdings is None else holdings.drop(slots, self.root_device)
            if parallel is not None:
                parallel.split(held)

        return split

    def apart_in(self, module: nn.Module) -> dict[str, Apart]:
        if self.layout.ep == 1:
            return {}
        mesh = self._expert_mesh
        assert mesh is not None
        names = mesh.mesh_dim_names or ()
        held, shards = (tuple(n for n in names if n in own) for own in (("ep", "tp"), ("dp_replicate", "expert_shard")))
        plan = self._plan or plan_of(module, divides_experts=True)
        found = {} if plan is None else plan.experts(module)
        if not found:
            raise ConfigurationError(
                f"ep={self.layout.ep} needs a plan of the experts: pass MeshStrategy(plan={{pattern: '{WORD}'}}), or "
                "define parallel_plan() on the module. The pattern names a module whose parameters have the experts as "
                "their first dimension."
            )
        check_router_loss(module)
        keep_in_checkpoints(module)
        apart, holdings = {}, _holdings_of(module)
        for name, inner in found.items():
            part = module.get_submodule(name)
            apart[name] = ExpertParallel(name, part, mesh[held], mesh[shards], inner).apart()
            if holdings is not None and not any(holdings.is_held(part, own) for own, _ in part.named_parameters()):
                # Every rank takes the same groups in turn; `split_for` drops those of other stages.
                apart[name] = replace(apart[name], split=lambda part: None)
        return apart

    def _hold(self, module: nn.Module, ignored: set[nn.Parameter]) -> Holdings:
        """Decides which parts of a module, still whole, the stages of this rank hold.

        Raises:
            ConfigurationError: if the module cannot be cut, or has parts that a pipeline cannot run.
        """
        if ignored:
            raise ConfigurationError(
                f"ignored_modules with pp={self.layout.pp}: their gradients are averaged over all ranks, and a stage "
                "has gradients of its own modules only. Leave out ignored_modules, or use a mesh without pp."
            )
        schedule = self.schedule
        cut = find_cut(module, schedule.stages, **self._cut)
        check_stages(module, cut, choose(module, self.settings["auto_wrap_policy"], ignored).names)
        holdings = Holdings(module, cut, schedule.stages_of(self.pipeline_mesh.get_local_rank()), ignored)
        module.__dict__["_leyden_holdings"] = holdings
        return holdings

    @property
    def pipeline_mesh(self) -> DeviceMesh:
        """The submesh over which pipeline stages are distributed."""
        assert self.mesh is not None
        return self.mesh["pp"]

    @property
    def schedule(self) -> Schedule:
        """The pipeline's schedule for this run."""
        name, count, stages_per_rank = self._schedule
        ranks = self.filled.pp
        schedule = Schedule(name, 4 * ranks if count is None else count, ranks, stages_per_rank)
        if schedule.name in ZERO_BUBBLE and self.filled.size > ranks:
            raise ConfigurationError(
                f"schedule={schedule.name!r} computes weight gradients in separate passes, which is silently wrong in "
                "torch for sharded or split weights. Use '1F1B' or 'Interleaved1F1B', or pp alone."
            )
        return schedule

    def plan_for(self, module: nn.Module) -> Plan:
        """Returns the plan for a module; an empty one if its layers are split already, by hand or on loading.

        Raises:
            ConfigurationError: if there is no plan, or the layers are split over other ranks.
        """
        if is_split(module):
            if self._plan is not None:
                raise ConfigurationError(
                    f"{type(module).__name__} has parameters that are split already, and the strategy has a plan: "
                    "drop the plan, or load the model whole."
                )
            check_loaded(module, self.tensor_mesh)
            return Plan({})
        plan = self._plan or plan_of(module, self.layout.ep > 1)
        if plan is None:
            raise ConfigurationError(
                f"tp={self.layout.tp} needs a plan of the layers to split: pass MeshStrategy(plan={{pattern: style}}), "
                "or define parallel_plan() on the module."
            )
        return plan

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        if self.layout.pp > 1:
            check_modules(modules)
        super().setup_modules(modules)
        found = [module.__dict__.get("_leyden_tensor_parallel") for module in self.modules]
        self._tensor_parallel += [parallel for parallel in found if parallel and parallel not in self._tensor_parallel]
        self._check_cut()
        self._leave_pipeline()
        if self.layout.cp > 1:
            if len(self.modules) > 1:
                raise ConfigurationError(
                    f"cp={self.layout.cp} divides the sequences of one model, and there are {len(self.modules)}: put "
                    "them into one module."
                )
            method, dimensions, padding = self._sequences
            assert self.context_mesh is not None
            group = self.context_mesh.get_group()
            self._context = ContextParallel(self, self.modules[0], group, method, dimensions, padding)
        self._begin_pipeline()
        return self.modules

    def _begin_pipeline(self) -> None:
        if self.layout.pp > 1:
            self._pipeline = self._make_pipeline()
        self.outputs.follow(self._pipeline, self._context)

    def _check_cut(self) -> None:
        """Checks that models set up by an earlier run are cut in the same way as in this run."""
        for module in self.modules:
            holdings = _holdings_of(module)
            if self.layout.pp > 1:
                schedule = self.schedule
                found = find_cut(module, schedule.stages, **self._cut)
                check_again(holdings, found, schedule.stages_of(self.pipeline_mesh.get_local_rank()))
            elif holdings is not None:
                check_again(holdings, None, ())

    def setup_optimizers(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        if self.layout.pp > 1:
            check_optimizers(optimizers)
        return super().setup_optimizers(modules, optimizers)

    def explain(self, error: BaseException) -> str | None:
        if self.layout.pp > 1 and OVERLAPS in str(error):
            return (
                "Parameters of other stages of a pipeline are placeholders, which cannot be written. To change weights "
                "by hand, loop over trainer.strategy.held(self.parameters())."
            )
        if MIXED not in str(error) or self.layout.tp == 1:
            return super().explain(error)
        return (
            "An operation mixed a plain tensor and a DTensor. A split layer with use_local_output=False (the default "
            "of torch's SequenceParallel) or with the style 'loss' returns a DTensor, and so does reading a split "
            "parameter outside its layer's forward. Set use_local_output=True, read parameters in their layers within "
            "a step, or convert by tensor.to_local() (this rank's part) or tensor.full_tensor() (the whole)."
        )

    def _make_pipeline(self) -> PipelineSteps:
        [module] = self.modules
        for root in self._roots:
            # torch does this lazily in the first forward, where it would find the blocks of a single stage only.
            root._get_fsdp_state()._lazy_init()
            if self.settings["reshard_after_forward"] is False:
                # An earlier run may have sharded the module with another setting.
                root.set_reshard_after_forward(False)
        group = self.pipeline_mesh.get_group()
        holdings: Holdings = module.__dict__["_leyden_holdings"]
        holdings.protect(module)
        self.master_weights = StageWeights(group, holdings.absent)
        steps = PipelineSteps(self, module, holdings, self.schedule, group, self._begin_backward, self._context)
        # A fit that goes on from the latest one draws other numbers than that one did.
        steps.rng.resume_after(self._pipeline_batches)
        return steps

    def setup_step(self, step_fn: Callable[..., T], module: nn.Module) -> Callable[..., T]:
        if self._pipeline is not None and module is self._pipeline.root:
            step_fn = self._pipeline.pipeline.runner.around(step_fn)
        return super().setup_step(step_fn, module)

    # the step ---------------------------------------------------------------------------------------------------------
    @contextmanager
    def step_context(self, trains: bool = True) -> Iterator[None]:
        """The context of forward and backward passes, in which modules read this rank's parameters as plain tensors.

        Forward passes, losses of split logits and backward passes must run inside it. `forward_backward`, `forward` and
        `backward` enter it automatically, and so does the forward of a model prepared by an Accelerator.

        Args:
            trains: False for evaluation, which leaves the random generators alone.
        """
        with ExitStack() as stack:
            # Already running if a custom loop entered it for backward, and activation checkpointing reruns a forward.
            for parallel in self._tensor_parallel:
                if not parallel.is_running:
                    stack.enter_context(parallel.running(trains))
            yield

    def forward_backward(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], window: Window, hooks: BackwardHooks
    ) -> Any:
        if self._pipeline is not None:
            return self._run_pipeline(step_fn, batch, extra, window, hooks)
        self._begin_batch(batch)
        if self._context is not None:
            self._rehearse(step_fn, batch, extra)
            part = self._context.cut(batch)
            with self.step_context(), self._context.running(part):
                outputs = super().forward_backward(step_fn, part.batch, extra, window, hooks)
            return self._context.trained(self._whole(outputs))
        with self.step_context():
            outputs = super().forward_backward(step_fn, batch, extra, window, hooks)
        return self._whole(outputs)

    def _rehearse(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], evaluates: bool = False
    ) -> None:
        """Checks with the first batch that the step runs on parts of sequences."""
        assert self._context is not None
        precision = self.precision.forward_context

        def step(batch: Any) -> Any:
            with nullcontext() if precision is None else precision():
                return step_fn(batch, *extra)

        def run(step: Callable[[Any], Any], batch: Any, read: Callable[[Any], Any]) -> Any:
            return read(step(batch))

        rehearse = self._context.rehearse_evaluation if evaluates else self._context.rehearse
        rehearse(step, batch, run if self._pipeline is None else self._pipeline.rehearse_whole)

    def loss_to_backward(self, loss: Tensor, num_items: Tensor | float | None, window: Window) -> Tensor:
        if self._context is not None:
            loss, num_items = self._context.of_all_parts(loss, num_items)
        elif self._own_parts is not None and num_items is not None:
            loss, num_items = self._own_parts.of_all_parts(loss, num_items)
        return super().loss_to_backward(loss, num_items, window)

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
        is_first = self._begin_batch(batch)
        if self._context is not None:
            self._rehearse(step_fn, batch, extra)
            batch = self._context.cut(batch)
        if is_first:
            with self.step_context():
                self._pipeline.start(step_fn, batch, extra)
        self._follow_window(window)
        try:
            with self.step_context():
                outputs = self._pipeline.forward_backward(step_fn, batch, extra, window, hooks, counts)
        finally:
            self._set_backward(True, window.closes)
        return self._whole(outputs)

    def _begin_backward(self, is_last: bool, outputs: Any) -> None:
        """Configures FSDP for the next backward of a pipeline: only the last one of a window reduces gradients."""
        self._set_backward(is_last, is_last and self._syncs)

    def _set_backward(self, is_last: bool, reduces_gradients: bool) -> None:
        for root in self._roots:
            root.set_is_last_backward(is_last)
            root.set_reshard_after_backward(is_last)
            root.set_requires_gradient_sync(reduces_gradients)

    def evaluate(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        if self._pipeline is None and self._context is None:
            return self._whole(super().evaluate(step_fn, batch, extra))
        if self._context is not None:
            if self._pipeline is None:
                self._begin_batch(batch)
            self._rehearse(step_fn, batch, extra, evaluates=True)
            batch = self._context.cut(batch)
        with self.step_context(trains=False):
            outputs: Any
            if self._pipeline is not None:
                outputs = self._pipeline.evaluate(step_fn, batch, extra)
            else:
                assert self._context is not None
                with self._context.running(batch):
                    outputs = Strategy.forward(self, step_fn, batch.batch, extra)
            outputs = self._whole(outputs)
            joined: T = outputs if self._context is None else self._context.evaluated(outputs, batch)
            return joined

    def _whole(self, outputs: T) -> T:
        """Returns a step's outputs with full tensors in place of DTensors, such as split logits and their losses."""
        return (
            map_tensors(outputs, whole)
            if any(parallel.plan.splits_loss for parallel in self._tensor_parallel)
            else outputs
        )

    def forward(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        if self._context is None:
            # Otherwise `shadow_batch` has begun the batch, before it was cut.
            self._begin_batch(batch)
        with self.step_context(trains=self.modules[0].training):
            return super().forward(step_fn, batch, extra)

    def shadow_batch(self, step_fn: Callable[..., Any], filler: Any, extra: tuple[Any, ...], window: Window) -> None:
        if self._pipeline is not None:
            if filler is None:
                raise ConfigurationError(
                    "a rank has no sample of its own, and a pipeline needs every stage in every batch: use a larger "
                    "data set, a smaller batch_size or fewer data ranks."
                )
            self.is_filling = True
            try:
                self._run_pipeline(step_fn, filler, extra, window, None, counts=False)
            finally:
                self.is_filling = False
            return
        with ExitStack() as stack:
            stack.enter_context(self.step_context())
            if self._context is not None and filler is not None:
                self._begin_batch(filler)
                self._rehearse(step_fn, filler, extra)
                part = self._context.cut(filler)
                stack.enter_context(self._context.running(part))
                filler = part.batch
            super().shadow_batch(step_fn, filler, extra, window)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.step_context():
            super().backward(loss, *args, **kwargs)

    @contextmanager
    def _custom_loop_step(self, batch: Any, trains: bool) -> Iterator[None]:
        if trains:
            self._begin_batch(batch)
        with self.step_context(trains):
            yield

    def _begin_batch(self, batch: Any) -> bool:
        """Checks some batches, as `is_sampled` decides, and prepares the first one. Returns True for the first one.

        Raises:
            ConfigurationError: if the ranks that share a model have different batches.
        """
        self._batches += 1
        if is_sampled(self._batches):
            if self._pipeline is not None:
                check_batch(self.ranks, self.pipeline_mesh, batch)
            if self._tensor_parallel:
                check_batch(self.ranks, self.tensor_mesh, batch)
            if self.context_mesh is not None and self._context is not None:
                check_batch(self.ranks, self.context_mesh, batch)
        if self._batches > 1:
            return False
        if self._pipeline is not None:
            # A gradient scaler creates its scale with the first loss, and only the last stage has a loss.
            self.precision.scale_loss(torch.zeros((), device=self.root_device))
        for parallel in self._tensor_parallel:
            parallel.synchronize()
        return True

    def before_step(self, optimizer: Optimizer) -> None:
        if self._tensor_parallel:
            parameters = parameters_of(optimizer)
            sum_partial(parameters)
            number = self._steps[optimizer] + 1
            # Clipping calls this method again.
            if is_sampled(number) and self._compared[optimizer] != number:
                check_replicated_gradients(self.tensor_mesh, self.modules, parameters)
                self._compared[optimizer] = number
        super().before_step(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        self._steps[optimizer] += 1
        if self._pipeline is not None and self.precision.may_skip:
            self.precision.unscale(optimizer)
            self.precision.share_found_inf(optimizer, self._pipeline.reduce_max)
        return super().step(optimizer, closure, **kwargs)

    def clip_parameters(
        self, parameters: Sequence[Tensor], value: float, algorithm: ClipAlgorithm = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        if self._pipeline is None or algorithm == "value":
            return super().clip_parameters(parameters, value, algorithm, norm_type)
        return self._pipeline.clip_norm(parameters, value, norm_type)

    def counted(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return list(parameters) if self._pipeline is None else self._pipeline.counted(parameters)

    def held(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        return [parameter for parameter in parameters if not isinstance(parameter, AbsentParameter)]

    @property
    def refusals(self) -> dict[Refused, str]:
        found = super().refusals
        if self.layout.pp == 1:
            found["micro_batches"] = (
                "ranks that share a batch communicate within every layer. Use strategy='fsdp' or 'ddp'"
            )
            return found
        return {
            **found,
            "micro_batches": "the pipeline cuts batches itself. Set MeshStrategy(microbatches=…)",
            "compiled": "a pipeline stage ends the step where the next stage begins. Leave the module uncompiled, and "
            "use MeshStrategy(compile=True), which compiles the blocks",
        }

    def synchronize_buffers(self) -> None:
        if self._pipeline is None:
            super().synchronize_buffers()
            return
        # From the stage that saves a buffer. pp is the outermost dimension, so these are a stage's first ranks.
        firsts = range(0, self.layout.size, self.layout.size // self.layout.pp)
        pipeline = self._pipeline.pipeline
        by_owner: dict[int, list[Tensor]] = {rank: [] for rank in firsts}
        for name, buffer in self._pipeline.root.named_buffers():
            by_owner[firsts[pipeline.schedule.rank_of(pipeline.cut.stage_of_buffer(name))]].append(buffer.detach())
        for owner, buffers in by_owner.items():
            broadcast_all(buffers, owner)

    # state ------------------------------------------------------------------------------------------------------------
    def uses_buffer(self, module: nn.Module, name: str) -> bool:
        holdings = _holdings_of(module)
        if holdings is None or not name.startswith(f"{holdings.cut.container}."):
            # Every stage runs what is around the blocks.
            return True
        return holdings.cut.stage_of(name) in holdings.stages

    def local_weights(self, module: nn.Module) -> LocalWeights:
        holdings = _holdings_of(module)
        if holdings is None:
            return super().local_weights(module)
        self._reshard()
        return LocalStages(module, holdings)

    def save(self, writer: StateWriter, module: nn.Module, optimizers: list[dict[str, Any]] | None) -> None:
        holdings = _holdings_of(module)
        if holdings is None:
            super().save(writer, module, optimizers)
            return
        writer.model(state_to_save(module, holdings), replicated=list(module.state_dict(keep_vars=True)))
        if optimizers is not None:
            writer.optimizers(optimizers)

    def load_module(self, reader: WeightReader, module: nn.Module, strict: bool = True) -> None:
        holdings = _holdings_of(module)
        if holdings is None:
            super().load_module(reader, module, strict)
        else:
            fill_weights(module, reader, strict, load_targets(module, holdings.absent))

    def state_dict(self) -> dict[str, Any]:
        if self.layout.pp == 1:
            return super().state_dict()
        # A checkpoint may be saved after the run, too.
        batches = self._pipeline_batches if self._pipeline is None else self._pipeline.rng.batches
        return {**super().state_dict(), "pipeline_batches": batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._pipeline is not None and "pipeline_batches" in state:
            self._pipeline.rng.resume_after(SavedState(state, "strategy").integer("pipeline_batches", least=0))

    def full_state_dict(self, module: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
        holdings = _holdings_of(module)
        if holdings is None:
            return super().full_state_dict(module, rank0_only)
        keeps = not rank0_only or self.ranks.is_global_zero
        return whole_state(module, holdings, self.schedule, self.pipeline_mesh.get_group(), rank0_only, keeps)


def _holdings_of(module: nn.Module) -> Holdings | None:
    """Returns the parts of a module that this rank's stages hold; None if no run has cut it into stages."""
    holdings: Holdings | None = module.__dict__.get("_leyden_holdings")
    return holdings


def run_in_steps(module: nn.Module, step: Callable[[Any, bool], AbstractContextManager[None]]) -> None:
    """Wraps a model's forward in the context of a step. Split outputs, such as logits, are gathered.

    A loss that the model computes itself is computed from the split logits, before they are gathered.

    Args:
        module: the model.
        step: returns the context of one forward, given its inputs and whether the model trains.
    """
    instance_forward = vars(module).get("forward")
    if getattr(instance_forward, "_leyden_step", False):
        return

    @functools.wraps(type(module).forward if instance_forward is None else instance_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with step((args, kwargs), self.training):
            if instance_forward is None:
                outputs = type(self).forward(self, *args, **kwargs)
            else:
                outputs = instance_forward(*args, **kwargs)
            return map_tensors(outputs, gathered)

    forward._leyden_step = True  # type: ignore[attr-defined]
    # A bound method, so that a deep copy of the model is bound to the copy.
    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
