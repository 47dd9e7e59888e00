"""No-op stand-ins for writers on non-writing ranks and for loggers in trial runs, so user code needs no `if`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from leyden.callbacks.loggers.logger import Logger


class Silent:
    """A no-op object that accepts every call, attribute and index, at any depth.

    Example:
        >>> Silent().add_histogram("weights", [1.0, 2.0])
        >>> Silent().config.update({"lr": 0.1})
    """

    def __getattr__(self, name: str) -> Silent:
        # Python looks up dunder names to copy or pickle an object, and must not find them.
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getitem__(self, key: Any) -> Silent:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        # Without this method, Python would iterate by index and never stop.
        return iter(())


class DummyLogger(Logger):
    """A no-op logger with the methods of every logger. `fast_dev_run` uses it.

    It also acts as a list of loggers: iteration yields nothing, and every index returns the logger itself.

    Example:
        >>> logger = DummyLogger()
        >>> logger.experiment.add_scalar("loss", 0.5, 1)
        >>> logger.log_image("samples", [])
        >>> logger[1].log_metrics({"loss": 0.5}), list(logger)
        (None, [])
    """

    uses_run_folder = False

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str | None:
        """The Trainer's `default_root_dir`, for user code that writes its own files."""
        return self._default_root_dir

    @property
    def experiment(self) -> Silent:
        return Silent()

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("_"):
            raise AttributeError(name)
        return Silent()

    def __getitem__(self, index: int) -> DummyLogger:
        return self

    def __iter__(self) -> Iterator[Logger]:
        return iter(())
