"""Measures the memory of a training step on a simulated rank, with tensors that have shapes but no storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from leyden.strategies.mesh.pipeline.absent import AbsentParameter
from leyden.strategies.mesh.pipeline.steps import Rehearsal
from leyden.strategies.mesh.sent import SentBytes
from leyden.strategies.mesh.simulated import SimulatedMesh
from leyden.strategies.window import Window


class SavedActivations:
    """A context that counts the storages that autograd saves for backward, whenever a backward pass begins.

    Tensors that a recomputed block saves within a backward pass live only briefly, and are left out.
    """

    def __init__(self) -> None:
        self._storages: dict[int, UntypedStorage] = {}
        """All storages that were ever saved, so that none takes the place of another."""
        self._times: Counter[int] = Counter()
        """How often each storage is saved now."""
        self._found: list[set[int]] = []
        """The storages held when each backward pass began."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> _Saved:
        is_recomputed = torch._C._current_graph_task_id() != -1
        return _Saved(tensor, self._times, () if is_recomputed else self._keys([tensor]))

    def _keys(self, tensors: Iterable[Tensor]) -> list[int]:
        found = [storage for tensor in tensors for storage in storages(tensor)]
        self._storages.update((storage._cdata, storage) for storage in found)
        return [storage._cdata for storage in found]

    def note(self, kept: Iterable[Tensor] = ()) -> None:
        """Notes what is held when a backward pass begins: the saved storages, and those of other kept tensors."""
        self._found.append({*(+self._times), *self._keys(kept)})

    def size(self, excluding: Iterable[Tensor]) -> int:
        """Returns the most bytes held at one time, each storage counted once, without those of some tensors."""
        excluded = {storage._cdata for tensor in excluding for storage in storages(tensor)}
        return max((sum(self._storages[key].nbytes() for key in keys - excluded) for keys in self._found), default=0)


class _Saved:
    """A tensor that autograd has saved, until it drops this object."""

    def __init__(self, tensor: Tensor, times: Counter[int], keys: Sequence[int]) -> None:
        self.tensor, self._times, self._keys = tensor, times, keys
        times.update(keys)

    def __del__(self) -> None:
        self._times.subtract(self._keys)


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
class _BeforeBackward:
    """Backward hooks that only act before backward."""

    on_before_backward: tuple[Callable[[Tensor], Any], ...]
    on_after_backward: tuple[Callable[[], Any], ...] = ()
    backward: None = None


@contextmanager
def shapes_only(strategy: SimulatedMesh) -> Iterator[list[nn.Parameter]]:
    """Lets the one module of a simulated mesh run within this context: operations compute shapes, but no values.

    Yields:
        The parameters that this rank holds, without those of other stages of a pipeline.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    [module] = strategy.modules
    with FakeTensorMode(allow_non_fake_inputs=True):
        slots = [(part, name) for part in module.modules() for name, p in part._parameters.items() if p is not None]
        held = [(part, name) for part, name in slots if not isinstance(part._parameters[name], AbsentParameter)]
        # `to_empty` unties parameters: each slot then takes the parameter of the first slot that it was tied to.
        first_slots: dict[int, tuple[nn.Module, str]] = {}
        sources = [first_slots.setdefault(id(part._parameters[name]), (part, name)) for part, name in slots]
        module.to_empty(device="cpu")
        for (part, name), (source, source_name) in zip(slots, sources, strict=True):
            part._parameters[name] = source._parameters[source_name]
        strategy.begin_steps()
        yield list(dict.fromkeys(part.get_parameter(name) for part, name in held))


@dataclass(frozen=True, slots=True)
class TracedStep:
    """What a training step takes.

    Attributes:
        activations: the most bytes kept for backward when a backward pass begins, without parameters (sharded or
            gathered) and buffers. With a pipeline, those of all micro-batches under way, and its receive buffers.
        sent: bytes that this rank sends over each dimension of the mesh.
        passing: bytes of the parameters that a pipeline's stages keep gathered, and of their gradients before they are
            sharded; 0 without a pipeline.
    """

    activations: int
    sent: Mapping[str, int]
    passing: int = 0


def traced_step(
    strategy: SimulatedMesh,
    step_fn: Callable[..., Any],
    batch: Any,
    experts: Mapping[str, int],
    rehearsal: Rehearsal | None = None,
) -> TracedStep:
    """Runs a training step within `shapes_only`. It leaves gradients.

    Args:
        strategy: the strategy, with exactly one module set up.
        step_fn: the training step, called with a batch and its index.
        batch: a batch of one data rank; its values are not read.
        experts: the number of experts in each module of experts, by its name. They get the same number of tokens.
        rehearsal: what the stages of a pipeline receive.
    """
    [module] = strategy.modules
    passing = 0

    def note(kept: Iterable[Tensor]) -> None:
        nonlocal passing
        saved.note(kept)
        passing = max(passing, unsharded(module))

    with EvenRouting(module, experts), SavedActivations() as saved, SentBytes(strategy.meshes) as sent:
        if rehearsal is not None:
            strategy.expect(rehearsal, note)
        hooks = _BeforeBackward((lambda loss: saved.note(),) if rehearsal is None else ())
        step = strategy.setup_step(step_fn, module)
        strategy.forward_backward(step, _shapes_of(batch, strategy), (0,), Window(), hooks)
    size = saved.size([*module.parameters(), *module.buffers(), *gathered_parameters(module)])
    return TracedStep(size, sent.bytes, passing)


def rehearsed(
    strategy: SimulatedMesh, step_fn: Callable[..., Any], batch: Any, experts: Mapping[str, int]
) -> Rehearsal:
    """Finds what the stages of a pipeline receive, within `shapes_only`, on a rank that holds all of them.

    The arguments are those of `traced_step`.
    """
    [module] = strategy.modules
    with EvenRouting(module, experts):
        return strategy.rehearse(strategy.setup_step(step_fn, module), _shapes_of(batch, strategy))


def _shapes_of(batch: Any, strategy: SimulatedMesh) -> Any:
    return strategy.precision.convert_input(map_tensors(batch, torch.empty_like))


def unsharded(module: nn.Module) -> int:
    """Returns the bytes of FSDP's gathered parameters, and of their gradients: of one group, or of those summed so far.

    Only the last backward pass of a batch shards gradients. Until then, a rank keeps those of all its groups.
    """
    gathered = list(gathered_parameters(module))
    gradients = [parameter.grad for parameter in gathered]
    gradients += [p.unsharded_accumulated_grad for group in _groups(module) for p in group.fsdp_params]
    largest = max((sum(_whole_bytes(group, p) for p in group.fsdp_params) for group in _groups(module)), default=0)
    return _bytes_of(gathered) + max(_bytes_of(grad for grad in gradients if grad is not None), largest)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(storage.nbytes() for tensor in tensors for storage in storages(tensor))


def gathered_parameters(module: nn.Module) -> Iterator[Tensor]:
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
