"""Precisions: names, dtypes of parameters, inputs and forward passes, and the gradient scaler's settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import QUIET
from torch import nn
from torch.amp.grad_scaler import GradScaler

from leyden import ConfigurationError, Trainer, TrainModule
from leyden.strategies import HalfPrecision, SingleDeviceStrategy
from leyden.strategies.precision import ALIASES, MixedPrecision, Precision, find_precision

# Name: dtype of parameters, of inputs, of the forward pass's result, of a tensor made in the step.
FLOAT, DOUBLE, HALF, BRAIN = torch.float32, torch.float64, torch.float16, torch.bfloat16
DTYPES = {
    "32-true": (FLOAT, FLOAT, FLOAT, FLOAT),
    "64-true": (DOUBLE, DOUBLE, DOUBLE, DOUBLE),
    "16-mixed": (FLOAT, FLOAT, HALF, FLOAT),
    "bf16-mixed": (FLOAT, FLOAT, BRAIN, FLOAT),
    "16-true": (HALF, HALF, HALF, HALF),
    "bf16-true": (BRAIN, BRAIN, BRAIN, BRAIN),
}


class DtypeRecorder(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.seen: set[Any] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, index = batch
        out = self.net(x)
        self.seen.add((self.net.weight.dtype, x.dtype, out.dtype, torch.zeros(1).dtype))
        assert index.dtype == torch.int64 and self.count.dtype == torch.int64
        assert self.scale.dtype == self.net.weight.dtype
        return out.float().square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.add((self.net.weight.dtype, batch[0].dtype, self.net(batch[0]).dtype, torch.zeros(1).dtype))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.fixture
def quiet(tmp_path: Any) -> dict[str, Any]:
    return {**QUIET, "max_epochs": 1, "default_root_dir": tmp_path}


BATCHES = [(torch.ones(2, 4), torch.arange(2)) for _ in range(3)]


@pytest.mark.parametrize("name", DTYPES)
def test_each_precision_uses_its_dtypes(quiet: Any, name: str) -> None:
    module = DtypeRecorder()
    trainer = Trainer(**quiet, precision=name)
    trainer.fit(module, BATCHES, BATCHES)
    assert module.seen == {DTYPES[name]}
    assert trainer.precision == name and trainer.global_step == 3
    assert torch.get_default_dtype() == torch.float32
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in module.parameters())


@pytest.mark.parametrize("name", ["64-true", "16-true", "bf16-true"])
def test_true_precisions_do_not_convert_complex_tensors(name: str) -> None:
    module = nn.Linear(2, 2)
    module.turn = nn.Parameter(torch.tensor([1 + 2j]))
    module.register_buffer("phase", torch.tensor([3 + 4j], dtype=torch.complex128))
    find_precision(name).convert_module(module)
    assert module.weight.dtype == DTYPES[name][0]
    kept = [(tensor.dtype, tensor.tolist()) for tensor in (module.turn.detach(), *module.buffers())]
    assert kept == [(torch.complex64, [1 + 2j]), (torch.complex128, [3 + 4j])]


@pytest.mark.parametrize(
    ("short", "name"), [*ALIASES.items(), (16, "16-mixed"), (32, "32-true"), (64, "64-true"), (None, "32-true")]
)
def test_short_names_resolve_to_full_names(short: Any, name: str) -> None:
    assert find_precision(short).name == name
    assert Trainer(precision=short, logger=False, enable_checkpointing=False).precision == name


@pytest.mark.parametrize("build", [MixedPrecision, HalfPrecision])
def test_classes_take_short_names_and_full_names(build: Any) -> None:
    kind = "mixed" if build is MixedPrecision else "true"
    for short, dtype in (("16", torch.float16), ("bf16", torch.bfloat16)):
        for name in (short, f"{short}-{kind}"):
            precision = build(name)
            assert (precision.name, precision.dtype) == (f"{short}-{kind}", dtype)
    assert HalfPrecision().name == "16-true"


def test_unknown_names_and_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"precision='16mixed' is not known\. Did you mean '16-mixed'\?"):
        find_precision("16mixed")
    with pytest.raises(ConfigurationError, match="needs no scaler"):
        MixedPrecision("bf16", scaler=GradScaler("cpu"))


@pytest.mark.parametrize("as_plugin", [True, False])
def test_scaler_settings_are_applied(quiet: Any, as_plugin: bool) -> None:
    precision = MixedPrecision("16", init_scale=4.0, growth_factor=4.0, growth_interval=2)
    trainer = Trainer(**quiet, **({"plugins": precision} if as_plugin else {"precision": precision}))
    trainer.fit(DtypeRecorder(), BATCHES)
    assert precision.scaler is not None and precision.scaler.get_scale() == 16.0
    assert trainer.strategy.precision is precision


def test_a_users_scaler_is_used(quiet: Any) -> None:
    scaler = GradScaler("cpu", init_scale=2.0, growth_interval=1)
    Trainer(**quiet, precision=MixedPrecision("16", scaler=scaler)).fit(DtypeRecorder(), BATCHES)
    assert scaler.get_scale() == 16.0


def test_a_users_precision_scales_the_loss(quiet: Any) -> None:
    class Halved(Precision):
        name = "halved"

        def scale_loss(self, loss: Any) -> Any:
            return loss / 2

    plain, halved = DtypeRecorder(), DtypeRecorder()
    halved.load_state_dict(plain.state_dict())
    before = plain.net.weight.detach().clone()
    Trainer(**quiet).fit(plain, BATCHES[:1])
    trainer = Trainer(**quiet, precision=Halved())
    trainer.fit(halved, BATCHES[:1])
    assert trainer.precision == "halved"
    assert torch.allclose((before - plain.net.weight) / 2, before - halved.net.weight, atol=1e-7)


def test_a_strategy_keeps_its_precision_unless_the_trainer_has_one() -> None:
    strategy = SingleDeviceStrategy("cpu", MixedPrecision("bf16"))
    assert Trainer(**QUIET, strategy=strategy).precision == "bf16-mixed"
    assert Trainer(**QUIET, strategy=strategy, precision="64").precision == "64-true"


def test_float64_is_refused_on_mps() -> None:
    with pytest.raises(
        ConfigurationError, match="mps does not support float64. Use precision='32-true', or accelerator='cpu'"
    ):
        find_precision("64").check(torch.device("mps"))


def test_registering_an_optimizer_again_adds_no_hook() -> None:
    """A continued fit registers its optimizers again."""
    precision = MixedPrecision("16")
    precision.check(torch.device("cpu"))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for _ in range(3):
        precision.register(optimizer)
    assert len(optimizer._optimizer_step_post_hooks) == 1


class Overflowing(TrainModule):
    """Has infinite gradients in its second batch, and a fused optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1, bias=False)
        self.weights: list[list[float]] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.weights.append(self.net.weight.flatten().tolist())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.net(batch[0]).float().mean() * (float("inf") if batch_idx == 1 else 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1.0, fused=True)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


def test_schedulers_do_not_step_when_a_fused_optimizer_skips(quiet: dict[str, Any]) -> None:
    """A fused optimizer is called even for a skipped step, and skips in its kernel."""
    module = Overflowing()
    trainer = Trainer(plugins=MixedPrecision("16", init_scale=16.0), **quiet)
    trainer.fit(module, BATCHES)
    assert module.weights[0] != module.weights[1] and module.weights[1] == module.weights[2]
    assert module.rates == [1.0, 0.5, 0.5]
    assert (trainer.global_step, trainer.progress.stepped) == (3, 2)
