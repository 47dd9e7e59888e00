"""Loops over `self.parameters()` in a pipeline: right where each stage can do its part, and else refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mesh_gpt import GPT, data
from ranks.world import run_world
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.callbacks import grad_norm
from leyden.callbacks.replayed_step import _non_finite_weights
from leyden.core.errors import ConfigurationError
from leyden.strategies import MeshStrategy
from leyden.strategies.mesh.pipeline.absent import check_optimizers, placeholder_of


def norm_by_hand(module: GPT) -> Tensor:
    return torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()


def norm_by_generator(module: GPT) -> float:
    return sum(float(p.grad.norm()) ** 2 for p in module.parameters() if p.grad is not None)


NORMS = {
    "clip_grad_norm_": lambda module: clip_grad_norm_(module.parameters(), 1.0),
    "clip_grad_norm_ of a generator": lambda module: clip_grad_norm_((p for p in module.parameters()), 1.0),
    "grad_norm": lambda module: grad_norm(module, 2),
    "norm_by_hand": norm_by_hand,
    "norm_by_generator": norm_by_generator,
}


def gradients_of(group: dict[str, Any]) -> list[Tensor]:
    """A function of an optimizer that is not its method."""
    return [p.grad for p in group["params"] if p.grad is not None]


class Plain(torch.optim.Optimizer):
    """Gradient descent, as a user writes it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gradients = gradients_of(group)
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.sub_(parameter.grad, alpha=group["lr"])
            assert len(gradients) <= len(group["params"])


class ClipsByItself(Plain):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        super().step(closure)


class ByHand(GPT):
    """Clips by value, scales gradients, decays weights and averages them by hand."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.errors: dict[str, str] = {}
        self.counted: set[int] = set()
        self.average: dict[str, Tensor] = {}

    def held(self) -> list[Any]:
        return self.trainer.strategy.held(self.parameters())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.held():
            if parameter.grad is not None:
                parameter.grad.mul_(0.9)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self.trainer.world_size > 1:
            for name, norm in NORMS.items():
                try:
                    norm(self)
                except ConfigurationError as error:
                    self.errors[name] = str(error)
        clip_grad_value_(self.parameters(), 0.01)
        self.clip_gradients(optimizer, 0.5)
        self.counted.add(sum(p.numel() for p in self.parameters() if p.requires_grad))

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        held = set(self.held())
        for name, parameter in self.named_parameters():
            if parameter in held:
                parameter.data.mul_(0.99)
                self.average.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.1)
        for parameter in self.parameters():
            parameter.grad = None

    def configure_optimizers(self) -> Any:
        return Plain(self.parameters(), {"lr": 0.3})


def train(piped: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    module = ByHand()
    strategy: Any = MeshStrategy(pp=2, microbatches=4) if piped else "single_device"
    trainer = Trainer(strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(data(24), 8))
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {
        "weights": {name: tensor.numpy() for name, tensor in state.items()},
        "average": {name: tensor.numpy() for name, tensor in module.average.items()},
        "errors": module.errors,
        "counted": module.counted,
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(2, train, True)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_over_the_gradients_of_all_parameters_is_refused(ranks: list[dict[str, Any]], name: str) -> None:
    for rank, other in zip(ranks, ("blocks.2.", "places."), strict=True):
        assert f"{name.partition(' ')[0]!r} reads the gradient of '{other}" in rank["errors"][name]
        assert "self.clip_gradients" in rank["errors"][name] and "strategy.held" in rank["errors"][name]


def test_elementwise_code_over_parameters_trains_like_one_process(ranks: list[dict[str, Any]]) -> None:
    single = train(False)
    for rank in ranks:
        assert rank["counted"] == single["counted"] and len(single["counted"]) == 1
        for name, value in single["weights"].items():
            assert abs(rank["weights"][name] - value).max() < 1e-5, name
        for name, value in rank["average"].items():
            assert abs(single["average"][name] - value).max() < 1e-5, name
    assert {name for rank in ranks for name in rank["average"]} == single["average"].keys()


class Decays(GPT):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.data.mul_(0.99)


def decay_everything() -> None:
    trainer = Trainer(strategy=MeshStrategy(pp=2, microbatches=4), max_epochs=1, **QUIET)
    trainer.fit(Decays(depth=4), DataLoader(data(8), 8))


def test_a_write_to_parameters_of_other_stages_raises_with_advice() -> None:
    errors = run_world(2, decay_everything, may_fail=True)
    assert any("trainer.strategy.held(self.parameters())" in str(error) for error in errors), errors


class Clipped(GPT):
    def configure_optimizers(self) -> Any:
        return ClipsByItself(self.parameters(), {"lr": 0.3})


def clip_in_the_optimizer() -> None:
    trainer = Trainer(strategy=MeshStrategy(pp=2, microbatches=4), max_epochs=1, **QUIET)
    trainer.fit(Clipped(depth=4), DataLoader(data(8), 8))


def test_an_optimizer_that_clips_by_a_norm_in_its_own_step_is_refused() -> None:
    errors = run_world(2, clip_in_the_optimizer, may_fail=True)
    assert any("'clip_grad_norm_' reads the gradient of" in str(error) for error in errors), errors


def test_a_replayed_step_reports_no_placeholders() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight = placeholder_of(model[0].weight, "0.weight", torch.device("cpu"))
    nn.init.constant_(model[1].weight, torch.inf)
    assert _non_finite_weights(model, MeshStrategy(pp=2)) == ["1.weight"]


class MySAM(torch.optim.SGD):
    """By its name, an optimizer that computes a norm over all gradients."""


@pytest.mark.parametrize("how", ["SAM", "max_grad_norm"])
def test_an_optimizer_that_computes_over_all_gradients_is_refused(how: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    optimizer: Any = MySAM(parameters) if how == "SAM" else Plain(parameters, {"lr": 0.1, "max_grad_norm": 1.0})
    with pytest.raises(ConfigurationError, match=type(optimizer).__name__):
        check_optimizers([optimizer])
    check_optimizers([torch.optim.AdamW(parameters), Plain(parameters, {"lr": 0.1, "max_grad_norm": None})])
