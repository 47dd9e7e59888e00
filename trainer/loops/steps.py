"""Which optimisation step a fit has: automatic, manual, or one that cuts its batches into micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leyden.callbacks.gradient_accumulation import AutoAccumulation
from leyden.trainer.loops.step import AutomaticStep, ManualStep, Step

if TYPE_CHECKING:
    from leyden.trainer.loops.schedulers import Schedulers
    from leyden.trainer.run.state import Run


def make_step(run: Run, schedulers: Schedulers) -> Step:
    """Makes the optimisation step of a fit.

    Args:
        run: of the fit.
        schedulers: those of the run.

    Raises:
        ConfigurationError: if something that was asked for does not go with it.
    """
    accumulation, training_step = run.accumulation, run.step_function("training_step")
    if isinstance(accumulation, AutoAccumulation):
        # Imported here, since a step that cuts batches is the rare one.
        from leyden.trainer.loops.auto_step import AutoStep, check_auto

        check_auto(run)
        return AutoStep(run, training_step, schedulers, accumulation)
    kind = AutomaticStep if run.module.automatic_optimization else ManualStep
    if accumulation is None:
        return kind(run, training_step, schedulers, False)
    samples = run.loaders.samples_per_batch
    accumulates = any(accumulation.batches(at, samples) > 1 for at in accumulation.scheduling)
    return kind(run, training_step, schedulers, accumulates)
