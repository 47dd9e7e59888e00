"""LambdaCallback, a callback built from plain functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from leyden.callbacks.base import Callback
from leyden.core.errors import ConfigurationError, kind_of, nearest

HOOKS = tuple(
    name
    for name, member in vars(Callback).items()
    if name in ("setup", "teardown") or name.startswith("on_")
    if inspect.isfunction(member)
)


class LambdaCallback(Callback):
    """A callback built from functions, one per hook. Each takes the arguments of its hook, without `self`.

    Args:
        **hooks: the function for each hook, by the hook's name; None for none.

    Raises:
        ConfigurationError: if there is no hook of that name, or the value is not callable.

    Example:
        >>> callback = LambdaCallback(on_train_epoch_end=lambda trainer, module: trainer.print("an epoch has ended"))
        >>> # Trainer(callbacks=[callback])
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                raise ConfigurationError(f"LambdaCallback has no hook '{name}'. {nearest(name, HOOKS)}")
            if function is None:
                continue
            if not callable(function):
                raise ConfigurationError(
                    f"LambdaCallback({name}=...) takes a function, not {kind_of(function)}: write "
                    f"{name}=lambda {', '.join(list(inspect.signature(getattr(Callback, name)).parameters)[1:])}: ..."
                )
            setattr(self, name, function)
