"""Writes checkpoints one at a time: at once, or by a thread while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from leyden.checkpoint.format.bucket import BucketPath, Place
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.shard_plan import ShardPlans
from leyden.core.rank_zero import warn

if TYPE_CHECKING:
    from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
    from leyden.checkpoint.copies import Copies, HostMemory, Key
    from leyden.checkpoint.lock import RunLock
    from leyden.checkpoint.writer import CheckpointWriter
    from leyden.strategies.base import Strategy
    from leyden.trainer.events.hooks import Hooks

_ABANDONED = 5.0
"""Seconds to wait for the thread of an abandoned save."""


def is_possible(strategy: Strategy) -> bool:
    """Returns False, with one warning, for a strategy that does not support saving in the background."""
    reason = strategy.refusals.get("asynchronous")
    if reason is not None and strategy.ranks.is_global_zero:
        # Python shows identical warnings only once.
        warn(f"asynchronous saving with strategy={strategy.name!r}: {reason}.")
    return reason is None


def _sweep(folder: BucketPath) -> None:
    from leyden.checkpoint.staged import sweep

    # What cannot be deleted now stays until the next run.
    with suppress(OSError):
        sweep(folder, None)


class PendingSave:
    """A checkpoint that a background thread is writing.

    Args:
        writer: the checkpoint's writer, which has been given all state.
        stack: the context that closes the writer.
        copies: the snapshot, whose copies the thread makes first.
        facts: arguments of the writer's `commit`.
        holds_exit: keep the process alive until the save ends.
        committed: called by the thread with the path of the committed checkpoint.

    Attributes:
        path: the planned path of the checkpoint; its actual path once it is committed.
        error: the exception that ended the thread; None if there was none.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        stack: ExitStack,
        copies: Copies,
        facts: Mapping[str, Any],
        holds_exit: bool = False,
        committed: Callable[[Place], None] = lambda path: None,
    ) -> None:
        self.path = writer.planned
        self.error: BaseException | None = None
        self._writer, self._stack, self._copies, self._facts = writer, stack, copies, facts
        self._committed = committed
        self._follower: Callable[[Place], None] | None = None
        self._commit_lock = threading.Lock()
        """Orders `follow` before or after the commit."""
        self._is_committed = False
        self._thread = threading.Thread(target=self._run, name="leyden-save", daemon=not holds_exit)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True once the thread has ended: the checkpoint is committed and `follow`'s function has run, or it failed."""
        return not self._thread.is_alive()

    @property
    def is_committed(self) -> bool:
        """True once the checkpoint is in place at `path`."""
        return self._is_committed

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes the state that all ranks share."""
        return self._writer.is_first

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end. With several ranks, every rank calls it."""
        self._thread.join(timeout)

    def prevent(self) -> None:
        """Prevents the commit, unless the thread has begun it."""
        self._writer.prevent()

    def follow(self, follower: Callable[[Place], None]) -> None:
        """Schedules a call with the checkpoint's path after the commit, such as one that deletes old checkpoints.

        It runs in the thread, or immediately if the checkpoint is already committed.
        """
        with self._commit_lock:
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
            with self._commit_lock:
                self.path, self._is_committed = path, True
            self._committed(path)
            if self._follower is not None:
                self._follower(path)
        except BaseException as error:
            self.error = error


class Saves:
    """Writes the checkpoints of a run, or of a custom training loop.

    From the start of a save in the background until its result has been collected, every optimizer has a step pre-hook.
    It waits for the copies, and raises the thread's error. So do the user's hooks that may change the weights. The
    first save's pre-hook may stay until the next save, because it also finds tensors that something other than a step
    writes. A run that saves nothing has no such hooks.

    Args:
        holds_exit: keep the process alive until the last save ends. False if something else waits for it, such as the
            end of fit.
        before: those of the last run, whose plan of shards and local copies the next save continues.

    Attributes:
        lock: the lock on the folder; None unless this run holds it exclusively.
    """

    def __init__(self, holds_exit: bool = False, before: Saves | None = None) -> None:
        self.lock: RunLock | None = None
        self._plans: ShardPlans = ShardPlans() if before is None else before._plans
        self._counters: dict[tuple[Place, int], int] = {}
        self._local_copies: list[Path] = [] if before is None else before._local_copies
        """Local copies of checkpoints in buckets, which the next one replaces."""
        self._holds_exit = holds_exit
        self._memory: HostMemory | None = None
        self._written: set[Key] | None = None
        """Names of tensors that something other than a step writes; None until the first save has been compared."""
        self._read_written: Callable[[], set[Key]] | None = None
        """Reads these names from the device, between the comparison and the next save."""
        self._pending: PendingSave | None = None
        self._copies: Copies | None = None
        """The snapshot that may still be incomplete; None otherwise."""
        self._handles: list[RemovableHandle] = []
        self._hooks: Hooks | None = None
        self._is_over = False

    def hold(self, lock: RunLock, ranks: CheckpointRanks) -> None:
        """Takes a folder's lock for this run, and clears the leftovers of killed saves. All ranks call it.

        Raises:
            LeydenError: on all ranks, if another run holds the folder; names its process.
        """
        ranks.keep(lock.acquire)
        self.lock = lock
        folder = lock.folder
        if isinstance(folder, BucketPath):
            ranks.first(lambda: _sweep(folder))

    def replace_local_copies(self, copies: Iterable[Path]) -> None:
        """Deletes these local copies of checkpoints in buckets once the bucket has a later one."""
        self._local_copies = list(copies)

    def write(
        self,
        path: Place,
        contents: Callable[[CheckpointWriter], Mapping[str, Any]],
        *,
        strategy: Strategy,
        ranks: CheckpointRanks,
        overwrite: bool,
        places: Sequence[tuple[Place, int]] = (),
        background: bool = False,
        optimizers: Sequence[Optimizer] = (),
        stepped: Sequence[Optimizer] = (),
        hooks: Hooks | None = None,
        committed: Callable[[Place], None] | None = None,
        local_copy: Path | None = None,
    ) -> Place:
        """Writes a checkpoint, after waiting for the previous save to end. All ranks call it.

        Args:
            path: the folder of the checkpoint.
            contents: passes all state to the checkpoint's writer, and returns the progress that the manifest records.
            strategy: the strategy of the run.
            ranks: the ranks that write the checkpoint.
            overwrite: replace an existing checkpoint. Otherwise the name gets a suffix.
            places: folders whose save counters the new one must exceed; see CheckpointWriter.
            background: copy the tensors, and write them in a thread.
            optimizers: the optimizers that wait for the copies before a step.
            stepped: those whose parameters and state change in a step alone: they are copied in the thread, too.
            hooks: the run's hooks, which wait too; None if there are none.
            committed: called with the path of the committed checkpoint, by the thread if there is one.
            local_copy: the folder in which a checkpoint for a bucket is completed before its upload; None for none.

        Returns:
            The path of the checkpoint; in the background the planned one.

        Raises:
            CheckpointError: if this save fails, or if the previous one did.
        """
        from leyden.checkpoint.writer import CheckpointWriter

        def done(written: Place) -> None:
            if local_copy is not None:
                self.keep_local_copy(local_copy.with_name(written.name), ranks)
            if committed is not None:
                committed(written)

        if self.lock is not None:
            ranks.keep(self.lock.check_held)
        self.wait()
        copies = self._snapshot(stepped) if background else None
        with ExitStack() as stack:
            writer = stack.enter_context(
                CheckpointWriter(
                    local_copy or path,
                    upload_to=path if local_copy is not None and isinstance(path, BucketPath) else None,
                    overwrite=overwrite,
                    ranks=ranks,
                    places=places,
                    plans=self._plans,
                    copies=copies,
                    check=self.check_lock,
                    counters=self._counters,
                )
            )
            facts: dict[str, Any] = {
                "progress": contents(writer),
                "world_size": strategy.ranks.world_size,
                "strategy": strategy.name or "custom",
                "data_ranks": strategy.data_ranks,
            }
            if copies is None:
                written = writer.commit(**facts)
                done(written)
                return written
            writer.beside()
            copies.begin()
            self._make_wait(copies, optimizers, hooks)
            self._pending = PendingSave(writer, stack.pop_all(), copies, facts, self._holds_exit, done)
            return self._pending.path

    def keep_local_copy(self, copy: Path, ranks: CheckpointRanks) -> None:
        """Deletes the local copies that this one replaces. All ranks call it, once the bucket has this checkpoint."""
        from leyden.checkpoint.folder import delete

        for former in self._local_copies if ranks.is_keeper else ():
            if former != copy:
                with suppress(CheckpointError):
                    delete(former)
        self._local_copies = [copy]

    def check_lock(self) -> None:
        """Raises LeydenError if another run has taken this run's folder over."""
        if self.lock is not None:
            self.lock.check_held()

    @property
    def is_over(self) -> bool:
        """True once the run ends. From then on no save starts in the background."""
        return self._is_over

    @property
    def pending(self) -> PendingSave | None:
        """The save whose result has not been collected; None if there is none."""
        return self._pending

    def _snapshot(self, stepped: Iterable[Optimizer]) -> Copies:
        """Begins a snapshot, which copies the parameters and state of these optimizers later, and all else at once."""
        from leyden.checkpoint.copies import Copies, HostMemory, addresses_of

        self._clear()
        if self._memory is None:
            self._memory = HostMemory()
        if self._read_written is not None:
            self._written, self._read_written = self._read_written(), None
        addresses = addresses_of(stepped)
        return Copies(self._memory, addresses, self._written if addresses else ())

    def _make_wait(self, copies: Copies, optimizers: Iterable[Optimizer], hooks: Hooks | None) -> None:
        """Lets steps and hooks wait for the copies, if the optimizers' steps call torch's pre-hooks."""
        from leyden.checkpoint.copies import calls_hooks

        self._copies, self._hooks = copies, hooks
        self._handles = [
            optimizer.register_step_pre_hook(self.before_step) for optimizer in filter(calls_hooks, optimizers)
        ]
        if hooks is not None:
            hooks.precede(self.finish_copies)

    def finish_copies(self) -> None:
        """Waits until all tensors are copied, so that the caller may change them.

        Raises:
            CheckpointError: if something has already changed a tensor while it was being copied.
        """
        copies, pending = self._copies, self._pending
        if copies is None or pending is None:
            return
        from leyden.checkpoint.copies import WrittenWhileCopied

        if self._hooks is not None:
            self._hooks.precede(None)
        try:
            copies.finish()
        except WrittenWhileCopied as error:
            pending.join(_ABANDONED)
            self._clear()
            raise CheckpointError(pending.path, f"is not saved: {error}") from error
        except BaseException:
            # An interrupt, such as Ctrl-C: nothing will wait for the copies again, and the thread must end.
            copies.abandon()
            raise
        finally:
            if not copies.is_first:
                self._copies = None

    def wait(self) -> None:
        """Waits until no save is pending.

        Raises:
            CheckpointError: if the save failed; its cause is the thread's exception.
        """
        self.finish_copies()
        pending = self._pending
        if pending is not None:
            pending.join()
            self._collect(pending)

    def end(self) -> None:
        """Marks the run as ending. Later checkpoints are saved synchronously."""
        self._is_over = True

    def release(self) -> None:
        """Waits until no save is pending, and frees the host buffers."""
        self.wait()
        self._clear()
        self._memory = self._written = self._read_written = None

    def close(self) -> None:
        """Ends the run's saves after an error. A save that cannot finish, because other ranks are gone, is dropped."""
        pending, copies = self._pending, self._copies
        if copies is not None:
            copies.abandon()
        self._clear()
        self._memory = self._written = self._read_written = None
        if pending is None:
            return
        pending.join(_ABANDONED)
        pending.prevent()
        if not pending.is_committed and pending.is_first:
            warn(
                f"{pending.path} was not saved: the run ended with an error first. Earlier checkpoints are whole.",
            )

    def before_step(self, *args: object) -> None:
        """Waits for the copies. After a first save, also finds the tensors that were written since."""
        copies, pending = self._copies, self._pending
        self.finish_copies()
        if copies is not None and copies.is_first:
            # Read at the next save: the comparison runs on the device beside the step.
            self._read_written, self._copies = copies.changed(), None
        if pending is not None and pending.is_done and pending.error is not None:
            self._collect(pending)

    def _collect(self, pending: PendingSave) -> None:
        """Forgets a save that has ended, and raises its error."""
        if pending.error is None and self._copies is not None and self._copies.is_first:
            # A first save ended before the next step. The step pre-hook stays, to compare the copies.
            self._clear_pending()
        else:
            self._clear()
        if pending.error is not None:
            cause = f"{type(pending.error).__name__}: {pending.error}"
            raise CheckpointError(
                pending.path, f"was not saved, and earlier checkpoints are whole: {cause}"
            ) from pending.error

    def _clear(self) -> None:
        self._clear_pending()
        for handle in self._handles:
            handle.remove()
        self._handles, self._copies = [], None

    def _clear_pending(self) -> None:
        if self._hooks is not None:
            self._hooks.precede(None)
        self._hooks = self._pending = None
