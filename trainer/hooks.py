"""Who listens to which hook, worked out once per run: hooks that nobody overrides cost nothing.

The order in which a run calls its hooks, as pseudocode, which `tests/trainer/test_hook_order.py` executes and compares with
recorded runs. Indentation shows what lies inside what, [a condition] holds for the rest of its line, (a remark) explains.

    fit
        [fitted before] callback.load_state_dict (each starts as it was made)
        configure_callbacks, prepare_data, setup, configure_model
        [resume] compose, module.on_load_checkpoint, datamodule.load_state_dict, callback.on_load_checkpoint
        [resume] callback.load_state_dict
        configure_optimizers, on_fit_start
        compose (so that what no checkpoint can hold is refused before the first step)
        [sanity check] on_sanity_check_start, val_dataloader, evaluation, on_sanity_check_end
        train_dataloader
        [no sanity check] val_dataloader
        on_train_start
        for epoch (a resume goes on from here, where its checkpoint stands)
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

On each event the DataModule comes first, then callbacks in their order, the module, and the closing callbacks
(`Callback.order >= 100`); "main" is all but the last of these. Loaders and transfer hooks are the DataModule's where it has
them, else the module's. In training epochs and batches, and in evaluation, the metrics of the event are reduced and given to the
loggers before the closing callbacks see it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from leyden.callbacks.base import CLOSING_ORDER, Callback, in_order

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[..., Any]
Wrapper = Callable[[str, Call], Call]

EVENTS = (
    *(
        "setup",
        "teardown",
        "on_exception",
        "on_fit_start",
        "on_fit_end",
        "on_sanity_check_start",
        "on_sanity_check_end",
    ),
    *("on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
    *("on_save_checkpoint", "on_load_checkpoint"),
    *(
        f"on_{stage}_{moment}"
        for stage in ("validation", "test", "predict")
        for moment in (
            "start",
            "end",
            "epoch_start",
            "epoch_end",
            "batch_start",
            "batch_end",
            "model_eval",
            "model_train",
        )
    ),
    "on_validation_model_zero_grad",
)


def overrides(obj: object, name: str, base: type) -> bool:
    """True if the object has a method of that name other than the one of `base`."""
    if name in getattr(obj, "__dict__", {}):
        return True
    own = getattr(type(obj), name, None)
    return own is not None and own is not getattr(base, name, None)


class Hooks:
    """The listeners of one run, by event.

    Args:
        callbacks: the run's callbacks.
        trainer: handed to callbacks.
        module: the user's module.
        base: the class whose methods count as "not overridden": TrainModule.
        wrap: gives each listener another form (a profiler's span); None leaves them as they are.
    """

    def __init__(
        self,
        callbacks: Iterable[Callback],
        trainer: Any,
        module: Any,
        base: type,
        wrap: Wrapper | None = None,
    ) -> None:
        self.current = ""
        """The hook that runs now: what `self.log` goes by."""
        self.backward: Callable[[Tensor], Any] | None = None
        ordered = list(in_order(list(callbacks)))
        self._callbacks: dict[str, tuple[Call, ...]] = {}
        self._module: dict[str, tuple[Call, ...]] = {}
        self.main: dict[str, tuple[Call, ...]] = {}
        self.closing: dict[str, tuple[Call, ...]] = {}
        for event in EVENTS:
            calls = [
                (callback.order, functools.partial(getattr(callback, event), trainer, module))
                for callback in ordered
                if overrides(callback, event, Callback)
            ]
            own: list[Call] = [getattr(module, event)] if overrides(module, event, base) else []
            main = [call for order, call in calls if order < CLOSING_ORDER] + own
            closing: list[Call] = [call for order, call in calls if order >= CLOSING_ORDER]
            if wrap is not None:
                main, closing = [wrap(event, call) for call in main], [wrap(event, call) for call in closing]
            if event == "on_load_checkpoint":
                self._module[event] = tuple(own)
                self._callbacks[event] = tuple(call for _, call in calls)
            if main:
                self.main[event] = tuple(main)
            if closing:
                self.closing[event] = tuple(closing)
        self.on_before_backward = self._both("on_before_backward")
        self.on_after_backward = self._both("on_after_backward")

    def _both(self, event: str) -> tuple[Call, ...]:
        return self.main.get(event, ()) + self.closing.get(event, ())

    def listens(self, event: str) -> bool:
        """True if anybody does."""
        return event in self.main or event in self.closing

    def fire(self, event: str, *args: Any) -> Any:
        """Calls callbacks and modules, not the closing callbacks; gives back the last result that is not None."""
        calls = self.main.get(event)
        return None if calls is None else self._call(event, calls, args)

    def close(self, event: str, *args: Any) -> None:
        """Calls the closing callbacks."""
        calls = self.closing.get(event)
        if calls is not None:
            self._call(event, calls, args)

    def fire_all(self, event: str, *args: Any) -> Any:
        """Calls everyone, in order: for events that reduce no metrics."""
        result = self.fire(event, *args)
        self.close(event, *args)
        return result

    def module_only(self, event: str, *args: Any) -> None:
        """Calls the module's hook. Loading asks the module before its weights, and callbacks after them."""
        self._call(event, self._module.get(event, ()), args)

    def callbacks_only(self, event: str, *args: Any) -> None:
        """Calls the callbacks, in order."""
        self._call(event, self._callbacks.get(event, ()), args)

    def _call(self, event: str, calls: tuple[Call, ...], args: tuple[Any, ...]) -> Any:
        before, self.current = self.current, event
        result = None
        for call in calls:
            value = call(*args)
            if value is not None:
                result = value
        self.current = before
        return result
