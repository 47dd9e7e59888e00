"""Continues a run of Lightning: converts the content of its `.ckpt`, except the weights, for the parts of this run."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.callbacks.early_stopping import EarlyStopping
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.foreign import ForeignWeights
from leyden.checkpoint.format.errors import blame
from leyden.checkpoint.optimizers import parameter_names
from leyden.checkpoint.owners import Unclaimed
from leyden.compat.lightning.state import Position, named_optimizer, position_of
from leyden.core.rank_zero import warn
from leyden.core.saved_state import SavedState
from leyden.trainer.events.progress import Progress
from leyden.trainer.saved.states import rank_owners, step_states_of

if TYPE_CHECKING:
    from leyden.trainer.engine.schedulers import SchedulerConfig
    from leyden.trainer.run import Run


SCALERS = ("MixedPrecision", "MixedPrecisionPlugin", "native_amp_scaling_state")
CURRENT = "current_model_state"
"""The file's entry with the trained weights, if an averaging callback had replaced them by its averages."""
UNLIKE = "configure_optimizers made {here}: make as many, or leave 'optimizers' out of restore."


class LightningRun:
    """The states in a `.ckpt` of Lightning, converted for the parts of a run, which is set up but for its optimizers.

    Attributes:
        callbacks: the states of callbacks, by `state_key`.
        progress: the progress of the Lightning run; None if that part is not restored.
        rank: the states that the fit loop restores once its loaders exist.

    Raises:
        CheckpointError: if Lightning cannot have written an entry; names it.
    """

    def __init__(self, file: ForeignWeights, run: Run, parts: frozenset[str]) -> None:
        self._file, self._run, self._parts = file, run, parts
        self._states = LightningStates(file.loaded, file.path.name)
        with blame(file.path):
            if "callbacks" in parts:
                self._states.match(run.callbacks)
            self._position = position_of(file.loaded, self._window, self._steps)
        self.callbacks = self._states.found
        self.progress = self._position.progress if "progress" in parts else None
        self._choose_weights()
        owners = rank_owners(run, CheckpointRanks(run.strategy))
        self.rank = Unclaimed(file.path, self._rank_states(self._position), owners)

    # reading the file ------------------------------------------------------------------------------------------------
    def _window(self, progress: Progress) -> int:
        accumulation = self._run.accumulation
        if accumulation is None or accumulation.counts_samples:
            return 1
        return accumulation.batches(accumulation.at(progress), self._run.loaders.samples_per_batch)

    def _steps(self, counted: int, batches: int) -> int:
        """Returns the number of windows stepped. In manual optimization Lightning counts every optimizer's steps."""
        if self._run.module.automatic_optimization:
            return counted
        optimizers = len(self._file.loaded["optimizer_states"]) or 1
        windows = counted // optimizers
        return windows if counted % optimizers == 0 and windows <= batches else min(counted, batches)

    def _choose_weights(self) -> None:
        """Selects the trained weights instead of the averaged ones, from which only an evaluation starts."""
        if CURRENT in self._file.loaded and "optimizers" in self._parts:
            self._file.take_weights(CURRENT)
            if int((self._file.entry("averaging_state") or {}).get("n_averaged", 0)):
                self._states.left["the averaged weights"] = "they start anew from the trained ones"

    def _rank_states(self, position: Position) -> dict[str, Any]:
        progress = position.progress
        loader: dict[str, Any] | None = None
        if progress.is_inside and not progress.ended and {"loaders", "progress"} <= self._parts:
            place = {"batches": progress.batch, "source": None, "loader": self._loader_state()}
            loader = {"place": place, "rest": None, "validation": []}
        found: dict[str, Any] = {"loader": loader}
        if "progress" in self._parts:
            values = {name: [value, False, False] for name, value in self._states.values.items()}
            found |= {"logs": {"entries": [], "epoch_values": values}}
            found |= {"window_start": position.window_start, "owes_plateau": position.owes_plateau or None}
        return found

    def _loader_state(self) -> Any:
        """Returns the state of the training loader; None if it saved none."""
        loop = SavedState(self._file.entry("loops") or {}, "loops").nested("fit_loop", {})
        states = loop.nested("state_dict", {}).items("combined_loader", ())
        return states[0] if len(states) == 1 else None

    # restoring the run ----------------------------------------------------------------------------------------------
    def restore_steps(self) -> None:
        """Restores optimizers, schedulers and scaler, once they exist."""
        run, file = self._run, self._file
        step_states, names = step_states_of(run), parameter_names(run.module)
        parts = run.strategy.master_weights.parts(run.module) or {}
        states, weights = file.loaded["optimizer_states"], file.model()
        step_states.check(file.path, self._other_step_states(), len(states), UNLIKE)
        found = []
        for number, (state, form) in enumerate(zip(states, step_states.saved_forms, strict=True)):
            with blame(file.path, f"optimizer_states[{number}]"):
                found.append(named_optimizer(state, form, names, weights, parts))
        step_states.take(self._other_step_states(), found, file.path, file.path)

    def _other_step_states(self) -> dict[str, Any]:
        """Returns the states of schedulers, precision and strategy."""
        schedulers = list(self._file.entry("lr_schedulers") or [])
        if self._states.has_own_schedulers:
            self._states.left["the state of schedulers"] = "StochasticWeightAveraging had replaced them by its own"
            schedulers = [config.scheduler.state_dict() for config in self._run.schedulers]
        scaler = next((self._file.entry(name) for name in SCALERS if self._file.entry(name)), None)
        precision: Mapping[str, Any] = {}
        if scaler is not None and "scaler" in self._run.strategy.precision.state_dict():
            precision = {"scaler": scaler, "skips": 0}
        elif scaler is not None:
            self._states.left["the gradient scaler"] = "this fit's precision has none"
        return {"schedulers": schedulers, "precision": precision, "strategy": {}}

    def settle(self) -> None:
        """Skips scheduler steps whose metric is missing, and warns of all states that cannot be restored."""
        not_restored = dict(self._states.left)
        if self.progress is not None:
            skipped = self._skip_unmonitored(self.progress)
            not_restored |= self._not_restored_of(self.progress, skipped)
        not_restored["random numbers"] = "Lightning does not save them, so shuffling and dropout will differ"
        if self._run.strategy.ranks.is_global_zero:
            warn(
                f"fit continues {self._file.path}, a Lightning checkpoint. Not restored: "
                f"{'; '.join(f'{name} ({why})' for name, why in not_restored.items())}."
            )

    def _skip_unmonitored(self, progress: Progress) -> list[SchedulerConfig]:
        """Skips the pending steps of the ReduceLROnPlateau schedulers that it returns: the file lacks their metric."""
        unmonitored = [
            config
            for config in self._run.schedulers
            if config.reduce_on_plateau and config.strict and config.monitor not in self._states.values
        ]
        at_end = self._position.owes_plateau or (progress.phase == "validated" and progress.ended)
        by_epoch = [config for config in unmonitored if at_end and config.due("epoch", progress.epoch + 1)]
        if by_epoch:
            self.rank.drop("owes_plateau")
            progress.end_epoch(complete=True)
        is_validated = progress.phase == "validated"
        by_step = [config for config in unmonitored if is_validated and config.due("step", progress.stepped)]
        if by_step:
            progress.settle()
        return by_epoch + by_step

    def _not_restored_of(self, progress: Progress, skipped: Sequence[SchedulerConfig]) -> dict[str, str]:
        """Returns the parts of the run's position that cannot be restored, each with the reason."""
        reasons = {
            f"a step of {type(config.scheduler).__name__}": f"no callback has saved {config.monitor!r}"
            for config in skipped
        }
        if not self._position.is_known:
            reasons["the position in the epoch"] = "the file has no loops"
        if self._position.begun:
            batches = self._position.begun
            reasons["the gradients of an open window"] = f"Lightning does not save them: {batches} batches run again"
        if progress.is_inside and progress.batch:
            reasons["the values logged so far in this epoch"] = "Lightning does not save their sums"
        return reasons


REASONS = ("not_stopped", "stopping_threshold", "divergence_threshold", "patience_exhausted", "non_finite_metric")
"""Lightning's `EarlyStoppingReason`, by number."""


@dataclass
class LightningStates:
    """The states of callbacks in a `.ckpt` file of Lightning.

    Attributes:
        file: the content of the file.
        name: the name of the file.
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
        """Matches each state to a callback of its class and translates it; among several, by their arguments."""
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
