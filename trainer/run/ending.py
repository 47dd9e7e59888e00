"""How a run ends, by itself, by a signal or by an error: hooks are called, loggers closed, and other ranks informed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from leyden.trainer.data.workers import died
from leyden.trainer.run.reporting import advice

if TYPE_CHECKING:
    from leyden.trainer.run.state import Run


def in_order(run: Run, last_words: Callable[[], str | None], leave: Callable[[], None]) -> None:
    """Ends a run without an error.

    Args:
        run: the run.
        last_words: composes what is printed when the loggers are closed; None for nothing.
        leave: announces that the run was preempted, if it was.

    Raises:
        KeyboardInterrupt: if Ctrl-C ended the run; `on_exception` was called before.
        SystemExit: if SIGTERM or a preemption did.
    """
    interruption = run.signals.exception()
    if interruption is not None:
        _call_on_exception(run, interruption)
    run.finalize("success" if interruption is None else "interrupted")
    words = last_words()
    if words is not None:
        run.print(words)
    # Last: SLURM ends what is left of a job that is requeued.
    leave()
    if interruption is not None:
        raise interruption


def by_error(run: Run, error: BaseException, owners: Iterable[object]) -> None:
    """Reports an error to other ranks, hooks and loggers, in this order; the caller raises it again.

    Args:
        run: what failed.
        error: what ended it.
        owners: the objects whose methods users call.

    Raises:
        SystemExit: where the error only follows from another rank's, which reports it.
        LeydenError: in its place, in words that say what to do, where more is known.
    """
    if error is run.signals.interruption:
        return
    # First, since SIGCHLD may raise it again anywhere below.
    dead = died(error)
    run.saves.end()
    if run.strategy.ranks.world_size == 1 and not isinstance(error, KeyboardInterrupt):
        # On several ranks the others may be anywhere, so that a save under way may never be finished. A second Ctrl-C
        # asks for the end now.
        _warn_of(_raised(run.saves.wait))
    ranks, better, place = run.strategy.ranks, dead or advice.in_better_words(run, error, owners), advice.where(run)
    is_first = ranks.report_failure(better, place)
    # Where there are several ranks, the report names the place.
    advice.annotate(run, better, place if ranks.world_size == 1 else "")
    _call_on_exception(run, error)
    _warn_of(_raised(run.finalize, "failed"))
    if not is_first:
        raise SystemExit(1) from None
    if better is not error:
        raise better from error


def call_teardown(run: Run, run_error: BaseException | None) -> None:
    """Calls everybody's `teardown`, the DataModule's first; one that raises keeps nobody else from theirs.

    Args:
        run: the run.
        run_error: what ended it, if it failed. The user must see that error, so others are only warned of.
    """
    stage = run.state.stage
    errors = [] if run.datamodule is None else _raised(run.datamodule.teardown, stage)
    errors += run.hooks.fire_each("teardown", stage)
    _warn_of(errors[run_error is None :], "was torn down")
    if errors and run_error is None:
        raise errors[0]


def _call_on_exception(run: Run, error: BaseException) -> None:
    """Calls everybody's `on_exception`, the DataModule's last; one that raises keeps nobody else from theirs."""
    errors = run.hooks.fire_each("on_exception", error)
    errors += [] if run.datamodule is None else _raised(run.datamodule.on_exception, error)
    _warn_of(errors)


def _raised(call: Callable[..., Any], *args: Any) -> list[Exception]:
    """What a call raises, which keeps nobody else from theirs; at most one error."""
    try:
        call(*args)
    except Exception as error:
        return [error]
    return []


def _warn_of(errors: Iterable[Exception], what: str = "failed") -> None:
    for error in errors:
        warnings.warn(f"while the run {what}, {type(error).__name__} was raised too: {error}", stacklevel=3)
