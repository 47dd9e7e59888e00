"""Hyperparameters: arguments of `__init__` that are kept, logged and saved."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import inspect
import itertools
import types
import typing
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from leyden.checkpoint.format.configs import config_of, entries_of, is_config
from leyden.core.errors import ConfigurationError, kind_of, nearest
from leyden.core.rank_zero import warn

if TYPE_CHECKING:
    from leyden.checkpoint.module import SavedArguments

    class_only = classmethod
else:

    class class_only(classmethod):
        """A class method that raises when it is called on an instance, such as `load_from_checkpoint`."""

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return super().__get__(None, owner)
            return lambda *args, **kwargs: _refuse_instance(self.__func__.__name__, type(instance).__name__)


def _refuse_instance(method: str, cls: str) -> NoReturn:
    raise ConfigurationError(
        f"{method} returns a new {cls} and does not change this one: call it on the class, {cls}.{method}(…)."
    )


class AttributeDict(dict[str, Any]):
    """A dict whose entries are also attributes.

    Example:
        >>> AttributeDict(lr=0.1).lr
        0.1
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            hint = (
                nearest(name, self) if self else "None were kept: call self.save_hyperparameters() first in __init__."
            )
            raise AttributeError(f"there is no hyperparameter {name!r}. {hint}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Hyperparameters:
    """A mixin that provides `save_hyperparameters` and `hparams`."""

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Iterable[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keeps the arguments of `__init__` in `self.hparams`, for checkpoints and loggers.

        Call it in `__init__`, or in `__post_init__` of a dataclass. In a base class it also keeps the arguments of the
        subclass's `__init__`. Modules, classes and partials are kept only in `self.hparams`, with a warning:
        checkpoints and loggers omit them, and `load_from_checkpoint` needs them as arguments. OmegaConf's
        configurations are kept as such.

        Args:
            *args: names to keep, by default all; or one dict, Namespace or dataclass to keep instead of arguments. If
                it is itself an argument of `__init__`, `load_from_checkpoint` passes it as that argument.
            ignore: names to omit, such as modules and datasets. A subclass's names also apply to its base class's call,
                except for plain values of the base class's own arguments.
            frame: the frame of `__init__` if it is not the caller's.
            logger: pass the hyperparameters to the loggers when training starts.

        Raises:
            ConfigurationError: if a name is not an argument, or a value cannot be saved without pickle; the message
                suggests `ignore`.

        Example:
            >>> class Model(Hyperparameters):
            ...     def __init__(self, width=8, rate=0.1):
            ...         self.save_hyperparameters(ignore="rate")
            >>> Model(width=16).hparams
            {'width': 16}
        """
        current = inspect.currentframe()
        calls = _calls_of_init(self, frame if frame is not None else current.f_back if current is not None else None)
        kept = self.__dict__.setdefault("_hparams_kept", Kept())
        if len(args) == 1 and not isinstance(args[0], str):
            found_in = mapping_of(args[0])
            if found_in is None:
                raise ConfigurationError(
                    f"save_hyperparameters takes names, a dict, a Namespace or a dataclass, not {kind_of(args[0])}."
                )
            values = found_in
            names: tuple[Any, ...] = ()
            kept.argument = _argument_that_is(args[0], calls)
        else:
            values, names = _arguments(self, calls), args
        unknown = [name for name in names if name not in values]
        if unknown:
            raise ConfigurationError(
                f"save_hyperparameters: {unknown[0]!r} is not an argument. {nearest(unknown[0], values)}"
            )
        left_out = {ignore} if isinstance(ignore, str) else set(ignore or ())
        kept.ignored = (kept.ignored - set(names)) | left_out
        chosen = {name: value for name, value in values.items() if not names or name in names}
        hparams: AttributeDict = self.__dict__.setdefault("_hparams", AttributeDict())
        # A subclass's __init__ that called this one may still ignore some names.
        hparams.update(kept.held(chosen, type(self).__name__, waits=len(calls) > 1))
        for name in left_out & hparams.keys():
            if name not in kept.of_base or _is_code(hparams[name]):
                del hparams[name]
        if len(calls) > 1:
            kept.of_base |= set(calls[0].args) - left_out
        # Without modules, whose copies would double their memory.
        self.__dict__["_hparams_initial"] = copy.deepcopy(AttributeDict(kept.saved(hparams)))
        self.__dict__["_log_hyperparams"] = logger

    @property
    def hparams(self) -> AttributeDict:
        """The hyperparameters; empty before `save_hyperparameters`."""
        hparams: AttributeDict = self.__dict__.setdefault("_hparams", AttributeDict())
        return hparams

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of the original `hparams`, without modules, classes and partials."""
        initial: AttributeDict = copy.deepcopy(self.__dict__.get("_hparams_initial", AttributeDict()))
        return initial

    @property
    def logs_hparams(self) -> bool:
        """True if the hyperparameters are passed to the loggers when training starts."""
        return bool(self.__dict__.get("_log_hyperparams", False))

    @property
    def kept_hparams(self) -> Kept:
        """The record of how `hparams` were kept: names that checkpoints omit, and a single argument that held all."""
        kept: Kept = self.__dict__.setdefault("_hparams_kept", Kept())
        return kept


@dataclasses.dataclass(slots=True)
class Kept:
    """The record of how the hyperparameters of an object were kept.

    Attributes:
        argument: name and kind of the single argument of `__init__` that held all of them; None if each is an argument.
        ignored: names omitted by `ignore`.
        skipped: names that checkpoints cannot hold, each with a description of its value.
        of_base: arguments of a base class's `__init__` that this one keeps.
        pending: names in `skipped` that a subclass may still ignore. `settle` raises the error, or warns if it is None.
    """

    argument: tuple[str, str] | None = None
    ignored: set[str] = dataclasses.field(default_factory=set)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    pending: dict[str, ConfigurationError | None] = dataclasses.field(default_factory=dict)
    of_base: set[str] = dataclasses.field(default_factory=set)

    def held(self, chosen: Mapping[str, Any], owner: str, waits: bool) -> dict[str, Any]:
        """Returns the values to keep in `hparams`. Warns about modules, classes and partials, and raises for other
        values that checkpoints cannot hold.

        Args:
            chosen: arguments by name.
            owner: the name of the object's class.
            waits: defer warnings and errors to `settle`, because a subclass may still ignore some names.
        """
        wanted = {name: value for name, value in chosen.items() if name not in self.ignored}
        for name in self.ignored | wanted.keys():
            self.skipped.pop(name, None)
            self.pending.pop(name, None)
        for name, value in wanted.items():
            error = None if _is_code(value) else _refusal(owner, name, value)
            if error is not None or _is_code(value):
                self.skipped[name], self.pending[name] = in_words(value), error
        if not waits:
            self.settle(owner)
        return {name: value for name, value in wanted.items() if name not in self.skipped or _is_code(value)}

    def saved(self, hparams: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the hyperparameters for checkpoints and loggers."""
        return {name: value for name, value in hparams.items() if name not in self.skipped or not _is_code(value)}

    def settle(self, owner: str) -> None:
        """Warns about values that checkpoints omit. Called once no further name can be ignored, at the latest when a
        run begins.

        Raises:
            ConfigurationError: for an argument that checkpoints cannot hold.
        """
        for error in self.pending.values():
            if error is not None:
                raise error
        if self.pending:
            _warn_of_unsaved(owner, list(self.pending), self.skipped)
        self.pending = {}

    def to_dict(self) -> dict[str, Any]:
        """Returns the record for a checkpoint; empty if there is nothing to record."""
        record = {"argument": self.argument, "skipped": self.skipped}
        return {name: value for name, value in record.items() if value}


def _warn_of_unsaved(owner: str, names: list[str], words: Mapping[str, str]) -> None:
    listed = ", ".join(f"{name} ({words[name]})" for name in names)
    warn(
        f"{owner}.save_hyperparameters keeps {listed} only in self.hparams: checkpoints hold no modules, classes or "
        f"partials. Pass them to load_from_checkpoint(..., {names[0]}=…). To avoid this warning, ignore them: "
        f"self.save_hyperparameters(ignore={names}).",
    )


def _is_code(value: Any) -> bool:
    """Returns True for a module, a class or a partial, and for a list, tuple or dict that contains one."""
    if isinstance(value, (nn.Module, type, functools.partial)):
        return True
    if is_config(value):
        return False
    if isinstance(value, Mapping):
        return any(_is_code(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_is_code(item) for item in value)


def in_words(value: Any) -> str:
    """Describes a module, a class or a partial, such as "the class ReLU"."""
    from leyden.checkpoint.format.secrets import masked_values

    if isinstance(value, functools.partial):
        options = "".join(f", {name}={item!r}" for name, item in masked_values(value.keywords).items())
        # jsonargparse's partial of a class wraps its own function, with the class among the arguments.
        target = next((item for item in value.args if isinstance(item, type)), value.func)
        return f"partial({getattr(target, '__qualname__', type(target).__name__)}{options})"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return f"a {type(value).__qualname__}"


def hparams_to_log(*owners: Hyperparameters | None) -> dict[str, Any]:
    """Returns the hyperparameters of DataModule and module to log, with secrets masked.

    Raises:
        ConfigurationError: if two owners have different values under one name.
    """
    from leyden.checkpoint.format.secrets import masked_values

    logged: dict[str, tuple[object, Any]] = {}
    for owner in owners:
        if owner is None or not owner.logs_hparams:
            continue
        for name, value in owner.kept_hparams.saved(owner.hparams).items():
            other, before = logged.setdefault(name, (owner, value))
            if not _equal(before, value):
                before, value = (masked_values(item, name) for item in (before, value))
                raise ConfigurationError(
                    f"{type(other).__name__} and {type(owner).__name__} both have a hyperparameter {name!r}, with "
                    f"different values ({before!r} and {value!r}), but loggers accept only one. Rename it in one of "
                    "them, or call save_hyperparameters(logger=False) in one."
                )
    found: dict[str, Any] = masked_values({name: value for name, (_, value) in logged.items()})
    return found


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        same = one == other
        # Tensors and arrays compare by element; nan is not equal to itself.
        return bool(same.all() if hasattr(same, "all") else same) or (one != one and other != other) is True
    except Exception:
        return False


def mapping_of(values: Any) -> dict[str, Any] | None:
    """Returns the entries of a mapping, a Namespace or a dataclass, by name; None for anything else."""
    if is_config(values):
        return entries_of(values)
    if isinstance(values, argparse.Namespace):
        return dict(vars(values))
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        return {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    return {str(name): value for name, value in values.items()} if isinstance(values, Mapping) else None


def _argument_that_is(values: Any, calls: list[inspect.ArgInfo]) -> tuple[str, str] | None:
    """Returns name and kind of the argument of `__init__` that held these values; None if they were not an argument."""
    info = calls[-1] if calls else None
    name = next((name for name in info.args[1:] if info.locals.get(name) is values), None) if info is not None else None
    if name is None:
        return None
    if is_config(values):
        return name, "omegaconf"
    kind = "dict" if type(values) is dict else "mapping" if isinstance(values, Mapping) else "dataclass"
    return name, "namespace" if isinstance(values, argparse.Namespace) else kind


def _calls_of_init(owner: object, frame: types.FrameType | None) -> list[inspect.ArgInfo]:
    """Returns the calls of every `__init__` of `owner` on the stack, from the innermost to that of its own class."""
    calls = []
    while frame is not None:
        info = inspect.getargvalues(frame)
        first = info.args[0] if info.args else None
        if first is None or info.locals.get(first) is not owner:
            break
        if frame.f_code.co_name == "__init__":
            calls.append(info)
        elif frame.f_code.co_name != "__post_init__":
            break
        frame = frame.f_back
    return calls


def _arguments(owner: object, calls: list[inspect.ArgInfo]) -> dict[str, Any]:
    """Returns the arguments of these calls; those of the outermost call, the subclass's, take precedence."""
    arguments: dict[str, Any] = {}
    for info in calls:
        for name in info.args[1:]:
            if name not in info.locals:
                raise ConfigurationError(
                    f"save_hyperparameters: the argument {name!r} was deleted. Call save_hyperparameters() first in "
                    "__init__."
                )
            arguments[name] = info.locals[name]
        if info.keywords:
            arguments.update(info.locals[info.keywords])
    for field in dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ():
        # The argument of a dataclass's __init__ is only a mark if the factory made the value.
        if field.name in arguments and field.default_factory is not dataclasses.MISSING:
            arguments[field.name] = getattr(owner, field.name)
    return {name: value for name, value in arguments.items() if not name.startswith("__")}


def _refusal(owner: str, name: str, value: Any) -> ConfigurationError | None:
    """Returns the error for a value that a checkpoint cannot hold."""
    from leyden.checkpoint.format.codec import check_encodable

    try:
        check_encodable(value, where=f"hparams[{name!r}]")
    except ConfigurationError as error:
        return ConfigurationError(
            f"{owner}.save_hyperparameters cannot keep the argument {name!r}: {error} Ignore it: "
            f"self.save_hyperparameters(ignore=[{name!r}])."
        )
    return None


def arguments_for(cls: type, saved: SavedArguments, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments for `__init__`: saved ones, overridden by given ones. Raises if one is missing."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    _check_no_secret_is_missing(cls, saved, given, None if takes_any else parameters)
    values, given = _as_arguments(cls, saved, given, parameters)
    unknown = [] if takes_any else [name for name in given if name not in parameters]
    for name in unknown:
        warn(
            f"{cls.__name__} has no argument {name!r} and is built without it. "
            f"{nearest(name, dict.fromkeys([*parameters, *saved.values]))}",
        )
    values = {**values, **{name: value for name, value in given.items() if name not in unknown}}
    accepted = {name: value for name, value in values.items() if takes_any or name in parameters}
    missing = [name for name in _required(parameters.values()) if name not in accepted]
    if missing:
        raise ConfigurationError(
            f"{cls.__name__} needs {', '.join(missing)}, which the checkpoint does not have: pass "
            f"load_from_checkpoint(..., {missing[0]}=…), or call self.save_hyperparameters() in __init__ before "
            "training."
        )
    defaults = {name: p.default for name, p in parameters.items() if name not in accepted}
    for name, was in saved.skipped.items():
        if name in defaults and in_words(defaults[name]) != was:
            warn(
                f"{cls.__name__} was trained with {name}={was}, which checkpoints cannot hold, but is built with the "
                f"default: pass load_from_checkpoint(..., {name}=…).",
            )
    return accepted


def _check_no_secret_is_missing(
    cls: type, saved: SavedArguments, given: Mapping[str, Any], accepted: Container[str] | None
) -> None:
    """Raises if a saved value is masked, and no given argument replaces it.

    Args:
        cls: the class to build.
        saved: the saved arguments.
        given: the given arguments.
        accepted: the names that its `__init__` accepts; None for all.
    """
    from leyden.checkpoint.format.secrets import masked_names

    if saved.argument is not None and (accepted is None or saved.argument[0] in accepted):
        if saved.argument[0] in given:
            return
        accepted = None
    wanted = [name for name in saved.values if name not in given and (accepted is None or name in accepted)]
    masked = {name: found for name in wanted if (found := list(masked_names(saved.values[name], name)))}
    if masked:
        listed = ", ".join(itertools.chain(*masked.values()))
        passed = ", ".join(f"{name}=…" for name in masked)
        raise ConfigurationError(
            f"{cls.__name__} needs {listed}, which the checkpoint has only in masked form, because it looks like a "
            f"secret: pass load_from_checkpoint(..., {passed})."
        )


def _as_arguments(
    cls: type, saved: SavedArguments, given: dict[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns saved and given values by argument; a single argument may have held all the saved ones."""
    if saved.argument is None or saved.argument[0] not in parameters:
        return saved.values, given
    name, kind = saved.argument
    within = {key: value for key, value in given.items() if key in saved.values and key not in parameters}
    rest = {key: value for key, value in given.items() if key not in within}
    return {name: _rebuilt(cls, name, kind, {**saved.values, **within})}, rest


def _required(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """Returns the names of the arguments that have no default."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind in by_name]


def _rebuilt(cls: type, name: str, kind: str, values: dict[str, Any]) -> Any:
    """Returns the single argument that held all hyperparameters, rebuilt as the original kind of object."""
    if kind == "namespace":
        return argparse.Namespace(**values)
    if kind == "omegaconf":
        return config_of(values)
    if kind != "dataclass":
        return values if kind == "dict" else AttributeDict(values)
    # The class comes from the code of `cls`, never from the file.
    try:
        hint = typing.get_type_hints(cls.__init__).get(name)  # type: ignore[misc]
    except (NameError, TypeError):
        # The annotation is imported only for type checkers.
        hint = None
    default = inspect.signature(cls).parameters[name].default
    known = hint if dataclasses.is_dataclass(hint) else type(default)
    if not dataclasses.is_dataclass(known) or not isinstance(known, type):
        return types.SimpleNamespace(**values)
    fields = {item.name for item in dataclasses.fields(known) if item.init}
    return known(**{key: value for key, value in values.items() if key in fields})
