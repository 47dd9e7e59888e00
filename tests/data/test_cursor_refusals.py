"""Positions a loader cannot seek to are refused, unless allow_replay lets it replay the batches before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from samples import Indices, Stream, Unsized
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from leyden.core.errors import ConfigurationError
from leyden.data.cursor import LoaderCursor, lookahead

SIZE = 22
BATCH = 4


class GlobalSampler(Sampler[int]):
    """Draws each index from torch's global generator, which training uses in between."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield int(torch.randint(SIZE, ()))


class SamplerAsProperty(DataLoader[Any]):
    """Overrides the batch_sampler attribute with a property."""

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        return vars(self)["kept"]

    @batch_sampler.setter
    def batch_sampler(self, value: Any) -> None:
        vars(self)["kept"] = value


def test_a_sampler_that_is_a_property_requires_allow_replay() -> None:
    def make() -> DataLoader[Any]:
        return SamplerAsProperty(Indices(SIZE), BATCH, shuffle=True)

    cursor = LoaderCursor(make())
    torch.manual_seed(1)
    whole = [batch.tolist() for batch in cursor.start(0)]
    state = cursor.state_dict(3)
    with pytest.raises(
        ConfigurationError, match=r"batch_sampler is a property of SamplerAsProperty.*allow_replay=True"
    ):
        LoaderCursor(make()).resume(0, state)
    torch.manual_seed(9)
    for begun, iterator in (
        (3, LoaderCursor(make(), allow_replay=True).resume(0, state)),
        (0, LoaderCursor(make()).resume(0, cursor.state_dict(0))),
    ):
        assert [batch.tolist() for batch in iterator] == whole[begun:]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_drawing_from_the_global_generator_requires_allow_replay(workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Indices(SIZE), BATCH, sampler=GlobalSampler(), num_workers=workers)

    cursor = LoaderCursor(make())
    torch.manual_seed(1)
    whole = [batch.tolist() for batch in cursor.start(0)]
    state = cursor.state_dict(3)
    with pytest.raises(ConfigurationError, match=r"GlobalSampler.*torch.Generator.*allow_replay=True"):
        LoaderCursor(make()).resume(0, state)
    torch.manual_seed(9)
    replayed = LoaderCursor(make(), allow_replay=True).resume(0, state)
    assert [batch.tolist() for batch in replayed] == whole[3:]


def values(iterator: Iterator[Any]) -> list[Any]:
    """Returns the remaining values, read one batch ahead as for any loader without a length."""
    return [batch.tolist() if isinstance(batch, Tensor) else batch for batch, _ in lookahead(iterator)]


@pytest.mark.parametrize(
    ("make", "name"), [(lambda: DataLoader(Stream(range(20)), 4), "Stream"), (lambda: Unsized(range(5)), "Unsized")]
)
def test_a_loader_without_a_state_requires_allow_replay(make: Callable[[], Any], name: str) -> None:
    whole = values(iter(make()))
    cursor = LoaderCursor(make())
    ahead = lookahead(cursor.start(0))
    next(ahead), next(ahead)
    state = cursor.state_dict(2)
    with pytest.raises(ConfigurationError, match=f"{name}.*state_dict.*allow_replay=True"):
        LoaderCursor(make()).resume(0, state)
    assert values(LoaderCursor(make(), allow_replay=True).resume(0, state)) == whole[2:]


def test_a_loader_without_a_state_resumes_at_its_start() -> None:
    cursor = LoaderCursor(DataLoader(Stream(range(20)), 4))
    iterator = cursor.start(0)
    resumed = LoaderCursor(DataLoader(Stream(range(20)), 4)).resume(0, cursor.state_dict(0))
    assert values(resumed) == values(iterator)


class StatefulStream(Stream):
    """Saves its position, but only in its own process."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_a_dataset_state_in_worker_processes_is_refused() -> None:
    cursor = LoaderCursor(DataLoader(StatefulStream(range(SIZE)), BATCH, num_workers=1))
    next(lookahead(cursor.start(0)))
    with pytest.raises(ConfigurationError, match="worker processes.*StatefulDataLoader"):
        cursor.resume(0, cursor.state_dict(1))


def test_a_shorter_dataset_is_refused() -> None:
    cursor = LoaderCursor(DataLoader(Indices(SIZE), BATCH))
    cursor.start(0)
    with pytest.raises(ConfigurationError, match="is at batch 5.*has only 2"):
        LoaderCursor(DataLoader(Indices(8), BATCH)).resume(0, cursor.state_dict(5))
