"""What a run is doing at the moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class RunState:
    """The stage of a run.

    Attributes:
        stage: the method that was called: "fit", "validate", "test" or "predict"; None when none runs.
        pass_of: the evaluation that runs now, also within fit: "validation", "test" or "predict".
        sanity_checking: the evaluation is the sanity check before training.
        is_set_up: who takes part in the run is settled: everybody's `setup` was called.
    """

    stage: str | None = None
    pass_of: str | None = None
    sanity_checking: bool = False
    is_set_up: bool = False

    @property
    def fn(self) -> str | None:
        """The method that was called, by Lightning's name of it: the stage."""
        return self.stage

    def settle(self) -> None:
        """Records that everybody is set up: from here on nobody joins or leaves the run."""
        self.is_set_up = True

    @contextmanager
    def evaluating(self, pass_of: str) -> Iterator[None]:
        """Records that an evaluation runs within the block."""
        self.pass_of = pass_of
        yield
        # Not after an error, which is reported as one from here. The next run has a state of its own.
        self.pass_of = None

    @contextmanager
    def checking_sanity(self) -> Iterator[None]:
        """Records that the block is the sanity check; after an error it remains recorded, as in `evaluating`."""
        self.sanity_checking = True
        yield
        self.sanity_checking = False
