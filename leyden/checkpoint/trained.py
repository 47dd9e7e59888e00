"""Flags that changed during a fit: which parameters are trained, and which batch norms track statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from leyden.core.saved_state import SavedState


class Trained:
    """The `requires_grad` flags of parameters that differ from those at the start of the fit.

    Includes `track_running_stats` of batch norms, which freezing turns off.

    The flags are saved because a resume within an epoch does not call the hook that unfroze layers at the epoch's
    start. Unchanged flags are not saved, so a script that was edited before the resume decides about them.
    """

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._before: dict[str, bool] = {}
        self._base: tuple[nn.Module, Mapping[str, str]] | None = None
        """The module and its digests before it was trained; see `note_base`."""

    def begin(self, module: nn.Module) -> None:
        """Records the flags of a module at the start of a fit."""
        self._module, self._before = module, _flags(module)

    def note_base(self, module: nn.Module, digests: Mapping[str, str]) -> None:
        """Records digests of all tensors before training. Later fits of the same module keep those of the first."""
        if self._base is None or self._base[0] is not module:
            self._base = module, digests

    @property
    def base(self) -> Mapping[str, str] | None:
        """The digests of all tensors before training; None unless a ModelCheckpoint has `trainable_only`."""
        return None if self._base is None else self._base[1]

    def state_dict(self) -> dict[str, bool]:
        if self._module is None:
            return {}
        return {name: flag for name, flag in _flags(self._module).items() if self._before.get(name) is not flag}

    def check_state_dict(self, state: Any) -> None:
        saved = SavedState(state, "trained")
        for name in saved.entries:
            saved.flag(name)

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        if self._module is None:
            return
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(state.get(name, self._before.get(name, parameter.requires_grad)))
        for name, norm in _norms(self._module):
            norm.track_running_stats = state.get(name, self._before.get(name, norm.track_running_stats))

    def regroup(self, states: Sequence[Any], rank: int, seed: int) -> Any:
        """Returns the first state, since all ranks train the same parameters."""
        return states[0]


def _flags(module: nn.Module) -> dict[str, bool]:
    flags = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    return flags | {name: norm.track_running_stats for name, norm in _norms(module)}


def _norms(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yields the batch norms that have statistics, with the full name of their `track_running_stats`."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.running_mean is not None:
            yield f"{name}.track_running_stats", part
