"""`manual_backward`: its hooks, and a module that overrides `backward`."""

from __future__ import annotations

from typing import Any

import torch
from models import Tiny
from samples import numbered
from torch import Tensor

from leyden.callbacks import LambdaCallback
from leyden.strategies.precision import MixedPrecision


class Manual(Tiny):
    """Runs two backward passes per step, of which the first keeps the graph; records its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.calls: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, loss = self.optimizers(), self.net(batch).mean()
        optimizer.zero_grad()
        self.manual_backward(loss, None, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append(("before", loss.item(), self.net.weight.grad is None))

    def on_after_backward(self) -> None:
        self.calls.append(("after", *self.net.weight.grad.flatten().tolist()))


class WithBackward(Manual):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("backward", loss.item(), args, kwargs))
        super().backward(loss, *args, **kwargs)


def test_manual_backward_calls_the_backward_hooks(fit: Any) -> None:
    calls: list[str] = []
    callback = LambdaCallback(
        on_before_backward=lambda trainer, module, loss: calls.append("before"),
        on_after_backward=lambda trainer, module: calls.append("after"),
    )
    module = Manual()
    fit(module, numbered(1, start=1), callbacks=callback)
    assert module.calls == [("before", 2.0, True), ("after", 1.0, 1.0), ("before", 2.0, False), ("after", 2.0, 2.0)]
    assert calls == ["before", "after"] * 2


def test_manual_backward_passes_the_scaled_loss_to_the_modules_backward(fit: Any) -> None:
    module = WithBackward()
    fit(module, numbered(1, start=1), precision=MixedPrecision("16", init_scale=4.0))
    assert module.calls == [
        ("before", 2.0, True),
        ("backward", 8.0, (None,), {"retain_graph": True}),
        ("after", 4.0, 4.0),
        ("before", 2.0, False),
        ("backward", 8.0, (), {}),
        ("after", 8.0, 8.0),
    ]
    assert torch.allclose(module.net.weight, torch.full((1, 2), 1 - 0.1 * 2))
