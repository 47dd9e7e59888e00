"""Resets a sharded module whose run failed inside forward or backward, so the next run starts from a clean state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from leyden.strategies.local_weights import local_part


def restart(roots: Iterable[nn.Module]) -> None:
    """Resets gathered parameters, group states and accumulated gradients that an interrupted run left behind.

    Args:
        roots: modules to reset; those that FSDP does not shard are skipped.
    """
    for root in roots:
        if isinstance(root, FSDPModule):
            state: Any = root._get_fsdp_state()
            if hasattr(root, "reset_iter_state"):
                # torch raises one of these for a module that has not run forward yet.
                with suppress(RuntimeError, AttributeError):
                    root.reset_iter_state()
            else:
                _reset(state)
            _drop_gradients(root)


def _reset(state: Any) -> None:
    """Does what `reset_iter_state` of torch 2.13 and later does.

    Without it, a group interrupted in its forward keeps its parameters gathered. An optimizer created for the next run
    would receive the gathered tensors and train copies that nothing reads.
    """
    shared, communication = state._state_ctx, state._comm_ctx
    # A module that has not run forward yet lists no states, and there is nothing to reset.
    if not shared.all_states:
        return
    if state._device.type != "cpu":
        torch.accelerator.synchronize(state._device)
    for part in shared.all_states:
        part._modules_to_run_forward.clear()
        part._training_state = type(part._training_state).IDLE
        for group in parameter_groups(part):
            if (gathered := group._all_gather_result) is not None and hasattr(gathered.all_gather_work, "wait"):
                gathered.all_gather_work.wait()
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    communication.all_gather_state = None
    communication.post_forward_order.clear()
    # torch 2.12 keeps a list of these states, earlier versions one.
    if hasattr(communication, "reduce_scatter_states"):
        communication.reduce_scatter_states.clear()
    else:
        communication.reduce_scatter_state = None
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def note_unfrozen(root: Any) -> None:
    """Makes the groups of a root reduce gradients in the precision of the policy, whatever they trained at first.

    torch reads a group's data types in the first forward pass, from the parameters that are trained then. A group that
    is frozen there, as while another optimizer is toggled, has none, and later gradients fail in mixed precision.
    """
    # A root that has run forward before does nothing here.
    root._get_fsdp_state()._lazy_init()
    for part in root.modules():
        if isinstance(part, FSDPModule):
            for group in parameter_groups(part._get_fsdp_state()):
                if group._orig_dtype is None:
                    group._init_mp_dtypes()


def _drop_gradients(root: nn.Module) -> None:
    """Drops gradients accumulated without a reduction. No torch version does, and they would add to the next ones."""
    for parameter in _parameters(root):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def unreduced_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients of whole parameters that backward passes without a reduction have accumulated, by name."""
    names, found = {id(p): name for name, p in module.named_parameters()}, {}
    for parameter in _parameters(module):
        gradient = parameter.unsharded_accumulated_grad
        if gradient is None and hasattr(parameter, "_unsharded_param"):
            gradient = parameter._unsharded_param.grad
        if gradient is not None:
            found[names[id(parameter.sharded_param)]] = local_part(gradient)
    return found


def restore_unreduced(module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Replaces the gradients that the next reduction adds to its own."""
    _drop_gradients(module)
    names = {id(p): name for name, p in module.named_parameters()}
    for parameter in _parameters(module):
        value = gradients.get(names[id(parameter.sharded_param)])
        if value is not None:
            local = value.to(parameter.sharded_param.device, copy=True)
            if parameter.is_dtensor:
                # A layer that is split over a mesh has DTensors as its gathered parameters.
                local = DTensor(local, parameter._tp_spec, requires_grad=False)  # type: ignore[no-untyped-call]
            parameter.unsharded_accumulated_grad = local


def _parameters(module: nn.Module) -> Iterator[Any]:
    """Yields FSDP's objects for the parameters of a module and its submodules."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            yield from (parameter for group in parameter_groups(state) for parameter in group.fsdp_params)


def parameter_groups(part: Any) -> Iterator[Any]:
    """Yields the parameter groups of one FSDP state: before torch 2.12, at most one."""
    if hasattr(part, "_fsdp_param_groups"):
        yield from part._fsdp_param_groups
    elif part._fsdp_param_group is not None:
        yield part._fsdp_param_group
