"""Leaves out arguments that a configuration file cannot represent. An argument is dropped as a whole, never in part."""

from __future__ import annotations

import importlib
import inspect
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from leyden.core.rank_zero import warn

UNSERIALIZABLE = "Unable to serialize instance"
"""Prefix of the text that jsonargparse writes for an object that has no representation in a configuration."""
LOST = object()


def writable(value: Any, raw: Any, default: Any, name: str) -> Any:
    """Returns the value of one argument, without arguments of nested classes that cannot be written.

    A dropped argument has its default in the next run. A warning names the argument if this run's value differs.

    Args:
        value: the value in jsonargparse's written form.
        raw: the value itself.
        default: the argument's default.
        name: the argument's name.

    Returns:
        `LOST` if any part of the argument cannot be written.

    Example:
        >>> writable([1, object()], raw := [1, object()], raw, "--model.parts") is LOST
        True
    """
    kept = _kept(value, raw, name)
    if kept is LOST and not is_same(raw, default):
        warn(
            f"{name} holds an object that no configuration file can hold: the saved configuration leaves it out, and a "
            "run from that file uses the argument's default. Describe the object by class_path and init_args."
        )
    return kept


def _kept(value: Any, raw: Any, name: str) -> Any:
    if isinstance(value, (Mapping, Namespace)):
        values = value if isinstance(value, Mapping) else vars(value)
        path = values.get("class_path")
        found = {
            key: _kept_arguments(item, _inside(raw, key), path, name)
            if key == "init_args" and isinstance(path, str)
            else _kept(item, _inside(raw, key), f"{name}.{key}")
            for key, item in values.items()
        }
        if any(item is LOST for item in found.values()):
            return LOST
        return found if isinstance(value, Mapping) else type(value)(**found)
    if isinstance(value, (list, tuple, set, frozenset)):
        raws = list(raw) if isinstance(raw, (list, tuple)) else []
        raws += [None] * (len(value) - len(raws))
        items = [_kept(item, raws[i], f"{name}[{i}]") for i, item in enumerate(value)]
        if any(item is LOST for item in items):
            return LOST
        return set(items) if isinstance(value, (set, frozenset)) else items
    import yaml

    is_text_of_an_object = isinstance(value, str) and value.startswith(UNSERIALIZABLE) and raw is not value
    return LOST if is_text_of_an_object or type(value) not in yaml.SafeDumper.yaml_representers else value


def _kept_arguments(arguments: Any, raws: Any, class_path: str, name: str) -> Any:
    """Returns the arguments of a nested class that can be written."""
    values = arguments if isinstance(arguments, Mapping) else vars(arguments)
    found = {
        key: writable(item, _inside(raws, key), _default(class_path, key), f"{name}.{key}")
        for key, item in values.items()
    }
    kept = {key: item for key, item in found.items() if item is not LOST}
    return kept if isinstance(arguments, Mapping) else type(arguments)(**kept)


def _default(class_path: str, name: str) -> Any:
    """Returns the default of a class's argument, even if the class forwards it to a base class."""
    module, _, attribute = class_path.rpartition(".")
    made = getattr(importlib.import_module(module), attribute, None) if module else None
    for owner in inspect.getmro(made) if isinstance(made, type) else [made]:
        function = vars(owner).get("__init__") if isinstance(owner, type) else owner
        if inspect.isfunction(function):
            parameter = inspect.signature(function).parameters.get(name)
            if parameter is not None:
                return parameter.default
    return LOST


def _inside(raw: Any, key: Any) -> Any:
    values = raw if isinstance(raw, Mapping) else vars(raw) if isinstance(raw, Namespace) else {}
    return values.get(key)


def is_same(one: Any, other: Any) -> bool:
    """Compares lists and dicts entry by entry. Objects are compared by identity, constants by value."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_same(item, other[key]) for key, item in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return isinstance(one, (str, int, float, bool, bytes)) and one == other
