"""Manual optimization in 16-mixed: every gradient is unscaled by its own scale, as in the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from torch import Tensor, nn

from leyden import Trainer, TrainModule
from leyden.strategies.precision import MixedPrecision

# The scale changes after every step, so an update at the wrong moment shows in the weights.
SCALER: dict[str, Any] = {"init_scale": 2.0**4, "growth_interval": 1, "growth_factor": 3.0}
BATCHES = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))


class TwoOptimizers(TrainModule):
    """Two layers with an optimizer each; its training step is the given function."""

    def __init__(self, manual_step: Callable[[TwoOptimizers, Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = False
        self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 1)
        self.manual_step = manual_step

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.b(self.a(x)).square().mean()
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_step(self, batch)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(layer.parameters(), 0.1) for layer in (self.a, self.b)]


def fit(manual_step: Callable[[TwoOptimizers, Tensor], None], folder: Path, precision: Any = None) -> TwoOptimizers:
    module = TwoOptimizers(manual_step)
    precision = precision or MixedPrecision("16", **SCALER)
    Trainer(**QUIET, precision=precision, max_epochs=1, default_root_dir=folder).fit(module, [*BATCHES])
    return module


def plain_loop(
    step: Callable[[TwoOptimizers, list[Any], Any, Callable[[], Tensor]], None],
    scaler: Any = None,
    half: torch.dtype = torch.float16,
) -> TwoOptimizers:
    module = TwoOptimizers(lambda *_: None)
    optimizers, scaler = module.configure_optimizers(), scaler or torch.amp.GradScaler("cpu", **SCALER)
    for batch in BATCHES:

        def loss(batch: Tensor = batch) -> Tensor:
            with torch.autocast("cpu", half):
                return module(batch)

        step(module, optimizers, scaler, loss)
    return module


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_of_one_backward_are_unscaled_for_each_of_two_optimizers(clips: bool, tmp_path: Path) -> None:
    def manual_step(module: TwoOptimizers, batch: Tensor) -> None:
        optimizers = module.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        module.manual_backward(module(batch))
        if clips:
            for optimizer in optimizers:
                module.clip_gradients(optimizer, 0.01, "norm")
        for optimizer in optimizers:
            optimizer.step()

    def step(module: TwoOptimizers, optimizers: list[Any], scaler: Any, loss: Callable[[], Tensor]) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss()).backward()
        for optimizer, layer in zip(optimizers, (module.a, module.b), strict=True):
            scaler.unscale_(optimizer)
            if clips:
                nn.utils.clip_grad_norm_(layer.parameters(), 0.01)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    assert_same(fit(manual_step, tmp_path), plain_loop(step))


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_one_optimizer_may_step_several_times_in_a_batch(precision: str, tmp_path: Path) -> None:
    """The second forward sees the weights of the first step, not autocast's copies of those before it."""

    def manual_step(module: TwoOptimizers, batch: Tensor) -> None:
        optimizer = module.optimizers()[0]
        for _ in range(3):
            optimizer.zero_grad()
            module.manual_backward(module(batch))
            optimizer.step()
        module.optimizers()[1].step()
        module.optimizers()[1].zero_grad()

    def step(module: TwoOptimizers, optimizers: list[Any], scaler: Any, loss: Callable[[], Tensor]) -> None:
        for _ in range(3):
            optimizers[0].zero_grad()
            scaler.scale(loss()).backward()
            scaler.step(optimizers[0])
            scaler.update()
        scaler.step(optimizers[1])
        scaler.update()
        optimizers[1].zero_grad()

    # Powers of two scale without rounding, so it does not matter in which steps the scale grows.
    growing = MixedPrecision("16", init_scale=2.0**10, growth_interval=2)
    fixed = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=precision == "16-mixed")
    module = fit(manual_step, tmp_path, growing if precision == "16-mixed" else precision)
    assert_same(module, plain_loop(step, fixed, torch.float16 if precision == "16-mixed" else torch.bfloat16))


def test_an_inf_in_any_step_of_a_batch_lowers_the_scale(tmp_path: Path) -> None:
    def manual_step(module: TwoOptimizers, batch: Tensor) -> None:
        optimizer = module.optimizers()[0]
        for number in range(2):
            optimizer.zero_grad()
            module.manual_backward(module(batch) * (float("inf") if number == 0 else 1.0))
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)

    skipped: list[bool] = []
    precision = MixedPrecision("16", init_scale=2.0**10, growth_interval=1)
    fit(manual_step, tmp_path, precision)
    assert skipped == [True, False] * len(BATCHES)
    assert precision.scaler.get_scale() == 2.0 ** (10 - len(BATCHES))


def test_accumulation_in_manual_optimization_equals_the_plain_loop(tmp_path: Path) -> None:
    def manual_step(module: TwoOptimizers, batch: Tensor) -> None:
        optimizer = module.optimizers()[0]
        seen = module.__dict__.setdefault("seen", [])
        seen.append(1)
        module.manual_backward(module(batch) / 3)
        if len(seen) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()

    seen: list[int] = []

    def step(module: TwoOptimizers, optimizers: list[Any], scaler: Any, loss: Callable[[], Tensor]) -> None:
        seen.append(1)
        scaler.scale(loss() / 3).backward()
        if len(seen) % 3 == 0:
            scaler.step(optimizers[0])
            scaler.update()
            optimizers[0].zero_grad()

    assert_same(fit(manual_step, tmp_path), plain_loop(step))


class SkipsSteps(Squares):
    """Steps only in every second window, by overriding `optimizer_step`; records the norms of its gradients."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(3, 1), lambda module: torch.optim.SGD(module.parameters(), 0.0))
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(self.net.weight.grad.norm()))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step()


def test_gradients_of_a_window_without_a_step_are_unscaled_once(tmp_path: Path) -> None:
    """Hooks see the norms of a run without a scaler, in that window and in the next."""
    plain, scaled = SkipsSteps(), SkipsSteps()
    for module, precision in ((plain, "32-true"), (scaled, MixedPrecision("16", **SCALER))):
        Trainer(**QUIET, precision=precision, max_epochs=1, default_root_dir=tmp_path).fit(module, [*BATCHES])
    assert len(plain.norms) == len(scaled.norms) == 6
    assert plain.norms == pytest.approx(scaled.norms, rel=0.02)


def test_an_optimizer_steps_in_a_fit_that_follows_a_failed_one(tmp_path: Path) -> None:
    class KeepsOptimizers(TwoOptimizers):
        """Keeps its optimizers for the next fit."""

        def configure_optimizers(self) -> Any:
            self.kept = getattr(self, "kept", None) or super().configure_optimizers()
            return self.kept

    def manual_step(module: TwoOptimizers, batch: Tensor) -> None:
        optimizer = module.optimizers()[0]
        module.manual_backward(module(batch))
        optimizer.step()
        if fails:
            raise RuntimeError("after the step")

    module, fails = KeepsOptimizers(manual_step), True
    precision = MixedPrecision("16", **SCALER)
    trainer = Trainer(**QUIET, precision=precision, max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(RuntimeError, match="after the step"):
        trainer.fit(module, [*BATCHES])
    fails = False
    trainer.fit(module, [*BATCHES])
    assert trainer.global_step == len(BATCHES)
