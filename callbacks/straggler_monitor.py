"""StragglerMonitor, a callback that compares how long the ranks work on a batch, and names a rank that is slow."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.logger import check_has_logger, log_to_all
from leyden.core.checks import check_flags, check_whole
from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.core.text import aligned

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

PARTS = ("data", "forward", "backward", "step")
DATA, FORWARD, BACKWARD, STEP, BATCHES = range(5)
"""The columns of a rank's times: seconds by part, and the number of batches."""
WARM_UP_BATCHES = 5
"""First batches of a fit, which are not timed: kernels are chosen, memory is allocated, code is compiled."""
MIN_SECONDS = 1.0
"""Seconds of work before a rank is named, so that a moment's noise in very short steps does not warn."""
SHOWN = 8
"""The number of ranks that a warning lists."""
DATA_FIX = "Look at that machine's disk and network, or raise num_workers in the training loader"
FIX = "Look for a throttled clock or a fault of that machine, or batches that are larger than the others'"


class StragglerMonitor(Callback):
    """Times each rank's own work, and warns about a rank that is slower than the others.

    Ranks that exchange gradients all take as long as the slowest, so the time of a step names nobody. This callback
    times the four parts of each batch without the time that a rank waits for others: loading (up to the batch on the
    device), forward, backward (up to the exchange of gradients) and the optimizers' steps. Hooks, logging, validation
    and saves do not count, nor does the batch after a validation or the first of an epoch.

    Every `every_n_steps` steps the ranks exchange their times in one small message. A rank is compared with the median
    of the ranks in the same position of the pipeline. Once one is behind by `threshold` or more, all ranks also take
    off the time for which the operating system let them wait for a core (on Linux), since on a busy machine that time
    differs by chance. A rank that then stays behind for `patience` steps, and for at least one second of work, is named
    in a warning, once per fit: rank, host, part and by how much.

    All times are taken on the host, and the device is never waited for:

    - On the CPU, DDP's times are those of the rank's own work. Under strategies that also communicate within forward
      and backward (FSDP, tensor and pipeline parallel), forward, backward and step are this thread's CPU time:
      computing counts there, sleeping or waiting for a disk does not.
    - On a GPU, kernels run later than the host asks for them. The times show a slow loader, slow Python code and a slow
      host, but not a GPU that computes slowly: its step takes as long as on the other ranks. A host that waits for its
      GPU (`loss.item()`, batches in memory that is not pinned) also waits for other ranks, which may hide a slow rank.
    - In a pipeline, forward and backward alternate, and both count as backward.

    It has no state to resume, and in a single process it has nothing to compare.

    Args:
        every_n_steps: the number of optimizer steps between two exchanges.
        threshold: how far behind a rank must be, as a fraction of the median time of a batch.
        patience: for how many steps.
        log: whether to also log the table to the run's loggers, as `straggler/rank_1/data` and so on.

    Attributes:
        stragglers: the ranks named in this fit, each with its slow part.

    Raises:
        ConfigurationError: for invalid arguments; at the start of fit, if `log` is set and there is no logger.

    Example:
        >>> monitor = StragglerMonitor(threshold=0.3)
        >>> # Trainer(strategy="ddp", callbacks=[monitor]).fit(module, loader); print(monitor.summary())
        >>> monitor.table, monitor.stragglers
        ([], {})
    """

    # The last of the closing callbacks, so that others' work before and after a batch is not timed.
    order: ClassVar[int] = 1000
    closing_hooks = frozenset({"on_train_batch_end"})

    def __init__(self, every_n_steps: int = 25, threshold: float = 0.2, patience: int = 50, log: bool = False) -> None:
        check_whole("StragglerMonitor", 1, every_n_steps=every_n_steps, patience=patience)
        check_flags("StragglerMonitor", log=log)
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 < threshold < float("inf"):
            raise ConfigurationError(
                f"StragglerMonitor(threshold={threshold!r}): give a fraction above 0, such as 0.2 for 20 %."
            )
        self.every_n_steps, self.threshold, self.patience, self.log_table = every_n_steps, threshold, patience, log
        self.stragglers: dict[int, str] = {}
        self._times: Tensor | None = None
        """Seconds per batch of each rank and part, at the last exchange."""
        self._places: list[tuple[str, int]] = []
        """The host and the pipeline rank of each rank."""
        self._peers: list[Tensor] = []
        """The ranks that are compared with each other."""
        self._behind = torch.zeros(0, 2)
        """For how many steps, and seconds of work, each rank has been behind."""
        self._handles: list[Any] = []
        self._running: _RunningTime | None = None
        self._wall: Callable[[], float] = perf_counter
        """The clock of loading."""
        self._clock: Callable[[], float] = perf_counter
        """The clock of the other parts."""
        self._uses_cpu_time = self._times_graph = self._splits_passes = False

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if self.log_table and stage == "fit":
            check_has_logger(self, trainer)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        strategy = trainer.strategy
        self._places = strategy.ranks.all_gather_object((socket.gethostname(), strategy.pipeline_rank))
        positions: dict[int, list[int]] = {}
        for rank, (_, position) in enumerate(self._places):
            positions.setdefault(position, []).append(rank)
        self._peers = [torch.tensor(ranks) for ranks in positions.values()]
        self._behind = torch.zeros(len(self._places), 2, dtype=torch.float64)
        self.stragglers, self._times, self._exchanged = {}, None, trainer.global_step
        self._sums, self._left_out = [0.0] * 5, WARM_UP_BATCHES
        communicates_within = trainer.world_size > 1 and not strategy.exchanges_late
        # Such a rank's waits are spread over its passes, but on the CPU they take no CPU time.
        self._uses_cpu_time = communicates_within and strategy.root_device.type == "cpu"
        self._running = _RunningTime()
        self._set_clocks(is_suspicious=False)
        self._times_graph = trainer.world_size > 1 and strategy.exchanges_late
        self._splits_passes = not strategy.outputs.are_in_parts
        self._begin_untimed()
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, Optimizer):
                self._handles.append(optimizer.register_step_post_hook(lambda *_: self._lap(STEP)))

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        for handle in self._handles:
            handle.remove()
        if self._running is not None:
            self._running.close()
        self._handles, self._running = [], None

    def go_back(self, state: dict[str, Any], step: int) -> None:
        # Repeated steps are exchanged again.
        self._exchanged = step

    # timing -----------------------------------------------------------------------------------------------------------
    def _set_clocks(self, is_suspicious: bool) -> None:
        """Chooses the clocks of the next batches. Without a suspicion a batch costs no call of the system."""
        self._is_suspicious = is_suspicious
        self._wall = self._running.read if is_suspicious and self._running is not None else perf_counter
        self._clock = thread_time if self._uses_cpu_time else self._wall

    def _begin_untimed(self) -> None:
        """Leaves out the next batch, which waits for workers that start or for ranks that validate."""
        self._loading_since: float | None = None
        self._mark, self._graph_ended = 0.0, False
        # Times of batches that do not count are added up here.
        self._batch = [0.0] * 5

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin_untimed()

    on_validation_end = on_train_epoch_start

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if self._loading_since is not None:
            if self._left_out:
                self._left_out -= 1
            else:
                self._batch = self._sums
                self._batch[BATCHES] += 1
                self._batch[DATA] += self._wall() - self._loading_since
        self._mark = self._clock()

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None:
        if self._splits_passes:
            self._lap(FORWARD)
        if self._times_graph and loss.requires_grad:
            self._graph_ended = False
            loss.register_hook(self._begin_graph)  # type: ignore[no-untyped-call]

    def _begin_graph(self, grad: Tensor) -> None:
        # Again, since ranks that weight the loss by items exchange their counts before.
        self._mark = self._clock()
        # Callbacks of a backward pass run in the order in which they were queued, and DDP waits for the exchange of
        # gradients in one that it queues later.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_graph)

    def _end_graph(self) -> None:
        self._lap(BACKWARD)
        self._graph_ended = True

    def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None:
        if self._graph_ended:
            self._mark = self._clock()
        else:
            self._lap(BACKWARD)

    def _lap(self, part: int) -> None:
        now = self._clock()
        self._batch[part] += now - self._mark
        self._mark = now

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # `global_step` changes only at the end of an accumulation window.
        if step % self.every_n_steps == 0 and step != self._exchanged:
            self._exchange(trainer, step)
        # A rank without a sample of the next batch calls none of the other hooks.
        self._loading_since = self._wall()

    # comparing --------------------------------------------------------------------------------------------------------
    def _exchange(self, trainer: Trainer, step: int) -> None:
        ranks = trainer.strategy.ranks
        sums = ranks.all_gather(torch.tensor(self._sums, dtype=torch.float64), group=ranks.host_group)
        steps, self._exchanged, self._sums = step - self._exchanged, step, [0.0] * 5
        found = self._compare(sums, steps)
        if found and trainer.is_global_zero:
            more = f" So {'is 1 more rank' if len(found) == SHOWN + 1 else f'are {len(found) - SHOWN} more ranks'}."
            warn(" ".join(found[:SHOWN]) + (more if len(found) > SHOWN else ""))
        if self.log_table:
            rows = self.table
            values = {f"straggler/rank_{row['rank']}/{part}": row[part] for row in rows for part in PARTS}
            log_to_all(trainer, values, step)

    def _compare(self, sums: Tensor, steps: int) -> list[str]:
        """Takes the ranks' times in the steps since the last exchange; returns a sentence for each newly named rank.

        The sums are seconds by part, and the number of batches: (ranks, 5). A rank without a batch is left out.
        """
        self._times = sums[:, :BATCHES] / sums[:, BATCHES:]  # (ranks, 4)
        totals = self._times.sum(1)
        for peers in self._peers:
            # The lower of two middle values, so that the faster of two ranks is the typical one.
            totals[peers] /= totals[peers].nanmedian()
        is_behind = totals >= 1 + self.threshold
        if self._is_suspicious:
            work = torch.stack([torch.full_like(totals, steps), sums[:, :BATCHES].sum(1)], 1)
            self._behind = torch.where(is_behind[:, None], self._behind + work, 0.0)
        # Times from before a suspicion include waits for a core, so they do not count.
        self._set_clocks(bool(is_behind.any()))
        if not self._is_suspicious:
            return []
        is_named = (self._behind[:, 0] >= self.patience) & (self._behind[:, 1] >= MIN_SECONDS)
        found = []
        for rank in torch.nonzero(is_named).flatten().tolist():
            if rank not in self.stragglers:
                found.append((float(totals[rank]), self._name(rank, float(totals[rank]))))
        return [sentence for _, sentence in sorted(found, reverse=True)]

    def _name(self, rank: int, ratio: float) -> str:
        assert self._times is not None
        [peers] = [peers for peers in self._peers if rank in peers]
        typical = self._times[peers].nanmedian(0).values
        slowest = int((self._times[rank] - typical).argmax())
        self.stragglers[rank] = part = PARTS[slowest]
        own, usual = float(self._times[rank, slowest]), float(typical[slowest])
        fix = DATA_FIX if part == "data" else FIX
        return (
            f"rank {rank} on {self._places[rank][0]} has been slower than the other ranks for "
            f"{int(self._behind[rank, 0])} steps, now by {ratio - 1:.0%}, and they wait for it. Most of it is {part}: "
            f"{own:.3g} s per batch, where the median is {usual:.3g} s. {fix}."
        )

    @property
    def table(self) -> list[dict[str, Any]]:
        """The times of the last exchange, a row for each rank: rank, host, and the seconds per batch of each part.

        Empty before the first exchange; nan for a rank that has timed no batch.
        """
        if self._times is None:
            return []
        return [
            {"rank": rank, "host": host, **dict(zip(PARTS, parts, strict=True))}
            for rank, ((host, _), parts) in enumerate(zip(self._places, self._times.tolist(), strict=True))
        ]

    def summary(self) -> str:
        """Returns the table as text."""
        rows = [(str(row["rank"]), row["host"], *(f"{row[part]:.4f}" for part in PARTS)) for row in self.table]
        return "\n".join(aligned([("rank", "host", *(f"{part} s" for part in PARTS)), *rows], right=range(2, 6)))


class _RunningTime:
    """The time of this thread's work: seconds, less those for which it was ready to run and waited for a core.

    Linux counts these for each thread. Reading them takes 2 µs. Elsewhere nothing is taken off.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

    def read(self) -> float:
        """Returns the seconds since some moment."""
        now = perf_counter()
        return now if self._file is None else now - int(os.pread(self._file, 64, 0).split()[1]) * 1e-9

    def close(self) -> None:
        """Closes the file of the thread's counters."""
        if self._file is not None:
            os.close(self._file)
