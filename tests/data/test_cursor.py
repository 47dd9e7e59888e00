"""A resumed run gets the batches and random numbers of an uninterrupted run."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from samples import EpochOrder, Indices, LazyOrder
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from leyden.data.cursor import LoaderCursor, lookahead
from leyden.data.rng import rng_state, set_rng_state

EPOCHS = 3
SIZE = 22
BATCH = 4
COUNT = 6


class Counted(Indices):
    """Counts how often each sample is loaded, in shared memory so that workers count too."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.loaded = torch.zeros(size, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Tensor:
        self.loaded[index] += 1
        return super().__getitem__(index)


class Noisy(Counted):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand(()) + random.random() + float(np.random.rand())


class OwnGenerators(Counted):
    """Draws from its own generators, one of each library."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_rng = torch.Generator().manual_seed(3)
        self.python_rng = random.Random(3)
        self.numpy_rng = np.random.default_rng(3)
        self.legacy_rng = np.random.RandomState(3)

    def __getitem__(self, index: int) -> Tensor:
        noise = self.python_rng.random() + self.numpy_rng.random() + self.legacy_rng.rand()
        return super().__getitem__(index) + torch.rand((), generator=self.torch_rng) + noise


class EagerGlobal(Sampler[int]):
    """Draws from the global generators when its iterator is created, not at the first index."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.shuffle(order)
        return iter(np.random.permutation(order)[torch.randperm(SIZE).numpy()].tolist())


class OwnRandom(Sampler[int]):
    """Draws each index from its own generator, whose state carries over between epochs."""

    def __init__(self) -> None:
        self.rng = random.Random(5)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield self.rng.randrange(SIZE)


class Unsized(OwnRandom):
    __len__ = None  # type: ignore[assignment]


class Stateful(OwnRandom):
    """Counts its passes, which only its state_dict saves."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.passes)).tolist())

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class VaryingBatches(Sampler[list[int]]):
    """A user's batch sampler, with batches of different sizes."""

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE).tolist()
        for number in range(COUNT):
            yield order[number * (number - 1) // 2 : number * (number + 1) // 2 + 1]


class StatefulLoader:
    """A user's own loader, with a state_dict."""

    def __init__(self) -> None:
        self.position, self.epoch = 0, 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch))
        while self.position < COUNT:
            self.position += 1
            yield order[(self.position - 1) * BATCH :][:BATCH] + torch.rand(())
        self.position, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.epoch = state["position"], state["epoch"]


class StatefulWithoutLength(StatefulLoader):
    __len__ = None  # type: ignore[assignment]


class PassCountingStream(IterableDataset[Tensor]):
    """An iterable dataset that numbers its passes and continues where its last iterator stopped."""

    def __init__(self) -> None:
        self.passes, self.at = 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < 7:
            self.at += 1
            yield torch.tensor(100.0 * self.passes + self.at)
        self.passes, self.at = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.at = state["passes"], state["at"]


class Stream(IterableDataset[Tensor]):
    """An iterable dataset that saves its position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < SIZE:
            self.position += 1
            yield torch.tensor(float(self.position)) + torch.rand(())
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("limit", [None, 2])
def test_an_iterable_datasets_state_carries_over_between_epochs(limit: int | None) -> None:
    def epoch(cursor: LoaderCursor, number: int) -> list[list[float]]:
        drawn = itertools.islice(cursor.start(number), limit)
        return [batch.tolist() for batch, _ in lookahead(drawn)]

    cursor = LoaderCursor(DataLoader(PassCountingStream(), 3))
    first = epoch(cursor, 0)
    rest = copy.deepcopy(cursor.rest_state(ended=limit is None))
    second = epoch(cursor, 1)
    assert first[0] == [1.0, 2.0, 3.0]
    assert second[0] == ([101.0, 102.0, 103.0] if limit is None else [7.0])
    cursor = LoaderCursor(DataLoader(PassCountingStream(), 3))
    cursor.load_rest_state(rest)
    assert epoch(cursor, 1) == second


def weighted(**options: Any) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + i for i in range(SIZE)], SIZE, **options)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def with_shared_generator(**options: Any) -> DataLoader[Any]:
    shared = generator()
    return DataLoader(
        Counted(), BATCH, sampler=RandomSampler(range(SIZE), generator=shared), generator=shared, **options
    )


WITHOUT_WORKERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(Counted(), BATCH, shuffle=True),
    "sequential": lambda: DataLoader(Counted(), BATCH),
    "drop_last": lambda: DataLoader(Counted(), BATCH, shuffle=True, drop_last=True),
    "no_batches": lambda: DataLoader(Counted(6), batch_size=None, shuffle=True),
    "random_data": lambda: DataLoader(Noisy(), BATCH, shuffle=True),
    "own_generators": lambda: DataLoader(OwnGenerators(), BATCH, shuffle=True),
    "generator": lambda: DataLoader(Noisy(), BATCH, shuffle=True, generator=generator()),
    "shared_generator": with_shared_generator,
    "replacement": lambda: DataLoader(Noisy(), BATCH, sampler=RandomSampler(range(SIZE), True, 90)),
    "replacement_generator": lambda: DataLoader(
        Counted(), BATCH, sampler=RandomSampler(range(SIZE), True, 90, generator=generator())
    ),
    "several_rounds": lambda: DataLoader(
        Counted(), BATCH, sampler=RandomSampler(range(SIZE), num_samples=70, generator=generator())
    ),
    "whole_rounds": lambda: DataLoader(
        Counted(), BATCH, sampler=RandomSampler(range(SIZE), num_samples=44, generator=generator())
    ),
    "subset": lambda: DataLoader(Noisy(), BATCH, sampler=SubsetRandomSampler(range(3, SIZE))),
    "weighted": lambda: DataLoader(Noisy(), BATCH, sampler=weighted()),
    "weighted_generator": lambda: DataLoader(
        Counted(), BATCH, sampler=weighted(replacement=False, generator=generator())
    ),
    "set_epoch": lambda: DataLoader(Noisy(), BATCH, sampler=EpochOrder(SIZE)),
    "eager_sampler": lambda: DataLoader(Noisy(), BATCH, sampler=EagerGlobal()),
    "lazy_sampler": lambda: DataLoader(Noisy(), BATCH, sampler=LazyOrder(SIZE)),
    "own_random": lambda: DataLoader(Noisy(), BATCH, sampler=OwnRandom()),
    "stateful_sampler": lambda: DataLoader(Noisy(), BATCH, sampler=Stateful()),
    "batch_sampler": lambda: DataLoader(Noisy(), batch_sampler=VaryingBatches()),
    "torch_batch_sampler": lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(OwnRandom(), BATCH, True)),
    "list_sampler": lambda: DataLoader(Noisy(), BATCH, sampler=[5, 3, 1, 7, 9, 2, 4, 6, 0, 11]),
    "unsized_sampler": lambda: DataLoader(Noisy(), BATCH, sampler=Unsized()),
    "stateful_loader": StatefulLoader,
    "stateful_loader_without_length": StatefulWithoutLength,
    "stateful_stream": lambda: DataLoader(Stream(), BATCH),
    "list": lambda: [torch.tensor([float(i)]) for i in range(COUNT)],
    "range": lambda: range(COUNT),
}
WITH_WORKERS: dict[str, Callable[..., Any]] = {
    "shuffle": lambda **options: DataLoader(Counted(), BATCH, shuffle=True, **options),
    "generator": lambda **options: DataLoader(Counted(), BATCH, shuffle=True, generator=generator(), **options),
    "shared_generator": with_shared_generator,
    "eager_sampler": lambda **options: DataLoader(Counted(), BATCH, sampler=EagerGlobal(), **options),
    "lazy_sampler": lambda **options: DataLoader(Counted(), BATCH, sampler=LazyOrder(SIZE), **options),
    "stateful_sampler": lambda **options: DataLoader(Counted(), BATCH, sampler=Stateful(), **options),
    "batch_sampler": lambda **options: DataLoader(Counted(), batch_sampler=VaryingBatches(), **options),
    "unsized_sampler": lambda **options: DataLoader(Counted(), BATCH, sampler=Unsized(), **options),
}
Record = tuple[Any, ...]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def step_record(epoch: int, batch: Any) -> Record:
    """Returns what a training step sees: its batch, and random numbers drawn as dropout draws them."""
    values = batch.tolist() if isinstance(batch, Tensor) else batch
    return epoch, values, torch.rand(()).item(), random.random(), np.random.rand()


def plain_run(make: Callable[[], Any]) -> list[Record]:
    seed(1)
    loader, records = make(), []
    for epoch in range(EPOCHS):
        if hasattr(loader, "sampler") and hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            records.append(step_record(epoch, batch))
    return records


def batches(cursor: LoaderCursor, iterator: Iterator[Any]) -> Iterator[Any]:
    if cursor.length is not None:
        return iterator
    return (batch for batch, _ in lookahead(iterator))


def saved(cursor: LoaderCursor, count: int) -> dict[str, Any]:
    """Returns a checkpoint of this moment, copied so that later batches cannot change it."""
    return copy.deepcopy({"loader": cursor.state_dict(count), "rng": rng_state()})


def full_run(make: Callable[[], Any]) -> tuple[list[Record], dict[tuple[int, int], dict[str, Any]], dict[int, Any]]:
    """Runs through the cursor, with a checkpoint after every batch and between epochs."""
    seed(1)
    cursor, records = LoaderCursor(make()), []
    inside: dict[tuple[int, int], dict[str, Any]] = {}
    between: dict[int, Any] = {}
    for epoch in range(EPOCHS):
        iterator = cursor.start(epoch)
        inside[epoch, 0] = saved(cursor, 0)
        for count, batch in enumerate(batches(cursor, iterator), 1):
            records.append(step_record(epoch, batch))
            inside[epoch, count] = saved(cursor, count)
        between[epoch] = copy.deepcopy({"rest": cursor.rest_state(), "rng": rng_state()})
    return records, inside, between


def resumed_run(make: Callable[[], Any], position: tuple[int, int], state: dict[str, Any]) -> list[Record]:
    """Resumes as a new process would: with new objects and other random numbers."""
    seed(77)
    torch.rand(5)
    cursor, records = LoaderCursor(make()), []
    epoch, _ = position
    iterator = cursor.resume(epoch, state["loader"])
    set_rng_state(state["rng"])
    while True:
        for batch in batches(cursor, iterator):
            records.append(step_record(epoch, batch))
        epoch += 1
        if epoch == EPOCHS:
            return records
        iterator = cursor.start(epoch)


def rest_of(records: list[Record], position: tuple[int, int]) -> list[Record]:
    epoch, done = position
    before = sum(record[0] < epoch for record in records)
    return records[before + done :]


@pytest.mark.parametrize("name", WITHOUT_WORKERS)
def test_every_position_resumes_exactly_without_workers(name: str) -> None:
    make = WITHOUT_WORKERS[name]
    records, inside, _ = full_run(make)
    if "without_length" not in name and name not in ("unsized_sampler", "stateful_stream"):
        # A loader without a length is read ahead, so its random numbers come in another order than the plain loop's.
        assert records == plain_run(make)
    assert len(records) > 2 * EPOCHS
    for position, state in inside.items():
        assert resumed_run(make, position, state) == rest_of(records, position), position


@pytest.mark.parametrize("persistent", [False, True], ids=["new_workers", "persistent"])
@pytest.mark.parametrize("name", WITH_WORKERS)
def test_positions_resume_exactly_with_workers(name: str, persistent: bool) -> None:
    def make() -> Any:
        return WITH_WORKERS[name](num_workers=2, persistent_workers=persistent, prefetch_factor=1)

    records, inside, _ = full_run(make)
    if name != "unsized_sampler":
        assert records == plain_run(make)
    last = max(count for epoch, count in inside if epoch == 1)
    for position in [(0, 2), (1, 0), (1, 3), (1, last), (2, 1)]:
        assert resumed_run(make, position, inside[position]) == rest_of(records, position), position


@pytest.mark.parametrize("name", WITHOUT_WORKERS)
def test_a_position_between_epochs_resumes_exactly(name: str) -> None:
    make = WITHOUT_WORKERS[name]
    records, _, between = full_run(make)
    check_between(make, records, between)


@pytest.mark.parametrize("name", ["shuffle", "stateful_sampler", "shared_generator"])
def test_a_position_between_epochs_resumes_exactly_with_persistent_workers(name: str) -> None:
    def make() -> Any:
        return WITH_WORKERS[name](num_workers=1, persistent_workers=True)

    records, _, between = full_run(make)
    check_between(make, records, between)


def check_between(make: Callable[[], Any], records: list[Record], between: dict[int, Any]) -> None:
    for ended in range(EPOCHS - 1):
        seed(77)
        cursor, resumed = LoaderCursor(make()), []
        cursor.load_rest_state(between[ended]["rest"])
        set_rng_state(between[ended]["rng"])
        for epoch in range(ended + 1, EPOCHS):
            resumed += [step_record(epoch, batch) for batch in batches(cursor, cursor.start(epoch))]
        assert resumed == rest_of(records, (ended + 1, 0))


@pytest.mark.parametrize("name", ["stateful_loader", "generator"])
def test_epochs_cut_short_by_a_limit_resume_exactly(name: str) -> None:
    make = WITHOUT_WORKERS[name]

    def run(cursor: LoaderCursor, first: int) -> list[Record]:
        return [
            step_record(epoch, batch)
            for epoch in range(first, EPOCHS)
            for batch, _ in zip(cursor.start(epoch), range(3))
        ]

    seed(1)
    cursor = LoaderCursor(make())
    whole = run(cursor, 0)
    seed(1)
    cursor = LoaderCursor(make())
    [step_record(0, batch) for batch, _ in zip(cursor.start(0), range(3))]
    rest, rng = copy.deepcopy(cursor.rest_state(ended=False)), rng_state()
    seed(77)
    cursor = LoaderCursor(make())
    cursor.load_rest_state(rest)
    set_rng_state(rng)
    assert run(cursor, 1) == whole[3:]


@pytest.mark.parametrize("workers", [0, 2])
def test_seeking_loads_no_sample_before_the_position(workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Counted(), BATCH, sampler=EpochOrder(SIZE), num_workers=workers)

    _, inside, _ = full_run(make)
    loader = make()
    left = list(LoaderCursor(loader).resume(1, inside[1, 3]["loader"]))
    indices = [int(value) for batch in left for value in batch.tolist()]
    assert len(indices) == SIZE - 3 * BATCH
    assert loader.dataset.loaded.nonzero().flatten().tolist() == sorted(indices)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_cursor_leaves_the_loader_unchanged(workers: int) -> None:
    loader = DataLoader(Counted(), BATCH, shuffle=True, num_workers=workers)
    before = dict(vars(loader))
    cursor = LoaderCursor(loader)
    iterator = cursor.start(0)
    next(iterator)
    state = cursor.state_dict(1)
    resumed = cursor.resume(0, state)
    assert vars(loader) == before
    assert len(resumed) == COUNT  # type: ignore[arg-type]
    assert type(resumed) is type(iter(loader))


def test_the_state_holds_only_tensors_and_plain_python() -> None:
    def check(value: Any) -> None:
        if isinstance(value, dict):
            assert all(type(key) in (str, int) for key in value)
            [check(item) for item in value.values()]
        elif isinstance(value, (list, tuple)):
            [check(item) for item in value]
        else:
            assert type(value) in (Tensor, int, float, bool, str, bytes, type(None)), value

    for make in WITHOUT_WORKERS.values():
        _, inside, between = full_run(make)
        check(list(inside.values()))
        check(between)


def test_a_million_batches_are_skipped_without_loading() -> None:
    count, size = 1_000_000, 32

    class Counting(Dataset[int]):
        loaded = 0

        def __len__(self) -> int:
            return size * (count + 1)

        def __getitem__(self, index: int) -> int:
            Counting.loaded += 1
            return index

    cursor = LoaderCursor(DataLoader(Counting(), size, shuffle=True, collate_fn=list))
    seed(5)
    cursor.start(0)
    state = cursor.state_dict(count)
    iterator = cursor.resume(0, state)
    assert Counting.loaded == 0
    left = list(iterator)
    assert Counting.loaded == size
    seed(5)
    torch.empty((), dtype=torch.int64).random_()
    order = torch.randperm(
        size * (count + 1),
        generator=torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item())),
    )
    assert left == [order[-size:].tolist()]


def test_set_epoch_is_called_once_on_every_part() -> None:
    calls: list[tuple[str, int]] = []

    class RecordingSampler(EpochOrder):
        def set_epoch(self, epoch: int) -> None:
            calls.append(("sampler", epoch))

    class RecordingDataset(Counted):
        def set_epoch(self, epoch: int) -> None:
            calls.append(("data", epoch))

    cursor = LoaderCursor(DataLoader(RecordingDataset(), BATCH, sampler=RecordingSampler(SIZE)))
    cursor.start(4)
    assert sorted(calls) == [("data", 4), ("sampler", 4)]
    calls.clear()
    cursor.resume(5, cursor.state_dict(2))
    assert sorted(calls) == [("data", 5), ("sampler", 5)]
    calls.clear()
    cursor.start()
    assert calls == []


def test_a_sized_loader_is_not_read_ahead() -> None:
    data = Counted()
    cursor = LoaderCursor(DataLoader(data, BATCH))
    iterator = cursor.start(0)
    assert data.loaded.sum() == 0
    next(iterator)
    assert data.loaded.sum() == BATCH
    data.loaded.zero_()
    iterator = cursor.resume(0, cursor.state_dict(1))
    assert data.loaded.sum() == 0
    assert next(iterator).tolist() == [4.0, 5.0, 6.0, 7.0]


def test_no_reference_cycle_keeps_a_loader_alive() -> None:
    """Workers end with the last reference to their loader: a garbage collection elsewhere would wait for them."""
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        for make in (
            WITHOUT_WORKERS["shuffle"],
            lambda: WITH_WORKERS["lazy_sampler"](num_workers=1, persistent_workers=True),
        ):
            loader = make()
            cursor = LoaderCursor(loader)
            iterator = cursor.start(0)
            next(iterator)
            iterator = cursor.resume(0, cursor.state_dict(1))
            next(iterator)
            seen = weakref.ref(loader), weakref.ref(iterator)
            del cursor, loader, iterator
            assert [reference() for reference in seen] == [None, None]
    finally:
        gc.enable()


def test_lookahead_keeps_no_batch_alive() -> None:
    import gc
    import weakref

    class Batch:
        pass

    pairs = lookahead(Batch() for _ in range(2))
    batch, last = next(pairs)
    seen = weakref.ref(batch)
    del batch
    gc.collect()
    assert seen() is None and not last
    assert next(pairs)[1] is True
    assert list(lookahead(iter(()))) == []
