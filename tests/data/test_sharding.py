"""One global order for any number of ranks: blocks, shares, and positions that any other number of ranks resumes."""

from __future__ import annotations

import copy
import itertools
import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from samples import Indices
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from leyden import SeekableShuffle
from leyden.core.errors import ConfigurationError
from leyden.data.combined import CombinedLoader
from leyden.data.cursor import LoaderCursor
from leyden.data.even import EvenBatches
from leyden.data.rng import rng_state, seed_everything, set_rng_state
from leyden.data.sharding import NO_SAMPLES, DataRanks, Order, RankBatches, Share, block
from leyden.data.streams import shard

SIZE = 103
Loader = DataLoader[Any]


class GloballyDrawingSampler(Sampler[int]):
    """Draws from every global generator during the whole epoch."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        left = list(range(SIZE))
        while left:
            number = int(torch.randint(1000, ())) + random.randrange(1000) + int(np.random.randint(1000))
            yield left.pop(number % len(left))


class OwnGeneratorSampler(Sampler[int]):
    """Draws from its own generator, whose state carries over from epoch to epoch."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(SIZE).tolist())


class BucketBatchSampler(Sampler[list[int]]):
    """A user's batch sampler: batches of different sizes, in a new order each time."""

    def __len__(self) -> int:
        return 21

    def __iter__(self) -> Iterator[list[int]]:
        bounds = [*range(0, SIZE - 3, 5), SIZE - 1, SIZE]
        batches = [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
        return iter([batches[number] for number in torch.randperm(len(batches)).tolist()])


KINDS: dict[str, Callable[[int], Loader]] = {
    "in order": lambda size: DataLoader(Indices(SIZE), size),
    "shuffled": lambda size: DataLoader(Indices(SIZE), size, shuffle=True),
    "seekable": lambda size: DataLoader(Indices(SIZE), size, sampler=SeekableShuffle(SIZE)),
    "own generator": lambda size: DataLoader(
        Indices(SIZE), size, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "replacement": lambda size: DataLoader(Indices(SIZE), size, sampler=RandomSampler(Indices(SIZE), True, 103)),
    "subset": lambda size: DataLoader(Indices(SIZE), size, sampler=SubsetRandomSampler(range(103))),
    "weighted": lambda size: DataLoader(Indices(SIZE), size, sampler=WeightedRandomSampler([1.0] * 103, 103)),
    "draws globally": lambda size: DataLoader(Indices(SIZE), size, sampler=GloballyDrawingSampler()),
    "sampler's own generator": lambda size: DataLoader(Indices(SIZE), size, sampler=OwnGeneratorSampler()),
    "list": lambda size: DataLoader(Indices(SIZE), size, sampler=list(range(102, -1, -1))),
    "batch sampler": lambda size: DataLoader(Indices(SIZE), batch_sampler=BucketBatchSampler()),
}


class World:
    """Simulated ranks in one process, each with its own random state; rank 0 starts first, since it broadcasts."""

    def __init__(self, make: Callable[[int], Loader], ranks: int, batch_size: int, **options: Any) -> None:
        self.ranks, self.shared = ranks, [{}]
        self.cursors = [
            LoaderCursor(
                shard(make(batch_size), DataRanks(rank, ranks, self._agree(rank), **options), exchanges_sizes=False)
                if ranks > 1
                else make(batch_size)
            )
            for rank in range(ranks)
        ]
        self.states: list[Any] = []
        for rank in range(ranks):
            seed_everything(1 if rank == 0 else 50 + rank)
            self.states.append(rng_state())

    def _agree(self, rank: int) -> Callable[[Any], Any]:
        def agree(state: Any) -> Any:
            if rank == 0:
                self.shared[0] = state
            return self.shared[0]

        return agree

    def as_rank(self, rank: int, function: Callable[[], Any]) -> Any:
        set_rng_state(self.states[rank])
        result = function()
        self.states[rank] = rng_state()
        return result

    def begin(self, epoch: int, position: Any = None) -> None:
        def start(rank: int) -> Iterator[Any]:
            cursor = self.cursors[rank]
            return cursor.start(epoch) if position is None else cursor.resume(epoch, copy.deepcopy(position))

        now = list(self.states)
        self.iterators = [self.as_rank(rank, lambda rank=rank: start(rank)) for rank in range(self.ranks)]
        if position is not None:
            self.states = now

    def read(self, count: int | None = None) -> list[list[int]]:
        """Returns global batches, joined from the ranks' blocks; checks the shares."""
        found: list[list[int]] = []
        while count is None or len(found) < count:
            drawn = [
                self.as_rank(rank, lambda rank=rank: next(self.iterators[rank], None)) for rank in range(self.ranks)
            ]
            if self.ranks == 1:
                drawn = [(batch, Share(len(batch), len(batch))) if batch is not None else None for batch in drawn]
            if drawn[0] is None:
                assert drawn == [None] * self.ranks
                return found
            blocks = [[] if batch is NO_SAMPLES else batch.tolist() for batch, _ in drawn]
            whole = [index for part in blocks for index in part]
            assert [(share.here, share.total) for _, share in drawn] == [(len(part), len(whole)) for part in blocks]
            found.append(whole)
        return found


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_blocks_cover_a_batch_in_order(ranks: int) -> None:
    for count in range(40):
        parts = [list(range(count))[block(count, rank, ranks)] for rank in range(ranks)]
        assert flat(parts) == list(range(count))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_reads_in_the_order_of_one_process(kind: str) -> None:
    def order(ranks: int) -> list[list[list[int]]]:
        world = World(KINDS[kind], ranks, 24 // ranks)
        epochs = []
        for epoch in range(2):
            world.begin(epoch)
            epochs.append(world.read())
        assert [cursor.length for cursor in world.cursors] == [len(epochs[0])] * ranks
        return epochs

    one_process = order(1)
    for ranks in (2, 4):
        found = order(ranks)
        if kind == "draws globally":
            # Nothing else draws in between here, so the first epoch is the same.
            one_process, found = one_process[:1], found[:1]
        if kind != "batch sampler":
            assert found == one_process
        assert [flat(epoch) for epoch in found] == [flat(epoch) for epoch in one_process]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)], ids=str)
def test_any_number_of_ranks_resumes_from_a_saved_position(kind: str, ranks: tuple[int, int]) -> None:
    before, after = ranks
    if kind == "draws globally" and before == 1:
        pytest.skip("one process refuses to seek: the sampler's draws are interleaved with training's")
    world = World(KINDS[kind], before, 6)
    world.begin(0)
    done = world.read(3)
    position = world.cursors[0].state_dict(3)
    rest = world.read()
    resumed = World(KINDS[kind], after, 6)
    resumed.states[0] = world.states[0]
    resumed.begin(0, position)
    found = resumed.read()
    assert flat(found) == flat(rest)
    if kind not in ("replacement", "weighted"):
        assert sorted(flat(done) + flat(found)) == list(range(SIZE))
    assert {cursor.length for cursor in resumed.cursors} == {3 + len(found)}
    # The resumed run's position is counted in samples too.
    again = World(KINDS[kind], before, 6)
    again.begin(0, resumed.cursors[0].state_dict(5))
    assert flat(again.read()) == flat(found[2:])


def test_a_changed_batch_size_resumes_at_the_next_sample() -> None:
    world = World(KINDS["shuffled"], 1, 6)
    world.begin(0)
    world.read(3)
    position, rest = world.cursors[0].state_dict(3), world.read()
    resumed = World(KINDS["shuffled"], 1, 10)
    resumed.begin(0, position)
    found = resumed.read()
    assert flat(found) == flat(rest) and len(found[0]) == 10
    assert resumed.cursors[0].length == 3 + len(found)
    resumed.begin(1)
    assert len(resumed.read()) == resumed.cursors[0].length == 11


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_global_batch_size_is_the_same_on_any_number_of_ranks(ranks: int) -> None:
    world = World(KINDS["shuffled"], ranks, 6, global_batch=10)
    world.begin(0)
    assert [len(batch) for batch in world.read()] == [10] * 10 + [3]


@pytest.mark.parametrize("ranks", [2, 4])
def test_even_batches_pad_the_last_batch_with_its_own_samples(ranks: int) -> None:
    world = World(KINDS["in order"], ranks, 24 // ranks, even=True)
    world.begin(0)
    assert world.read()[-1] == [96, 97, 98, 99, 100, 101, 102, 96]


def test_without_even_batches_a_rank_may_have_no_last_batch() -> None:
    def make(size: int) -> Loader:
        return DataLoader(Indices(SIZE), batch_sampler=BatchSampler(SequentialSampler(range(5)), 2, False))

    world = World(make, 2, 0)
    world.begin(0)
    assert world.read() == [[0, 1, 2, 3], [4]]


class CountedIndices(list[int]):
    """Indices that count how many of them were read."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        self.read += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("kind", [RankBatches, EvenBatches])
def test_a_rank_reads_only_its_own_share_of_a_global_batch(kind: type[RankBatches]) -> None:
    indices = CountedIndices(range(1000))
    batches = kind(Order(SubsetRandomSampler(indices), lambda state: state), 3, 100, 2)
    drawn = [next(iter(batches)) for _ in range(3)]
    assert indices.read == sum(map(len, drawn)) == 6


def test_a_shuffle_takes_eight_bytes_a_sample() -> None:
    """Those of torch's permutation, which Python does not count: its integers would take 32, and a list of them 8."""
    count = 200_000
    batches = RankBatches(Order(RandomSampler(range(count)), lambda state: state), 1, 8, 4)
    tracemalloc.start()
    iterator = iter(batches)
    for _ in range(100):
        next(iterator)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < count


@pytest.mark.parametrize("ranks", [2, 4])
def test_drop_last_drops_an_incomplete_global_batch(ranks: int) -> None:
    world = World(lambda size: DataLoader(Indices(SIZE), size, drop_last=True), ranks, 24 // ranks)
    world.begin(0)
    assert flat(world.read()) == list(range(96))
    assert world.cursors[0].length == 4


def test_each_ranks_workers_draw_different_numbers_and_rank_0s_match_one_process() -> None:
    def make(size: int) -> Loader:
        return DataLoader(Noise(SIZE), size, num_workers=1)

    found = []
    for ranks in (1, 2):
        world = World(make, ranks, 8)
        world.states = [world.states[0]] * ranks
        world.begin(0)
        for rank in range(ranks):
            drawn = world.as_rank(rank, lambda rank=rank, world=world: next(world.iterators[rank]))
            found.append(drawn if ranks == 1 else drawn[0])
    one_process, first, second = found
    assert torch.equal(one_process, first)
    assert not torch.equal(first, second)


class Noise(Indices):
    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(())


# streams --------------------------------------------------------------------------------------------------------------
class Stream(IterableDataset[Tensor]):
    """Yields 0, 1, … in an order drawn from the global generators on the way; saves its position."""

    def __init__(self) -> None:
        self.left: list[int] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]

    def __iter__(self) -> Iterator[Tensor]:
        if self.left is None:
            self.left = list(range(53))
        while self.left:
            yield torch.tensor(self.left.pop(random.randrange(len(self.left))))
        self.left = None


class WorkerSplitStream(IterableDataset[Tensor]):
    """Splits 53 samples among its workers."""

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        return iter([torch.tensor(index) for index in range(number, 53, count)])


class ReversedLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


STREAMS: dict[str, Callable[[int], Any]] = {
    "iterable": lambda size: DataLoader(Stream(), size),
    "workers": lambda size: DataLoader(WorkerSplitStream(), size, num_workers=2),
    "list": lambda size: [torch.arange(start, min(start + size, 53)) for start in range(0, 53, size)],
    "own __iter__": lambda size: ReversedLoader(Indices(53), size),
    "no batches": lambda size: DataLoader([torch.tensor([n]) for n in range(53)], batch_size=None),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", STREAMS)
def test_ranks_read_the_batches_of_a_stream_round_robin(kind: str, ranks: int) -> None:
    one_process, world = World(STREAMS[kind], 1, 5), World(STREAMS[kind], ranks, 5)
    for epoch in range(2 if kind != "iterable" else 1):
        one_process.begin(epoch)
        world.begin(epoch)
        expected, found = one_process.read(), world.read()
        assert flat(found) == flat(expected) and sorted(flat(found)) == list(range(53))
        assert len(found) == -(-len(expected) // ranks)
        assert world.cursors[0].length in (None, len(found))


@pytest.mark.parametrize("kind", ["iterable", "list", "no batches"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)], ids=str)
def test_a_stream_resumes_on_a_different_number_of_ranks(kind: str, ranks: tuple[int, int]) -> None:
    before, after = ranks
    world = World(STREAMS[kind], before, 5)
    world.begin(0)
    done = world.read(2)
    position = copy.deepcopy(world.cursors[0].state_dict(2))
    rng_at_position = world.states[0]
    rest = world.read()
    resumed = World(STREAMS[kind], after, 5)
    resumed.states[0] = rng_at_position
    resumed.begin(0, position)
    found = resumed.read(1)
    position = copy.deepcopy(resumed.cursors[0].state_dict(3))
    found += resumed.read()
    assert sorted(flat(done) + flat(found)) == list(range(53))
    if (kind, after) != ("iterable", 1):
        # One process draws from its own generators again, not from the stream's.
        assert flat(found) == flat(rest)
    assert resumed.cursors[0].length in (None, 2 + len(found))
    again = World(STREAMS[kind], after, 5)
    again.begin(0, position)
    assert sorted(flat(again.read())) == sorted(flat(found[1:]))


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", "sequential"])
def test_combined_loaders_are_sharded_by_whole_batches(mode: Any) -> None:
    def make(size: int) -> Any:
        return CombinedLoader([DataLoader(Indices(23), size), DataLoader(Indices(11), size)], mode)

    one_process = list(make(3))
    cursors = [LoaderCursor(shard(make(3), DataRanks(rank, 2), exchanges_sizes=False)) for rank in range(2)]
    pairs = zip(*(cursor.start(0) for cursor in cursors), strict=True)
    found = [batch for pair in pairs for batch, _ in pair if batch is not NO_SAMPLES]
    assert len(found) == len(one_process)
    assert all(str(one) == str(other) for one, other in zip(found, one_process, strict=True))


def test_a_users_distributed_sampler_is_not_sharded_again() -> None:
    def loader(count: int, rank: int) -> Loader:
        return DataLoader(Indices(SIZE), 8, sampler=DistributedSampler(Indices(SIZE), count, rank))

    own = loader(2, 1)
    assert shard(own, DataRanks(1, 2)) is own
    with pytest.raises(ConfigurationError, match=r"rank 1 of 2, but this is rank 1 of 4"):
        shard(own, DataRanks(1, 4))


def test_a_global_batch_size_requires_a_loader_sharded_by_samples() -> None:
    with pytest.raises(ConfigurationError, match="global_batch_size=8 needs a DataLoader"):
        shard([torch.zeros(2)], DataRanks(0, 2, global_batch=8))
