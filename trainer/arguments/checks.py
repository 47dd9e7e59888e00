"""Checks of arguments that many callbacks have in common, with the words of their errors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from leyden.strategies.errors import ConfigurationError, nearest


def check_whole(call: str, least: int, /, **values: Any) -> None:
    """Refuses arguments that are no whole numbers, or too small ones.

    Args:
        call: whose arguments they are.
        least: the smallest number that is allowed.
        **values: the arguments.

    Example:
        >>> check_whole("Timetable", 1, every_n_steps=100, every_n_epochs=0)
        Traceback (most recent call last):
        ...
        leyden.strategies.errors.ConfigurationError: Timetable(every_n_epochs=0): give a whole number from 1.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{call}({name}={value!r}): give a whole number from {least}.")


def check_flags(call: str, /, **values: Any) -> None:
    """Refuses arguments that are neither True nor False.

    Example:
        >>> check_flags("Timetable", loud="yes")
        Traceback (most recent call last):
        ...
        leyden.strategies.errors.ConfigurationError: Timetable(loud='yes'): use True or False.
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{call}({name}={value!r}): use True or False.")


def check_choice(call: str, choices: Collection[str], /, **values: Any) -> None:
    """Refuses arguments that are not among the choices, with the nearest one.

    Example:
        >>> check_choice("Timetable", ("step", "epoch"), unit="stpe")
        Traceback (most recent call last):
        ...
        leyden.strategies.errors.ConfigurationError: Timetable(unit='stpe'): Did you mean 'step'? Known: step, epoch.
    """
    for name, value in values.items():
        if value not in choices:
            raise ConfigurationError(f"{call}({name}={value!r}): {nearest(str(value), choices)}")
