"""AsyncCheckpointIO, a plugin of the Trainer's by which checkpoints are written beside the training."""

from __future__ import annotations

from typing import Any

from leyden.strategies.errors import ConfigurationError, kind_of


class AsyncCheckpointIO:
    """Makes `asynchronous=True` the default of every save of a Trainer, under the name of Lightning's plugin.

    Lightning's own object, or the name as a string, is taken too.

    Args:
        checkpoint_io: None. Lightning's plugin wraps another one here, which would write files of its own kind.

    Raises:
        ConfigurationError: for another plugin to wrap.

    Example:
        >>> is_async_plugin(AsyncCheckpointIO()), is_async_plugin("AsyncCheckpointIO")
        (True, True)
    """

    def __init__(self, checkpoint_io: None = None) -> None:
        if checkpoint_io is not None:
            raise ConfigurationError(
                f"AsyncCheckpointIO(checkpoint_io={kind_of(checkpoint_io)}): checkpoints have one form here, so there "
                "is no other plugin to wrap. Leave it out."
            )


def is_async_plugin(plugin: Any) -> bool:
    """Returns True for the plugin, for Lightning's of that name, or for the name."""
    names = [plugin] if isinstance(plugin, str) else [kind.__name__ for kind in type(plugin).__mro__]
    return AsyncCheckpointIO.__name__ in names
