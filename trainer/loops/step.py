"""The optimization step: zero_grad, forward and backward of a batch; at the end of a window, clipping and step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from leyden.callbacks.gradient_accumulation import AutoAccumulation
from leyden.core.errors import ConfigurationError
from leyden.strategies.base import Strategy
from leyden.strategies.precision import Precision
from leyden.strategies.window import read_loss
from leyden.trainer.engine.engine import needs_closure
from leyden.trainer.engine.prepared import PreparedOptimizer, clear_gradients, has_plain_zero_grad
from leyden.trainer.events.hooks import overrides
from leyden.trainer.loops.user_step import BatchParts, step_arguments, without_side_effects
from leyden.trainer.module import TrainModule

if TYPE_CHECKING:
    from leyden.trainer.loops.schedulers import Schedulers
    from leyden.trainer.run import Run


class Step(ABC):
    """The optimization step of a fit, automatic or manual.

    Args:
        run: the run of the fit.
        training_step: the user's `training_step`, as `Run.step_function` returns it.
        schedulers: the run's schedulers.
        accumulates: True if some window has several batches.
    """

    def __init__(self, run: Run, training_step: Callable[..., Any], schedulers: Schedulers, accumulates: bool) -> None:
        self.module = run.module
        self.engine = run.engine
        self.strategy = run.engine.strategy
        self.window = run.engine.window
        self.hooks = run.hooks
        self.progress = run.progress
        self.training_step = training_step
        self.schedulers = schedulers
        self.accumulates = accumulates
        self.takes_index = step_arguments(self.module.training_step)[0]
        self.has_stepped = False
        """True if an optimizer stepped at the end of the last closed window."""

    @property
    def was_skipped(self) -> bool:
        """True if a gradient scaler skipped the step of the last closed window."""
        return bool(self.engine.prepared_optimizers) and not self.has_stepped

    def _global_batch_is_empty(self) -> bool:
        """True if no rank has a sample in the current global batch."""
        share = self.engine.share
        return share is not None and not share.total

    def begin(self) -> None:
        """Prepares for training, before the first batch is drawn."""

    @property
    @abstractmethod
    def is_counted(self) -> bool:
        """True if the last closed window counts as a global step."""

    @abstractmethod
    def run(self, batch: Any, batch_idx: int) -> Any:
        """Trains one batch; returns the output of `training_step`."""

    @abstractmethod
    def run_without_samples(self, filler: Callable[[], Any], batch_idx: int) -> None:
        """Takes part in the other ranks' step on a global batch in which this rank has no sample.

        The filler batch only keeps the collectives matched: it has no effect on gradients or module state. The caller
        discards values that it logs.

        Args:
            filler: returns a batch to run instead.
            batch_idx: the batch's index on the other ranks.
        """

    @abstractmethod
    def close(self, batch_idx: int) -> None:
        """Closes the window: averages its gradients and steps."""


class AutomaticStep(Step):
    """Calls zero_grad, backward and step for the user; all optimizers step once per window.

    The constructor determines which optional parts of a step are in use (hooks, clipping, a gradient scaler), so that
    unused parts cost nothing per step.

    Raises:
        ConfigurationError: if an optimizer evaluates the loss several times (LBFGS) and another setting rules that out.
    """

    def __init__(self, run: Run, training_step: Callable[..., Any], schedulers: Schedulers, accumulates: bool) -> None:
        super().__init__(run, training_step, schedulers, accumulates)
        module = self.module
        arguments = run.arguments
        self.clip_value = arguments.gradient_clip_val
        self.clip_algorithm = arguments.gradient_clip_algorithm
        self.clips = self.clip_value is not None or overrides(module, "configure_gradient_clipping", TrainModule)
        self.overrides_zero_grad = overrides(module, "optimizer_zero_grad", TrainModule)
        self.has_zero_grad_hook = self.hooks.listens("on_before_zero_grad")
        # With a profiler, torch's own method is called because it adds a label to the trace.
        self.inlines_zero_grad = run.profiler is None and all(map(has_plain_zero_grad, self.engine.optimizers))
        self.only_clears = self.inlines_zero_grad and not (self.overrides_zero_grad or self.has_zero_grad_hook)
        self.overrides_step = overrides(module, "optimizer_step", TrainModule)
        # A precision without work around a step is not called.
        self.wraps_step = (
            self.strategy.precision.may_skip
            or overrides(self.strategy, "before_step", Strategy)
            or overrides(self.strategy, "end_step", Strategy)
            or overrides(self.strategy.precision, "unscale", Precision)
            or overrides(self.strategy.precision, "end_step", Precision)
        )
        self.steps_directly = not (
            self.wraps_step
            or overrides(self.strategy, "step", Strategy)
            or overrides(self.strategy.precision, "step", Precision)
        )
        """True if a step consists of `optimizer.step()` alone."""
        self.has_step_hook = self.hooks.listens("on_before_optimizer_step")
        self.engine.begin_automatic()
        self.forward_backward = self.strategy.forward_backward
        if self.strategy.outputs.are_in_parts or self.strategy.outputs.are_split:
            parts = BatchParts(run)
            self.forward_backward = parts.forward_backward
            self.training_step = parts.step(training_step)
        self.prepared = self.engine.prepared_optimizers
        self.optimizers = self.engine.optimizers
        self.closure_optimizer = next((o for o in self.optimizers if needs_closure(o)), None)
        if self.closure_optimizer is not None:
            self._check_closure(self.closure_optimizer)
        self.outputs: Any = None
        """The closing batch's output, for the closure of `optimizer_step`, which returns the loss."""

    def _check_closure(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        refusal = None
        if len(self.optimizers) > 1:
            refusal = "a second optimizer: use manual optimization"
        elif self.accumulates:
            refusal = "accumulation over several batches: use accumulate_grad_batches=1 and a larger batch"
        elif self.strategy.precision.may_skip:
            refusal = "a gradient scaler: use precision='bf16-mixed' or '32-true'"
        elif not self.strategy.supports_closure:
            refusal = f"strategy={self.strategy.name!r}: use a single device or DDP"
        if refusal:
            raise ConfigurationError(
                f"{name} evaluates the loss several times per step, which does not work with {refusal}."
            )

    @property
    def is_counted(self) -> bool:
        return True

    def run(self, batch: Any, batch_idx: int) -> Any:
        if self.closure_optimizer is not None:
            return self._run_closure(batch, batch_idx)
        window, hooks = self.window, self.hooks
        if window.index == 0:
            if self.only_clears:
                clear_gradients(self.optimizers)
            else:
                self._zero_grad(batch_idx)
        # Set directly, not by `hooks.inside`, which would cost two more calls per batch.
        hooks.current = "training_step"
        extra = (batch_idx,) if self.takes_index else ()
        outputs = self.forward_backward(self.training_step, batch, extra, window, hooks)
        hooks.current = ""
        if window.closes:
            self.outputs = outputs
            self.close(batch_idx)
            self.outputs = None
        return outputs

    def run_without_samples(self, filler: Callable[[], Any], batch_idx: int) -> None:
        if self._global_batch_is_empty():
            self._skip_batch(filler, batch_idx)
            return
        if self.closure_optimizer is not None:
            raise ConfigurationError(
                f"{type(self.closure_optimizer).__name__} evaluates the loss several times per step, which a rank "
                "without a sample cannot do. Use drop_last=True in the training loader."
            )
        if self.window.index == 0:
            self._zero_grad(batch_idx)
        self._run_filler(filler, batch_idx)
        if self.window.closes:
            self.close(batch_idx)

    def _run_filler(self, filler: Callable[[], Any], batch_idx: int) -> None:
        extra = (batch_idx,) if self.takes_index else ()
        with without_side_effects(self.module):
            self.strategy.shadow_batch(self.training_step, filler(), extra, self.window)

    def _skip_batch(self, filler: Callable[[], Any], batch_idx: int) -> None:
        """Leaves a batch without samples on any rank out of its window. A window of only such batches does not step."""
        window = self.window
        window.pass_over()
        if not window.closes:
            return
        if window.index < 0:
            # No batch of the window had a sample.
            self.has_stepped = False
            self.progress.count_window(stepped=False)
            return
        # The last backward ran without gradient synchronization, because the window was still open. Replicated
        # gradients are synchronized now; sharded ones and DeepSpeed's need another backward, of a filler batch.
        if self.strategy.replicates and not self.strategy.drives_one:
            self.strategy.sync_gradients()
        else:
            self._run_filler(filler, batch_idx)
        self.close(batch_idx)

    def _zero_grad(self, batch_idx: int) -> None:
        for optimizer in self.optimizers:
            if self.has_zero_grad_hook:
                self.hooks.fire_all("on_before_zero_grad", optimizer)
            if self.overrides_zero_grad:
                with self.hooks.inside("optimizer_zero_grad"):
                    self.module.optimizer_zero_grad(self.progress.epoch, batch_idx, optimizer)
            elif self.inlines_zero_grad:
                clear_gradients((optimizer,))
            else:
                optimizer.zero_grad()

    def close(self, batch_idx: int) -> None:
        strategy, window, stepped = self.strategy, self.window, False
        if window.length > 1 or window.num_items is not None:
            self.engine.close_window()
        for prepared in self.prepared:
            if self.wraps_step:
                strategy.before_step(prepared.optimizer)
            if self.has_step_hook or self.clips:
                self._before_step(prepared.optimizer)
            if self.overrides_step:
                stepped = self._call_optimizer_step(batch_idx, prepared, self._last_loss) or stepped
            elif self.steps_directly:
                prepared.optimizer.step()
                stepped = True
            elif strategy.step(prepared.optimizer):
                stepped = True
        if self.wraps_step:
            strategy.end_step()
        self.has_stepped = stepped
        self.progress.count_window(stepped or not self.prepared)
        if stepped and self.schedulers.configs:
            self.schedulers.step("step", self.progress.stepped)

    def _before_step(self, optimizer: Optimizer) -> None:
        if self.has_step_hook:
            self.hooks.fire_all("on_before_optimizer_step", optimizer)
        if self.clips:
            with self.hooks.inside("configure_gradient_clipping"):
                self.module.configure_gradient_clipping(optimizer, self.clip_value, self.clip_algorithm)

    def _call_optimizer_step(self, batch_idx: int, prepared: PreparedOptimizer, closure: Callable[[], Any]) -> bool:
        """Calls the module's `optimizer_step`; returns True if it stepped the optimizer."""
        self.engine.begin_step()
        with self.hooks.inside("optimizer_step"):
            self.module.optimizer_step(self.progress.epoch, batch_idx, prepared, closure)
        return self.engine.has_stepped

    def _last_loss(self) -> Tensor | None:
        return read_loss(self.outputs)[0].detach() if self.outputs is not None else None

    def _run_closure(self, batch: Any, batch_idx: int) -> Any:
        """Steps an optimizer like LBFGS: the closure is a whole forward and backward pass that it calls repeatedly."""
        [prepared] = self.prepared
        hooks, window = self.hooks, self.window
        extra = (batch_idx,) if self.takes_index else ()
        first_outputs: list[Any] = []

        def closure() -> Tensor:
            self._zero_grad(batch_idx)
            with hooks.inside("training_step"):
                outputs = self.strategy.forward_backward(self.training_step, batch, extra, window, hooks)
            if not first_outputs:
                # Later outputs are dropped: each would keep its tensors alive until the step is done.
                first_outputs.append(outputs)
            self.engine.close_window()
            self.strategy.before_step(prepared.optimizer)
            self._before_step(prepared.optimizer)
            # The mean over all ranks, because all ranks must choose the same step.
            return self.strategy.ranks.reduce(read_loss(outputs)[0].detach())

        if self.overrides_step:
            self.has_stepped = self._call_optimizer_step(batch_idx, prepared, closure)
        else:
            self.engine.begin_step()
            prepared.step(closure)
            self.has_stepped = self.engine.has_stepped
        self.strategy.end_step()
        self.progress.count_window(self.has_stepped)
        if self.has_stepped:
            self.schedulers.step("step", self.progress.stepped)
        return first_outputs[0] if first_outputs else None


class ManualStep(Step):
    """The module calls `manual_backward` and steps its optimizers. A batch with at least one step is a global step."""

    def __init__(self, run: Run, training_step: Callable[..., Any], schedulers: Schedulers, accumulates: bool) -> None:
        super().__init__(run, training_step, schedulers, accumulates)
        arguments = run.arguments
        if accumulates:
            raise ConfigurationError(
                "accumulate_grad_batches cannot be used with manual optimization: step every n batches in "
                "training_step."
            )
        if arguments.gradient_clip_val is not None:
            raise ConfigurationError(
                "gradient_clip_val cannot be used with manual optimization: call self.clip_gradients(optimizer, value) "
                "before optimizer.step()."
            )
        self._inside_step = self.hooks.inside("training_step")
        self.engine.begin_manual(
            self.hooks, self._before_step if self.hooks.listens("on_before_optimizer_step") else None
        )

    def _before_step(self, optimizer: Optimizer) -> None:
        self.hooks.fire_all("on_before_optimizer_step", optimizer)

    @property
    def is_counted(self) -> bool:
        return self.has_stepped

    def run(self, batch: Any, batch_idx: int) -> Any:
        self.engine.begin_step()
        extra = (batch_idx,) if self.takes_index else ()
        with self._inside_step:
            outputs = self.strategy.forward(self.training_step, batch, extra)
        self.close(batch_idx)
        return outputs

    def run_without_samples(self, filler: Callable[[], Any], batch_idx: int) -> None:
        """Runs the step on a filler batch with weight 0: only the step knows how often it calls backward and steps."""
        if self._global_batch_is_empty():
            self.has_stepped = False
            return
        batch = filler()
        if batch is None:
            raise ConfigurationError(
                "manual optimization needs a batch on each rank, and this rank has no sample: give all ranks the same "
                "number of batches."
            )
        self.window.weigh(0.0, idle=True)
        self.engine.begin_step()
        extra = (batch_idx,) if self.takes_index else ()
        with without_side_effects(self.module):
            self.strategy.forward(self.training_step, batch, extra)
        self.close(batch_idx)

    def close(self, batch_idx: int) -> None:
        """Ends the window without a step: in manual optimization the module steps optimizers and schedulers."""
        self.strategy.end_step()
        self.engine.end_manual_step()
        self.has_stepped = self.engine.has_stepped
        if self.has_stepped:
            self.progress.count_window(stepped=True)


def make_step(run: Run, schedulers: Schedulers) -> Step:
    """Creates the optimization step of a fit: automatic, manual, compiled, or with batches split into micro-batches.

    Args:
        run: the run of the fit.
        schedulers: the run's schedulers.

    Raises:
        ConfigurationError: if the module, its optimizers or the strategy do not support the requested step.
    """
    accumulation, training_step = run.accumulation, run.step_function("training_step")
    samples = run.loaders.samples_per_batch
    accumulates = isinstance(accumulation, AutoAccumulation) or (
        accumulation is not None and any(accumulation.batches(at, samples) > 1 for at in accumulation.scheduling)
    )
    if run.arguments.compile is not None:
        # Imported here because it imports torch's compiler.
        from leyden.trainer.loops.compiled_step import CompiledStep, check_compiled

        check_compiled(run, accumulates)
        return CompiledStep(run, run.module.training_step, schedulers)
    if isinstance(accumulation, AutoAccumulation):
        # Imported here because few runs use it.
        from leyden.trainer.loops.auto_step import AutoStep, check_auto

        check_auto(run)
        return AutoStep(run, training_step, schedulers, accumulation)
    kind = AutomaticStep if run.module.automatic_optimization else ManualStep
    return kind(run, training_step, schedulers, accumulates)


def detached(outputs: Any) -> Any:
    """Returns the output of `training_step` without its graph, which listeners would otherwise keep alive."""
    if isinstance(outputs, Tensor):
        return outputs.detach()
    if isinstance(outputs, dict):
        return {key: value.detach() if isinstance(value, Tensor) else value for key, value in outputs.items()}
    return outputs
