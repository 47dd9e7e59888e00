"""Leyden: a trainer for PyTorch whose numbers are right, that costs nothing, and that can be read."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from leyden.core.lazy import lazy_name

__version__ = "0.1.0"

_HOMES = {
    "Trainer": "leyden.trainer.trainer",
    "TrainModule": "leyden.trainer.module",
    "Tuner": "leyden.trainer.tuning.tuner",
    "Accelerator": "leyden.accelerator.accelerator",
    "Callback": "leyden.callbacks.base",
    "CheckpointError": "leyden.checkpoint.format.errors",
    "CombinedLoader": "leyden.data.combined",
    "ConfigurationError": "leyden.core.errors",
    "DataModule": "leyden.trainer.datamodule",
    "SeekableShuffle": "leyden.data.seekable_shuffle",
    "LeydenCLI": "leyden.cli.configuration.leyden_cli",
    "LeydenError": "leyden.core.errors",
    "seed_everything": "leyden.data.rng",
    "rank_zero_debug": "leyden.core.rank_zero",
    "rank_zero_deprecation": "leyden.core.rank_zero",
    "rank_zero_info": "leyden.core.rank_zero",
    "rank_zero_only": "leyden.core.rank_zero",
    "rank_zero_warn": "leyden.core.rank_zero",
    "AutocastKwargs": "leyden.accelerator.settings.plugins",
    "DataLoaderConfiguration": "leyden.accelerator.settings.plugins",
    "DistributedDataParallelKwargs": "leyden.accelerator.settings.plugins",
    "GradScalerKwargs": "leyden.accelerator.settings.plugins",
    "AORecipeKwargs": "leyden.accelerator.settings.fp8_recipes",
    "FP8RecipeKwargs": "leyden.accelerator.settings.fp8_recipes",
    "MSAMPRecipeKwargs": "leyden.accelerator.settings.fp8_recipes",
    "TERecipeKwargs": "leyden.accelerator.settings.fp8_recipes",
    "GradientAccumulationPlugin": "leyden.accelerator.settings.plugins",
    "InitProcessGroupKwargs": "leyden.accelerator.settings.plugins",
    "ProfileKwargs": "leyden.accelerator.settings.plugins",
    "ProjectConfiguration": "leyden.accelerator.settings.plugins",
    "GeneralTracker": "leyden.accelerator.records.tracking",
    "PartialState": "leyden.accelerator.ranks",
    "find_executable_batch_size": "leyden.accelerator.standalone.memory",
    "release_memory": "leyden.accelerator.standalone.memory",
    "skip_first_batches": "leyden.accelerator.prepared.loader",
    "DeepSpeedPlugin": "leyden.accelerator.settings.deepspeed",
    "DummyOptim": "leyden.accelerator.settings.deepspeed",
    "DummyScheduler": "leyden.accelerator.settings.deepspeed",
    "FullyShardedDataParallelPlugin": "leyden.accelerator.settings.plugins",
    "LocalSGD": "leyden.accelerator.standalone.local_sgd",
    "get_logger": "leyden.accelerator.standalone.rank_logging",
    "notebook_launcher": "leyden.accelerator.standalone.notebook",
    "set_seed": "leyden.accelerator.standalone.world",
    "DistributedType": "leyden.accelerator.ranks",
    "DDPCommunicationHookType": "leyden.accelerator.settings.plugins",
    "ParallelismConfig": "leyden.accelerator.settings.parallel",
    "TorchDynamoPlugin": "leyden.accelerator.settings.plugins",
    "debug_launcher": "leyden.accelerator.standalone.notebook",
    "synchronize_rng_states": "leyden.accelerator.standalone.world",
}
_MODULES = (
    *("accelerator", "big_modeling", "checkpointing", "data_loader", "hooks", "inference", "launchers", "local_sgd"),
    *("logging", "memory_utils", "optimizer", "parallelism_config", "scheduler", "state", "test_utils"),
    *("test_utils.testing", "tracking"),
    *("utils", "utils.constants", "utils.dataclasses", "utils.deepspeed", "utils.imports", "utils.memory"),
    *("utils.modeling", "utils.operations", "utils.other", "utils.random"),
)
"""Submodules of `leyden` with Accelerate's names. Scripts also access them as attributes."""
_ROOMS = ("callbacks", "strategies", "trainer")
"""Leyden's subpackages. Scripts written for Lightning access `callbacks` and `strategies` as attributes."""

if TYPE_CHECKING:
    from leyden.accelerator.accelerator import Accelerator as Accelerator
    from leyden.accelerator.prepared.loader import skip_first_batches as skip_first_batches
    from leyden.accelerator.ranks import DistributedType as DistributedType
    from leyden.accelerator.ranks import PartialState as PartialState
    from leyden.accelerator.records.tracking import GeneralTracker as GeneralTracker
    from leyden.accelerator.settings.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
    from leyden.accelerator.settings.deepspeed import DummyOptim as DummyOptim
    from leyden.accelerator.settings.deepspeed import DummyScheduler as DummyScheduler
    from leyden.accelerator.settings.fp8_recipes import AORecipeKwargs as AORecipeKwargs
    from leyden.accelerator.settings.fp8_recipes import FP8RecipeKwargs as FP8RecipeKwargs
    from leyden.accelerator.settings.fp8_recipes import MSAMPRecipeKwargs as MSAMPRecipeKwargs
    from leyden.accelerator.settings.fp8_recipes import TERecipeKwargs as TERecipeKwargs
    from leyden.accelerator.settings.parallel import ParallelismConfig as ParallelismConfig
    from leyden.accelerator.settings.plugins import AutocastKwargs as AutocastKwargs
    from leyden.accelerator.settings.plugins import DataLoaderConfiguration as DataLoaderConfiguration
    from leyden.accelerator.settings.plugins import DDPCommunicationHookType as DDPCommunicationHookType
    from leyden.accelerator.settings.plugins import (
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    )
    from leyden.accelerator.settings.plugins import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    )
    from leyden.accelerator.settings.plugins import GradientAccumulationPlugin as GradientAccumulationPlugin
    from leyden.accelerator.settings.plugins import GradScalerKwargs as GradScalerKwargs
    from leyden.accelerator.settings.plugins import InitProcessGroupKwargs as InitProcessGroupKwargs
    from leyden.accelerator.settings.plugins import ProfileKwargs as ProfileKwargs
    from leyden.accelerator.settings.plugins import ProjectConfiguration as ProjectConfiguration
    from leyden.accelerator.settings.plugins import TorchDynamoPlugin as TorchDynamoPlugin
    from leyden.accelerator.standalone.local_sgd import LocalSGD as LocalSGD
    from leyden.accelerator.standalone.memory import find_executable_batch_size as find_executable_batch_size
    from leyden.accelerator.standalone.memory import release_memory as release_memory
    from leyden.accelerator.standalone.notebook import debug_launcher as debug_launcher
    from leyden.accelerator.standalone.notebook import notebook_launcher as notebook_launcher
    from leyden.accelerator.standalone.rank_logging import get_logger as get_logger
    from leyden.accelerator.standalone.world import set_seed as set_seed
    from leyden.accelerator.standalone.world import synchronize_rng_states as synchronize_rng_states
    from leyden.callbacks.base import Callback as Callback
    from leyden.checkpoint.format.errors import CheckpointError as CheckpointError
    from leyden.cli.configuration.leyden_cli import LeydenCLI as LeydenCLI
    from leyden.core.errors import ConfigurationError as ConfigurationError
    from leyden.core.errors import LeydenError as LeydenError
    from leyden.core.rank_zero import rank_zero_debug as rank_zero_debug
    from leyden.core.rank_zero import rank_zero_deprecation as rank_zero_deprecation
    from leyden.core.rank_zero import rank_zero_info as rank_zero_info
    from leyden.core.rank_zero import rank_zero_only as rank_zero_only
    from leyden.core.rank_zero import rank_zero_warn as rank_zero_warn
    from leyden.data.combined import CombinedLoader as CombinedLoader
    from leyden.data.rng import seed_everything as seed_everything
    from leyden.data.seekable_shuffle import SeekableShuffle as SeekableShuffle
    from leyden.trainer.datamodule import DataModule as DataModule
    from leyden.trainer.module import TrainModule as TrainModule
    from leyden.trainer.trainer import Trainer as Trainer
    from leyden.trainer.tuning.tuner import Tuner as Tuner

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Imports a public name lazily, on first use, so that `import leyden` stays fast."""
    if name in (*_ROOMS, *_MODULES):
        return importlib.import_module(f"leyden.{name}")
    if name not in _HOMES and not name.startswith("_"):
        from leyden.compat.accelerate.absent import attribute

        return attribute(__name__, name)
    return lazy_name(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
