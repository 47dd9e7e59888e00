"""Optimizers and schedulers: every form of configure_optimizers, and when each steps."""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from models import Logging, Squares, Tiny, finish_step, sgd
from samples import numbered
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from leyden import ConfigurationError, LeydenError
from leyden.callbacks import CSVLogger, GradientAccumulation, LambdaCallback
from leyden.strategies.precision import MixedPrecision


def dict_with_config(module: nn.Module, **options: Any) -> Any:
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), **options}}


def two_lists(module: nn.Module) -> Any:
    optimizers = [sgd(module), sgd(module)]
    return optimizers, [StepLR(optimizer, 1) for optimizer in optimizers]


def bare(module: nn.Module) -> Any:
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1)}


def plateau(module: nn.Module, kind: Any = ReduceLROnPlateau, patience: int = 10, **options: Any) -> Any:
    """SGD and a plateau scheduler that monitors "value"."""
    optimizer = sgd(module)
    config = {"scheduler": kind(optimizer, patience=patience), "monitor": "value", **options}
    return {"optimizer": optimizer, "lr_scheduler": config}


def with_monitor(module: nn.Module) -> Any:
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer), "monitor": "value"}


FORMS: dict[str, tuple[Callable[[nn.Module], Any], int, int]] = {
    "an optimizer": (sgd, 1, 0),
    "a list": (lambda module: [sgd(module), sgd(module)], 2, 0),
    "a tuple": (lambda module: (sgd(module), sgd(module)), 2, 0),
    "two lists": (two_lists, 2, 2),
    "two lists of one": (lambda module: ([o := sgd(module)], [StepLR(o, 1)]), 1, 1),
    "two lists, one empty": (lambda module: ([sgd(module)], []), 1, 0),
    "a list and a scheduler": (lambda module: ([o := sgd(module)], StepLR(o, 1)), 1, 1),
    "a list and a scheduler's dict": (lambda module: [[o := sgd(module)], {"scheduler": StepLR(o, 1)}], 1, 1),
    "a list and no scheduler": (lambda module: ([sgd(module)], None), 1, 0),
    "a dict": (lambda module: {"optimizer": sgd(module)}, 1, 0),
    "a dict with a scheduler": (bare, 1, 1),
    "a dict with a scheduler's dict": (dict_with_config, 1, 1),
    "a dict with a monitor": (with_monitor, 1, 1),
    "a list of dicts": (lambda module: [bare(module), {"optimizer": sgd(module)}], 2, 1),
    "a tuple of dicts": (lambda module: (bare(module), bare(module)), 2, 2),
    "none": (lambda module: None, 0, 0),
}


@pytest.mark.parametrize("form", FORMS)
def test_configure_optimizers_accepts_every_form(fit: Any, form: str) -> None:
    make, optimizers, schedulers = FORMS[form]

    module = Logging(lambda module, batch: module.log("value", 1.0), make)
    trainer = fit(module, numbered(3), max_epochs=2)
    assert (len(trainer.optimizers), len(trainer.lr_scheduler_configs)) == (optimizers, schedulers)
    # One global step per window, however many optimizers step in it.
    assert trainer.global_step == 6
    assert bool((module.net.weight == 1).all()) == (optimizers == 0)


def scaled(precision: str) -> Any:
    """Returns the precision, with a loss scale at which gradients of a few units do not overflow."""
    return MixedPrecision("16", init_scale=64.0) if precision == "16-mixed" else precision


# schedulers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "counts"),
    [
        # After each of two epochs of 5 batches in windows of 2 (3 steps).
        ({}, [1, 2]),
        ({"interval": "step"}, [3, 6]),
        ({"interval": "step", "frequency": 2}, [1, 3]),
        ({"interval": "epoch", "frequency": 2}, [0, 1]),
    ],
)
def test_schedulers_step_by_interval_and_frequency(fit: Any, options: Any, counts: list[int]) -> None:
    found: list[int] = []
    counting = LambdaCallback(
        on_train_epoch_end=lambda trainer, module: found.append(module.lr_schedulers().last_epoch)
    )
    module = Tiny(lambda module: dict_with_config(module, **options))
    trainer = fit(module, numbered(5), max_epochs=2, accumulate_grad_batches=2, callbacks=counting)
    assert found == counts
    assert trainer.lr_scheduler_configs[0].scheduler is module.lr_schedulers()


def test_no_scheduler_steps_when_the_scaler_skips(fit: Any) -> None:
    counts: list[int] = []

    class Counting(Tiny):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            counts.append(self.lr_schedulers().last_epoch)

    one, inf, two = torch.ones(1, 2), torch.full((1, 2), float("inf")), torch.full((1, 2), 2.0)
    module = Counting(lambda module: dict_with_config(module, interval="step"))
    trainer = fit(module, [one, inf, inf, two, one], precision=MixedPrecision("16", init_scale=8.0))
    assert counts == [1, 1, 1, 2, 3]
    assert (trainer.global_step, trainer.progress.stepped) == (5, 3)
    assert trainer.strategy.precision.scaler.get_scale() == 2.0


@pytest.mark.parametrize(
    ("options", "values"),
    [
        # Validations log 1, 2, 3, 4: the values passed to the scheduler.
        ({}, [2.0, 4.0]),
        ({"interval": "epoch", "frequency": 2}, [4.0]),
        ({"interval": "step", "frequency": 2}, [1.0, 2.0, 3.0, 4.0]),
        ({"interval": "step", "frequency": 4}, [2.0, 4.0]),
    ],
)
def test_plateau_schedulers_step_after_validation(fit: Any, options: Any, values: list[float]) -> None:
    seen: list[float] = []

    class RecordingPlateau(ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            seen.append(float(metrics))
            super().step(metrics)

    class Validated(Tiny):
        validations = 0

        def on_validation_epoch_end(self) -> None:
            self.validations += 1
            self.log("value", float(self.validations))

    module = Validated(lambda module: plateau(module, RecordingPlateau, patience=0, **options))
    trainer = fit(module, numbered(4), numbered(1), max_epochs=2, val_check_interval=0.5, num_sanity_val_steps=0)
    assert seen == values
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.1 or len(values) == 1


def test_no_plateau_scheduler_steps_when_the_scaler_skips(fit: Any) -> None:
    stepped: list[int] = []

    class Overflowing(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self(batch).mean()
            self.log("value", loss)
            return loss * float("inf") if batch_idx in (0, 2) else loss

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            stepped.append(self.global_step)
            super().lr_scheduler_step(scheduler, metric)

    module = Overflowing(lambda module: plateau(module, interval="step"))
    trainer = fit(module, numbered(5, start=1), precision=MixedPrecision("16", init_scale=8.0))
    assert stepped == [2, 4, 5]
    assert trainer.progress.stepped == 3


def test_a_non_strict_plateau_scheduler_only_warns_without_its_metric(fit: Any) -> None:
    module = Tiny(lambda module: plateau(module, monitor="nothing", strict=False))
    with pytest.warns(UserWarning, match="monitors 'nothing', which was not logged"):
        assert fit(module, numbered(2)).global_step == 2


def test_a_custom_scheduler_steps_through_lr_scheduler_step(fit: Any) -> None:
    class EpochScheduler:
        calls: ClassVar[list[Any]] = []

        def step(self, epoch: int) -> None:
            self.calls.append(epoch)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    class Stepping(Tiny):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.log("stepping", 1.0)
            scheduler.step(self.global_step)

    config = {"scheduler": EpochScheduler(), "interval": "step", "name": "custom"}
    trainer = fit(Stepping(lambda module: ([sgd(module)], [config])), numbered(3))
    assert EpochScheduler.calls == [1, 2, 3]
    assert trainer.lr_scheduler_configs[0].name == "custom" and "stepping" in trainer.callback_metrics


# several optimizers, overrides ----------------------------------------------------------------------------------------
class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_several_optimizers_step_once_per_window(fit: Any, accumulate: int) -> None:
    def one_each(net: TwoLayers) -> list[Any]:
        return [Adam(net.first.parameters(), 0.1), SGD(net.second.parameters(), 0.1)]

    net = TwoLayers()
    data, module = numbered(7, size=2), Squares(copy.deepcopy(net), lambda module: one_each(module.net))
    trainer = fit(module, data, accumulate_grad_batches=accumulate)
    optimizers = one_each(net)
    for start in range(0, 7, accumulate):
        window = data[start : start + accumulate]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for batch in window:
            (net(batch).square().mean() / len(window)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for expected, found in zip(net.parameters(), module.net.parameters(), strict=True):
        assert torch.equal(expected, found)
    assert trainer.global_step == -(-7 // accumulate)


def test_toggling_disables_gradients_of_all_other_optimizers(fit: Any) -> None:
    class Adversaries(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = TwoLayers(), False
            self.seen: list[Any] = []
            self.after: list[bool] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for number, optimizer in enumerate(self.optimizers()):
                with self.toggled_optimizer(optimizer):
                    self.seen.append([p.requires_grad for p in (self.net.first.weight, self.net.second.weight)])
                    loss = self.net(batch).square().mean()
                    optimizer.zero_grad()
                    self.manual_backward(loss)
                    self.seen.append([p.grad is not None for p in (self.net.first.weight, self.net.second.weight)])
                    if number == batch_idx % 2:
                        optimizer.step()
            self.after.append(all(p.requires_grad for p in self.net.parameters()))

        def configure_optimizers(self) -> Any:
            return [sgd(self.net.first), sgd(self.net.second)]

    module = Adversaries()
    trainer = fit(module, numbered(2, size=2))
    assert module.seen[:3] == [[True, False], [True, False], [False, True]]
    assert module.after == [True, True]
    assert trainer.global_step == 2


def test_untoggling_restores_a_parameter_shared_by_several_optimizers(fit: Any) -> None:
    class Shared(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = TwoLayers(), False
            self.net.second.bias.requires_grad = False
            self.seen: list[list[bool]] = []

        def record(self) -> None:
            self.seen.append([p.requires_grad for p in self.net.parameters()])

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second, _ = self.optimizers()
            with self.toggled_optimizer(first):
                self.record()
                with self.toggled_optimizer(second):
                    self.record()
                self.record()
            self.record()
            self.toggle_optimizer(first)
            self.toggle_optimizer(second)
            self.record()
            self.untoggle_optimizer(second)
            self.record()

        def configure_optimizers(self) -> Any:
            return [sgd(self.net.first), sgd(self.net.second), sgd(self.net.second)]

    module = Shared()
    fit(module, numbered(1))
    of_first, of_second, of_all = [True, True, False, False], [False, False, True, False], [True, True, True, False]
    assert module.seen == [of_first, of_second, of_first, of_all, of_second, of_all]


def test_an_optimizers_toggle_model_restores_requires_grad(fit: Any) -> None:
    class Adversary(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = TwoLayers(), False
            self.seen: list[list[bool]] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            with first.toggle_model():
                self.seen.append([p.requires_grad for p in self.net.parameters()])
                with second.toggle_model(sync_grad=False):
                    self.seen.append([p.requires_grad for p in self.net.parameters()])
            self.seen.append([p.requires_grad for p in self.net.parameters()])

        def configure_optimizers(self) -> Any:
            return [sgd(self.net.first), sgd(self.net.second)]

    module = Adversary()
    fit(module, numbered(1))
    assert module.seen == [[True, True, False, False], [False, False, True, True], [True] * 4]


def test_manual_optimization_counts_only_batches_in_which_an_optimizer_stepped(fit: Any) -> None:
    clipped: list[Any] = []

    class Manual(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self(batch).mean() / 2)
            if batch_idx % 2:
                clipped.append(self.clip_gradients(optimizer, 1e-3, "norm"))
                optimizer.step()
                optimizer.zero_grad()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            clipped.append("before")

    trainer = fit(Manual(), numbered(6, start=1))
    assert trainer.global_step == 3
    assert len(clipped) == 6 and clipped[1] == "before" and float(clipped[0]) > 1e-3


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_overridden_optimizer_hooks_are_called_in_the_order_of_a_step(fit: Any, precision: str) -> None:
    calls: list[Any] = []

    class Overriding(Tiny):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            calls.append((epoch, batch_idx))
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (batch_idx + 1)
            self.log("closure", optimizer_closure())
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            calls.append("zero")
            optimizer.zero_grad(set_to_none=False)

        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            calls.append("backward")
            super().backward(loss, *args, **kwargs)

    module = Overriding()
    trainer = fit(module, [torch.ones(1, 2)] * 2, precision=scaled(precision))
    assert calls == ["zero", "backward", (0, 0), "zero", "backward", (0, 1)]
    assert torch.allclose(module.net.weight, torch.full((1, 2), 1 - 0.1 - 0.2))
    assert abs(float(trainer.callback_metrics["closure"]) - 1.8) < 0.01 and trainer.global_step == 2


@pytest.mark.parametrize(("algorithm", "weight"), [("norm", 1 - 0.1 * 0.5 / 2**0.5), ("value", 1 - 0.1 * 0.5)])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_clipping_limits_the_step(fit: Any, algorithm: str, weight: float, precision: str) -> None:
    module = Tiny()
    fit(
        module,
        [torch.full((1, 2), 4.0)] * 2,
        gradient_clip_val=0.5,
        gradient_clip_algorithm=algorithm,
        accumulate_grad_batches=2,
        precision=scaled(precision),
    )
    assert torch.allclose(module.net.weight, torch.full((1, 2), weight))


def test_custom_clipping_sees_unscaled_gradients_and_may_log(fit: Any) -> None:
    arguments: list[Any] = []
    norms: list[float] = []

    class Clipping(Tiny):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            arguments.append((gradient_clip_val, gradient_clip_algorithm))
            norm = self.clip_gradients(optimizer, 1.0)
            norms.append(float(norm))
            self.log("norm", norm)

    trainer = fit(Clipping(), [torch.full((1, 2), 4.0)] * 2, precision=scaled("16-mixed"))
    assert arguments == [(None, "norm")] * 2
    assert norms == pytest.approx([32**0.5] * 2, rel=1e-3)
    assert float(trainer.callback_metrics["norm"]) == pytest.approx(32**0.5, rel=1e-3)


def test_accumulation_may_change_by_epoch(fit: Any) -> None:
    trainer = fit(Tiny(), numbered(6), max_epochs=4, callbacks=GradientAccumulation({1: 4, 3: 6}))
    assert trainer.global_step == 6 + 2 + 2 + 1
    assert trainer.accumulate_grad_batches == 6


@pytest.mark.parametrize("of_tensors", [True, False])
def test_num_items_weights_the_window(fit: Any, of_tensors: bool) -> None:
    class Weighted(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            count = len(batch)
            return {"loss": self(batch).sum(), "num_items": torch.tensor(count) if of_tensors else count}

    rows = torch.arange(10.0).view(5, 2)
    small, whole = Weighted(), Weighted()
    fit(small, [rows[:1], rows[1:4], rows[4:]], accumulate_grad_batches=3)
    fit(whole, [rows])
    assert torch.allclose(small.net.weight, whole.net.weight)
    assert torch.allclose(whole.net.weight, 1 - 0.1 * rows.mean(0))


def test_hooks_see_the_undivided_loss(fit: Any) -> None:
    seen: list[Any] = []

    class RecordsLosses(Tiny):
        def on_before_backward(self, loss: Any) -> None:
            seen.append(float(loss))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((float(outputs), outputs.requires_grad))

    fit(RecordsLosses(), [torch.ones(1, 2)] * 4, accumulate_grad_batches=4, precision=scaled("16-mixed"))
    assert seen == [2.0, (2.0, False)] * 4


def test_a_closure_optimizer_may_evaluate_the_loss_repeatedly(fit: Any) -> None:
    class Newton(Tiny):
        evaluations = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.evaluations += 1
            self.log("loss", loss := (self(batch) - 5.0).square().mean())
            return loss

    module = Newton(lambda module: torch.optim.LBFGS(module.parameters(), max_iter=5))
    trainer = fit(module, [torch.tensor([[1.0, 2.0]])] * 2)
    assert trainer.global_step == 2 and module.evaluations > 2
    assert float(module(torch.tensor([[1.0, 2.0]]))) == pytest.approx(5.0, abs=1e-2)


NAN = torch.full((1, 2), float("nan"))


def test_a_scaler_that_keeps_skipping_raises(fit: Any) -> None:
    with pytest.raises(LeydenError, match=r"skipped 40 steps in a row.*precision='bf16-mixed'.*init_scale"):
        fit(Tiny(), [NAN] * 50, precision="16-mixed")


def test_skips_are_counted_per_window_with_several_optimizers(fit: Any) -> None:
    module = Tiny(lambda module: [sgd(module), sgd(module)])
    trainer = fit(module, [NAN] * 30 + [torch.ones(1, 2)] * 2, precision="16-mixed")
    assert trainer.global_step == 32


def test_fitting_a_frozen_module_raises(fit: Any) -> None:
    module = Tiny()
    module.freeze()
    assert not module.training and not module.net.weight.requires_grad
    with pytest.raises(ConfigurationError, match="keep at least one parameter trainable"), pytest.warns(UserWarning):
        fit(module, numbered(1))
    module.unfreeze()
    assert module.training and fit(module, numbered(1)).global_step == 1


class HalvesGradients(SGD):
    """An optimizer whose `zero_grad` keeps half of each gradient."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad *= 0.5


def patched(module: nn.Module) -> SGD:
    """Returns an optimizer with `zero_grad` replaced on the instance, as libraries that wrap optimizers do."""
    optimizer = SGD(module.parameters(), 0.1)
    optimizer.zero_grad = HalvesGradients.zero_grad.__get__(optimizer)  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize(
    "make", [lambda module: HalvesGradients(module.parameters(), 0.1), patched], ids=["class", "object"]
)
def test_an_optimizers_overridden_zero_grad_is_called(fit: Any, make: Any) -> None:
    module = Tiny(make)
    fit(module, [torch.ones(1, 2)] * 3, max_epochs=1)
    # Gradients of 1, 1.5 and 1.75, where torch's own would have left 1 each time.
    torch.testing.assert_close(module.net.weight, torch.full_like(module.net.weight, 1 - 0.1 * (1 + 1.5 + 1.75)))


def test_gradients_of_parameters_added_later_are_cleared_too(fit: Any) -> None:
    class Growing(Tiny):
        def configure_optimizers(self) -> Any:
            self.late = nn.Parameter(torch.zeros(()))
            return SGD(self.net.parameters(), lr=1.0)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                self.optimizers().add_param_group({"params": [self.late]})
            return self.late + 0 * self(batch).mean()

    module = Growing()
    fit(module, numbered(4), max_epochs=1)
    # The first step with the parameter (batch 1) has the gradients of batches 0 and 1; later steps have one each.
    assert module.late.item() == -(2 + 1 + 1)


# manual optimization as in Lightning's scripts ------------------------------------------------------------------------
@pytest.mark.parametrize("as_dict", [True, False])
def test_a_plateau_scheduler_needs_no_monitor_in_manual_optimization(fit: Any, as_dict: bool) -> None:
    class Manual(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            finish_step(self, self(batch).mean())
            self.lr_schedulers().step(1.0)

    def configure(module: Any) -> Any:
        optimizer = sgd(module)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        if as_dict:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}
        return [optimizer], [scheduler]

    module = Manual(configure)
    module.automatic_optimization = False
    assert fit(module, numbered(3)).optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5 * 0.5


class RecordsTimes(SGD):
    """An optimizer whose step takes an extra argument."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.times: list[int] = []

    def step(self, closure: Any = None, *, times: int = 1) -> Any:
        self.times.append(times)
        return super().step(closure)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("automatic", [True, False])
def test_extra_arguments_of_step_reach_the_optimizer(fit: Any, precision: str, automatic: bool) -> None:
    class Stepping(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self(batch).mean()
            if automatic:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step(times=3)
            return None

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(optimizer_closure, times=3)

    module = Stepping(lambda module: RecordsTimes(module.parameters()))
    module.automatic_optimization = automatic
    trainer = fit(module, numbered(2), precision=scaled(precision))
    assert trainer.optimizers[0].times == [3, 3]


def test_optimizers_are_available_wrapped_and_unwrapped(fit: Any) -> None:
    module = Tiny()
    [unwrapped] = fit(module, numbered(1)).optimizers
    wrapped = module.optimizers()
    assert wrapped.optimizer is unwrapped and module.optimizers(use_pl_optimizer=True) is wrapped
    assert module.optimizers(use_pl_optimizer=False) is unwrapped is module.optimizers(False)


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_values_logged_in_a_plateau_scheduler_step_reach_the_loggers(fit: Any, tmp_path: Path, interval: str) -> None:
    class Stepping(Logging):
        calls = 0

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.calls += 1
            self.log("stepped", float(self.calls))
            self.log("mean", float(self.calls), on_step=False, on_epoch=True)
            super().lr_scheduler_step(scheduler, metric)

    module = Stepping(
        lambda module, batch: module.log("value", float(batch.mean())),
        lambda module: plateau(module, interval=interval),
    )
    trainer = fit(module, numbered(3), numbered(2), max_epochs=2, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    with Path(trainer.log_dir, "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {
        name: [(row["step"], float(row[name])) for row in rows if row[name]] for name in ("value", "stepped", "mean")
    }
    assert found["value"] == [(str(step), float((step - 1) % 3)) for step in range(1, 7)]
    if interval == "epoch":
        assert found["stepped"] == [("3", 1.0), ("6", 2.0)] == found["mean"]
    else:
        assert found["stepped"] == [(str(step), float(step)) for step in range(1, 7)]
        assert found["mean"] == [("3", 2.0), ("6", 5.0)]
    assert {"stepped", "mean"} <= set(trainer.callback_metrics)


class Stateful:
    """A scheduler of one's own, without torch's methods."""

    count = 0

    def step_update(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_manual_optimization_drives_schedulers_by_their_own_methods(fit: Any) -> None:
    class Manual(Tiny):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [sgd(self)], [Stateful()]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.lr_schedulers().step_update()  # type: ignore[union-attr]

    module = Manual()
    fit(module, numbered(3))
    assert module.lr_schedulers().count == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("automatic", [True, False])
def test_a_scheduler_without_a_state_is_refused_before_training(fit: Any, automatic: bool) -> None:
    class Stepping:
        def step(self) -> None:
            pass

    module = Squares()
    module.automatic_optimization = automatic
    module.configure_optimizers = lambda: ([sgd(module)], [Stepping()])  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="state_dict, load_state_dict"):
        fit(module, numbered(3))
