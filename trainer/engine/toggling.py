"""Temporary switches: the parameters that require gradients, and train and eval modes of modules and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.strategies.local_weights import local_part

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


@contextmanager
def evaluation_weights(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Puts optimizers that train other weights than they evaluate, such as schedule-free ones, into evaluation mode.

    Afterwards the weights have their values from before, bit for bit. The optimizer's own `train()` restores them only
    up to rounding, so that a validation would change the training.
    """
    switched: list[Any] = [
        optimizer
        for optimizer in optimizers
        if has_modes(optimizer) and all(group.get("train_mode", True) for group in optimizer.param_groups)
    ]
    # Those that have not been stepped are the same in both modes.
    parameters = [local_part(p) for optimizer in switched for p, state in optimizer.state.items() if state]
    before = [parameter.detach().clone() for parameter in parameters]
    for optimizer in switched:
        switch_mode(optimizer, "eval")
    try:
        yield
    finally:
        for optimizer in switched:
            switch_mode(optimizer, "train")
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def has_modes(optimizer: Optimizer) -> bool:
    """Returns True if an optimizer has the methods `train` and `eval`."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def switch_mode(optimizer: Any, mode: Literal["train", "eval"]) -> None:
    """Calls an optimizer's `train` or `eval`; does nothing if it has no modes."""
    if has_modes(optimizer):
        getattr(optimizer, mode)()
        # schedulefree looks up the state of every parameter, which adds an empty one for those that it never stepped.
        for parameter in [parameter for parameter, state in optimizer.state.items() if not state]:
            del optimizer.state[parameter]
