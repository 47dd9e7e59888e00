"""FSDPStrategy: torch's `fully_shard` (FSDP2) shards parameters, gradients and optimizer state over the ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from leyden.core.errors import ConfigurationError, LeydenError, kind_of
from leyden.core.rank_zero import warn
from leyden.strategies.base import ClipAlgorithm, Refused, multiply, shadow_items, stepped_parameters
from leyden.strategies.fsdp.blocks import checkpoint_activations, compile_blocks
from leyden.strategies.fsdp.collectives import CollectiveCounter
from leyden.strategies.fsdp.fsdp1_names import Translation
from leyden.strategies.fsdp.gradients import check_optimizer, clip_norm
from leyden.strategies.fsdp.guard import guard_exports, guard_shards
from leyden.strategies.fsdp.nested import StepHooks
from leyden.strategies.fsdp.options import ShardRecord, offload_of, policy_of
from leyden.strategies.fsdp.policy import WrapPolicy, choose
from leyden.strategies.fsdp.restart import note_unfrozen, restart, restore_unreduced, unreduced_gradients
from leyden.strategies.fsdp.sharding import (
    Apart,
    ReplacedParameters,
    Sharding,
    check_sharded,
    check_undivided,
    local,
    prefetch_forward,
    shard_like,
    shared_by,
    whole,
)
from leyden.strategies.fsdp.values import Slot, Values
from leyden.strategies.local_weights import LocalWeights
from leyden.strategies.process_group import GROUP_SETTINGS, ProcessGroupStrategy, sum_all
from leyden.strategies.window import Window, read_loss, zeroed

T = TypeVar("T")
MIXED = "got mixed torch.Tensor and DTensor"
"""From torch's error for an operation that mixes a DTensor with a plain tensor."""
FREED = "out of bounds for storage of size 0"
"""From torch's error for a backward pass that reads a weight after FSDP freed it."""


class FSDPStrategy(ProcessGroupStrategy):
    """Fully sharded data parallelism.

    Args:
        auto_wrap_policy: modules that are gathered and freed as a group: "auto" for the model's repeated block, a set
            of classes or class names, a minimum number of parameters, a predicate on modules, or None to make the root
            the only group.
        reshard_after_forward: True frees a group's parameters after its forward and gathers them again in backward.
            False keeps them gathered: one all-gather fewer, more memory. A number reshards to that many ranks (those
            of one machine). None, the default, frees every group except the root; in a pipeline it means False. Manual
            optimization always frees every group.
        mp_policy: torch's MixedPrecisionPolicy; derived from `precision` if omitted (see `policy_of`).
        cpu_offload: True keeps parameters, gradients and optimizer state on the CPU; or an OffloadPolicy.
        activation_checkpointing_policy: classes of modules, or their names, whose activations are recomputed in
            backward; a predicate on modules; or True for every group.
        ignored_modules: modules that stay unsharded on every rank, or a regular expression that matches their whole
            names; their gradients are averaged.
        compile: True compiles each group in place; or a dict of arguments for `torch.compile`.
        device_mesh: (replicate, shard) sizes for HSDP; "auto" to shard within a machine and replicate across machines
            (a single machine is split into two halves); or a DeviceMesh with one or two dimensions.
        sync_module_states: True broadcasts rank 0's initial parameters and buffers to every rank.
        forward_prefetch: True lets each group prefetch the next group's parameters before its own forward.
        **kwargs: arguments of `ProcessGroupStrategy`, and the names used by FSDP1, Lightning and Accelerate
            (`sharding_strategy`, `state_dict_type`, …). Each is translated, or refused with the reason.

    Raises:
        ConfigurationError: for an invalid value; the message names the fix.

    Example:
        >>> FSDPStrategy(auto_wrap_policy={"Block"}, reshard_after_forward=False).name
        'fsdp'
    """

    name = "fsdp"
    supports_inference_mode = False
    supports_closure = False
    replicates = False

    def __init__(
        self,
        auto_wrap_policy: WrapPolicy = "auto",
        *,
        reshard_after_forward: bool | int | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        cpu_offload: bool | OffloadPolicy = False,
        activation_checkpointing_policy: Any = None,
        ignored_modules: Sequence[nn.Module] | str = (),
        compile: bool | dict[str, Any] = False,
        device_mesh: tuple[int, int] | DeviceMesh | Literal["auto"] | None = None,
        sync_module_states: bool = True,
        forward_prefetch: bool = False,
        **kwargs: Any,
    ) -> None:
        settings = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        super().__init__(**{name: value for name, value in kwargs.items() if name in GROUP_SETTINGS})
        translation = Translation(settings, {k: v for k, v in kwargs.items() if k not in GROUP_SETTINGS})
        for note in translation.notes:
            warn(note)
        self.settings = settings
        """The constructor's arguments, under Leyden's names."""
        mesh = settings["device_mesh"]
        self.shard_mesh: DeviceMesh | None = mesh if isinstance(mesh, DeviceMesh) else None
        """The mesh over which parameters are sharded; None until the process group exists."""
        self._mesh_shape: Any = None if isinstance(mesh, DeviceMesh) else mesh
        if mesh is not None and (not isinstance(mesh, DeviceMesh) or mesh.ndim == 2):
            self.name = "hsdp"
        self.record = ShardRecord()
        """How the module was sharded."""
        self._roots: list[FSDPModule] = []
        self._kept_gathered: list[FSDPModule] = []
        """Groups that stay gathered between forward and backward."""
        self._step_hooks: dict[nn.Module, StepHooks] = {}
        self._ignored: list[nn.Parameter] = []
        self._ignored_hooks: list[RemovableHandle] = []
        self._replaced = ReplacedParameters()
        self._values = Values()
        self._syncs, self._average_pending = True, False
        self._collectives: CollectiveCounter | None = None
        """Counts the collectives of a pass that may run out of memory; None until `begin_pass` is called."""

    @classmethod
    def from_accelerate(cls, config: Mapping[str, Any], **kwargs: Any) -> FSDPStrategy:
        """Returns the strategy described by the `fsdp_config` of an Accelerate YAML file.

        Args:
            config: the mapping under `fsdp_config`, unchanged.
            **kwargs: further arguments of this class.

        Example:
            >>> config = {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_auto_wrap_policy": "NO_WRAP"}
            >>> FSDPStrategy.from_accelerate(config).settings["reshard_after_forward"]
            False
        """
        # A YAML key without a value means the default.
        return cls(**{name: value for name, value in config.items() if value is not None}, **kwargs)

    # environment ------------------------------------------------------------------------------------------------------
    def setup_environment(self) -> None:
        super().setup_environment()
        backend = dist.get_backend()
        if self.root_device.type != "cpu" and self.settings["cpu_offload"] and "gloo" not in backend:
            raise ConfigurationError(
                "cpu_offload needs a gloo backend for CPU tensors, and the process group has only "
                f"{str(backend)!r}: leave out process_group_backend, or use 'cpu:gloo,cuda:nccl'."
            )
        if self.shard_mesh is None:
            self.shard_mesh = self.make_mesh()

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of all ranks; None until the process group exists."""
        return self.shard_mesh

    @property
    def replicas(self) -> list[list[int]]:
        if self.device_mesh is None or self.copies_along is None:
            return [[rank] for rank in range(self.ranks.world_size)]
        grid = self.device_mesh.mesh.movedim(self.copies_along, -1)
        groups: list[list[int]] = grid.reshape(-1, grid.shape[-1]).tolist()
        return groups

    @property
    def copies_along(self) -> int | None:
        """The dimension of `device_mesh` along which the model is replicated; None if it is not."""
        return 0 if self.shard_mesh is not None and self.shard_mesh.ndim == 2 else None

    def make_mesh(self) -> DeviceMesh | None:
        """Returns the mesh over which parameters are sharded; None if nothing is sharded."""
        shape = self._resolved_mesh_shape()
        names = ("replicate", "shard")[-len(shape) :]
        return self.ranks.mesh(dict(zip(names, shape, strict=True)))

    def _resolved_mesh_shape(self) -> tuple[int, ...]:
        """Returns the sizes of the mesh's dimensions.

        Raises:
            ConfigurationError: if their product is not the world size.
        """
        world, shape = self.ranks.world_size, self._mesh_shape
        if shape is None:
            return (world,)
        if shape == "auto":
            per_machine = self.ranks.local_size
            replicas = 2 if per_machine == world else world // per_machine
            if world < 4 or world % replicas:
                raise ConfigurationError(
                    "strategy='hsdp' replicates across machines, or across two halves of a single machine. This run "
                    f"has {world} rank(s), {per_machine} per machine: use 'fsdp', or "
                    "FSDPStrategy(device_mesh=(replicate, shard))."
                )
            return (replicas, world // replicas)
        if len(shape) != 2 or shape[0] * shape[1] != world:
            raise ConfigurationError(
                f"device_mesh={shape} does not match {world} ranks: pass (replicate, shard) whose product is {world}."
            )
        return tuple(shape)

    def teardown(self) -> None:
        for hooks in self._step_hooks.values():
            hooks.remove()
        for handle in self._ignored_hooks:
            handle.remove()
        self._roots, self._kept_gathered, self._step_hooks = [], [], {}
        self._ignored, self._ignored_hooks = [], []
        self._collectives = None
        self._replaced, self.before_forward = ReplacedParameters(), None
        super().teardown()

    # modules and optimizers -------------------------------------------------------------------------------------------
    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        with self.precision.init_context(), self._values.deferred.recording(draws=not empty_init):
            yield

    @contextmanager
    def model_context(self) -> Iterator[None]:
        with self._values.deferred.recording():
            yield

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        guard_shards()
        self.before_forward = self._follow_window
        self.modules = [self._shard(module) for module in modules]
        # A run that failed inside an accumulation window has left gradient sync off.
        self._set_sync(True)
        return self.modules

    def _shard(self, module: nn.Module) -> nn.Module:
        # A dict keeps the modules' order, so every rank averages the gradients in the same order.
        averaged = dict.fromkeys(p for part in self._ignored_in(module) for p in part.parameters())
        ignored = set(averaged)
        # In manual optimization, backward runs inside training_step, before the module's own forward has returned: FSDP
        # would never reduce a root's gradients. So each child becomes a root of its own.
        manual = not getattr(module, "automatic_optimization", True) and self.shard_mesh is not None
        roots = list(dict.fromkeys(_root_candidates(module))) if manual else [module]
        policy = self.settings["mp_policy"] or policy_of(self.precision)
        earlier = module.__dict__.get("_leyden_record")
        if earlier is not None:
            earlier.check_same(policy, self.precision.form)
            self.record = earlier
            restart(roots)
        else:
            self._shard_new(module, roots, ignored, policy)
        averaged.update(dict.fromkeys(map(module.get_parameter, self.record.kept_whole)))
        # Frozen parameters are included: they may be unfrozen later.
        known = set(self._ignored)
        for parameter in averaged:
            if parameter in known or not parameter.is_floating_point():
                # A second module lists the same `ignored_modules`; averaging twice would divide twice.
                continue
            self._ignored.append(parameter)
            trains = parameter.requires_grad
            # torch refuses hooks on a frozen parameter, but keeps those of one that is frozen later.
            handle = parameter.requires_grad_().register_post_accumulate_grad_hook(self._note_gradient)
            parameter.requires_grad_(trains)
            self._ignored_hooks.append(handle)
        self._roots += [root for root in roots if isinstance(root, FSDPModule)]
        every_group = self.settings["reshard_after_forward"] not in (None, True)
        self._kept_gathered += [
            part
            for root in roots
            for part in (root.modules() if every_group else (root,))
            if isinstance(part, FSDPModule)
        ]
        self._reshard()
        return module

    def _ignored_in(self, module: nn.Module) -> Sequence[Any]:
        """Returns the modules that stay unsharded."""
        chosen: Sequence[nn.Module] | str = self.settings["ignored_modules"]
        if not isinstance(chosen, str):
            return chosen
        found = [part for name, part in module.named_modules() if re.fullmatch(chosen, name)]
        if not found:
            raise ConfigurationError(
                f"ignored_modules={chosen!r} matches the name of no module in {type(module).__name__}. It is a regular "
                "expression for whole names, as of named_modules()."
            )
        return found

    def _shard_new(
        self, module: nn.Module, roots: list[nn.Module], ignored: set[nn.Parameter], policy: MixedPrecisionPolicy
    ) -> None:
        """Shards a module that no earlier run has sharded."""
        self._check_unshared(module)
        check_undivided(module)
        settings, split, apart = self.settings, self.split_for(module, ignored), self.apart_in(module)
        if self.sync_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        self._values.remember(module)
        self.precision.convert_for_shards(module)
        # `fully_shard` would give each of these roots a shard of its own, and the shards would drift apart. One call
        # for all of them does not help: torch refuses a root of several modules.
        shared = shared_by(roots) - ignored
        if shared and split is not None:
            name = next(name for name, parameter in module.named_parameters() if parameter in shared)
            raise ConfigurationError(
                f"{name!r} is shared by several children of {type(module).__name__}, and in manual optimization FSDP "
                "shards each child separately, which a mesh with tp cannot do for a shared parameter. Move the "
                "children into one module with its own forward, or use a mesh without tp or without dp_shard."
            )
        groups = choose(module, settings["auto_wrap_policy"], ignored | shared)
        recomputed = settings["activation_checkpointing_policy"]
        checkpointed = checkpoint_activations(module, groups if recomputed is True else recomputed)
        if settings["compile"]:
            compile_blocks(module, groups, {} if settings["compile"] is True else settings["compile"])
        groups.names[:] = [*apart, *(name for name in groups.names if name not in apart)]
        old_parameters = self._replaced.before(module)
        parts = [module.get_submodule(name) for name in groups.names]
        sharding = Sharding(
            mesh=self.shard_mesh,
            device=self.root_device,
            policy=policy,
            offload=offload_of(settings["cpu_offload"], self.root_device),
            # In manual optimization, a child may run without backward, and then change its weights or requires_grad.
            reshard=settings["reshard_after_forward"] if roots == [module] else True,
            ignored=ignored,
            values=self._values,
            before=self.precision.before_sharding,
            split=split,
            apart={module.get_submodule(name): own for name, own in apart.items()},
            source=self.ranks.host_group if settings["sync_module_states"] and self.ranks.world_size > 1 else None,
        )
        sharding.keep_whole(module, shared)
        for part in (*parts, *roots):
            sharding.apply(part)
        if roots != [module]:
            check_sharded(module, ignored)
        for part in self._ignored_in(module):
            part.to(self.root_device)
        if settings["forward_prefetch"]:
            prefetch_forward([part for part in parts if isinstance(part, FSDPModule)])
        self._replaced.after(module, old_parameters)
        guard_exports(module)
        shape, form = tuple(self.shard_mesh.shape) if self.shard_mesh is not None else (), self.precision.form
        self.record = ShardRecord.of(module, groups, checkpointed, policy, shape, form, sharding.kept_whole)
        module.__dict__["_leyden_record"] = self.record

    def _check_unshared(self, module: nn.Module) -> None:
        """Refuses a module that shares a parameter with one that is sharded already: each would train its own shard.

        Raises:
            ConfigurationError: names the parameter.
        """
        # A module around one that is sharded already is allowed.
        nested = {p for part in module.modules() if isinstance(part, FSDPModule) for p in part.parameters()}
        sharded = {p for root in self._roots if isinstance(root, nn.Module) for p in root.parameters()} - nested
        for name, parameter in module.named_parameters():
            if parameter in sharded or self._replaced.find(parameter) is not None:
                raise ConfigurationError(
                    f"{name!r} of {type(module).__name__} is shared with another module that is sharded already, and "
                    "FSDP shards each module separately. Put both into one module with its own forward, and prepare "
                    "that one, or use strategy='ddp'."
                )

    def check_trained(self) -> None:
        for root in self._roots:
            note_unfrozen(root)

    def split_for(self, module: nn.Module, ignored: set[nn.Parameter]) -> Callable[[list[Slot]], None] | None:
        """Returns a function that splits each group's layers before sharding and may extend `ignored`; None to skip."""
        return None

    def apart_in(self, module: nn.Module) -> dict[str, Apart]:
        """Returns the modules that are sharded over a mesh of their own, by name."""
        return {}

    def _reshard(self) -> None:
        """Frees parameters that a forward without backward left gathered, so `parameters()` returns shards again."""
        for part in self._kept_gathered:
            part.reshard()

    def end_evaluation(self) -> None:
        self._reshard()

    def local_weights(self, module: nn.Module) -> LocalWeights:
        # An evaluation leaves groups gathered. They would not see values written to their shards.
        self._reshard()
        return super().local_weights(module)

    @property
    def details(self) -> str:
        return self.record.line()

    def setup_optimizers(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        for optimizer in optimizers:
            check_optimizer(optimizer)
            self._repoint(optimizer)
        return super().setup_optimizers(modules, optimizers)

    def _repoint(self, optimizer: Optimizer) -> None:
        """Points an optimizer that was created before sharding at the sharded parameters."""
        for group in optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                new = self._replaced.find(old)
                if new is None:
                    continue
                group["params"][index] = new
                state = optimizer.state.pop(old, None)
                if state is not None:
                    optimizer.state[new] = {
                        key: shard_like(value, new) if isinstance(value, Tensor) else value
                        for key, value in state.items()
                    }

    def setup_step(self, step_fn: Callable[..., T], module: nn.Module) -> Callable[..., T]:
        if not isinstance(module, FSDPModule):
            return step_fn
        if module not in self._step_hooks:
            self._step_hooks[module] = StepHooks(module)
        return self._step_hooks[module].around(step_fn)

    def explain(self, error: BaseException) -> str | None:
        if FREED in str(error):
            return (
                "FSDP frees weights after backward, and the gradient of a gradient (create_graph=True, as in a "
                "gradient penalty) needs them again. Use strategy='ddp' for such a loss."
            )
        if MIXED not in str(error):
            return super().explain(error)
        outside = _module_run_outside(error, self._roots)
        if outside is not None:
            return (
                f"In the sharded module, {kind_of(outside)} ran outside of the steps and of the forward, where its "
                "parameters are not gathered. Run it from training_step, validation_step, … or the module's own "
                "forward."
            )
        return (
            "An operation mixed a plain tensor and a shard (a DTensor). FSDP gathers parameters for the forward of the "
            "module that owns them. Everywhere else, training_step included, self.parameters() has shards: a penalty "
            "sum(p.square().sum() for p in self.parameters()) mixes them, and so does an average kept by hand. For "
            "weight decay, use the optimizer's weight_decay. Otherwise compute with p.full_tensor() where p is a "
            "DTensor, on every rank, or with p.to_local(), this rank's part."
        )

    # the step ---------------------------------------------------------------------------------------------------------
    def _follow_window(self, window: Window) -> None:
        if self._syncs is not window.closes:
            self._set_sync(window.closes)
        self._average_pending = window.closes and bool(self._ignored)

    def shadow_batch(self, step_fn: Callable[..., Any], filler: Any, extra: tuple[Any, ...], window: Window) -> None:
        if filler is None:
            raise ConfigurationError(
                "a rank has no sample of its own, and FSDP needs every rank in every batch to gather parameters: use a "
                "larger data set, a smaller batch_size or fewer ranks."
            )
        self._follow_window(window)
        self.is_filling = True
        try:
            zero = zeroed(read_loss(self.forward(step_fn, filler, extra))[0])
        finally:
            self.is_filling = False
        shadow_items(self, window)
        self.precision.scale_loss(zero).backward()  # type: ignore[no-untyped-call]

    @property
    def refusals(self) -> dict[Refused, str]:
        found = super().refusals
        if self.copies_along is not None:
            found["micro_batches"] = (
                "it reduces gradients in two steps, and only one of them can be counted. Use strategy='fsdp' or 'ddp'"
            )
        return found

    def begin_pass(self) -> None:
        if self._collectives is None:
            self._collectives = CollectiveCounter(self.modules)
        self._collectives.begin()

    def abandon_pass(self, rest: Callable[[], None]) -> None:
        assert self._collectives is not None
        restart(self.modules)
        if self.ranks.world_size > 1:
            self._collectives.begin_replay()
            rest()

    def _set_sync(self, enabled: bool) -> None:
        self._syncs = enabled
        for root in self._roots:
            root.set_requires_gradient_sync(enabled)

    def _note_gradient(self, parameter: Tensor) -> None:
        # The user's own loss.backward(), in manual optimization, bypasses `backward`.
        self._average_pending = True

    def _average_ignored(self) -> None:
        """Averages the gradients of unsharded parameters over the ranks; `fully_shard` does not reduce them."""
        self._average_pending = False
        grads = [p.grad for p in self._ignored if p.grad is not None]
        sum_all(grads)
        for grad in grads:
            grad.div_(self.ranks.world_size)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self._ignored and self._syncs:
            self._average_ignored()

    def before_step(self, optimizer: Optimizer) -> None:
        if not self._syncs:
            raise LeydenError(
                "the loader ended before the last batch of its accumulation window, so the gradients were never "
                "reduced over the ranks: correct the loader's __len__, or remove it."
            )
        if self._average_pending:
            self._average_ignored()
        super().before_step(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        # A group that ran without backward, as in a hook, would reuse its old gathered values in the next forward.
        self._reshard()
        return super().step(optimizer, closure, **kwargs)

    def scale_gradients(self, factor: Tensor | float) -> None:
        grads = [local(p.grad) for p in stepped_parameters(self.modules, self.optimizers) if p.grad is not None]
        multiply(grads, factor)

    def clip_parameters(
        self, parameters: Sequence[Tensor], value: float, algorithm: ClipAlgorithm = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        if self._average_pending and self._syncs:
            self._average_ignored()
        parameters = [p for p in parameters if p.grad is not None]
        if algorithm == "value":
            grads = [local(p.grad) for p in parameters if p.grad is not None]
            if grads:
                torch._foreach_clamp_min_(grads, -value)
                torch._foreach_clamp_max_(grads, value)
            return None
        return clip_norm(parameters, value, norm_type)

    # state ------------------------------------------------------------------------------------------------------------
    def full_state_dict(self, module: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
        """Returns the module's state dict with unsharded tensors. Every rank must call it.

        Returns:
            A state dict that torch.save or safetensors can write. With `rank0_only`, rank 0 gets the tensors on its CPU
            and other ranks get an empty dict. Tensors are gathered one at a time, so other ranks never hold more than
            one.
        """
        if not rank0_only:
            everywhere = module.state_dict()
            everywhere.update({name: whole(t) for name, t in everywhere.items() if isinstance(t, Tensor)})
            return everywhere
        state: dict[str, Tensor] = {}
        gathered: dict[int, Tensor] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            full = gathered.get(id(tensor))
            if full is None:
                full = whole(tensor.detach())
                # Tied weights stay one tensor in the result.
                full = gathered[id(tensor)] = full.cpu() if self.ranks.is_global_zero else full.new_empty(0)
            if self.ranks.is_global_zero:
                state[name] = full
        return state

    @contextmanager
    def gradient_sync(self, enabled: bool) -> Iterator[None]:
        before = self._syncs
        self._set_sync(enabled)
        try:
            yield
        finally:
            self._set_sync(before)

    def unreduced_gradients(self, module: nn.Module) -> dict[str, Tensor]:
        self._reshard()
        return unreduced_gradients(module)

    def restore_unreduced(self, module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
        self._reshard()
        restore_unreduced(module, gradients)


def _module_run_outside(error: BaseException, roots: Sequence[Any]) -> nn.Module | None:
    """Returns the module in whose forward an error arose, if no step and no root ran around it; else None."""
    outermost = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "wrapped_method":
            # torch's wrapper of a step; see `StepHooks.around`.
            return None
        if outermost is None and frame.f_code is nn.Module._call_impl.__code__:
            outermost = frame.f_locals["self"]
        trace = trace.tb_next
    if outermost is None or any(root in roots for root in outermost.modules()):
        return None
    return outermost  # type: ignore[no-any-return]


def _root_candidates(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the children that can be FSDP roots: those with a forward. A list or dict yields its entries instead."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _root_candidates(child)
        elif any(True for _ in child.parameters()):
            yield child
