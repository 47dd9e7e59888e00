"""Resets a sharded module whose run failed inside forward or backward, so that its next run begins as a first one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def restart(roots: Iterable[nn.Module]) -> None:
    """Drops what an earlier run left half done: gathered parameters, states of groups, and gradients of a window.

    Args:
        roots: modules of which those that FSDP shards are set back.
    """
    for root in roots:
        if isinstance(root, FSDPModule):
            state: Any = root._get_fsdp_state()
            if hasattr(root, "reset_iter_state"):
                # torch fails on a module that no forward has gone through yet.
                with suppress(RuntimeError, AttributeError):
                    root.reset_iter_state()
            else:
                _reset(state)
            _drop_gradients(state)


def _reset(state: Any) -> None:
    """What `reset_iter_state` does, which torch has from 2.13 on.

    Left as it is, a group that was in its forward keeps its parameters gathered: an optimizer would be given those, and
    train tensors that nothing reads.
    """
    shared, sent = state._state_ctx, state._comm_ctx
    # A module without a forward pass yet lists no states, and has nothing to reset.
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
    sent.all_gather_state = None
    sent.post_forward_order.clear()
    # torch 2.12 keeps several.
    if hasattr(sent, "reduce_scatter_states"):
        sent.reduce_scatter_states.clear()
    else:
        sent.reduce_scatter_state = None
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _drop_gradients(state: Any) -> None:
    """Drops sums of backward passes without a reduction: no version of torch does, and they would enter the next."""
    for part in state._state_ctx.all_states:
        for group in parameter_groups(part):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def parameter_groups(part: Any) -> Iterator[Any]:
    """The groups of parameters of one state: before torch 2.12 one at most."""
    if hasattr(part, "_fsdp_param_groups"):
        yield from part._fsdp_param_groups
    elif part._fsdp_param_group is not None:
        yield part._fsdp_param_group
