"""FSDP: parameters, gradients and optimizer state are sharded over the ranks, by torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from leyden.strategies.base import BackwardHooks, ClipAlgorithm, Window
from leyden.strategies.errors import ConfigurationError, LeydenError
from leyden.strategies.precision import MixedPrecision, Precision
from leyden.strategies.process_group import ProcessGroupStrategy
from leyden.strategies.sharding.blocks import checkpoint_activations, compile_blocks
from leyden.strategies.sharding.policy import Groups, WrapPolicy, choose
from leyden.strategies.sharding.shards import Replaced, Sharding, check_sharded, local, shard_like, whole
from leyden.strategies.sharding.values import Values

T = TypeVar("T")


class FSDPStrategy(ProcessGroupStrategy):
    """Fully sharded data parallelism.

    Args:
        auto_wrap_policy: which modules are gathered and freed as a group: "auto" for the repeated block of the model, a
            set of classes or of their names, a least number of parameters, a function of a module, or None for the root
            alone.
        reshard_after_forward: free a group's parameters after its forward and gather them again in backward; False saves
            the second gathering for memory; a number reshards to so many ranks (a machine's). None, the default, frees
            all groups but the root.
        mp_policy: torch's MixedPrecisionPolicy; made from `precision` if left out (see `policy_of`).
        cpu_offload: parameters, gradients and optimizer state wait on the CPU; or an OffloadPolicy.
        activation_checkpointing_policy: classes of modules, or their names, whose activations are computed again in
            backward; or a function of a module.
        ignored_modules: modules that stay whole on every rank; their gradients are averaged.
        compile: compile each group, in place; or the arguments of `torch.compile`.
        device_mesh: (replicate, shard) sizes for HSDP, "auto" to shard within a machine and replicate over machines (in
            two halves of a single one), or a DeviceMesh of one or two dimensions.
        sync_module_states: every rank begins with rank 0's parameters and buffers.
        **kwargs: those of `ProcessGroupStrategy`.

    Raises:
        ConfigurationError: for a value that cannot be; names the fix.

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
        ignored_modules: Sequence[nn.Module] = (),
        compile: bool | dict[str, Any] = False,
        device_mesh: tuple[int, int] | DeviceMesh | Literal["auto"] | None = None,
        sync_module_states: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.auto_wrap_policy = auto_wrap_policy
        self.reshard_after_forward = reshard_after_forward
        self.mp_policy = mp_policy
        self.cpu_offload = cpu_offload
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.ignored_modules = list(ignored_modules)
        self.compile = compile
        self.sync_module_states = sync_module_states
        self.device_mesh: DeviceMesh | None = device_mesh if isinstance(device_mesh, DeviceMesh) else None
        self._mesh_shape = None if isinstance(device_mesh, DeviceMesh) else device_mesh
        if device_mesh is not None:
            self.name = "hsdp"
        self.groups: list[Groups] = []
        """What the wrap policy chose, for each module."""
        self.checkpointed: list[str] = []
        """The modules whose activations are computed again."""
        self._roots: list[FSDPModule] = []
        self._ignored: list[nn.Parameter] = []
        self._replaced = Replaced()
        self._values = Values()
        self._syncs = True

    # environment ------------------------------------------------------------------------------------------------------
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.device_mesh is None:
            shape = self._shape()
            names = ("replicate", "shard")[-len(shape) :]
            self.device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)

    def _shape(self) -> tuple[int, ...]:
        """The sizes of the mesh.

        Raises:
            ConfigurationError: if they do not make up the world.
        """
        world, shape = self.world_size, self._mesh_shape
        if shape is None:
            return (world,)
        if shape == "auto":
            per_machine = self.place.local_world_size if self.place is not None else len(self.devices)
            replicas = 2 if per_machine == world else world // per_machine
            if world < 4 or world % replicas:
                raise ConfigurationError(
                    f"strategy='hsdp' replicates over machines or over two halves of one, and this run has {world} rank(s) of "
                    f"{per_machine} per machine: use 'fsdp', or FSDPStrategy(device_mesh=(replicate, shard))."
                )
            return (replicas, world // replicas)
        if len(shape) != 2 or shape[0] * shape[1] != world:
            raise ConfigurationError(
                f"device_mesh={shape} does not make up {world} ranks: give (replicate, shard) whose product is {world}."
            )
        return tuple(shape)

    def teardown(self) -> None:
        self._roots, self._ignored, self.groups = [], [], []
        self._replaced = Replaced()
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
        self._syncs = True
        self.modules = [self._shard(module) for module in modules]
        self._values = Values()
        return self.modules

    def _shard(self, module: nn.Module) -> nn.Module:
        ignored = {p for part in self.ignored_modules for p in part.parameters()}
        self._ignored += [p for p in ignored if p.requires_grad]
        self._values.remember(module)
        module = self.precision.convert_module(module)
        groups = choose(module, self.auto_wrap_policy, ignored)
        self.groups.append(groups)
        before = self._replaced.before(module)
        self.checkpointed = checkpoint_activations(module, self.activation_checkpointing_policy)
        if self.compile:
            compile_blocks(module, groups.names, {} if self.compile is True else self.compile)
        parts = [module.get_submodule(name) for name in groups.names]
        sharding = self._sharding(ignored)
        # In manual optimisation backward runs inside of training_step, before the module's own forward has ended: its
        # gradients would never be reduced. So each child is a root of its own there.
        manual = not getattr(module, "automatic_optimization", True)
        roots = list(_children(module)) if manual else [module]
        sharding.apply([*parts, *roots])
        if manual:
            check_sharded(module, ignored)
        for part in self.ignored_modules:
            part.to(self.root_device)
        self._roots += [root for root in roots if isinstance(root, FSDPModule)]
        self._replaced.after(module, before)
        return module

    def _sharding(self, ignored: set[nn.Parameter]) -> Sharding:
        assert self.device_mesh is not None
        return Sharding(
            mesh=self.device_mesh,
            device=self.root_device,
            policy=self.mp_policy or policy_of(self.precision),
            offload=offload_of(self.cpu_offload, self.root_device),
            reshard=self.reshard_after_forward,
            ignored=ignored,
            values=self._values,
            source=self.host_group if self.sync_module_states and self.world_size > 1 else None,
        )

    def setup_optimizers(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        for optimizer in optimizers:
            self._repoint(optimizer)
        return super().setup_optimizers(modules, optimizers)

    def _repoint(self, optimizer: Optimizer) -> None:
        """Gives an optimizer that was made before the module was sharded the parameters that it has now."""
        for group in optimizer.param_groups:
            for place, old in enumerate(group["params"]):
                new = self._replaced.find(old)
                if new is None:
                    continue
                group["params"][place] = new
                state = optimizer.state.pop(old, None)
                if state is not None:
                    optimizer.state[new] = {
                        key: shard_like(value, new) if isinstance(value, Tensor) else value
                        for key, value in state.items()
                    }

    def setup_step(self, step_fn: Callable[..., T], module: nn.Module) -> Callable[..., T]:
        if not isinstance(module, FSDPModule):
            return step_fn
        # torch registers a method by its name; the module itself is left as it was.
        module.__dict__["_leyden_step"] = step_fn
        register_fsdp_forward_method(module, "_leyden_step")
        step: Callable[..., T] = module.__dict__.pop("_leyden_step")
        return step

    # the step ---------------------------------------------------------------------------------------------------------
    def forward_backward(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], window: Window, hooks: BackwardHooks
    ) -> Any:
        if self._syncs is not window.closes:
            self._set_sync(window.closes)
        outputs = super().forward_backward(step_fn, batch, extra, window, hooks)
        if self._ignored and window.closes:
            self._average_ignored()
        return outputs

    def _set_sync(self, enabled: bool) -> None:
        self._syncs = enabled
        for root in self._roots:
            root.set_requires_gradient_sync(enabled)

    def _average_ignored(self) -> None:
        """Averages the gradients of whole parameters over the ranks, which `fully_shard` leaves alone."""
        for parameter in self._ignored:
            if parameter.grad is not None:
                parameter.grad.copy_(self.reduce(parameter.grad))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        if self._ignored and self._syncs:
            self._average_ignored()

    def before_step(self, optimizer: Optimizer) -> None:
        if not self._syncs:
            raise LeydenError(
                "the accumulation window was closed without a batch that closes it, so its gradients were not reduced over the "
                "ranks: give the loader its right length, or none at all."
            )
        super().before_step(optimizer)

    def scale_gradients(self, factor: Tensor | float) -> None:
        stepped = {id(p): p for o in self.optimizers for group in o.param_groups for p in group["params"]}
        grads = [local(p.grad) for p in stepped.values() if p.grad is not None]
        if grads:
            on_device = factor.to(grads[0].device, non_blocking=True) if isinstance(factor, Tensor) else factor
            torch._foreach_mul_(grads, on_device)

    def clip(self, optimizer: Optimizer, value: float, algorithm: ClipAlgorithm = "norm") -> Tensor | None:
        self.before_step(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if algorithm == "value":
            grads = [local(p.grad) for p in parameters]
            if grads:
                torch._foreach_clamp_min_(grads, -value)
                torch._foreach_clamp_max_(grads, value)
            return None
        return clip_norm(parameters, value)

    @contextmanager
    def gradient_sync(self, enabled: bool) -> Iterator[None]:
        before = self._syncs
        self._set_sync(enabled)
        try:
            yield
        finally:
            self._set_sync(before)


def policy_of(precision: Precision) -> MixedPrecisionPolicy:
    """The dtypes of `fully_shard` that a precision means.

    Mixed precision keeps float32 shards, gathers them in half precision (half the bytes of autocast alone) and reduces
    gradients in float32. What goes into a module is left alone: autocast converts it for each operation, so that losses and
    norms are computed in float32 as under every other strategy.
    """
    if isinstance(precision, MixedPrecision):
        return MixedPrecisionPolicy(param_dtype=precision.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy(cast_forward_inputs=False)


def offload_of(wanted: bool | OffloadPolicy, device: torch.device) -> OffloadPolicy:
    """torch's policy for `cpu_offload`; memory is pinned only where there is an accelerator to copy to."""
    if isinstance(wanted, OffloadPolicy):
        return wanted
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if wanted else OffloadPolicy()


def clip_norm(parameters: Sequence[nn.Parameter], value: float) -> Tensor:
    """Clips gradients to a total norm, over all shards and, beside them, whole parameters.

    Returns:
        The norm before clipping, the same on every rank.
    """
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    if len(kinds) < 2:
        return whole(nn.utils.clip_grad_norm_(parameters, value))
    # torch cannot stack norms of different meshes.
    norms = [whole(nn.utils.get_total_norm([p.grad for p in own if p.grad is not None])) for own in kinds.values()]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    factor = (value / (total + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)
    return total


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """The children that can be roots: those with a forward, in place of lists their entries."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _children(child)
        elif any(True for _ in child.parameters()):
            yield child


__all__ = ["FSDPStrategy", "clip_norm", "offload_of", "policy_of"]
