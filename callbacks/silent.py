"""What a rank that writes nothing is given in place of a writer, so that a user's calls need no `if`."""

from __future__ import annotations

from typing import Any


class Silent:
    """Every call of a method is accepted and does nothing.

    Example:
        >>> Silent().add_histogram("weights", [1.0, 2.0])
    """

    def __getattr__(self, name: str) -> Any:
        # Python looks these up itself, to copy or pickle an object, and must not find them.
        if name.startswith("__"):
            raise AttributeError(name)
        return self._nothing

    @staticmethod
    def _nothing(*args: Any, **kwargs: Any) -> None:
        return None
