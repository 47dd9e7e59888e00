"""Classes by their names in a configuration, and the types of arguments that it fills with classes."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from leyden.strategies.errors import ConfigurationError, nearest

ROOMS = ("leyden.callbacks", "leyden.strategies", "leyden.trainer", "leyden.trainer.profilers")
SLOW = ("FSDPStrategy", "MeshStrategy", "ModelParallelStrategy")
"""These import parts of torch that take half a second each."""
LARGE = 1_000_000
"""Bytes; such a file is data, and no configuration."""
FILES = re.compile(r"[^\s\"'=,\[\]{}]+\.(?:ya?ml|json)\b")


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


def import_own(words: Iterable[str], variables: str = "LEYDEN") -> None:
    """Imports every callback, strategy and profiler. jsonargparse finds a class by its name only once it exists.

    Args:
        words: the command line. Slow classes are imported only if it, a file that it names, or a variable mentions
            them.
        variables: how the names of environment variables begin.
    """
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            if name not in SLOW:
                getattr(module, name)
    for text in (*words, *(value for name, value in os.environ.items() if name.startswith(variables))):
        import_slow(text)


def import_slow(text: str, folder: Path | None = None, depth: int = 4) -> None:
    """Imports the slow classes that a text mentions, or a file that it names.

    Args:
        text: a word of the command line, or a file's content.
        folder: of that file. By default the current one.
        depth: of files that name files.
    """
    strategies = importlib.import_module("leyden.strategies")
    for name in SLOW:
        if name in text:
            getattr(strategies, name)
    for path in FILES.findall(text) if depth else ():
        file = (folder or Path()) / Path(path).expanduser()
        with contextlib.suppress(OSError, ValueError):
            if file.stat().st_size < LARGE:
                import_slow(file.read_text(encoding="utf-8"), file.parent, depth - 1)
