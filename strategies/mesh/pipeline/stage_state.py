"""Saving and loading in a pipeline, where each stage holds a part of the parameters and of the optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from leyden.strategies.fragment import Fragment
from leyden.strategies.fsdp.sharding import local, whole
from leyden.strategies.local_weights import LocalWeights
from leyden.strategies.master_weights import MasterWeights
from leyden.strategies.mesh.pipeline.cut import Holdings
from leyden.strategies.mesh.pipeline.schedule import Schedule


def _empty_fragment(tensor: Tensor) -> Fragment:
    """Returns the fragment of a tensor that other ranks hold: none of its elements."""
    return Fragment(tensor.new_empty(0), tensor.shape)


def _full_fragment(tensor: Tensor) -> Tensor:
    """Returns the fragment of a tensor that only this rank holds: all of its elements. DTensors are returned as is."""
    return tensor if isinstance(tensor, (DTensor, Fragment)) else Fragment(tensor.reshape(-1), tensor.shape)


def _fragment_to_save(name: str, tensor: Tensor, content: Tensor, holdings: Holdings) -> Tensor:
    """Returns this rank's fragment of a parameter or a buffer whose saved values are `content`."""
    if isinstance(tensor, nn.Parameter):
        saves = tensor not in holdings.absent
    else:
        saves = holdings.cut.stage_of_buffer(name) in holdings.stages
    return _full_fragment(content) if saves else _empty_fragment(tensor.detach())


def state_to_save(module: nn.Module, holdings: Holdings) -> dict[str, Any]:
    """Returns a module's state dict with this rank's fragments of parameters and buffers."""
    # Tied parameters share one fragment.
    fragments = {id(p): _fragment_to_save(name, p, p.detach(), holdings) for name, p in module.named_parameters()}
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            state[name] = fragments[id(value)]
        elif isinstance(value, Tensor):
            state[name] = _fragment_to_save(name, value, value.detach(), holdings)
        else:
            state[name] = value
    return state


def load_targets(module: nn.Module, absent: set[nn.Parameter]) -> dict[str, Any]:
    """Returns the tensors to load a module's state into; empty fragments for parameters that other ranks hold."""
    targets = {}
    for name, value in module.state_dict(keep_vars=True).items():
        is_absent = isinstance(value, nn.Parameter) and value in absent
        targets[name] = _empty_fragment(value.detach()) if is_absent else getattr(value, "data", value)
    return targets


def whole_state(
    module: nn.Module, holdings: Holdings, schedule: Schedule, group: dist.ProcessGroup, to_host: bool, keeps: bool
) -> dict[str, Any]:
    """Gathers a module's state from all stages, with unsharded tensors. Every rank must call it.

    Args:
        module: the module.
        holdings: the parts of it that this rank holds.
        schedule: maps stages to ranks.
        group: the ranks of the pipeline.
        to_host: True moves each tensor to the CPU before the next is gathered.
        keeps: False discards the result on this rank, and returns an empty dict.
    """
    cut = holdings.cut
    gathered: dict[int, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in gathered:
            stage = cut.stage_of(name) if isinstance(value, nn.Parameter) else cut.stage_of_buffer(name)
            owner = schedule.rank_of(stage)
            if owner == dist.get_rank(group):
                content = whole(value.detach()).contiguous()
            else:
                content = torch.empty(value.shape, dtype=value.dtype, device=local(value).device)
            dist.broadcast(content, group=group, group_src=owner)
            gathered[id(value)] = content.cpu() if to_host else content
        if keeps:
            state[name] = gathered.get(id(value), value)
    return state


class LocalStages(LocalWeights):
    """This rank's part of a model in a pipeline: the parameters of its stages, and its copies of all buffers."""

    def __init__(self, module: nn.Module, holdings: Holdings) -> None:
        super().__init__(module)
        self._holdings = holdings
        for name, parameter in module.named_parameters():
            if parameter in holdings.absent:
                del self.parameters[name]

    def to_save(self, name: str, tensor: Tensor, local: Tensor) -> Tensor:
        return _fragment_to_save(name, tensor, super().to_save(name, tensor, local), self._holdings)


class StageWeights(MasterWeights):
    """The weights of a model in a pipeline: each rank steps and saves those of its stages.

    Args:
        group: the ranks of the pipeline.
        absent: placeholders of the parameters that other ranks hold.
    """

    def __init__(self, group: dist.ProcessGroup, absent: set[nn.Parameter]) -> None:
        self.group, self.absent = group, absent

    def saved_form(self, optimizer: Optimizer) -> Any:
        return _WholeOptimizer(optimizer, self.group, self.absent)

    def parts(self, module: nn.Module) -> Mapping[str, Tensor] | None:
        return {
            name: _empty_fragment(parameter.detach()) if parameter in self.absent else parameter
            for name, parameter in module.named_parameters()
        }


class _WholeOptimizer:
    """An optimizer in the form of a checkpoint: its state has entries for the parameters of every stage."""

    def __init__(self, optimizer: Optimizer, group: dist.ProcessGroup, absent: set[nn.Parameter]) -> None:
        self._optimizer, self._group, self._absent = optimizer, group, absent
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state with this rank's fragments of tensors. Every rank must call it."""
        plain = self._optimizer.state_dict()
        parameters = self._parameters
        own = {key: entries for key, entries in plain["state"].items() if isinstance(key, int)}
        described = {key: _described(entries, parameters[key]) for key, entries in own.items()}
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, described, group=self._group)
        # If two ranks hold a parameter, the first one's entries win.
        everywhere = {key: entries for rank in reversed(found) for key, entries in rank.items()}
        state = dict(plain["state"])
        for key in sorted(everywhere):
            # Removed and added again, so that keys are in the same order on every rank.
            own_entries = state.pop(key, None)
            state[key] = {
                name: _fragment_of(value, None if own_entries is None else own_entries[name], parameters[key])
                for name, value in everywhere[key].items()
            }
        return {**plain, "state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state of the parameters that this rank holds."""
        parameters = self._parameters
        kept = {
            key: entries
            for key, entries in state["state"].items()
            if not (isinstance(key, int) and parameters[key] in self._absent)
        }
        self._optimizer.load_state_dict({**state, "state": kept})
        self.state, self.param_groups = self._optimizer.state, self._optimizer.param_groups


def _described(entries: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Returns the entries of a parameter's state, with only the dtype of tensors that have the parameter's shape."""
    return {
        name: value.dtype if _is_elementwise(name, value, parameter) else _on_cpu(value)
        for name, value in entries.items()
    }


def _fragment_of(described: Any, own: Any, parameter: Tensor) -> Any:
    """Returns this rank's fragment of a described entry.

    Args:
        described: the entry as `_described` returns it, on a rank that holds the parameter.
        own: this rank's entry; None if it does not hold the parameter.
        parameter: the parameter, or its placeholder.
    """
    if not isinstance(described, torch.dtype):
        return described if own is None else own
    if own is None:
        return Fragment(torch.empty(0, dtype=described, device=parameter.device), parameter.shape)
    return _full_fragment(own)


def _is_elementwise(name: str, value: Any, parameter: Tensor) -> bool:
    # torch's "step" is a count, even if its shape is that of a parameter with one element.
    return isinstance(value, Tensor) and value.shape == parameter.shape and name != "step"


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
