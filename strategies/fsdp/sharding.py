"""Shards a model group by group, so that at most one group is ever unsharded on the device."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from leyden.core.errors import ConfigurationError
from leyden.strategies.fsdp.values import Slot, Values, replace


@dataclass(frozen=True, slots=True)
class Apart:
    """How a module is sharded whose parts are on other ranks than those of the model around it.

    Attributes:
        mesh: the mesh over which this rank's part is sharded.
        split: replaces the module's parameters by DTensors with this rank's part, once every rank has their values.
        dimension: the dimension along which a parameter is sharded; the first one if None.
    """

    mesh: DeviceMesh
    split: Callable[[nn.Module], None]
    dimension: Callable[[nn.Parameter], Shard] | None = None


@dataclass(slots=True)
class Sharding:
    """Shards the groups of one model, all with the same settings.

    Attributes:
        mesh: the mesh over which parameters are sharded, with one dimension or two (replicate, shard). None shards
            nothing.
        device: the device on which the parameters are used.
        policy: dtypes of gathered parameters and of the gradient reduction.
        offload: torch's policy for keeping shards on the CPU.
        reshard: True frees parameters after forward, a number reshards them to that many ranks, None leaves the choice
            to torch (every group except the root).
        ignored: parameters that stay unsharded.
        source: the process group in which rank 0 broadcasts its values; None lets each rank keep its own.
        values: the values of tensors that are still on the meta device.
        before: called with a module and a parameter name, once the parameter has its values and before it is sharded.
        split: splits the layers of a group over another mesh dimension, once every rank has their values. Adds to
            `ignored` the parameters that other ranks hold.
        apart: the modules that are sharded over a mesh of their own.
        kept_whole: parameters that stay unsharded: 0-d ones, and those that several roots share.
    """

    mesh: DeviceMesh | None
    device: torch.device
    policy: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard: bool | int | None = None
    ignored: set[nn.Parameter] = field(default_factory=set)
    source: Any = None
    values: Values = field(default_factory=Values)
    before: Callable[[nn.Module, str], None] | None = None
    split: Callable[[list[Slot]], None] | None = None
    apart: Mapping[nn.Module, Apart] = field(default_factory=dict)

    kept_whole: set[nn.Parameter] = field(default_factory=set)
    _alone: set[nn.Parameter] = field(default_factory=set)
    """Parameters on a mesh of their own that has a single rank."""
    _seen: set[Slot] = field(default_factory=set)

    def apply(self, part: nn.Module) -> None:
        """Shards a module as one group. The groups nested in it must be sharded first."""
        if isinstance(part, FSDPModule):
            return
        slots = [slot for slot in unsharded(part) if slot not in self._seen]
        self._seen.update(slots)
        self._materialize(slots)
        if self.source is not None:
            self._broadcast_values(slots)
        if self.mesh is not None and self.split is None:
            self._keep_scalars(slots)
        self._check_dtypes(part, slots)
        for module, name in slots:
            if self.before is not None and name in module._parameters:
                self.before(module, name)
        own = self.apart.get(part)
        if own is not None:
            own.split(part)
        if self.split is not None:
            self.split(slots)
        if self._is_held_elsewhere(part):
            return
        if self._is_whole(part):
            # A group without parameters, nested in two roots, would belong to the root that runs first.
            part.to(self.device)
            return
        alone = own is not None and self._is_alone(own.mesh)
        if alone:
            self._alone.update(part.parameters())
        if self.mesh is None or alone:
            # torch refuses to move a DTensor with a weak reference, such as those in ReplacedParameters. Models that
            # hand-written code split are on the device already.
            if any(tensor.device != self.device for tensor in (*part.parameters(), *part.buffers())):
                part.to(self.device)
            return
        fully_shard(
            part,
            mesh=self.mesh if own is None else own.mesh,
            reshard_after_forward=self.reshard,
            mp_policy=self.policy,
            offload_policy=self.offload,
            ignored_params=self.ignored | self._alone or None,
            shard_placement_fn=None if own is None else own.dimension,  # type: ignore[arg-type]
        )

    def _keep_scalars(self, slots: list[Slot]) -> None:
        """Ignores 0-d parameters, such as CLIP's `logit_scale`: `fully_shard` refuses them."""
        for module, name in slots:
            tensor = getattr(module, name)
            if isinstance(tensor, nn.Parameter) and tensor.dim() == 0:
                self._keep(tensor)

    def keep_whole(self, root: nn.Module, parameters: set[nn.Parameter]) -> None:
        """Leaves parameters of a module unsharded. Must be called before any part of the module is sharded."""
        slots = [
            (module, name)
            for module in root.modules()
            for name, parameter in module._parameters.items()
            if parameter in parameters
        ]
        self._seen.update(slots)
        self._materialize(slots)
        if self.source is not None:
            self._broadcast_values(slots)
        for module, name in slots:
            self._keep(getattr(module, name))

    def _keep(self, parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.to(self.device)
        self.ignored.add(parameter)
        self.kept_whole.add(parameter)

    def _is_whole(self, part: nn.Module) -> bool:
        parameters = list(part.parameters())
        return bool(parameters) and all(p in self.kept_whole for p in parameters)

    def _is_held_elsewhere(self, part: nn.Module) -> bool:
        """Returns True if other ranks hold all parameters of the module: `split` added every one to `ignored`."""
        parameters = list(part.parameters())
        return bool(parameters) and self.split is not None and all(p in self.ignored for p in parameters)

    def _is_alone(self, mesh: DeviceMesh) -> bool:
        """Returns True if there is nothing to gather, convert or reduce, and FSDP would only copy each parameter."""
        dtypes = self.policy.param_dtype, self.policy.reduce_dtype
        return mesh.size() == 1 and dtypes == (None, None) and type(self.offload) is OffloadPolicy

    def _check_dtypes(self, part: nn.Module, slots: list[Slot]) -> None:
        """Refuses a group whose trainable parameters have several dtypes: FSDP gathers a group as one buffer."""
        found: dict[torch.dtype, str] = {}
        for module, name in slots:
            tensor = getattr(module, name)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor not in self.ignored:
                found.setdefault(tensor.dtype, f"{type(module).__name__}.{name}")
        if len(found) > 1:
            parts = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in found.items())
            raise ConfigurationError(
                f"the trainable parameters of one group ({type(part).__name__}) have several dtypes: {parts}. Convert "
                "them to one dtype, freeze those of one dtype, or put them into separate groups by auto_wrap_policy."
            )

    def _materialize(self, slots: list[Slot]) -> None:
        """Allocates and fills the tensors of one group that are on the meta device."""
        on_meta = [getattr(module, name).is_meta for module, name in slots]
        on_meta_at_rank0 = on_meta
        if self.source is not None:
            box = [on_meta]
            dist.broadcast_object_list(box, src=0, group=self.source)
            on_meta_at_rank0 = box[0]
        missing = [(slot, there) for slot, here, there in zip(slots, on_meta, on_meta_at_rank0, strict=True) if here]
        # Rank 0 broadcasts the values it has, so only one process needs to load a checkpoint.
        received = [slot for slot, is_meta_at_rank0 in missing if not is_meta_at_rank0]
        replace(received, lambda module, name: torch.empty_like(getattr(module, name), device="cpu"))
        self.values.fill([slot for slot, is_meta_at_rank0 in missing if is_meta_at_rank0])

    @torch.no_grad()
    def _broadcast_values(self, slots: Iterable[Slot]) -> None:
        """Copies rank 0's values to every rank, one tensor at a time."""
        seen: set[int] = set()
        on_host = dist.get_backend(self.source) == "gloo"
        for module, name in slots:
            tensor: Tensor = getattr(module, name)
            if id(tensor) in seen or self.values.are_open((module, name)):
                continue
            seen.add(id(tensor))
            sent = tensor.detach().to("cpu" if on_host else self.device).contiguous()
            dist.broadcast(sent, src=0, group=self.source)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)


def unsharded(part: nn.Module) -> Iterator[Slot]:
    """Yields the slots of a module's parameters and buffers, except those that belong to a nested group."""
    yield from ((part, name) for name, p in part._parameters.items() if p is not None and not isinstance(p, DTensor))
    yield from ((part, name) for name, buffer in part._buffers.items() if buffer is not None)
    for child in part.children():
        if not isinstance(child, FSDPModule):
            yield from unsharded(child)


class ReplacedParameters:
    """Maps each original parameter to its sharded replacement, for optimizers created before sharding.

    Original parameters are held by weak references; strong ones would keep the unsharded model alive.
    """

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}

    def before(self, root: nn.Module) -> dict[str, weakref.ref[Tensor]]:
        """Returns references to the parameters, before they are sharded."""
        return {name: weakref.ref(p) for name, p in root.named_parameters(remove_duplicate=False)}

    def after(self, root: nn.Module, old: dict[str, weakref.ref[Tensor]]) -> None:
        """Records the replacement of each parameter that `before` returned."""
        for name, new in root.named_parameters(remove_duplicate=False):
            original = old[name]()
            if original is not None and original is not new:
                self._pairs[id(original)] = (old[name], new)

    def find(self, parameter: Tensor) -> nn.Parameter | None:
        """Returns the replacement of a parameter; None if it was not replaced."""
        reference, new = self._pairs.get(id(parameter), (None, None))
        return new if reference is not None and reference() is parameter else None


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Returns the full tensor, gathered from all ranks if it is sharded. Every rank must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Gathers over one mesh dimension at a time, outermost first: torch warns about gathering over two in one go.
    for dim in range(tensor.device_mesh.ndim - 1):
        placements = [Replicate()] * (dim + 1) + list(tensor.placements[dim + 1 :])
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def shard_like(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Shards a full tensor in the same way as a parameter of the same shape, without communication."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(parameter, DTensor) or value.shape != parameter.shape or isinstance(value, DTensor):
        return value
    shard = distribute_tensor(
        value.to(parameter.to_local().device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    return shard.to(value.dtype)


def prefetch_forward(parts: list[FSDPModule]) -> None:
    """Lets each group prefetch the next group's parameters before its own forward."""
    for part, following in itertools.pairwise(parts):
        part.set_modules_to_forward_prefetch([following])


def shared_by(roots: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Returns the parameters that belong to more than one of some modules."""
    counts = Counter(parameter for root in roots for parameter in root.parameters())
    return {parameter for parameter, count in counts.items() if count > 1}


def check_undivided(root: nn.Module) -> None:
    """Refuses a model whose experts `transformers` has divided on loading: the norm of their gradients would be wrong.

    Raises:
        ConfigurationError: names a parameter.
    """
    for name, parameter in root.named_parameters():
        if isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ()):
            raise ConfigurationError(
                f"{name!r} is divided over ep already, as by DistributedConfig(ep_size=…) of transformers: load the "
                "model without a distributed_config, and pass MeshStrategy(ep=…), which divides its experts."
            )


def check_sharded(root: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Refuses a module with a parameter that belongs to no group.

    Raises:
        ConfigurationError: names the parameter.
    """
    for name, parameter in root.named_parameters():
        if not isinstance(parameter, DTensor) and parameter not in ignored:
            raise ConfigurationError(
                f"the parameter {name!r} belongs to the module itself, and in manual optimization FSDP shards each "
                "child of the module separately. Move the parameter into a child module with its own forward, or put "
                "it in a module listed in ignored_modules."
            )
