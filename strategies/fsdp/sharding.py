"""How a model is sharded: group by group, so that only one group at a time is whole on the device."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.fsdp.values import Slot, Values, replace


@dataclass(slots=True)
class Sharding:
    """How every group of a model is sharded.

    Attributes:
        mesh: one dimension, over which parameters are sharded; or two, (replicate, shard); None leaves them whole.
        device: where the shards are used.
        policy: dtypes of gathered parameters and of the reduction.
        offload: whether shards wait on the CPU.
        reshard: whether parameters are freed after forward; a number for the ranks to reshard to; None for torch's
            choice, all groups but the root.
        ignored: parameters that stay whole.
        source: the group in which rank 0's values are given to all; None leaves each rank its own.
        values: of the tensors on the meta device.
        before: called with each module and parameter name that has its values and is about to be sharded.
        split: splits the layers of a group, whose values every rank has, over the ranks of another dimension. It adds
            to `ignored` what this rank has nothing of.
        scalars: parameters without dimensions that stay whole.
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

    scalars: set[nn.Parameter] = field(default_factory=set)
    _done: set[Slot] = field(default_factory=set)

    def apply(self, part: nn.Module) -> None:
        """Shards a module, after those in it that are groups of their own."""
        if isinstance(part, FSDPModule):
            return
        slots = [slot for slot in unsharded(part) if slot not in self._done]
        self._done.update(slots)
        self._materialise(slots)
        if self.source is not None:
            self._take_values(slots)
        if self.mesh is not None and self.split is None:
            self._keep_scalars(slots)
        self._check_dtypes(part, slots)
        for module, name in slots:
            if self.before is not None and name in module._parameters:
                self.before(module, name)
        if self.split is not None:
            self.split(slots)
        if self._has_nothing(part):
            return
        if self.mesh is None:
            # torch moves no DTensor that a weak reference knows, as ReplacedParameters has; hand-written code has
            # placed its own.
            if any(tensor.device != self.device for tensor in (*part.parameters(), *part.buffers())):
                part.to(self.device)
            return
        fully_shard(
            part,
            mesh=self.mesh,
            reshard_after_forward=self.reshard,
            mp_policy=self.policy,
            offload_policy=self.offload,
            ignored_params=self.ignored or None,
        )

    def _keep_scalars(self, slots: list[Slot]) -> None:
        """Leaves parameters without dimensions, such as CLIP's `logit_scale`, whole: `fully_shard` refuses them."""
        for module, name in slots:
            tensor = getattr(module, name)
            if isinstance(tensor, nn.Parameter) and tensor.dim() == 0:
                tensor.data = tensor.data.to(self.device)
                self.ignored.add(tensor)
                self.scalars.add(tensor)

    def _has_nothing(self, part: nn.Module) -> bool:
        """True for a part whose parameters are held elsewhere: `split` has made them ignored."""
        found = list(part.parameters())
        return bool(found) and self.split is not None and all(parameter in self.ignored for parameter in found)

    def _check_dtypes(self, part: nn.Module, slots: list[Slot]) -> None:
        """Finds parameters of another dtype than the rest of their group, which travels as one message."""
        found: dict[torch.dtype, str] = {}
        for module, name in slots:
            tensor = getattr(module, name)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor not in self.ignored:
                found.setdefault(tensor.dtype, f"{type(module).__name__}.{name}")
        if len(found) > 1:
            parts = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in found.items())
            raise ConfigurationError(
                f"the trainable parameters of one group ({type(part).__name__}) have several dtypes: {parts}. Convert "
                "them to one, freeze one kind, or make groups of them by auto_wrap_policy."
            )

    def _materialise(self, slots: list[Slot]) -> None:
        """Gives the tensors of one group that are on the meta device their memory, and their values."""
        absent = [getattr(module, name).is_meta for module, name in slots]
        first = absent
        if self.source is not None:
            box = [absent]
            dist.broadcast_object_list(box, src=0, group=self.source)
            first = box[0]
        # What rank 0 has is received from it, so that one process alone needs to have loaded it.
        received = [slot for slot, here, there in zip(slots, absent, first, strict=True) if here and not there]
        made = [slot for slot, here, there in zip(slots, absent, first, strict=True) if here and there]
        replace(received, lambda module, name: torch.empty_like(getattr(module, name), device="cpu"))
        self.values.fill(made)

    @torch.no_grad()
    def _take_values(self, slots: Iterable[Slot]) -> None:
        """Gives every rank rank 0's values, one tensor at a time."""
        done: set[int] = set()
        on_host = dist.get_backend(self.source) == "gloo"
        for module, name in slots:
            tensor: Tensor = getattr(module, name)
            if id(tensor) in done:
                continue
            done.add(id(tensor))
            sent = tensor.detach().to("cpu" if on_host else self.device).contiguous()
            dist.broadcast(sent, src=0, group=self.source)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)


def unsharded(part: nn.Module) -> Iterator[Slot]:
    """The slots of parameters and buffers that no group within this one has."""
    yield from ((part, name) for name, p in part._parameters.items() if p is not None and not isinstance(p, DTensor))
    yield from ((part, name) for name, buffer in part._buffers.items() if buffer is not None)
    for child in part.children():
        if not isinstance(child, FSDPModule):
            yield from unsharded(child)


class ReplacedParameters:
    """Which parameter took the place of which, for optimizers that were made before.

    It holds on to no parameter that it saw: a whole model would never be freed.
    """

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}

    def before(self, root: nn.Module) -> dict[str, weakref.ref[Tensor]]:
        """Notes the parameters before they are sharded."""
        return {name: weakref.ref(p) for name, p in root.named_parameters(remove_duplicate=False)}

    def after(self, root: nn.Module, old: dict[str, weakref.ref[Tensor]]) -> None:
        """Notes what took their places."""
        for name, new in root.named_parameters(remove_duplicate=False):
            known = old[name]()
            if known is not None and known is not new:
                self._pairs[id(known)] = (old[name], new)

    def find(self, parameter: Tensor) -> nn.Parameter | None:
        """What stands in this parameter's place now; None where it still stands there itself."""
        reference, new = self._pairs.get(id(parameter), (None, None))
        return new if reference is not None and reference() is parameter else None


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank has, in the same memory; the tensor itself where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks where it is sharded: every rank must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    # One dimension of the mesh at a time, from the outermost: torch warns about gathering over two at once.
    for dim in range(tensor.device_mesh.ndim - 1):
        placements = [Replicate()] * (dim + 1) + list(tensor.placements[dim + 1 :])
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def shard_like(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Cuts a whole tensor as a parameter of the same shape is cut; no message is sent."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(parameter, DTensor) or value.shape != parameter.shape or isinstance(value, DTensor):
        return value
    cut = distribute_tensor(
        value.to(parameter.to_local().device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    return cut.to(value.dtype)


def prefetch_forward(parts: list[FSDPModule]) -> None:
    """Lets each group ask for the next one's parameters before its own forward."""
    for part, following in itertools.pairwise(parts):
        part.set_modules_to_forward_prefetch([following])


def check_sharded(root: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Finds a parameter that no group took.

    Raises:
        ConfigurationError: names it.
    """
    for name, parameter in root.named_parameters():
        if not isinstance(parameter, DTensor) and parameter not in ignored:
            raise ConfigurationError(
                f"the parameter {name!r} stands in the module itself, and in manual optimisation each child of the "
                "module is sharded by itself: put the parameter into a child module with a forward of its own, or list "
                "it in ignored_params."
            )
