"""Plugins of the Trainer's: how checkpoints are stored, and whether that is done beside the training."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.strategies.launch.cluster import ClusterEnvironment
from leyden.strategies.precision import Precision
from leyden.trainer.checkpoint.checkpoint_io import CheckpointIO, is_checkpoint_io

Plugin: TypeAlias = Precision | CheckpointIO | ClusterEnvironment | str
"""What a Trainer takes as one of its `plugins`."""


class AsyncCheckpointIO(CheckpointIO):
    """Writes checkpoints beside the training, under the name of Lightning's plugin.

    Alone it makes `asynchronous=True` the default of every save of a Trainer; Lightning's own object, or the name as a
    string, is taken too. Around another CheckpointIO it calls that one in a thread: one save at a time, in their order.
    An error is raised at the next save, or at the end of the run, and nothing is removed after one.

    Args:
        checkpoint_io: the plugin that stores; None for checkpoint folders.

    Raises:
        ConfigurationError: for a plugin that stores no checkpoints.

    Example:
        >>> is_async_plugin(AsyncCheckpointIO()), is_async_plugin("AsyncCheckpointIO")
        (True, True)
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        if checkpoint_io is not None and not is_checkpoint_io(checkpoint_io):
            raise ConfigurationError(
                f"AsyncCheckpointIO(checkpoint_io={kind_of(checkpoint_io)}): give a CheckpointIO, or leave it out."
            )
        self.checkpoint_io = checkpoint_io
        self._waiting: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Returns once the thread has begun: an earlier save is waited for."""
        self.wait()
        self._do(partial(self._inner.save_checkpoint, checkpoint, path, storage_options=storage_options))

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = None) -> dict[str, Any]:
        self.wait()
        return self._inner.load_checkpoint(path, map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        if self._error is None:
            self._do(partial(self._inner.remove_checkpoint, path))

    def teardown(self) -> None:
        """Waits for the thread; raises its error."""
        try:
            self.wait()
        finally:
            end_plugins((self._inner,), failed=False)

    @property
    def _inner(self) -> CheckpointIO:
        assert self.checkpoint_io is not None
        return self.checkpoint_io

    def _do(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=False)
            self._thread.start()

    def _run(self) -> None:
        while self._waiting:
            try:
                self._waiting.popleft()()
            except BaseException as error:
                self._error = error
                self._waiting.clear()

    def wait(self) -> None:
        """Waits until everything is stored; raises the error of the thread."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        # Added as the thread ended.
        self._run()
        error, self._error = self._error, None
        if error is not None:
            raise error


def is_async_plugin(plugin: Any) -> bool:
    """Returns True for the plugin around no other, for Lightning's of that name, or for the name."""
    names = [plugin] if isinstance(plugin, str) else [kind.__name__ for kind in type(plugin).__mro__]
    return AsyncCheckpointIO.__name__ in names and getattr(plugin, "checkpoint_io", None) is None


def checkpoint_io_of(plugins: Sequence[Any]) -> CheckpointIO | None:
    """The plugin that stores checkpoints; None for checkpoint folders.

    Raises:
        ConfigurationError: if there are two, or AsyncCheckpointIO stands beside it.
    """
    found = [plugin for plugin in plugins if is_checkpoint_io(plugin) and not is_async_plugin(plugin)]
    if len(found) > 1:
        kinds = " and ".join(type(plugin).__name__ for plugin in found)
        raise ConfigurationError(f"plugins has two that store checkpoints, {kinds}: give one.")
    if found and any(is_async_plugin(plugin) for plugin in plugins):
        name = type(found[0]).__name__
        raise ConfigurationError(
            f"plugins has {name} and AsyncCheckpointIO beside it: give AsyncCheckpointIO({name}(…)), which calls it "
            "in a thread."
        )
    return found[0] if found else None


def wait_for(plugin: CheckpointIO | None) -> None:
    """Waits until a plugin has stored what it was given, if it does so beside the training."""
    if isinstance(plugin, AsyncCheckpointIO):
        plugin.wait()


def end_plugins(plugins: Sequence[Any], failed: bool) -> None:
    """Calls `teardown` of plugins that have one; after an error of the run, theirs is passed over."""
    for plugin in plugins:
        teardown = getattr(plugin, "teardown", None)
        try:
            if callable(teardown):
                teardown()
        except Exception:
            if not failed:
                raise
