"""The end of a preempted run: its grace period, its exit code, and its return to the queue of SLURM or submitit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from leyden.core.environment import submitit_signal
from leyden.core.rank_zero import inform, warn
from leyden.launch.leaving import note_exit

if TYPE_CHECKING:
    from leyden.strategies.ranks import Ranks
    from leyden.trainer.events.preemption import Preemption
    from leyden.trainer.events.signals import Signals

SCONTROL_TIMEOUT = 60.0
"""Seconds that scontrol has to answer."""


class Departure:
    """Ends a preempted run: polls for notices, enforces the grace period, records the exit code, requeues the job.

    If the user set `should_preempt` or a grace period, a background thread polls the one and enforces the other. Local
    rank 0 of each machine polls, since a cloud announces the end of a machine on that machine.

    Args:
        preemption: the user's Preemption; None if there is none.
        signals: the signals received by this rank.
        ranks: the ranks of the run.
        where: a function that describes the position of the run, for a message.
        release: a function that releases the run's resources before the process exits without a teardown.
    """

    def __init__(
        self,
        preemption: Preemption | None,
        signals: Signals,
        ranks: Ranks,
        where: Callable[[], str],
        release: Callable[[], None],
    ) -> None:
        self._preemption, self._signals, self._ranks = preemption, signals, ranks
        self._where, self._release = where, release
        self._ended = threading.Event()
        self._leave_lock = threading.Lock()
        self._has_left = self._has_warned = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Departure:
        preemption = self._preemption
        if preemption is not None and (preemption.should_preempt is not None or preemption.grace is not None):
            self._thread = threading.Thread(target=self._watch, args=(preemption,), name="leyden-preempt", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            # A short timeout, since `should_preempt` may be waiting for a server.
            self._thread.join(0.1)

    def leave(self) -> None:
        """Records the exit code for the launcher, and has a job requeued. Only the first call has an effect.

        `scontrol` requeues a job of SLURM. submitit requeues its jobs itself, once its handler gets its signal back.
        """
        preemption, received = self._preemption, self._signals.preempting
        if preemption is None or received is None:
            return
        with self._leave_lock:
            if self._has_left:
                return
            self._has_left = True
            note_exit(preemption.exit_code, came_here=self._signals.came_at is not None)
            job, submitits = job_of_slurm(), submitit_signal()
            if not preemption.requeues(received) or not self._ranks.is_global_zero:
                return
            if submitits is not None:
                self._signals.owe(submitits)
            elif job is not None:
                requeue(job)

    # the thread -------------------------------------------------------------------------------------------------------
    def _watch(self, preemption: Preemption) -> None:
        signals, grace = self._signals, preemption.grace
        should_preempt = preemption.should_preempt if self._ranks.local_rank == 0 else None
        intervals = [preemption.poll_every] if should_preempt is not None else []
        intervals += [min(1.0, grace / 10)] if grace is not None else []
        next_poll = 0.0
        while intervals and not self._ended.wait(min(intervals)):
            now = time.monotonic()
            if should_preempt is not None and signals.came_at is None and now >= next_poll:
                next_poll = now + preemption.poll_every
                if self._poll(should_preempt):
                    signals.notice()
            if grace is not None and signals.came_at is not None and now - signals.came_at >= grace:
                self._end_process(grace, preemption.exit_code)

    def _poll(self, should_preempt: Callable[[], bool]) -> bool:
        """Returns the result of `should_preempt`; False, with a warning the first time, if it raises."""
        try:
            return bool(should_preempt())
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                warn(
                    f"should_preempt raised {type(error).__name__}: {error}. It is called again every poll_every "
                    "seconds. Further errors are not reported.",
                    every_rank=True,
                )
            return False

    def _end_process(self, grace: float, exit_code: int) -> None:
        """Ends this process immediately, whatever the main thread is waiting for."""
        if self._ended.is_set() or self._signals.preempting is None:
            return
        where = f"rank {self._ranks.global_rank}, {self._where()}"
        saved = self._signals.interruption is not None
        outcome = (
            "The run is saved, but its shutdown was cut short."
            if saved
            else "The run is not saved; the next start continues from the previous checkpoint."
        )
        print(f"leyden: the grace period of {grace:g} s has ended ({where}). {outcome}", file=sys.stderr, flush=True)
        self.leave()
        self._release()
        os._exit(self._signals.settle(exit_code))


def job_of_slurm(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the id of this process's SLURM job in scontrol's format; None outside of SLURM.

    Example:
        >>> job_of_slurm({"SLURM_JOB_ID": "17"})
        '17'
        >>> job_of_slurm({"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"})
        '17_2'
    """
    environ = os.environ if environ is None else environ
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")


def requeue(job: str) -> None:
    """Requeues a SLURM job. A failure becomes a warning, since the run is already saved."""
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=SCONTROL_TIMEOUT)
        reason = "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason:
        warn(
            f"scontrol requeue {job} failed: {reason}. The run is saved: submit the job again, with --requeue if the "
            "cluster requires it.",
            every_rank=True,
        )
    else:
        inform(f"leyden: requeued job {job}", every_rank=True)
