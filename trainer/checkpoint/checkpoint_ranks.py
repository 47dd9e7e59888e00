"""Coordinates the ranks that write or read one checkpoint together, so that an error on one is raised on all."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from leyden.strategies.base import Strategy
from leyden.trainer.format.errors import OtherRankError

T = TypeVar("T")


class CheckpointRanks:
    """The ranks that work on one checkpoint: this process alone, or all ranks of a run in step.

    Ranks have one kind of exchange, which carries a value or an error. So a rank that failed still answers the next
    exchange of the others, no rank waits for one that has left, and all raise.

    Args:
        strategy: the run's strategy; None for a single process.
        path: the checkpoint, for messages.
        each_node: every machine keeps a whole checkpoint in its own folder; otherwise all see one folder.

    Attributes:
        path: the checkpoint.
        rank: the number of this process, from 0.
        size: the number of ranks.
        share: the number of this rank, and the number of ranks, among those that see the same folder.
        keeper: the rank that manages that folder: 0, or the first of this machine.
        is_keeper: True on that rank.
        keepers: the keepers of all folders.

    Example:
        >>> CheckpointRanks().gather("mine")
        ['mine']
    """

    def __init__(
        self,
        strategy: Strategy | None = None,
        path: str | os.PathLike[str] = "checkpoint",
        each_node: bool = False,
    ) -> None:
        together = strategy is not None and strategy.ranks.is_joined and strategy.ranks.world_size > 1
        self._ranks = strategy.ranks if strategy is not None and together else None
        self.path = Path(path)
        self._over = False
        self.rank = 0 if self._ranks is None else self._ranks.global_rank
        self.size = 1 if self._ranks is None else self._ranks.world_size
        local, here = self.rank, self.size
        if self._ranks is not None and each_node:
            local, here = self._ranks.local_rank, self.size // self._ranks.num_nodes
        self.share = (local, here)
        self.keeper, self.is_keeper = self.rank - local, local == 0
        self.keepers = list(range(0, self.size, here))

    def beside(self) -> CheckpointRanks:
        """Returns the same ranks for a thread beside the run: they have a process group of their own. Every rank calls
        it.
        """
        others = copy.copy(self)
        others._ranks = None if self._ranks is None else self._ranks.beside()
        return others

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks.

        Raises:
            OtherRankError: if another rank reported an error; names the rank.
        """
        if self._ranks is None:
            return [value]
        try:
            found: list[tuple[Any, str | None]] = self._ranks.all_gather_object((value, None))
        except BaseException:
            # A rank has died, so no error can be reported.
            self._over = True
            raise
        for rank, (_, failure) in enumerate(found):
            if failure is not None:
                self._over = True
                raise OtherRankError(self.path, f"rank {rank} could not do its part: {failure}")
        return [value for value, _ in found]

    def each(self, work: Callable[[], T]) -> list[T]:
        """Calls `work` on every rank, and returns all results; an error on one is raised on all."""
        return self.gather(self._reporting(work))

    def first(self, work: Callable[[], T]) -> T:
        """Calls `work` on rank 0, and returns the result on every rank."""
        found: list[Any] = self.gather(self._reporting(work) if self.rank == 0 else None)
        result: T = found[0]
        return result

    def keep(self, work: Callable[[], T]) -> T:
        """Calls `work` on the keeper of each folder, and returns the result on all ranks that see the folder."""
        found: list[Any] = self.gather(self._reporting(work) if self.is_keeper else None)
        result: T = found[self.keeper]
        return result

    def send(self, value: T, source: int) -> T:
        """Returns the value of rank `source` on every rank; an error waits for the next `gather`."""
        return value if self._ranks is None else self._ranks.broadcast(value, source)

    def report(self, error: BaseException) -> None:
        """Reports an error to the other ranks, once, unless they know it already. The caller raises it."""
        if self._ranks is not None and not self._over and isinstance(error, Exception):
            self._over = True
            self._ranks.all_gather_object((None, f"{type(error).__name__}: {error}"))

    def _reporting(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:
            self.report(error)
            raise
