"""The step of the user's own loop: accumulation windows, backward, clipping, and optimizers that step at a window's end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leyden.strategies.errors import ConfigurationError
from leyden.trainer.accelerator.gradient_state import GradientState
from leyden.trainer.accelerator.plugins import AutocastKwargs, GradientAccumulationPlugin
from leyden.trainer.accelerator.tracking import Tracked
from leyden.trainer.engine.engine import Engine, needs_closure
from leyden.trainer.engine.prepared import PreparedOptimizer

if TYPE_CHECKING:
    from leyden.trainer.accelerator.checks import Mistakes
    from leyden.trainer.accelerator.options import Options


class Stepping(Tracked, Engine):
    """The step of an Accelerator.

    Attributes:
        options: the Accelerator's arguments.
        accumulation: how batches make one step.
        steps: windows that were closed by a step.
    """

    options: Options
    accumulation: GradientAccumulationPlugin
    steps: int
    _checks: Mistakes

    def begin_stepping(self) -> None:
        """Before the first batch."""
        self.window.length = self.accumulation.num_steps
        self.steps = 0
        self._updates_scale = False
        self._is_settled = False
        self._in_window = False
        self._joins = False
        self._counted: set[int] = set()

    @property
    def sync_gradients(self) -> bool:
        """The current batch closes its accumulation window: gradients are exchanged and optimizers step."""
        return self.window.closes

    @sync_gradients.setter
    def sync_gradients(self, closes: bool) -> None:
        """For a loop that counts its batches itself; `accumulate` sets it at each batch."""
        self.window.closes = bool(closes)

    @property
    def gradient_state(self) -> GradientState:
        """The window and the loader that is read, by the names that libraries know."""
        return GradientState(self)  # type: ignore[arg-type]

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches of one optimizer step; may be set, for the windows that follow."""
        return self.accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.accumulation = replace(self.accumulation, num_steps=steps)
        if not self._in_window and not self.window.is_open:
            self.window.length = steps

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """The gradient scaler skipped the last step of an optimizer."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared_optimizers)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One batch of an accumulation window.

        Optimizers and schedulers step, and gradients are exchanged, only in the batch that closes it. The last window of a
        prepared loader is as long as the batches that are left, and is divided by that length.

        Args:
            *models: what is trained; named for readers and for scripts that were written for others.
        """
        self._checks.in_accumulate(models)
        self.write_due()
        self._open_batch()
        self._in_window = True
        try:
            with self.strategy.gradient_sync(self.window.closes or self.accumulation.sync_each_batch):
                yield
        finally:
            self._in_window = False
            self.end_batch()
            if not self.window.is_open:
                self.window.length = self.accumulation.num_steps
        if not self._reading:
            self.write_due()

    def _open_batch(self) -> None:
        window, steps = self.window, self.accumulation.num_steps
        self._is_settled = False
        left, ends = None, False
        if self._reading and self.accumulation.sync_with_dataloader:
            left, ends = self._reading[-1].left, self._reading[-1].end_of_dataloader
        if not window.is_open:
            window.open(steps if left is None else min(steps, left))
        window.closes = ends or window.index == window.length - 1

    def backward(self, loss: Tensor, num_items: Tensor | float | None = None, **kwargs: Any) -> None:
        """Backward of a loss, divided by the window's length and scaled for the precision.

        Args:
            loss: a mean; or a sum, with `num_items`.
            num_items: what the loss is a sum of (tokens, samples): the gradient is divided by their total over the window and
                all ranks. Ours.
            **kwargs: of `Tensor.backward`: `retain_graph`, `create_graph`, `inputs`.
        """
        self._checks.in_backward()
        if self.checker is not None and self.window.closes and not self._joins:
            # Gradients are exchanged in it.
            self.checker.compare("backward", None)
        self.flush_scaler()
        if num_items is not None and self._is_settled and self.window.index > 0:
            raise ConfigurationError(
                "backward(num_items=…) came after this window's gradients were divided by its items: call it once for each batch, or "
                "before the first optimizer is stepped."
            )
        if num_items is not None or self.window.length > 1:
            loss = self.strategy.loss_to_backward(loss, num_items, self.window)
        self.manual_backward(loss, **kwargs)
        if not self.prepared_optimizers:
            # The loop steps an optimizer of its own, which asks nobody.
            self._settle()

    def step(self, prepared: PreparedOptimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        if not self.sync_gradients:
            return True
        self._checks.in_step(prepared)
        self._settle()
        if closure is not None and not needs_closure(prepared.optimizer):
            closure()
            closure = None
        stepped = self.strategy.step(prepared.optimizer, closure, **kwargs)
        self._updates_scale = self.precision.may_skip
        self.stepped = self.stepped or stepped
        if id(prepared) in self._counted or not self._counted:
            # Several optimizers step for one window, so the first one that steps a second time starts the next step.
            self._counted = {id(prepared)}
            self.steps += 1
        else:
            self._counted.add(id(prepared))
        if not self._reading:
            self.strategy.end_turn()
        return stepped

    def end_turn(self) -> None:
        """A prepared loader is asked for its next batch: what was to wait for the end of the last one's turn is done."""
        self.strategy.end_turn()
        self.write_due()

    def zero_grad(self, prepared: PreparedOptimizer, set_to_none: bool = True) -> None:
        if self.sync_gradients:
            prepared.optimizer.zero_grad(set_to_none)

    def flush_scaler(self) -> None:
        """Lets the scaler take its new scale: once after all steps, before the next loss is scaled."""
        if self._updates_scale:
            self._updates_scale = False
            self.strategy.end_step()

    def _settle(self) -> None:
        """Brings the window's gradients to their mean, once, where its length or its items were not known before."""
        window = self.window
        if self._is_settled or not self._in_window or not window.closes:
            return
        self._is_settled = True
        self.close_window()
        # What is still to come in this batch is divided by the true length, too.
        window.length = window.index + 1

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips gradients to a total norm, at their true scale and over all shards.

        Returns:
            The total norm before clipping. Inside an accumulation window nothing is clipped yet.
        """
        chosen = self._clippable(parameters)
        if not self.sync_gradients:
            found = self.strategy.clip_parameters(chosen, float("inf"), "norm", norm_type)
            return torch.zeros(()) if found is None else found
        norm = self.strategy.clip_parameters(chosen, max_norm, "norm", norm_type)
        assert norm is not None
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clips each gradient to ± `clip_value`, at its true scale."""
        chosen = self._clippable(parameters)
        if self.sync_gradients:
            self.strategy.clip_parameters(chosen, clip_value, "value")

    def _clippable(self, parameters: Any) -> list[Tensor]:
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self.sync_gradients:
            self._settle()
            wanted = {id(parameter) for parameter in chosen}
            for optimizer in self.optimizers:
                groups = self.strategy.parameter_groups(optimizer)
                if any(id(parameter) in wanted for group in groups for parameter in group):
                    self.strategy.before_step(optimizer)
        return chosen

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Brings gradients to their true scale, for reading or changing them before a step.

        Args:
            optimizer: one, or several; all if left out.
        """
        if not self.sync_gradients:
            return
        self._settle()
        chosen: Any = self.prepared_optimizers if optimizer is None else optimizer
        entries: list[Any] = list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]
        for entry in entries:
            self.strategy.before_step(getattr(entry, "optimizer", entry))

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Within it backward sends no gradients to the other ranks."""
        return self.strategy.gradient_sync(False)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """The next backward sends gradients, though its forward was run under `no_sync`."""
        return self.strategy.sync_in_backward(model)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The context of a forward pass in the run's precision.

        Args:
            autocast_handler: `AutocastKwargs(enabled=False)` for a part in full precision.
        """
        if autocast_handler is None:
            return super().autocast()
        return self.options.autocast(self.precision, self.device, autocast_handler)

    def restore_counters(self, steps: int) -> None:
        """Between two windows, after so many steps."""
        self.steps, self._updates_scale, window = steps, False, self.window
        window.is_open, window.index, window.closes = False, 0, True
