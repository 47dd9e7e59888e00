"""Saves and restores what a step changes besides the weights: optimizers, schedulers, scaler, strategy's counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from leyden.strategies.base import Strategy
from leyden.strategies.errors import ConfigurationError, StateError
from leyden.strategies.saved_state import SavedState
from leyden.trainer.checkpoint.optimizers import check_named, from_named, parameter_names, to_named
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.checkpoint.writer import CheckpointWriter
from leyden.trainer.format.errors import blame, naming
from leyden.trainer.format.manifest import OPTIMIZERS

SCHEDULERS = "schedulers"
"""The file of everything but the optimizers."""


class StepStates:
    """Everything that a step changes besides the weights.

    Args:
        strategy: of the run, with its precision.
        module: whose names the optimizers' parameters go by.
        optimizers: in the order in which they are saved.
        schedulers: in the order in which they are saved.
    """

    def __init__(
        self, strategy: Strategy, module: nn.Module, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> None:
        self._strategy, self._module = strategy, module
        self._optimizers, self._schedulers = optimizers, schedulers

    def save(self, writer: CheckpointWriter, weights: nn.Module) -> None:
        """Writes the weights of a module and everything that steps. Every rank calls it."""
        names = parameter_names(self._module)
        self._strategy.save(writer, weights, [to_named(form, names) for form in self.saved_forms])
        states = {
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "precision": self._strategy.precision.state_dict(),
            "strategy": self._strategy.state_dict(),
        }
        writer.state(SCHEDULERS, states)

    def check(self, file: Path, states: Any, optimizers: int, advice: str) -> None:
        """Refuses the states of other schedulers, or of another number of optimizers and schedulers; changes nothing.

        Args:
            file: that the states were read from, for messages.
            states: of schedulers, precision and strategy.
            optimizers: how many were saved.
            advice: how to make as many as there were; `{here}` stands for the number there is.

        Raises:
            CheckpointError: if a scheduler cannot have saved its state; names the file and the entry.
            ConfigurationError: if there are more or fewer.
        """
        with blame(file):
            saved = SavedState(states)
            saved.nested("precision")
            found = saved.items("schedulers")
            for number, (scheduler, own) in enumerate(zip(self._schedulers, found, strict=False)):
                _check_scheduler(scheduler, SavedState(own, f"schedulers[{number}]"))
        check_count("optimizers", optimizers, len(self._optimizers), advice)
        check_count("schedulers", len(found), len(self._schedulers), advice)

    @property
    def saved_forms(self) -> list[Any]:
        """The optimizers as a checkpoint holds them, whose groups have the parameters in the order of their names."""
        return [self._strategy.master_weights.saved_form(optimizer) for optimizer in self._optimizers]

    def read(self, reader: CheckpointReader) -> list[dict[str, Any]] | None:
        """Reads the optimizers' states into new memory, for `load`; None if they are read into an engine's then."""
        parts = None if self._strategy.drives_one else self._strategy.master_weights.parts(self._module)
        return None if parts is None else reader.optimizers(like=parts)

    def load(
        self, reader: CheckpointReader, states: Mapping[str, Any], optimizers: list[dict[str, Any]] | None = None
    ) -> None:
        """Takes back what `save` wrote and `check` has found to fit.

        Args:
            reader: of the checkpoint.
            states: that were read from the file of schedulers.
            optimizers: what `read` returned. If left out, they are read now: an engine's into the memory that it
                steps with.
        """
        if optimizers is None:
            optimizers = reader.optimizers(like=self._strategy.master_weights.parts(self._module))
        self.take(states, optimizers, reader.path / OPTIMIZERS, reader.path / f"{SCHEDULERS}.json")

    def take(
        self, states: Mapping[str, Any], optimizers: Sequence[dict[str, Any]], of_optimizers: Path, file: Path
    ) -> None:
        """Takes states that have been read.

        Args:
            states: of schedulers, precision and strategy.
            optimizers: as `to_named` returned them.
            of_optimizers: the file that they are from, for messages.
            file: that the other states are from.
        """
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
    """Raises ConfigurationError if a checkpoint has another number of something than the run.

    Args:
        kind: of what, in the plural.
        there: in the checkpoint.
        here: in the run.
        advice: see `StepStates.check`.
    """
    if there != here:
        raise ConfigurationError(f"the checkpoint has {there} {kind}, and {advice.format(here=here)}")


# Lists of as many numbers as an optimizer has groups, or of schedulers within one.
_BY_GROUP = {"base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "_schedulers"}
_POSITIVE = {"step_size", "T_max", "T_0", "T_i", "total_steps", "total_size", "step_ratio"}
_COUNTERS = {"last_epoch": -1, "_step_count": 0, "num_bad_epochs": 0, "cooldown_counter": 0, "last_batch_iteration": -1}


def _check_scheduler(scheduler: Any, saved: SavedState) -> None:
    """Compares the saved state of one of torch's schedulers with its own: the same kinds, and possible counters."""
    if not type(scheduler).__module__.startswith("torch.optim."):
        # A scheduler of the user's checks its own state.
        return
    for key in saved.entries:
        if key == "optimizer" or callable(getattr(type(scheduler), str(key), None)):
            raise StateError(saved.path(key), f"is no state of {type(scheduler).__name__}")
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    _check_like(saved, scheduler.state_dict(), len(groups))


def _check_like(saved: SavedState, now: Mapping[str, Any], groups: int) -> None:
    """Compares two states; an optimizer may have gained groups since its scheduler was made, and has `groups` now."""
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
