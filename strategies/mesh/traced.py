"""Measures the memory of a training step on a simulated rank, with tensors that have shapes but no storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from leyden.core.tree import map_tensors
from leyden.strategies.fsdp.restart import parameter_groups
from leyden.strategies.mesh.even_routing import EvenRouting
from leyden.strategies.mesh.sent import SentBytes
from leyden.strategies.mesh.simulated import SimulatedMesh
from leyden.strategies.window import Window


class SavedActivations:
    """A context that collects the storages that autograd saves for backward, until backward begins."""

    def __init__(self) -> None:
        self._found: dict[int, UntypedStorage] = {}
        self._is_recording = True
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._record, lambda tensor: tensor)

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def stop(self) -> None:
        """Stops recording when backward begins: tensors that a recomputed block saves there live only briefly."""
        self._is_recording = False

    def _record(self, tensor: Tensor) -> Tensor:
        if self._is_recording:
            self._found.update((storage._cdata, storage) for storage in storages(tensor))
        return tensor

    def size(self, excluding: Iterable[Tensor]) -> int:
        """Returns the bytes of all saved storages, each counted once, except those of some tensors."""
        excluded = {storage._cdata for tensor in excluding for storage in storages(tensor)}
        return sum(storage.nbytes() for key, storage in self._found.items() if key not in excluded)


def storages(tensor: Tensor) -> Iterator[UntypedStorage]:
    """Yields the storages of a tensor on this rank; for a DTensor, those of its local part."""
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        # A DTensor's attributes include its mesh, which is not a tensor.
        parts = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
        yield from (storage for part in parts if isinstance(part, Tensor) for storage in storages(part))
    else:
        yield tensor.untyped_storage()


@dataclass(frozen=True, slots=True)
class _StopAtBackward:
    """Backward hooks that stop recording when backward begins."""

    saved: SavedActivations
    on_after_backward: tuple[Callable[[], Any], ...] = ()
    backward: None = None

    @property
    def on_before_backward(self) -> tuple[Callable[[Tensor], Any], ...]:
        return (lambda loss: self.saved.stop(),)


@contextmanager
def shapes_only(module: nn.Module) -> Iterator[None]:
    """Lets a module placed by a simulated mesh run within this context: operations compute shapes, but no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        slots = [(part, name) for part in module.modules() for name, p in part._parameters.items() if p is not None]
        # `to_empty` unties parameters: each slot then takes the parameter of the first slot that it was tied to.
        first_slots: dict[int, tuple[nn.Module, str]] = {}
        sources = [first_slots.setdefault(id(part._parameters[name]), (part, name)) for part, name in slots]
        module.to_empty(device="cpu")
        for (part, name), (source, source_name) in zip(slots, sources, strict=True):
            part._parameters[name] = source._parameters[source_name]
        yield


@dataclass(frozen=True, slots=True)
class TracedStep:
    """What a training step takes.

    Attributes:
        activations: bytes saved for backward when backward begins, without parameters (sharded or gathered) and
            buffers.
        sent: bytes that this rank sends over each dimension of the mesh.
    """

    activations: int
    sent: Mapping[str, int]


def traced_step(
    strategy: SimulatedMesh, step_fn: Callable[..., Any], batch: Any, experts: Mapping[str, int]
) -> TracedStep:
    """Runs a training step within `shapes_only`. It leaves gradients.

    Args:
        strategy: the strategy, with exactly one module set up.
        step_fn: the training step, called with a batch and its index.
        batch: a batch of one data rank; its values are not read.
        experts: the number of experts in each module of experts, by its name. They get the same number of tokens.
    """
    [module] = strategy.modules
    batch = strategy.precision.convert_input(map_tensors(batch, torch.empty_like))
    with EvenRouting(module, experts), SavedActivations() as saved, SentBytes(strategy.meshes) as sent:
        strategy.forward_backward(strategy.setup_step(step_fn, module), batch, (0,), Window(), _StopAtBackward(saved))
    size = saved.size([*module.parameters(), *module.buffers(), *_gathered(module)])
    return TracedStep(size, sent.bytes)


def _gathered(module: nn.Module) -> Iterator[Tensor]:
    """Yields the gathered parameters of FSDP's groups."""
    for group in _groups(module):
        yield from (p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param"))


def _groups(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            yield from parameter_groups(part._get_fsdp_state())


def group_sizes(module: nn.Module) -> tuple[int, list[int]]:
    """Returns the bytes of each FSDP group when it is gathered.

    Returns:
        The bytes of the root, which stays gathered between forward and backward, and those of each other group.
    """
    sizes = {id(group): sum(_whole_bytes(group, p) for p in group.fsdp_params) for group in _groups(module)}
    own = parameter_groups(module._get_fsdp_state()) if isinstance(module, FSDPModule) else ()
    root = sum(sizes.pop(id(group)) for group in own)
    return root, list(sizes.values())


def _whole_bytes(group: Any, parameter: Any) -> int:
    """Returns the bytes of a parameter once gathered. A parameter split by tp stays split."""
    dtype = parameter.sharded_param.dtype
    if dtype.is_floating_point:
        dtype = group.mp_policy.param_dtype or dtype
    return int(parameter._orig_size.numel() * dtype.itemsize)


def state_size(optimizers: Iterable[Optimizer]) -> int:
    """Steps optimizers once with the present gradients, within `shapes_only`.

    Returns:
        Bytes of the optimizers' state.
    """
    found: dict[int, UntypedStorage] = {}
    for optimizer in optimizers:
        optimizer.step()
        tensors = [value for state in optimizer.state.values() for value in state.values()]
        for value in tensors:
            if isinstance(value, Tensor):
                found.update((storage._cdata, storage) for storage in storages(value))
    return sum(storage.nbytes() for storage in found.values())
