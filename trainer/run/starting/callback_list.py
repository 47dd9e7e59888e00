"""Keeps the list of callbacks: the Trainer's, those of the module that runs, and those that users add."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from leyden.callbacks.base import Callback, in_order
from leyden.callbacks.loggers.logger import Logger
from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.strategies.ported import ported
from leyden.trainer.arguments.given import as_list

if TYPE_CHECKING:
    from leyden.trainer.arguments.replay import Replay
    from leyden.trainer.module import TrainModule


class CallbackList:
    """The callbacks of a Trainer from run to run. `trainer.callbacks` is a plain list that its user may change.

    A callback that was added to that list before a run, or in a `setup` of it, takes part in it and in later ones. The
    callbacks of a module's `configure_callbacks` take part in that module's runs alone.

    Args:
        callbacks: those that the Trainer was made with.

    Attributes:
        now: the list that its user sees.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.now = list(callbacks)
        self._lasting = list(callbacks)
        """Those that take part in every run."""
        self._seen = list(callbacks)
        """Those of the run that is under way, or was the last."""
        self._initial: dict[str, Any] = {}
        self._own: type[Callback] = Callback

    def take_only(self, kind: type[Callback]) -> None:
        """Limits what a module's `configure_callbacks` may add to callbacks of one kind."""
        self._own = kind

    def begin(self, own: Any, replay: Replay | None = None) -> None:
        """Begins a run, with the callbacks that its module configures.

        Args:
            own: what the module's `configure_callbacks` returned.
            replay: a step is run again, so that those who write checkpoints take no part.
        """
        self._lasting = [c for c in self._lasting if holds(self.now, c) or not holds(self._seen, c)]
        self.take_added()
        place = {id(callback): number for number, callback in enumerate(self.now)}
        # Those that a module's own had replaced are not in the list.
        self._lasting.sort(key=lambda callback: place.get(id(callback), -1))
        seen = merge_callbacks(self._lasting, own, self._own)
        self._seen = seen if replay is None else list(in_order(replay.callbacks(seen)))
        self.now = list(self._seen)

    def take_added(self) -> list[Callback]:
        """Returns the callbacks that were added to the list since the last look; they take part from here on.

        Raises:
            ConfigurationError: if one of them is no callback.
        """
        added = [callback for callback in self.now if not holds(self._seen, callback)]
        check_callbacks(added, "trainer.callbacks")
        self._lasting += added
        self._seen += added
        return added

    def replace(self, callbacks: list[Callback]) -> None:
        """Replaces the list that the user sees."""
        self.now = callbacks

    def join(self, module: TrainModule) -> None:
        """Lets callbacks log through the module of their run."""
        for callback in self.now:
            callback._log_through(module)

    def leave(self) -> None:
        """Ends the run: a callback's `log` does nothing from here on."""
        for callback in self._seen:
            callback._log_through(None)

    def note_states(self) -> None:
        """Remembers the states of callbacks before the Trainer's first fit.

        One that makes its state in `on_train_start` may raise here: another fit then leaves it as it is.
        """
        for callback in () if self._initial else self._lasting:
            try:
                state = {} if isinstance(callback, Logger) else copy.deepcopy(callback.state_dict())
            except Exception:
                # It is asked again after on_train_start, where it may not raise.
                continue
            if state:
                self._initial[callback.state_key] = state

    def start_over(self) -> None:
        """Callbacks that served an earlier fit start as they did then; loggers keep their folder."""
        for callback in self._lasting:
            if callback.state_key in self._initial:
                callback.load_state_dict(copy.deepcopy(self._initial[callback.state_key]))


def check_callbacks(callbacks: Iterable[Any], where: str) -> None:
    """Refuses anything but callbacks.

    Raises:
        ConfigurationError: names the first one.
    """
    for callback in callbacks:
        if isinstance(callback, type):
            raise ConfigurationError(
                f"{where} holds the class {callback.__name__}: give an instance, {callback.__name__}()."
            )
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"{where} holds {kind_of(callback)}, which is no Callback: "
                f"{ported(callback, 'subclass leyden.Callback')}."
            )


def merge_callbacks(callbacks: Sequence[Callback], own: Any, kind: type[Callback]) -> list[Callback]:
    """Those of the Trainer and of the module, in order; the module's replace the Trainer's of the same class.

    Args:
        callbacks: the Trainer's.
        own: what the module's `configure_callbacks` returned.
        kind: the module's are left out unless they are of this class.
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
    """True if this very callback is among some."""
    return any(other is callback for other in callbacks)
