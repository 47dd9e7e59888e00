"""The end of a run that is preempted: its grace period, its exit code, and its way back to SLURM's queue."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from leyden.strategies.launch.leaving import note_exit

if TYPE_CHECKING:
    from leyden.strategies.ranks import Ranks
    from leyden.trainer.events.preemption import Preemption
    from leyden.trainer.events.signals import Signals

ANSWER = 60.0
"""Seconds in which scontrol must answer."""


class Departure:
    """Ends a run that is preempted: polls for notices, keeps to the grace period, notes the exit code, requeues.

    If `should_preempt` or a grace period was given, a thread beside the run asks the one and watches the other. Where
    there are several ranks, the first of each machine asks, since a cloud announces a machine's end on that machine.

    Args:
        preemption: as the user gave it; None without one.
        signals: those that came to this rank.
        ranks: of the run.
        where: says how far the run is, for a message.
        release: gives up what the run holds, before its process ends without a tear-down.
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
        self._over = threading.Event()
        self._leaving = threading.Lock()
        self._has_left = self._has_warned = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Departure:
        preemption = self._preemption
        if preemption is not None and (preemption.should_preempt is not None or preemption.grace is not None):
            self._thread = threading.Thread(target=self._look, args=(preemption,), name="leyden-preempt", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            # Not for long: it may wait for a server.
            self._thread.join(0.1)

    def leave(self) -> None:
        """Notes the exit code for the launcher, and hands a job of SLURM back to the queue; once."""
        preemption, came = self._preemption, self._signals.preempting
        if preemption is None or came is None:
            return
        with self._leaving:
            if self._has_left:
                return
            self._has_left = True
            note_exit(preemption.exit_code)
            job = job_of_slurm()
            if job is not None and preemption.requeues(came) and self._ranks.is_global_zero:
                requeue(job)

    # the thread -------------------------------------------------------------------------------------------------------
    def _look(self, preemption: Preemption) -> None:
        signals, grace = self._signals, preemption.grace
        asks = preemption.should_preempt if self._ranks.local_rank == 0 else None
        pauses = [preemption.poll_every] if asks is not None else []
        pauses += [min(1.0, grace / 10)] if grace is not None else []
        next_call = 0.0
        while pauses and not self._over.wait(min(pauses)):
            now = time.monotonic()
            if asks is not None and signals.came_at is None and now >= next_call:
                next_call = now + preemption.poll_every
                if self._says_so(asks):
                    signals.notice()
            if grace is not None and signals.came_at is not None and now - signals.came_at >= grace:
                self._end_here(grace, preemption.exit_code)

    def _says_so(self, asks: Callable[[], bool]) -> bool:
        try:
            return bool(asks())
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"should_preempt raised {type(error).__name__}: {error}. It is asked again every poll_every "
                    "seconds; this is said once.",
                    stacklevel=2,
                )
            return False

    def _end_here(self, grace: float, exit_code: int) -> None:
        """Ends this process wherever it is: the main thread may wait for anything."""
        if self._over.is_set() or self._signals.preempting is None:
            return
        where = f"rank {self._ranks.global_rank}, {self._where()}"
        saved = self._signals.interruption is not None
        done = "it is saved, and its end was cut off" if saved else "it is not saved, and the checkpoint before counts"
        print(f"leyden: the grace period of {grace:g} s is over ({where}): {done}.", file=sys.stderr, flush=True)
        self.leave()
        self._release()
        os._exit(exit_code)


def job_of_slurm(environ: Mapping[str, str] | None = None) -> str | None:
    """The job of SLURM that this process belongs to, as scontrol names it; None outside of SLURM.

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
    """Hands a job back to SLURM's queue; a failure becomes a warning, since the run is saved already."""
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=ANSWER)
        reason = "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason:
        warnings.warn(
            f"scontrol requeue {job} failed: {reason}. The run is saved: submit the job again, with --requeue if the "
            "cluster asks for it.",
            stacklevel=3,
        )
    else:
        print(f"leyden: job {job} is requeued", flush=True)
