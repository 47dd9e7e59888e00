"""Callback, the base class of everything that a run does besides its training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

CLOSING_ORDER = 100
"""Callbacks of this order or above are closing callbacks: they run after the module's hook and see reduced metrics."""


class Callback:
    """Base class of callbacks. Override the hooks that you need; the others are never called.

    For each event, callbacks run in ascending `order`; those of equal `order` run as listed. The module's hook of the
    same name follows. Closing callbacks (`order >= 100`, such as early stopping and checkpoints) run last, once the
    event's metrics are reduced and logged.

    Example:
        >>> class Announce(Callback):
        ...     def on_train_epoch_end(self, trainer, module):
        ...         trainer.print(f"epoch {trainer.current_epoch} has ended")
    """

    order: ClassVar[int] = 0
    closing_hooks: ClassVar[frozenset[str]] = frozenset()
    """Hooks in which this callback runs as a closing callback, whatever its order. Needed for `on_train_batch_end` on
    ranks without a sample of the batch, where only closing callbacks are called."""
    state_per_rank: ClassVar[bool | None] = None
    """True: each rank saves and resumes its own state. Otherwise all ranks resume rank 0's state; None also warns if
    the ranks' states differ."""
    refuses_rollback: ClassVar[str | None] = None
    """Why a fit with this callback cannot be rolled back to a checkpoint (`Trainer.roll_back`); None if it can."""
    uses_run_folder: bool = False
    """True if the callback writes to the run's folder (`Trainer.run_folder`), which a fit then creates."""
    changes_weights: ClassVar[bool] = False
    """Whether a callback of Leyden writes to the module's weights. User callbacks are assumed to."""

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint; unique within a run."""
        return type(self).__qualname__

    @property
    def _former_state_key(self) -> str:
        """The key of this callback's state in checkpoints of Leyden before its keys took Lightning's form."""
        return type(self).__qualname__

    def _generate_state_key(self, **arguments: Any) -> str:
        """Returns a `state_key` of the class and these arguments, in Lightning's form: `Name{'argument': value}`."""
        return f"{type(self).__qualname__}{arguments!r}"

    _logs_through: TrainModule | None = None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Logs a value as `TrainModule.log` does, with the same arguments, from any hook where the module can log."""
        if self._logs_through is not None:
            self._logs_through.log(name, value, *args, **kwargs)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Logs several values as `TrainModule.log_dict` does."""
        if self._logs_through is not None:
            self._logs_through.log_dict(dictionary, *args, **kwargs)

    def _log_through(self, module: TrainModule | None) -> None:
        """Sets the module through which `log` records during a run; None at its end."""
        # Plain assignment would fail in a frozen dataclass.
        vars(self)["_logs_through"] = module

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to restore on resume; empty if the callback has none."""
        return {}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raises if `state_dict` cannot have returned `state`; changes nothing.

        A resume checks the states of all callbacks before it loads any, so a damaged or forged checkpoint leaves the
        run unchanged. `load_state_dict` need not check again.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""

    def transform_train_batch(self, trainer: Trainer, module: TrainModule, batch: Any) -> Any:
        """Returns the batch to pass to the training step. Must not modify `batch` in place: the loader may reuse it.

        Called for each training batch of this rank, once it is on the device.
        """
        return batch

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Called when a fit rolls back to one of its own checkpoints (`Trainer.roll_back`). Loads `state` by default.

        Override it to keep state that a rollback cannot undo, such as elapsed time and files already written.

        Args:
            state: the state that `state_dict` returned for the checkpoint; may be empty.
            step: the checkpoint's `global_step`.
        """
        if state:
            self.load_state_dict(state)

    def repeat_epoch_start(self, trainer: Trainer, module: TrainModule, epoch: int) -> None:
        """Called after `go_back`, once for each epoch that has begun since the checkpoint.

        Override it to repeat what `on_train_epoch_start` changed in the optimizers: that hook is not called again.
        """

    def saved_weights(self) -> Mapping[str, Tensor]:
        """Returns tensors, by name, that a checkpoint holds in place of the module's own; empty for none."""
        return {}

    def weights_loaded(self) -> None:
        """Called on resume, once the module has the checkpoint's weights and all callbacks have their states."""

    # setup and teardown; stage is "fit", "validate", "test" or "predict"
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None: ...
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None: ...
    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None: ...

    # fit
    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None: ...
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None: ...
    def on_before_zero_grad(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None: ...
    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None: ...
    def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None: ...

    # evaluation and prediction
    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_validation_epoch_start(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_test_epoch_start(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_test_epoch_end(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_test_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None: ...
    def on_predict_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    # checkpoints: `checkpoint` is a dict for the user's own entries, saved alongside Leyden's
    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None: ...


def refusal(callbacks: Iterable[Callback]) -> str | None:
    """Returns the first callback that prevents a rollback, and its reason, as one text; None if none does."""
    found = next((callback for callback in callbacks if callback.refuses_rollback is not None), None)
    return None if found is None else f"{type(found).__name__} {found.refuses_rollback}"


def in_order(callbacks: list[Callback]) -> Iterator[Callback]:
    """Returns the callbacks in the order of their calls: by `order`, then as listed."""
    return iter(sorted(callbacks, key=lambda callback: callback.order))
