"""The accumulated state of torchmetrics objects: saved, checked, restored, and merged for another number of ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from leyden.strategies.errors import StateError
from leyden.strategies.saved_state import SavedState, brief
from leyden.trainer.logging.metrics import PartState, in_turns, merged_value

if TYPE_CHECKING:
    from torchmetrics import Metric


class MetricStates:
    """What the torchmetrics objects of a module have accumulated, as a checkpoint keeps it.

    Args:
        module: has them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return metric_states(self._module.named_modules())

    def check_state_dict(self, state: Any) -> None:
        check_metric_states(self._module.named_modules(), state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_metric_states(self._module.named_modules(), state)

    def regroup(self, states: Sequence[Any], rank: int, seed: int) -> dict[str, Any]:
        """Rank 0 continues with what all ranks have accumulated, the others with nothing."""
        metrics = list(self._module.named_modules())
        return merged_metric_states(metrics, states) if rank == 0 else blank_metric_states(metrics, states[0])


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


def merged_metric_states(
    modules: Iterable[tuple[str, Any]], states: Sequence[Mapping[str, Mapping[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Merges what `metric_states` returned on each rank into the states of one, each by its metric's own reduction.

    Warns of a metric whose reduction says nothing about partial states; it starts anew.
    """
    return {
        name: _merged(metric, name, [state[name] for state in states]) for name, metric in modules if name in states[0]
    }


def blank_metric_states(modules: Iterable[tuple[str, Any]], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The states of metrics that have seen no batch, in the form of `metric_states`."""
    known = set(names)
    return {name: _blank(metric) for name, metric in modules if name in known}


def _merged(metric: Metric, name: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

    reductions = (dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum)
    parts = [PartState(state["update_count"], dict(state["state"])) for state in found]
    merged: dict[str, Any] = {}
    for key, default in metric._defaults.items():
        values = [part.values[key] for part in parts]
        if isinstance(default, list):
            merged[key] = list(in_turns([value if isinstance(value, list) else [value] for value in values]))
        elif metric._reductions[key] in reductions:
            # torchmetrics' sum of small integers is of a wider type than the state.
            merged[key] = merged_value(metric, key, parts).to(values[0].dtype)
        else:
            warnings.warn(
                f"the metric {name!r} has a state {key!r} that cannot be merged over ranks: after this resume on "
                "another number of ranks, its value covers only the rest of the epoch.",
                stacklevel=2,
            )
            return _blank(metric)
    return {"state": merged, "update_count": sum(part.count for part in parts)}


def _blank(metric: Metric) -> dict[str, Any]:
    state: dict[str, Any] = {
        key: default.clone() if isinstance(default, Tensor) else [] for key, default in metric._defaults.items()
    }
    return {"state": state, "update_count": 0}
