"""Argument checks shared by many callbacks, with consistent error messages."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from leyden.core.errors import ConfigurationError, nearest


def check_whole(call: str, least: int, /, **values: Any) -> None:
    """Raises ConfigurationError for an argument that is not a whole number, or too small.

    Args:
        call: the name of the class or function.
        least: the smallest allowed number.
        **values: the arguments.

    Example:
        >>> check_whole("Timetable", 1, every_n_steps=100, every_n_epochs=0)
        Traceback (most recent call last):
        ...
        leyden.core.errors.ConfigurationError: Timetable(every_n_epochs=0): give a whole number from 1.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{call}({name}={value!r}): give a whole number from {least}.")


def check_flags(call: str, /, **values: Any) -> None:
    """Raises ConfigurationError for an argument that is neither True nor False.

    Example:
        >>> check_flags("Timetable", loud="yes")
        Traceback (most recent call last):
        ...
        leyden.core.errors.ConfigurationError: Timetable(loud='yes'): use True or False.
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{call}({name}={value!r}): use True or False.")


def check_choice(call: str, choices: Collection[str], /, **values: Any) -> None:
    """Raises ConfigurationError for an argument that is not among the choices; the error suggests the nearest one.

    Example:
        >>> check_choice("Timetable", ("step", "epoch"), unit="stpe")
        Traceback (most recent call last):
        ...
        leyden.core.errors.ConfigurationError: Timetable(unit='stpe'): Did you mean 'step'? Known: step, epoch.
    """
    for name, value in values.items():
        if value not in choices:
            raise ConfigurationError(f"{call}({name}={value!r}): {nearest(str(value), choices)}")
