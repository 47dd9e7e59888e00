"""The source of a sharded DataLoader: begins, locates and resumes one rank's share of the global order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from leyden.trainer.data.rng import isolated_rng
from leyden.trainer.data.sharding import NOTHING, RankBatches, Share, stateful_of
from leyden.trainer.data.sources import State, TorchSource

END = object()


class Shared(Iterator[tuple[Any, Share]]):
    """Each global batch of an epoch: this rank's batch of it, or NOTHING, and its share."""

    def __init__(self, iterator: Iterator[Any], shares: deque[Share]) -> None:
        self._iterator = iterator
        self._shares = shares

    def __next__(self) -> tuple[Any, Share]:
        batch = next(self._iterator, END)
        if batch is END:
            if not self._shares:
                raise StopIteration
            batch = NOTHING
        return batch, self._shares.popleft()


class ShardedSource(TorchSource):
    """A DataLoader whose index sampler is `RankBatches`. Its place is told in what was drawn of the global order."""

    shares = True

    def __init__(self, loader: DataLoader[Any], allow_replay: bool = False) -> None:
        super().__init__(loader, allow_replay)
        self.batches: RankBatches = loader.batch_sampler  # type: ignore[assignment]
        self._origin = (0, 0)

    def start(self, epoch: int | None) -> Iterator[Any]:
        self.set_epoch(epoch)
        self.before = self._remember()
        self.batches.order.begin()
        self._origin = (0, 0)
        # A resumed run makes the workers anew that the run before it went on to use, for which nothing was drawn.
        iterator = self._iterate(draws=not (self.before["again"] and self.loader._iterator is None))
        self.had_workers = self.loader.persistent_workers
        return iterator

    def _iterate(self, draws: bool = True) -> Iterator[Any]:
        """Makes the iterator. Workers of different ranks get different seeds; rank 0's are those of one process."""
        loader = self.loader
        begins = loader.num_workers > 0 and (loader._iterator is None or not loader.persistent_workers)
        if not begins or (draws and self.batches.rank == 0):
            return Shared(iter(loader), self.batches.shares)
        own, seed = loader.generator, torch.initial_seed()
        if draws:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=own).item())
        loader.generator = torch.Generator().manual_seed((seed + self.batches.rank) & (2**63 - 1))
        try:
            return Shared(iter(loader), self.batches.shares)
        finally:
            loader.generator = own

    def position(self, batches: int) -> State:
        begun, drawn = self._origin
        drawn += (batches - begun) * self.batches.span
        return {**super().position(batches), "order": self.batches.order.state, "drawn": drawn}

    def resume(self, epoch: int | None, state: State) -> Iterator[Any]:
        self._restore_seed(state)
        self.set_epoch(epoch)
        self.before = state["before"]
        self._rewind(state["before"])
        self._origin = (state["batches"], state["drawn"])
        self.loader._iterator = None
        order = self.batches.order
        order.begin(state["order"], state["drawn"])
        if state["order"] is not None:
            order.start()
        iterator = self._iterate(draws=not state["before"]["again"])
        self.had_workers = self.loader.persistent_workers
        self.generators.restore(state["generators"])
        return iterator

    def filler(self) -> Any:
        with isolated_rng([self.loader]):
            return self.batches.filler(self.loader)

    def _stateful_sampler(self) -> Any:
        return stateful_of(self.batches.sampler)
