"""The Trainer's plugins: how checkpoints are stored, and whether in the background."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from leyden.checkpoint.checkpoint_io import CheckpointIO, is_checkpoint_io
from leyden.core.errors import ConfigurationError, kind_of
from leyden.launch.cluster import ClusterEnvironment
from leyden.strategies.precision import Precision

Plugin: TypeAlias = Precision | CheckpointIO | ClusterEnvironment | str
"""The types that a Trainer accepts in `plugins`."""


class AsyncCheckpointIO(CheckpointIO):
    """Writes checkpoints in the background, under the name of Lightning's plugin.

    Without an argument it makes `asynchronous=True` the default of all saves of a Trainer; Lightning's own object, or
    the class name as a string, is accepted too. With another CheckpointIO it calls that plugin in a thread, one save at
    a time, in order. Errors are raised at the next save or at the end of the run. After an error no checkpoint is
    removed.

    Args:
        checkpoint_io: the plugin that stores checkpoints; None for checkpoint folders.

    Raises:
        ConfigurationError: if the plugin is not a CheckpointIO.

    Example:
        >>> is_async_plugin(AsyncCheckpointIO()), is_async_plugin("AsyncCheckpointIO")
        (True, True)
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        if checkpoint_io is not None and not is_checkpoint_io(checkpoint_io):
            raise ConfigurationError(
                f"AsyncCheckpointIO(checkpoint_io={kind_of(checkpoint_io)}): pass a CheckpointIO, or omit it."
            )
        self.checkpoint_io = checkpoint_io
        self._queue: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Waits for an earlier save, then starts this one in the background."""
        self.wait()
        self._submit(partial(self._inner.save_checkpoint, checkpoint, path, storage_options=storage_options))

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = None) -> dict[str, Any]:
        self.wait()
        return self._inner.load_checkpoint(path, map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        if self._error is None:
            self._submit(partial(self._inner.remove_checkpoint, path))

    def teardown(self) -> None:
        """Waits for the thread and ends the inner plugin; raises an error of the thread."""
        try:
            self.wait()
        finally:
            end_plugins((self._inner,), failed=False)

    @property
    def _inner(self) -> CheckpointIO:
        assert self.checkpoint_io is not None
        return self.checkpoint_io

    def _submit(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=False)
            self._thread.start()

    def _run(self) -> None:
        while self._queue:
            try:
                self._queue.popleft()()
            except BaseException as error:
                self._error = error
                self._queue.clear()

    def wait(self) -> None:
        """Waits until everything is stored; raises an error of the thread."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        # Work may have been added just as the thread ended.
        self._run()
        error, self._error = self._error, None
        if error is not None:
            raise error


def is_async_plugin(plugin: Any) -> bool:
    """Returns True for an AsyncCheckpointIO without an inner plugin: Leyden's, Lightning's, or the name."""
    names = [plugin] if isinstance(plugin, str) else [kind.__name__ for kind in type(plugin).__mro__]
    return AsyncCheckpointIO.__name__ in names and getattr(plugin, "checkpoint_io", None) is None


def checkpoint_io_of(plugins: Sequence[Any]) -> CheckpointIO | None:
    """Returns the plugin that stores checkpoints; None for checkpoint folders.

    Raises:
        ConfigurationError: if there are several, or a separate AsyncCheckpointIO.
    """
    stores = [plugin for plugin in plugins if is_checkpoint_io(plugin) and not is_async_plugin(plugin)]
    if len(stores) > 1:
        kinds = " and ".join(type(plugin).__name__ for plugin in stores)
        raise ConfigurationError(f"plugins has several that store checkpoints, {kinds}: pass only one.")
    if stores and any(is_async_plugin(plugin) for plugin in plugins):
        name = type(stores[0]).__name__
        raise ConfigurationError(
            f"plugins has both {name} and AsyncCheckpointIO: pass AsyncCheckpointIO({name}(…)), which calls it in a "
            "thread."
        )
    return stores[0] if stores else None


def wait_for(plugin: CheckpointIO | None) -> None:
    """Waits until a plugin that works in the background has stored everything."""
    if isinstance(plugin, AsyncCheckpointIO):
        plugin.wait()


def end_plugins(plugins: Sequence[Any], failed: bool) -> None:
    """Calls `teardown` of plugins that have one. If the run failed, their errors are ignored."""
    for plugin in plugins:
        teardown = getattr(plugin, "teardown", None)
        try:
            if callable(teardown):
                teardown()
        except Exception:
            if not failed:
                raise
