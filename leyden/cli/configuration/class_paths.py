"""Resolves class names in a configuration, and defines annotations for arguments that take classes."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from leyden.core.errors import ConfigurationError, nearest

ROOMS = ("leyden.callbacks", "leyden.strategies", "leyden.trainer", "leyden.trainer.profilers")


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's ReduceLROnPlateau with an argument for the metric that it monitors.

    A configuration sets it with `--lr_scheduler=ReduceLROnPlateau --lr_scheduler.monitor=val_loss`. Your own
    `configure_optimizers` returns `{"scheduler": s, "monitor": s.monitor}`.

    Args:
        optimizer: the optimizer whose learning rate is reduced.
        monitor: name of the logged metric.
        *args: arguments of torch's scheduler.
        **kwargs: arguments of torch's scheduler.
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


def imported(path: str) -> Any:
    """Imports a class or function by its path.

    Raises:
        ConfigurationError: if it does not exist. The message suggests the closest name.

    Example:
        >>> imported("torch.nn.Linear")
        <class 'torch.nn.modules.linear.Linear'>
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigurationError(f"class_path={path!r} lacks the module. Give the full path: package.module.{path}.")
    found = importlib.import_module(module)
    if not hasattr(found, name):
        raise ConfigurationError(f"class_path={path!r}: {module} has no {name}. {nearest(name, dir(found))}")
    return getattr(found, name)


def instantiate_class(args: Any | tuple[Any, ...], init: Mapping[str, Any]) -> Any:
    """Builds the object that a configuration describes.

    Args:
        args: positional argument that the configuration cannot have, such as parameters, or a tuple of several.
        init: mapping with `class_path`, and `init_args` if there are any.

    Example:
        >>> from torch import nn
        >>> init = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
        >>> instantiate_class(nn.Linear(2, 1).parameters(), init).defaults["lr"]
        0.5
    """
    positional: Sequence[Any] = args if isinstance(args, tuple) else (args,)
    return imported(init["class_path"])(*positional, **dict(init.get("init_args") or {}))


def import_own() -> None:
    """Imports every callback, strategy and profiler. jsonargparse finds a class by name only after its import."""
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            getattr(module, name)
