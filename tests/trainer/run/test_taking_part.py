"""Callbacks added or removed in `setup`, callbacks that fail in `teardown`, and logging from callbacks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from models import Tiny
from samples import numbered

from leyden import Callback, ConfigurationError, DataModule, Trainer, TrainModule
from leyden.callbacks import LambdaCallback, ModelCheckpoint, Timer


class RecordsHooks(Callback):
    """Records its hooks, and can add another callback in `setup`."""

    def __init__(self, name: str, notes: list[str], adds: Callback | None = None) -> None:
        self.name, self.notes, self.adds = name, notes, adds

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self.notes.append(f"{self.name} setup {stage}")
        if self.adds is not None and self.adds not in trainer.callbacks:
            trainer.callbacks.append(self.adds)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.notes.append(f"{self.name} trains")
        self.log_dict({f"{self.name} began": 1.0})

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self.notes.append(f"{self.name} teardown")


def test_a_callback_added_in_setup_joins_the_run(quiet: Any) -> None:
    notes: list[str] = []
    third = RecordsHooks("c", notes)
    first = RecordsHooks("a", notes, RecordsHooks("b", notes, third))
    trainer = Trainer(**quiet, max_epochs=1, callbacks=[first])
    trainer.fit(Tiny(), numbered(1))
    names = ("a", "b", "c")
    expected = [*(f"{name} setup fit" for name in names), *(f"{name} trains" for name in names)]
    assert notes == expected + [f"{name} teardown" for name in names]
    assert {f"{name} began" for name in names} <= set(trainer.callback_metrics)
    notes.clear()
    trainer.callbacks.remove(third)
    first.adds = None
    trainer.fit(Tiny(), numbered(1))
    assert notes[:3] == ["a setup fit", "b setup fit", "c setup fit"]


def test_a_callback_removed_in_setup_leaves_the_run(quiet: Any) -> None:
    notes: list[str] = []
    other = RecordsHooks("b", notes)

    class Removes(Tiny):
        def setup(self, stage: str) -> None:
            self.trainer.callbacks.remove(other)

    Trainer(**quiet, max_epochs=1, callbacks=[RecordsHooks("a", notes), other]).fit(Removes(), numbered(1))
    assert notes == ["a setup fit", "b setup fit", "a trains", "a teardown"]


def test_adding_a_class_as_a_callback_raises(fit: Any) -> None:
    class Adds(Tiny):
        def setup(self, stage: str) -> None:
            self.trainer.callbacks.append(Timer)  # type: ignore[arg-type]

    with pytest.raises(
        ConfigurationError, match=r"trainer\.callbacks holds the class Timer: pass an instance, Timer\(\)"
    ):
        fit(Adds(), numbered(1))


class FailsAtEnd(Callback):
    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def state_key(self) -> str:
        return self.name

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        raise ValueError(f"teardown of {self.name}")

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        raise ValueError(f"on_exception of {self.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_a_failing_teardown_or_on_exception_does_not_skip_the_others(quiet: Any, fails: bool) -> None:
    notes: list[str] = []

    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return numbered(2)

        def teardown(self, stage: str) -> None:
            raise ValueError("teardown of the data")

        def on_exception(self, exception: BaseException) -> None:
            notes.append("data on_exception")

    class Noting(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if fails:
                raise RuntimeError("the run's own error")
            return super().training_step(batch, batch_idx)

        def teardown(self, stage: str) -> None:
            notes.append("module torn down")

    recorder = LambdaCallback(
        teardown=lambda *_: notes.append("callback torn down"),
        on_exception=lambda *_: notes.append("callback on_exception"),
    )
    trainer = Trainer(**quiet, max_epochs=1, callbacks=[FailsAtEnd("a"), FailsAtEnd("b"), recorder])
    with warnings.catch_warnings(record=True) as caught, pytest.raises((ValueError, RuntimeError)) as error:
        warnings.simplefilter("always")
        trainer.fit(Noting(), datamodule=Data())
    also_raised = [str(w.message).partition("also raised: ")[2] for w in caught if "also raised" in str(w.message)]
    in_teardown = ["teardown of the data", "teardown of a", "teardown of b"]
    if fails:
        assert str(error.value) == "the run's own error"
        assert also_raised == ["on_exception of a", "on_exception of b", *in_teardown]
        assert notes == ["callback on_exception", "data on_exception", "callback torn down", "module torn down"]
    else:
        assert str(error.value) == in_teardown[0] and also_raised == in_teardown[1:]
        assert notes == ["callback torn down", "module torn down"]
    assert trainer.state.stage is None


def test_a_callback_logs_like_a_module(fit: Any) -> None:
    class Logs(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.log("first", float(batch_idx), True)
            self.log_dict({"second": 2.0 * batch_idx}, on_step=False, on_epoch=True, reduce_fx="sum")

        def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
            self.log("score", 0.5)

    callback = Logs()
    saving = ModelCheckpoint(monitor="score")
    trainer = fit(Tiny(), numbered(3), numbered(2), callbacks=[callback, saving], enable_checkpointing=True)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert found == {"first": 2.0, "second": 6.0, "score": 0.5}
    assert set(trainer.progress_bar_metrics) == {"first"}
    # Outside of a run there is nothing to log to, as for a module.
    callback.log("first", 1.0)
