"""What writes nothing: in place of a writer on the other ranks, and of a logger in a trial run, so that a user's calls need no `if`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leyden.callbacks.logger import Logger


class Silent:
    """Whatever is called, read or assigned by index on it, at any depth, is accepted and does nothing.

    Example:
        >>> Silent().add_histogram("weights", [1.0, 2.0])
        >>> Silent().config.update({"lr": 0.1})
    """

    def __getattr__(self, name: str) -> Silent:
        # Python looks these up itself, to copy or pickle an object, and must not find them.
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getitem__(self, key: Any) -> Silent:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...


class SilentLogger(Logger):
    """Stands in for a logger where nothing is to be written (`fast_dev_run`); has the methods of every logger.

    Example:
        >>> logger = SilentLogger()
        >>> logger.experiment.add_scalar("loss", 0.5, 1)
        >>> logger.log_image("samples", [])
    """

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str | None:
        """The Trainer's `default_root_dir`, for what a user writes there by hand."""
        return self._default_root_dir

    @property
    def experiment(self) -> Silent:
        return Silent()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None: ...

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("_"):
            raise AttributeError(name)
        return Silent()
