"""What is switched for a while: which optimizer's parameters take gradients, and the modes of a module's parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from leyden.trainer.engine.engine import Engine


class Toggles:
    """Which optimizer's parameters take gradients.

    Args:
        engine: whose optimizers they are.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: dict[Tensor, bool] = {}
        """Whether each parameter took gradients before `turn_to`; empty where all optimizers' do."""
        self._current: Optimizer | None = None

    def turn_to(self, optimizer: Optimizer) -> None:
        """Makes every parameter of the other optimizers stop taking gradients, until `undo`.

        Turning to another optimizer in between is allowed: `undo` restores what was before the first.
        """
        groups_of = self._engine.strategy.master_weights.groups
        own = {id(parameter) for group in groups_of(optimizer) for parameter in group}
        self._current = optimizer
        for parameter in (p for other in self._engine.optimizers for group in groups_of(other) for p in group):
            # A parameter may be in several optimizers: what it was is known only before it is set.
            before = self._before.setdefault(parameter, parameter.requires_grad)
            parameter.requires_grad = before and id(parameter) in own

    def undo(self) -> None:
        """Lets every parameter take gradients that took them before `turn_to`."""
        for parameter, requires_grad in self._before.items():
            parameter.requires_grad = requires_grad
        self._before, self._current = {}, None

    @contextmanager
    def turned_to(self, optimizer: Optimizer) -> Iterator[None]:
        """Only the parameters of this optimizer take gradients within the block; such blocks may be nested."""
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
    """Puts each part of a module back into its own mode, training or evaluation, after the block."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            # `train()` would change the parts within, which may be in another mode.
            part.training = training
