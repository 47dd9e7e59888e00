"""Hyperparameters: the arguments of `__init__`, kept, logged and saved."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any

from leyden.strategies.errors import ConfigurationError, kind_of, nearest


class AttributeDict(dict[str, Any]):
    """A dict whose entries are attributes too.

    Example:
        >>> AttributeDict(lr=0.1).lr
        0.1
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            hint = nearest(name, self) if self else "None was kept: call self.save_hyperparameters() first in __init__."
            raise AttributeError(f"there is no hyperparameter {name!r}. {hint}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Hyperparameters:
    """Gives a class `save_hyperparameters` and `hparams`."""

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Iterable[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keeps the arguments of `__init__` in `self.hparams`, for checkpoints and loggers.

        Call it in `__init__`; in a base class it also takes the arguments of the subclass's `__init__`.

        Args:
            *args: names to keep, all if left out; or one dict, Namespace or dataclass to keep in place of arguments.
            ignore: names to leave out, such as modules and data sets.
            frame: the frame of `__init__`, if it is not the caller's.
            logger: give them to the loggers when training starts.

        Raises:
            ConfigurationError: if a name is no argument, or a value cannot be saved without pickle; names `ignore`.

        Example:
            >>> class Model(Hyperparameters):
            ...     def __init__(self, width=8, rate=0.1):
            ...         self.save_hyperparameters(ignore="rate")
            >>> Model(width=16).hparams
            {'width': 16}
        """
        if len(args) == 1 and not isinstance(args[0], str):
            values = _as_mapping(args[0])
            names: tuple[Any, ...] = ()
        else:
            current = inspect.currentframe()
            start = frame if frame is not None else current.f_back if current is not None else None
            values = _arguments_of_init(self, start)
            names = args
        unknown = [name for name in names if name not in values]
        if unknown:
            raise ConfigurationError(
                f"save_hyperparameters: {unknown[0]!r} is no argument. {nearest(unknown[0], values)}"
            )
        left_out = {ignore} if isinstance(ignore, str) else set(ignore or ())
        kept = {name: value for name, value in values.items() if (not names or name in names) and name not in left_out}
        _check(type(self).__name__, kept)
        self.__dict__.setdefault("_hparams", AttributeDict()).update(kept)
        self.__dict__["_hparams_initial"] = copy.deepcopy(self.__dict__["_hparams"])
        self.__dict__["_log_hyperparams"] = logger

    @property
    def hparams(self) -> AttributeDict:
        """The kept hyperparameters; empty before `save_hyperparameters`."""
        found: AttributeDict = self.__dict__.setdefault("_hparams", AttributeDict())
        return found

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of `hparams` as they were kept."""
        initial: AttributeDict = copy.deepcopy(self.__dict__.get("_hparams_initial", AttributeDict()))
        return initial

    @property
    def logs_hparams(self) -> bool:
        """True if the loggers get them when training starts."""
        return bool(self.__dict__.get("_log_hyperparams", False))


def hparams_to_log(*owners: Hyperparameters | None) -> dict[str, Any]:
    """The hyperparameters that loggers are given: those of the DataModule and of the module, under one name each.

    Raises:
        ConfigurationError: if two owners have different values by one name, of which only one could be logged.
    """
    found: dict[str, tuple[object, Any]] = {}
    for owner in owners:
        if owner is None or not owner.logs_hparams:
            continue
        for name, value in owner.hparams.items():
            other, before = found.setdefault(name, (owner, value))
            if not _equal(before, value):
                raise ConfigurationError(
                    f"{type(other).__name__} and {type(owner).__name__} both have a hyperparameter {name!r}, with different "
                    f"values ({before!r} and {value!r}), and loggers know one: rename it in one of them, or let one call "
                    "save_hyperparameters(logger=False)."
                )
    return {name: value for name, (_, value) in found.items()}


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        same = one == other
        # Tensors and arrays compare by element; nan is not equal to itself.
        return bool(same.all() if hasattr(same, "all") else same) or (one != one and other != other) is True
    except Exception:
        return False


def _as_mapping(values: Any) -> dict[str, Any]:
    if isinstance(values, argparse.Namespace):
        return dict(vars(values))
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        return {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    if isinstance(values, Mapping):
        return {str(name): value for name, value in values.items()}
    raise ConfigurationError(
        f"save_hyperparameters takes names, a dict, a Namespace or a dataclass, not {kind_of(values)}."
    )


def _arguments_of_init(owner: object, frame: types.FrameType | None) -> dict[str, Any]:
    """The arguments of every `__init__` of `owner` on the stack; the outermost, the subclass's, wins."""
    found: dict[str, Any] = {}
    while frame is not None:
        info = inspect.getargvalues(frame)
        first = info.args[0] if info.args else None
        if frame.f_code.co_name != "__init__" or first is None or info.locals.get(first) is not owner:
            break
        for name in info.args[1:]:
            if name not in info.locals:
                raise ConfigurationError(
                    f"save_hyperparameters: the argument {name!r} was deleted before. Call it first in __init__."
                )
            found[name] = info.locals[name]
        if info.keywords:
            found.update(info.locals[info.keywords])
        frame = frame.f_back
    if not found and frame is not None and frame.f_code.co_name != "__init__":
        return found
    return {name: value for name, value in found.items() if not name.startswith("__")}


def _check(owner: str, values: Mapping[str, Any]) -> None:
    """Refuses now what a checkpoint could not hold at the first save."""
    from leyden.trainer.checkpoint.codec import check_encodable

    for name, value in values.items():
        try:
            check_encodable(value, where=f"hparams[{name!r}]")
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{owner}.save_hyperparameters cannot keep the argument {name!r}: {error} Leave it out: "
                f"self.save_hyperparameters(ignore=[{name!r}])."
            ) from error
