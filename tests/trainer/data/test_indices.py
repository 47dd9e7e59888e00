"""The indices of a batch's samples: they are those that were loaded, and to ask for them changes nothing."""

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

from leyden.trainer.data.cursor import LoaderCursor

SIZE = 23


class EagerOrder(LazyOrder):
    """Draws its order as soon as its iterator is made."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist())


class OwnBatches(LazyOrder):
    """Batches of a user's own."""

    def __len__(self) -> int:
        return -(-self.size // 5)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.size).tolist()
        yield from (order[start : start + 5] for start in range(0, self.size, 5))


class InPlace(LazyOrder):
    """Shuffles a list of its own, so that each epoch's order depends on the one before."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.order = list(range(size))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)


class InPlaceWithState(InPlace):
    """The same, with the methods by which a resume restores it."""

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


class Along(LazyOrder):
    """Draws each index when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        yield from (int(torch.randint(self.size, ())) for _ in range(self.size))


def loader(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Indices(SIZE), **{"batch_size": 4, **settings})


LISTS: Any = [[3, 1], [2]]
KNOWN: dict[str, Any] = {
    "in order, without the rest": lambda **more: loader(drop_last=True, **more),
    "shuffled": lambda **more: loader(shuffle=True, **more),
    "shuffled by a generator": lambda **more: loader(shuffle=True, generator=torch.Generator(), **more),
    "no batches": lambda **more: loader(batch_size=None, shuffle=True, **more),
    "weighted": lambda **more: loader(sampler=WeightedRandomSampler([1.0] * SIZE, SIZE), **more),
    "with replacement": lambda **more: loader(sampler=RandomSampler(range(SIZE), replacement=True), **more),
    "of the epoch": lambda **more: loader(sampler=EpochOrder(SIZE), **more),
    "of its own": lambda **more: loader(sampler=LazyOrder(SIZE), **more),
    "eager": lambda **more: loader(sampler=EagerOrder(SIZE), **more),
    "batches of its own": lambda **more: DataLoader(Indices(SIZE), batch_sampler=OwnBatches(SIZE), **more),
    "a list of batches": lambda **more: DataLoader(Indices(SIZE), batch_sampler=LISTS, **more),
    "with a state": lambda **more: loader(sampler=InPlaceWithState(SIZE), **more),
    "already split": lambda **more: loader(sampler=DistributedSampler(Indices(SIZE), 2, 1), **more),
}
SECRET: dict[str, Any] = {
    "shuffled in place": lambda: loader(sampler=InPlace(SIZE)),
    "drawn along": lambda: loader(sampler=Along(SIZE)),
    "used up by one pass": lambda: DataLoader(Indices(SIZE), batch_sampler=iter(LISTS)),
    "an iterable": lambda: DataLoader(Stream(range(8)), batch_size=4),  # type: ignore[arg-type]
    "a list": lambda: [torch.tensor([0]), torch.tensor([1])],
}
WORKERS = [
    {},
    pytest.param({"num_workers": 2}, marks=pytest.mark.full),
    pytest.param({"num_workers": 2, "persistent_workers": True}, marks=pytest.mark.full),
]


def epochs_of(cursor: LoaderCursor, asks: bool) -> tuple[list[Any], list[Any]]:
    """The samples of two epochs, and the indices of each batch, if they are asked for."""
    torch.manual_seed(3)
    random.seed(3)
    read, told = [], []
    for epoch in range(2):
        for number, batch in enumerate(cursor.start(epoch)):
            # As a training does, between two batches.
            torch.rand(3)
            read.append(batch.reshape(-1).tolist() if isinstance(batch, Tensor) else [batch])
            found = cursor.indices(max(0, number - 1), number + 1) if asks else None
            told.append(None if found is None else found[-1].here)
    return read, told


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", KNOWN)
def test_the_indices_are_those_of_the_loaded_samples_and_the_run_goes_on_as_without(
    name: str, workers: dict[str, Any]
) -> None:
    read, told = epochs_of(LoaderCursor(KNOWN[name](**workers)), asks=True)
    assert told == read and read
    assert epochs_of(LoaderCursor(KNOWN[name](**workers)), asks=False)[0] == read


@pytest.mark.parametrize("name", SECRET)
def test_an_order_that_cannot_be_drawn_again_has_no_indices(name: str) -> None:
    read, told = epochs_of(LoaderCursor(SECRET[name]()), asks=True)
    assert read and set(told) == {None}
    assert epochs_of(LoaderCursor(SECRET[name]()), asks=False)[0] == read


@pytest.mark.parametrize("name", ["shuffled", "of its own", "with a state"])
def test_after_a_resume_the_indices_are_known_from_there_on(name: str) -> None:
    torch.manual_seed(3)
    random.seed(3)
    cursor = LoaderCursor(KNOWN[name]())
    batches = cursor.start(0)
    next(batches), next(batches)
    place = cursor.state_dict(2)
    rest = [batch.tolist() for batch in batches]
    again = LoaderCursor(KNOWN[name]())
    for number, batch in enumerate(again.resume(0, place), start=2):
        found = again.indices(number, number + 1)
        assert found is not None and found[0].here == found[0].everywhere == batch.tolist() == rest[number - 2]
    assert again.indices(1, 3) is None


def test_a_batch_sampler_over_a_sampler_of_the_users_is_drawn_from_a_copy() -> None:
    order = InPlaceWithState(SIZE)
    batches: Sampler[Any] = BatchSampler(order, 4, drop_last=False)
    cursor = LoaderCursor(DataLoader(Indices(SIZE), batch_sampler=batches))
    random.seed(1)
    first = next(cursor.start(0)).tolist()
    before = list(order.order)
    found = cursor.indices(0, 1)
    assert found is not None and found[0].here == first and order.order == before
