"""Optimizers, groups of parameters and schedules beyond torch's, for the Trainer and for loops of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.core.lazy import lazy_name

_HOMES = {
    "Muon": "leyden.optim.muon",
    "parameter_groups": "leyden.optim.groups",
    "split_parameters": "leyden.optim.groups",
    "warmup_stable_decay": "leyden.optim.schedules",
}

if TYPE_CHECKING:
    from leyden.optim.groups import parameter_groups as parameter_groups
    from leyden.optim.groups import split_parameters as split_parameters
    from leyden.optim.muon import Muon as Muon
    from leyden.optim.schedules import warmup_stable_decay as warmup_stable_decay

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use."""
    return lazy_name(__name__, _HOMES, name)
