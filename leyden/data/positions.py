"""Validates the saved position of a loader before it is restored."""

from __future__ import annotations

from typing import Any

from leyden.core.errors import StateError
from leyden.core.saved_state import SavedState, brief
from leyden.data.rng import check_rng_state

# Names of entries that Leyden saves. The user's loaders, samplers and datasets check their own entries.
_COUNTS = ("at", "of")
_NEEDED_COUNTS = ("batches", "drawn")
"""Entries that are never null if they are present."""
_FLAGS = ("again", "had_workers", "ended")
_RANDOM = ("rng", "ahead", "stream")
_WITHIN = ("source", "before", "first", "inner", "rest", "begun")
_MOST = 2**53


def check_position(saved: SavedState) -> None:
    """Checks that a source could have saved this position. Changes nothing.

    Raises:
        StateError: if not; names the entry.
    """
    if "batches" in saved and "epoch" in saved:
        if not saved.is_none("epoch"):
            saved.integer("epoch", least=0, most=_MOST)
        saved.value("ahead")
        saved.nested("source")
    for key in (*_COUNTS, *_NEEDED_COUNTS):
        _each(saved, key, _count)
    for key in _NEEDED_COUNTS:
        if key in saved and saved.entries[key] is None:
            _count(saved.path(key), None)
    for key in _FLAGS:
        _each(saved, key, _flag)
    for key in _RANDOM:
        if not saved.is_none(key):
            check_rng_state(saved.entries[key], saved.path(key))
    if "generators" in saved:
        saved.nested("generators")
    for key in _WITHIN:
        if isinstance(saved.entries.get(key), list):
            continue
        if not saved.is_none(key):
            check_position(saved.nested(key))
    if "parts" in saved:
        for number, part in enumerate(saved.items("parts")):
            check_position(SavedState(part, saved.path(f"parts[{number}]")))


def check_loaders(saved: SavedState) -> None:
    """Checks that a fit could have saved these states of its loaders. Changes nothing.

    Args:
        saved: the training loader's `place` inside an epoch, or its `rest` between epochs, and the `rest` of each
            `validation` loader.

    Raises:
        StateError: if not; names the entry.
    """
    if not saved.is_none("place"):
        place = saved.nested("place")
        check_position(place)
        place.integer("batches", least=0)
    if not saved.is_none("rest"):
        check_position(saved.nested("rest"))
    elif saved.is_none("place"):
        raise StateError(saved.path("rest"), "is missing")
    for number, state in enumerate(saved.items("validation")):
        check_position(SavedState(state, saved.path(f"validation[{number}]")))


def _each(saved: SavedState, key: str, check: Any) -> None:
    """Checks an entry, or each of its items if it holds the entries of several loaders."""
    value = saved.entries.get(key)
    for item in value if isinstance(value, list) else [value]:
        if item is not None:
            check(saved.path(key), item)


def _count(path: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise StateError(path, f"is {brief(value)}, and must be a whole number from 0")


def _flag(path: str, value: object) -> None:
    if type(value) is not bool:
        raise StateError(path, f"is {brief(value)}, and must be true or false")
