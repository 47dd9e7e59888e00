"""Classes by their import path, and the types of arguments that a configuration fills with classes."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from leyden.strategies.errors import ConfigurationError, nearest


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's scheduler, which also knows the name of the metric that it watches.

    A configuration names it, as in `--lr_scheduler=ReduceLROnPlateau --lr_scheduler.monitor=val_loss`. A
    `configure_optimizers` of yours returns `{"scheduler": s, "monitor": s.monitor}`.

    Args:
        optimizer: whose learning rate it lowers.
        monitor: the metric's name, as it is logged.
        *args: of torch's scheduler.
        **kwargs: of torch's scheduler.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


ArgsType = list[str] | dict[str, Any] | Namespace | None
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""The annotation of an argument that makes an optimizer from parameters."""
LRSchedulerCallable = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]
"""The annotation of an argument that makes a scheduler from an optimizer."""
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]


def imported(path: str) -> Any:
    """Imports a class or function by its path.

    Raises:
        ConfigurationError: if it is not there; suggests the nearest name.

    Example:
        >>> imported("torch.nn.Linear")
        <class 'torch.nn.modules.linear.Linear'>
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigurationError(f"class_path={path!r}: give the module too, as in package.module.{path}.")
    found = importlib.import_module(module)
    if not hasattr(found, name):
        raise ConfigurationError(f"class_path={path!r}: {module} has no {name}. {nearest(name, dir(found))}")
    return getattr(found, name)


def instantiate_class(args: Any | tuple[Any, ...], init: Mapping[str, Any]) -> Any:
    """Builds the object that a configuration describes.

    Args:
        args: positional arguments that the configuration does not have, such as parameters; a tuple of several.
        init: `class_path`, and `init_args` if it has any.

    Example:
        >>> from torch import nn
        >>> init = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
        >>> instantiate_class(nn.Linear(2, 1).parameters(), init).defaults["lr"]
        0.5
    """
    positional: Sequence[Any] = args if isinstance(args, tuple) else (args,)
    return imported(init["class_path"])(*positional, **dict(init.get("init_args") or {}))
