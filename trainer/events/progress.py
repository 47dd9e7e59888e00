"""Progress: every counter of a run, in one object, saved as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from leyden.core.saved_state import SavedState

Phase: TypeAlias = Literal["epoch_start", "stepped", "validated", "settled", "paused", "epoch_end"]

NEEDED = ("epoch", "batch", "global_step")
"""Fields that every checkpoint has."""
MAX_SECONDS = 1e12
"""Upper bound on seconds of training; no run reaches it."""


@dataclass(slots=True)
class Progress:
    """The position of a run. A resume continues from exactly this position.

    `phase` names the last completed part of the run. A checkpoint may be saved in any phase. Once a resume has restored
    loaders, logged values and random state, it continues as follows (tests/trainer/loops/test_phases.py walks the
    table):

        phase                    completed                                             a resume begins with
        -----------------------  ----------------------------------------------------  --------------------
        epoch_start              none of the epoch, not even its first hook            on_train_epoch_start
        stepped, validation_due  a window's step and schedulers, except plateau ones   on_validation_start
        stepped, ended           the same, for an epoch's last window, no validation   on_train_epoch_end
        stepped                  the same, for any other window without a validation   on_train_batch_start
        validated                the window's validation                               lr_scheduler_step
        validated, skipped       a validation that no scheduler follows                on_train_batch_start
        settled                  everything that belongs to a window                   on_train_batch_start
        settled, ended           everything that belongs to an epoch's last window     on_train_epoch_end
        paused                   the last hook of an epoch that a limit interrupted    on_train_batch_start
        epoch_end                the last hook of a complete epoch                     on_train_epoch_start

    Attributes:
        epoch: the current epoch, from 0.
        batch: batches done in this epoch; also the index of the next batch.
        global_step: accumulation windows closed, including those whose step a gradient scaler skipped.
        stepped: windows whose step was not skipped. Schedulers count these.
        batches: batches done in all epochs.
        samples: samples seen by all ranks together in all epochs, if batch sizes are known.
        phase: the last completed part of the run; see the table.
        cut: True if the epoch ended before its last batch: a hook returned -1, or the loader was shorter than its
            length.
        ended: True if the last closed window ended its epoch.
        skipped: True if no scheduler follows the last closed window: a gradient scaler skipped its step, the run was
            rolled back after it, or the end of the run triggered the validation.
        validation_due: True if the last closed window still has to be followed by a validation.
        validations: validation passes done, without the sanity check and the pass of `validate_at_start`.
        validated_at_start: True once the pass of `validate_at_start` is done.
        validation_batches: batches of all validation passes. Loggers receive values of validation steps under this
            step.
        seconds: training time in seconds, over all resumes.
        seconds_at_validation: training time at the last validation, for intervals in time.
        bad_samples: samples that raised and were left out, over all ranks (`on_bad_sample="skip"`).
        passed_over: batches that the weights lack since a rollback, undone or skipped by it (`Trainer.roll_back`).
        exact: False if the checkpoint was saved inside a window (`OnExceptionCheckpoint`). A resume repeats that
            window.
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
    validated_at_start: bool = False
    validation_batches: int = 0
    seconds: float = 0.0
    seconds_at_validation: float = 0.0
    exact: bool = True
    bad_samples: int = 0
    passed_over: int = 0

    @property
    def is_inside(self) -> bool:
        """True between the first and the last hook of an epoch."""
        return self.phase not in ("epoch_start", "epoch_end")

    @property
    def epochs_done(self) -> int:
        """Number of completed epochs."""
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
        """Counts a batch that is skipped without training; `count_batch` has counted it already."""
        self.passed_over += 1

    def count_window(self, stepped: bool) -> None:
        """Counts a closed window; `stepped` is False if a scaler skipped its step."""
        self.global_step += 1
        self.stepped += stepped

    def add_time(self, seconds: float) -> None:
        """Adds training time."""
        self.seconds += seconds

    # phases -----------------------------------------------------------------------------------------------------------
    def begin_epoch(self) -> None:
        """Records that the epoch's first hook has run."""
        self.phase = "settled"

    def end_window(self, ended: bool, validation_due: bool, skipped: bool) -> None:
        """Records that a window has stepped. Its validation and plateau schedulers follow."""
        self.phase, self.ended, self.validation_due, self.skipped = "stepped", ended, validation_due, skipped

    def begin_validation(self) -> None:
        """Records the time at which a validation starts, for intervals in time."""
        self.seconds_at_validation = self.seconds

    def count_validation(self, batches: int) -> None:
        """Records a finished validation pass; `batches` is the total over all passes."""
        self.validation_batches = batches
        if self.phase == "epoch_start":
            self.validated_at_start = True
        else:
            self.phase = "validated"
            self.validations += 1

    def end_validation(self) -> None:
        """Records that the window's validation is done, or that the window has none."""
        self.phase, self.validation_due = "validated", False

    def settle(self) -> None:
        """Records that everything after the window's step is done."""
        self.phase = "settled"

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The context of a validation that belongs to no window. A resume inside it steps no scheduler afterwards."""
        previous, self.skipped = self.skipped, True
        try:
            yield
        finally:
            self.skipped, self.phase = previous, "settled"

    def cut_short(self) -> None:
        """Records that the epoch ended before its last batch."""
        self.cut = True

    def end_epoch(self, complete: bool) -> None:
        """Records that the epoch's hooks have run, except the closing ones; `complete` is False if a limit cut it."""
        self.phase = "epoch_end" if complete else "paused"

    def next_epoch(self) -> None:
        """Advances to the next epoch."""
        self.epoch += 1
        self.batch, self.cut, self.ended, self.phase = 0, False, False, "epoch_start"

    def repeat_epoch(self) -> None:
        """Returns to the start of the current epoch, because its loaders cannot be restored."""
        self.batch, self.phase = 0, "epoch_start"

    def at_window_start(self, batch: int, samples: int, bad_samples: int) -> Progress:
        """Returns the progress at the start of the open window.

        Args:
            batch: index of the window's first batch in the epoch.
            samples: number of samples seen before the window.
            bad_samples: number of samples left out before the window.
        """
        start = dataclasses.replace(self, batch=batch, samples=samples, bad_samples=bad_samples)
        return dataclasses.replace(start, batches=self.batches - self.batch + batch, phase="settled", exact=False)

    def go_back(self, now: Progress, before: Progress) -> None:
        """Rolls back the steps but not the data. No plateau scheduler follows the undone step.

        Args:
            now: the current progress of the run.
            before: the progress saved in the checkpoint that the run is rolled back to.
        """
        trained = before.batches - before.passed_over
        rolled_back = {
            "global_step": before.global_step,
            "stepped": before.stepped,
            "passed_over": now.batches - trained,
            "skipped": True,
        }
        Progress.__init__(self, **{**now.to_dict(), **rolled_back})

    # as JSON ----------------------------------------------------------------------------------------------------------
    def continue_from(self, saved: Progress) -> None:
        """Continues from a saved position. A position inside a window repeats that window, so the resume is exact."""
        Progress.__init__(self, **{**saved.to_dict(), "exact": True})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Returns the progress that `to_dict` wrote. Fields of later versions are ignored.

        Raises:
            StateError: if a field has the wrong type or is out of range; the message names the field.
        """
        saved = SavedState(values)
        read: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            name, default = field.name, field.default
            if name not in saved and name not in NEEDED:
                # A checkpoint of an earlier version lacks newer fields.
                continue
            if name == "phase":
                read[name] = saved.text(name, among=get_args(Phase))
            elif isinstance(default, bool):
                read[name] = saved.flag(name)
            elif isinstance(default, float):
                read[name] = saved.number(name, least=0.0, most=MAX_SECONDS)
            else:
                read[name] = saved.integer(name, least=0, most=2**62)
        return cls(**read)
