"""What was logged, as a checkpoint keeps it: the sums of the training epoch and the values that are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leyden.trainer.logging.logs import Logs


class LogStates:
    """The state of a run's logs.

    Args:
        logs: of the run.
        module: by whose names its metrics are saved.
    """

    def __init__(self, logs: Logs, module: nn.Module) -> None:
        self._logs, self._module = logs, module

    def state_dict(self) -> dict[str, Any]:
        return self._logs.state_dict(self._module)

    def check_state_dict(self, state: Any) -> None:
        self._logs.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._logs.load_state_dict(state, self._module)

    def regroup(self, states: Sequence[Any], rank: int, seed: int) -> dict[str, Any] | None:
        """Rank 0 continues with the sums of all ranks; the others begin with sums that add nothing."""
        return None if states[0] is None else merged_logs(states, empty=rank > 0)


def merged_logs(states: Sequence[dict[str, Any]], empty: bool) -> dict[str, Any]:
    """Adds the sums of logged values of all ranks; `empty` gives neutral sums, for ranks other than 0."""
    entries: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for state in states:
        for entry in state["entries"]:
            entries.setdefault((entry["event"], entry["name"]), []).append(entry)
    return {**states[0], "entries": [_merged_entry(found, empty) for found in entries.values()]}


def _merged_entry(found: list[dict[str, Any]], empty: bool) -> dict[str, Any]:
    first, reduction = found[0], found[0]["reduce_fx"]
    totals = [entry["total"] for entry in found if entry["total"] is not None]
    if reduction in ("max", "min"):
        # The same value again changes neither.
        return {**first, "total": _extreme(totals, reduction)}
    if empty:
        total = None if not totals else totals[0] * 0
        return {**first, "total": total, "weight": 0.0, "values": [], "result": None}
    values = [value for entry in found for value in entry["values"]]
    weight = sum(entry["weight"] for entry in found)
    return {**first, "total": sum(totals[1:], totals[0]) if totals else None, "weight": weight, "values": values}


def _extreme(totals: list[Any], reduction: str) -> Any:
    if not totals:
        return None
    stacked = torch.stack([torch.as_tensor(total, dtype=torch.float64) for total in totals])
    extreme = stacked.max() if reduction == "max" else stacked.min()
    return extreme if any(isinstance(total, Tensor) for total in totals) else float(extreme)
