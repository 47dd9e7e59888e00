"""The optimisation step: zero_grad, forward and backward of a batch, and, where the window closes, clip and step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from leyden.callbacks.gradient_accumulation import AutoAccumulation
from leyden.strategies.base import Strategy
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.precision import Precision
from leyden.strategies.window import read_loss
from leyden.trainer.engine.engine import needs_closure
from leyden.trainer.engine.prepared import PreparedOptimizer
from leyden.trainer.events.hooks import overrides
from leyden.trainer.loops.micro_batches import MicroBatches
from leyden.trainer.loops.user_step import step_arguments, without_trace
from leyden.trainer.module import TrainModule

if TYPE_CHECKING:
    from leyden.trainer.loops.schedulers import Schedulers
    from leyden.trainer.run.state import Run


class Step(ABC):
    """The optimisation step of a fit, automatic or manual.

    Args:
        run: of the fit.
        training_step: the user's, as `Run.step_function` returns it.
        schedulers: those of the run.
        accumulates: some window has several batches.
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
        """An optimizer stepped when the last window closed."""

    @property
    def was_skipped(self) -> bool:
        """True if a gradient scaler skipped the step when the last window closed."""
        return bool(self.engine.prepared_optimizers) and not self.has_stepped

    def _is_empty(self) -> bool:
        """True if no rank has a sample of the current global batch."""
        share = self.engine.share
        return share is not None and not share.total

    def begin(self) -> None:
        """Begins training, before its first batch is drawn."""

    @property
    @abstractmethod
    def is_counted(self) -> bool:
        """True if the window that closed last counts as a global step."""

    @abstractmethod
    def run(self, batch: Any, batch_idx: int) -> Any:
        """Does one batch; returns what `training_step` returned."""

    @abstractmethod
    def shadow(self, filler: Callable[[], Any], batch_idx: int) -> None:
        """Shadows the other ranks' step on a global batch of which this rank has no sample; the caller discards logs.

        Args:
            filler: gives a batch that may be run for it.
            batch_idx: the number that the batch has on the other ranks.
        """

    @abstractmethod
    def close(self, batch_idx: int) -> None:
        """Ends the window: brings its gradients to their mean and steps."""


class AutomaticStep(Step):
    """Leyden calls zero_grad, backward and step; all optimizers step once per window.

    Which parts of a step have something to do (hooks, clipping, a gradient scaler) is found out once, at set-up, so
    that the others cost nothing.

    Raises:
        ConfigurationError: if an optimizer that evaluates the loss several times (LBFGS) meets something that cannot.
    """

    def __init__(self, run: Run, training_step: Callable[..., Any], schedulers: Schedulers, accumulates: bool) -> None:
        super().__init__(run, training_step, schedulers, accumulates)
        module = self.module
        arguments = run.arguments
        self.clip_value = arguments.gradient_clip_val
        self.clip_algorithm = arguments.gradient_clip_algorithm
        self.clips = self.clip_value is not None or overrides(module, "configure_gradient_clipping", TrainModule)
        self.own_zero_grad = overrides(module, "optimizer_zero_grad", TrainModule)
        self.hooks_zero_grad = self.hooks.listens("on_before_zero_grad")
        # The profiler wants the label that torch's own method puts around it.
        self.clears = run.profiler is None and all(map(only_clears, self.engine.optimizers))
        self.only_clears = self.clears and not (self.own_zero_grad or self.hooks_zero_grad)
        self.own_step = overrides(module, "optimizer_step", TrainModule)
        # A plain precision does nothing around a step, so it is not called.
        self.unscales = (
            self.strategy.precision.may_skip
            or overrides(self.strategy, "before_step", Strategy)
            or overrides(self.strategy, "end_step", Strategy)
            or overrides(self.strategy.precision, "unscale", Precision)
            or overrides(self.strategy.precision, "end_step", Precision)
        )
        self.plain = not (
            self.unscales
            or overrides(self.strategy, "step", Strategy)
            or overrides(self.strategy.precision, "step", Precision)
        )
        """Nothing but `optimizer.step()` belongs to a step."""
        self.hooks_step = self.hooks.listens("on_before_optimizer_step")
        self.engine.begin_automatic()
        self.forward_backward = self.strategy.forward_backward
        if self.strategy.outputs.are_in_parts:
            micro_batches = MicroBatches(run)
            self.forward_backward = micro_batches.forward_backward
            self.training_step = micro_batches.step(training_step)
        self.prepared = self.engine.prepared_optimizers
        self.optimizers = self.engine.optimizers
        self.closure_optimizer = next((o for o in self.optimizers if needs_closure(o)), None)
        if self.closure_optimizer is not None:
            self._check_closure(self.closure_optimizer)
        self.outputs: Any = None
        """Of the batch that closes the window: the closure of `optimizer_step` returns its loss."""

    def _check_closure(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        refusal = None
        if len(self.optimizers) > 1:
            refusal = "a second optimizer: use manual optimisation"
        elif self.accumulates:
            refusal = "accumulation over several batches: use accumulate_grad_batches=1 and a larger batch"
        elif self.strategy.precision.may_skip:
            refusal = "a gradient scaler: use precision='bf16-mixed' or '32-true'"
        elif not self.strategy.supports_closure:
            refusal = f"strategy={self.strategy.name!r}: use a single device or DDP"
        if refusal:
            raise ConfigurationError(
                f"{name} evaluates the loss several times in one step, which cannot go with {refusal}."
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
        # Not `hooks.inside`: two calls less in every batch.
        hooks.current = "training_step"
        extra = (batch_idx,) if self.takes_index else ()
        outputs = self.forward_backward(self.training_step, batch, extra, window, hooks)
        hooks.current = ""
        if window.closes:
            self.outputs = outputs
            self.close(batch_idx)
            self.outputs = None
        return outputs

    def shadow(self, filler: Callable[[], Any], batch_idx: int) -> None:
        if self._is_empty():
            self._pass_over(filler, batch_idx)
            return
        if self.closure_optimizer is not None:
            raise ConfigurationError(
                f"{type(self.closure_optimizer).__name__} evaluates the loss several times in one step, which a rank "
                "without a sample cannot do: give the loader drop_last=True."
            )
        if self.window.index == 0:
            self._zero_grad(batch_idx)
        self._run_shadow(filler, batch_idx)
        if self.window.closes:
            self.close(batch_idx)

    def _run_shadow(self, filler: Callable[[], Any], batch_idx: int) -> None:
        extra = (batch_idx,) if self.takes_index else ()
        with without_trace(self.module):
            self.strategy.shadow_batch(self.training_step, filler(), extra, self.window)

    def _pass_over(self, filler: Callable[[], Any], batch_idx: int) -> None:
        """Leaves a batch without a good sample out of its window; a window of nothing else steps nothing."""
        window = self.window
        window.pass_over()
        if not window.closes:
            return
        if window.index >= 0:
            # No backward was known to be the window's last. Sharded gradients and DeepSpeed's need one.
            if self.strategy.replicates and not self.strategy.drives_one:
                self.strategy.sync_gradients()
            else:
                self._run_shadow(filler, batch_idx)
            self.close(batch_idx)
        else:
            self.has_stepped = False
            self.progress.count_window(stepped=False)

    def _zero_grad(self, batch_idx: int) -> None:
        for optimizer in self.optimizers:
            if self.hooks_zero_grad:
                self.hooks.fire_all("on_before_zero_grad", optimizer)
            if self.own_zero_grad:
                with self.hooks.inside("optimizer_zero_grad"):
                    self.module.optimizer_zero_grad(self.progress.epoch, batch_idx, optimizer)
            elif self.clears:
                clear_gradients((optimizer,))
            else:
                optimizer.zero_grad()

    def close(self, batch_idx: int) -> None:
        strategy, window, stepped = self.strategy, self.window, False
        if window.length > 1 or window.num_items is not None:
            self.engine.close_window()
        for prepared in self.prepared:
            if self.unscales:
                strategy.before_step(prepared.optimizer)
            if self.hooks_step or self.clips:
                self._before_step(prepared.optimizer)
            if self.own_step:
                stepped = self._own_step(batch_idx, prepared, self._last_loss) or stepped
            elif self.plain:
                prepared.optimizer.step()
                stepped = True
            elif strategy.step(prepared.optimizer):
                stepped = True
        if self.unscales:
            strategy.end_step()
        self.has_stepped = stepped
        self.progress.count_window(stepped or not self.prepared)
        if stepped and self.schedulers.configs:
            self.schedulers.step("step", self.progress.stepped)

    def _before_step(self, optimizer: Optimizer) -> None:
        if self.hooks_step:
            self.hooks.fire_all("on_before_optimizer_step", optimizer)
        if self.clips:
            with self.hooks.inside("configure_gradient_clipping"):
                self.module.configure_gradient_clipping(optimizer, self.clip_value, self.clip_algorithm)

    def _own_step(self, batch_idx: int, prepared: PreparedOptimizer, closure: Callable[[], Any]) -> bool:
        """Calls the module's `optimizer_step`; true if it stepped the optimizer."""
        self.engine.begin_step()
        with self.hooks.inside("optimizer_step"):
            self.module.optimizer_step(self.progress.epoch, batch_idx, prepared, closure)
        return self.engine.has_stepped

    def _last_loss(self) -> Tensor | None:
        return read_loss(self.outputs)[0].detach() if self.outputs is not None else None

    def _run_closure(self, batch: Any, batch_idx: int) -> Any:
        """The step of an optimizer like LBFGS: the closure is the whole pass, and the optimizer decides how often."""
        [prepared] = self.prepared
        hooks, window = self.hooks, self.window
        extra = (batch_idx,) if self.takes_index else ()
        first: list[Any] = []

        def closure() -> Tensor:
            self._zero_grad(batch_idx)
            with hooks.inside("training_step"):
                outputs = self.strategy.forward_backward(self.training_step, batch, extra, window, hooks)
            if not first:
                # Of the further evaluations nothing is kept: each would hold its tensors until the step is done.
                first.append(outputs)
            self.engine.close_window()
            self.strategy.before_step(prepared.optimizer)
            self._before_step(prepared.optimizer)
            # Of all ranks, which must choose the same step.
            return self.strategy.ranks.reduce(read_loss(outputs)[0].detach())

        if self.own_step:
            self.has_stepped = self._own_step(batch_idx, prepared, closure)
        else:
            self.engine.begin_step()
            prepared.step(closure)
            self.has_stepped = self.engine.has_stepped
        self.strategy.end_step()
        self.progress.count_window(self.has_stepped)
        if self.has_stepped:
            self.schedulers.step("step", self.progress.stepped)
        return first[0] if first else None


class ManualStep(Step):
    """The module calls `manual_backward` and steps its optimizers; a batch in which one stepped is a global step."""

    def __init__(self, run: Run, training_step: Callable[..., Any], schedulers: Schedulers, accumulates: bool) -> None:
        super().__init__(run, training_step, schedulers, accumulates)
        arguments = run.arguments
        if accumulates:
            raise ConfigurationError(
                "accumulate_grad_batches cannot be used with manual optimisation: step every n batches in "
                "training_step."
            )
        if arguments.gradient_clip_val is not None:
            raise ConfigurationError(
                "gradient_clip_val cannot be used with manual optimisation: call self.clip_gradients(optimizer, value) "
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

    def shadow(self, filler: Callable[[], Any], batch_idx: int) -> None:
        """Runs the step on a batch that does not count: only it knows how often it calls backward and steps."""
        if self._is_empty():
            self.has_stepped = False
            return
        batch = filler()
        if batch is None:
            raise ConfigurationError(
                "manual optimisation on a rank without a sample needs a batch to run: give all ranks as many batches."
            )
        self.window.weigh(0.0, idle=True)
        self.engine.begin_step()
        extra = (batch_idx,) if self.takes_index else ()
        with without_trace(self.module):
            self.strategy.forward(self.training_step, batch, extra)
        self.close(batch_idx)

    def close(self, batch_idx: int) -> None:
        """Steps nothing: in manual optimisation the module steps optimizers and schedulers."""
        self.strategy.end_step()
        self.has_stepped = self.engine.has_stepped
        if self.has_stepped:
            self.progress.count_window(stepped=True)


def make_step(run: Run, schedulers: Schedulers) -> Step:
    """Makes the optimisation step of a fit: automatic, manual, or one that cuts its batches into micro-batches.

    Args:
        run: of the fit.
        schedulers: those of the run.

    Raises:
        ConfigurationError: if something that was asked for does not go with it.
    """
    accumulation, training_step = run.accumulation, run.step_function("training_step")
    if isinstance(accumulation, AutoAccumulation):
        # Imported here, since a step that cuts batches is the rare one.
        from leyden.trainer.loops.auto_step import AutoStep, check_auto

        check_auto(run)
        return AutoStep(run, training_step, schedulers, accumulation)
    kind = AutomaticStep if run.module.automatic_optimization else ManualStep
    if accumulation is None:
        return kind(run, training_step, schedulers, False)
    samples = run.loaders.samples_per_batch
    accumulates = any(accumulation.batches(at, samples) > 1 for at in accumulation.scheduling)
    return kind(run, training_step, schedulers, accumulates)


def only_clears(optimizer: Optimizer) -> bool:
    """True if `optimizer.zero_grad` is torch's own method, not overridden or patched."""
    return type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer)


def clear_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Does what torch's `zero_grad()` does, without its label for profilers, which costs more than the loop itself."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def detached(outputs: Any) -> Any:
    """What `training_step` returned, without the graph that listeners would otherwise keep alive."""
    if isinstance(outputs, Tensor):
        return outputs.detach()
    if isinstance(outputs, dict):
        return {key: value.detach() if isinstance(value, Tensor) else value for key, value in outputs.items()}
    return outputs
