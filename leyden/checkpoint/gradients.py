"""The gradients that manual optimization has open between two batches, for a step that a later batch takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.core.errors import StateError
from leyden.core.rank_zero import warn
from leyden.core.saved_state import SavedState, brief
from leyden.strategies.local_weights import local_part

if TYPE_CHECKING:
    from leyden.trainer.engine.engine import Engine
    from leyden.trainer.module import TrainModule


class OpenGradients:
    """The open gradients of this rank's parameters, or of its shards.

    Each rank saves its own: where a module accumulates without an exchange (`toggle_model(sync_grad=False)`), they
    differ. Automatic optimization has none, since it saves between two accumulation windows.
    """

    def __init__(self, module: TrainModule, engine: Engine) -> None:
        self._module, self._engine = module, engine

    def state_dict(self) -> dict[str, Tensor]:
        is_open = self._engine.open_parameters()
        named = self._module.named_parameters() if is_open else ()
        return {name: local_part(p.grad) for name, p in named if id(p) in is_open and p.grad is not None}

    def check_state_dict(self, state: Any) -> None:
        saved = SavedState(state, "gradients")
        parameters = dict(self._module.named_parameters()) if saved.entries else {}
        for name, value in saved.entries.items():
            wanted = tuple(local_part(parameters[name]).shape) if name in parameters else None
            if not isinstance(value, Tensor) or (wanted is not None and tuple(value.shape) != wanted):
                raise StateError(saved.path(name), f"is {brief(value)}, and must be a tensor of {wanted}")

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._module.automatic_optimization:
            return
        for name, parameter in self._module.named_parameters():
            # A run that goes back to a checkpoint has gradients of the batches that it repeats.
            parameter.grad = None
            if name in state:
                parameter.grad = _gradient_of(parameter, state[name])

    def regroup(self, states: Sequence[Any], rank: int, seed: int) -> dict[str, Tensor]:
        """Returns no gradients, with a warning: those of other ranks' samples or shards do not fit this rank."""
        if rank == 0 and any(states):
            warn(
                "the checkpoint was saved while gradients accumulated over batches were waiting for a step, on another "
                "number of ranks. They are left out: the first step after the resume lacks those batches.",
            )
        return {}


class UnreducedGradients:
    """What this rank's backward passes without an exchange left for the next one, where `.grad` does not hold it."""

    def __init__(self, module: TrainModule, engine: Engine) -> None:
        self._module, self._engine = module, engine

    def state_dict(self) -> dict[str, Tensor]:
        return self._engine.strategy.unreduced_gradients(self._module) if self._engine.keeps_gradients else {}

    def check_state_dict(self, state: Any) -> None:
        saved = SavedState(state, "gradients")
        for name, value in saved.entries.items():
            if not isinstance(value, Tensor):
                raise StateError(saved.path(name), f"is {brief(value)}, and must be a tensor")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if not self._module.automatic_optimization:
            self._engine.strategy.restore_unreduced(self._module, state)

    def regroup(self, states: Sequence[Any], rank: int, seed: int) -> dict[str, Tensor]:
        """Returns no gradients, with the warning of `OpenGradients`."""
        return OpenGradients(self._module, self._engine).regroup(states, rank, seed)


def _gradient_of(parameter: Tensor, saved: Tensor) -> Tensor:
    """Returns a saved gradient, or the shard of one, as the gradient of a parameter."""
    if saved.layout != torch.strided:
        return saved.to(parameter.device, copy=True)
    gradient = torch.empty_like(parameter, requires_grad=False)
    local_part(gradient).copy_(saved)
    return gradient
