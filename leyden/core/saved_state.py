"""Reading saved state: the owner checks every entry's presence, type and range before it uses any of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from leyden.core.errors import StateError

_REQUIRED: Any = object()


class SavedState:
    """A dict of saved state whose entries are checked on access.

    Args:
        entries: the saved dict.
        where: path that error messages prepend to the names of entries.

    Raises:
        StateError: from every method, if an entry is missing, of the wrong type, or out of range. The message names
            the entry.

    Example:
        >>> state = SavedState({"epoch": 3, "batch": -3})
        >>> state.integer("epoch", least=0)
        3
        >>> state.integer("batch", least=0)
        Traceback (most recent call last):
        ...
        leyden.core.errors.StateError: batch is -3, and must be at least 0
    """

    def __init__(self, entries: Any, where: str = "") -> None:
        if not isinstance(entries, Mapping):
            raise StateError(where or "the state", f"is {brief(entries)}, and must be a dict")
        self.entries: Mapping[str, Any] = entries
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def path(self, key: object) -> str:
        """Returns the name of an entry in error messages."""
        return f"{self.where}.{key}" if self.where else str(key)

    def value(self, key: str, default: Any = _REQUIRED) -> Any:
        """Returns an entry of any type."""
        if key in self.entries:
            return self.entries[key]
        if default is _REQUIRED:
            raise StateError(self.path(key), "is missing")
        return default

    def integer(self, key: str, default: Any = _REQUIRED, *, least: int | None = None, most: int | None = None) -> int:
        """Returns an integer, which must be within the bounds."""
        value = self.value(key, default)
        if type(value) is not int:
            raise StateError(self.path(key), f"is {brief(value)}, and must be a whole number")
        return int(self._within(key, value, least, most))

    def number(
        self, key: str, default: Any = _REQUIRED, *, least: float | None = None, most: float | None = None
    ) -> float:
        """Returns a number, which must be within the bounds. nan is allowed only without bounds."""
        value = self.value(key, default)
        if type(value) not in (int, float):
            raise StateError(self.path(key), f"is {brief(value)}, and must be a number")
        return float(self._within(key, value, least, most))

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """Returns a bool."""
        value = self.value(key, default)
        if type(value) is not bool:
            raise StateError(self.path(key), f"is {brief(value)}, and must be true or false")
        return value

    def text(self, key: str, default: Any = _REQUIRED, *, among: Collection[str] = ()) -> str:
        """Returns a string, which must be in `among` unless that is empty."""
        value = self.value(key, default)
        if not isinstance(value, str) or (among and value not in among):
            wanted = f"one of {', '.join(among)}" if among else "a string"
            raise StateError(self.path(key), f"is {brief(value)}, and must be {wanted}")
        return value

    def items(self, key: str, default: Any = _REQUIRED) -> list[Any]:
        """Returns a list."""
        value = self.value(key, default)
        if not isinstance(value, (list, tuple)):
            raise StateError(self.path(key), f"is {brief(value)}, and must be a list")
        return list(value)

    def nested(self, key: str, default: Any = _REQUIRED) -> SavedState:
        """Returns a nested dict as a SavedState."""
        return SavedState(self.value(key, default), self.path(key))

    def is_none(self, key: str) -> bool:
        """Returns True if an entry is None or missing."""
        return self.entries.get(key) is None

    def _within(self, key: str, value: float, least: float | None, most: float | None) -> float:
        bounded = least is not None or most is not None
        if bounded and isinstance(value, float) and math.isnan(value):
            raise StateError(self.path(key), "is nan")
        if least is not None and value < least:
            raise StateError(self.path(key), f"is {brief(value)}, and must be at least {least}")
        if most is not None and value > most:
            raise StateError(self.path(key), f"is {brief(value)}, and must be at most {most}")
        return value


def brief(value: object) -> str:
    """Formats a value for an error message: scalars and strings, truncated if long; other objects by their type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        # Formatting a huge integer takes quadratic time.
        shown = "a huge number" if isinstance(value, int) and value.bit_length() > 200 else repr(value)
        return shown if len(shown) <= 60 else f"{shown[:57]}…"
    return f"a {type(value).__name__}"
