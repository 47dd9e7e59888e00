"""Ends a run, whether it finished, was interrupted or failed: calls hooks, closes loggers, informs other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from leyden.core.rank_zero import warn
from leyden.launch.leaving import is_quiet, raise_quietly

if TYPE_CHECKING:
    from leyden.trainer.run import Run


def end_normally(run: Run, last_words: Callable[[], str | None], leave: Callable[[], None]) -> None:
    """Ends a run that finished, or that a signal interrupted.

    Args:
        run: the run.
        last_words: returns the text to print after the loggers have closed; None for nothing.
        leave: announces that the run was preempted, if it was.

    Raises:
        KeyboardInterrupt: if Ctrl-C ended the run. `on_exception` has been called before.
        SystemExit: if SIGTERM or a preemption ended it.
    """
    interruption = run.signals.exception()
    if interruption is not None:
        _call_on_exception(run, interruption)
    run.finalize("success" if interruption is None else "interrupted")
    words = last_words()
    if words is not None:
        run.report(words)
    # Last, because SLURM kills the processes of a job as soon as it is requeued.
    leave()
    # A signal may also have come while the loggers closed.
    interruption = interruption or run.signals.exception()
    if interruption is not None:
        raise_quietly(interruption)


@contextmanager
def dead_workers_named() -> Iterator[None]:
    """Replaces an error that a loader's dead worker caused by one that names the worker.

    SIGCHLD may arrive after the first error, and torch's handler then raises a second one wherever the main thread is.
    So this waits for the worker's end before anything else reacts to the error.
    """
    try:
        yield
    except Exception as error:
        from leyden.data.workers import died

        dead = died(error)
        if dead is None:
            raise
        raise dead from error


def end_with_error(
    run: Run, error: BaseException, owners: Iterable[object], last_words: Callable[[], str | None]
) -> None:
    """Reports an error to the other ranks, the hooks and the loggers, in this order. The caller re-raises it.

    Args:
        run: the run that failed.
        error: the error that ended it.
        owners: the objects whose methods users call.
        last_words: returns the text to print after a second Ctrl-C; None for nothing.

    Raises:
        SystemExit: if the error is a consequence of another rank's error, which that rank reports.
        LeydenError: in place of the error, if the cause and a fix are known.
    """
    from leyden.data.workers import died
    from leyden.trainer.reporting import advice

    if error is run.signals.interruption:
        return
    run.saves.end()
    if run.strategy.ranks.world_size == 1 and not isinstance(error, KeyboardInterrupt):
        # On several ranks a pending save may never finish, because the other ranks may be anywhere. A second Ctrl-C
        # means to end immediately.
        _warn_of(_errors_of(run.saves.wait))
    ranks, place = run.strategy.ranks, advice.where(run)
    # Not None if SIGCHLD arrived before `dead_workers_named` could wait for it.
    better = died(error) or advice.in_better_words(run, error, owners)
    is_first = run.strategy.report_failure(better, place)
    # On several ranks, the failure report already names the place.
    advice.annotate(run, better, place if ranks.world_size == 1 else "")
    _call_on_exception(run, error)
    # A second Ctrl-C does not wait for the end of the step.
    _warn_of(_errors_of(run.finalize, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"))
    if is_quiet(error):
        run.report(last_words() or "")
    if not is_first:
        raise SystemExit(1) from None
    if better is not error:
        raise better from error


def call_teardown(run: Run, run_error: BaseException | None) -> None:
    """Calls every `teardown` hook, the DataModule's first. An error in one does not keep the others from running.

    Args:
        run: the run.
        run_error: the error that ended the run; None if it succeeded. The user must see that error, so errors of
            `teardown` are then only warned of.

    Raises:
        Exception: the first error of a `teardown`, if `run_error` is None.
    """
    stage = run.state.stage
    errors = [] if run.datamodule is None else _errors_of(run.datamodule.teardown, stage)
    errors += run.hooks.fire_each("teardown", stage)
    _warn_of(errors[run_error is None :], "was torn down")
    if errors and run_error is None:
        raise errors[0]


def _call_on_exception(run: Run, error: BaseException) -> None:
    """Calls every `on_exception` hook, the DataModule's last. An error in one does not keep the others from running."""
    errors = run.hooks.fire_each("on_exception", error)
    errors += [] if run.datamodule is None else _errors_of(run.datamodule.on_exception, error)
    _warn_of(errors)


def _errors_of(call: Callable[..., Any], *args: Any) -> list[Exception]:
    """Calls a function and returns the error that it raised, if any, as a list for `_warn_of`."""
    try:
        call(*args)
    except Exception as error:
        return [error]
    return []


def _warn_of(errors: Iterable[Exception], what: str = "failed") -> None:
    for error in errors:
        warn(f"while the run {what}, {type(error).__name__} was also raised: {error}", every_rank=True)
