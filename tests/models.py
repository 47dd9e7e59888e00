"""Small modules that many tests train, and the arguments of a quiet Trainer.

A test uses the first of these that suits it. It defines a local class only where that class shows what the test is
about, usually by overriding one method.

| name | trains | for tests of |
|---|---|---|
| `Line` | one linear layer | anything outside the step: callbacks, loggers, the command line |
| `Tiny` | one weight per feature, all ones | which batches a run uses, and when; gradients computed by hand |
| `Logging` | like Tiny | a single call of `self.log` |
| `Squares` | any net, towards zero | optimizers, schedulers, checkpoints: data needs no targets |
| `Regression` | any net, from x to y | strategies and precisions |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leyden import TrainModule

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
}
"""Arguments of a Trainer on the CPU that shows and writes nothing."""
SAVED = Path("version_0", "checkpoints")
"""The folder of checkpoints of the first run without a logger, below its `default_root_dir`."""


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer for tests where its kind does not matter."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


def sgd_with_momentum(module: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer with state, which a checkpoint or another rank may lose."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def input_of(batch: Any) -> Any:
    """Returns the batch itself, or the first of its tensors."""
    return batch[0] if isinstance(batch, (list, tuple)) else batch


class Line(TrainModule):
    """One linear layer, with the mean of its outputs as the loss. Logs nothing."""

    def __init__(self, inputs: int = 2, outputs: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(input_of(batch)).mean()

    def configure_optimizers(self) -> Any:
        return sgd(self)


class Tiny(TrainModule):
    """One weight per feature, all ones; records the first number of each batch, and the batch counts at validations.

    Args:
        configure: maps this module to what `configure_optimizers` returns.
    """

    def __init__(self, configure: Callable[[Any], Any] = sgd) -> None:
        super().__init__()
        self.configure = configure
        self.net = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.net.weight)
        self.trained: list[float] = []
        self.validated: list[float] = []
        self.validated_at: list[int] = []

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(float(batch.flatten()[0]))
        return self(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.validated.append(float(batch.flatten()[0]))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seen", batch.flatten()[0])

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated_at.append(self.trainer.progress.batches)

    def configure_optimizers(self) -> Any:
        return self.configure(self)


class Logging(Tiny):
    """A `Tiny` module that calls a function in each training step.

    Args:
        log: called with this module and the batch.
        configure: as in `Tiny`.
    """

    def __init__(self, log: Callable[[Any, Any], Any], configure: Callable[[Any], Any] = sgd) -> None:
        super().__init__(configure)
        self.each_step = log

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.each_step(self, batch)
        return super().training_step(batch, batch_idx)


class Squares(TrainModule):
    """Trains the outputs of a net towards zero; logs their mean square as `loss` and `val_loss`.

    Args:
        net: takes a batch, or the first tensor of a batch (default: a linear layer from 2 to 1).
        configure: maps this module to what `configure_optimizers` returns.
    """

    def __init__(self, net: nn.Module | None = None, configure: Callable[[Any], Any] = sgd) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1) if net is None else net
        self.configure = configure

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def loss(self, batch: Any) -> Any:
        return self(input_of(batch)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(input_of(batch))

    def configure_optimizers(self) -> Any:
        return self.configure(self)


class Regression(Squares):
    """Trains a net from x to y: its loss is the mean square error of a batch (x, y)."""

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self(x).to(y.dtype), y)


def finish_step(module: TrainModule, loss: Tensor) -> Tensor | None:
    """Returns the loss in automatic optimization; in manual optimization, steps the optimizer and returns None."""
    if module.automatic_optimization:
        return loss
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()
    return None
