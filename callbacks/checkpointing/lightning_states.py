"""States of Lightning's callbacks, as the callbacks of the same names here save them."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.callbacks.early_stopping import EarlyStopping
from leyden.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
from leyden.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
from leyden.callbacks.timer import STAGES, Timer
from leyden.callbacks.weight_averaging import WeightAveraging
from leyden.strategies.saved_state import SavedState

REASONS = ("not_stopped", "stopping_threshold", "divergence_threshold", "patience_exhausted", "non_finite_metric")
"""Lightning's numbers for `EarlyStoppingReason`."""
SWA_LEFT = "it has begun to average, which Lightning does as an epoch starts, and Leyden as it ends"


@dataclass
class LightningStates:
    """The states of callbacks in a `.ckpt`.

    Args:
        file: what the file holds.
        name: of the file.

    Attributes:
        found: state by the `state_key` of the callback here that takes it.
        left: the names of those that nobody takes, each with the reason.
        values: what the ModelCheckpoint that saved the file monitored, by its name.
        seconds: of training so far, by a Timer; 0 without one.
        groups: names of the parameters in the groups of each optimizer, where a finetuning callback recorded them.
    """

    file: Mapping[str, Any]
    name: str = ""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    groups: dict[int, list[list[str]]] = field(default_factory=dict)

    def give(self, callbacks: Sequence[Callback]) -> None:
        """Finds for each callback the state of Lightning's callback of its class, and for those of several of a class
        that of the same arguments.

        Raises:
            StateError: if Lightning cannot have written an entry; names it.
        """
        saved = SavedState(self.file.get("callbacks") or {}, "callbacks")
        self._note_values([state for state in saved.entries.values() if isinstance(state, Mapping)])
        for key in saved.entries:
            if not saved.entries[key]:
                continue
            name = _class_name(key)
            state = SavedState(saved.entries[key], f"callbacks[{name}]")
            self._note(name, state)
            free = [one for one in callbacks if _is_of(one, name) and one.state_key not in self.found]
            if not free:
                self.left[f"the state of {name}"] = "this fit has no such callback"
                continue
            callback = max(free, key=lambda one: _likeness(one, str(key)))
            translated = _translated(callback, state, self.file)
            if isinstance(translated, str):
                self.left[f"the state of {name}"] = translated
            elif translated:
                self.found[callback.state_key] = translated

    def _note_values(self, states: list[Mapping[str, Any]]) -> None:
        """Finds the value that was logged before the file was saved; that of another ModelCheckpoint may be older."""
        scored = [state for state in states if isinstance(state.get("current_score"), Tensor) and state.get("monitor")]
        own = [state for state in scored if self.name in map(os.path.basename, _paths_in(state))]
        for state in own or (scored if len(scored) == 1 else []):
            self.values[str(state["monitor"])] = state["current_score"].detach().clone()

    def _note(self, name: str, state: SavedState) -> None:
        if name == "Timer":
            self.seconds = state.nested("time_elapsed").number("train", 0.0, least=0.0, most=1e12)
        recorded: Mapping[Any, Any] = state.nested("internal_optimizer_metadata", {}).entries
        for number, groups in recorded.items():
            entries = [SavedState(group, f"{state.where}.internal_optimizer_metadata") for group in groups]
            self.groups[number] = [[str(one) for one in group.items("params")] for group in entries]


def _paths_in(state: Mapping[str, Any]) -> list[str]:
    """The files that a ModelCheckpoint of Lightning's has saved last."""
    ranked = state.get("best_k_models")
    paths = [
        *(ranked if isinstance(ranked, Mapping) else ()),
        state.get("last_model_path"),
        state.get("best_model_path"),
    ]
    return [path for path in paths if isinstance(path, str) and path]


def _class_name(key: Any) -> str:
    """The class in a key such as `EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}`; before 1.5 it was the key."""
    return str(getattr(key, "__qualname__", key)).partition("{")[0]


def _is_of(callback: Callback, name: str) -> bool:
    return any(cls.__qualname__ == name for cls in type(callback).__mro__) or callback.state_key == name


def _likeness(callback: Callback, key: str) -> int:
    """How many of the arguments in a key the callback has, too; a callback of the very class comes before others."""
    name, brace, rest = key.partition("{")
    try:
        arguments = ast.literal_eval(brace + rest) if brace else {}
    except (ValueError, SyntaxError):
        arguments = {}
    missing = object()
    pairs = [(getattr(callback, f"_{one}", getattr(callback, one, missing)), value) for one, value in arguments.items()]
    same = sum((here or None) == (there or None) for here, there in pairs if here is not missing)
    return 2 * same + (type(callback).__qualname__ == name)


def _translated(callback: Callback, state: SavedState, file: Mapping[str, Any]) -> dict[str, Any] | str:
    """The state as the callback here saves it; the reason where it has none; the very state for a user's own."""
    for kind, translate in TABLE:
        if isinstance(callback, kind):
            return translate(callback, state, file)
    return dict(state.entries)


def _of_checkpoint(callback: ModelCheckpoint, state: SavedState, file: Mapping[str, Any]) -> dict[str, Any] | str:
    current = _number(state, "current_score")
    there, here = state.entries.get("dirpath"), callback.dirpath
    if not isinstance(there, str) or here is None or os.path.realpath(there) != os.path.realpath(here):
        if state.entries.get("best_model_path") or state.entries.get("last_model_path"):
            return f"its files are in {there}, and this fit saves in {here}: give that as dirpath to rank them too"
        return {}
    names = {
        key: _inside(state.text(key, ""), here)
        for key in ("best_model_path", "last_model_path")
        if state.entries.get(key)
    }
    best = names.get("best_model_path")
    scores = {
        name: float(score)
        for path, score in state.nested("best_k_models", {}).entries.items()
        if (name := _inside(path, here)) is not None
    }
    return {
        "dirpath": here,
        "best_model_score": _number(state, "best_model_score"),
        "current_score": current,
        "best_k_models": scores,
        "recent": [best] if state.is_none("monitor") and best else [],
        **{key: name for key, name in names.items() if name is not None},
    }


def _inside(path: str, folder: str) -> str | None:
    """The name of a checkpoint within a folder; None if it is elsewhere."""
    relative = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
    return None if relative.startswith(os.pardir) else relative


def _number(state: SavedState, key: str) -> float | None:
    return None if state.is_none(key) else float(state.value(key))


def _of_stopping(callback: EarlyStopping, state: SavedState, file: Mapping[str, Any]) -> dict[str, Any]:
    reason = state.integer("stopping_reason", 0, least=0, most=len(REASONS) - 1)
    own = callback.state_dict()
    # As after any change of an argument, a run that it had stopped goes on with more patience.
    same = state.integer("patience", callback.patience) == callback.patience
    return {
        **own,
        "arguments": own["arguments"] if same else None,
        "wait_count": state.integer("wait_count", least=0),
        "stopped_epoch": state.integer("stopped_epoch", 0, least=0),
        "best_score": torch.as_tensor(state.value("best_score")).detach().clone(),
        "stopping_reason": REASONS[reason],
        "stopping_reason_message": state.value("stopping_reason_message", None),
    }


def _of_timer(callback: Timer, state: SavedState, file: Mapping[str, Any]) -> dict[str, Any]:
    elapsed = state.nested("time_elapsed")
    return {"time_elapsed": {stage: elapsed.number(stage) for stage in STAGES if stage in elapsed}}


def _of_averages(callback: WeightAveraging, state: SavedState, file: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"latest_update_step": state.integer("latest_update_step", 0, least=0)}
    count = (file.get("averaging_state") or {}).get("n_averaged", 0)
    if int(count) and CURRENT in file:
        found |= {"n_averaged": int(count), "current": dict(file[CURRENT])}
    return found


def _of_swa(callback: StochasticWeightAveraging, state: SavedState, file: Mapping[str, Any]) -> dict[str, Any] | str:
    return {} if state.is_none("scheduler_state") else SWA_LEFT


def _of_finetuning(callback: BaseFinetuning, state: SavedState, file: Mapping[str, Any]) -> dict[str, Any]:
    """Its groups are restored with the optimizer's state."""
    if not isinstance(callback, BackboneFinetuning):
        return {key: value for key, value in state.entries.items() if key != "internal_optimizer_metadata"}
    groups = len((state.entries.get("internal_optimizer_metadata") or {}).get(0, ()))
    rate = state.entries.get("previous_backbone_lr")
    return {} if rate is None or groups < 2 else {"previous_backbone_lr": float(rate), "group": groups - 1}


CURRENT = "current_model_state"
"""The entry of the weights that are trained, where a callback had its averages in their place."""
TABLE: list[tuple[type[Callback], Callable[[Any, SavedState, Mapping[str, Any]], dict[str, Any] | str]]] = [
    (ModelCheckpoint, _of_checkpoint),
    (EarlyStopping, _of_stopping),
    (Timer, _of_timer),
    (WeightAveraging, _of_averages),
    (StochasticWeightAveraging, _of_swa),
    (BaseFinetuning, _of_finetuning),
]
"""Callbacks whose state has another form here than in Lightning."""
