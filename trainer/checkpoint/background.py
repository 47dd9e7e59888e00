"""Checkpoints that are written beside the training: one at a time, by a thread."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from leyden.strategies.base import Strategy
from leyden.trainer.checkpoint.copies import Copies, HostMemory, Key, WrittenWhileCopied, addresses_of, calls_hooks
from leyden.trainer.checkpoint.writer import CheckpointWriter
from leyden.trainer.events.hooks import Hooks
from leyden.trainer.format.errors import CheckpointError

_ABANDONED = 5.0
"""Seconds in which a thread must end whose ranks are gone."""


def is_possible(strategy: Strategy) -> bool:
    """Returns False, with one warning, under a strategy whose checkpoints cannot be written beside its training."""
    reason = strategy.refusals.get("asynchronous")
    if reason is not None and strategy.ranks.is_global_zero:
        # Python shows a warning of the same words once.
        warnings.warn(f"asynchronous saving with strategy={strategy.name!r}: {reason}.", stacklevel=5)
    return reason is None


class PendingSave:
    """A checkpoint that a thread writes.

    Args:
        writer: of the checkpoint, which has taken everything.
        stack: closes the writer.
        copies: that the thread makes first.
        facts: arguments of the writer's `commit`.
        holds_exit: the end of the process waits for it.
        committed: called by the thread with the path of the committed checkpoint; None for nothing.

    Attributes:
        path: where the checkpoint is going to be; where it is, once it is committed.
        error: what the thread raised, if it did.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        stack: ExitStack,
        copies: Copies,
        facts: Mapping[str, Any],
        holds_exit: bool = False,
        committed: Callable[[Path], None] | None = None,
    ) -> None:
        self.path = writer.planned
        self.error: BaseException | None = None
        self._writer, self._stack, self._copies, self._facts = writer, stack, copies, facts
        self._committed = committed
        self._follower: Callable[[Path], None] | None = None
        self._following = threading.Lock()
        self._is_committed = False
        self._thread = threading.Thread(target=self._run, name="leyden-save", daemon=not holds_exit)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True once it is committed and followed, or has failed."""
        return not self._thread.is_alive()

    @property
    def is_committed(self) -> bool:
        """True once the checkpoint is where it is going to be."""
        return self._is_committed

    @property
    def is_first(self) -> bool:
        """True on the rank that writes what all ranks have in common."""
        return self._writer.is_first

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the thread. On several ranks, all call it."""
        self._thread.join(timeout)

    def follow(self, follower: Callable[[Path], None]) -> None:
        """Has the thread call a function with the path of the committed checkpoint; here, if it is committed already.

        Args:
            follower: deletes old checkpoints, say.
        """
        with self._following:
            if not self._is_committed:
                self._follower = follower
                return
        follower(self.path)

    def _run(self) -> None:
        try:
            with self._stack:
                self._copies.run()
                self._writer.write()
                self._copies.confirm()
                path = self._writer.commit(**self._facts)
            with self._following:
                self.path, self._is_committed = path, True
            if self._committed is not None:
                self._committed(path)
            if self._follower is not None:
                self._follower(path)
        except BaseException as error:
            self.error = error


class BackgroundSaves:
    """The saves of a run that are written beside it.

    From the beginning of a save until its end is noticed, every optimizer has a hook before its step. It waits for the
    copies, and raises what the thread raised. So does every hook of the user's own, before it is called. The first
    save's hook may stay until the next save, since it also finds out what else writes. A run in which nothing is saved
    has no hook at all.

    Args:
        holds_exit: the end of the process waits for the last save; False where something else does, as the end of fit.
    """

    def __init__(self, holds_exit: bool = False) -> None:
        self._holds_exit = holds_exit
        self._memory: HostMemory | None = None
        self._written: set[Key] | None = None
        """Names of what other things than steps write; None until the first save has been compared."""
        self._pending: PendingSave | None = None
        self._copies: Copies | None = None
        """Those that are not known to be made yet."""
        self._handles: list[RemovableHandle] = []
        self._hooks: Hooks | None = None
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """True once the run ends, so that no save is begun beside it any more."""
        return self._is_over

    @property
    def pending(self) -> PendingSave | None:
        """The save that is not known to be done; None without one."""
        return self._pending

    def take(self, optimizers: Iterable[Optimizer]) -> Copies:
        """Begins a save, once the one before is done.

        Args:
            optimizers: what they step is copied beside the run, and everything else at once.

        Raises:
            CheckpointError: if the save before failed.
        """
        self.wait()
        self._forget()
        if self._memory is None:
            self._memory = HostMemory()
        stepped = addresses_of(optimizers)
        return Copies(self._memory, stepped, self._written if stepped else ())

    def start(
        self,
        writer: CheckpointWriter,
        stack: ExitStack,
        copies: Copies,
        facts: Mapping[str, Any],
        optimizers: Iterable[Optimizer],
        hooks: Hooks | None,
        committed: Callable[[Path], None] | None = None,
    ) -> PendingSave:
        """Starts the thread; the writer has taken everything.

        Args:
            writer: of the checkpoint.
            stack: closes the writer.
            copies: that `take` returned.
            facts: arguments of the writer's `commit`.
            optimizers: each of those whose step calls torch's hooks waits before it.
            hooks: of the run, which wait too; None without any.
            committed: see `PendingSave`.
        """
        copies.begin()
        self._copies, self._hooks = copies, hooks
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step) for optimizer in filter(calls_hooks, optimizers)
        ]
        if hooks is not None:
            hooks.precede(self.finish_copies)
        self._pending = PendingSave(writer, stack, copies, facts, self._holds_exit, committed)
        return self._pending

    def finish_copies(self) -> None:
        """Waits until everything is copied, before anything but a step changes it.

        Raises:
            CheckpointError: if something has changed it already.
        """
        copies, pending = self._copies, self._pending
        if copies is None or pending is None:
            return
        if self._hooks is not None:
            self._hooks.precede(None)
        try:
            copies.finish()
        except WrittenWhileCopied as error:
            pending.join(_ABANDONED)
            self._forget()
            raise CheckpointError(pending.path, f"is not saved: {error}") from error
        except BaseException:
            # Ctrl-C, say: nobody is going to wait for the copies again, and the thread must end.
            copies.abandon()
            raise
        finally:
            if not copies.is_first:
                self._copies = None

    def wait(self) -> None:
        """Waits until nothing is pending.

        Raises:
            CheckpointError: if the save failed; its cause is what the thread raised.
        """
        self.finish_copies()
        pending = self._pending
        if pending is not None:
            pending.join()
            self._settle(pending)

    def end(self) -> None:
        """Says that the run ends: what is saved from here on is saved at once."""
        self._is_over = True

    def release(self) -> None:
        """Waits, and frees the memory for copies."""
        self.wait()
        self._forget()
        self._memory = self._written = None

    def close(self) -> None:
        """Ends the run's saves after an error: one that cannot be finished, since other ranks are gone, is dropped."""
        pending, copies = self._pending, self._copies
        if copies is not None:
            copies.abandon()
        self._forget()
        self._memory = self._written = None
        if pending is None:
            return
        pending.join(_ABANDONED)
        if not pending.is_committed and pending.is_first:
            warnings.warn(
                f"{pending.path} was not saved, since the run ended by an error first; earlier checkpoints are whole.",
                stacklevel=2,
            )

    def _before_step(self, *args: object) -> None:
        copies, pending = self._copies, self._pending
        self.finish_copies()
        if copies is not None and copies.is_first:
            self._written, self._copies = copies.changed(), None
        if pending is not None and pending.is_done and pending.error is not None:
            self._settle(pending)

    def _settle(self, pending: PendingSave) -> None:
        if pending.error is None and self._copies is not None and self._copies.is_first:
            # It is done before the step at which it is found out what else writes.
            self._drop_pending()
        else:
            self._forget()
        if pending.error is not None:
            cause = f"{type(pending.error).__name__}: {pending.error}"
            raise CheckpointError(
                pending.path, f"was not saved, and earlier checkpoints are whole: {cause}"
            ) from pending.error

    def _forget(self) -> None:
        self._drop_pending()
        for handle in self._handles:
            handle.remove()
        self._handles, self._copies = [], None

    def _drop_pending(self) -> None:
        if self._hooks is not None:
            self._hooks.precede(None)
        self._hooks = self._pending = None
