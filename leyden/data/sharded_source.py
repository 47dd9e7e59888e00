"""ShardedSource, which starts and resumes one rank's share of a sharded DataLoader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from leyden.data.rng import isolated_rng
from leyden.data.sharding import NO_SAMPLES, RankBatches, Share, equal_states, stateful_of
from leyden.data.sources import State, TorchSource
from leyden.data.workers import iterator_of

END = object()


class Shared(Iterator[tuple[Any, Share]]):
    """Yields this rank's batch (or NO_SAMPLES) of each global batch in an epoch, with its share."""

    def __init__(self, iterator: Iterator[Any], shares: deque[Share]) -> None:
        self._iterator = iterator
        self._shares = shares

    def __next__(self) -> tuple[Any, Share]:
        batch = next(self._iterator, END)
        if batch is END:
            if not self._shares:
                raise StopIteration
            batch = NO_SAMPLES
        return batch, self._shares.popleft()


class ShardedSource(TorchSource):
    """The source of a DataLoader with `RankBatches` as batch sampler. Positions count items of the global order."""

    shares = True

    def __init__(self, loader: DataLoader[Any], allow_replay: bool = False) -> None:
        super().__init__(loader, allow_replay)
        self.batches: RankBatches = loader.batch_sampler  # type: ignore[assignment]

    def start(self, epoch: int | None) -> Iterator[Any]:
        self.set_epoch(epoch)
        self.before = self._capture()
        self.batches.order.restart()
        self._origin = (0, 0)
        # A resumed run must start new workers where the saved run reused persistent ones, and drew no seed for them.
        iterator = self._iterate(draws=not (self.before["again"] and self.loader._iterator is None))
        self.had_workers = self.loader.persistent_workers
        return iterator

    def _iterate(self, draws: bool = True) -> Iterator[Any]:
        """Creates the iterator. Workers get different seeds on each rank; rank 0's equal those of a single process.

        With `draws`, it draws the workers' seed, as torch does for new workers.
        """
        loader = self.loader
        starts_workers = loader.num_workers > 0 and (loader._iterator is None or not loader.persistent_workers)
        if not starts_workers or (draws and self.batches.rank == 0):
            return Shared(iterator_of(loader), self.batches.shares)
        own, seed = loader.generator, torch.initial_seed()
        if draws:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=own).item())
        loader.generator = torch.Generator().manual_seed((seed + self.batches.rank) & (2**63 - 1))
        try:
            return Shared(iterator_of(loader), self.batches.shares)
        finally:
            loader.generator = own

    def position(self, batches: int) -> State:
        return {**super().position(batches), "order": self.batches.order.state}

    @property
    def span(self) -> int:
        return self.batches.span

    def length_after(self, state: State) -> int | None:
        try:
            return int(state["batches"]) + self.batches.batches_after(state["drawn"])
        except (TypeError, NotImplementedError):
            return None

    def fresh_position(self, batches: int) -> State | None:
        # "order" is None: as at the start of an epoch, the ranks agree on the order when they first draw from it.
        drawn = batches * self.span
        return {"batches": batches, "before": self._capture(), "generators": {}, "order": None, "drawn": drawn}

    def resume(self, epoch: int | None, state: State) -> Iterator[Any]:
        self._restore_seed(state)
        self.set_epoch(epoch)
        self.before = state["before"]
        self._rewind(state["before"])
        self._origin = (state["batches"], state["drawn"])
        self.loader._iterator = None
        order, order_state = self.batches.order, state.get("order")
        if "order" not in state:
            # Saved by a single process.
            order_state = self.single_process_state(state["before"])
        order.restart(order_state, state["drawn"])
        if order_state is not None:
            order.start()
        iterator = self._iterate(draws=not state["before"]["again"])
        self.had_workers = self.loader.persistent_workers
        self.generators.restore(state["generators"])
        return iterator

    def single_process_state(self, before: State) -> State:
        """Returns the random state from which a plain loader drew its order, after drawing its seed for workers.

        Must be called with the random state from before the loader's iterator was created. `before` is the saved state
        from before the epoch.
        """
        order, loader = self.batches.order, self.loader
        start = order.current_state()
        if before["again"]:
            return start
        if self.batches.of_batches:
            iter(order.sampler)
            if equal_states(order.current_state(), start):
                self._rewind(before)
            elif loader.num_workers == 0:
                return start
        # With workers, torch creates a second iterator of the sampler after it has drawn the seed.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        return order.current_state()

    def filler(self) -> Any:
        with isolated_rng([self.loader]):
            return self.batches.filler(self.loader)

    def _stateful_sampler(self) -> Any:
        return stateful_of(self.batches.sampler)
