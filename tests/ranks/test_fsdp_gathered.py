"""Parts of a sharded model run without a backward pass: the next pass uses the new weights and flags."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from ranks.test_fsdp import SETTINGS, Net
from ranks.world import run_world
from torch import Tensor, nn

from leyden import Callback, Trainer, TrainModule
from leyden.callbacks import EMAWeightAveraging
from leyden.strategies import FSDPStrategy
from leyden.strategies.fsdp.sharding import whole

X = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
"""(steps, samples, inputs)"""


class Automatic(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor) -> Tensor:
        return (self(batch) - batch.sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch: Tensor) -> None:
        self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Adversaries(TrainModule):
    """Two networks trained alternately, by toggling optimizers or setting requires_grad."""

    def __init__(self, toggles: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggles = toggles
        self.first, self.second = Net().double(), Net().double()

    def training_step(self, batch: Tensor) -> None:
        first, second = self.optimizers()
        self.switch(first, self.second, False)
        first.zero_grad()
        self.manual_backward((self.second(batch * self.first(batch)) - 1).square().mean())
        first.step()
        self.switch(second, self.second, True)
        # The first network's output is not used in backward.
        loss = self.second(batch * self.first(batch).detach()).square().mean() + self.second(batch).square().mean()
        self.manual_backward(loss)
        second.step()
        # Zeroed only here, so that gradients added by the first network's backward pass would show.
        second.zero_grad()
        if self.toggles:
            self.untoggle_optimizer(second)

    def switch(self, optimizer: Any, part: nn.Module, trains: bool) -> None:
        if self.toggles:
            self.toggle_optimizer(optimizer)
        else:
            part.requires_grad_(trains)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5) for net in (self.first, self.second)]


class Student(TrainModule):
    """Learns from a teacher that is a moving average of the student."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.student = Net().double()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def training_step(self, batch: Tensor) -> None:
        optimizer = self.optimizers()
        with torch.no_grad():
            target = self.teacher(batch) + 0.1
        optimizer.zero_grad()
        self.manual_backward((self.student(batch * 0.9) - target).square().mean())
        optimizer.step()
        with torch.no_grad():
            self.student(batch)
            for own, average in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                average.lerp_(own, 0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.01, momentum=0.9)


class SwapsAverages(Automatic):
    """Validates with its own weight averages, which hooks swap with the weights."""

    def on_fit_start(self) -> None:
        self.averages = [p.detach().clone() for p in self.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, own in zip(self.averages, self.parameters(), strict=True):
            average.lerp_(own, 0.1)

    @torch.no_grad()
    def on_validation_epoch_start(self) -> None:
        for average, own in zip(self.averages, self.parameters(), strict=True):
            before = own.clone()
            own.copy_(average)
            average.copy_(before)

    def on_validation_epoch_end(self) -> None:
        self.on_validation_epoch_start()


class ForwardInHooks(Callback):
    """Runs the model without gradients between the backward pass and the step."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            module(X[0])

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.on_after_backward(trainer, module)


KINDS: dict[str, Any] = {
    "toggles": lambda: (Adversaries(toggles=True), []),
    "flags": lambda: (Adversaries(toggles=False), []),
    "teacher": lambda: (Student(), []),
    "forward in hooks": lambda: (Automatic(), [ForwardInHooks()]),
    "swaps": lambda: (SwapsAverages(), []),
    "averages": lambda: (Automatic(), [EMAWeightAveraging(decay=0.5)]),
}


def weights(kind: str, data: list[Tensor], strategy: Any) -> list[float]:
    """Returns the weights after an epoch with a validation after every second batch."""
    torch.manual_seed(0)
    module, callbacks = KINDS[kind]()
    settings = {**SETTINGS, "max_epochs": 1, "val_check_interval": 2, "callbacks": callbacks}
    loaders = (data, None if kind in ("toggles", "flags", "teacher") else data[:1])
    Trainer(strategy=strategy, **settings).fit(module, *loaders)
    return torch.cat([whole(tensor).flatten() for tensor in module.state_dict().values()]).tolist()


def all_weights() -> list[list[float]]:
    rank = int(os.environ["RANK"])
    data = [batch[2 * rank : 2 * rank + 2] for batch in X]
    return [
        weights(kind, data, FSDPStrategy(reshard_after_forward=reshard)) for kind in KINDS for reshard in (None, False)
    ]


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return run_world(2, all_weights)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_without_backward_leaves_no_stale_weights(kind: str, results: list[Any]) -> None:
    expected = pytest.approx(weights(kind, list(X), "auto"), rel=1e-12, abs=1e-12)
    first = 2 * list(KINDS).index(kind)
    assert results[first] == expected, "reshard_after_forward=None"
    assert results[first + 1] == expected, "reshard_after_forward=False"


class Penalty(Adversaries):
    def training_step(self, batch: Tensor) -> None:
        inputs = batch.clone().requires_grad_()
        [slope] = torch.autograd.grad(self.first(inputs).sum(), inputs, create_graph=True)
        self.manual_backward((slope.norm(dim=1) - 1).square().mean())


def penalize() -> None:
    Trainer(strategy="fsdp", **SETTINGS).fit(Penalty(toggles=False), list(X))


def test_a_gradient_of_a_gradient_raises() -> None:
    with pytest.raises(AssertionError, match="the gradient of a gradient .* Use strategy='ddp'"):
        run_world(2, penalize)


class Toggled(Adversaries):
    """The second network is first run while its optimizer is toggled off."""

    def __init__(self) -> None:
        super().__init__(toggles=True)
        self.float()

    def training_step(self, batch: Tensor) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            with optimizer.toggle_model():
                self.manual_backward(self.second(batch.float() * self.first(batch.float())).square().mean())
            optimizer.step()
            optimizer.zero_grad()


class Unfreezes(Automatic):
    """Trains its blocks only from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def on_train_epoch_start(self) -> None:
        blocks = [part for part in self.net.children() if any(True for _ in part.parameters())]
        blocks[0].requires_grad_(self.current_epoch > 0)

    def training_step(self, batch: Tensor) -> Tensor:
        return super().training_step(batch.float())


def trained_in_bf16() -> list[bool]:
    """Returns whether each parameter of the two modules has changed."""
    changed = []
    for module in (Toggled(), Unfreezes()):
        before = [parameter.detach().clone() for parameter in module.parameters()]
        strategy = FSDPStrategy(auto_wrap_policy={nn.Linear})
        settings = {**SETTINGS, "max_epochs": 2, "precision": "bf16-mixed"}
        Trainer(strategy=strategy, **settings).fit(module, list(X))
        changed += [not torch.equal(a, whole(b)) for a, b in zip(before, module.parameters(), strict=True)]
    return changed


def test_parameters_that_are_frozen_in_the_first_pass_train_later_in_mixed_precision() -> None:
    assert all(run_world(2, trained_in_bf16)[0])
