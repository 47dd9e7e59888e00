"""The `leyden` command, and `LeydenCLI`, which gives a script a command line of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.core.lazy import lazy_name

_HOMES = {
    "ArgsType": "leyden.cli.configuration.class_paths",
    "LRSchedulerCallable": "leyden.cli.configuration.class_paths",
    "LRSchedulerTypeTuple": "leyden.cli.configuration.class_paths",
    "LRSchedulerTypeUnion": "leyden.cli.configuration.class_paths",
    "LeydenArgumentParser": "leyden.cli.configuration.argument_parser",
    "LeydenCLI": "leyden.cli.configuration.leyden_cli",
    "OptimizerCallable": "leyden.cli.configuration.class_paths",
    "ReduceLROnPlateau": "leyden.cli.configuration.class_paths",
    "SaveConfigCallback": "leyden.callbacks.save_config",
    "instantiate_class": "leyden.cli.configuration.class_paths",
}

if TYPE_CHECKING:
    from leyden.callbacks.save_config import SaveConfigCallback as SaveConfigCallback
    from leyden.cli.configuration.argument_parser import LeydenArgumentParser as LeydenArgumentParser
    from leyden.cli.configuration.class_paths import ArgsType as ArgsType
    from leyden.cli.configuration.class_paths import LRSchedulerCallable as LRSchedulerCallable
    from leyden.cli.configuration.class_paths import LRSchedulerTypeTuple as LRSchedulerTypeTuple
    from leyden.cli.configuration.class_paths import LRSchedulerTypeUnion as LRSchedulerTypeUnion
    from leyden.cli.configuration.class_paths import OptimizerCallable as OptimizerCallable
    from leyden.cli.configuration.class_paths import ReduceLROnPlateau as ReduceLROnPlateau
    from leyden.cli.configuration.class_paths import instantiate_class as instantiate_class
    from leyden.cli.configuration.leyden_cli import LeydenCLI as LeydenCLI


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used: jsonargparse is an extra."""
    return lazy_name(__name__, _HOMES, name)
