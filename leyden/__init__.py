"""Leyden: a trainer for PyTorch whose numbers are right, that costs nothing, and that can be read."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Trainer": "leyden.trainer.trainer",
    "TrainModule": "leyden.trainer.module",
    "Accelerator": "leyden.trainer.accelerator",
    "Callback": "leyden.callbacks.base",
    "CheckpointError": "leyden.trainer.checkpoint.errors",
    "CombinedLoader": "leyden.trainer.data.combined",
    "ConfigurationError": "leyden.strategies.errors",
    "DataModule": "leyden.trainer.datamodule",
    "LeydenError": "leyden.strategies.errors",
    "seed_everything": "leyden.trainer.data.rng",
    "AutocastKwargs": "leyden.trainer.own_loop.plugins",
    "DataLoaderConfiguration": "leyden.trainer.own_loop.plugins",
    "DistributedDataParallelKwargs": "leyden.trainer.own_loop.plugins",
    "GradScalerKwargs": "leyden.trainer.own_loop.plugins",
    "AORecipeKwargs": "leyden.trainer.own_loop.fp8_recipes",
    "FP8RecipeKwargs": "leyden.trainer.own_loop.fp8_recipes",
    "MSAMPRecipeKwargs": "leyden.trainer.own_loop.fp8_recipes",
    "TERecipeKwargs": "leyden.trainer.own_loop.fp8_recipes",
    "GradientAccumulationPlugin": "leyden.trainer.own_loop.plugins",
    "InitProcessGroupKwargs": "leyden.trainer.own_loop.plugins",
    "ProfileKwargs": "leyden.trainer.own_loop.plugins",
    "ProjectConfiguration": "leyden.trainer.own_loop.plugins",
    "GeneralTracker": "leyden.trainer.own_loop.tracking",
    "PartialState": "leyden.trainer.own_loop.ranks",
    "find_executable_batch_size": "leyden.trainer.own_loop.memory",
    "release_memory": "leyden.trainer.own_loop.memory",
    "skip_first_batches": "leyden.trainer.own_loop.loader",
    "DeepSpeedPlugin": "leyden.trainer.own_loop.deepspeed",
    "DummyOptim": "leyden.trainer.own_loop.deepspeed",
    "DummyScheduler": "leyden.trainer.own_loop.deepspeed",
    "FullyShardedDataParallelPlugin": "leyden.trainer.own_loop.plugins",
    "LocalSGD": "leyden.trainer.own_loop.local_sgd",
    "get_logger": "leyden.trainer.own_loop.rank_logging",
    "notebook_launcher": "leyden.trainer.own_loop.notebook",
    "set_seed": "leyden.trainer.own_loop.seeds",
    "DistributedType": "leyden.trainer.own_loop.ranks",
    "DDPCommunicationHookType": "leyden.trainer.own_loop.names",
    "ParallelismConfig": "leyden.trainer.own_loop.parallel",
    "TorchDynamoPlugin": "leyden.trainer.own_loop.plugins",
    "debug_launcher": "leyden.trainer.own_loop.notebook",
    "synchronize_rng_states": "leyden.trainer.own_loop.world",
}
_MODULES = (
    "accelerator",
    "big_modeling",
    "data_loader",
    "launchers",
    "local_sgd",
    "logging",
    "optimizer",
    "parallelism_config",
    "scheduler",
    "state",
    "tracking",
    "utils",
)
"""Modules of Accelerate's names, which scripts also reach as attributes."""

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback as Callback
    from leyden.strategies.errors import ConfigurationError as ConfigurationError
    from leyden.strategies.errors import LeydenError as LeydenError
    from leyden.trainer.accelerator import Accelerator as Accelerator
    from leyden.trainer.checkpoint.errors import CheckpointError as CheckpointError
    from leyden.trainer.data.combined import CombinedLoader as CombinedLoader
    from leyden.trainer.data.rng import seed_everything as seed_everything
    from leyden.trainer.datamodule import DataModule as DataModule
    from leyden.trainer.module import TrainModule as TrainModule
    from leyden.trainer.own_loop.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
    from leyden.trainer.own_loop.deepspeed import DummyOptim as DummyOptim
    from leyden.trainer.own_loop.deepspeed import DummyScheduler as DummyScheduler
    from leyden.trainer.own_loop.fp8_recipes import AORecipeKwargs as AORecipeKwargs
    from leyden.trainer.own_loop.fp8_recipes import FP8RecipeKwargs as FP8RecipeKwargs
    from leyden.trainer.own_loop.fp8_recipes import MSAMPRecipeKwargs as MSAMPRecipeKwargs
    from leyden.trainer.own_loop.fp8_recipes import TERecipeKwargs as TERecipeKwargs
    from leyden.trainer.own_loop.loader import skip_first_batches as skip_first_batches
    from leyden.trainer.own_loop.local_sgd import LocalSGD as LocalSGD
    from leyden.trainer.own_loop.memory import find_executable_batch_size as find_executable_batch_size
    from leyden.trainer.own_loop.memory import release_memory as release_memory
    from leyden.trainer.own_loop.names import DDPCommunicationHookType as DDPCommunicationHookType
    from leyden.trainer.own_loop.notebook import debug_launcher as debug_launcher
    from leyden.trainer.own_loop.notebook import notebook_launcher as notebook_launcher
    from leyden.trainer.own_loop.parallel import ParallelismConfig as ParallelismConfig
    from leyden.trainer.own_loop.plugins import AutocastKwargs as AutocastKwargs
    from leyden.trainer.own_loop.plugins import DataLoaderConfiguration as DataLoaderConfiguration
    from leyden.trainer.own_loop.plugins import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from leyden.trainer.own_loop.plugins import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from leyden.trainer.own_loop.plugins import GradientAccumulationPlugin as GradientAccumulationPlugin
    from leyden.trainer.own_loop.plugins import GradScalerKwargs as GradScalerKwargs
    from leyden.trainer.own_loop.plugins import InitProcessGroupKwargs as InitProcessGroupKwargs
    from leyden.trainer.own_loop.plugins import ProfileKwargs as ProfileKwargs
    from leyden.trainer.own_loop.plugins import ProjectConfiguration as ProjectConfiguration
    from leyden.trainer.own_loop.plugins import TorchDynamoPlugin as TorchDynamoPlugin
    from leyden.trainer.own_loop.rank_logging import get_logger as get_logger
    from leyden.trainer.own_loop.ranks import DistributedType as DistributedType
    from leyden.trainer.own_loop.ranks import PartialState as PartialState
    from leyden.trainer.own_loop.seeds import set_seed as set_seed
    from leyden.trainer.own_loop.tracking import GeneralTracker as GeneralTracker
    from leyden.trainer.own_loop.world import synchronize_rng_states as synchronize_rng_states
    from leyden.trainer.trainer import Trainer as Trainer

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that `import leyden` costs next to nothing."""
    if name in _MODULES:
        return importlib.import_module(f"leyden.{name}")
    if name.startswith("_"):
        raise AttributeError(f"module 'leyden' has no attribute {name!r}")
    if name not in _HOMES:
        from leyden.trainer.own_loop.absent import attribute

        return attribute("leyden", name)
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
