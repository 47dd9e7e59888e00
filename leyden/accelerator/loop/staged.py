"""Pipeline-parallel models in a custom training loop, in which forward and backward run together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leyden.core.errors import ConfigurationError, kind_of

if TYPE_CHECKING:
    from leyden.accelerator.loop.stepping import Stepping

Step = Callable[[nn.Module, Any], Any]
"""Computes a loss: `step(model, batch)`."""
CACHES = ("past_key_values",)
"""Outputs of `transformers` models that each stage has only for its own layers, and that cannot be combined."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Output of a pipeline-parallel model in training: only its loss, as `.loss`, `["loss"]` or `[0]`."""

    loss: Tensor

    def __getitem__(self, key: int | str) -> Tensor:
        if key in (0, "loss"):
            return self.loss
        raise KeyError(f"{key!r}: in training, a model with pipeline stages returns only its loss.")


@dataclass(frozen=True, slots=True)
class _NoHooks:
    """Backward hooks that do nothing."""

    on_before_backward: tuple[Callable[[Tensor], Any], ...] = ()
    on_after_backward: tuple[Callable[[], Any], ...] = ()
    backward: None = None


class StagedModel(nn.Module):
    """The wrapper that `prepare` returns for a pipeline-parallel model.

    In training, a call runs the whole schedule, forward and backward, and returns a `StepLoss`. In evaluation, and
    under `torch.no_grad()`, it runs forward and returns the model's output on every rank.
    """

    wraps_module = True

    def __init__(self, module: nn.Module, stepping: Stepping) -> None:
        super().__init__()
        self.module = module
        self._stepping = stepping

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._stepping.staged.are_running:
            return self.module(*args, **kwargs)
        # Keyed by position and name: a tuple of two arguments would look like a batch of two samples.
        batch: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        if self.training and torch.is_grad_enabled():
            return StepLoss(self._stepping.staged_step(self.module, batch, _call_with_arguments))
        return self._stepping.staged.evaluate(self.module, batch)


def _call_with_arguments(module: nn.Module, batch: dict[Any, Any]) -> Any:
    """Calls a model with the arguments that `StagedModel.forward` packed into a batch."""
    args = [value for key, value in batch.items() if isinstance(key, int)]
    return module(*args, **{key: value for key, value in batch.items() if not isinstance(key, int)})


def call_with_batch(module: nn.Module, batch: Any) -> Any:
    """Calls a model with a batch: a mapping as keyword arguments, a tuple or list as positional ones."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


class StagedSteps:
    """Runs the steps of a pipeline-parallel model."""

    def __init__(self, stepping: Stepping) -> None:
        self._stepping, self._strategy = stepping, stepping.strategy
        self._loss: Tensor | None = None
        """Loss of the last step, whose backward has already run; None once it was passed to `backward`."""
        self.are_running = False
        """True while a step runs: calls of `StagedModel` then go directly to the model."""

    def train(self, module: nn.Module, batch: Any, step: Step) -> Tensor:
        """Runs forward and backward of a batch, as part of the window; see `Accelerator.pipeline_step`.

        Returns:
            The loss of the whole batch, on every rank; a sum if the step returns `num_items`.
        """
        step_fn = self._strategy.setup_step(partial(self._run, _to_loss(step), module), module)
        outputs = self._strategy.forward_backward(step_fn, batch, (), self._stepping.window, _NoHooks())
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        self._loss = self._strategy.outputs.share_scalar(None if loss is None else loss.detach())
        return self._loss

    def evaluate(self, module: nn.Module, batch: Any) -> Any:
        """Runs forward of a batch; returns the model's output on every rank."""
        step_fn = self._strategy.setup_step(partial(self._run, _call_with_arguments, module), module)
        with torch.no_grad():
            outputs = self._strategy.evaluate(step_fn, batch, ())
        if isinstance(outputs, Mapping):
            for name in set(CACHES) & set(outputs):
                outputs[name] = None  # type: ignore[index]
        return self._strategy.outputs.share_tensors(outputs)

    def check_backward(self, loss: Any) -> None:
        """Accepts the loss that the last step returned, whose backward has already run, and refuses any other."""
        if loss is not self._loss or loss is None:
            raise ConfigurationError(
                "backward got a different loss than the last step's, but a pipeline has already run backward of its "
                "own. Compute the whole loss in the model, or in the step of accelerator.pipeline_step(model, batch, "
                "step=...)."
            )
        self._loss = None

    def _run(self, step: Step, module: nn.Module, batch: Any) -> Any:
        self.are_running = True
        try:
            return step(module, batch)
        finally:
            self.are_running = False


def _to_loss(step: Step) -> Step:
    """Wraps a step to return the form that strategies read: a loss, or a dict with `loss` and `num_items`."""

    def run(module: nn.Module, batch: Any) -> Any:
        outputs = step(module, batch)
        if isinstance(outputs, Tensor):
            found: Any = outputs
        elif isinstance(outputs, Mapping):
            found = outputs.get("loss")
        else:
            found = getattr(outputs, "loss", outputs[0] if isinstance(outputs, tuple) and outputs else None)
        if not isinstance(found, Tensor) or found.ndim:
            raise ConfigurationError(
                f"the step of a pipeline returned {kind_of(outputs)} without a loss. Return the loss from the model "
                "(transformers models do if the batch has labels), or from the step of "
                "accelerator.pipeline_step(model, batch, step=...)."
            )
        num_items = outputs.get("num_items") if isinstance(outputs, Mapping) else None
        return found if num_items is None else {"loss": found, "num_items": num_items}

    return run
