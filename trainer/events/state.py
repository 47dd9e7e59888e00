"""RunState: the stage that a run is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class RunState:
    """The stage of a run.

    Attributes:
        stage: the Trainer method that is running: "fit", "validate", "test" or "predict"; None outside of a run.
        pass_of: the evaluation that is running, also within fit: "validation", "test" or "predict"; None without one.
        sanity_checking: True while the evaluation is the sanity check before training.
        is_set_up: True once every `setup` has been called. From then on, the participants of the run are fixed.
    """

    stage: str | None = None
    pass_of: str | None = None
    sanity_checking: bool = False
    is_set_up: bool = False

    @property
    def fn(self) -> str | None:
        """Lightning's name for `stage`."""
        return self.stage

    def settle(self) -> None:
        """Records that every `setup` has been called. No callback joins or leaves the run after this."""
        self.is_set_up = True

    @contextmanager
    def evaluating(self, pass_of: str) -> Iterator[None]:
        """Records that an evaluation runs within the block."""
        self.pass_of = pass_of
        yield
        # Not in a `finally`: an error is reported with the stage it came from. The next run has a new state.
        self.pass_of = None

    @contextmanager
    def checking_sanity(self) -> Iterator[None]:
        """Records that the block is the sanity check. As in `evaluating`, an error leaves the record in place."""
        self.sanity_checking = True
        yield
        self.sanity_checking = False
