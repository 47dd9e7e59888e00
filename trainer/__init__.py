"""The loop: Trainer, TrainModule, DataModule and what they are made of.

Where to start: `hooks.py` gives the order of a run, `loops/fit.py` is the loop, `loops/step.py` what a batch does to the weights.
Then `trainer.py`, which puts the parts together, and `engine.py`, which Trainer and Accelerator both drive.

    module.py datamodule.py hparams.py       what users subclass
    arguments.py parts.py launched.py        the Trainer's arguments, and the parts made of them
    optimization.py prepared.py              optimizers and schedulers
    logs.py epoch_values.py metrics.py       `self.log`
    sources.py transfer.py data/             loaders, and the way of a batch to the device
    checkpoint/                              saving and resuming
    agreement.py differences.py gathering.py debugging.py     what several ranks must agree on
    launching.py signals.py ending.py        how a run starts its ranks, and how it ends
    accelerator.py own_loop/                 the Accelerator, for the user's own training loop
    cli/                                     the command line
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Accelerator": "leyden.trainer.accelerator.accelerator",
    "CombinedLoader": "leyden.trainer.data.combined",
    "DataModule": "leyden.trainer.datamodule",
    "TrainModule": "leyden.trainer.module",
    "Trainer": "leyden.trainer.trainer",
    "seed_everything": "leyden.trainer.data.rng",
}

if TYPE_CHECKING:
    from leyden.trainer.accelerator.accelerator import Accelerator as Accelerator
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
