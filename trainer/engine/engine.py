"""Engine: the strategy, the accumulation window and what is prepared, as Trainer and Accelerator drive them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.strategies import Strategy, Window, find_strategy
from leyden.strategies.base import mean_items
from leyden.strategies.batch import map_tensors
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.precision import Precision, find_precision
from leyden.strategies.readers import Readers
from leyden.strategies.window import zeroed
from leyden.trainer.engine.gathering import check_gathered, warn_of_rest
from leyden.trainer.engine.prepared import PreparedOptimizer
from leyden.trainer.engine.toggling import Toggles

if TYPE_CHECKING:
    from leyden.strategies.window import BackwardHooks
    from leyden.trainer.data.sharding import Share
    from leyden.trainer.engine.debugging import Checker

T = TypeVar("T")


def needs_closure(optimizer: Optimizer) -> bool:
    """True for an optimizer like LBFGS, whose step evaluates the loss several times."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


class Engine:
    """Device, precision, strategy, accumulation window and collectives of one run.

    The Trainer drives it directly. `Stepping`, the engine of an `Accelerator`, extends it for user-written loops.

    Args:
        strategy: a name or a Strategy.
        accelerator: "cpu", "gpu", "cuda", "mps" or "auto".
        precision: a name or a Precision; None leaves a given strategy's own.
        devices: as for the Trainer.
        num_nodes: number of machines.
    """

    checker: Checker | None = None
    """In debug mode, checks before each collective that all ranks pass matching inputs."""

    def __init__(
        self,
        strategy: str | Strategy = "auto",
        accelerator: str = "auto",
        precision: str | int | Precision | None = None,
        devices: Any = "auto",
        num_nodes: int = 1,
    ) -> None:
        keeps_own = isinstance(strategy, Strategy) and precision is None
        plugin = None if keeps_own else find_precision(precision)
        self.strategy: Strategy = find_strategy(strategy, accelerator, devices, num_nodes, plugin)
        self.window = Window()
        self.prepared_optimizers: list[PreparedOptimizer] = []
        self.toggles = Toggles(self)
        self.has_stepped = False
        """An optimizer stepped since `begin_step`."""
        self._manual = False
        self._before_step: Callable[[Optimizer], Any] | None = None
        """Called in manual optimisation, with unscaled gradients, before each step."""
        self._backward_hooks: BackwardHooks | None = None
        """Called around `manual_backward`."""
        self._went_backward = True
        """`manual_backward` was called in this batch; also True when it makes no difference."""
        self._needs_manual_backward = False
        """A plain `loss.backward()` would lack what `manual_backward` does, and the user was not warned of it yet."""
        self.warned_of_rest = False
        """The user was warned that `all_gather` will fail at the end of the epoch."""
        self.share: Share | None = None
        """What ranks know of each other's part of the current batch; None between batches, or if nothing is known."""

    @property
    def precision(self) -> Precision:
        return self.strategy.precision

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.strategy.root_device

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers themselves, as the strategy holds them."""
        return [prepared.optimizer for prepared in self.prepared_optimizers]

    # set-up -----------------------------------------------------------------------------------------------------------
    def check_compiled(self) -> None:
        """Raises ConfigurationError if the strategy does not run modules compiled by torch.compile."""
        reason = self.strategy.refusals.get("compiled")
        if reason is not None:
            raise ConfigurationError(f"torch.compile with strategy={self.strategy.name!r}: {reason}.")

    def prepare_module(self, module: nn.Module) -> nn.Module:
        """Brings the module to its device; its optimizers are made after that."""
        return self.strategy.setup_modules([module])[0]

    def prepare_optimizers(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> list[PreparedOptimizer]:
        """Prepares the optimizers of modules that are prepared."""
        prepared = self.strategy.setup_optimizers(modules, optimizers)
        self.prepared_optimizers = [PreparedOptimizer(optimizer, self) for optimizer in prepared]
        return self.prepared_optimizers

    def teardown(self) -> None:
        """Closes the window and leaves the strategy; optimizers stay for a run that continues."""
        self.window, self.share = Window(), None
        self.strategy.teardown()

    # the window -------------------------------------------------------------------------------------------------------
    def close_window(self, window: Window | None = None) -> None:
        """Brings the gradients of a window to their mean: over its true length, or over its items.

        Args:
            window: the open one if left out; or that of the micro-batches of a batch.
        """
        window = self.window if window is None else window
        count = window.index + 1
        if window.num_items is not None and window.first_items is not None:
            if count > 1 or window.alone or self.strategy.outputs.are_in_parts:
                self.strategy.scale_gradients(_ratio(window.first_items, mean_items(self.strategy, window.num_items)))
        elif count != window.length:
            self.strategy.scale_gradients(window.length / count)

    def begin_batch(self, share: Share) -> None:
        """Begins a batch of sharded data; `end_batch` ends it."""
        self.share = share

    def end_batch(self) -> None:
        """Ends the batch of sharded data: until the next one nothing is known of the ranks' parts."""
        self.share = None

    # steps ------------------------------------------------------------------------------------------------------------
    def begin_automatic(self) -> None:
        """Switches to automatic optimisation: the loop calls backward and step."""
        self._manual, self._before_step, self._backward_hooks = False, None, None
        self._went_backward, self._needs_manual_backward = True, False

    def begin_manual(self, hooks: BackwardHooks, before_step: Callable[[Optimizer], Any] | None) -> None:
        """Switches to manual optimisation: the module calls backward and step.

        Args:
            hooks: called around `manual_backward`.
            before_step: called with unscaled gradients, before each step.
        """
        self._manual, self._before_step, self._backward_hooks = True, before_step, hooks
        self._went_backward = True
        self._needs_manual_backward = self.strategy.ranks.world_size > 1 or self.precision.scales_loss

    def begin_step(self) -> None:
        """Begins code that may step optimizers; afterwards `has_stepped` says whether any did."""
        self.has_stepped = False
        self._went_backward = not self._needs_manual_backward

    def step(self, prepared: PreparedOptimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        """Steps one optimizer; in manual optimisation with everything that belongs to a step.

        Args:
            prepared: the optimizer.
            closure: evaluates the loss again, for an optimizer that asks for it.
            **kwargs: further arguments of the optimizer's own `step`.
        """
        optimizer, strategy = prepared.optimizer, self.strategy
        if self._manual:
            if not self._went_backward and closure is None:
                self._warn_of_plain_backward()
            strategy.before_step(optimizer)
            if self._before_step is not None:
                self._before_step(optimizer)
        elif closure is not None and not needs_closure(optimizer):
            # The gradients are there: the closure would only return the loss, and a gradient scaler takes no closure.
            closure()
            closure = None
        stepped = strategy.step(optimizer, closure, **kwargs)
        self.has_stepped = self.has_stepped or stepped
        return stepped

    def _warn_of_plain_backward(self) -> None:
        self._needs_manual_backward, self._went_backward = False, True
        lacks = [
            *(["are not exchanged with the other ranks"] if self.strategy.ranks.world_size > 1 else []),
            *([f"are not scaled for precision={self.precision.name!r}"] if self.precision.scales_loss else []),
        ]
        warnings.warn(
            "training_step stepped an optimizer without a call of self.manual_backward. Gradients of a plain "
            f"loss.backward() {' and '.join(lacks)}: call self.manual_backward(loss) in its place.",
            stacklevel=5,
        )

    def zero_grad(self, prepared: PreparedOptimizer, set_to_none: bool = True) -> None:
        """Clears the gradients of one optimizer."""
        prepared.optimizer.zero_grad(set_to_none)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Runs backward without dividing the loss; scales for the precision, and weights a rank of an uneven batch."""
        self._went_backward = True
        hooks, weight = self._backward_hooks, self.window.weight
        # A rank without a sample runs the step for the others: no hook is called, but backward is the module's own.
        listening = hooks if weight else None
        for before in listening.on_before_backward if listening is not None else ():
            before(loss)
        if weight != 1.0:
            loss = loss * weight if weight else zeroed(loss)
        if hooks is not None and hooks.backward is not None:
            kwargs["own"] = hooks.backward
        self.strategy.backward(loss, *args, **kwargs)
        for after in listening.on_after_backward if listening is not None else ():
            after()

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass in the run's precision."""
        context = self.precision.forward_context
        return nullcontext() if context is None else context()

    def check_collectives(self, checker: Checker) -> None:
        """Checks from here on, before each collective, that all ranks pass matching inputs."""
        self.checker = checker

    # collectives ------------------------------------------------------------------------------------------------------
    def all_gather(self, data: T, group: Any = None, sync_grads: bool = False) -> T:
        """Stacks tensors of any nested structure over the data ranks: (data_size, *shape).

        Ranks of a tp group have the same, which is there once. With a `group`, all of its ranks are stacked.

        Raises:
            ConfigurationError: where a rank cannot take part, or has tensors of other shapes.
        """
        if self.checker is not None and group is None:
            self.checker.compare("all_gather", data)
        elif self.strategy.ranks.world_size > 1:
            check_gathered(self.strategy, self.share, data, group)
            if self.share is not None and self.share.rest and not self.warned_of_rest:
                self.warned_of_rest = warn_of_rest(self.strategy, self.share, data)
        if group is not None:
            return map_tensors(data, lambda tensor: self.strategy.ranks.all_gather(tensor, group, sync_grads))
        readers = Readers(self.strategy)
        return map_tensors(data, lambda tensor: readers.all_gather(tensor, sync_grads=sync_grads))

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Gives every rank the object of rank `src`."""
        if self.checker is not None:
            self.checker.compare("broadcast", None)
        return self.strategy.ranks.broadcast(obj, src)

    def check_parameters(self, modules: Iterable[nn.Module]) -> None:
        """Raises if an optimizer holds only parameters that no module owns: its steps would have no effect."""
        known = {id(p) for module in modules for p in module.parameters()}
        for number, optimizer in enumerate(self.optimizers):
            owned = [p for group in self.strategy.master_weights.groups(optimizer) for p in group]
            if owned and known and not any(id(p) in known for p in owned):
                raise ConfigurationError(
                    f"optimizer {number} ({type(optimizer).__name__}) holds no parameter of this module. Make it in "
                    "configure_optimizers, from self.parameters()."
                )


def _ratio(first: Tensor | float, total: Tensor | float) -> Tensor | float:
    """In float64 where there is one: torch divides whole numbers in float32, which is too coarse for 64-true."""
    if isinstance(total, Tensor) and total.device.type != "mps":
        total = total.double()
    return first / total
