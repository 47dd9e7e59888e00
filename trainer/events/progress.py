"""Progress: every counter of a run, in one object, saved as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from leyden.strategies.saved_state import SavedState

Phase: TypeAlias = Literal["epoch_start", "stepped", "validated", "settled", "paused", "epoch_end"]

NEEDED = ("epoch", "batch", "global_step")
"""Entries that every checkpoint has."""
LONGEST = 1e12
"""Seconds of training that no run reaches."""


@dataclass(slots=True)
class Progress:
    """Where a run stands. A resume continues from exactly here.

    `phase` is what was done last. A checkpoint may be saved in every phase, and this is where a resume from it begins,
    once loaders, logged values and random numbers are back (tests/trainer/loops/test_phases.py walks the table):

        phase                    what is done                                          a resume begins with
        -----------------------  ----------------------------------------------------  --------------------
        epoch_start              nothing of the epoch: its first hook is not over      on_train_epoch_start
        stepped, validation_due  the window's step, and schedulers that wait for none  on_validation_start
        stepped, ended           the same for the epoch's last window, not validated   on_train_epoch_end
        stepped                  the same for another window that is not validated     on_train_batch_start
        validated                the window's validation                               lr_scheduler_step
        validated, skipped       a validation that no scheduler follows                on_train_batch_start
        settled                  all that belongs to a window                          on_train_batch_start
        settled, ended           all that belongs to the last window of the epoch      on_train_epoch_end
        paused                   the last hook of an epoch that a limit interrupted    on_train_batch_start
        epoch_end                the last hook of an epoch that is over                on_train_epoch_start

    Attributes:
        epoch: the current epoch, from 0.
        batch: batches done in this epoch (the next batch has this index).
        global_step: accumulation windows closed, whether a scaler skipped their step or not.
        stepped: windows whose step was not skipped: what schedulers count.
        batches: batches done in all epochs.
        samples: samples seen by all ranks together in all epochs, where the size of batches is known.
        phase: what was done last; see the table.
        cut: the epoch is over before its last batch (a hook returned -1, or the loader was shorter than it said).
        ended: the window that was closed last ended its epoch.
        skipped: no scheduler follows that window: a scaler skipped its step, the run went back after it, or the run's
            stop triggered the validation.
        validation_due: a validation belongs to the window that was closed last.
        validations: validation passes done (the sanity check does not count).
        validation_batches: batches of these passes: the step under which loggers are given a validation step's values.
        seconds: training time, over all resumes.
        seconds_at_validation: training time at the last validation, for intervals in time.
        bad_samples: samples that all ranks together left out since they raised (`on_bad_sample="skip"`).
        passed_over: batches whose steps the weights are without, since the run has gone back (`Trainer.roll_back`).
        exact: False if it was saved in the middle of a window (`OnExceptionCheckpoint`): a resume repeats that window.
    """

    epoch: int = 0
    batch: int = 0
    global_step: int = 0
    stepped: int = 0
    batches: int = 0
    samples: int = 0
    phase: Phase = "epoch_start"
    cut: bool = False
    ended: bool = False
    skipped: bool = False
    validation_due: bool = False
    validations: int = 0
    validation_batches: int = 0
    seconds: float = 0.0
    seconds_at_validation: float = 0.0
    exact: bool = True
    bad_samples: int = 0
    passed_over: int = 0

    @property
    def is_inside(self) -> bool:
        """True inside an epoch: its first hook is over, and its last one is not."""
        return self.phase not in ("epoch_start", "epoch_end")

    @property
    def epochs_done(self) -> int:
        """Epochs that are over."""
        return self.epoch + (self.phase == "epoch_end")

    # counting ---------------------------------------------------------------------------------------------------------
    def count_batch(self, samples: int) -> None:
        """Counts a finished batch; `samples` is its size over all ranks."""
        self.batch += 1
        self.batches += 1
        self.samples += samples

    def count_bad(self, samples: int) -> None:
        """Counts samples that were left out of a batch, over all ranks."""
        self.bad_samples += samples

    def count_passed_over(self) -> None:
        """Counts a batch, counted already, that is not trained."""
        self.passed_over += 1

    def count_window(self, stepped: bool) -> None:
        """Counts a closed window; `stepped` is False if a scaler skipped its step."""
        self.global_step += 1
        self.stepped += stepped

    def add_time(self, seconds: float) -> None:
        """Adds training time."""
        self.seconds += seconds

    # from phase to phase ----------------------------------------------------------------------------------------------
    def begin_epoch(self) -> None:
        """Records that the epoch's first hook has run."""
        self.phase = "settled"

    def end_window(self, ended: bool, validation_due: bool, skipped: bool) -> None:
        """Records that a window has stepped, and that its validation and schedulers are to come."""
        self.phase, self.ended, self.validation_due, self.skipped = "stepped", ended, validation_due, skipped

    def begin_validation(self) -> None:
        """Records the time at which a validation starts, for intervals in time."""
        self.seconds_at_validation = self.seconds

    def count_validation(self, batches: int) -> None:
        """Records a finished validation pass; `batches` is the total of all passes."""
        self.phase = "validated"
        self.validations += 1
        self.validation_batches = batches

    def end_validation(self) -> None:
        """Records that the window's validation is done, or that it has none."""
        self.phase, self.validation_due = "validated", False

    def settle(self) -> None:
        """Records that everything after the window's step is done."""
        self.phase = "settled"

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The context of a validation that belongs to no window: a resume steps no scheduler after it."""
        before, self.skipped = self.skipped, True
        try:
            yield
        finally:
            self.skipped, self.phase = before, "settled"

    def cut_short(self) -> None:
        """Records that the epoch ended before its last batch."""
        self.cut = True

    def end_epoch(self, complete: bool) -> None:
        """Records that the epoch's hooks have run, but not the closing ones; `complete` if no limit cut it."""
        self.phase = "epoch_end" if complete else "paused"

    def next_epoch(self) -> None:
        """Goes on to the next epoch."""
        self.epoch += 1
        self.batch, self.cut, self.ended, self.phase = 0, False, False, "epoch_start"

    def repeat_epoch(self) -> None:
        """Goes back to the start of this epoch, whose loaders are not restored."""
        self.batch, self.phase = 0, "epoch_start"

    def at_window_start(self, batch: int, samples: int, bad_samples: int) -> Progress:
        """Where the run stood at the start of the window that is open.

        Args:
            batch: index in the epoch of its first batch.
            samples: seen before it.
            bad_samples: left out before it.
        """
        start = dataclasses.replace(self, batch=batch, samples=samples, bad_samples=bad_samples)
        return dataclasses.replace(start, batches=self.batches - self.batch + batch, phase="settled", exact=False)

    def go_back(self, now: Progress, before: Progress) -> None:
        """Goes back in the steps but not in the data. No plateau is judged by a step that is undone.

        Args:
            now: where the run stands.
            before: where it stood at the checkpoint to which it has gone back.
        """
        trained = before.batches - before.passed_over
        back = {"global_step": before.global_step, "stepped": before.stepped, "passed_over": now.batches - trained}
        Progress.__init__(self, **{**now.to_dict(), **back, "skipped": True})

    # as JSON ----------------------------------------------------------------------------------------------------------
    def continue_from(self, saved: Progress) -> None:
        """Continues from a saved position. One inside a window repeats that window, so the result is exact."""
        Progress.__init__(self, **{**saved.to_dict(), "exact": True})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Reads what `to_dict` wrote; entries of a later version are ignored.

        Raises:
            StateError: if an entry is of another kind, or out of range; names it.
        """
        saved = SavedState(values)
        read: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            name, default = field.name, field.default
            if name not in saved and name not in NEEDED:
                # An earlier version did not have it.
                continue
            if name == "phase":
                read[name] = saved.text(name, among=get_args(Phase))
            elif isinstance(default, bool):
                read[name] = saved.flag(name)
            elif isinstance(default, float):
                read[name] = saved.number(name, least=0.0, most=LONGEST)
            else:
                read[name] = saved.integer(name, least=0, most=2**62)
        return cls(**read)
