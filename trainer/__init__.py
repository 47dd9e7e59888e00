"""The loop: Trainer, TrainModule, DataModule and what they are made of."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Accelerator": "leyden.trainer.accelerator",
    "CombinedLoader": "leyden.trainer.data.combined",
    "DataModule": "leyden.trainer.datamodule",
    "TrainModule": "leyden.trainer.module",
    "Trainer": "leyden.trainer.trainer",
    "seed_everything": "leyden.trainer.data.rng",
}

if TYPE_CHECKING:
    from leyden.trainer.accelerator import Accelerator as Accelerator
    from leyden.trainer.data.combined import CombinedLoader as CombinedLoader
    from leyden.trainer.data.rng import seed_everything as seed_everything
    from leyden.trainer.datamodule import DataModule as DataModule
    from leyden.trainer.module import TrainModule as TrainModule
    from leyden.trainer.trainer import Trainer as Trainer

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used. In a checkout `trainer` is this package too, and gives the very same classes."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
