"""Stand-ins that write nothing, for writers on the other ranks and loggers in a trial run, so that user code needs no
`if`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from leyden.callbacks.loggers.logger import Logger


class Silent:
    """Accepts every call, attribute and index, at any depth, and does nothing.

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

    def __iter__(self) -> Iterator[Any]:
        # Without it, Python would iterate by index, and never end.
        return iter(())


class DummyLogger(Logger):
    """A logger that writes nothing, with the methods of every logger: the one under `fast_dev_run`.

    It is also an empty list of loggers, each index of which is the logger itself.

    Example:
        >>> logger = DummyLogger()
        >>> logger.experiment.add_scalar("loss", 0.5, 1)
        >>> logger.log_image("samples", [])
        >>> logger[1].log_metrics({"loss": 0.5}), list(logger)
        (None, [])
    """

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str | None:
        """The Trainer's `default_root_dir`, where user code may write."""
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
