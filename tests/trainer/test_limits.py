"""Limits on batches, steps, epochs and time; `fast_dev_run`, `barebones` and the sanity check."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Logging, Tiny
from samples import numbered
from torch.utils.data import DataLoader

from leyden import Callback, ConfigurationError, Trainer
from leyden.callbacks import (
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    Timer,
)
from leyden.callbacks.loggers.silent import DummyLogger


# limits on batches ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("limit", "count"), [(1.0, 8), (0.5, 4), (0.3, 2), (3, 3), (100, 8), (1, 1)])
def test_limit_train_batches_limits_each_epoch(fit: Any, limit: Any, count: int) -> None:
    module = Tiny()
    trainer = fit(module, numbered(8), limit_train_batches=limit, max_epochs=2)
    assert module.trained == [*range(count)] * 2
    assert trainer.num_training_batches == count and trainer.global_step == 2 * count


@pytest.mark.parametrize(("limit", "count"), [(1.0, 4), (0.5, 2), (3, 3), (0, 0), (0.0, 0)])
def test_limit_val_batches_limits_each_validation(fit: Any, limit: Any, count: int) -> None:
    module = Tiny()
    trainer = fit(module, numbered(2), numbered(4), limit_val_batches=limit, num_sanity_val_steps=0)
    assert module.validated == [*range(count)]
    assert trainer.num_val_batches == ([count] if count else [])
    assert trainer.enable_validation == (count > 0)


def test_limit_test_and_predict_batches_limit_each_run(quiet: Any) -> None:
    trainer = Trainer(**quiet, limit_test_batches=0.5, limit_predict_batches=3)
    [values] = trainer.test(Tiny(), numbered(8), verbose=False)
    assert values == {"seen": 1.5} and trainer.num_test_batches == [4]
    outputs = trainer.predict(Tiny(), numbered(8))
    assert [float(o) for o in outputs or []] == [0.0, 2.0, 4.0] and trainer.num_predict_batches == [3]


@pytest.mark.parametrize(("amount", "count"), [(3, 3), (0.25, 2)])
def test_overfit_batches_validates_on_the_batches_that_it_trains_on(fit: Any, amount: Any, count: int) -> None:
    data: Any = torch.arange(8.0).repeat_interleave(2).view(8, 2)
    module = Tiny()
    with pytest.warns(UserWarning, match="overfit_batches turned shuffling off"):
        fit(
            module,
            DataLoader(data, batch_size=1, shuffle=True),
            DataLoader(data + 100),
            overfit_batches=amount,
            max_epochs=2,
            num_sanity_val_steps=0,
        )
    assert module.trained == [*range(count)] * 2 == module.validated


def test_overfit_batches_validates_inside_an_epoch_with_workers_of_its_own(fit: Any) -> None:
    data: Any = torch.arange(8.0).repeat_interleave(2).view(8, 2)
    module = Tiny()
    loader = DataLoader(data, batch_size=1, num_workers=1, persistent_workers=True)
    fit(module, loader, DataLoader(data + 100), overfit_batches=4, val_check_interval=2, num_sanity_val_steps=0)
    assert module.trained == [0, 1, 2, 3] and module.validated == [0, 1, 2, 3] * 2


def test_overfit_batches_without_a_validation_loader_does_not_validate(fit: Any) -> None:
    module = Tiny()
    fit(module, numbered(4), overfit_batches=2)
    assert (module.trained, module.validated) == ([0, 1], [])


@pytest.mark.parametrize(("given", "count"), [(True, 1), (3, 3)])
def test_a_fast_dev_run_reads_few_batches_and_writes_nothing(
    quiet: Any, tmp_path: Path, given: Any, count: int
) -> None:
    quiet = {**quiet, "logger": CSVLogger(), "enable_checkpointing": True}
    checkpoint = ModelCheckpoint(monitor="never logged")
    trainer = Trainer(**quiet, fast_dev_run=given, max_epochs=9, callbacks=[checkpoint, EarlyStopping("never logged")])
    module = Tiny()
    trainer.fit(module, numbered(8), numbered(8))
    assert module.trained == [*range(count)] == module.validated
    assert trainer.fast_dev_run and [type(logger) for logger in trainer.loggers] == [DummyLogger]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("logger", "count"), [(True, 1), (CSVLogger(), 1), ([CSVLogger(), CSVLogger(name="b")], 2), (False, 0), ([], 0)]
)
def test_a_fast_dev_run_discards_direct_calls_to_loggers(quiet: Any, tmp_path: Path, logger: Any, count: int) -> None:
    found: list[Any] = []

    def log(module: Any, batch: Any) -> None:
        found.append((len(module.loggers), module.logger is None, {each.log_dir for each in module.loggers}))
        for each in module.loggers:
            each.experiment.add_scalar("x", 1.0, 0)
            each.experiment.config.update({"x": 1})
            each.experiment["x"].append(1)
            each.experiment["x"] = 1
            each.log_image("x", [])
            each.log_metrics({"x": 1.0}, step=1)
            each.log_hyperparams({"x": 1})
        module.log("x", 1.0)

    trainer = Trainer(**{**quiet, "logger": logger}, fast_dev_run=True)
    trainer.fit(Logging(log), numbered(2))
    assert found == [(count, count == 0, {str(tmp_path)} if count else set())]
    assert trainer.log_dir == str(tmp_path) and [*tmp_path.iterdir()] == []


def test_barebones_disables_callbacks_and_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module = Tiny()
    trainer = Trainer(barebones=True, max_epochs=1, default_root_dir=tmp_path, accelerator="cpu")
    trainer.fit(module, numbered(3), numbered(2))
    assert trainer.barebones and trainer.callbacks == [] and trainer.global_step == 3
    assert module.validated == [0, 1]
    assert capfd.readouterr().out == "" and [*tmp_path.iterdir()] == []


def test_a_sanity_check_leaves_no_trace(fit: Any) -> None:
    from torchmetrics import MeanMetric

    class Drawing(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()
            self.seen: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            torch.rand(3)
            self.mean.update(batch)
            self.log("mean", self.mean)
            self.log("plain", batch.mean())

        def on_sanity_check_end(self) -> None:
            self.seen.append((dict(self.trainer.callback_metrics) != {}, self.trainer.progress.to_dict()))

        def on_train_start(self) -> None:
            self.seen.append((dict(self.trainer.callback_metrics), self.mean._update_count, torch.rand(1)))

    def run(steps: int) -> tuple[list[Any], Trainer]:
        torch.manual_seed(1)
        module, data = Drawing(), torch.arange(12.0).view(6, 2)
        trainer = fit(
            module,
            DataLoader(data, shuffle=True),  # type: ignore[arg-type]
            DataLoader(data, shuffle=False),  # type: ignore[arg-type]
            num_sanity_val_steps=steps,
        )
        return [*module.seen, module.trained, module.net.weight.detach().clone()], trainer

    (*checked, order, weight), trainer = run(-1)
    (*unchecked, plain_order, plain_weight), plain = run(0)
    assert checked[0][0] is True and checked[0][1] == type(plain.progress)().to_dict()
    assert checked[1] == unchecked[0] and checked[1][:2] == ({}, 0)
    assert order == plain_order and torch.equal(weight, plain_weight)
    assert trainer.progress.validations == plain.progress.validations == 1
    assert trainer.callback_metrics == plain.callback_metrics


def test_a_sanity_check_does_not_advance_the_generators_of_loaders(fit: Any) -> None:
    def validated(steps: int) -> list[float]:
        module, generator = Tiny(), torch.Generator().manual_seed(2)
        with pytest.warns(UserWarning, match="shuffles"):
            fit(
                module,
                numbered(1),
                DataLoader(numbered(8), batch_size=None, shuffle=True, generator=generator),  # type: ignore[arg-type]
                num_sanity_val_steps=steps,
            )
        return module.validated[-8:]

    assert validated(2) == validated(0)


@pytest.mark.parametrize(("steps", "count"), [(0, 0), (2, 2), (9, 4), (-1, 4)])
def test_num_sanity_val_steps_limits_the_sanity_check(fit: Any, steps: int, count: int) -> None:
    module = Tiny()
    trainer = fit(module, numbered(1), numbered(4), num_sanity_val_steps=steps, max_steps=0)
    assert module.validated == [*range(count)]
    assert trainer.num_sanity_val_batches == [count]


def test_disabling_validation_disables_the_sanity_check(fit: Any) -> None:
    calls: list[str] = []
    callback = LambdaCallback(on_sanity_check_start=lambda trainer, module: calls.append("start"))
    fit(Tiny(), numbered(1), numbered(4), limit_val_batches=0, callbacks=callback)
    assert calls == []
    fit(Tiny(), numbered(1), numbered(4), callbacks=callback)
    assert calls == ["start"]


# limits on the length of a run ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "steps", "epoch"),
    [
        ({"max_epochs": 3}, 12, 3),
        ({"max_epochs": 3, "max_steps": 6}, 6, 1),
        ({"max_epochs": -1, "max_steps": 9}, 9, 2),
        ({"max_epochs": None, "max_steps": 5}, 5, 1),
        ({"max_epochs": 0}, 0, 0),
        ({"max_steps": 0}, 0, 0),
        ({"max_epochs": None, "max_time": {"microseconds": 0}}, 0, 0),
        ({"max_epochs": 3, "accumulate_grad_batches": 3}, 6, 3),
    ],
)
def test_the_first_limit_reached_ends_the_run(fit: Any, arguments: Any, steps: int, epoch: int) -> None:
    trainer = fit(Tiny(), numbered(4), **arguments)
    assert (trainer.global_step, trainer.current_epoch) == (steps, epoch)


class Stop(Callback):
    """Sets `should_stop` once the run has made a number of steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self.step:
            trainer.should_stop = True


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({}, 2),
        ({"min_steps": 6}, 6),
        ({"min_epochs": 2}, 8),
        ({"min_epochs": 1, "min_steps": 5}, 5),
        ({"accumulate_grad_batches": 2}, 2),
    ],
)
def test_should_stop_waits_for_min_epochs_and_min_steps(fit: Any, arguments: Any, steps: int) -> None:
    trainer = fit(Tiny(), numbered(4), max_epochs=5, callbacks=Stop(2), **arguments)
    assert trainer.global_step == steps
    assert trainer.should_stop


def test_max_time_stops_only_between_accumulation_windows(fit: Any) -> None:
    module = Tiny()
    trainer = fit(module, numbered(10), max_time={"microseconds": 1}, max_epochs=None, accumulate_grad_batches=4)
    assert len(module.trained) in (0, 4) and not trainer.window.is_open
    assert fit(Tiny(), numbered(3), max_time="00:01:00:00", max_epochs=2).global_step == 6


def test_a_timer_stops_the_run(fit: Any) -> None:
    assert fit(Tiny(), numbered(10), callbacks=Timer({"microseconds": 1}, verbose=False)).global_step == 1


def test_each_fit_starts_over_with_its_own_limits(quiet: Any) -> None:
    trainer, module = Trainer(**quiet, max_epochs=1), Tiny()
    trainer.fit(module, numbered(2), max_epochs=3)
    assert (trainer.global_step, trainer.max_epochs) == (6, 3)
    trainer.fit(module, numbered(2), max_steps=1)
    assert (trainer.global_step, trainer.max_steps) == (1, 1)
    trainer.fit(module, numbered(2))
    assert (trainer.global_step, trainer.max_epochs, trainer.max_steps) == (2, 1, -1)
    # 9 steps of 0.1 times the mean of each batch.
    assert torch.allclose(module.net.weight, torch.full((1, 2), 1 - 0.1 * (3 + 0 + 1)))


def test_max_epochs_defaults_to_1000(quiet: Any) -> None:
    trainer = Trainer(**quiet)
    trainer.fit(Tiny(), numbered(1), None)
    assert trainer.max_epochs == 1000 == trainer.global_step


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"max_epochs": 3, "accumulate_grad_batches": 4}, 9),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": -1, "max_steps": 1}, 1),
        ({"limit_train_batches": 0.5}, 5),
    ],
)
def test_estimated_stepping_batches_are_available_in_configure_optimizers(fit: Any, arguments: Any, steps: int) -> None:
    class ReadsEstimate(Tiny):
        loaded = 0

        def train_dataloader(self) -> Any:
            self.loaded += 1
            return numbered(10)

        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = ReadsEstimate()
    trainer = fit(module, None, **arguments)
    assert module.estimate == steps == trainer.global_step == trainer.estimated_stepping_batches
    assert module.loaded == 1


def test_limits_set_on_fit_loop_apply_to_this_and_later_runs(quiet: Any) -> None:
    trainer = Trainer(**quiet, max_epochs=1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Tiny(), numbered(2))
    assert trainer.global_step == 6 == 2 * (trainer.max_epochs or 0)
    trainer.fit(Tiny(), numbered(2), max_epochs=1)
    assert trainer.global_step == 2 and trainer.max_epochs == 1
    trainer.fit(Tiny(), numbered(2))
    assert trainer.global_step == 6

    class Shortens(Tiny):
        def on_train_epoch_start(self) -> None:
            self.trainer.fit_loop.max_epochs = 2

    trainer.fit(Shortens(), numbered(2))
    assert trainer.global_step == 4
    trainer.max_steps = 1
    trainer.fit(Tiny(), numbered(2))
    assert trainer.global_step == 1 == trainer.fit_loop.max_steps


def test_minimums_set_on_fit_loop_delay_stopping(quiet: Any) -> None:
    class Stops(Tiny):
        def on_train_start(self) -> None:
            self.trainer.should_stop = True

    trainer = Trainer(**quiet, max_epochs=4)
    trainer.fit_loop.min_epochs, trainer.fit_loop.min_steps = 1, 5
    trainer.fit(Stops(), numbered(2))
    assert trainer.global_step == 5 and (trainer.min_epochs, trainer.min_steps) == (1, 5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_epochs", "3"), ("max_epochs", -2), ("max_steps", None), ("min_epochs", -1), ("min_steps", 1.5)],
)
def test_setting_an_invalid_limit_raises(quiet: Any, name: str, value: Any) -> None:
    limits = Trainer(**quiet).fit_loop
    before = getattr(limits, name)
    with pytest.raises(ConfigurationError, match=f"{name}=.*use a whole number"):
        setattr(limits, name, value)
    assert getattr(limits, name) == before


def test_limits_that_were_not_given_show_as_in_lightning(quiet: Any) -> None:
    def limits(**arguments: Any) -> tuple[int, int]:
        trainer = Trainer(**quiet, **arguments)
        return trainer.max_epochs, trainer.max_steps

    assert limits() == (1000, -1)
    assert limits(max_steps=5) == limits(max_steps=5, max_epochs=-1) == (-1, 5)
    assert limits(max_time="00:00:01:00") == (-1, -1)
    assert limits(max_epochs=3) == (3, -1)
    trainer = Trainer(**quiet, max_steps=5)
    trainer.fit(Tiny(), numbered(2))
    assert (trainer.max_epochs, trainer.global_step) == (-1, 5)


@pytest.mark.parametrize("given", [True, False, 3, 0])
def test_fast_dev_run_keeps_its_number(quiet: Any, given: Any) -> None:
    trainer = Trainer(**quiet, max_epochs=1, fast_dev_run=given)
    assert trainer.fast_dev_run is given
    trainer.fit(module := Tiny(), numbered(5))
    assert len(module.trained) == (int(given) or 5)


class Sometimes:
    """A loader without a length whose epochs have these numbers of batches."""

    def __init__(self, *counts: int) -> None:
        self.counts = list(counts)

    def __iter__(self) -> Any:
        return iter(numbered(self.counts.pop(0)))


def test_an_epoch_without_data_goes_on_to_the_next(fit: Any) -> None:
    with pytest.warns(UserWarning, match="yielded no batch in epoch 1"):
        trainer = fit(module := Tiny(), Sometimes(2, 0, 1), numbered(1), max_epochs=3)
    assert module.trained == [0.0, 1.0, 0.0] and (trainer.current_epoch, trainer.global_step) == (3, 3)


@pytest.mark.parametrize("counts", [(0, 2), (2, 0, 0, 2)])
def test_a_loader_without_data_raises(fit: Any, counts: Any) -> None:
    with pytest.raises(ConfigurationError, match="yielded no batch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(Tiny(), Sometimes(*counts), max_epochs=4)
