"""Steps of a custom training loop: accumulation windows, backward, clipping, and when optimizers step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.accelerator.loop.beat import LoopBeat
from leyden.accelerator.loop.collectives import synchronize_generators
from leyden.accelerator.loop.mistakes import Mistakes
from leyden.accelerator.loop.staged import StagedSteps, Step
from leyden.core.errors import ConfigurationError
from leyden.strategies.base import OwnLoop, Strategy
from leyden.strategies.precision import Precision
from leyden.trainer.engine.engine import Engine, needs_closure
from leyden.trainer.engine.prepared import PreparedOptimizer, clear_gradients, has_plain_zero_grad
from leyden.trainer.events.hooks import overrides

if TYPE_CHECKING:
    from leyden.accelerator.prepared.loader import PreparedLoader
    from leyden.accelerator.settings.options import Options


class Stepping(Engine):
    """The engine of a custom training loop.

    `accumulate` opens a batch of a window, `backward` adds to its gradients, and the prepared optimizers step in the
    batch that closes it. Prepared loaders report when a pass starts, when a batch has ended, and when the pass ends.

    Attributes:
        accumulation: the accumulation settings.
        prepared_models: the models that `prepare` returned.
        bare_models: the same models without their DDP, engine or torch.compile wrappers.
        reading: the loaders being iterated, the innermost last.
        is_joining: True inside `joining`: ranks may have different numbers of batches, so they can exchange nothing but
            gradients.
        steps: number of windows that an optimizer step has closed.
    """

    steps: int

    def __init__(self, options: Options) -> None:
        super().__init__(**options.engine_arguments())
        self.accumulation = options.accumulation
        self.prepared_models: list[nn.Module] = []
        self.bare_models: list[nn.Module] = []
        self.reading: list[PreparedLoader] = []
        self._rng_types = options.rng_types
        self._checks = Mistakes(self, options.device_placement)
        self._deferred: Callable[[], Any] | None = None
        strategy, precision = self.strategy, self.strategy.precision
        # Decided once: a plain step is loss.backward() and optimizer.step(), without the calls that would do nothing.
        self._goes_back_directly = not (precision.scales_loss or overrides(strategy, "backward", Strategy))
        self._is_staged = strategy.outputs.are_in_parts
        self._ends_turns = overrides(strategy.own_loop, "end_turn", OwnLoop)
        self._unscales = overrides(strategy, "before_step", Strategy) or overrides(precision, "unscale", Precision)
        self._steps_directly = not (
            overrides(strategy, "step", Strategy) or overrides(precision, "step", Precision) or precision.may_skip
        )
        self._clips_to = None if self.strategy.drives_one else options.clips_to
        self.beat = LoopBeat(self.strategy.ranks, options.hang_timeout, options.project.local_folder)
        """Heartbeat for the hang watchdog."""
        self.staged = StagedSteps(self)
        """Runs the steps of a pipeline-parallel model."""
        self.begin()

    def begin(self) -> None:
        """Resets the counters, before the first batch."""
        self.window.plan(self.accumulation.num_steps)
        self.steps = 0
        self.is_joining = False
        self._scale_is_stale = False
        self._gradients_finalized = False
        self._in_accumulate = False
        self._stepped_in_window: set[int] = set()

    def continue_after(self, steps: int) -> None:
        """Sets the number of completed steps and resets the window."""
        self.steps, self._scale_is_stale = steps, False
        self.window.reset()

    # prepared objects -------------------------------------------------------------------------------------------------
    def add_model(self, prepared: nn.Module, bare: nn.Module) -> None:
        """Adds a prepared model. Optimizers prepared before it receive the parameters that the strategy replaced."""
        self.beat.begin()
        self.prepared_models.append(prepared)
        self.bare_models.append(bare)
        if self.prepared_optimizers and not self.strategy.replicates:
            self.strategy.setup_optimizers(self.bare_models, self.optimizers)

    def add_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Adds an optimizer that the strategy has set up; it steps when windows close."""
        prepared = PreparedOptimizer(optimizer, self)
        self.prepared_optimizers.append(prepared)
        return prepared

    def release(self) -> None:
        """Releases all models, optimizers and loaders."""
        self.flush_scaler()
        self.strategy.release()
        for held in (self.prepared_models, self.bare_models, self.prepared_optimizers, self.reading):
            held.clear()
        self.continue_after(self.steps)

    def leave(self) -> None:
        """Releases the resources that must end before the interpreter does."""
        self.beat.end()
        self.strategy.release()

    # passes over loaders ----------------------------------------------------------------------------------------------
    def synchronise_rng(self) -> None:
        """Sets the generators of `rng_types` to rank 0's state, before a pass."""
        if self._rng_types:
            synchronize_generators(self.strategy, self._rng_types)

    def begin_loader(self, loader: PreparedLoader) -> None:
        """Starts a pass over a loader."""
        self._checks.in_pass()
        self.strategy.check_trained()
        self.reading.append(loader)
        self.beat.begin()
        self.beat.begin_pass(loader.iteration, loader.position, self.steps)

    def end_turn(self) -> None:
        """Ends a batch and runs the actions deferred until then. A prepared loader calls this before its next batch."""
        if self.beat.is_watched:
            self.beat.batch(self.steps)
        if self._ends_turns:
            self.strategy.own_loop.end_turn()
        if self._deferred is not None:
            self.run_deferred()

    @property
    def active_loader(self) -> PreparedLoader | None:
        """The loader being iterated, the innermost if nested; None outside any."""
        return self.reading[-1] if self.reading else None

    def end_loader(self, loader: PreparedLoader) -> None:
        """Ends a pass over a loader, exhausted or not."""
        if loader in self.reading:
            self.reading.remove(loader)
            if not self.reading:
                self.beat.end_pass()

    # the window -------------------------------------------------------------------------------------------------------
    @property
    def is_within_window(self) -> bool:
        """True while a window is incomplete: a checkpoint written now would lack its gradients."""
        return self.window.is_open and not (self._in_accumulate and self.window.closes)

    def after_window(self, action: Callable[[], Any]) -> None:
        """Defers an action until the last batch of this window has ended. A second action replaces the first."""
        self._deferred = action

    def run_deferred(self) -> None:
        """Runs the deferred action if the window has closed."""
        if self._deferred is not None and not self.window.is_open:
            self.finish_deferred()

    def finish_deferred(self) -> None:
        """Runs the deferred action, already in the batch that closes the window; for a loop that ends with it."""
        if self._deferred is not None and not self.is_within_window:
            action, self._deferred = self._deferred, None
            action()

    @property
    def is_last_batch(self) -> bool:
        """True in the last batch of the active loader."""
        return bool(self.reading) and self.reading[-1].end_of_dataloader

    def close_with_this_batch(self, closes: bool) -> None:
        """Sets whether the current batch closes the window, for a loop that counts its own batches."""
        self.window.close_here(bool(closes))

    def accumulate_over(self, steps: int) -> None:
        """Sets the length of the windows that follow."""
        self.accumulation = replace(self.accumulation, num_steps=steps)
        if not self._in_accumulate:
            self.window.plan(steps)

    @contextmanager
    def accumulate(self, models: Sequence[Any]) -> Iterator[None]:
        """Runs one batch of a window; see `Accelerator.accumulate`."""
        self._checks.in_accumulate(models)
        if self._in_accumulate:
            # `with accumulate(a), accumulate(b)` is one batch of both models.
            yield
            return
        self.run_deferred()
        self._open_batch()
        self._in_accumulate = True
        try:
            with self.strategy.gradient_sync(self.window.closes or self.accumulation.sync_each_batch):
                yield
        finally:
            self._in_accumulate = False
            self.window.end_batch()
            self.window.plan(self.accumulation.num_steps)
        if not self.reading:
            self.run_deferred()

    def _open_batch(self) -> None:
        window, length = self.window, self.accumulation.num_steps
        self._gradients_finalized = False
        remaining, is_last = None, False
        if self.reading and self.accumulation.sync_with_dataloader:
            remaining, is_last = self.reading[-1].left, self.reading[-1].end_of_dataloader
        if window.is_open:
            window.advance(is_last)
        else:
            window.open(length if remaining is None else min(length, remaining), is_last)

    def _finalize_gradients(self) -> None:
        """Turns the window's summed gradients into their mean, once, if its length or items were unknown until now."""
        window = self.window
        if self._gradients_finalized or not self._in_accumulate or not window.closes:
            return
        self._gradients_finalized = True
        self.close_window()
        # Later losses of this batch must be divided by the actual length, too.
        window.end_here()

    @contextmanager
    def joining(self, models: Sequence[Any]) -> Iterator[None]:
        """Lets ranks that run out of batches keep taking part in the others' all-reduces, within the block."""
        with self.strategy.own_loop.joining(models) if self.strategy.ranks.world_size > 1 else nullcontext():
            self.is_joining = True
            try:
                yield
            finally:
                self.is_joining = False

    @contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Synchronizes gradients in the next backward, even if its forward ran without synchronization."""
        with self.strategy.gradient_sync(True), self.strategy.own_loop.sync_in_backward(model):
            yield

    # the step ---------------------------------------------------------------------------------------------------------
    def backward(self, loss: Tensor, num_items: Tensor | float | None = None, **kwargs: Any) -> None:
        """Runs backward on a loss, divided by the window's length and scaled; see `Accelerator.backward`."""
        if self._is_staged:
            self._check_staged(loss, num_items, kwargs)
            return
        self._begin_backward()
        window = self.window
        if num_items is not None and self._gradients_finalized and window.index > 0:
            raise ConfigurationError(
                "backward(num_items=…) was called after this window's gradients were divided by its items. Call it "
                "once per batch, or before the first optimizer steps."
            )
        if num_items is not None or window.length > 1:
            loss = self.strategy.loss_to_backward(loss, num_items, window)
        if self._goes_back_directly:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        else:
            self.strategy.backward(loss, **kwargs)
        if not self.prepared_optimizers:
            # An optimizer that was not prepared steps without calling this class.
            self._finalize_gradients()

    def _begin_backward(self) -> None:
        if self.beat.is_watched:
            self.beat.backward()
        if not (self.prepared_models and self.prepared_optimizers):
            self._checks.in_unprepared_backward()
        if self.checker is not None and self.window.closes and not self.is_joining:
            # This backward synchronizes gradients, so every rank must reach it.
            self.checker.compare("backward", None)
        if self._scale_is_stale:
            self.flush_scaler()

    def staged_step(self, module: nn.Module, batch: Any, step: Step) -> Tensor:
        """Runs a batch of a pipeline-parallel model; see `Accelerator.pipeline_step`."""
        if not self._is_staged:
            raise ConfigurationError(
                "pipeline_step needs a model with pipeline stages, and this model has none. Call the model and "
                "accelerator.backward(loss), or use Accelerator(strategy=MeshStrategy(pp=…))."
            )
        self._begin_backward()
        loss = self.staged.train(module, batch, step)
        if not self.prepared_optimizers:
            self._finalize_gradients()
        return loss

    def _check_staged(self, loss: Tensor, num_items: Tensor | float | None, kwargs: dict[str, Any]) -> None:
        if num_items is not None or kwargs:
            argument = "num_items" if num_items is not None else next(iter(kwargs))
            raise ConfigurationError(
                f"backward({argument}=…) comes too late in a pipeline, whose backward has already run. Let the step of "
                "accelerator.pipeline_step return {'loss': loss, 'num_items': count}, and leave other arguments out."
            )
        self.staged.check_backward(loss)

    def step(self, prepared: PreparedOptimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        """Steps one optimizer if the window closes; `PreparedOptimizer.step` calls this.

        Returns:
            False if the gradient scaler skipped the step.
        """
        if not self.window.closes:
            return True
        self._checks.in_step(prepared)
        if self._in_accumulate:
            self._finalize_gradients()
        if closure is not None and not needs_closure(prepared.optimizer):
            closure()
            closure = None
        if self._unscales:
            self.strategy.before_step(prepared.optimizer)
        if self._clips_to is not None:
            groups = self.strategy.master_weights.groups(prepared.optimizer)
            self.strategy.clip_parameters([p for group in groups for p in group], self._clips_to)
        if self._steps_directly and closure is None:
            prepared.optimizer.step(**kwargs)
            stepped = True
        else:
            stepped = self.strategy.step(prepared.optimizer, closure, **kwargs)
            self._scale_is_stale = self.precision.may_skip
        if id(prepared) in self._stepped_in_window or not self._stepped_in_window:
            # Several optimizers may step in one window; the first to step a second time starts the next window.
            self._stepped_in_window = {id(prepared)}
            self.steps += 1
        else:
            self._stepped_in_window.add(id(prepared))
        if self._ends_turns and not self.reading:
            self.strategy.own_loop.end_turn()
        return stepped

    def zero_grad(self, prepared: PreparedOptimizer, set_to_none: bool = True) -> None:
        """Clears the gradients of one optimizer if the window closes."""
        if not self.window.closes:
            return
        optimizer = prepared.optimizer
        is_profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        if set_to_none and has_plain_zero_grad(optimizer) and not is_profiled:
            clear_gradients((optimizer,))
        else:
            optimizer.zero_grad(set_to_none)

    def flush_scaler(self) -> None:
        """Updates the gradient scaler, once after all optimizers have stepped and before the next loss is scaled."""
        if self._scale_is_stale:
            self._scale_is_stale = False
            self.strategy.end_step()

    # unscaled gradients -----------------------------------------------------------------------------------------------
    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float) -> Tensor:
        """Clips gradients to a total norm and returns the norm before clipping; inside a window it only measures."""
        chosen, limit = self._clippable(parameters), max_norm if self.window.closes else float("inf")
        norm = self.strategy.clip_parameters(chosen, limit, "norm", norm_type)
        return torch.zeros(()) if norm is None else norm

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        """Clips each gradient element to ± `clip_value`; no-op inside a window."""
        chosen = self._clippable(parameters)
        if self.window.closes:
            self.strategy.clip_parameters(chosen, clip_value, "value")

    def _clippable(self, parameters: Any) -> list[Tensor]:
        """Returns the parameters as a list; if the window closes, their gradients are final and unscaled."""
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self.window.closes:
            self._finalize_gradients()
            wanted = {id(parameter) for parameter in chosen}
            for optimizer in self.optimizers:
                groups = self.strategy.master_weights.groups(optimizer)
                if any(id(parameter) in wanted for group in groups for parameter in group):
                    self.strategy.before_step(optimizer)
        return chosen

    def unscale(self, optimizer: Any) -> None:
        """Unscales the gradients of one, several or all (None) optimizers; no-op inside a window."""
        if not self.window.closes:
            return
        self._finalize_gradients()
        chosen: Any = self.prepared_optimizers if optimizer is None else optimizer
        entries: list[Any] = list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]
        for entry in entries:
            self.strategy.before_step(getattr(entry, "optimizer", entry))
