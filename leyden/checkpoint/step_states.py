"""Saves and restores the state that a step changes besides the weights: optimizers, schedulers, scaler, strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from leyden.checkpoint.format.bucket import Place
from leyden.checkpoint.format.errors import blame, naming
from leyden.checkpoint.format.manifest import OPTIMIZERS
from leyden.checkpoint.optimizers import check_named, from_named, parameter_names, to_named
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter
from leyden.core.errors import ConfigurationError, StateError
from leyden.core.saved_state import SavedState
from leyden.strategies.base import Strategy

SCHEDULERS = "schedulers"
"""The name of the state of schedulers, precision and strategy."""


class StepStates:
    """The state that a step changes besides the weights.

    Optimizers and schedulers are saved in their order. The module names the optimizers' parameters.
    """

    def __init__(
        self, strategy: Strategy, module: nn.Module, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> None:
        self._strategy, self._module = strategy, module
        self._optimizers, self._schedulers = optimizers, schedulers

    def save(self, writer: CheckpointWriter, weights: nn.Module) -> None:
        """Writes a module's weights and the step's state. Every rank calls it."""
        names = parameter_names(self._module)
        self._strategy.save(writer, weights, [to_named(form, names) for form in self.saved_forms])
        states = {
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "precision": self._strategy.precision.state_dict(),
            "strategy": self._strategy.state_dict(),
        }
        writer.state(SCHEDULERS, states)

    def check(self, file: Place, states: Any, optimizers: int, advice: str) -> None:
        """Raises if the states are of other schedulers, or if the numbers differ. Changes nothing.

        The message for a wrong number ends with `advice`, where `{here}` stands for the run's own number.

        Raises:
            CheckpointError: if a scheduler cannot have saved its state; names the file and the entry.
            ConfigurationError: if the run has a different number of optimizers or schedulers.
        """
        with blame(file):
            saved = SavedState(states)
            saved.nested("precision")
            schedulers = saved.items("schedulers")
            for number, (scheduler, own) in enumerate(zip(self._schedulers, schedulers, strict=False)):
                _check_scheduler(scheduler, SavedState(own, f"schedulers[{number}]"))
        check_count("optimizers", optimizers, len(self._optimizers), advice)
        check_count("schedulers", len(schedulers), len(self._schedulers), advice)

    @property
    def saved_forms(self) -> list[Any]:
        """The optimizers as checkpoints hold them, with the module's parameters in their groups."""
        return [self._strategy.master_weights.saved_form(optimizer) for optimizer in self._optimizers]

    def read(self, reader: CheckpointReader) -> list[dict[str, Any]] | None:
        """Reads the optimizers' states into new memory, to be passed to `load`.

        Returns None if an engine drives the optimizer: `load` then reads directly into the engine's memory.
        """
        parts = None if self._strategy.drives_one else self._strategy.master_weights.parts(self._module)
        return None if parts is None else reader.optimizers(like=parts)

    def load(
        self, reader: CheckpointReader, states: Mapping[str, Any], optimizers: list[dict[str, Any]] | None = None
    ) -> None:
        """Loads states that `save` wrote and `check` accepted.

        Without the result of `read`, the optimizers' states are read now; an engine's directly into the memory that it
        steps.
        """
        if optimizers is None:
            optimizers = reader.optimizers(like=self._strategy.master_weights.parts(self._module))
        self.take(states, optimizers, reader.path / OPTIMIZERS, reader.path / f"{SCHEDULERS}.json")

    def take(
        self, states: Mapping[str, Any], optimizers: Sequence[dict[str, Any]], of_optimizers: Place, file: Place
    ) -> None:
        """Loads states that have already been read. The files are for messages."""
        names = parameter_names(self._module)
        pairs = list(zip(self.saved_forms, optimizers, strict=True))
        for number, (form, own) in enumerate(pairs):
            with naming(of_optimizers), blame(of_optimizers, f"optimizers[{number}]"):
                check_named(form, own, names)
        with blame(file):
            for scheduler, own in zip(self._schedulers, states["schedulers"], strict=True):
                scheduler.load_state_dict(own)
        for number, (form, own) in enumerate(pairs):
            with naming(of_optimizers), blame(of_optimizers, f"optimizers[{number}]"):
                from_named(form, own, names)
        with blame(file):
            self._strategy.precision.load_state_dict(states["precision"])
            self._strategy.load_state_dict(states.get("strategy", {}))


def check_count(kind: str, there: int, here: int, advice: str) -> None:
    """Raises ConfigurationError if the checkpoint and the run have different numbers of optimizers or schedulers."""
    if there != here:
        raise ConfigurationError(f"the checkpoint has {there} {kind}, and {advice.format(here=here)}")


# Entries that are lists with one number for each parameter group, or of nested schedulers.
_BY_GROUP = {"base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "_schedulers"}
_POSITIVE = {"step_size", "T_max", "T_0", "T_i", "total_steps", "total_size", "step_ratio"}
_COUNTERS = {"last_epoch": -1, "_step_count": 0, "num_bad_epochs": 0, "cooldown_counter": 0, "last_batch_iteration": -1}


def _check_scheduler(scheduler: Any, saved: SavedState) -> None:
    """Raises if a saved state does not fit one of torch's schedulers: by the types of its entries and their ranges."""
    if not type(scheduler).__module__.startswith("torch.optim."):
        # A custom scheduler checks its own state.
        return
    for key in saved.entries:
        if key == "optimizer" or callable(getattr(type(scheduler), str(key), None)):
            raise StateError(saved.path(key), f"is no state of {type(scheduler).__name__}")
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    _check_like(saved, scheduler.state_dict(), len(groups))


def _check_like(saved: SavedState, now: Mapping[str, Any], groups: int) -> None:
    """Compares a saved state with the scheduler's current one.

    `groups` is the optimizer's current number of groups, which may have grown since the scheduler was created.
    """
    for key, present in now.items():
        if key in _COUNTERS:
            saved.integer(key, least=_COUNTERS[key], most=2**53)
        elif key not in saved or present is None:
            continue
        elif isinstance(present, bool):
            saved.flag(key)
        elif isinstance(present, (int, float)):
            saved.number(key, least=1e-300 if key in _POSITIVE else None)
        elif isinstance(present, str):
            saved.text(key)
        elif isinstance(present, (list, tuple)):
            items = saved.items(key)
            most = len(present) if key == "_schedulers" else max(len(present), groups)
            if key in _BY_GROUP and not len(present) <= len(items) <= most:
                raise StateError(saved.path(key), f"has {len(items)} entries, and must have {len(present)}")
            like = [*present, *present[:1] * (most - len(present) if key in _BY_GROUP else 0)]
            for number, (item, own) in enumerate(zip(items, like, strict=False)):
                _check_like(SavedState({"": item}, saved.path(f"{key}[{number}]")), {"": own}, groups)
        elif isinstance(present, dict):
            _check_like(saved.nested(key), present, groups)
