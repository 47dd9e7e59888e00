"""`Trainer.sample_indices`: the samples of a batch and of a window, in hooks and in error messages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import QUIET, Tiny
from samples import Indices, Stream
from torch.utils.data import DataLoader

from leyden import Callback, Trainer
from leyden.callbacks import NonFiniteError, NonFiniteGuard


class Numbered(Indices):
    """Samples of two features, both of which are the index; some are infinite."""

    def __init__(self, size: int, *bad: int) -> None:
        super().__init__(size)
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), math.inf if index in self.bad else float(index))


class RecordsSamples(Callback):
    """Records in each hook the samples of the batch, and the value of `sample_indices`."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []
        self.batches: list[Any] = []
        self.windows: list[Any] = []
        self.others: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.read.append(batch[:, 0].int().tolist())
        self.batches.append(trainer.sample_indices())

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.windows.append(trainer.sample_indices(window=True))
        self.others["step"] = trainer.sample_indices()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert trainer.sample_indices() == self.batches[-1]
        if trainer.window.closes:
            assert trainer.sample_indices(window=True, all_ranks=True) == self.windows[-1]

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.others["validation"] = trainer.sample_indices()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.others["epoch"] = trainer.sample_indices(window=True)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.others["start"] = trainer.sample_indices()


def test_every_hook_sees_the_samples_of_its_batch_and_window() -> None:
    torch.manual_seed(0)
    recorder = RecordsSamples()
    trainer = Trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=[recorder], **QUIET)
    trainer.fit(Tiny(), DataLoader(Numbered(10), 2, shuffle=True), DataLoader(Numbered(4), 2))
    assert recorder.batches == recorder.read and len(recorder.read) == 10
    assert recorder.windows == [
        [index for batch in recorder.read[start:stop] for index in batch]
        for start, stop in [(0, 2), (2, 4), (4, 5), (5, 7), (7, 9), (9, 10)]
    ]
    assert recorder.others == {
        "start": None,
        "step": recorder.read[-1],
        "validation": recorder.read[-1],
        "epoch": recorder.read[-1],
    }
    assert sorted(recorder.read[0] + recorder.read[1] + recorder.read[2] + recorder.read[3] + recorder.read[4]) == list(
        range(10)
    )


def test_sample_indices_is_none_outside_a_fit_and_for_streams() -> None:
    trainer = Trainer(max_epochs=1, **QUIET)
    assert trainer.sample_indices() is None
    recorder = RecordsSamples()
    trainer = Trainer(max_epochs=1, callbacks=[recorder], **QUIET)
    trainer.fit(Tiny(), DataLoader(Stream([torch.ones(2)] * 4), 2))
    assert recorder.batches == [None, None]


def test_batches_drawn_by_one_step_form_its_window() -> None:
    class Draws(Tiny):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            drawn = [next(dataloader_iter)[0] for _ in range(2)]
            return self(torch.cat(drawn)).mean()

    found = []

    class RecordsWindows(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            found.append((trainer.sample_indices(), trainer.sample_indices(window=True)))

    Trainer(max_epochs=1, callbacks=[RecordsWindows()], **QUIET).fit(Draws(), DataLoader(Numbered(8), 2))
    assert found == [([2, 3], [0, 1, 2, 3]), ([6, 7], [4, 5, 6, 7])]


def test_the_error_for_a_non_finite_step_names_the_samples_of_its_window() -> None:
    data = DataLoader(Numbered(12, 7), 2)
    trainer = Trainer(max_epochs=1, accumulate_grad_batches=2, callbacks=[NonFiniteGuard()], **QUIET)
    with pytest.raises(NonFiniteError, match="step 2 .*Its samples are 4, 5, 6, 7 of the data set") as caught:
        trainer.fit(Tiny(), data)
    assert any("its samples are 6, 7 of the data set" in note for note in getattr(caught.value, "__notes__", []))
    trainer = Trainer(max_epochs=1, callbacks=[NonFiniteGuard("skip")], **QUIET)
    with pytest.warns(UserWarning, match="step 4 .*Its samples are 6, 7 of the data set"):
        trainer.fit(Tiny(), data)
