"""Callback: what happens beside the training step, in one class per concern."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

CLOSING_ORDER = 100
"""Callbacks of this order or above run last: after the module's own hook, on reduced metrics."""


class Callback:
    """Base class of callbacks. Override the hooks that you need; those that you do not override are never called.

    Callbacks are called in ascending `order` (equal ones as they were given), then the module's hook of the same
    name, then the closing callbacks (`order >= 100`: early stopping, checkpoints), which see the metrics of the event
    reduced and logged.

    Example:
        >>> class Announce(Callback):
        ...     def on_train_epoch_end(self, trainer, module):
        ...         trainer.print(f"epoch {trainer.current_epoch} is over")
    """

    order: ClassVar[int] = 0
    state_per_rank: ClassVar[bool | None] = None
    """True: each rank saves and resumes its own state. Otherwise all resume rank 0's; None warns where they differ."""

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint: unlike that of every other callback of the run."""
        return type(self).__qualname__

    _logs_through: TrainModule | None = None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Records a value as `TrainModule.log` does, from any hook in which the module could; takes the same arguments."""
        if self._logs_through is not None:
            self._logs_through.log(name, value, *args, **kwargs)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Records several values as `TrainModule.log_dict` does."""
        if self._logs_through is not None:
            self._logs_through.log_dict(dictionary, *args, **kwargs)

    def _log_through(self, module: TrainModule | None) -> None:
        """A run begins, in which `log` records through this module; None at its end."""
        # Not by assignment, which a frozen dataclass refuses.
        vars(self)["_logs_through"] = module

    def state_dict(self) -> dict[str, Any]:
        """What the callback needs to continue after a resume; empty if nothing."""
        return {}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raises an error if `state` is nothing that `state_dict` can have returned; changes nothing.

        A resume asks every callback before it changes anything, so that a checkpoint that is damaged or forged leaves the
        run as it was. Its own `load_state_dict` need not check again.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` returned."""

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


def in_order(callbacks: list[Callback]) -> Iterator[Callback]:
    """The callbacks in the order in which they are called: by `order`, then as they were given."""
    return iter(sorted(callbacks, key=lambda callback: callback.order))
