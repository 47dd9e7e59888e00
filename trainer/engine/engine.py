"""Engine: the strategy, the accumulation window and the prepared optimizers that Trainer and Accelerator drive."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.core.tree import map_tensors
from leyden.strategies import Strategy, Window, find_strategy
from leyden.strategies.base import mean_items
from leyden.strategies.precision import Precision, find_precision
from leyden.strategies.readers import Readers
from leyden.strategies.window import zeroed
from leyden.trainer.engine.gathering import check_gathered, warn_of_rest
from leyden.trainer.engine.prepared import PreparedOptimizer
from leyden.trainer.engine.toggling import Toggles

if TYPE_CHECKING:
    from leyden.data.sharding import Share
    from leyden.strategies.window import BackwardHooks
    from leyden.trainer.engine.debugging import Checker

T = TypeVar("T")


def needs_closure(optimizer: Optimizer) -> bool:
    """Returns True for an optimizer such as LBFGS, whose step evaluates the loss several times."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


class Engine:
    """Device, precision, strategy, accumulation window and collectives of one run.

    The Trainer drives it directly. `Stepping`, the engine of an `Accelerator`, extends it for custom loops.

    Args:
        strategy: a name or a Strategy.
        accelerator: "cpu", "gpu", "auto", or a type of device: "cuda", "mps", "xpu", ….
        precision: a name or a Precision; None for the precision of a given Strategy.
        devices: the devices, as for the Trainer.
        num_nodes: number of machines.
    """

    checker: Checker | None = None
    """In debug mode, the check before each collective that all ranks pass matching inputs; None otherwise."""

    def __init__(
        self,
        strategy: str | Strategy = "auto",
        accelerator: str = "auto",
        precision: str | int | Precision | None = None,
        devices: Any = "auto",
        num_nodes: int = 1,
    ) -> None:
        keeps_precision = isinstance(strategy, Strategy) and precision is None
        plugin = None if keeps_precision else find_precision(precision)
        self.strategy: Strategy = find_strategy(strategy, accelerator, devices, num_nodes, plugin)
        self.window = Window()
        self.prepared_optimizers: list[PreparedOptimizer] = []
        self.toggles = Toggles(self)
        self.has_stepped = False
        """True if an optimizer has stepped since `begin_step`."""
        self._manual = False
        """True in manual optimization, where the module calls backward and step."""
        self._before_step: Callable[[Optimizer], Any] | None = None
        """In manual optimization, called before each step, with unscaled gradients."""
        self._backward_hooks: BackwardHooks | None = None
        """Called around `manual_backward`."""
        self._went_backward = True
        """True if `manual_backward` was called in this batch, or if a plain `loss.backward()` would do."""
        self._needs_manual_backward = False
        """True if a plain `loss.backward()` would be wrong, and the user has not been warned about it yet."""
        self._backward_calls = 0
        """In manual optimization, the number of calls of `manual_backward`."""
        self._stepped_at: dict[int, int] = {}
        """`_backward_calls` at the last step of each optimizer, by its id, until it clears its gradients."""
        self._clears: dict[int, bool] = {}
        """Whether an optimizer, by its id, has always cleared its gradients between two steps; unknown at first."""
        self._is_stepping = False
        """True while the module's manual step runs."""
        self.warned_of_rest = False
        """True once the user was warned that `all_gather` will fail in the epoch's last batch."""
        self.share: Share | None = None
        """The shares of all ranks in the current global batch; None between batches, or if they are unknown."""

    @property
    def precision(self) -> Precision:
        return self.strategy.precision

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.strategy.root_device

    @property
    def optimizers(self) -> list[Optimizer]:
        """The unwrapped optimizers, as the strategy holds them."""
        return [prepared.optimizer for prepared in self.prepared_optimizers]

    # setup -----------------------------------------------------------------------------------------------------------
    def check_compiled(self) -> None:
        """Raises ConfigurationError if the strategy does not support modules compiled by torch.compile."""
        reason = self.strategy.refusals.get("compiled")
        if reason is not None:
            raise ConfigurationError(f"torch.compile with strategy={self.strategy.name!r}: {reason}.")

    def prepare_module(self, module: nn.Module) -> nn.Module:
        """Moves the module to its device and wraps it. Its optimizers must be created afterwards."""
        return self.strategy.setup_modules([module])[0]

    def prepare_optimizers(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> list[PreparedOptimizer]:
        """Prepares the optimizers of prepared modules."""
        prepared = self.strategy.setup_optimizers(modules, optimizers)
        self.prepared_optimizers = [PreparedOptimizer(optimizer, self) for optimizer in prepared]
        return self.prepared_optimizers

    def teardown(self) -> None:
        """Closes the window and tears down the strategy. The optimizers stay, so that the run can continue."""
        self.window, self.share = Window(), None
        self.strategy.teardown()

    # the window -------------------------------------------------------------------------------------------------------
    def close_window(self, window: Window | None = None) -> None:
        """Scales the gradients of a window to their mean, over its actual length or over its items.

        Args:
            window: the window of a batch's micro-batches; None for the open window.
        """
        window = self.window if window is None else window
        count = window.index + 1
        if window.num_items is not None and window.first_items is not None:
            if count > 1 or window.alone or self.strategy.outputs.are_in_parts:
                self.strategy.scale_gradients(_ratio(window.first_items, mean_items(self.strategy, window.num_items)))
        elif count != window.length:
            self.strategy.scale_gradients(window.length / count)

    def begin_batch(self, share: Share) -> None:
        """Starts a batch of sharded data, until `end_batch`."""
        self.share = share

    def end_batch(self) -> None:
        """Ends a batch of sharded data. The shares of the ranks are unknown until the next batch."""
        self.share = None

    # steps ------------------------------------------------------------------------------------------------------------
    def begin_automatic(self) -> None:
        """Switches to automatic optimization: the loop calls backward and step."""
        self._manual, self._before_step, self._backward_hooks = False, None, None
        self._went_backward, self._needs_manual_backward = True, False

    def begin_manual(self, hooks: BackwardHooks, before_step: Callable[[Optimizer], Any] | None) -> None:
        """Switches to manual optimization: the module calls backward and step.

        Args:
            hooks: hooks to call around `manual_backward`.
            before_step: a function to call before each step, with unscaled gradients.
        """
        self._manual, self._before_step, self._backward_hooks = True, before_step, hooks
        self._went_backward, self._backward_calls, self._stepped_at, self._clears = True, 0, {}, {}
        self._needs_manual_backward = self.strategy.ranks.world_size > 1 or self.precision.scales_loss

    def begin_step(self) -> None:
        """Starts code that may step optimizers. Afterwards, `has_stepped` tells whether any did."""
        self.has_stepped = False
        self._went_backward = not self._needs_manual_backward
        self._is_stepping = self._manual

    def end_manual_step(self) -> None:
        """Ends the module's manual step."""
        self._is_stepping = False

    def open_parameters(self) -> set[int]:
        """Returns the ids of parameters whose gradients manual optimization accumulates for a later step.

        Inside a manual step there are none: a resume repeats the whole batch.
        """
        if not self.keeps_gradients:
            return set()
        groups = self.strategy.master_weights.groups
        waiting = [one for one in self.optimizers if not self._is_stale(id(one))]
        return {id(p) for optimizer in waiting for group in groups(optimizer) for p in group}

    @property
    def keeps_gradients(self) -> bool:
        """True if gradients may wait for a later batch: between two batches of manual optimization."""
        return self._manual and not self._is_stepping and not self.strategy.drives_one

    def _is_stale(self, optimizer: int) -> bool:
        """Returns True if an optimizer has stepped, and clears its gradients before it accumulates again."""
        return self._stepped_at.get(optimizer, -1) == self._backward_calls and self._clears.get(optimizer, False)

    def step(self, prepared: PreparedOptimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        """Steps one optimizer. In manual optimization, this includes unscaling and the hooks before a step.

        Args:
            prepared: the optimizer.
            closure: a function that reevaluates the loss, for optimizers such as LBFGS.
            **kwargs: further arguments for the optimizer's own `step`.

        Returns:
            False if a gradient scaler skipped the step.
        """
        optimizer, strategy = prepared.optimizer, self.strategy
        if self._manual:
            if not self._went_backward and closure is None:
                self._warn_of_plain_backward()
            strategy.before_step(optimizer)
            if self._before_step is not None:
                self._before_step(optimizer)
        elif closure is not None and not needs_closure(optimizer):
            # Backward has already run: the closure only returns the loss, and a gradient scaler accepts no closure.
            closure()
            closure = None
        stepped = strategy.step(optimizer, closure, **kwargs)
        if self._manual:
            key = id(optimizer)
            if key in self._stepped_at:
                self._clears[key] = False
            self._stepped_at[key] = self._backward_calls
        self.has_stepped = self.has_stepped or stepped
        return stepped

    def _warn_of_plain_backward(self) -> None:
        self._needs_manual_backward, self._went_backward = False, True
        problems = [
            *(["are not weighted by the size of each rank's batch"] if self.strategy.ranks.world_size > 1 else []),
            *([f"are not scaled for precision={self.precision.name!r}"] if self.precision.scales_loss else []),
        ]
        warn(
            "training_step stepped an optimizer without calling self.manual_backward. Gradients of a plain "
            f"loss.backward() {' and '.join(problems)}. Call self.manual_backward(loss) instead.",
        )

    def zero_grad(self, prepared: PreparedOptimizer, set_to_none: bool = True) -> None:
        """Clears the gradients of one optimizer."""
        prepared.optimizer.zero_grad(set_to_none)
        self._stepped_at.pop(id(prepared.optimizer), None)
        self._clears.setdefault(id(prepared.optimizer), True)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Runs backward on the loss, without dividing it by the window's length.

        The loss is scaled for the precision, and weighted on a rank of an uneven batch.
        """
        self._went_backward = True
        self._backward_calls += 1
        hooks, weight = self._backward_hooks, self.window.weight
        # A rank without a sample runs the step for the others' sake: it calls no hooks, but the module's own backward.
        active_hooks = hooks if weight else None
        for before in active_hooks.on_before_backward if active_hooks is not None else ():
            before(loss)
        if weight != 1.0:
            loss = loss * weight if weight else zeroed(loss)
        if hooks is not None and hooks.backward is not None:
            kwargs["own"] = hooks.backward
        self.strategy.backward(loss, *args, **kwargs)
        for after in active_hooks.on_after_backward if active_hooks is not None else ():
            after()

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context for a forward pass in the run's precision."""
        context = self.precision.forward_context
        return nullcontext() if context is None else context()

    def check_collectives(self, checker: Checker) -> None:
        """Installs a check before each collective that all ranks pass matching inputs."""
        self.checker = checker

    # collectives ------------------------------------------------------------------------------------------------------
    def all_gather(self, data: T, group: Any = None, sync_grads: bool = False) -> T:
        """Stacks the tensors of a nested structure over the data ranks: (data_size, *shape).

        The ranks of a tp group hold the same tensors, and contribute one entry. With a `group`, every rank of it
        contributes.

        Raises:
            ConfigurationError: if a rank cannot take part, or has tensors of different shapes.
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
        """Returns the object of rank `src` on every rank."""
        if self.checker is not None:
            self.checker.compare("broadcast", None)
        return self.strategy.ranks.broadcast(obj, src)

    def check_parameters(self, modules: Iterable[nn.Module]) -> None:
        """Raises if none of an optimizer's parameters belongs to a module, because its steps would have no effect."""
        known = {id(p) for module in modules for p in module.parameters()}
        for number, optimizer in enumerate(self.optimizers):
            owned = [p for group in self.strategy.master_weights.groups(optimizer) for p in group]
            if owned and known and not any(id(p) in known for p in owned):
                raise ConfigurationError(
                    f"optimizer {number} ({type(optimizer).__name__}) has no parameter of this module. Create it in "
                    "configure_optimizers, from self.parameters()."
                )


def _ratio(first: Tensor | float, total: Tensor | float) -> Tensor | float:
    """Returns first / total, in float64 if the device supports it.

    torch divides integers in float32, which is too coarse for precision="64-true".
    """
    if isinstance(total, Tensor) and total.device.type != "mps":
        total = total.double()
    return first / total
