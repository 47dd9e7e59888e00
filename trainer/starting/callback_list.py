"""The list of callbacks: the Trainer's own, those of the current module, and those that users add."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from leyden.callbacks.base import Callback, in_order
from leyden.callbacks.loggers.logger import Logger
from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.given import as_list
from leyden.core.ported import ported
from leyden.trainer.saved.checkpoint_folders import checkpoint_callbacks

if TYPE_CHECKING:
    from leyden.checkpoint.format.bucket import BucketPath
    from leyden.trainer.arguments.replay import Replay
    from leyden.trainer.module import TrainModule


class CallbackList:
    """The callbacks of a Trainer, from run to run. `trainer.callbacks` is a plain list that users may change.

    A callback added to that list before a run, or in a `setup` hook, takes part in that run and all later ones. The
    callbacks returned by a module's `configure_callbacks` take part only in runs of that module.

    Args:
        callbacks: the callbacks passed to the Trainer.
        bucket: the folder in a bucket for checkpoints of callbacks that name none; None for the run's folder.
        local_root: the folder for local files of all runs.

    Attributes:
        now: the list that users see and may change.
    """

    def __init__(self, callbacks: Iterable[Callback], bucket: BucketPath | None = None, local_root: str = ".") -> None:
        self._bucket, self._local_root = bucket, local_root
        self.now = list(callbacks)
        self._lasting = list(callbacks)
        """The callbacks that take part in every run."""
        self._seen = list(callbacks)
        """The callbacks of the current run, or of the last one."""
        self._initial: dict[str, Any] = {}
        """The states of callbacks before the Trainer's first fit, by state key."""
        self._module_kind: type[Callback] = Callback
        """The class that a module's callbacks must have; others are ignored."""

    def take_only(self, kind: type[Callback]) -> None:
        """Ignores the callbacks of a module's `configure_callbacks`, except those of one class."""
        self._module_kind = kind

    def begin(self, own: Any, replay: Replay | None = None) -> None:
        """Begins a run, with the callbacks that its module configures.

        Args:
            own: the return value of the module's `configure_callbacks`.
            replay: the replay that this run performs, which leaves out callbacks that write checkpoints; None for a
                normal run.
        """
        self._lasting = [c for c in self._lasting if holds(self.now, c) or not holds(self._seen, c)]
        self.take_added()
        position = {id(callback): number for number, callback in enumerate(self.now)}
        # Callbacks that a module's callbacks replaced in the last run are not in the list.
        self._lasting.sort(key=lambda callback: position.get(id(callback), -1))
        seen = merge_callbacks(self._lasting, own, self._module_kind)
        self._seen = seen if replay is None else list(in_order(replay.callbacks(seen)))
        self.now = list(self._seen)
        self._place_checkpoints(self.now)

    def _place_checkpoints(self, callbacks: Iterable[Callback]) -> None:
        for callback in checkpoint_callbacks(callbacks):
            callback.save_below(self._bucket, self._local_root)

    def take_added(self) -> list[Callback]:
        """Returns the callbacks added to the list since the previous call, and includes them in all runs from now on.

        Raises:
            ConfigurationError: if one of them is not a callback.
        """
        added = [callback for callback in self.now if not holds(self._seen, callback)]
        check_callbacks(added, "trainer.callbacks")
        self._place_checkpoints(added)
        self._lasting += added
        self._seen += added
        return added

    def replace(self, callbacks: list[Callback]) -> None:
        """Replaces the list that users see."""
        self.now = callbacks

    def join(self, module: TrainModule) -> None:
        """Lets callbacks log through the module of the run."""
        for callback in self.now:
            callback._log_through(module)

    def leave(self) -> None:
        """Ends the run. From here on, a callback's `log` is a no-op."""
        for callback in self._seen:
            callback._log_through(None)

    def note_states(self) -> None:
        """Records the states of the callbacks before the Trainer's first fit.

        `state_dict` may raise if a callback creates its state in `on_train_start`. Later fits then leave its state
        unchanged.
        """
        if self._initial:
            return
        for callback in self._lasting:
            try:
                state = {} if isinstance(callback, Logger) else copy.deepcopy(callback.state_dict())
            except Exception:
                # The state is read again after on_train_start, where an error counts.
                continue
            if state:
                self._initial[callback.state_key] = state

    def start_over(self) -> None:
        """Resets callbacks to their states before the Trainer's first fit. Loggers keep their folder."""
        for callback in self._lasting:
            if callback.state_key in self._initial:
                callback.load_state_dict(copy.deepcopy(self._initial[callback.state_key]))


def check_callbacks(callbacks: Iterable[Any], where: str) -> None:
    """Checks that every item is a callback.

    Raises:
        ConfigurationError: names the first item that is not.
    """
    for callback in callbacks:
        if isinstance(callback, type):
            raise ConfigurationError(
                f"{where} holds the class {callback.__name__}: pass an instance, {callback.__name__}()."
            )
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"{where} holds {kind_of(callback)}, which is not a Callback: "
                f"{ported(callback, 'subclass leyden.Callback')}."
            )


def merge_callbacks(callbacks: Sequence[Callback], own: Any, kind: type[Callback]) -> list[Callback]:
    """Merges the Trainer's callbacks and the module's, in order. The module's replace the Trainer's of the same class.

    Args:
        callbacks: the Trainer's callbacks.
        own: the return value of the module's `configure_callbacks`.
        kind: the class of callbacks to accept from the module; others are ignored.
    """
    extra = as_list(own)
    for callback in extra:
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"configure_callbacks returned {kind_of(callback)}: {ported(callback, 'return callbacks')}."
            )
    extra = [callback for callback in extra if isinstance(callback, kind)]
    replaced = {type(callback) for callback in extra}
    return list(in_order([callback for callback in callbacks if type(callback) not in replaced] + extra))


def holds(callbacks: Iterable[Callback], callback: object) -> bool:
    """Returns True if `callbacks` contains this object, by identity."""
    return any(other is callback for other in callbacks)
