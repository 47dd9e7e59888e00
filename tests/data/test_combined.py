"""CombinedLoader: modes, limits, and exact resume."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from samples import Indices, LazyOrder
from torch import Tensor
from torch.utils.data import DataLoader

from leyden.core.errors import ConfigurationError
from leyden.data.combined import CombinedLoader, Mode, holds_loaders
from leyden.data.cursor import LoaderCursor, lookahead
from leyden.data.rng import rng_state, set_rng_state

LONG, SHORT, LONGEST = [1, 2, 3, 4, 5], [10, 20], [7, 8, 9, 10, 11, 12]


def test_min_size_stops_with_the_shortest_loader() -> None:
    loader = CombinedLoader([LONG, SHORT], "min_size")
    assert list(loader) == [[1, 10], [2, 20]]
    assert len(loader) == 2


def test_max_size_cycle_restarts_the_shorter_loaders() -> None:
    loader = CombinedLoader({"a": LONG, "b": SHORT}, "max_size_cycle")
    assert [(batch["a"], batch["b"]) for batch in loader] == [(1, 10), (2, 20), (3, 10), (4, 20), (5, 10)]
    assert len(loader) == 5


def test_max_size_yields_none_for_exhausted_loaders() -> None:
    loader = CombinedLoader((LONG, SHORT), "max_size")
    assert list(loader) == [(1, 10), (2, 20), (3, None), (4, None), (5, None)]
    assert len(loader) == 5


def test_sequential_reads_one_loader_after_another() -> None:
    loader = CombinedLoader([SHORT, LONG[:3]], "sequential")
    assert list(loader) == [(10, 0, 0), (20, 1, 0), (1, 0, 1), (2, 1, 1), (3, 2, 1)]
    assert len(loader) == 5
    assert list(CombinedLoader([[[]], SHORT], "sequential"))[-1] == (20, 1, 1)


def test_nested_collections_and_named_tuples_keep_their_structure() -> None:
    Pair = namedtuple("Pair", "left right")
    loader = CombinedLoader({"x": Pair(range(2), {"deep": range(5, 7)}), "y": range(2)}, "min_size")
    assert len(loader.flattened) == 3
    assert list(loader) == [{"x": Pair(0, {"deep": 5}), "y": 0}, {"x": Pair(1, {"deep": 6}), "y": 1}]


@pytest.mark.parametrize(
    ("mode", "limits", "expected"),
    [
        ("min_size", [3, None], [[1, 10], [2, 20]]),
        ("min_size", 1, [[1, 10]]),
        ("max_size", [3, 1], [[1, 10], [2, None], [3, None]]),
        ("max_size_cycle", [3, 1], [[1, 10], [2, 10], [3, 10]]),
        ("sequential", [2, 1], [(1, 0, 0), (2, 1, 0), (10, 0, 1)]),
        ("sequential", [0, 1], [(10, 0, 1)]),
    ],
)
def test_limits_apply_to_each_loader(mode: Mode, limits: Any, expected: list[Any]) -> None:
    loader = CombinedLoader([LONG, SHORT], mode, limits)
    assert list(loader) == expected
    assert len(loader) == len(expected)


def test_a_loader_without_a_length_leaves_the_combined_loader_without_one() -> None:
    loader = CombinedLoader([LONG, (value for value in SHORT)], "max_size")
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    assert LoaderCursor(loader).length is None
    assert len(list(loader)) == 5


def test_configuration_errors_name_the_fix() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'max_size'"):
        CombinedLoader([LONG], "max_sise")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="holds no loader"):
        CombinedLoader([])
    with pytest.raises(ConfigurationError, match="2 loaders but 1 limits"):
        CombinedLoader([LONG, SHORT], "min_size", [1])
    with pytest.raises(ConfigurationError, match="read more than once"):
        list(CombinedLoader([LONG, iter(SHORT)], "max_size_cycle"))


def test_a_list_of_batches_is_not_a_collection_of_loaders() -> None:
    x = torch.zeros(2)
    assert holds_loaders([DataLoader(range(3)), [(x, x), (x, x)]])  # type: ignore[arg-type]
    assert holds_loaders({"a": range(3), "b": [x, x]}) is False  # a dict with a tensor list is a batch
    for batches in ([x, x], [(x, x)], [{"x": x}], [1, 2], ["a"], [], {"x": x}):
        assert not holds_loaders(batches)


# resume ---------------------------------------------------------------------------------------------------------------
class Noisy(Indices):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand(())


class UnsizedLoader:
    """A stateful loader without a length."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < 9:
            self.at += 1
            yield torch.rand(self.at)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loaders(mode: Mode, kind: str) -> CombinedLoader:
    own = torch.Generator().manual_seed(2)
    parts: dict[str, Any] = {
        "a": DataLoader(Noisy(20), 3, shuffle=True, generator=own if kind == "one generator" else None),
        "b": DataLoader(Noisy(9), 4, shuffle=True, generator=None if kind == "global" else own),
    }
    if kind == "global":
        parts["d"] = DataLoader(Noisy(11), 2, sampler=LazyOrder(11), num_workers=0)
    if kind == "unsized":
        parts["c"] = UnsizedLoader()
    return CombinedLoader(parts, mode)


def step_record(epoch: int, batch: Any) -> Any:
    parts = batch.values() if isinstance(batch, dict) else batch
    values = [part.tolist() if isinstance(part, Tensor) else part for part in parts]
    return epoch, values, torch.rand(()).item()


def batches(cursor: LoaderCursor, iterator: Iterator[Any]) -> Iterator[Any]:
    return iterator if cursor.length is not None else (batch for batch, _ in lookahead(iterator))


@pytest.mark.parametrize("kind", ["sized", "unsized", "global", "one generator"])
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", "sequential"])
def test_every_position_resumes_exactly(mode: Mode, kind: str) -> None:
    torch.manual_seed(1)
    cursor, records, states = LoaderCursor(loaders(mode, kind)), [], []
    for epoch in range(2):
        iterator = cursor.start(epoch)
        for count, batch in enumerate(batches(cursor, iterator), 1):
            records.append(step_record(epoch, batch))
            states.append(copy.deepcopy((epoch, cursor.state_dict(count), rng_state())))
        if epoch == 0:
            between = copy.deepcopy((cursor.rest_state(), rng_state(), len(records)))
    if kind != "unsized":
        torch.manual_seed(1)
        plain = loaders(mode, kind)
        assert [step_record(epoch, batch) for epoch in range(2) for batch in plain] == records
    for done, (epoch, state, rng) in enumerate(states, 1):
        torch.manual_seed(50)
        cursor, resumed = LoaderCursor(loaders(mode, kind)), []
        iterator = cursor.resume(epoch, state)
        set_rng_state(rng)
        resumed += [step_record(epoch, batch) for batch in batches(cursor, iterator)]
        if epoch == 0:
            resumed += [step_record(1, batch) for batch in batches(cursor, cursor.start(1))]
        assert resumed == records[done:], done
    torch.manual_seed(50)
    cursor = LoaderCursor(loaders(mode, kind))
    cursor.load_rest_state(between[0])
    set_rng_state(between[1])
    assert [step_record(1, batch) for batch in batches(cursor, cursor.start(1))] == records[between[2] :]


def test_resuming_with_a_different_number_of_loaders_raises() -> None:
    cursor = LoaderCursor(CombinedLoader([LONG, SHORT], "max_size"))
    next(cursor.start(0))
    with pytest.raises(ConfigurationError, match="positions of 2 loaders, but this CombinedLoader has 1"):
        LoaderCursor(CombinedLoader([LONG], "max_size")).resume(0, cursor.state_dict(1))


def test_flattened_may_be_set_to_as_many_loaders() -> None:
    loader = CombinedLoader({"a": LONG, "b": SHORT}, "min_size")
    loader.flattened = [[6, 7], [8, 9, 10]]
    assert list(loader) == [{"a": 6, "b": 8}, {"a": 7, "b": 9}] and loader.iterables == {"a": [6, 7], "b": [8, 9, 10]}
    with pytest.raises(ConfigurationError, match="set to 1 loaders, but it has 2"):
        loader.flattened = [LONG]
