"""Models that a pipeline cuts into stages, in a loop of the user's own: forward and backward run together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leyden.strategies.errors import ConfigurationError, kind_of

if TYPE_CHECKING:
    from leyden.trainer.accelerator.stepping import Stepping

Step = Callable[[nn.Module, Any], Any]
"""Computes a loss: `step(model, batch)`."""
CACHES = ("past_key_values",)
"""Outputs of `transformers` models that each stage has for its own layers alone."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """What a call of a model returns in training: its loss alone, as `.loss`, `["loss"]` or `[0]`."""

    loss: Tensor

    def __getitem__(self, key: int | str) -> Tensor:
        if key in (0, "loss"):
            return self.loss
        raise KeyError(f"{key!r}: in training a model that is cut into stages returns its loss alone.")


@dataclass(frozen=True, slots=True)
class _NoHooks:
    """No hook around backward."""

    on_before_backward: tuple[Callable[[Tensor], Any], ...] = ()
    on_after_backward: tuple[Callable[[], Any], ...] = ()
    backward: None = None


class StagedModel(nn.Module):
    """What `prepare` returns for a model that a pipeline has cut.

    In training a call runs the whole schedule, forward and backward, and returns a `StepLoss`. In evaluation, and under
    `torch.no_grad()`, it runs forward, and returns the model's output on every rank.

    Args:
        module: the model, of which this rank holds its stages.
        stepping: runs its steps.
    """

    wraps_module = True

    def __init__(self, module: nn.Module, stepping: Stepping) -> None:
        super().__init__()
        self.module = module
        self._stepping = stepping

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._stepping.staged.are_running:
            return self.module(*args, **kwargs)
        # By their places and names, since a tuple of two would pass for one of two samples.
        batch: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        if self.training and torch.is_grad_enabled():
            return StepLoss(self._stepping.staged_step(self.module, batch, _call))
        return self._stepping.staged.evaluate(self.module, batch)


def _call(module: nn.Module, batch: dict[Any, Any]) -> Any:
    """Calls a model with what `StagedModel.forward` was given."""
    args = [value for key, value in batch.items() if isinstance(key, int)]
    return module(*args, **{key: value for key, value in batch.items() if not isinstance(key, int)})


def call_with_batch(module: nn.Module, batch: Any) -> Any:
    """Calls a model with a batch: a mapping's entries by name, a tuple's or list's by place, anything else alone."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


class StagedSteps:
    """Runs the steps of a model that is cut into stages.

    Args:
        stepping: whose window they belong to.
    """

    def __init__(self, stepping: Stepping) -> None:
        self._stepping, self._strategy = stepping, stepping.strategy
        self._loss: Tensor | None = None
        """Of the last step, whose backward has run."""
        self.are_running = False
        """A step runs: a call within it is the model's own."""

    def train(self, module: nn.Module, batch: Any, step: Step) -> Tensor:
        """Runs a batch forward and backward, as the accumulation window says.

        Args:
            module: the model.
            batch: cut into micro-batches, for each of which the step runs.
            step: returns the loss, an output that has one, or a dict with `loss` and `num_items`.

        Returns:
            The loss of the whole batch, on every rank; a sum with `num_items`.
        """
        step_fn = self._strategy.setup_step(partial(self._within, _to_loss(step), module), module)
        outputs = self._strategy.forward_backward(step_fn, batch, (), self._stepping.window, _NoHooks())
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        self._loss = self._strategy.outputs.share_scalar(None if loss is None else loss.detach())
        return self._loss

    def evaluate(self, module: nn.Module, batch: Any) -> Any:
        """Runs a batch forward; returns the model's output on every rank."""
        step_fn = self._strategy.setup_step(partial(self._within, _call, module), module)
        with torch.no_grad():
            outputs = self._strategy.evaluate(step_fn, batch, ())
        if isinstance(outputs, Mapping):
            for name in set(CACHES) & set(outputs):
                outputs[name] = None  # type: ignore[index]
        return self._strategy.outputs.share_tensors(outputs)

    def check_backward(self, loss: Any) -> None:
        """Takes the loss that a step returned, whose backward has run.

        Raises:
            ConfigurationError: for any other.
        """
        if loss is not self._loss or loss is None:
            raise ConfigurationError(
                "backward was given another loss than the last step's, and a pipeline runs forward and backward "
                "together: have the model compute the whole loss, or give accelerator.pipeline_step(model, batch, "
                "step=...) a step that does. Backward of what it returns has run."
            )
        self._loss = None

    def _within(self, step: Step, module: nn.Module, batch: Any) -> Any:
        with self._running():
            return step(module, batch)

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.are_running = True
        try:
            yield
        finally:
            self.are_running = False


def _to_loss(step: Step) -> Step:
    """A step that returns what strategies read: a loss, or a dict with `loss` and `num_items`."""

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
                f"the step of a pipeline returned {kind_of(outputs)} without a loss in it: have the model return its "
                "loss (transformers models do where the batch has labels), or give accelerator.pipeline_step(model, "
                "batch, step=...) a step that computes it."
            )
        num_items = outputs.get("num_items") if isinstance(outputs, Mapping) else None
        return found if num_items is None else {"loss": found, "num_items": num_items}

    return run


__all__ = ["StagedModel", "StagedSteps", "StepLoss", "call_with_batch"]
