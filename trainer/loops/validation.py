"""The validation inside a fit: the sanity check before training, when a validation is due, and running it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from leyden.strategies.errors import ConfigurationError
from leyden.trainer.data.rng import isolated_rng
from leyden.trainer.loops.evaluate import EvaluationLoop

if TYPE_CHECKING:
    from leyden.trainer.loops.agreement import Agreement
    from leyden.trainer.loops.clock import Clock
    from leyden.trainer.run.state import Run


class Validation:
    """When and how a fit validates.

    Args:
        run: of the fit.
        clock: the training time.
        agreement: what the ranks have agreed on; None where there is one rank.

    Attributes:
        loop: the pass over the validation loaders; None until `load`, and where the fit has nothing to validate on.
    """

    def __init__(self, run: Run, clock: Clock, agreement: Agreement | None) -> None:
        self._run = run
        self._arguments = run.arguments
        self._progress = run.progress
        self._clock = clock
        self._agreement = agreement
        self._every: int | None = None
        """Batches between two validations; None for the end of an epoch, or an interval in time."""
        self.loop: EvaluationLoop | None = None
        self._before: dict[str, Any] | None = None
        self._aside = False
        self._validated = -1
        """Batches that had been trained at the last pass."""

    def load(self, again: bool = False) -> None:
        """Gets the validation loaders, unless they are there."""
        if self.loop is None or again:
            loaders = self._run.loaders.evaluation("val")
            has_batches = any(limit != 0 for _, limit in loaders)
            self.loop = EvaluationLoop(self._run, "validation", loaders) if has_batches else None

    def sanity_check(self) -> None:
        """Runs a few validation batches before the first step, which leave no trace in counters or random numbers."""
        run, count = self._run, self._arguments.num_sanity_val_steps
        if count == 0 or self._arguments.limit_val_batches == 0 or not run.loaders.has("val"):
            return
        with run.state.checking_sanity():
            run.hooks.fire_all("on_sanity_check_start")
            self.load()
            if self.loop is not None:
                with self._remembering(), isolated_rng([cursor.loader for cursor, _ in self.loop.loaders]):
                    self.loop.run(limit=None if count == -1 else count)
            run.hooks.fire_all("on_sanity_check_end")
        run.logs.clear()

    def set_interval(self, num_batches: int | None) -> None:
        """Works out how many batches lie between two validations, by `val_check_interval`.

        Args:
            num_batches: batches in an epoch; None where the loader does not know.

        Raises:
            ConfigurationError: if the interval is longer than an epoch, shorter than a batch, or a fraction of an
                epoch whose length is not known.
        """
        interval, total = self._arguments.val_check_interval, num_batches
        self._every = None
        if isinstance(interval, int):
            if self._arguments.check_val_every_n_epoch is not None and total is not None and interval > total:
                raise ConfigurationError(
                    f"val_check_interval={interval} is more than the {total} batches of an epoch: give a smaller "
                    "number, or check_val_every_n_epoch=None to count over epochs."
                )
            self._every = interval
        elif isinstance(interval, float) and interval != 1.0:
            if total is None:
                raise ConfigurationError(
                    f"val_check_interval={interval} is a fraction of an epoch, and the training loader has no length: "
                    "give a number of batches."
                )
            if total * interval < 1:
                raise ConfigurationError(
                    f"val_check_interval={interval} of {total} batches is less than one batch: give at least "
                    f"{1 / total:.3g}."
                )
            self._every = math.floor(total * interval)

    def is_due(self, ends_epoch: bool, window_start: int) -> bool:
        """True if the window that closed reached or passed a point of validation.

        Args:
            ends_epoch: it is the last one of its epoch.
            window_start: index in the epoch of its first batch.
        """
        progress, every_epochs = self._progress, self._arguments.check_val_every_n_epoch
        if not self._in_this_epoch():
            return False
        if self._clock.decides_on_validation:
            agreement = self._agreement
            return self._clock.validation_is_due() if agreement is None else agreement.validation_is_due
        if self._every is None:
            return ends_epoch
        done = progress.batch if every_epochs is not None else progress.batches
        before = done - (progress.batch - window_start)
        return done // self._every > before // self._every

    def decide(self, window_start: int | None) -> None:
        """Decides in a resumed run whether a validation follows the window that was closed last.

        Args:
            window_start: index in the epoch of its first batch; None where the checkpoint has decided.
        """
        if window_start is not None:
            ended = self._progress.ended
            self._progress.end_window(ended, self.is_due(ended, window_start), skipped=False)

    def _in_this_epoch(self) -> bool:
        """True if the fit validates in this epoch."""
        every = self._arguments.check_val_every_n_epoch
        return self.loop is not None and (every is None or (self._progress.epoch + 1) % every == 0)

    def run_at_stop(self) -> None:
        """Validates where the run is asked to stop inside an epoch, unless it has just validated.

        A run that was not stopped there would not validate, so a resume must go on as if this pass had not been: it
        leaves no trace in loaders and random numbers, no scheduler follows it, and it is not run again.
        """
        if not self._in_this_epoch() or self._validated == self._progress.batches:
            return
        self._aside = True
        try:
            with self._progress.aside():
                self.run()
        finally:
            self._aside = False

    def run(self) -> bool:
        """Validates; False if a signal interrupted it, so that it is still to be done."""
        if self.loop is None:
            # It was due in the checkpoint's run, and this one has none.
            return True
        self._clock.note()
        # What swaps averaged weights in for a validation, does so in it.
        self._run.saves.finish_copies()
        self._progress.begin_validation()
        self._validated = self._progress.batches
        done = False
        with self._remembering() as before:
            undo = self.loop.undoing(before)
            try:
                done = self.loop.run() is not None
                if self._aside:
                    undo()
            finally:
                if not done:
                    # After an error the device may be unusable, and the error is what counts.
                    with suppress(Exception):
                        undo()
        if self._agreement is not None:
            self._agreement.exchange()
        return done

    @contextmanager
    def _remembering(self) -> Iterator[dict[str, Any]]:
        """Keeps what a pass changes as it was before, for checkpoints saved inside the block."""
        assert self.loop is not None
        self._before = before = self.loop.snapshot()
        try:
            yield before
        finally:
            self._before = None

    def before_pass(self) -> dict[str, Any]:
        """Returns "metrics" and "rng" from before the pass that runs, if a resume begins there; else nothing."""
        before = self._before if self._runs_again else None
        return {} if before is None else {name: before[name] for name in ("metrics", "rng")}

    @property
    def _runs_again(self) -> bool:
        """True if a resume begins before the pass that runs."""
        return self._run.state.sanity_checking or self._aside or self._progress.phase == "stepped"

    def loader_states(self) -> list[dict[str, Any]]:
        """Where the validation loaders stand between two passes."""
        if self._before is not None and self._runs_again:
            found: list[dict[str, Any]] = self._before["loaders"]
            return found
        return [] if self.loop is None else self.loop.loader_states()

    def load_loader_states(self, states: list[dict[str, Any]]) -> None:
        """Restores what `loader_states` returned."""
        if self.loop is not None:
            self.loop.load_loader_states(states)
