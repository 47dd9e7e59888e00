"""Validation inside a fit: the sanity check before training, the schedule, and the validation pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from leyden.core.errors import ConfigurationError
from leyden.data.rng import isolated_rng
from leyden.trainer.logging.values import read_back
from leyden.trainer.loops.evaluate import EvaluationLoop
from leyden.trainer.starting.uncalled_hooks import warn_of_unlogged_monitors

if TYPE_CHECKING:
    from leyden.trainer.loops.agreement import Agreement
    from leyden.trainer.loops.clock import Clock
    from leyden.trainer.run import Run


class Validation:
    """When and how a fit validates.

    Args:
        run: the run of the fit.
        clock: the training time.
        agreement: the requests shared by all ranks; None with a single rank.

    Attributes:
        loop: the loop over the validation loaders; None before `load`, and if the fit has no validation batches.
    """

    def __init__(self, run: Run, clock: Clock, agreement: Agreement | None) -> None:
        self._run = run
        self._arguments = run.arguments
        self._progress = run.progress
        self._clock = clock
        self._agreement = agreement
        self._every: int | None = None
        """Batches between two validations; None to validate at the end of an epoch or by time."""
        self.loop: EvaluationLoop | None = None
        self._snapshot: dict[str, Any] | None = None
        """During a pass, the state from before it."""
        self._is_aside = False
        """True during a pass that belongs to no window: that of `run_at_start` or `run_at_stop`."""
        self._validated_at = -1
        """`progress.batches` at the last pass."""

    def load(self) -> None:
        """Creates the validation loaders."""
        loaders = self._run.loaders.evaluation("val")
        has_batches = any(limit != 0 for _, limit in loaders)
        self.loop = EvaluationLoop(self._run, "validation", loaders) if has_batches else None

    def reload_if_due(self) -> None:
        """Creates the loaders again at the start of an epoch that validates (`reload_dataloaders_every_n_epochs`).

        Computed from the epoch alone, so that a resumed run reloads in the same epochs.
        """
        every, epoch = self._arguments.reload_dataloaders_every_n_epochs, self._progress.epoch
        if every and self._validates_in_this_epoch():
            last_validated = max(0, epoch - (self._arguments.check_val_every_n_epoch or 1))
            if epoch // every > last_validated // every:
                self.load()

    def sanity_check(self) -> None:
        """Runs a few validation batches before the first step. Counters and random states stay unchanged.

        `validate_at_start` runs all of them instead.
        """
        run, count = self._run, self._arguments.num_sanity_val_steps
        if self._arguments.validate_at_start and self._arguments.limit_train_batches != 0:
            return
        if count == 0 or self._arguments.limit_val_batches == 0 or not run.loaders.has("val"):
            return
        with run.state.checking_sanity():
            run.hooks.fire_all("on_sanity_check_start")
            if self.loop is not None:
                with self._keeping_snapshot(), isolated_rng([cursor.loader for cursor, _ in self.loop.loaders]):
                    self.loop.run(limit=None if count == -1 else count)
            run.hooks.fire_all("on_sanity_check_end")
        warn_of_unlogged_monitors(run)
        run.logs.clear()

    def set_interval(self, num_batches: int | None) -> None:
        """Computes the number of batches between two validations from `val_check_interval`.

        Args:
            num_batches: batches per epoch; None if the loader has no length.

        Raises:
            ConfigurationError: if the interval is longer than an epoch or shorter than a batch, or if it is a fraction
                and the epoch's length is unknown.
        """
        interval, total = self._arguments.val_check_interval, num_batches
        self._every = None
        if self.loop is None:
            return
        if isinstance(interval, int):
            if self._arguments.check_val_every_n_epoch is not None and total is not None and interval > total:
                raise ConfigurationError(
                    f"val_check_interval={interval} exceeds the {total} batches of an epoch. Use a smaller number, or "
                    "check_val_every_n_epoch=None to count batches across epochs."
                )
            self._every = interval
        elif isinstance(interval, float) and interval != 1.0:
            if total is None:
                raise ConfigurationError(
                    f"val_check_interval={interval} is a fraction of an epoch, but the training loader has no length: "
                    "give a number of batches."
                )
            if total * interval < 1:
                raise ConfigurationError(
                    f"val_check_interval={interval} of {total} batches is less than one batch: give at least "
                    f"{1 / total:.3g}."
                )
            self._every = math.floor(total * interval)

    def is_due(self, ends_epoch: bool, window_start: int) -> bool:
        """True if the closed window reached a point of the validation schedule.

        Args:
            ends_epoch: True if the window is the last of its epoch.
            window_start: index within the epoch of the window's first batch.
        """
        progress, every_epochs = self._progress, self._arguments.check_val_every_n_epoch
        if not self._validates_in_this_epoch():
            return False
        if self._clock.schedules_validation:
            agreement = self._agreement
            return self._clock.validation_is_due() if agreement is None else agreement.validation_is_due
        if self._every is None:
            return ends_epoch
        done = progress.batch if every_epochs is not None else progress.batches
        before = done - (progress.batch - window_start)
        return done // self._every > before // self._every

    def decide(self, window_start: int | None) -> None:
        """Decides in a resumed run whether a validation is due after the last closed window.

        Args:
            window_start: index within the epoch of the window's first batch; None if the checkpoint has the decision.
        """
        if window_start is not None:
            ended = self._progress.ended
            self._progress.end_window(ended, self.is_due(ended, window_start), skipped=False)

    def _validates_in_this_epoch(self) -> bool:
        every = self._arguments.check_val_every_n_epoch
        return self.loop is not None and (every is None or (self._progress.epoch + 1) % every == 0)

    def run_at_start(self) -> None:
        """Validates the weights before the first step, if `validate_at_start` asks for it. A resume does not repeat it.

        Training continues as if the pass had not happened, with the same random numbers. Its values go to the loggers,
        and are printed; no scheduler or callback that monitors them sees them later.
        """
        run, progress = self._run, self._progress
        if not self._arguments.validate_at_start or progress.batches or progress.validated_at_start:
            return
        if self.loop is None:
            if self._arguments.limit_val_batches != 0:
                raise ConfigurationError(
                    "validate_at_start=True needs a validation_step and a validation loader: define them, or leave it "
                    "out."
                )
            return
        before = run.logs.callback_metrics()
        with run.logs.apart("validation"):
            is_done = self._run_aside()
            warn_of_unlogged_monitors(run)
            if is_done and run.strategy.ranks.is_global_zero:
                found = read_back({k: v for k, v in run.logs.callback_metrics().items() if k not in before})
                run.report("step 0      " + ", ".join(f"{name}={value:.4g}" for name, value in found.items()))

    def run_at_stop(self) -> None:
        """Validates at a stop request inside an epoch, unless these weights have just been validated.

        An uninterrupted run would not validate at this point, so a resume must continue as if the pass had not
        happened: loaders and random states are set back, no scheduler steps after it, and it is never repeated.
        """
        if not self._validates_in_this_epoch() or self._validated_at == self._progress.batches:
            return
        with self._progress.aside():
            self._run_aside()

    def _run_aside(self) -> bool:
        self._is_aside = True
        try:
            return self.run()
        finally:
            self._is_aside = False

    def run(self) -> bool:
        """Runs a validation pass; returns False if a signal interrupted it and it is still pending."""
        if self.loop is None:
            # It was due in the saved run, but this run has no validation loader.
            return True
        self._clock.update()
        # Callbacks may swap averaged weights in during the pass, so pending copies of the weights must finish first.
        self._run.saves.finish_copies()
        self._progress.begin_validation()
        self._validated_at = self._progress.batches
        done = False
        with self._keeping_snapshot() as snapshot:
            undo = self.loop.undoing(snapshot)
            try:
                done = self.loop.run() is not None
                if self._is_aside:
                    undo()
            finally:
                if not done:
                    # After an error the device may be unusable. The original error must not be masked.
                    with suppress(Exception):
                        undo()
        if self._agreement is not None:
            self._agreement.exchange()
        return done

    @contextmanager
    def _keeping_snapshot(self) -> Iterator[dict[str, Any]]:
        """Keeps a snapshot of the state that a pass changes, for checkpoints saved during the pass."""
        assert self.loop is not None
        self._snapshot = snapshot = self.loop.snapshot()
        try:
            yield snapshot
        finally:
            self._snapshot = None

    def before_pass(self) -> dict[str, Any]:
        """Returns "metrics" and "rng" from before the current pass if a resume begins before it; otherwise {}."""
        snapshot = self._snapshot if self._resume_precedes_pass else None
        return {} if snapshot is None else {name: snapshot[name] for name in ("metrics", "rng")}

    @property
    def _resume_precedes_pass(self) -> bool:
        """True if a resume from a checkpoint saved now begins before the current pass."""
        return self._run.state.sanity_checking or self._is_aside or self._progress.phase == "stepped"

    def loader_states(self) -> list[dict[str, Any]]:
        """Returns the state that the validation loaders keep between two passes."""
        if self._snapshot is not None and self._resume_precedes_pass:
            loaders: list[dict[str, Any]] = self._snapshot["loaders"]
            return loaders
        return [] if self.loop is None else self.loop.loader_states()

    def load_loader_states(self, states: list[dict[str, Any]]) -> None:
        """Restores states returned by `loader_states`."""
        if self.loop is not None:
            self.loop.load_loader_states(states)
