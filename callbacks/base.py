"""The base class of callbacks, which do whatever a run does besides its training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

CLOSING_ORDER = 100
"""Callbacks of this order or above run last: after the module's own hook, on reduced metrics."""


class Callback:
    """Base class of callbacks. Override the hooks that you need; the others are never called.

    Callbacks are called in ascending `order`, and in the order given among equals. Then the module's hook of the same
    name is called, and last the closing callbacks (`order >= 100`: early stopping, checkpoints), which see the event's
    metrics reduced and logged.

    Example:
        >>> class Announce(Callback):
        ...     def on_train_epoch_end(self, trainer, module):
        ...         trainer.print(f"epoch {trainer.current_epoch} is over")
    """

    order: ClassVar[int] = 0
    closing_hooks: ClassVar[frozenset[str]] = frozenset()
    """Hooks in which a callback of a lower order is a closing one, too: for `on_train_batch_end`, which only closing
    callbacks have on a rank without a sample of the batch."""
    state_per_rank: ClassVar[bool | None] = None
    """True: each rank saves and resumes its own state. Otherwise all resume rank 0's; None warns if they differ."""
    refuses_rollback: ClassVar[str | None] = None
    """Why a fit with this callback cannot go back to a checkpoint (`Trainer.roll_back`); None if it can."""
    changes_weights: ClassVar[bool] = False
    """True for a callback of Leyden's own that writes to the module's weights; of any other it is assumed."""

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint, unique among the callbacks of a run."""
        return type(self).__qualname__

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
        # A frozen dataclass refuses assignment.
        vars(self)["_logs_through"] = module

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that the callback needs to continue after a resume; empty if it needs none."""
        return {}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raises if `state_dict` cannot have returned `state`; changes nothing.

        A resume calls this on every callback before it changes anything, so that a damaged or forged checkpoint leaves
        the run as it was. `load_state_dict` need not check again.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""

    def transform_train_batch(self, trainer: Trainer, module: TrainModule, batch: Any) -> Any:
        """Returns the training batch that the step is given: another one, as the loader may keep this one.

        Called for each training batch of this rank, once it is on the device.
        """
        return batch

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Called where a fit goes back to a checkpoint of its own (`Trainer.roll_back`); loads the state by default.

        Override it for what is not undone, such as time that has passed and files that were written.

        Args:
            state: what `state_dict` returned for the checkpoint; empty if it returned nothing.
            step: the checkpoint's `global_step`.
        """
        if state:
            self.load_state_dict(state)

    def repeat_epoch_start(self, trainer: Trainer, module: TrainModule, epoch: int) -> None:
        """Called after that, for each epoch that has begun since the checkpoint: changes the optimizers once more.

        Callbacks that change optimizers in `on_train_epoch_start` override it, as that hook is not called again.
        """

    def saved_weights(self) -> Mapping[str, Tensor]:
        """Returns what a checkpoint holds in place of the module's own tensors, by their names; empty for nothing."""
        return {}

    def weights_loaded(self) -> None:
        """Called in a resume, once the module has the checkpoint's weights and all callbacks have their states."""

    # set-up and tear-down; stage is "fit", "validate", "test" or "predict"
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

    # checkpoints: `checkpoint` is a dict of the user's own entries, saved beside Leyden's
    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None: ...


def refusal(callbacks: Iterable[Callback]) -> str | None:
    """Returns which callback keeps a fit from going back to a checkpoint, and why; None if none does."""
    found = next((callback for callback in callbacks if callback.refuses_rollback is not None), None)
    return None if found is None else f"{type(found).__name__} {found.refuses_rollback}"


def in_order(callbacks: list[Callback]) -> Iterator[Callback]:
    """Returns the callbacks in the order in which they are called: by `order`, then as they were given."""
    return iter(sorted(callbacks, key=lambda callback: callback.order))
