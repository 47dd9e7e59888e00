"""The indices of a batch's samples: they name the samples loaded, and asking for them changes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from samples import EpochOrder, Indices, LazyOrder, Stream
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from leyden.data.cursor import LoaderCursor

SIZE = 23


class EagerOrder(LazyOrder):
    """Draws its order as soon as its iterator is created."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist())


class OwnBatches(LazyOrder):
    """A user's batch sampler."""

    def __len__(self) -> int:
        return -(-self.size // 5)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.size).tolist()
        yield from (order[start : start + 5] for start in range(0, self.size, 5))


class InPlace(LazyOrder):
    """Shuffles its own list in place, so each epoch's order depends on the one before."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.order = list(range(size))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)


class InPlaceWithState(InPlace):
    """An InPlace that saves and restores its order."""

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


class IndexByIndex(LazyOrder):
    """Draws each index only when asked for it."""

    def __iter__(self) -> Iterator[int]:
        yield from (int(torch.randint(self.size, ())) for _ in range(self.size))


def loader(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Indices(SIZE), **{"batch_size": 4, **settings})


LISTS: Any = [[3, 1], [2]]
KNOWN: dict[str, Any] = {
    "in order, drop_last": lambda **more: loader(drop_last=True, **more),
    "shuffled": lambda **more: loader(shuffle=True, **more),
    "own generator": lambda **more: loader(shuffle=True, generator=torch.Generator(), **more),
    "no batches": lambda **more: loader(batch_size=None, shuffle=True, **more),
    "weighted": lambda **more: loader(sampler=WeightedRandomSampler([1.0] * SIZE, SIZE), **more),
    "with replacement": lambda **more: loader(sampler=RandomSampler(range(SIZE), replacement=True), **more),
    "set_epoch": lambda **more: loader(sampler=EpochOrder(SIZE), **more),
    "lazy": lambda **more: loader(sampler=LazyOrder(SIZE), **more),
    "eager": lambda **more: loader(sampler=EagerOrder(SIZE), **more),
    "batch sampler": lambda **more: DataLoader(Indices(SIZE), batch_sampler=OwnBatches(SIZE), **more),
    "list of batches": lambda **more: DataLoader(Indices(SIZE), batch_sampler=LISTS, **more),
    "shuffled in place, with a state": lambda **more: loader(sampler=InPlaceWithState(SIZE), **more),
    "distributed sampler": lambda **more: loader(sampler=DistributedSampler(Indices(SIZE), 2, 1), **more),
}
UNKNOWN: dict[str, Any] = {
    "shuffled in place": lambda: loader(sampler=InPlace(SIZE)),
    "drawn lazily": lambda: loader(sampler=IndexByIndex(SIZE)),
    "iterator of batches": lambda: DataLoader(Indices(SIZE), batch_sampler=iter(LISTS)),
    "iterable dataset": lambda: DataLoader(Stream(range(8)), batch_size=4),  # type: ignore[arg-type]
    "list": lambda: [torch.tensor([0]), torch.tensor([1])],
}
WORKERS = [
    {},
    pytest.param({"num_workers": 2}, marks=pytest.mark.full),
    pytest.param({"num_workers": 2, "persistent_workers": True}, marks=pytest.mark.full),
]


def epochs_of(cursor: LoaderCursor, asks_for_indices: bool) -> tuple[list[Any], list[Any]]:
    """Returns the samples of two epochs and the indices of each batch, or None for each unless asked for."""
    torch.manual_seed(3)
    random.seed(3)
    read, indices_read = [], []
    for epoch in range(2):
        for number, batch in enumerate(cursor.start(epoch)):
            # Training draws random numbers between two batches, too.
            torch.rand(3)
            read.append(batch.reshape(-1).tolist() if isinstance(batch, Tensor) else [batch])
            found = cursor.indices(max(0, number - 1), number + 1) if asks_for_indices else None
            indices_read.append(None if found is None else found[-1].here)
    return read, indices_read


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", KNOWN)
def test_indices_name_the_loaded_samples_and_do_not_change_the_run(name: str, workers: dict[str, Any]) -> None:
    read, indices_read = epochs_of(LoaderCursor(KNOWN[name](**workers)), asks_for_indices=True)
    assert indices_read == read and read
    assert epochs_of(LoaderCursor(KNOWN[name](**workers)), asks_for_indices=False)[0] == read


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_order_that_cannot_be_redrawn_has_no_indices(name: str) -> None:
    read, indices_read = epochs_of(LoaderCursor(UNKNOWN[name]()), asks_for_indices=True)
    assert read and set(indices_read) == {None}
    assert epochs_of(LoaderCursor(UNKNOWN[name]()), asks_for_indices=False)[0] == read


@pytest.mark.parametrize("name", ["shuffled", "lazy", "shuffled in place, with a state"])
def test_after_a_resume_indices_are_known_from_its_position(name: str) -> None:
    torch.manual_seed(3)
    random.seed(3)
    cursor = LoaderCursor(KNOWN[name]())
    batches = cursor.start(0)
    next(batches), next(batches)
    position = cursor.state_dict(2)
    rest = [batch.tolist() for batch in batches]
    again = LoaderCursor(KNOWN[name]())
    for number, batch in enumerate(again.resume(0, position), start=2):
        found = again.indices(number, number + 1)
        assert found is not None and found[0].here == found[0].everywhere == batch.tolist() == rest[number - 2]
    assert again.indices(1, 3) is None


def test_indices_are_drawn_from_a_copy_of_the_users_sampler() -> None:
    order = InPlaceWithState(SIZE)
    batches: Sampler[Any] = BatchSampler(order, 4, drop_last=False)
    cursor = LoaderCursor(DataLoader(Indices(SIZE), batch_sampler=batches))
    random.seed(1)
    first = next(cursor.start(0)).tolist()
    before = list(order.order)
    found = cursor.indices(0, 1)
    assert found is not None and found[0].here == first and order.order == before
