"""A training step of a simulated rank, on tensors that have a shape and no memory: what it keeps, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from leyden.strategies.batch import map_tensors
from leyden.strategies.fsdp.restart import parameter_groups
from leyden.strategies.mesh.simulated import SimulatedMesh
from leyden.strategies.window import Window


class Saved:
    """The storages that autograd saves for backward, in the context of this object, until backward begins."""

    def __init__(self) -> None:
        self._found: dict[int, UntypedStorage] = {}
        self._is_open = True
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def close(self) -> None:
        """Begins backward: what a recomputed block saves there is not kept beside the rest."""
        self._is_open = False

    def _note(self, tensor: Tensor) -> Tensor:
        if self._is_open:
            self._found.update((storage._cdata, storage) for storage in storages(tensor))
        return tensor

    def size(self, apart_from: Iterable[Tensor]) -> int:
        """Bytes of all saved storages, each counted once, without those of some tensors."""
        known = {storage._cdata for tensor in apart_from for storage in storages(tensor)}
        return sum(storage.nbytes() for key, storage in self._found.items() if key not in known)


def storages(tensor: Tensor) -> Iterator[UntypedStorage]:
    """What a tensor of any kind has on this rank: a DTensor its part."""
    kind: Any = tensor
    if is_traceable_wrapper_subclass(kind):
        # A DTensor names its mesh, too.
        parts = [getattr(kind, name) for name in kind.__tensor_flatten__()[0]]
        yield from (storage for part in parts if isinstance(part, Tensor) for storage in storages(part))
    else:
        yield tensor.untyped_storage()


@dataclass(frozen=True, slots=True)
class _Closing:
    """The hooks around a backward that ends the count of what is saved."""

    saved: Saved
    on_after_backward: tuple[Callable[[], Any], ...] = ()
    backward: None = None

    @property
    def on_before_backward(self) -> tuple[Callable[[Tensor], Any], ...]:
        return (lambda loss: self.saved.close(),)


@contextmanager
def shapes_only(module: nn.Module) -> Iterator[None]:
    """In this context a module that a simulated mesh has placed runs: operations compute shapes, and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        slots = [(part, name) for part in module.modules() for name, p in part._parameters.items() if p is not None]
        first: dict[int, tuple[nn.Module, str]] = {}
        firsts = [first.setdefault(id(part._parameters[name]), (part, name)) for part, name in slots]
        module.to_empty(device="cpu")
        for (part, name), (owner, own) in zip(slots, firsts, strict=True):
            part._parameters[name] = owner._parameters[own]
        yield


def activations(strategy: SimulatedMesh, step_fn: Callable[..., Any], batch: Any) -> int:
    """Runs a training step in the context of `shapes_only`, which leaves gradients.

    Args:
        strategy: has set up the one module whose step it is.
        step_fn: takes the batch and its index, and returns what a training step does.
        batch: of one data rank; its values are not read.

    Returns:
        Bytes that the step has saved when backward begins: no parameters, whole or gathered, and no buffers.
    """
    [module] = strategy.modules
    batch = strategy.precision.convert_input(map_tensors(batch, torch.empty_like))
    with Saved() as saved:
        strategy.forward_backward(strategy.setup_step(step_fn, module), batch, (0,), Window(), _Closing(saved))
    return saved.size([*module.parameters(), *module.buffers(), *_gathered(module)])


def _gathered(module: nn.Module) -> Iterator[Tensor]:
    """The parameters of FSDP's groups as they are gathered."""
    for group in _groups(module):
        yield from (p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param"))


def _groups(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            yield from parameter_groups(part._get_fsdp_state())


def group_sizes(module: nn.Module) -> tuple[int, list[int]]:
    """Bytes of the parameters that FSDP gathers at once.

    Returns:
        Those of the root, which stay gathered from forward to backward, and of each other group.
    """
    sizes = {id(group): sum(_whole_bytes(group, p) for p in group.fsdp_params) for group in _groups(module)}
    own = parameter_groups(module._get_fsdp_state()) if isinstance(module, FSDPModule) else ()
    root = sum(sizes.pop(id(group)) for group in own)
    return root, list(sizes.values())


def _whole_bytes(group: Any, parameter: Any) -> int:
    """Bytes of a parameter when its group has gathered it; what tp splits stays split."""
    dtype = parameter.sharded_param.dtype
    if dtype.is_floating_point:
        dtype = group.mp_policy.param_dtype or dtype
    return int(parameter._orig_size.numel() * dtype.itemsize)


def state_size(optimizers: Iterable[Optimizer]) -> int:
    """Steps optimizers once by the gradients there are, in the context of `shapes_only`.

    Returns:
        Bytes of the state that they keep.
    """
    found: dict[int, UntypedStorage] = {}
    for optimizer in optimizers:
        optimizer.step()
        tensors = [value for state in optimizer.state.values() for value in state.values()]
        for value in tensors:
            if isinstance(value, Tensor):
                found.update((storage._cdata, storage) for storage in storages(value))
    return sum(storage.nbytes() for storage in found.values())
