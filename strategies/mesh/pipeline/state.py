"""What the ranks of a pipeline save and load: parameters and optimizer state that each stage has a part of."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from leyden.strategies.fragment import Fragment
from leyden.strategies.fsdp.sharding import local, whole
from leyden.strategies.master_weights import MasterWeights
from leyden.strategies.mesh.pipeline.cut import Holdings
from leyden.strategies.mesh.pipeline.schedule import Schedule


def _nothing_of(tensor: Tensor) -> Fragment:
    """A tensor that other ranks hold."""
    return Fragment(tensor.new_empty(0), tensor.shape)


def _all_of(tensor: Tensor) -> Tensor:
    """A tensor that this rank holds, where others have nothing of it."""
    return tensor if isinstance(tensor, (DTensor, Fragment)) else Fragment(tensor.reshape(-1), tensor.shape)


def state_to_save(module: nn.Module, holdings: Holdings) -> dict[str, Any]:
    """The state of a module, in which parameters and buffers are what this rank has of them."""
    absent = holdings.absent
    made: dict[int, Tensor] = {}
    for parameter in module.parameters():
        content = parameter.detach()
        made[id(parameter)] = _nothing_of(content) if parameter in absent else _all_of(content)
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            state[name] = made[id(value)]
        elif isinstance(value, Tensor):
            counts = holdings.cut.stage_of_buffer(name) in holdings.stages
            state[name] = _all_of(value.detach()) if counts else _nothing_of(value.detach())
        else:
            state[name] = value
    return state


def places_to_load(module: nn.Module, absent: set[nn.Parameter]) -> dict[str, Any]:
    """Where the state of a module is read to; of what other ranks hold nothing is read."""
    places = {}
    for name, value in module.state_dict(keep_vars=True).items():
        is_absent = isinstance(value, nn.Parameter) and value in absent
        places[name] = _nothing_of(value.detach()) if is_absent else getattr(value, "data", value)
    return places


def whole_state(
    module: nn.Module, holdings: Holdings, schedule: Schedule, group: dist.ProcessGroup, to_host: bool, keeps: bool
) -> dict[str, Any]:
    """The state of a module with whole tensors, from all stages. Every rank must call it.

    Args:
        module: whose state it is.
        holdings: what this rank holds of it.
        schedule: says which rank holds which stage.
        group: the ranks of the pipeline.
        to_host: brings tensors to the CPU, one at a time.
        keeps: False for an empty result on this rank.
    """
    done: dict[int, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in done:
            cut = holdings.cut
            stage = cut.stage_of(name) if isinstance(value, nn.Parameter) else cut.stage_of_buffer(name)
            owner = schedule.rank_of(stage)
            is_here = owner == dist.get_rank(group)
            empty = partial(torch.empty, value.shape, dtype=value.dtype, device=local(value).device)
            content = whole(value.detach()) if is_here else empty()
            content = content.contiguous()
            dist.broadcast(content, group=group, group_src=owner)
            done[id(value)] = content.cpu() if to_host else content
        if keeps:
            state[name] = done.get(id(value), value)
    return state


class StageWeights(MasterWeights):
    """The parameters of a whole model, of which this rank steps those of its stages.

    Args:
        group: the ranks of the pipeline.
        absent: what stands in the place of the others' parameters.
    """

    def __init__(self, group: dist.ProcessGroup, absent: set[nn.Parameter]) -> None:
        self.group, self.absent = group, absent

    def saved_form(self, optimizer: Optimizer) -> Any:
        return _WholeForm(optimizer, self.group, self.absent)

    def parts(self, module: nn.Module) -> Mapping[str, Tensor] | None:
        return {
            name: _nothing_of(parameter.detach()) if parameter in self.absent else parameter
            for name, parameter in module.named_parameters()
        }


class _WholeForm:
    """An optimizer as a checkpoint knows it: with the state of every stage's parameters."""

    def __init__(self, optimizer: Optimizer, group: dist.ProcessGroup, absent: set[nn.Parameter]) -> None:
        self._optimizer, self._group, self._absent = optimizer, group, absent
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, in which tensors are what this rank has of them. Every rank must call it."""
        plain = self._optimizer.state_dict()
        parameters = self._parameters
        own = {key: entries for key, entries in plain["state"].items() if isinstance(key, int)}
        found: list[Any] = [None] * dist.get_world_size(self._group)
        described = {key: _described(entries, parameters[key]) for key, entries in own.items()}
        dist.all_gather_object(found, described, group=self._group)
        everywhere = {key: entries for stage in reversed(found) for key, entries in stage.items()}
        state = dict(plain["state"])
        for key in sorted(everywhere):
            here = state.pop(key, None)
            state[key] = {
                name: _of_this_rank(value, None if here is None else here[name], parameters[key])
                for name, value in everywhere[key].items()
            }
        return {**plain, "state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state of the parameters that this rank holds."""
        parameters = self._parameters
        kept = {
            key: entries
            for key, entries in state["state"].items()
            if not (isinstance(key, int) and parameters[key] in self._absent)
        }
        self._optimizer.load_state_dict({**state, "state": kept})
        self.state, self.param_groups = self._optimizer.state, self._optimizer.param_groups


def _described(entries: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The entries of a parameter's state, in which the dtype stands for a tensor of the parameter's shape."""
    return {
        name: value.dtype if _is_by_element(name, value, parameter) else _on_cpu(value)
        for name, value in entries.items()
    }


def _of_this_rank(described: Any, here: Any, parameter: Tensor) -> Any:
    if not isinstance(described, torch.dtype):
        return described if here is None else here
    if here is None:
        return Fragment(torch.empty(0, dtype=described, device=parameter.device), parameter.shape)
    return _all_of(here)


def _is_by_element(name: str, value: Any, parameter: Tensor) -> bool:
    # torch's "step" is a number, even if its parameter has one element.
    return isinstance(value, Tensor) and value.shape == parameter.shape and name != "step"


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
