"""The hooks of a run: their order, and who listens to which. A hook that nobody overrides costs nothing.

This is the order, as pseudocode; `tests/trainer/events/test_hook_order.py` executes it and compares it with recorded
runs. Indentation shows what lies inside what, [a condition] holds for the rest of its line, (a remark) explains. The
sections at the margin are `fit` and the other methods of a Trainer, and the parts that they share: `evaluation`,
`compose`, `error`.

    fit
        [fitted before] callback.load_state_dict (each starts as it was made)
        configure_callbacks, prepare_data, setup, configure_model
        [resume] module.on_load_checkpoint, datamodule.load_state_dict, callback.on_load_checkpoint
        [resume] callback.load_state_dict
        configure_optimizers, on_fit_start
        [first fit] callback.state_dict (to start a later fit from)
        [sanity check] on_sanity_check_start, val_dataloader, evaluation, on_sanity_check_end
        train_dataloader
        [no sanity check] val_dataloader
        on_train_start
        compose (so that what no checkpoint can hold is refused before the first step)
        for epoch (a resumed run continues in here, at the place of its checkpoint)
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
        configure_callbacks, prepare_data, setup, configure_model
        [with ckpt_path] module.on_load_checkpoint
        X_dataloader, evaluation, teardown
    save
        compose
    compose (what a checkpoint holds of the user's state)
        callback.state_dict, on_save_checkpoint, datamodule.state_dict
    error (wherever it came up; then teardown)
        callback.on_exception, datamodule.on_exception

In manual optimisation `manual_backward` calls on_before_backward, backward and on_after_backward, and a step of an
optimizer on_before_optimizer_step before it; zero_grad, clipping and steps are the module's own calls.

A name without an owner, such as `setup`, is called on everyone who has such a hook: the DataModule first, then
callbacks in their order, the module, and the closing callbacks (`Callback.order >= 100`: early stopping, checkpoints;
in the hooks that `Callback.closing_hooks` names, others too). On a rank without a sample of a batch they alone are
called at its end.
`main` is all of them but the closing callbacks. These come last because they act on metrics: at the end of a training
batch, of a training epoch and of an evaluation, the metrics are reduced and sent to the loggers in between. Loaders and
transfer hooks are the DataModule's where it overrides them, else the module's. After the transfer of a training batch
callbacks may return another one (`Callback.transform_train_batch`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from leyden.callbacks.base import CLOSING_ORDER, Callback, in_order

Call = Callable[..., Any]


class Measures(Protocol):
    """What hooks ask of a profiler."""

    def wrap(self, action_name: str, function: Call) -> Call:
        """Returns the function, measured under a name."""
        ...

    def start(self, action_name: str) -> None:
        """Called when an action begins."""

    def stop(self, action_name: str) -> None:
        """Called when it ends."""


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
"""What `Hooks` calls. Steps, loaders, transfers and `configure_…` have one owner each, who is called directly."""


def overrides(obj: object, name: str, base: type) -> bool:
    """True if the object has a method of that name that is not the one of `base`; None takes a method away."""
    attributes = getattr(obj, "__dict__", {})
    if name in attributes:
        return attributes[name] is not None
    own = getattr(type(obj), name, None)
    return own is not None and own is not getattr(base, name, None)


class Hooks:
    """The listeners of one run, by event.

    The table is built once, so that an event without listeners is one failed look-up. The loops call `fire`, then have
    the metrics reduced, then call `close`; where an event has no metrics, `fire_all` does both.

    Args:
        callbacks: the run's callbacks.
        trainer: handed to callbacks.
        module: the user's module.
        base: the class whose methods count as "not overridden": TrainModule.
        profiler: measures each listener, and backward; None leaves them as they are.
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
        """The hook that runs now: it decides whether what `self.log` is given belongs to a step or to an epoch."""
        self.is_closing = False
        """It is a closing callback's."""
        self._main: dict[str, tuple[Call, ...]] = {}
        self._closing: dict[str, tuple[Call, ...]] = {}
        self._users: set[int] = set()
        """The listeners that are not Leyden's own, by their ids."""
        self._first: Callable[[], None] | None = None
        self._trainer, self._module, self._base, self._profiler = trainer, module, base, profiler
        self.listen(callbacks)

    def listen(self, callbacks: Iterable[Callback]) -> None:
        """Lets these callbacks and the module listen. Loops look up listeners once, so do not call it inside one."""
        trainer, module, base, profiler = self._trainer, self._module, self._base, self._profiler
        ordered = list(in_order(list(callbacks)))
        self._main.clear()
        self._closing.clear()
        self._users.clear()

        def of_callbacks(event: str) -> list[tuple[int, Call]]:
            return [
                (
                    max(callback.order, CLOSING_ORDER) if event in callback.closing_hooks else callback.order,
                    functools.partial(getattr(callback, event), trainer, module),
                )
                for callback in ordered
                if overrides(callback, event, Callback)
            ]

        def of_module(event: str) -> list[Call]:
            return [getattr(module, event)] if overrides(module, event, base) else []

        def final(event: str, call: Call) -> Call:
            listener = call if profiler is None else profiler.wrap(_label(event, call, module), call)
            if not _is_own(call):
                self._users.add(id(listener))
            return listener

        for event in EVENTS:
            calls = of_callbacks(event)
            main = [call for order, call in calls if order < CLOSING_ORDER] + of_module(event)
            closing = [call for order, call in calls if order >= CLOSING_ORDER]
            if main:
                self._main[event] = tuple(final(event, call) for call in main)
            if closing:
                self._closing[event] = tuple(final(event, call) for call in closing)
        self._backward: Call | None = next(iter(of_module("backward")), None)
        self.precede(self._first)
        self._module_loads = of_module("on_load_checkpoint")
        self._callbacks_load = [call for _, call in of_callbacks("on_load_checkpoint")]

    def precede(self, first: Callable[[], None] | None) -> None:
        """Has a function called before each hook that may change the weights: the user's own, but not the steps.

        Args:
            first: waits for a checkpoint's copies, say; None ends that.
        """
        self._first = first
        self.on_before_backward = self._preceded("on_before_backward")
        self.on_after_backward = self._preceded("on_after_backward")
        self.backward: Callable[..., Any] | None = self._preceded_backward()
        """The module's `backward`, where it overrides it."""

    def _preceded(self, event: str) -> tuple[Call, ...]:
        first, calls = self._first, self._all(event)
        if self._profiler is not None:
            # Backward is what comes between the two events.
            begins = event == "on_before_backward"
            span = functools.partial(self._profiler.start if begins else self._profiler.stop, "backward")
            calls = (*calls, lambda *args: span()) if begins else (lambda *args: span(), *calls)
        if first is None or not any(id(call) in self._users for call in calls):
            return calls
        return ((lambda *args: first()), *calls)

    def _preceded_backward(self) -> Call | None:
        first, own = self._first, self._backward
        if first is None or own is None:
            return own

        def backward(*args: Any, **kwargs: Any) -> Any:
            first()
            return own(*args, **kwargs)

        return backward

    def setup(self, callbacks: Iterable[Callback], stage: str) -> None:
        """Calls `setup` of callbacks that others added in theirs."""
        for callback in callbacks:
            callback.setup(self._trainer, self._module, stage)

    def repeat_epoch_start(self, callbacks: Iterable[Callback], epoch: int) -> None:
        """Has callbacks do again what they did to the optimizers at the start of an epoch, after a run went back."""
        for callback in callbacks:
            callback.repeat_epoch_start(self._trainer, self._module, epoch)

    def inside(self, event: str) -> Inside:
        """Returns a context in which this hook runs, for steps and hooks that a loop calls directly."""
        return Inside(self, event)

    def listens(self, event: str) -> bool:
        """True if anybody does."""
        return event in self._main or event in self._closing

    def fire(self, event: str, *args: Any) -> Any:
        """Calls callbacks and module, but not the closing callbacks; returns the last result that is not None."""
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
        """Calls everyone, in order: for events without metrics to reduce."""
        result = self.fire(event, *args)
        self.close(event, *args)
        return result

    def fire_each(self, event: str, *args: Any) -> list[Exception]:
        """Calls everyone, in order, even after one has raised; returns what was raised."""
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
                if self._first is not None and id(call) in self._users:
                    self._first()
                value = call(*args)
                if value is not None:
                    result = value
        finally:
            self.current = before
        return result


def _label(event: str, call: Call, module: Any) -> str:
    """What a profiler calls a listener."""
    owner = getattr(call.func if isinstance(call, functools.partial) else call, "__self__", None)
    if owner is None:
        return event
    return f"[{'TrainModule' if owner is module else 'Callback'}]{type(owner).__name__}.{event}"


def _is_own(call: Call) -> bool:
    """True for a hook of Leyden's own that leaves the weights alone."""
    hook = call.func if isinstance(call, functools.partial) else call
    owner = getattr(hook, "__self__", None)
    return str(getattr(hook, "__module__", "")).startswith("leyden.") and not getattr(owner, "changes_weights", False)


class Inside:
    """The context of `Hooks.inside`: `hooks.current` is its hook within, and what it was before afterwards.

    A class with slots, as steps of every batch enter it: a generator's context takes three times as long.
    """

    __slots__ = ("_before", "_event", "_hooks")

    def __init__(self, hooks: Hooks, event: str) -> None:
        self._hooks, self._event, self._before = hooks, event, ""

    def __enter__(self) -> None:
        first = self._hooks._first
        if first is not None and self._event != "training_step":
            first()
        self._before, self._hooks.current = self._hooks.current, self._event

    def __exit__(self, *error: object) -> None:
        self._hooks.current = self._before
