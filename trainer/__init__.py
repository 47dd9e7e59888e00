"""The Trainer, the Accelerator, and the rooms of one run.

Start with `events/hooks.py`, which gives the order of a run. `trainer.py` turns arguments into parts and starts runs;
`run/state.py` has the Run, which sets itself up; `loops/fit.py` drives it, and `loops/step.py` turns one batch into an
optimizer step.

    trainer.py view.py                       the Trainer and what callbacks read of it
    module.py datamodule.py hparams.py       what users subclass
    profilers.py plugins.py                  what two of the Trainer's arguments take
    arguments/                               the Trainer's arguments: defaults, checks, and which ones were given
    launched.py                              what `leyden launch` adds to them
    run/                                     one run: its parts, its ranks, how it is saved, resumed and ended
    loops/                                   fit, validation, evaluation, prediction, and the optimizer step
    events/                                  hooks, progress, signals, preemption, and the stage of a run
    engine/                                  what Trainer and Accelerator both drive: windows, optimizers, schedulers
    logging/                                 `self.log`
    data/                                    loaders that resume, sharding, random numbers
    tuning/                                  searches of a learning rate or a batch size, by trials of copies
    checkpoint/ format/                      checkpoints: reading and writing; the bytes
    accelerator/                             the Accelerator, for a training loop of your own
    cli/                                     the command line

Rooms import downwards only; `tests/test_imports.py` has their order.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Accelerator": "leyden.trainer.accelerator.accelerator",
    "AsyncCheckpointIO": "leyden.trainer.plugins",
    "CheckpointIO": "leyden.trainer.checkpoint.checkpoint_io",
    "CombinedLoader": "leyden.trainer.data.combined",
    "DataModule": "leyden.trainer.datamodule",
    "Preemption": "leyden.trainer.events.preemption",
    "TrainModule": "leyden.trainer.module",
    "Trainer": "leyden.trainer.trainer",
    "Tuner": "leyden.trainer.tuning.tuner",
    "seed_everything": "leyden.trainer.data.rng",
}

if TYPE_CHECKING:
    from leyden.trainer.accelerator.accelerator import Accelerator as Accelerator
    from leyden.trainer.checkpoint.checkpoint_io import CheckpointIO as CheckpointIO
    from leyden.trainer.data.combined import CombinedLoader as CombinedLoader
    from leyden.trainer.data.rng import seed_everything as seed_everything
    from leyden.trainer.datamodule import DataModule as DataModule
    from leyden.trainer.events.preemption import Preemption as Preemption
    from leyden.trainer.module import TrainModule as TrainModule
    from leyden.trainer.plugins import AsyncCheckpointIO as AsyncCheckpointIO
    from leyden.trainer.trainer import Trainer as Trainer
    from leyden.trainer.tuning.tuner import Tuner as Tuner

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used. In a checkout `trainer` is this package too, with the very same classes."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
