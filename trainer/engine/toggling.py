"""Temporary switches: which optimizer's parameters require gradients, and the train/eval modes of submodules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from leyden.trainer.engine.engine import Engine


class Toggles:
    """Restricts gradients to the parameters of one optimizer.

    Args:
        engine: the engine that holds the optimizers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: dict[Tensor, bool] = {}
        """`requires_grad` of each parameter before the first `turn_to`; empty after `undo`."""
        self._current: Optimizer | None = None

    def turn_to(self, optimizer: Optimizer) -> None:
        """Disables gradients for the parameters of all other optimizers, until `undo`.

        Another `turn_to` in between is allowed. `undo` restores the flags from before the first one.
        """
        groups_of = self._engine.strategy.master_weights.groups
        own = {id(parameter) for group in groups_of(optimizer) for parameter in group}
        self._current = optimizer
        for parameter in (p for other in self._engine.optimizers for group in groups_of(other) for p in group):
            # A parameter may be in several optimizers, so only its first recorded flag is the original one.
            before = self._before.setdefault(parameter, parameter.requires_grad)
            parameter.requires_grad = before and id(parameter) in own

    def undo(self) -> None:
        """Restores `requires_grad` of all parameters."""
        for parameter, requires_grad in self._before.items():
            parameter.requires_grad = requires_grad
        self._before, self._current = {}, None

    @contextmanager
    def turned_to(self, optimizer: Optimizer) -> Iterator[None]:
        """Calls `turn_to` for the duration of the block. Blocks may be nested."""
        outer = self._current
        self.turn_to(optimizer)
        try:
            yield
        finally:
            self.undo()
            if outer is not None:
                self.turn_to(outer)


@contextmanager
def keeping_modes(module: nn.Module) -> Iterator[None]:
    """Restores the train/eval mode of each submodule after the block."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            # Not `train()`, which would also change nested submodules in another mode.
            part.training = training
