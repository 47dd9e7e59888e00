"""DeepSpeedStrategy's runs: evaluation, a second fit, schedulers of the config, refusals, and a rank that fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import QUIET
from ranks.world import run_world
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from leyden import ConfigurationError, Trainer, TrainModule
from leyden.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy

# For the launch that the tests of this file share.
pytestmark = pytest.mark.timeout(900)


class Net(TrainModule):
    """A regression; `kind` chooses its optimizers and what goes wrong."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.kind = kind
        self.automatic_optimization = kind != "manual"
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.samples = 0
        self.modes: set[bool] = set()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kind == "fails" and batch_idx == 2 and self.global_rank == 1:
            raise RuntimeError("the third batch is bad")
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.modes.add(torch.is_inference_mode_enabled())
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.samples += len(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        if self.kind == "config":
            return None
        optimizer: Any = AdamW(self.parameters(), lr=0.01)
        if self.kind == "two":
            return [optimizer, SGD(self.parameters(), lr=0.1)]
        if self.kind == "schedule":
            return [optimizer], [StepLR(optimizer, 1)]
        return LBFGS(self.parameters()) if self.kind == "lbfgs" else optimizer


class OwnClipping(Net):
    """Clips in every second step only."""

    def configure_gradient_clipping(self, optimizer: Any, value: Any = None, algorithm: Any = None) -> None:
        if self.global_step % 2:
            self.clip_gradients(optimizer, 0.01, "norm")


class OwnBackward(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def data(samples: int = 32, batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 4, generator=generator), torch.randn(samples, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def zero(stage: int, **arguments: Any) -> DeepSpeedStrategy:
    return DeepSpeedStrategy(stage=stage, **arguments)  # type: ignore[arg-type]


def trainer_of(strategy: Any, **arguments: Any) -> Trainer:
    return Trainer(strategy=strategy, **{**QUIET, "max_epochs": 1, **arguments})


def evaluated(strategy: Any) -> dict[str, Any]:
    """Validates before, during and after a fit, and predicts."""
    module, trainer = Net(), trainer_of(strategy, num_sanity_val_steps=1)
    before = trainer.validate(module, data(103, 8), verbose=False)[0]["val_loss"]
    samples, module.samples = module.samples, 0
    trainer.fit(module, data(), data(103, 8))
    within, module.samples = (float(trainer.callback_metrics["val_loss"]), module.samples), 0
    after = trainer.validate(module, data(103, 8), verbose=False)[0]["val_loss"]
    predicted = trainer.predict(module, data(103, 8))
    assert predicted is not None
    return {
        "before": before,
        "within": within[0],
        "after": after,
        "samples": samples,
        "losses": module.losses,
        "predicted": torch.cat(predicted).flatten().tolist(),
        "inference": module.modes,
    }


def fitted_again(stage: int) -> dict[str, Any]:
    """Fits a module, continues the fit, fits it again, and fits another module."""
    module, trainer = Net(), trainer_of(zero(stage))
    trainer.fit(module, data())
    first = trainer.strategy.engine
    trainer.fit(module, ckpt_path="current", max_epochs=2, train_dataloaders=data())
    assert trainer.strategy.engine is first
    trainer.fit(module, data())
    assert trainer.strategy.engine is not first
    losses = list(module.losses)
    weights = trainer.strategy.full_state_dict(module)
    other = Net()
    trainer.fit(other, data())
    assert other.losses == losses[:4] and len(losses) == 12
    trainer.strategy.close_engine()
    # DeepSpeed's changes to torch are undone.
    assert F.linear.__module__ != "deepspeed.runtime.zero.linear"
    if weights and stage < 3:
        plain = Net()
        plain.load_state_dict(weights)
        with torch.no_grad():
            assert torch.equal(plain(torch.ones(2, 4)), module(torch.ones(2, 4)))
    return {"losses": losses}


def fitted_again_by_ddp() -> dict[str, Any]:
    module, trainer = Net(), trainer_of("ddp")
    trainer.fit(module, data())
    trainer.fit(module, ckpt_path="current", max_epochs=2, train_dataloaders=data())
    trainer.fit(module, data())
    return {"losses": module.losses}


def clipped(strategy: Any) -> list[float]:
    module = OwnClipping()
    trainer_of(strategy).fit(module, data())
    return module.losses


def scheduled() -> dict[str, Any]:
    """Trains with the config's schedulers, over windows of two of the four batches on each rank."""
    found: dict[str, Any] = {}
    for name, section in {
        "warm": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 4, "warmup_max_lr": "auto", "warmup_type": "linear"},
        },
        "torch": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
    }.items():
        module = Net()
        strategy = zero(2, config={"scheduler": section, "steps_per_print": 1000})
        trainer = trainer_of(strategy, accumulate_grad_batches=2, max_epochs=2)
        trainer.fit(module, data())
        found[name] = module.rates, len(trainer.lr_scheduler_configs), trainer.global_step
    return found


def refused() -> dict[str, str]:
    """Returns the errors of impossible runs, none of which trains."""
    cases: dict[str, tuple[Net, dict[str, Any], dict[str, Any]]] = {
        "manual": (Net("manual"), {}, {}),
        "two": (Net("two"), {}, {}),
        "lbfgs": (Net("lbfgs"), {}, {}),
        "backward": (OwnBackward(), {}, {}),
        "both optimizers": (Net(), {"config": {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}}, {}),
        "no optimizer": (Net("config"), {}, {}),
        "both schedulers": (Net("schedule"), {"config": {"scheduler": {"type": "WarmupLR", "params": {}}}}, {}),
        "unknown scheduler": (Net(), {"config": {"scheduler": {"type": "WarmUpLR", "params": {}}}}, {}),
        "batch size": (Net(), {"config": {"train_micro_batch_size_per_gpu": 2}}, {}),
        "fp16": (Net(), {}, {"precision": "16-mixed"}),
        "bf16": (Net(), {"config": {"bf16": {"enabled": True}}}, {}),
        "deepspeed's own": (Net(), {"config": {"elasticity": {"enabled": True}}}, {}),
    }
    found = {}
    for name, (module, arguments, trainer) in cases.items():
        try:
            trainer_of(zero(2, **arguments), **trainer).fit(module, data())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        assert not module.losses, name
    return found


def run_all() -> dict[str, Any]:
    return {
        "evaluation": {stage: evaluated("ddp" if stage is None else zero(stage)) for stage in (None, 2, 3)},
        "again": {stage: fitted_again(stage) for stage in (0, 2, 3)} | {None: fitted_again_by_ddp()},
        "clipped": {stage: clipped("ddp" if stage is None else zero(stage)) for stage in (None, 0, 1, 3)},
        "scheduled": scheduled(),
    }


@pytest.fixture(scope="module")
def found() -> Any:
    return run_world(2, run_all, timeout=800)


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluation_sees_each_sample_once(found: Any, stage: int) -> None:
    ranks = [rank["evaluation"][stage] for rank in found]
    expected = found[0]["evaluation"][None]
    assert sum(rank["samples"] for rank in ranks) == 103
    for rank in ranks:
        for name in ("before", "within", "after"):
            assert rank[name] == pytest.approx(expected[name], rel=1e-6)
        assert rank["predicted"] == pytest.approx(expected["predicted"], rel=1e-5, abs=1e-7)
        assert len(rank["predicted"]) == 103
        assert rank["inference"] == {stage < 3}
    assert ranks[0]["losses"] == pytest.approx(expected["losses"], rel=1e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_module_can_be_fit_again(found: Any, stage: int) -> None:
    for rank in found:
        assert rank["again"][stage]["losses"] == pytest.approx(rank["again"][None]["losses"], rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_hook_may_clip_in_some_steps_only(found: Any, stage: int) -> None:
    for rank in found:
        assert rank["clipped"][stage] == pytest.approx(rank["clipped"][None], rel=1e-6)


def test_the_configs_scheduler_steps_once_per_optimizer_step(found: Any) -> None:
    for rank in found:
        rates, schedulers, steps = rank["scheduled"]["warm"]
        # WarmupLR's first step goes from 0 to 0.
        assert (schedulers, steps) == (1, 4)
        assert rates == pytest.approx([0, 0, 0, 0, 0.0025, 0.0025, 0.005, 0.005], abs=1e-9)
        rates, schedulers, steps = rank["scheduled"]["torch"]
        assert rates == pytest.approx([0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025, 0.00125, 0.00125])


REFUSALS = {
    "manual": "DeepSpeed does not support manual optimization",
    "two": "2 optimizers were given, but DeepSpeed's engine drives only one",
    "lbfgs": "LBFGS evaluates the loss several times",
    "backward": "The module overrides backward",
    "both optimizers": "configure_optimizers returns one too",
    "no optimizer": "neither configure_optimizers nor the config has one",
    "both schedulers": "has a scheduler (WarmupLR), and configure_optimizers returns one too",
    "unknown scheduler": "Did you mean 'WarmupLR'?",
    "batch size": "train_micro_batch_size_per_gpu=2, but the training loader has batch_size=4",
    "fp16": "Type fp16 is not supported on your device",
    "bf16": "The DeepSpeed config enables bf16, but the run's precision is '32-true'",
    "deepspeed's own": "DeepSpeed rejects this config: Elastic training has been removed",
}


@pytest.fixture(scope="module")
def refusals() -> Any:
    # In a world of one, since several ranks cannot continue after an error.
    return run_world(1, refused)[0]


@pytest.mark.parametrize("name", REFUSALS)
def test_impossible_runs_are_refused_before_training(refusals: Any, name: str) -> None:
    assert REFUSALS[name] in refusals[name]
    assert refusals[name].startswith("ConfigurationError")


class Unfreezes(Net):
    """Trains its first parameter from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        next(self.parameters()).requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        next(self.parameters()).requires_grad_(self.current_epoch == 1)


def unfreezing() -> list[str]:
    found = []
    for stage in (2, 3):
        try:
            trainer_of(zero(stage), max_epochs=2).fit(Unfreezes(), data())
        except ConfigurationError as error:
            found.append(str(error))
    return found


def test_unfreezing_a_parameter_after_the_engine_is_created_raises() -> None:
    [found] = run_world(1, unfreezing)
    assert len(found) == 2 and all("was frozen when DeepSpeed's engine was created" in text for text in found)


def failing(stage: int, folder: str) -> None:
    os.chdir(folder)
    trainer_of(zero(stage)).fit(Net("fails"), data())


@pytest.mark.parametrize("stage", [2, 3])
def test_one_failing_rank_ends_the_run_with_its_error(stage: int, tmp_path: Path) -> None:
    results = run_world(2, failing, stage, str(tmp_path), may_fail=True)
    assert results[1] == "RuntimeError: the third batch is bad"
    assert results[0] != "returned" and results[0] is not None


class FailsOnce(Net):
    """Raises in the third training step of its first fit."""

    failed = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and not self.failed:
            self.failed = True
            raise RuntimeError("the third batch is bad")
        return super().training_step(batch, batch_idx)


def fitted_after_a_failure(stage: int) -> tuple[bool, int]:
    """Fits a module, which fails, and fits it again; returns whether the failed engine was closed."""
    module, trainer = FailsOnce(), trainer_of(zero(stage))
    with pytest.raises(RuntimeError, match="the third batch is bad"):
        trainer.fit(module, data())
    closed = trainer.strategy.engine is None
    trainer.fit(module, data())
    return closed, trainer.global_step


@pytest.mark.parametrize("stage", [2, 3])
def test_the_engine_of_a_failed_step_is_not_used_again(stage: int) -> None:
    assert run_world(1, fitted_after_a_failure, stage) == [(True, 8)]
