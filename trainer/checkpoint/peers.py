"""Ranks that write or read one checkpoint together: what they exchange, and how an error on one reaches all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from leyden.strategies.base import Strategy
from leyden.trainer.format.errors import OtherRankError

T = TypeVar("T")


class Peers:
    """This process among those that work on one checkpoint: alone, or in step with the others of its run.

    Ranks have one kind of exchange, which carries an error as well as a value. So a rank that failed still answers the next
    exchange of the others, nobody waits for a rank that has left, and all raise.

    Args:
        strategy: of the run; None for a process by itself.
        path: the checkpoint, for messages.
        each_node: every machine keeps a whole checkpoint in a folder of its own; else all see one folder.

    Attributes:
        path: the checkpoint.
        rank: of this process, from 0.
        size: how many there are.
        share: this rank's number, and how many there are, of those that see the same folder.
        keeper: the rank that looks after that folder: 0, or the first of this machine.
        is_keeper: it is this one.
        keepers: the keepers of all folders.

    Example:
        >>> Peers().gather("mine")
        ['mine']
    """

    def __init__(
        self,
        strategy: Strategy | None = None,
        path: str | os.PathLike[str] = "checkpoint",
        each_node: bool = False,
    ) -> None:
        together = strategy is not None and strategy.ranks.is_joined and strategy.ranks.world_size > 1
        self._strategy = strategy if together else None
        self.path = Path(path)
        self._over = False
        self.rank = 0 if self._strategy is None else self._strategy.ranks.global_rank
        self.size = 1 if self._strategy is None else self._strategy.ranks.world_size
        local, here = self.rank, self.size
        if self._strategy is not None and each_node:
            local, here = self._strategy.ranks.local_rank, self.size // self._strategy.ranks.num_nodes
        self.share = (local, here)
        self.keeper, self.is_keeper = self.rank - local, local == 0
        self.keepers = list(range(0, self.size, here))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks.

        Raises:
            OtherRankError: if one of them has told an error; names the rank.
        """
        return [value] if self._strategy is None else self._exchange(value, None)

    def each(self, work: Callable[[], T]) -> list[T]:
        """Every rank does its work; returns the results of all. The error of one is raised on all."""
        return self.gather(self._told(work))

    def first(self, work: Callable[[], T]) -> T:
        """Rank 0 does the work, and every rank gets the result."""
        found: list[Any] = self.gather(self._told(work) if self.rank == 0 else None)
        result: T = found[0]
        return result

    def keep(self, work: Callable[[], T]) -> T:
        """The rank that looks after a folder does the work, and all that see the folder get the result."""
        found: list[Any] = self.gather(self._told(work) if self.is_keeper else None)
        result: T = found[self.keeper]
        return result

    def send(self, value: T, source: int) -> T:
        """Gives every rank the value of one; an error is for the next `gather`."""
        return value if self._strategy is None else self._strategy.ranks.broadcast(value, source)

    def tell(self, error: BaseException) -> None:
        """Tells the others of an error, once, where they do not know of it yet. It is the caller's to raise."""
        if self._strategy is not None and not self._over and isinstance(error, Exception):
            self._over = True
            self._strategy.ranks.all_gather_object((None, f"{type(error).__name__}: {error}"))

    def _told(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:
            self.tell(error)
            raise

    def _exchange(self, value: T, error: str | None) -> list[T]:
        assert self._strategy is not None
        try:
            found: list[tuple[Any, str | None]] = self._strategy.ranks.all_gather_object((value, error))
        except BaseException:
            # A rank has died: there is nobody left to tell.
            self._over = True
            raise
        for rank, (_, failure) in enumerate(found):
            if failure is not None:
                self._over = True
                raise OtherRankError(self.path, f"rank {rank} could not do its part: {failure}")
        return [value for value, _ in found]
