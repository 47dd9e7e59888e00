"""The hooks of a run: their order and their listeners. A hook without an override costs nothing.

The order is given below as pseudocode; `tests/trainer/events/test_hook_order.py` executes it and compares it with
recorded runs. Indentation shows nesting, [a condition] applies to the rest of its line, and (a remark) explains. The
sections at the margin are `fit` and the other methods of a Trainer, and the parts that they share: `evaluation`,
`compose`, `error`.

    fit
        [fitted before] callback.load_state_dict (resets each callback to its initial state)
        configure_callbacks, prepare_data, setup, configure_model, configure_weights
        [resume] module.on_load_checkpoint, datamodule.load_state_dict, callback.on_load_checkpoint
        [resume] callback.load_state_dict
        configure_optimizers, on_fit_start
        [first fit] callback.state_dict (kept as the initial state for a later fit)
        train_dataloader, val_dataloader (always in this order, since both may draw random numbers)
        [sanity check] on_sanity_check_start, evaluation, on_sanity_check_end
        on_train_start
        compose (to refuse, before the first step, state that no checkpoint can hold)
        [validate at start] evaluation (instead of the sanity check, and not in a resumed run that has done it)
        for epoch (a resumed run continues inside this loop, at the position of its checkpoint)
            on_train_epoch_start
            for window
                for batch
                    on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer, on_train_batch_start
                    [first of the window] for optimizer
                        on_before_zero_grad, optimizer_zero_grad
                    training_step, on_before_backward, backward, on_after_backward
                    [last of the window] for optimizer
                        on_before_optimizer_step, configure_gradient_clipping, optimizer_step
                    [last of the window, scheduler by step] lr_scheduler_step
                    [last of the epoch, scheduler by epoch] lr_scheduler_step
                    on_train_batch_end
                [validation due] evaluation
                [plateau scheduler by step] lr_scheduler_step
            main.on_train_epoch_end
            [plateau scheduler by epoch] lr_scheduler_step
            closing.on_train_epoch_end
        on_train_end, on_fit_end, teardown
    evaluation (X is validation, test or predict; in loaders val, test or predict)
        [in fit] on_X_model_zero_grad
        on_X_model_eval, on_X_start, on_X_epoch_start
        for batch
            on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer
            on_X_batch_start, X_step, on_X_batch_end
        on_X_epoch_end, on_X_end, on_X_model_train
    validate, test, predict
        configure_callbacks, prepare_data, setup, configure_model, configure_weights
        [with ckpt_path] module.on_load_checkpoint
        X_dataloader, evaluation, teardown
    save
        compose
    compose (the user's state in a checkpoint)
        callback.state_dict, on_save_checkpoint, datamodule.state_dict
    error (raised anywhere; teardown follows)
        callback.on_exception, datamodule.on_exception

In manual optimization, `manual_backward` calls on_before_backward, backward and on_after_backward, and an optimizer's
step is preceded by on_before_optimizer_step. The module itself calls zero_grad, clipping and steps.

A name without an owner, such as `setup`, is called on every object that has the hook: first the DataModule, then the
callbacks in their order, the module, and last the closing callbacks (`Callback.order >= 100`: early stopping,
checkpoints; other callbacks too, in the hooks that `Callback.closing_hooks` lists). On a rank without a sample of a
batch, only the closing callbacks are called at the end of that batch.
`main` stands for all of these except the closing callbacks. Closing callbacks come last because they act on metrics: at
the end of a training batch, a training epoch and an evaluation, metrics are reduced and sent to loggers first. Loaders
and transfer hooks are the DataModule's if it overrides them, and otherwise the module's. After the transfer of a
training batch, callbacks may replace it (`Callback.transform_train_batch`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from leyden.callbacks.base import CLOSING_ORDER, Callback, in_order

Call = Callable[..., Any]


class Measures(Protocol):
    """The part of a profiler's interface that hooks use."""

    def wrap(self, action_name: str, function: Call) -> Call:
        """Returns the function, wrapped so that its calls are measured under a name."""
        ...

    def start(self, action_name: str) -> None:
        """Starts measuring an action."""

    def stop(self, action_name: str) -> None:
        """Stops measuring an action."""


STAGES = ("validation", "test", "predict")
MOMENTS = ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end", "model_eval", "model_train")
EVENTS = (
    *("setup", "teardown", "on_exception", "on_save_checkpoint", "on_load_checkpoint"),
    *("on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end"),
    *("on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_validation_model_zero_grad"),
    *(f"on_{stage}_{moment}" for stage in STAGES for moment in MOMENTS),
)
"""The hooks that `Hooks` calls. Steps, loaders, transfers and `configure_…` have one owner, and are called directly."""


def overrides(obj: object, name: str, base: type) -> bool:
    """Returns True if the object overrides a method of `base`. An attribute set to None removes the method."""
    attributes = getattr(obj, "__dict__", {})
    if name in attributes:
        return attributes[name] is not None
    own = getattr(type(obj), name, None)
    return own is not None and own is not getattr(base, name, None)


class Hooks:
    """The listeners of a run, by event.

    The table is built once, so an event without listeners costs one failed lookup. The loops call `fire`, reduce the
    metrics, then call `close`. For events without metrics, `fire_all` calls both.

    Args:
        callbacks: the run's callbacks.
        trainer: the Trainer, passed to callbacks.
        module: the user's module.
        base: the base class of modules (TrainModule). Its own methods are not listeners.
        profiler: the profiler that measures each listener and backward; None to measure nothing.
    """

    def __init__(
        self,
        callbacks: Iterable[Callback],
        trainer: Any,
        module: Any,
        base: type,
        profiler: Measures | None = None,
    ) -> None:
        self.current = ""
        """The hook that is running. It decides whether a value passed to `self.log` belongs to a step or an epoch."""
        self.is_closing = False
        """True while a closing callback's hook runs."""
        self._main: dict[str, tuple[Call, ...]] = {}
        self._closing: dict[str, tuple[Call, ...]] = {}
        self._user_calls: set[int] = set()
        """The ids of listeners that may change the weights: the user's, and Leyden's own with `changes_weights`."""
        self._guard: Callable[[], None] | None = None
        """Called before each hook that may change the weights; see `precede`."""
        self._trainer, self._module, self._base, self._profiler = trainer, module, base, profiler
        self.listen(callbacks)

    def listen(self, callbacks: Iterable[Callback]) -> None:
        """Registers the hooks of these callbacks and of the module.

        Do not call this inside a loop: loops look up listeners only once.
        """
        trainer, module, base, profiler = self._trainer, self._module, self._base, self._profiler
        ordered = list(in_order(list(callbacks)))
        self._main.clear()
        self._closing.clear()
        self._user_calls.clear()

        def of_callbacks(event: str) -> list[tuple[bool, Call]]:
            """Returns the callbacks' hooks for an event, in order, each with a flag for closing callbacks."""
            return [
                (
                    callback.order >= CLOSING_ORDER or event in callback.closing_hooks,
                    functools.partial(getattr(callback, event), trainer, module),
                )
                for callback in ordered
                if overrides(callback, event, Callback)
            ]

        def of_module(event: str) -> list[Call]:
            return [getattr(module, event)] if overrides(module, event, base) else []

        def listener_of(event: str, call: Call) -> Call:
            listener = call if profiler is None else profiler.wrap(_label(event, call, module), call)
            if not _keeps_weights(call):
                self._user_calls.add(id(listener))
            return listener

        for event in EVENTS:
            calls = of_callbacks(event)
            main = [call for is_closing, call in calls if not is_closing] + of_module(event)
            closing = [call for is_closing, call in calls if is_closing]
            if main:
                self._main[event] = tuple(listener_of(event, call) for call in main)
            if closing:
                self._closing[event] = tuple(listener_of(event, call) for call in closing)
        self._backward: Call | None = next(iter(of_module("backward")), None)
        self.precede(self._guard)
        self._module_loads = of_module("on_load_checkpoint")
        self._callbacks_load = [call for _, call in of_callbacks("on_load_checkpoint")]

    def precede(self, first: Callable[[], None] | None) -> None:
        """Sets a function to call before each hook that may change the weights: the user's hooks, but not the steps.

        Args:
            first: the function to call, such as one that waits for a checkpoint's copies; None to remove it.
        """
        self._guard = first
        self.on_before_backward = self._guarded("on_before_backward")
        self.on_after_backward = self._guarded("on_after_backward")
        self.backward: Callable[..., Any] | None = self._guarded_backward()
        """The module's `backward` if it overrides the method; otherwise None."""

    def _guarded(self, event: str) -> tuple[Call, ...]:
        """Returns the listeners of an event around backward, preceded by the guard if one of them is the user's."""
        guard, profiler, calls = self._guard, self._profiler, self._all(event)
        # The profiler measures backward from the end of on_before_backward to the start of on_after_backward.
        if profiler is not None and event == "on_before_backward":
            calls = (*calls, lambda *args: profiler.start("backward"))
        elif profiler is not None:
            calls = (lambda *args: profiler.stop("backward"), *calls)
        if guard is None or not any(id(call) in self._user_calls for call in calls):
            return calls
        return ((lambda *args: guard()), *calls)

    def _guarded_backward(self) -> Call | None:
        guard, own = self._guard, self._backward
        if guard is None or own is None:
            return own

        def backward(*args: Any, **kwargs: Any) -> Any:
            guard()
            return own(*args, **kwargs)

        return backward

    def setup(self, callbacks: Iterable[Callback], stage: str) -> None:
        """Calls `setup` of callbacks that other callbacks added in their own `setup`."""
        for callback in callbacks:
            callback.setup(self._trainer, self._module, stage)

    def repeat_epoch_start(self, callbacks: Iterable[Callback], epoch: int) -> None:
        """Calls `repeat_epoch_start` of callbacks, to redo their changes to the optimizers after a rollback."""
        for callback in callbacks:
            callback.repeat_epoch_start(self._trainer, self._module, epoch)

    def inside(self, event: str) -> Inside:
        """Returns a context that marks this hook as running, for steps and hooks that a loop calls directly."""
        return Inside(self, event)

    def listens(self, event: str) -> bool:
        """Returns True if the event has a listener."""
        return event in self._main or event in self._closing

    def fire(self, event: str, *args: Any) -> Any:
        """Calls all listeners except the closing callbacks. Returns the last result that is not None."""
        calls = self._main.get(event)
        return None if calls is None else self._call(event, calls, args)

    def close(self, event: str, *args: Any) -> None:
        """Calls the closing callbacks."""
        calls = self._closing.get(event)
        if calls is not None:
            before, self.is_closing = self.is_closing, True
            try:
                self._call(event, calls, args)
            finally:
                self.is_closing = before

    def fire_all(self, event: str, *args: Any) -> Any:
        """Calls all listeners in order. For events without metrics to reduce."""
        result = self.fire(event, *args)
        self.close(event, *args)
        return result

    def fire_each(self, event: str, *args: Any) -> list[Exception]:
        """Calls all listeners in order, even after one has raised. Returns the exceptions."""
        errors: list[Exception] = []
        for call in self._all(event):
            try:
                self._call(event, (call,), args)
            except Exception as error:
                errors.append(error)
        return errors

    def load_into_module(self, checkpoint: dict[str, Any]) -> None:
        """Calls the module's `on_load_checkpoint`, before the weights are loaded."""
        self._call("on_load_checkpoint", self._module_loads, (checkpoint,))

    def load_into_callbacks(self, checkpoint: dict[str, Any]) -> None:
        """Calls the callbacks' `on_load_checkpoint`, after the weights are loaded."""
        self._call("on_load_checkpoint", self._callbacks_load, (checkpoint,))

    def _all(self, event: str) -> tuple[Call, ...]:
        return self._main.get(event, ()) + self._closing.get(event, ())

    def _call(self, event: str, calls: Iterable[Call], args: tuple[Any, ...]) -> Any:
        before, self.current = self.current, event
        result = None
        try:
            for call in calls:
                if self._guard is not None and id(call) in self._user_calls:
                    self._guard()
                value = call(*args)
                if value is not None:
                    result = value
        finally:
            self.current = before
        return result


def _label(event: str, call: Call, module: Any) -> str:
    """Returns the name of a listener in a profile."""
    owner = getattr(call.func if isinstance(call, functools.partial) else call, "__self__", None)
    if owner is None:
        return event
    return f"[{'TrainModule' if owner is module else 'Callback'}]{type(owner).__name__}.{event}"


def _keeps_weights(call: Call) -> bool:
    """Returns True for one of Leyden's own hooks that does not change the weights."""
    hook = call.func if isinstance(call, functools.partial) else call
    owner = getattr(hook, "__self__", None)
    return str(getattr(hook, "__module__", "")).startswith("leyden.") and not getattr(owner, "changes_weights", False)


class Inside:
    """The context of `Hooks.inside`: sets `hooks.current` within the block, and restores it afterwards.

    A class with slots, since the steps of every batch enter it. A generator-based context takes three times as long.
    """

    __slots__ = ("_before", "_event", "_hooks")

    def __init__(self, hooks: Hooks, event: str) -> None:
        self._hooks, self._event, self._before = hooks, event, ""

    def __enter__(self) -> None:
        guard = self._hooks._guard
        if guard is not None and self._event != "training_step":
            guard()
        self._before, self._hooks.current = self._hooks.current, self._event

    def __exit__(self, *error: object) -> None:
        self._hooks.current = self._before
