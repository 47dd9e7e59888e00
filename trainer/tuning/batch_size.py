"""The search for the largest batch size that fits into memory."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from typing import Any

from leyden.core.devices import free_cached_memory
from leyden.core.errors import ConfigurationError, is_out_of_memory, nearest
from leyden.trainer.tuning.trial import LOADERS, Subject, assign, owners_of

MODES = ("power", "binsearch")


@dataclass(frozen=True)
class BatchSizeSearch:
    """A search that doubles the batch size until it is too large, or until one batch holds all samples.

    The settings are arguments of `Tuner.scale_batch_size`. An invalid one raises ConfigurationError.
    """

    mode: str
    steps_per_trial: int
    init_val: int
    max_trials: int
    batch_arg_name: str
    margin: float
    max_val: int | None

    def __post_init__(self) -> None:
        if str(self.mode).lower() not in MODES:
            raise ConfigurationError(f"mode={self.mode!r}: {nearest(str(self.mode), MODES)}")
        for name in ("steps_per_trial", "init_val", "max_trials"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: give a whole number from 1.")
        if not 0 <= self.margin < 1:
            raise ConfigurationError(f"margin={self.margin!r}: give a fraction from 0 to below 1.")
        if self.max_val is not None and self.max_val < self.init_val:
            raise ConfigurationError(
                f"max_val={self.max_val} is less than init_val={self.init_val}: give a larger max_val."
            )

    def owners(self, subject: Subject) -> list[Any]:
        """Returns the objects that have the batch size as an attribute or hyperparameter.

        Raises:
            ConfigurationError: if the batch size cannot be searched; the message names the fix.
        """
        name, trainer = self.batch_arg_name, subject.trainer
        given = [key for key, loader in subject.loaders.items() if loader is not None]
        if given:
            raise ConfigurationError(
                f"a batch size cannot be searched with {given[0]}={type(subject.loaders[given[0]]).__name__}, whose "
                "batch size is fixed. Implement the loader methods of the module or a DataModule with "
                f"batch_size=self.{name}."
            )
        if trainer.world_size > 1:
            raise ConfigurationError(
                f"a batch size cannot be searched on {trainer.world_size} ranks, because one of them may run out of "
                "memory alone: search with devices=1 and strategy='auto'."
            )
        owners = owners_of(name, subject.module, subject.datamodule)
        if not owners:
            raise ConfigurationError(
                f"neither {type(subject.module).__name__} nor its DataModule or hyperparameters have {name}: set "
                f"self.{name} and use it in the loaders, or name another attribute with batch_arg_name."
            )
        return owners

    def search(self, subject: Subject) -> int:
        """Searches with copies of the originals. Raises ConfigurationError if not even the first size fits."""
        fits, fails, size = 0, math.inf, self.init_val
        limit = math.inf if self.max_val is None else self.max_val
        for _ in range(self.max_trials):
            holds_all_samples = self._try(subject, size)
            if holds_all_samples is None:
                fails = size
            else:
                fits = size
            if holds_all_samples or fits == limit or (fails < math.inf and self._is_done(fits, int(fails))):
                break
            size = int(min(2 * size, limit)) if fails == math.inf else (fits + int(fails)) // 2
        if not fits:
            raise ConfigurationError(f"a batch of {size} does not fit into memory: give a smaller init_val.")
        return max(1, int(fits * (1 - self.margin))) if self.mode.lower() == "binsearch" else fits

    def _is_done(self, fits: int, fails: int) -> bool:
        """True if no size remains to try between the largest that fits and the smallest that fails."""
        return fails - fits <= 1 if self.mode.lower() == "binsearch" or not fits else True

    def _try(self, subject: Subject, size: int) -> bool | None:
        """Runs a few steps at a size. Returns None if it does not fit, True if one batch holds all samples."""
        steps, kind = self.steps_per_trial, LOADERS[subject.method]
        # At least two batches, to see whether the first one holds all samples.
        limits: dict[str, Any] = {f"limit_{kind}_batches": max(steps, 2)}
        if subject.method == "fit":
            limits = {"max_steps": steps, "max_epochs": -1, "limit_train_batches": 1.0, "overfit_batches": 0}
            limits["limit_val_batches"] = steps if subject.trainer.arguments.limit_val_batches else 0
        if any(getattr(callback, "cuts_batches", False) for callback in subject.trainer.callbacks):
            # AutoAccumulation would split a batch that does not fit, so every size would seem to fit.
            limits["accumulate_grad_batches"] = 1
        failed = False
        trainer: Any = None
        try:
            with subject.restoring_rng():
                trial = subject.copied()
                assign(self.batch_arg_name, size, owners_of(self.batch_arg_name, trial.module, trial.datamodule))
                trainer = trial.run([], **limits)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The cleanup below runs outside this block, because the traceback keeps the failed pass's tensors alive.
            failed = True
        batches = [] if trainer is None else _batches(trainer, subject.method)
        trainer = trial = None  # type: ignore[assignment]
        gc.collect()
        free_cached_memory()
        return None if failed else bool(batches) and max(batches) <= 1


def _batches(trainer: Any, method: str) -> list[float]:
    if method == "fit":
        return [trainer.num_training_batches]
    counts: list[float] = getattr(trainer, f"num_{LOADERS[method]}_batches")
    return counts
