"""The search for the largest batch that fits into memory."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from typing import Any

import torch

from leyden.strategies.errors import ConfigurationError, is_out_of_memory, nearest
from leyden.trainer.tuning.trial import Subject, assign, owners_of

MODES = ("power", "binsearch")
LIMITS = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


@dataclass(frozen=True)
class BatchSizeSearch:
    """How the largest batch is searched: doubled until it is too large, or until one batch holds all samples.

    Attributes:
        mode: "power" takes the last one that fitted; "binsearch" halves the interval above it, too.
        steps_per_trial: steps, or batches, that must fit.
        init_val: the first size.
        max_trials: sizes tried at most.
        batch_arg_name: the attribute of module or DataModule, or the hyperparameter, that the loaders are made by.
        margin: what "binsearch" leaves free of the size that it found, as a fraction.
        max_val: no larger one is tried; None for no limit.

    Raises:
        ConfigurationError: for a value that cannot be.
    """

    mode: str = "power"
    steps_per_trial: int = 3
    init_val: int = 2
    max_trials: int = 25
    batch_arg_name: str = "batch_size"
    margin: float = 0.05
    max_val: int | None = 8192

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
                f"max_val={self.max_val} is less than init_val={self.init_val}: give a larger one."
            )

    def owners(self, subject: Subject) -> list[Any]:
        """Those whose attribute or hyperparameter is the size.

        Raises:
            ConfigurationError: if a size cannot be searched here; names the fix.
        """
        name, trainer = self.batch_arg_name, subject.trainer
        given = [key for key, loader in subject.loaders.items() if loader is not None]
        if given:
            raise ConfigurationError(
                f"a batch size cannot be searched with {given[0]}={type(subject.loaders[given[0]]).__name__}, whose "
                f"batches are made already: write the loaders' methods in the module or a DataModule, with "
                f"batch_size=self.{name}."
            )
        if trainer.world_size > 1:
            raise ConfigurationError(
                f"a batch size is searched on one process, and there are {trainer.world_size} ranks, of which each may "
                "run out of memory alone: search with devices=1 and strategy='auto'."
            )
        owners = owners_of(name, subject.module, subject.datamodule)
        if not owners:
            raise ConfigurationError(
                f"neither {type(subject.module).__name__} nor its DataModule or hyperparameters have {name}: set "
                f"self.{name} and make the loaders with it, or name another by batch_arg_name."
            )
        return owners

    def search(self, subject: Subject) -> int:
        """Searches with copies; the originals and everything around them stay as they are.

        Raises:
            ConfigurationError: if not even the first size fits.
        """
        self.owners(subject)
        fits, fails, size = 0, math.inf, self.init_val
        most = math.inf if self.max_val is None else self.max_val
        for _ in range(self.max_trials):
            whole = self._try(subject, size)
            if whole is None:
                fails = size
            else:
                fits = size
            if whole or fits == most or (fails < math.inf and self._is_done(fits, int(fails))):
                break
            size = int(min(2 * size, most)) if fails == math.inf else (fits + int(fails)) // 2
        if not fits:
            raise ConfigurationError(f"a batch of {size} does not fit into memory: give a smaller init_val.")
        bounded = fails < math.inf and self.mode.lower() == "binsearch"
        return max(1, int(fits * (1 - self.margin))) if bounded else fits

    def _is_done(self, fits: int, fails: int) -> bool:
        """Nothing is left between the largest that fitted and the smallest that did not."""
        return fails - fits <= 1 if self.mode.lower() == "binsearch" or not fits else True

    def _try(self, subject: Subject, size: int) -> bool | None:
        """Runs some steps of a size. None if it does not fit; True if one batch holds all samples already."""
        steps, kind = self.steps_per_trial, LIMITS[subject.method]
        # A second batch shows that the first does not hold all samples.
        limits: dict[str, Any] = {f"limit_{kind}_batches": max(steps, 2)}
        if subject.method == "fit":
            limits = {"max_steps": steps, "max_epochs": -1, "limit_train_batches": 1.0, "overfit_batches": 0}
            limits["limit_val_batches"] = steps if subject.trainer.arguments.limit_val_batches else 0
        if any(getattr(callback, "cuts_batches", False) for callback in subject.trainer.callbacks):
            # It would cut a batch that does not fit, and every size would seem to.
            limits["accumulate_grad_batches"] = 1
        failed = False
        trainer: Any = None
        try:
            with subject.without_trace():
                trial = subject.copied()
                assign(self.batch_arg_name, size, owners_of(self.batch_arg_name, trial.module, trial.datamodule))
                trainer = trial.run([], **limits)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Its traceback holds the frames, and they hold the tensors that did not fit.
            failed = True
        batches = [] if trainer is None else _batches(trainer, subject.method)
        trainer = trial = None  # type: ignore[assignment]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None if failed else bool(batches) and max(batches) <= 1


def _batches(trainer: Any, method: str) -> list[float]:
    if method == "fit":
        return [trainer.num_training_batches]
    found: list[float] = getattr(trainer, f"num_{LIMITS[method]}_batches")
    return found
