"""What torchmetrics objects have accumulated: taken for a checkpoint, checked, and given back."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from leyden.strategies.errors import StateError
from leyden.strategies.saved_state import SavedState, brief


def metric_states(modules: Iterable[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    """The accumulated state of every torchmetrics object among the named modules."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return {}
    return {
        name: {
            # Copies: a metric changes its tensors in place afterwards, and appends to its lists.
            "state": {
                key: value.clone() if isinstance(value, Tensor) else list(value)
                for key, value in metric.metric_state.items()
            },
            "update_count": metric._update_count,
        }
        for name, metric in modules
        if isinstance(metric, torchmetrics.Metric)
    }


def check_metric_states(modules: Iterable[tuple[str, Any]], states: Any) -> None:
    """Refuses states that `metric_states` cannot have taken of these metrics; changes nothing.

    Raises:
        StateError: names the entry.
    """
    saved = SavedState(states, "metrics")
    for name, metric in modules:
        if name not in saved:
            continue
        found = saved.nested(name)
        found.integer("update_count", least=0)
        entries = found.nested("state")
        for key in entries.entries:
            value = entries.value(key)
            tensors = value if isinstance(value, list) else [value]
            if key not in metric._defaults or not all(isinstance(item, Tensor) for item in tensors):
                raise StateError(entries.path(key), f"is {brief(value)}, and no state of {type(metric).__name__}")
            default = metric._defaults[key]
            if isinstance(default, Tensor) and default.numel() == 1 and any(item.numel() != 1 for item in tensors):
                raise StateError(entries.path(key), "must have one element")


def load_metric_states(modules: Iterable[tuple[str, Any]], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Gives torchmetrics objects back what `metric_states` took."""
    for name, metric in modules:
        if name in states:
            for key, value in states[name]["state"].items():
                setattr(metric, key, value.to(metric.device) if isinstance(value, Tensor) else value)
            metric._update_count = states[name]["update_count"]
            metric._computed = None
