"""What a training run is: the Trainer, the module that it trains, and the loop.

Start with `events/hooks.py`, which lists the order of a run. `trainer.py` builds the parts and starts runs; `run.py`
has the Run, which sets itself up; `loops/fit.py` drives a fit, and `loops/step.py` turns a batch into an optimizer
step.

    trainer.py view.py                       the Trainer, and the properties that callbacks read
    module.py datamodule.py hparams.py       base classes for users
    profilers.py plugins.py                  values of the Trainer's `profiler` and `plugins`
    arguments/ launched.py                   the Trainer's arguments: defaults, checks, and those of `leyden launch`
    run.py starting/ saved/ reporting/ ending.py    one run: its parts, how it starts, is saved, resumed and ended
    loops/                                   fit, validation, evaluation, prediction, and the optimizer step
    events/                                  hooks, progress, signals, preemption, and the stage of a run
    engine/                                  shared by Trainer and Accelerator: windows, optimizers, schedulers
    logging/                                 `self.log`
    tuning/                                  searches for a learning rate or a batch size, with trials of copies

What serves these rooms is in `leyden/`: `core/`, `launch/`, `data/`, `checkpoint/`, `accelerator/`, `compat/`, `cli/`.
A room imports only from rooms below it; `tests/test_imports.py` has their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.core.lazy import lazy_name

_HOMES = {
    "Accelerator": "leyden.accelerator.accelerator",
    "AsyncCheckpointIO": "leyden.trainer.plugins",
    "CheckpointIO": "leyden.checkpoint.checkpoint_io",
    "CombinedLoader": "leyden.data.combined",
    "DataModule": "leyden.trainer.datamodule",
    "Preemption": "leyden.trainer.events.preemption",
    "TrainModule": "leyden.trainer.module",
    "Trainer": "leyden.trainer.trainer",
    "Tuner": "leyden.trainer.tuning.tuner",
    "seed_everything": "leyden.data.rng",
}

if TYPE_CHECKING:
    from leyden.accelerator.accelerator import Accelerator as Accelerator
    from leyden.checkpoint.checkpoint_io import CheckpointIO as CheckpointIO
    from leyden.data.combined import CombinedLoader as CombinedLoader
    from leyden.data.rng import seed_everything as seed_everything
    from leyden.trainer.datamodule import DataModule as DataModule
    from leyden.trainer.events.preemption import Preemption as Preemption
    from leyden.trainer.module import TrainModule as TrainModule
    from leyden.trainer.plugins import AsyncCheckpointIO as AsyncCheckpointIO
    from leyden.trainer.trainer import Trainer as Trainer
    from leyden.trainer.tuning.tuner import Tuner as Tuner

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports a name lazily on first use. In a checkout `trainer` is this package too, with the same class objects."""
    return lazy_name(__name__, _HOMES, name)
