"""The Trainer's arguments and properties: each does what it says."""

from __future__ import annotations

import os
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Tiny
from samples import numbered
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, ConfigurationError, LeydenError, Trainer, TrainModule
from leyden.callbacks import (
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    TensorBoardLogger,
    Timer,
    TQDMProgressBar,
)
from leyden.callbacks.silent import SilentLogger


# how much is read -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("limit", "count"), [(1.0, 8), (0.5, 4), (0.3, 2), (3, 3), (100, 8), (1, 1)])
def test_limit_train_batches(fit: Any, limit: Any, count: int) -> None:
    module = Tiny()
    trainer = fit(module, numbered(8), limit_train_batches=limit, max_epochs=2)
    assert module.trained == [*range(count)] * 2
    assert trainer.num_training_batches == count and trainer.global_step == 2 * count


@pytest.mark.parametrize(("limit", "count"), [(1.0, 4), (0.5, 2), (3, 3), (0, 0), (0.0, 0)])
def test_limit_val_batches(fit: Any, limit: Any, count: int) -> None:
    module = Tiny()
    trainer = fit(module, numbered(2), numbered(4), limit_val_batches=limit, num_sanity_val_steps=0)
    assert module.validated == [*range(count)]
    assert trainer.num_val_batches == ([count] if count else [])
    assert trainer.enable_validation == (count > 0)


def test_limit_test_and_predict_batches(quiet: Any) -> None:
    trainer = Trainer(**quiet, limit_test_batches=0.5, limit_predict_batches=3)
    [values] = trainer.test(Tiny(), numbered(8), verbose=False)
    assert values == {"seen": 1.5} and trainer.num_test_batches == [4]
    outputs = trainer.predict(Tiny(), numbered(8))
    assert [float(o) for o in outputs or []] == [0.0, 2.0, 4.0] and trainer.num_predict_batches == [3]


@pytest.mark.parametrize(("amount", "count"), [(3, 3), (0.25, 2)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_overfit_batches(fit: Any, amount: Any, count: int, shuffle: bool) -> None:
    data = torch.arange(8.0).repeat_interleave(2).view(8, 2)
    module = Tiny()
    loader = DataLoader(data, batch_size=1, shuffle=True)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="overfit_batches turned shuffling off"):
        fit(
            module,
            loader,
            DataLoader(data, shuffle=shuffle),
            overfit_batches=amount,
            max_epochs=2,
            num_sanity_val_steps=0,
        )  # type: ignore[arg-type]
    assert module.trained == [*range(count)] * 2 == module.validated


@pytest.mark.parametrize(("given", "count"), [(True, 1), (3, 3)])
def test_fast_dev_run(quiet: Any, tmp_path: Path, given: Any, count: int) -> None:
    quiet = {**quiet, "logger": CSVLogger(), "enable_checkpointing": True}
    checkpoint = ModelCheckpoint(monitor="never logged")
    trainer = Trainer(**quiet, fast_dev_run=given, max_epochs=9, callbacks=[checkpoint, EarlyStopping("never logged")])
    module = Tiny()
    trainer.fit(module, numbered(8), numbered(8))
    assert module.trained == [*range(count)] == module.validated
    assert trainer.fast_dev_run and [type(logger) for logger in trainer.loggers] == [SilentLogger]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("logger", "count"), [(True, 1), (CSVLogger(), 1), ([CSVLogger(), CSVLogger(name="b")], 2), (False, 0), ([], 0)]
)
def test_in_a_fast_dev_run_what_is_logged_by_hand_goes_nowhere(
    quiet: Any, tmp_path: Path, logger: Any, count: int
) -> None:
    class Logging(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert len(self.loggers) == count and (self.logger is None) == (count == 0)
            for own in self.loggers:
                own.experiment.add_scalar("x", 1.0, 0)
                own.experiment.config.update({"x": 1})
                own.experiment["x"].append(1)
                own.experiment["x"] = 1
                own.log_image("x", [])
                own.log_metrics({"x": 1.0}, step=1)
                own.log_hyperparams({"x": 1})
                assert own.log_dir == self.trainer.log_dir == str(tmp_path)
            self.log("x", 1.0)
            return super().training_step(batch, batch_idx)

    Trainer(**{**quiet, "logger": logger}, fast_dev_run=True).fit(Logging(), numbered(2))
    assert [*tmp_path.iterdir()] == []


def test_barebones(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_a_sanity_check_leaves_the_generators_of_loaders(fit: Any) -> None:
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
def test_num_sanity_val_steps(fit: Any, steps: int, count: int) -> None:
    module = Tiny()
    trainer = fit(module, numbered(1), numbered(4), num_sanity_val_steps=steps, max_steps=0)
    assert module.validated == [*range(count)]
    assert trainer.num_sanity_val_batches == [count]


def test_no_sanity_check_without_validation(fit: Any) -> None:
    calls: list[str] = []
    callback = LambdaCallback(on_sanity_check_start=lambda trainer, module: calls.append("start"))
    fit(Tiny(), numbered(1), numbered(4), limit_val_batches=0, callbacks=callback)
    assert calls == []
    fit(Tiny(), numbered(1), numbered(4), callbacks=callback)
    assert calls == ["start"]


# how long -------------------------------------------------------------------------------------------------------------
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
def test_the_end_of_a_run(fit: Any, arguments: Any, steps: int, epoch: int) -> None:
    trainer = fit(Tiny(), numbered(4), **arguments)
    assert (trainer.global_step, trainer.current_epoch) == (steps, epoch)


class Stop(Callback):
    """Asks the run to stop after so many steps."""

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
def test_should_stop(fit: Any, arguments: Any, steps: int) -> None:
    trainer = fit(Tiny(), numbered(4), max_epochs=5, callbacks=Stop(2), **arguments)
    assert trainer.global_step == steps
    assert trainer.should_stop


def test_max_time_ends_between_two_windows(fit: Any) -> None:
    module = Tiny()
    trainer = fit(module, numbered(10), max_time={"microseconds": 1}, max_epochs=None, accumulate_grad_batches=4)
    assert len(module.trained) in (0, 4) and not trainer.window.is_open
    assert fit(Tiny(), numbered(3), max_time="00:01:00:00", max_epochs=2).global_step == 6


def test_a_timer_ends_a_run(fit: Any) -> None:
    assert fit(Tiny(), numbered(10), callbacks=Timer({"microseconds": 1}, verbose=False)).global_step == 1


def test_fit_takes_its_own_end_and_begins_anew(quiet: Any) -> None:
    trainer, module = Trainer(**quiet, max_epochs=1), Tiny()
    trainer.fit(module, numbered(2), max_epochs=3)
    assert (trainer.global_step, trainer.max_epochs) == (6, 3)
    trainer.fit(module, numbered(2), max_steps=1)
    assert (trainer.global_step, trainer.max_steps) == (1, 1)
    trainer.fit(module, numbered(2))
    assert (trainer.global_step, trainer.max_epochs, trainer.max_steps) == (2, 1, -1)
    # 9 steps of 0.1 times the mean of each batch.
    assert torch.allclose(module.net.weight, torch.full((1, 2), 1 - 0.1 * (3 + 0 + 1)))


def test_a_thousand_epochs_where_nothing_ends_a_run(quiet: Any) -> None:
    trainer = Trainer(**quiet)
    trainer.fit(Tiny(), numbered(1), None)
    assert trainer.max_epochs == 1000 == trainer.global_step


def test_estimated_stepping_batches(fit: Any) -> None:
    class Asking(Tiny):
        loaded = 0

        def train_dataloader(self) -> Any:
            self.loaded += 1
            return numbered(10)

        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    for arguments, steps in (
        ({"max_epochs": 3, "accumulate_grad_batches": 4}, 9),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": -1, "max_steps": 1}, 1),
        ({"limit_train_batches": 0.5}, 5),
    ):
        module = Asking()
        trainer = fit(module, None, **arguments)
        assert module.estimate == steps == trainer.global_step == trainer.estimated_stepping_batches
        assert module.loaded == 1


# what a run tells of itself -------------------------------------------------------------------------------------------
def test_properties(quiet: Any, tmp_path: Path) -> None:
    logger, checkpoint, stopping = CSVLogger(), ModelCheckpoint(), EarlyStopping("x")
    quiet = {**quiet, "logger": logger, "enable_checkpointing": True, "enable_progress_bar": True}
    trainer = Trainer(
        **{**quiet, "max_epochs": 2, "min_epochs": 1, "min_steps": 2, "callbacks": [checkpoint, stopping]},
        accumulate_grad_batches=2,
        gradient_clip_val=3.0,
        log_every_n_steps=7,
    )
    seen: list[Any] = []

    class Looking(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            t = self.trainer
            self.log("x", 0.0, on_epoch=True, on_step=False)
            seen.append((t.training, t.validating, t.evaluating, t.is_last_batch, t.current_epoch, t.global_step))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            t = self.trainer
            assert (t.training, t.validating, t.sanity_checking, t.evaluating) == (
                (False, False, True, True) if t.sanity_checking else (False, True, False, True)
            )

        def test_step(self, batch: Any, batch_idx: int) -> None:
            assert self.trainer.testing and self.trainer.evaluating and not self.trainer.training

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            assert self.trainer.predicting and not self.trainer.evaluating

    module, loaders = Looking(), [numbered(3), numbered(1), numbered(1), numbered(1)]
    trainer.fit(module, *loaders[:2])
    assert trainer.train_dataloader is loaders[0] and trainer.val_dataloaders is loaders[1]
    assert trainer.test_dataloaders is trainer.predict_dataloaders is None
    assert [row[3] for row in seen] == [False, False, True] * 2
    assert [row[4:] for row in seen] == [(0, 0), (0, 0), (0, 1), (1, 2), (1, 2), (1, 3)]
    assert all(row[:3] == (True, False, False) for row in seen)
    trainer.test(module, loaders[2], verbose=False)
    assert trainer.test_dataloaders is loaders[2] and trainer.val_dataloaders is None
    trainer.predict(module, loaders[3])
    assert trainer.predict_dataloaders is loaders[3]
    assert trainer.logger is logger and trainer.loggers == [logger]
    assert trainer.log_dir is not None and Path(trainer.log_dir).is_relative_to(tmp_path)
    assert trainer.checkpoint_callback is checkpoint and trainer.checkpoint_callbacks == [checkpoint]
    assert trainer.early_stopping_callback is stopping and trainer.early_stopping_callbacks == [stopping]
    assert isinstance(trainer.progress_bar_callback, TQDMProgressBar)
    assert trainer.model is trainer.lightning_module is module
    assert len(trainer.optimizers) == 1 and trainer.lr_scheduler_configs == trainer.lr_schedulers == []
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank) == (1, 0, 0, 0)
    assert trainer.is_global_zero and (trainer.num_devices, trainer.num_nodes, trainer.device_ids) == (1, 1, [0])
    assert (trainer.min_epochs, trainer.min_steps, trainer.gradient_clip_val) == (1, 2, 3.0)
    assert (trainer.accumulate_grad_batches, trainer.gradient_clip_algorithm) == (2, "norm")
    assert (trainer.log_every_n_steps, trainer.val_check_interval, trainer.check_val_every_n_epoch) == (7, 1.0, 1)
    assert (trainer.limit_train_batches, trainer.limit_val_batches, trainer.overfit_batches) == (1.0, 1.0, 0.0)
    assert (trainer.limit_test_batches, trainer.limit_predict_batches) == (1.0, 1.0)
    assert trainer.reload_dataloaders_every_n_epochs == 0
    assert trainer.default_root_dir == str(tmp_path) and not trainer.received_sigterm and not trainer.interrupted
    assert trainer.state.stage is None and not trainer.training


def test_five_lines(quiet: Any, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(**{**quiet, "max_epochs": 1, "precision": "bf16"}, accumulate_grad_batches=3)
    trainer.fit(Tiny(), DataLoader(torch.zeros(8, 2), batch_size=2))  # type: ignore[arg-type]
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 6
    assert "1 × cpu, 1 rank" in lines[0] and "single_device, precision bf16-mixed" in lines[1]
    assert "2 per rank × 1 × 3 accumulated = 6" in lines[2] and quiet["default_root_dir"].name in lines[3]
    assert lines[4].split() == ["start", "anew"]
    assert re.fullmatch(r"ended       max_epochs=1 reached, at step 2 in epoch 0, after 0:00:\d\d", lines[5])


ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "steps": ({"max_steps": 3}, "max_steps=3 reached, at step 3 in epoch 1"),
    "time": ({"max_time": {"seconds": 0}}, "max_time reached, at step 0 in epoch 0"),
    "no batches": ({"limit_train_batches": 0}, "limit_train_batches=0 skips training, at step 0 in epoch 0"),
    "early stopping": (
        {"callbacks": EarlyStopping("seen", patience=1)},
        r"stopped early \(should_stop\), at step 4 in epoch 1",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_fit_says_why_it_ended_and_where_the_best_checkpoint_is(
    name: str, quiet: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    class Seen(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("seen", 1.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    arguments, reason = ENDS[name]
    keeps = ModelCheckpoint(monitor="seen", mode="max")
    callbacks = [keeps, *([arguments["callbacks"]] if "callbacks" in arguments else [])]
    trainer = Trainer(**{**quiet, "max_epochs": 5, "enable_checkpointing": True, **arguments, "callbacks": callbacks})
    trainer.fit(Seen(), numbered(2))
    out = capfd.readouterr().out
    assert re.search(rf"^ended       {reason}, after 0:00:\d\d$", out, re.MULTILINE), out
    if name not in ("time", "no batches"):
        assert f"best        {keeps.best_model_path} (seen=1)" in out.splitlines()
    told = "EarlyStopping stops the run in epoch 1: seen did not improve in the last 1 checks." in out
    assert told == (name == "early stopping")


# evaluation -----------------------------------------------------------------------------------------------------------
def test_what_validate_and_test_return(quiet: Any, capfd: pytest.CaptureFixture[str]) -> None:
    class Logging(Tiny):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("loss", batch.mean())
            self.log("own", float(dataloader_idx), add_dataloader_idx=False) if not dataloader_idx else None

    trainer, module = Trainer(**quiet), Logging()
    assert trainer.validate(module, numbered(3)) == [{"loss": 1.0, "own": 0.0}]
    assert "loss" in capfd.readouterr().out
    assert trainer.validate(dataloaders=[DataLoader(numbered(n), batch_size=None) for n in (3, 2)], verbose=False) == [
        {"loss/dataloader_idx_0": 1.0, "own": 0.0},
        {"loss/dataloader_idx_1": 0.5},
    ]
    assert capfd.readouterr().out == ""
    assert trainer.callback_metrics["loss/dataloader_idx_1"] == 0.5
    assert trainer.test(module, numbered(3), verbose=False) == [{"seen": 1.0}]


def test_predict(quiet: Any) -> None:
    trainer, module = Trainer(**quiet), Tiny()
    one = trainer.predict(module, numbered(3, size=2))
    assert torch.equal(torch.cat(one or []), torch.tensor([0.0, 0, 2, 2, 4, 4]).view(6, 1))
    several = trainer.predict(module, [DataLoader(numbered(n), batch_size=None) for n in (1, 2)])
    assert [[float(o) for o in outputs] for outputs in several or []] == [[0.0], [0.0, 2.0]]
    assert trainer.predict(module, numbered(3), return_predictions=False) is None
    assert module.net.weight.grad is None and module.training


@pytest.mark.parametrize("inference_mode", [True, False])
def test_inference_mode(quiet: Any, inference_mode: bool) -> None:
    seen: list[tuple[bool, bool, bool]] = []

    class Looking(Tiny):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self.training))

    module = Looking()
    Trainer(**quiet, inference_mode=inference_mode).test(module, numbered(1))
    assert seen == [(inference_mode, False, False)]
    assert module.training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_evaluation_gives_each_part_its_mode_back(fit: Any) -> None:
    module = Tiny()
    module.frozen = nn.Sequential(nn.Dropout()).eval()
    fit(module, numbered(2), numbered(1))
    assert module.training and not module.frozen.training and not module.frozen[0].training


# torch's switches -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("given", "during"), [(True, (True, False)), ("warn", (True, True)), (False, (False, False))])
def test_deterministic_during_the_run_alone(fit: Any, given: Any, during: Any) -> None:
    seen: list[Any] = []

    def look(trainer: Any, module: Any) -> None:
        seen.append(
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        )

    variable = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    fit(Tiny(), numbered(1), deterministic=given, callbacks=LambdaCallback(on_train_start=look))
    assert seen == [during]
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == variable

    def fail(trainer: Any, module: Any) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        fit(Tiny(), numbered(1), deterministic=given, callbacks=LambdaCallback(on_train_start=fail))
    assert not torch.are_deterministic_algorithms_enabled()


def test_benchmark_and_detect_anomaly_during_the_run_alone(fit: Any) -> None:
    seen: list[bool] = []
    callback = LambdaCallback(
        on_train_start=lambda trainer, module: seen.extend([torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()])
    )
    before = torch.backends.cudnn.benchmark
    fit(Tiny(), numbered(1), benchmark=not before, detect_anomaly=True, callbacks=callback)
    assert seen == [not before, True]
    assert torch.backends.cudnn.benchmark == before and not torch.is_anomaly_enabled()


def test_detect_anomaly_names_the_operation(fit: Any) -> None:
    class Bad(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            # The loss is finite, and its gradient is not.
            return torch.sqrt(self(batch).sum() * 0.0)

    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="returned nan"):
        warnings.simplefilter("ignore")
        fit(Bad(), numbered(2, start=1), detect_anomaly=True)
    module = Bad()
    fit(module, numbered(1, start=1))
    assert bool(module.net.weight.isnan().all())


# errors ---------------------------------------------------------------------------------------------------------------
def test_out_of_memory_says_where_and_what_to_try(fit: Any) -> None:
    class Large(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 3:
                raise torch.OutOfMemoryError("tried to allocate 1 GiB")
            return super().training_step(batch, batch_idx)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(Large(), numbered(5, size=4))
    message = str(caught.value)
    for part in (
        *("step 3", "epoch 0", "batch 3", "(4, 2) float32", "tried to allocate 1 GiB", "smaller batch_size"),
        *("precision='bf16-mixed'", "activation checkpointing"),
    ):
        assert part in message


def test_an_error_reaches_everyone_once(fit: Any) -> None:
    told: list[Any] = []

    class Failing(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError("mine")

        def teardown(self, stage: str) -> None:
            told.append(stage)

    callback = LambdaCallback(on_exception=lambda trainer, module, error: told.append(type(error)))
    with pytest.raises(ZeroDivisionError, match=r"^mine(\n|$)"):
        fit(Failing(), numbered(1), callbacks=callback)
    assert told == [ZeroDivisionError, "fit"]


def test_print_and_init_module(quiet: Any, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(**quiet, precision="64-true")
    trainer.print("a", "b", sep="-")
    assert capfd.readouterr().out == "a-b\n"
    with trainer.init_module():
        module = Tiny()
    assert module.net.weight.dtype == torch.float64 and torch.get_default_dtype() == torch.float32


def test_configure_callbacks(quiet: Any) -> None:
    calls: list[str] = []

    class Say(Callback):
        def __init__(self, word: str) -> None:
            self.word = word

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            calls.append(self.word)

    class Own(Tiny):
        def configure_callbacks(self) -> Any:
            return [Say("module's")]

    trainer = Trainer(**quiet, max_epochs=1, callbacks=[Say("trainer's"), Timer()])
    trainer.fit(Own(), numbered(1))
    assert calls == ["module's"]
    trainer.fit(Tiny(), numbered(1))
    assert calls == ["module's", "trainer's"]


def test_callbacks_that_are_added_and_taken_out_between_runs(quiet: Any) -> None:
    heard: list[str] = []

    class Named(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        @property
        def state_key(self) -> str:
            return self.name

        def on_train_start(self, trainer: Any, module: Any) -> None:
            heard.append(self.name)

    class Own(Named): ...

    class Bringing(Tiny):
        def configure_callbacks(self) -> Any:
            return Own("the module's")

    first, second, replaced = Named("first"), Named("second"), Own("replaced")
    trainer = Trainer(**quiet, max_epochs=1, callbacks=[first, replaced])
    trainer.callbacks.append(second)
    trainer.fit(Bringing(), numbered(1))
    assert heard == ["first", "second", "the module's"]
    heard.clear()
    trainer.callbacks.remove(first)
    trainer.fit(Tiny(), numbered(1))
    assert heard == ["replaced", "second"]


def test_a_trainer_that_runs_is_not_run_again(fit: Any) -> None:
    class Nested(Tiny):
        def on_train_epoch_end(self) -> None:
            with pytest.raises(LeydenError, match=r"Trainer.validate was called while this Trainer's fit runs"):
                self.trainer.validate(self, numbered(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("epoch", float(self.current_epoch))
            return super().training_step(batch, batch_idx)

    trainer = fit(Nested(), numbered(1), max_epochs=2)
    assert trainer.callback_metrics["epoch"] == 1.0


def test_callbacks_by_their_order(fit: Any) -> None:
    calls: list[str] = []

    def make(name: str, rank: int) -> Callback:
        body = {"order": rank, "on_train_epoch_end": lambda self, trainer, module: calls.append(name)}
        return type(name, (Callback,), body)()  # type: ignore[no-any-return]

    class Own(Tiny):
        def on_train_epoch_end(self) -> None:
            calls.append("module")

    fit(Own(), numbered(1), callbacks=[make("last", 200), make("late", 5), make("early", -1), make("plain", 0)])
    assert calls == ["early", "plain", "late", "module", "last"]


def test_a_run_leaves_the_random_numbers_of_the_plain_loop(fit: Any) -> None:
    module = Tiny()
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    fit(module, numbered(3), numbered(2))
    assert torch.equal(torch_state, torch.get_rng_state()) and python_state == random.getstate()


class Compiled(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.compiling: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.compiling.append(torch.compiler.is_compiling())
        [x] = batch
        loss = self.net(x).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_compiled_module(backend: str, quiet: Any) -> None:
    """The step goes through dynamo; "inductor" needs a C++ compiler, and some seconds of it."""
    loader = DataLoader(TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(0))), batch_size=2)
    plain, compiled = Compiled(), Compiled()
    compiled.load_state_dict(plain.state_dict())
    Trainer(**quiet, max_epochs=1).fit(plain, loader)
    trainer = Trainer(**quiet, max_epochs=1)
    trainer.fit(torch.compile(compiled, backend=backend), loader)
    assert trainer.module is compiled and trainer.global_step == 4 and "loss" in trainer.callback_metrics
    assert compiled.compiling[0] is True and plain.compiling[0] is False
    for name, weight in plain.named_parameters():
        assert torch.allclose(weight, compiled.get_parameter(name))


# what Lightning's users set and read on a Trainer ---------------------------------------------------------------------
def test_limits_set_on_fit_loop_hold_for_this_run_and_later_ones(quiet: Any) -> None:
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


def test_min_epochs_set_on_fit_loop_keep_a_run_from_stopping(quiet: Any) -> None:
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
def test_an_impossible_limit_is_refused_where_it_is_set(quiet: Any, name: str, value: Any) -> None:
    limits = Trainer(**quiet).fit_loop
    before = getattr(limits, name)
    with pytest.raises(ConfigurationError, match=f"{name}=.*use a whole number"):
        setattr(limits, name, value)
    assert getattr(limits, name) == before


def test_log_dir_without_a_logger_is_the_root(fit: Any, tmp_path: Path) -> None:
    class Looks(Tiny):
        def on_train_start(self) -> None:
            assert self.trainer.log_dir == str(tmp_path)

    assert fit(Looks(), numbered(1)).log_dir == str(tmp_path)


def test_a_tilde_is_the_home_folder(quiet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(**{**quiet, "default_root_dir": "~/runs", "enable_checkpointing": True}, max_epochs=1)
    trainer.fit(Tiny(), numbered(1))
    assert trainer.default_root_dir == str(tmp_path / "runs")
    saved = trainer.save_checkpoint("~/saved")
    assert saved == tmp_path / "saved" and saved.is_dir()
    trainer.test(Tiny(), numbered(1), ckpt_path="~/saved", verbose=False)
    assert trainer.ckpt_path == str(saved)
    assert type(Tiny.load_from_checkpoint("~/saved")) is Tiny
    assert ModelCheckpoint("~/mine").dirpath == str(tmp_path / "mine")
    assert OnExceptionCheckpoint("~/mine").ckpt_path == str(tmp_path / "mine" / "on_exception")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "saved"}


def test_ckpt_path_is_what_the_last_run_began_from(quiet: Any) -> None:
    trainer, seen = Trainer(**{**quiet, "enable_checkpointing": True}, max_epochs=1), []

    class Looks(Tiny):
        def setup(self, stage: str) -> None:
            seen.append(self.trainer.ckpt_path)

    assert trainer.ckpt_path is None
    trainer.fit(Looks(), numbered(1))
    best = trainer.checkpoint_callbacks[0].best_model_path
    trainer.test(Looks(), numbered(1), ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == best
    trainer.fit(Looks(), numbered(1), ckpt_path="last", max_epochs=2)
    trainer.predict(Looks(), numbered(1))
    assert trainer.ckpt_path is None and seen == [None, best, best, None]


def test_another_logger_may_be_assigned_between_runs(quiet: Any, tmp_path: Path) -> None:
    first, second = CSVLogger(tmp_path, "first"), CSVLogger(tmp_path, "second")
    trainer = Trainer(**{**quiet, "logger": first}, max_epochs=1, log_every_n_steps=1)
    trainer.logger = second
    assert trainer.loggers == [second] and first not in trainer.callbacks

    class Logging(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0)
            return super().training_step(batch, batch_idx)

    trainer.fit(Logging(), numbered(2))
    assert not (tmp_path / "first").exists() and Path(second.metrics_file_path).exists()
    trainer.loggers = [first, second]
    trainer.fit(Logging(), numbered(2))
    assert (tmp_path / "first").exists() and trainer.logger is first
    trainer.logger = None
    trainer.fit(Logging(), numbered(2))
    assert trainer.loggers == [] and trainer.logger is None
    with pytest.raises(ConfigurationError, match=r"trainer\.logger: use .*; a str is none"):
        trainer.logger = "csv"  # type: ignore[assignment]


def test_a_logger_may_be_assigned_in_setup_and_not_later(fit: Any, tmp_path: Path) -> None:
    mine = CSVLogger(tmp_path)

    class Assigns(Tiny):
        def setup(self, stage: str) -> None:
            self.trainer.logger = mine

        def on_train_start(self) -> None:
            assert self.logger is mine
            with pytest.raises(LeydenError, match="assigned within a run: assign it before"):
                self.trainer.logger = None

    assert fit(Assigns(), numbered(1)).logger is mine
    assert mine.log_dir is not None and Path(mine.log_dir).is_relative_to(tmp_path)


def test_a_logger_assigned_in_a_fast_dev_run_writes_nothing(quiet: Any, tmp_path: Path) -> None:
    trainer = Trainer(**quiet, fast_dev_run=True)
    trainer.logger = TensorBoardLogger(tmp_path)
    trainer.fit(Tiny(), numbered(1))
    assert type(trainer.logger) is SilentLogger and [*tmp_path.iterdir()] == []


def test_a_trainer_may_be_assigned_to_a_module(quiet: Any) -> None:
    module, trainer = Tiny(), Trainer(**quiet, max_epochs=1)
    module.trainer = trainer
    assert module.trainer is trainer and module.global_step == 0
    module.trainer = None
    with pytest.raises(LeydenError, match="not attached"):
        _ = module.trainer
    trainer.fit(module, numbered(1))
    assert module.trainer is trainer
