"""Saves, checks and restores the state of torchmetrics objects, and merges it for another number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from leyden.core.errors import StateError
from leyden.core.rank_zero import warn
from leyden.core.saved_state import SavedState, brief
from leyden.trainer.logging.metrics import PartState, merged_value
from leyden.trainer.logging.values import in_turns

if TYPE_CHECKING:
    from torchmetrics import Metric


class MetricStates:
    """The accumulated state of a module's torchmetrics objects."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, dict[str, Any]]:
        torchmetrics = sys.modules.get("torchmetrics")
        if torchmetrics is None:
            return {}
        return {
            name: {
                # Copies, since a metric changes its tensors in place and appends to its lists.
                "state": {
                    key: value.clone() if isinstance(value, Tensor) else list(value)
                    for key, value in metric.metric_state.items()
                },
                "update_count": metric._update_count,
            }
            for name, metric in self._module.named_modules()
            if isinstance(metric, torchmetrics.Metric)
        }

    def check_state_dict(self, state: Any) -> None:
        saved = SavedState(state, "metrics")
        for name, metric in self._among(saved.entries).items():
            found = saved.nested(name)
            found.integer("update_count", least=0)
            entries = found.nested("state")
            for key in entries.entries:
                value = entries.value(key)
                tensors = value if isinstance(value, list) else [value]
                if key not in metric._defaults or not all(isinstance(item, Tensor) for item in tensors):
                    raise StateError(entries.path(key), f"is {brief(value)}, not a state of {type(metric).__name__}")
                default = metric._defaults[key]
                if isinstance(default, Tensor) and default.numel() == 1 and any(item.numel() != 1 for item in tensors):
                    raise StateError(entries.path(key), "must have one element")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, metric in self._among(state).items():
            for key, value in state[name]["state"].items():
                setattr(metric, key, value.to(metric.device) if isinstance(value, Tensor) else value)
            metric._update_count = state[name]["update_count"]
            metric._computed = None

    def regroup(self, states: Sequence[Any], rank: int, seed: int) -> dict[str, Any]:
        """Merges the states for another number of ranks: rank 0 gets everything, the other ranks blank states."""
        known = self._among(states[0])
        if rank > 0:
            return {name: _blank(metric) for name, metric in known.items()}
        return {name: _merged(metric, name, [state[name] for state in states]) for name, metric in known.items()}

    def _among(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the module's metrics with these names."""
        return {name: part for name, part in self._module.named_modules() if name in names}


def _merged(metric: Metric, name: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the states of all ranks by the metric's own reductions.

    If a reduction is not defined for partial states, the metric starts over, with a warning.
    """
    from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

    reductions = (dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum)
    parts = [PartState(state["update_count"], dict(state["state"])) for state in found]
    merged: dict[str, Any] = {}
    for key, default in metric._defaults.items():
        values = [part.values[key] for part in parts]
        if isinstance(default, list):
            merged[key] = list(in_turns([value if isinstance(value, list) else [value] for value in values]))
        elif metric._reductions[key] in reductions:
            # torchmetrics sums small integers in a wider dtype than that of the state.
            merged[key] = merged_value(metric, key, parts).to(values[0].dtype)
        else:
            warn(
                f"the state {key!r} of the metric {name!r} cannot be merged over ranks. After this resume on another "
                "number of ranks, the metric covers only the rest of the epoch."
            )
            return _blank(metric)
    return {"state": merged, "update_count": sum(part.count for part in parts)}


def _blank(metric: Metric) -> dict[str, Any]:
    """Returns the state of a metric that has seen no batch."""
    state: dict[str, Any] = {
        key: default.clone() if isinstance(default, Tensor) else [] for key, default in metric._defaults.items()
    }
    return {"state": state, "update_count": 0}
