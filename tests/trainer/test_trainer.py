"""The Trainer: its state and messages, evaluation, torch's global settings, errors, and assignable attributes."""

from __future__ import annotations

import logging
import os
import random
import re
import warnings
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Logging, Squares, Tiny
from samples import numbered
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, ConfigurationError, LeydenError, Trainer
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
from leyden.callbacks.loggers.silent import DummyLogger
from leyden.trainer.profilers import SimpleProfiler

# state and messages of a run ------------------------------------------------------------------------------------------
STAGES = ("training", "sanity_checking", "validating", "testing", "predicting", "evaluating")


def test_a_notebook_shows_a_trainer_as_a_table_with_escaped_texts(quiet: Any, tmp_path: Path) -> None:
    class Named(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("<script>&", 0.25, batch_size=1)

    def cells(trainer: Trainer) -> dict[str, str]:
        html = trainer._repr_html_()
        assert re.fullmatch(r"<table>(<tr><t[hd]>[^<>]*</t[hd]><t[hd]>[^<>]*</t[hd]></tr>)+</table>", html)
        return dict(re.findall(r"<tr><t[hd]>(.*?)</t[hd]><t[hd]>(.*?)</t[hd]></tr>", html))

    saves = ModelCheckpoint(tmp_path / "<saves>")
    trainer = Trainer(**{**quiet, "max_epochs": 2, "callbacks": [saves], "enable_checkpointing": True})
    shown = cells(trainer)
    assert shown["limits"] == "max_epochs=2, max_steps=-1" and shown["done"] == "0 epochs, 0 steps"
    assert shown["strategy"] == "single_device, precision 32-true" and shown["devices"] == "1 × cpu"
    trainer.fit(Named(), numbered(3), numbered(1))
    shown = cells(trainer)
    assert shown["done"] == "2 epochs, 6 steps" and shown["&lt;script&gt;&amp;"] == "0.25"
    assert shown["last checkpoint"].endswith("&lt;saves&gt;/epoch=1-step=6")
    assert repr(trainer).startswith("<leyden.trainer.trainer.Trainer object")


def test_stage_flags_are_set_in_each_step(quiet: Any) -> None:
    seen: list[set[str]] = []
    called: list[str | None] = []

    class RecordsStage(Tiny):
        def record(self, *_: Any) -> None:
            seen.append({stage for stage in STAGES if getattr(self.trainer, stage)})
            called.append(self.trainer.state.fn)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.record()
            return super().training_step(batch, batch_idx)

        validation_step = test_step = predict_step = record

    trainer, module = Trainer(**quiet, max_epochs=1), RecordsStage()
    trainer.fit(module, numbered(1), numbered(1))
    trainer.validate(module, numbered(1), verbose=False)
    trainer.test(module, numbered(1), verbose=False)
    trainer.predict(module, numbered(1))
    assert seen == [
        *({"sanity_checking", "evaluating"}, {"training"}, {"validating", "evaluating"}),
        *({"validating", "evaluating"}, {"testing", "evaluating"}, {"predicting"}),
    ]
    assert called == ["fit"] * 3 + ["validate", "test", "predict"]
    assert trainer.state.stage is None and not any(getattr(trainer, stage) for stage in STAGES)


def test_each_training_step_sees_the_current_epoch_and_step(fit: Any) -> None:
    seen: list[Any] = []

    def record(module: Any, batch: Any) -> None:
        seen.append((module.current_epoch, module.global_step, module.trainer.is_last_batch))

    fit(Logging(record), numbered(3), max_epochs=2, accumulate_grad_batches=2)
    assert seen == [(0, 0, False), (0, 0, False), (0, 1, True), (1, 2, False), (1, 2, False), (1, 3, True)]


def test_a_trainer_exposes_the_loaders_of_its_last_run(quiet: Any) -> None:
    trainer, module = Trainer(**quiet, max_epochs=1), Tiny()
    train, val, test, predict = numbered(3), numbered(1), numbered(1), numbered(1)
    trainer.fit(module, train, val)
    assert trainer.train_dataloader is train and trainer.val_dataloaders is val
    assert trainer.test_dataloaders is trainer.predict_dataloaders is None
    trainer.test(module, test, verbose=False)
    assert trainer.test_dataloaders is test and trainer.val_dataloaders is None
    trainer.predict(module, predict)
    assert trainer.predict_dataloaders is predict


@pytest.mark.parametrize("collected", [list, lambda pair: dict(zip("ab", pair, strict=True))])
def test_train_dataloader_is_what_the_user_passed_or_returned(quiet: Any, collected: Any) -> None:
    samples: Any = torch.ones(4, 2)
    loaders, other = (collected(DataLoader(samples) for _ in range(2)) for _ in range(2))

    class Both(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0] if isinstance(batch, list) else batch["a"]).sum()

    class Owner(Both):
        def train_dataloader(self) -> Any:
            return loaders

    trainer = Trainer(**quiet, max_epochs=1)
    assert trainer.train_dataloader is None
    trainer.fit(Owner())
    assert trainer.train_dataloader is loaders
    trainer.fit(Both(), other)
    assert trainer.train_dataloader is other


def test_freeze_and_unfreeze_return_the_module() -> None:
    module = Tiny()
    assert module.freeze() is module and not module.training and not module.net.weight.requires_grad
    assert module.unfreeze() is module and module.training and module.net.weight.requires_grad


def test_a_trainer_exposes_its_callbacks_loggers_and_module(quiet: Any, tmp_path: Path) -> None:
    logger, checkpoint, stopping = CSVLogger(), ModelCheckpoint(), EarlyStopping("seen", check_on_train_epoch_end=True)
    quiet = {**quiet, "logger": logger, "enable_checkpointing": True, "enable_progress_bar": True}
    trainer = Trainer(**quiet, max_epochs=1, callbacks=[checkpoint, stopping])
    module = Logging(lambda module, batch: module.log("seen", 0.0))
    trainer.fit(module, numbered(3))
    assert trainer.logger is logger and trainer.loggers == [logger]
    assert trainer.log_dir is not None and Path(trainer.log_dir).is_relative_to(tmp_path)
    assert trainer.checkpoint_callback is checkpoint and trainer.checkpoint_callbacks == [checkpoint]
    assert trainer.early_stopping_callback is stopping and trainer.early_stopping_callbacks == [stopping]
    assert isinstance(trainer.progress_bar_callback, TQDMProgressBar)
    assert trainer.model is trainer.lightning_module is module
    assert len(trainer.optimizers) == 1 and trainer.lr_scheduler_configs == trainer.lr_schedulers == []
    assert not trainer.received_sigterm and not trainer.interrupted


def test_a_trainer_exposes_its_arguments(quiet: Any, tmp_path: Path) -> None:
    given = {
        "min_epochs": 1,
        "min_steps": 2,
        "gradient_clip_val": 3.0,
        "accumulate_grad_batches": 2,
        "log_every_n_steps": 7,
    }
    default = {
        "gradient_clip_algorithm": "norm",
        "val_check_interval": 1.0,
        "check_val_every_n_epoch": 1,
        "limit_train_batches": 1.0,
        "limit_val_batches": 1.0,
        "limit_test_batches": 1.0,
        "limit_predict_batches": 1.0,
        "overfit_batches": 0.0,
        "reload_dataloaders_every_n_epochs": 0,
    }
    one_process = {
        "world_size": 1,
        "global_rank": 0,
        "local_rank": 0,
        "node_rank": 0,
        "is_global_zero": True,
        "num_devices": 1,
        "num_nodes": 1,
        "device_ids": [0],
    }
    trainer = Trainer(**quiet, max_epochs=2, **given)
    expected = {**given, **default, **one_process, "default_root_dir": str(tmp_path)}
    assert {name: getattr(trainer, name) for name in expected} == expected


def test_fit_prints_its_setup_and_how_it_ended(quiet: Any, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(**{**quiet, "max_epochs": 1, "precision": "bf16"}, accumulate_grad_batches=3)
    trainer.fit(Tiny(), DataLoader(torch.zeros(8, 2), batch_size=2))  # type: ignore[arg-type]
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 6
    assert "1 × cpu, 1 rank" in lines[0] and "single_device, precision bf16-mixed" in lines[1]
    assert "2 per rank × 1 × 3 accumulated = 6" in lines[2] and quiet["default_root_dir"].name in lines[3]
    assert lines[4].split() == ["start", "from", "scratch"]
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
def test_fit_prints_why_it_ended_and_the_best_checkpoint(
    name: str, quiet: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, reason = ENDS[name]
    saving = ModelCheckpoint(monitor="seen", mode="max")
    callbacks = [saving, *([arguments["callbacks"]] if "callbacks" in arguments else [])]
    trainer = Trainer(**{**quiet, "max_epochs": 5, "enable_checkpointing": True, **arguments, "callbacks": callbacks})
    trainer.fit(Logging(lambda module, batch: module.log("seen", 1.0, on_step=False, on_epoch=True)), numbered(2))
    out = capfd.readouterr().out
    assert re.search(rf"^ended       {reason}, after 0:00:\d\d$", out, re.MULTILINE), out
    if name not in ("time", "no batches"):
        assert f"best        {saving.best_model_path} (seen=1)" in out.splitlines()
    stopped_early = "EarlyStopping stops the run in epoch 1: seen did not improve in the last 1 checks." in out
    assert stopped_early == (name == "early stopping")


# evaluation -----------------------------------------------------------------------------------------------------------
def test_validate_and_test_return_the_metrics_of_each_loader(quiet: Any, capfd: pytest.CaptureFixture[str]) -> None:
    class Validated(Tiny):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("loss", batch.mean())
            self.log("own", float(dataloader_idx), add_dataloader_idx=False) if not dataloader_idx else None

    trainer, module = Trainer(**quiet), Validated()
    assert trainer.validate(module, numbered(3)) == [{"loss": 1.0, "own": 0.0}]
    assert "loss" in capfd.readouterr().out
    assert trainer.validate(dataloaders=[DataLoader(numbered(n), batch_size=None) for n in (3, 2)], verbose=False) == [
        {"loss/dataloader_idx_0": 1.0, "own": 0.0},
        {"loss/dataloader_idx_1": 0.5},
    ]
    assert capfd.readouterr().out == ""
    assert trainer.callback_metrics["loss/dataloader_idx_1"] == 0.5
    assert trainer.test(module, numbered(3), verbose=False) == [{"seen": 1.0}]


def test_predict_returns_the_outputs_of_each_loader(quiet: Any) -> None:
    trainer, module = Trainer(**quiet), Tiny()
    one = trainer.predict(module, numbered(3, size=2))
    assert torch.equal(torch.cat(one or []), torch.tensor([0.0, 0, 2, 2, 4, 4]).view(6, 1))
    several = trainer.predict(module, [DataLoader(numbered(n), batch_size=None) for n in (1, 2)])
    assert [[float(o) for o in outputs] for outputs in several or []] == [[0.0], [0.0, 2.0]]
    assert trainer.predict(module, numbered(3), return_predictions=False) is None
    assert module.net.weight.grad is None and module.training


@pytest.mark.parametrize("inference_mode", [True, False])
def test_inference_mode_applies_to_evaluation(quiet: Any, inference_mode: bool) -> None:
    seen: list[tuple[bool, bool, bool]] = []

    class RecordsMode(Tiny):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self.training))

    module = RecordsMode()
    Trainer(**quiet, inference_mode=inference_mode).test(module, numbered(1))
    assert seen == [(inference_mode, False, False)]
    assert module.training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_evaluation_restores_the_mode_of_each_submodule(fit: Any) -> None:
    module = Tiny()
    module.frozen = nn.Sequential(nn.Dropout()).eval()
    fit(module, numbered(2), numbered(1))
    assert module.training and not module.frozen.training and not module.frozen[0].training


# torch's global settings ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("given", "during"), [(True, (True, False)), ("warn", (True, True)), (False, (False, False))])
def test_deterministic_applies_only_during_the_run(fit: Any, given: Any, during: Any) -> None:
    seen: list[Any] = []

    def record(trainer: Any, module: Any) -> None:
        seen.append(
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        )

    variable = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    fit(Tiny(), numbered(1), deterministic=given, callbacks=LambdaCallback(on_train_start=record))
    assert seen == [during]
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == variable

    def fail(trainer: Any, module: Any) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        fit(Tiny(), numbered(1), deterministic=given, callbacks=LambdaCallback(on_train_start=fail))
    assert not torch.are_deterministic_algorithms_enabled()


def test_benchmark_and_detect_anomaly_apply_only_during_the_run(fit: Any) -> None:
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
            # The loss is finite, but its gradient is not.
            return torch.sqrt(self(batch).sum() * 0.0)

    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="returned nan"):
        warnings.simplefilter("ignore")
        fit(Bad(), numbered(2, start=1), detect_anomaly=True)
    module = Bad()
    fit(module, numbered(1, start=1))
    assert bool(module.net.weight.isnan().all())


# errors ---------------------------------------------------------------------------------------------------------------
def test_out_of_memory_errors_give_location_and_remedies(fit: Any) -> None:
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


def test_an_error_calls_on_exception_and_teardown_once(fit: Any) -> None:
    calls: list[Any] = []

    class Failing(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError("mine")

        def teardown(self, stage: str) -> None:
            calls.append(stage)

    callback = LambdaCallback(on_exception=lambda trainer, module, error: calls.append(type(error)))
    with pytest.raises(ZeroDivisionError, match=r"^mine(\n|$)"):
        fit(Failing(), numbered(1), callbacks=callback)
    assert calls == [ZeroDivisionError, "fit"]


def test_trainer_print_accepts_the_arguments_of_print(quiet: Any, capfd: pytest.CaptureFixture[str]) -> None:
    Trainer(**quiet).print("a", "b", sep="-")
    assert capfd.readouterr().out == "a-b\n"


def test_init_module_uses_the_trainers_precision(quiet: Any) -> None:
    trainer = Trainer(**quiet, precision="64-true")
    assert trainer.precision_plugin.name == "64-true" and trainer.scaler is None
    with trainer.init_module():
        module = Tiny()
    assert module.net.weight.dtype == torch.float64 and torch.get_default_dtype() == torch.float32


def test_module_callbacks_replace_trainer_callbacks_of_the_same_class(quiet: Any) -> None:
    calls: list[str] = []

    class Labeled(Callback):
        def __init__(self, label: str) -> None:
            self.label = label

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            calls.append(self.label)

    class BringsCallback(Tiny):
        def configure_callbacks(self) -> Any:
            return [Labeled("module's")]

    trainer = Trainer(**quiet, max_epochs=1, callbacks=[Labeled("trainer's"), Timer()])
    trainer.fit(BringsCallback(), numbered(1))
    assert calls == ["module's"]
    trainer.fit(Tiny(), numbered(1))
    assert calls == ["module's", "trainer's"]


def test_callbacks_can_be_added_and_removed_between_runs(quiet: Any) -> None:
    started: list[str] = []

    class Named(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        @property
        def state_key(self) -> str:
            return self.name

        def on_train_start(self, trainer: Any, module: Any) -> None:
            started.append(self.name)

    class Special(Named): ...

    class BringsSpecial(Tiny):
        def configure_callbacks(self) -> Any:
            return Special("the module's")

    first, second, replaced = Named("first"), Named("second"), Special("replaced")
    trainer = Trainer(**quiet, max_epochs=1, callbacks=[first, replaced])
    trainer.callbacks.append(second)
    trainer.fit(BringsSpecial(), numbered(1))
    assert started == ["first", "second", "the module's"]
    started.clear()
    trainer.callbacks.remove(first)
    trainer.fit(Tiny(), numbered(1))
    assert started == ["replaced", "second"]


def test_running_a_busy_trainer_raises(fit: Any) -> None:
    epochs: list[int] = []

    class Nested(Logging):
        def on_train_epoch_end(self) -> None:
            with pytest.raises(LeydenError, match=r"Trainer.validate was called while this Trainer's fit is running"):
                self.trainer.validate(self, numbered(1))
            epochs.append(self.current_epoch)

    module = Nested(lambda module, batch: module.log("epoch", float(module.current_epoch)))
    trainer = fit(module, numbered(1), max_epochs=2)
    assert epochs == [0, 1] and trainer.callback_metrics["epoch"] == 1.0


def test_the_order_attribute_sorts_callbacks(fit: Any) -> None:
    calls: list[str] = []

    def make(name: str, rank: int) -> Callback:
        body = {"order": rank, "on_train_epoch_end": lambda self, trainer, module: calls.append(name)}
        return type(name, (Callback,), body)()  # type: ignore[no-any-return]

    class RecordsEpochEnd(Tiny):
        def on_train_epoch_end(self) -> None:
            calls.append("module")

    fit(
        RecordsEpochEnd(),
        numbered(1),
        callbacks=[make("last", 200), make("late", 5), make("early", -1), make("plain", 0)],
    )
    assert calls == ["early", "plain", "late", "module", "last"]


def test_fit_does_not_consume_random_numbers(fit: Any) -> None:
    module = Tiny()
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    fit(module, numbered(3), numbered(2))
    assert torch.equal(torch_state, torch.get_rng_state()) and python_state == random.getstate()


class Compiled(Squares):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.compiling: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.compiling.append(torch.compiler.is_compiling())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_compiled_module_trains_like_the_plain_one(backend: str, quiet: Any) -> None:
    """The step goes through dynamo; "inductor" needs a C++ compiler, and takes seconds."""
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


class Logs(Squares):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        height = batch[0].mean()
        self.log("height", height, on_step=True, on_epoch=True)
        height += 100  # The logged value must not change with it.
        self.log_dict({"low": batch[0].min(), "one": 1.0}, on_epoch=True, reduce_fx="min")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_height", batch[0].mean())


def test_a_step_that_logs_compiles_once_and_logs_the_same_values(quiet: Any) -> None:
    """torch gives up on a step after 8 recompilations; `fullgraph` allows no graph break at `self.log`."""
    loader = DataLoader(TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(0))), batch_size=2)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    rows = []
    for wrap in (lambda module: module, partial(torch.compile, backend=backend, fullgraph=True)):
        torch.manual_seed(0)
        seen: list[float] = []
        watch = LambdaCallback(
            on_train_batch_end=lambda t, *_, seen=seen: seen.append(float(t.callback_metrics["height"]))
        )
        trainer = Trainer(**quiet, max_epochs=2, callbacks=watch)
        trainer.fit(wrap(Logs(nn.Linear(4, 1))), loader, loader)
        rows.append((seen, trainer.callback_metrics))
    assert len(graphs) == 2  # training_step and validation_step
    (plain_seen, plain), (compiled_seen, compiled) = rows
    assert plain_seen == compiled_seen and len(plain_seen) == 24
    assert plain.keys() == compiled.keys() >= {"height_step", "height_epoch", "low", "val_height"}
    assert all(torch.allclose(plain[name], compiled[name]) for name in plain)


# attributes that Lightning users read and set -------------------------------------------------------------------------
def test_log_dir_without_a_logger_is_default_root_dir(fit: Any, tmp_path: Path) -> None:
    seen: list[str] = []
    record = LambdaCallback(on_train_start=lambda trainer, module: seen.append(trainer.log_dir))
    trainer = fit(Tiny(), numbered(1), callbacks=record)
    assert [*seen, trainer.log_dir] == [str(tmp_path)] * 2


def test_a_tilde_in_a_path_expands_to_the_home_folder(
    quiet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_ckpt_path_is_the_checkpoint_the_last_run_started_from(quiet: Any) -> None:
    trainer, seen = Trainer(**{**quiet, "enable_checkpointing": True}, max_epochs=1), []

    class RecordsPath(Tiny):
        def setup(self, stage: str) -> None:
            seen.append(self.trainer.ckpt_path)

    assert trainer.ckpt_path is None
    trainer.fit(RecordsPath(), numbered(1))
    best = trainer.checkpoint_callbacks[0].best_model_path
    trainer.test(RecordsPath(), numbered(1), ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == best
    trainer.fit(RecordsPath(), numbered(1), ckpt_path="last", max_epochs=2)
    trainer.predict(RecordsPath(), numbered(1))
    assert trainer.ckpt_path is None and seen == [None, best, best, None]


def test_loggers_can_be_assigned_between_runs(quiet: Any, tmp_path: Path) -> None:
    first, second = CSVLogger(tmp_path, "first"), CSVLogger(tmp_path, "second")
    trainer = Trainer(**{**quiet, "logger": first}, max_epochs=1, log_every_n_steps=1)
    trainer.logger = second
    assert trainer.loggers == [second] and first not in trainer.callbacks

    module = Logging(lambda module, batch: module.log("x", 1.0))
    trainer.fit(module, numbered(2))
    assert not (tmp_path / "first").exists() and Path(second.metrics_file_path).exists()
    trainer.loggers = [first, second]
    trainer.fit(module, numbered(2))
    assert (tmp_path / "first").exists() and trainer.logger is first
    trainer.logger = None
    trainer.fit(module, numbered(2))
    assert trainer.loggers == [] and trainer.logger is None
    with pytest.raises(ConfigurationError, match=r"trainer\.logger: a str is not a logger: use"):
        trainer.logger = "csv"  # type: ignore[assignment]


def test_a_logger_can_be_assigned_in_setup_but_not_later(fit: Any, tmp_path: Path) -> None:
    mine = CSVLogger(tmp_path)
    seen: list[Any] = []

    class Assigns(Tiny):
        def setup(self, stage: str) -> None:
            self.trainer.logger = mine

        def on_train_start(self) -> None:
            seen.append(self.logger)
            with pytest.raises(LeydenError, match="assigned during a run: assign it before"):
                self.trainer.logger = None
            seen.append(self.logger)

    assert fit(Assigns(), numbered(1)).logger is mine and seen == [mine, mine]
    assert mine.log_dir is not None and Path(mine.log_dir).is_relative_to(tmp_path)


def test_a_logger_assigned_in_a_fast_dev_run_writes_nothing(quiet: Any, tmp_path: Path) -> None:
    trainer = Trainer(**quiet, fast_dev_run=True)
    trainer.logger = TensorBoardLogger(tmp_path)
    trainer.fit(Tiny(), numbered(1))
    assert type(trainer.logger) is DummyLogger and [*tmp_path.iterdir()] == []


def test_a_trainer_can_be_assigned_to_a_module(quiet: Any) -> None:
    module, trainer = Tiny(), Trainer(**quiet, max_epochs=1)
    module.trainer = trainer
    assert module.trainer is trainer and module.global_step == 0
    module.trainer = None
    with pytest.raises(LeydenError, match="not attached"):
        _ = module.trainer
    trainer.fit(module, numbered(1))
    assert module.trainer is trainer


class SetInClass(Tiny):
    """Sets as class attributes what others set in `__init__`; saves one of its two layers."""

    automatic_optimization = False
    strict_loading = False
    example_input_array = torch.zeros(1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(1, 1)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "frozen" not in name}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_module_settings_can_be_class_attributes(quiet: Any, tmp_path: Path) -> None:
    module = SetInClass()
    trainer = Trainer(**quiet, max_epochs=1)
    trainer.fit(module, numbered(3))
    path = trainer.save_checkpoint(tmp_path / "some")
    again = SetInClass()
    Trainer(**quiet, max_epochs=1).fit(again, numbered(3), ckpt_path=path)
    assert torch.equal(again.state_dict()["net.weight"], module.state_dict()["net.weight"])
    assert module.example_input_array is SetInClass.example_input_array and trainer.global_step == 3


def test_a_scripts_logging_takes_the_lines_of_a_run(quiet: Any, capfd: pytest.CaptureFixture[str]) -> None:
    logger, stream = logging.getLogger("leyden"), StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        trainer = Trainer(**quiet, max_epochs=1, enable_model_summary=True)
        trainer.fit(Squares(), DataLoader(torch.ones(8, 2), batch_size=4))
        trainer.print("the user's own text")
    finally:
        logger.removeHandler(handler)
    assert "strategy" in stream.getvalue() and "parameters in total" in stream.getvalue()
    assert capfd.readouterr() == ("the user's own text\n", "")


def test_verbose_false_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from leyden.callbacks import EarlyStopping, Timer, TQDMProgressBar

    def callbacks() -> list[Any]:
        return [EarlyStopping("flat", patience=1, check_on_train_epoch_end=True), Timer("00:00:10:00")]

    class Logged(Squares):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("flat", 1.0)
            return super().training_step(batch, batch_idx)

    data = DataLoader(torch.ones(8, 2), batch_size=4)
    for verbose in (False, True):
        trainer = Trainer(
            accelerator="cpu",
            logger=False,
            max_epochs=3,
            default_root_dir=tmp_path / str(verbose),
            verbose=verbose,
            validate_at_start=True,
            callbacks=callbacks(),
        )
        trainer.fit(Logged(), data, data)
        trainer.validate(Logged(), data)
        out, err = capfd.readouterr()
        assert (out + err == "") is not verbose
    trainer = Trainer(accelerator="cpu", verbose=False, enable_progress_bar=True, logger=False)
    assert trainer.progress_bar_callback is not None
    trainer = Trainer(accelerator="cpu", verbose=False, callbacks=TQDMProgressBar(), logger=False)
    assert trainer.progress_bar_callback is not None
    trainer = Trainer(accelerator="cpu", verbose=False, logger=False)
    trainer.print("the user's own text")
    assert capfd.readouterr().out == "the user's own text\n"
    with pytest.raises(ConfigurationError, match="verbose=2: use True or False"):
        Trainer(verbose=2)  # type: ignore[arg-type]


def test_accumulate_grad_batches_may_be_assigned_before_a_fit(quiet: Any) -> None:
    class Assigns(Tiny):
        def on_train_start(self) -> None:
            with pytest.raises(LeydenError, match="assigned during a run"):
                self.trainer.accumulate_grad_batches = 1  # type: ignore[union-attr]

    trainer = Trainer(**quiet, max_epochs=1, accumulate_grad_batches=2)
    trainer.accumulate_grad_batches = 4
    assert trainer.accumulate_grad_batches == 4
    trainer.fit(Assigns(), numbered(8))
    assert trainer.global_step == 2
    with pytest.raises(ConfigurationError, match="0"):
        trainer.accumulate_grad_batches = 0


def test_names_of_strategies_and_profilers_have_any_case(quiet: Any) -> None:
    trainer = Trainer(**quiet, strategy="Single_Device", profiler="Simple")
    assert trainer.strategy.name == "single_device" and isinstance(trainer.profiler, SimpleProfiler)
