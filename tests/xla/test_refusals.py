"""Settings that XLA does not support are refused with a fix; a run does not disturb the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from torch import nn
from torch.optim import LBFGS, SGD
from xla.model import Regression, loader
from xla.process import on_xla

from leyden import Accelerator, Trainer, seed_everything
from leyden.strategies.xla.xla_strategy import XLAStrategy

ONE = {"accelerator": "xla", "devices": 1}


class QuasiNewton(Regression):
    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters())


class Manual(Regression):
    """Steps one optimizer after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1)
            optimizer.step()
        self.losses.append(loss.detach())

    def configure_optimizers(self) -> Any:
        return [SGD(self.net.parameters(), 0.1), SGD([self.tied.bias], 0.01)], []


def fit(module: Any, root: Path, **arguments: Any) -> list[float]:
    trainer = Trainer(max_epochs=1, default_root_dir=root, **{**QUIET, **ONE, **arguments})
    trainer.fit(module, loader(shuffle=True))
    return [float(loss) for loss in getattr(module, "_orig_mod", module).losses]


def outcome_of(function: Any, *args: Any, **arguments: Any) -> str:
    try:
        function(*args, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


def one_process(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    torch.manual_seed(2)
    found["manual"] = fit(Manual(), root)
    torch.manual_seed(2)
    found["manual on the CPU"] = fit(Manual(), root, accelerator="cpu")
    drawn = []
    for _ in range(2):
        seed_everything(7)
        drawn.append(fit(Regression(dropout=0.5), root))
    seed_everything(8)
    found["same seed"], found["other seed"] = drawn[0] == drawn[1], drawn[0] == fit(Regression(dropout=0.5), root)
    found["fp16"] = outcome_of(Trainer, precision="16", **ONE)
    found["fp8"] = outcome_of(Trainer, precision="fp8", **ONE)
    found["gpu"] = outcome_of(Trainer, accelerator="gpu", strategy="xla")
    found["several"] = outcome_of(Trainer, accelerator="xla", devices=[0, 1])
    found["closure"] = outcome_of(fit, QuasiNewton(), root)
    found["compiled"] = outcome_of(fit, torch.compile(Regression()), root)
    found["backend"] = outcome_of(
        lambda: Accelerator(strategy="xla", dynamo_backend="inductor").prepare(nn.Linear(1, 1))
    )
    found["more devices"] = outcome_of(fit, Regression(), root, devices=2)
    return found


def after_the_cpu(root: Path) -> str:
    fit(Regression(), root, accelerator="cpu")
    return outcome_of(fit, Regression(), root)


def on_two(root: Path) -> dict[str, str]:
    fit(Regression(), root, devices=2)
    rules = {"net.0.weights": ("data", None)}, {"net.0.*": ("data", None)}, {"net.0.weight": ("data", None)}
    found = {
        next(iter(rule)): outcome_of(fit, Regression(), root, devices=2, strategy=XLAStrategy(shard=rule))
        for rule in rules
    }
    return {**found, "one": outcome_of(fit, Regression(), root, devices=1)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results from one process with one device."""
    return on_xla(one_process, tmp_path_factory.mktemp("one"))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp16", "Use precision='bf16-mixed'"),
        ("fp8", "needs a GPU with fp8 units"),
        ("gpu", "Use accelerator='xla'"),
        ("several", "Use devices='auto', or one index"),
        ("closure", "LBFGS evaluates the loss several times"),
        ("compiled", "its engine compiles the whole step itself"),
        ("backend", "its engine compiles the whole step itself"),
        ("more devices", "devices=2, but XLA has 1 device"),
    ],
)
def test_unsupported_settings_are_refused_with_a_fix(found: dict[str, Any], name: str, message: str) -> None:
    assert found[name].startswith("ConfigurationError") and message in found[name]


def test_manual_optimization_matches_the_cpu(found: dict[str, Any]) -> None:
    assert found["manual"] == pytest.approx(found["manual on the CPU"], rel=0, abs=1e-6)


def test_the_seed_determines_the_devices_random_numbers(found: dict[str, Any]) -> None:
    assert found["same seed"] and not found["other seed"]


def test_a_process_must_use_xla_before_it_computes_gradients_elsewhere(tmp_path: Path) -> None:
    assert "Run on XLA first, or in a new process" in on_xla(after_the_cpu, tmp_path)


def test_invalid_sharding_rules_and_fewer_devices_in_a_second_run_are_refused(tmp_path: Path) -> None:
    found = on_xla(on_two, tmp_path)
    assert "This process already uses XLA with all devices" in found["one"]
    assert "Did you mean 'net.0.weight'" in found["net.0.weights"]
    assert "has 2 entries, but 'net.0.bias' has 1 dimensions" in found["net.0.*"]
    assert found["net.0.weight"] == "ran"
