"""How a run ends, by itself, by a signal or by an error: hooks are called, loggers closed, and other ranks told."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from leyden.trainer.run import advice
from leyden.trainer.run import summary as plan

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer


def in_order(trainer: Trainer, stage: str) -> None:
    """Ends a run without an error. If a signal ended it, `on_exception` is called, and the interruption raised at last."""
    interruption = trainer.signals.exception()
    if interruption is None:
        _finalize(trainer, "success")
        if stage == "fit":
            _announce(trainer)
        return
    _tell_listeners(trainer, interruption)
    _finalize(trainer, "interrupted")
    if stage == "fit":
        last = trainer.last_checkpoint
        where = f"the last checkpoint is {last}" if last else "no checkpoint was saved"
        trainer.print(f"\nstopped at step {trainer.global_step}, epoch {trainer.current_epoch}: {where}")
    raise interruption


def _announce(trainer: Trainer) -> None:
    """Says why a fit ended, how long it took, and where the best checkpoint is; and warns of what went wrong in silence."""
    if trainer._fit is not None and not trainer.arguments.barebones:
        trainer.print(plan.closing_lines(trainer, trainer._fit.reason(), trainer._fit.seconds()))
    trainer.logs.nans.warn()


def by_error(trainer: Trainer, error: BaseException) -> None:
    """Tells other ranks, hooks and loggers of an error, in this order; the caller raises it again.

    Raises:
        SystemExit: where the error only follows from another rank's, which is told there.
        LeydenError: in its place, in words that say what to do, where more is known.
    """
    if error is trainer.signals.interruption:
        return
    better, place = advice.in_better_words(trainer, error), advice.where(trainer)
    is_first = trainer.strategy.report_failure(better, place)
    # Where there are several ranks, the report has told the place.
    advice.annotate(trainer, better, place if trainer.world_size == 1 else "")
    _tell_listeners(trainer, error)
    try:
        _finalize(trainer, "failed")
    except Exception as second:
        _warn_of_second(second)
    if not is_first:
        raise SystemExit(1) from None
    if better is not error:
        raise better from error


def teardown(trainer: Trainer, stage: str, run_error: BaseException | None) -> None:
    """Calls everybody's `teardown`, the DataModule's first; one that raises keeps nobody else from theirs.

    Args:
        trainer: of the run.
        stage: what ran.
        run_error: what ended the run, if it failed: that is what its user must see, so others are only warned of.
    """
    errors: list[Exception] = []
    if trainer.datamodule is not None:
        try:
            trainer.datamodule.teardown(stage)
        except Exception as error:
            errors.append(error)
    errors += trainer.hooks.fire_each("teardown", stage)
    for second in errors[run_error is None :]:
        _warn_of_second(second, "was torn down")
    if errors and run_error is None:
        raise errors[0]


def _tell_listeners(trainer: Trainer, error: BaseException) -> None:
    for second in trainer.hooks.fire_each("on_exception", error):
        _warn_of_second(second)
    if trainer.datamodule is not None:
        try:
            trainer.datamodule.on_exception(error)
        except Exception as second:
            _warn_of_second(second)


def _warn_of_second(error: Exception, what: str = "failed") -> None:
    warnings.warn(f"while the run {what}, {type(error).__name__} was raised too: {error}", stacklevel=3)


def _finalize(trainer: Trainer, status: str) -> None:
    for logger in trainer.loggers if trainer.is_global_zero else ():
        logger.finalize(status)
    if trainer.profiler is not None and trainer.state.stage is not None:
        text = trainer.profiler.finish(trainer.state.stage)
        if text:
            trainer.print(text)
