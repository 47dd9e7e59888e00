"""Coordinates the ranks that write or read one checkpoint together, so that an error on one rank is raised on all."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from leyden.checkpoint.format.bucket import BucketPath, Place
from leyden.checkpoint.format.errors import OtherRankError
from leyden.strategies.base import Strategy

T = TypeVar("T")


class CheckpointRanks:
    """The ranks that work on one checkpoint: this process alone, or all ranks of a run in step.

    Every exchange between ranks is one all-gather that carries either a value or an error. A rank that fails therefore
    still takes part in the others' next exchange: no rank waits for one that has left, and all ranks raise.

    Args:
        strategy: the run's strategy; None for a single process.
        path: the checkpoint's path, for messages.
        each_node: each machine keeps a whole checkpoint in a folder of its own; otherwise, and in a bucket, all ranks
            see one folder.

    Attributes:
        path: the checkpoint's path.
        rank: this process's rank.
        size: the number of ranks.
        share: this rank's index among the ranks that see the same folder, and their number.
        keeper: the rank that manages the folder: rank 0, or with `each_node` the first rank of this machine.
        is_keeper: True on the keeper.
        keepers: the keepers of all folders.

    Example:
        >>> CheckpointRanks().gather("mine")
        ['mine']
    """

    def __init__(
        self,
        strategy: Strategy | None = None,
        path: str | os.PathLike[str] | BucketPath = "checkpoint",
        each_node: bool = False,
    ) -> None:
        together = strategy is not None and strategy.ranks.is_joined and strategy.ranks.world_size > 1
        self._ranks = strategy.ranks if strategy is not None and together else None
        self.path = path if isinstance(path, BucketPath) else Path(path)
        self._failed = False
        """An error has been reported, or could not be: exchange nothing more."""
        self.rank = 0 if self._ranks is None else self._ranks.global_rank
        self.size = 1 if self._ranks is None else self._ranks.world_size
        index, sharing = self.rank, self.size
        if self._ranks is not None and each_node and isinstance(self.path, Path):
            index, sharing = self._ranks.local_rank, self.size // self._ranks.num_nodes
        self.share = (index, sharing)
        self.keeper, self.is_keeper = self.rank - index, index == 0
        self.keepers = list(range(0, self.size, sharing))

    def share_of(self, path: Place) -> tuple[int, int]:
        """Returns this rank's index among the ranks that see a path, and their number: in a bucket, all of them."""
        return (self.rank, self.size) if isinstance(path, BucketPath) else self.share

    def beside(self) -> CheckpointRanks:
        """Returns the same ranks with a separate process group, for a background thread. Every rank calls it."""
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
            answers: list[tuple[Any, str | None]] = self._ranks.all_gather_object((value, None))
        except BaseException:
            # A rank has died, so no error can be reported.
            self._failed = True
            raise
        for rank, (_, failure) in enumerate(answers):
            if failure is not None:
                self._failed = True
                raise OtherRankError(self.path, f"rank {rank} could not do its part: {failure}")
        return [value for value, _ in answers]

    def each(self, work: Callable[[], T]) -> list[T]:
        """Calls `work` on every rank and returns all results. An error on one rank is raised on all."""
        return self.gather(self._reporting(work))

    def first(self, work: Callable[[], T]) -> T:
        """Calls `work` on rank 0 and returns its result on every rank."""
        results: list[Any] = self.gather(self._reporting(work) if self.rank == 0 else None)
        result: T = results[0]
        return result

    def keep(self, work: Callable[[], T]) -> T:
        """Calls `work` on each folder's keeper and returns its result on all ranks that see that folder."""
        results: list[Any] = self.gather(self._reporting(work) if self.is_keeper else None)
        result: T = results[self.keeper]
        return result

    def send(self, value: T, source: int) -> T:
        """Returns rank `source`'s value on every rank. Errors are exchanged only by the next `gather`."""
        return value if self._ranks is None else self._ranks.broadcast(value, source)

    def report(self, error: BaseException) -> None:
        """Reports an error to the other ranks, unless one has been reported already. The caller raises it."""
        if self._ranks is not None and not self._failed and isinstance(error, Exception):
            self._failed = True
            self._ranks.all_gather_object((None, f"{type(error).__name__}: {error}"))

    def _reporting(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:
            self.report(error)
            raise
