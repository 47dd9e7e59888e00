"""Which parameters are trained, where a fit has frozen or unfrozen some since it began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from leyden.strategies.saved_state import SavedState


class Trained:
    """The parameters that are trained now and were not when the fit began, or the other way round.

    A hook that unfreezes layers at the start of an epoch is not called again by a resume within that epoch. A script
    that was changed in between decides about all other parameters.
    """

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._before: dict[str, bool] = {}

    def begin(self, module: nn.Module) -> None:
        """A fit of a module begins."""
        self._module, self._before = module, _flags(module)

    def state_dict(self) -> dict[str, bool]:
        if self._module is None:
            return {}
        return {name: flag for name, flag in _flags(self._module).items() if self._before.get(name) is not flag}

    def check_state_dict(self, state: Any) -> None:
        saved = SavedState(state, "trained")
        for name in saved.entries:
            saved.flag(name)

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        named = {} if self._module is None else dict(self._module.named_parameters())
        for name, flag in state.items():
            if name in named:
                named[name].requires_grad_(flag)

    def regroup(self, states: Sequence[Any], rank: int, seed: int) -> Any:
        """All ranks train the same parameters."""
        return states[0]


def _flags(module: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}
