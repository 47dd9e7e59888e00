"""Who takes part in a run: the Trainer's callbacks, the module's, and those that were added in between."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from leyden.callbacks.base import Callback, in_order
from leyden.callbacks.logger import Logger
from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.strategies.ported import ported


class CallbackList:
    """The callbacks of a Trainer from run to run. `trainer.callbacks` is a plain list that its user may change.

    What was added to that list before a run, or in a `setup` of it, takes part in it and in later ones; the callbacks of a module's
    `configure_callbacks` in that module's runs alone.

    Args:
        callbacks: what the Trainer was made with.

    Attributes:
        lasting: those that take part in every run.
        seen: those of the run that is under way, or was the last.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.lasting = list(callbacks)
        self.seen = list(callbacks)
        self._initial: dict[str, Any] = {}

    def of_run(self, now: Sequence[Callback], own: Any) -> list[Callback]:
        """The callbacks of a run that begins.

        Args:
            now: the list as its user has left it.
            own: what the module's `configure_callbacks` returned.
        """
        self.lasting = [c for c in self.lasting if _holds(now, c) or not _holds(self.seen, c)]
        self.take_added(now)
        place = {id(callback): number for number, callback in enumerate(now)}
        # Those that a module's own had replaced are not in the list.
        self.lasting.sort(key=lambda callback: place.get(id(callback), -1))
        self.seen = merge_callbacks(self.lasting, own)
        return list(self.seen)

    def take_added(self, now: Sequence[Callback]) -> list[Callback]:
        """Returns what was added to the list since it was looked at last; it takes part from here on.

        Raises:
            ConfigurationError: if something is no callback.
        """
        added = [callback for callback in now if not _holds(self.seen, callback)]
        check_callbacks(added, "trainer.callbacks")
        self.lasting += added
        self.seen += added
        return added

    def leave(self) -> None:
        """The run is over: a callback's `log` does nothing any more."""
        for callback in self.seen:
            callback._log_through(None)

    def note_states(self) -> None:
        """Remembers how callbacks stood before the Trainer's first fit, as far as they can say.

        One that makes its state in `on_train_start` may raise before: another fit leaves it as it is then.
        """
        for callback in () if self._initial else self.lasting:
            try:
                state = {} if isinstance(callback, Logger) else copy.deepcopy(callback.state_dict())
            except Exception:
                # It is asked again after on_train_start, where it may not raise.
                continue
            if state:
                self._initial[callback.state_key] = state

    def start_over(self) -> None:
        """A callback that served an earlier fit starts as it did then; a logger, whose state was not noted, keeps its run folder."""
        for callback in self.lasting:
            if callback.state_key in self._initial:
                callback.load_state_dict(copy.deepcopy(self._initial[callback.state_key]))


def check_callbacks(callbacks: Iterable[Any], where: str) -> None:
    """Refuses what is no callback.

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
                f"{where} holds {kind_of(callback)}, which is no Callback: {ported(callback, 'subclass leyden.Callback')}."
            )


def merge_callbacks(callbacks: Sequence[Callback], own: Any) -> list[Callback]:
    """Those of the Trainer and of the module, in order; the module's replace the Trainer's of the same class."""
    extra: list[Any] = [] if own is None else list(own) if isinstance(own, (list, tuple)) else [own]
    for callback in extra:
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"configure_callbacks returned {kind_of(callback)}: {ported(callback, 'return callbacks')}."
            )
    replaced = {type(callback) for callback in extra}
    return list(in_order([callback for callback in callbacks if type(callback) not in replaced] + extra))


def _holds(callbacks: Iterable[Callback], callback: object) -> bool:
    return any(other is callback for other in callbacks)
