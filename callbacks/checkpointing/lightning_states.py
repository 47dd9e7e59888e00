"""Translates the states of Lightning's ModelCheckpoint and EarlyStopping; other callbacks of Leyden start anew."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.callbacks.early_stopping import EarlyStopping
from leyden.core.saved_state import SavedState

REASONS = ("not_stopped", "stopping_threshold", "divergence_threshold", "patience_exhausted", "non_finite_metric")
"""Lightning's `EarlyStoppingReason`, by number."""


@dataclass
class LightningStates:
    """The states of callbacks in a `.ckpt` file of Lightning.

    Args:
        file: the content of the file.
        name: the name of the file.

    Attributes:
        found: the translated states, by the `state_key` of the callback that loads them.
        left: the names of the states that no callback loads, each with the reason.
        values: the monitored value that was current when the file was saved, by its metric's name.
        has_own_schedulers: True if StochasticWeightAveraging had replaced the schedulers by its own.
    """

    file: Mapping[str, Any]
    name: str = ""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    has_own_schedulers: bool = False

    def match(self, callbacks: Sequence[Callback]) -> None:
        """Matches each state to a callback of its class and translates it; among several, by their arguments.

        Raises:
            StateError: names an entry that Lightning cannot have written.
        """
        saved = SavedState(self.file.get("callbacks") or {}, "callbacks")
        self._record_values([state for state in saved.entries.values() if isinstance(state, Mapping)])
        for key in saved.entries:
            if not saved.entries[key]:
                continue
            name = _class_name(key)
            state = SavedState(saved.entries[key], f"callbacks[{name}]")
            if name == "StochasticWeightAveraging":
                self.has_own_schedulers = not state.is_none("scheduler_state")
            unmatched = [
                callback for callback in callbacks if _is_of(callback, name) and callback.state_key not in self.found
            ]
            if not unmatched:
                self.left[f"the state of {name}"] = "this fit has no such callback"
                continue
            callback = max(unmatched, key=lambda candidate: _similarity(candidate, str(key)))
            translated = _translate(callback, state)
            if isinstance(translated, str):
                self.left[f"the state of {name}"] = translated
            elif translated:
                self.found[callback.state_key] = translated

    def _record_values(self, states: list[Mapping[str, Any]]) -> None:
        """Records the monitored value of the ModelCheckpoint that saved the file. Those of others may be older."""
        scored = [state for state in states if isinstance(state.get("current_score"), Tensor) and state.get("monitor")]
        savers = [state for state in scored if self.name in map(os.path.basename, _paths_in(state))]
        for state in savers or (scored if len(scored) == 1 else []):
            self.values[str(state["monitor"])] = state["current_score"].detach().clone()


def _paths_in(state: Mapping[str, Any]) -> list[str]:
    """Returns the paths in the state of a ModelCheckpoint of Lightning."""
    ranked = state.get("best_k_models")
    paths = [
        *(ranked if isinstance(ranked, Mapping) else ()),
        state.get("last_model_path"),
        state.get("best_model_path"),
    ]
    return [path for path in paths if isinstance(path, str) and path]


def _class_name(key: Any) -> str:
    """Returns the class name in a key such as `EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}`."""
    # Before Lightning 1.5 the key was the class itself.
    return str(getattr(key, "__qualname__", key)).partition("{")[0]


def _is_of(callback: Callback, name: str) -> bool:
    return any(cls.__qualname__ == name for cls in type(callback).__mro__) or callback.state_key == name


def _similarity(callback: Callback, key: str) -> int:
    """Returns a score for how well a callback matches a key: twice the equal arguments, plus 1 for the exact class."""
    name, brace, rest = key.partition("{")
    try:
        arguments = ast.literal_eval(brace + rest) if brace else {}
    except (ValueError, SyntaxError):
        arguments = {}
    missing = object()
    pairs = [
        (getattr(callback, f"_{argument}", getattr(callback, argument, missing)), value)
        for argument, value in arguments.items()
    ]
    equal = sum((own or None) == (value or None) for own, value in pairs if own is not missing)
    return 2 * equal + (type(callback).__qualname__ == name)


def _translate(callback: Callback, state: SavedState) -> dict[str, Any] | str:
    """Returns the state in Leyden's form, or the reason why there is none. A user's callback gets it unchanged."""
    if isinstance(callback, ModelCheckpoint):
        return _of_checkpoint(callback, state)
    if isinstance(callback, EarlyStopping):
        return _of_stopping(callback, state)
    is_leydens = any(cls.__module__.startswith("leyden.") for cls in type(callback).__mro__ if cls is not Callback)
    return "it starts anew" if is_leydens else dict(state.entries)


def _of_checkpoint(callback: ModelCheckpoint, state: SavedState) -> dict[str, Any] | str:
    saved_folder, folder = state.entries.get("dirpath"), callback.dirpath
    current_score = _number(state, "current_score")
    if (
        folder is None
        or not isinstance(saved_folder, str)
        or os.path.realpath(saved_folder) != os.path.realpath(folder)
    ):
        if state.entries.get("best_model_path") or state.entries.get("last_model_path"):
            return f"its files are in {saved_folder}, but this fit saves in {folder}: set dirpath to rank them too"
        return {}
    names = {
        key: _inside(state.text(key, ""), folder)
        for key in ("best_model_path", "last_model_path")
        if state.entries.get(key)
    }
    best = names.get("best_model_path")
    scores = {
        name: float(score)
        for path, score in state.nested("best_k_models", {}).entries.items()
        if (name := _inside(path, folder)) is not None
    }
    return {
        "dirpath": folder,
        "best_model_score": _number(state, "best_model_score"),
        "current_score": current_score,
        "best_k_models": scores,
        "recent": [best] if state.is_none("monitor") and best else [],
        **{key: name for key, name in names.items() if name is not None},
    }


def _inside(path: str, folder: str) -> str | None:
    """Returns the path of a checkpoint relative to a folder; None if it lies outside."""
    relative = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
    return None if relative.startswith(os.pardir) else relative


def _number(state: SavedState, key: str) -> float | None:
    return None if state.is_none(key) else float(state.value(key))


def _of_stopping(callback: EarlyStopping, state: SavedState) -> dict[str, Any]:
    reason = state.integer("stopping_reason", 0, least=0, most=len(REASONS) - 1)
    current = callback.state_dict()
    # A different patience counts as changed arguments, so a run that was stopped continues.
    is_unchanged = state.integer("patience", callback.patience) == callback.patience
    return {
        **current,
        "arguments": current["arguments"] if is_unchanged else None,
        "wait_count": state.integer("wait_count", least=0),
        "stopped_epoch": state.integer("stopped_epoch", 0, least=0),
        "best_score": torch.as_tensor(state.value("best_score")).detach().clone(),
        "stopping_reason": REASONS[reason],
        "stopping_reason_message": state.value("stopping_reason_message", None),
    }
