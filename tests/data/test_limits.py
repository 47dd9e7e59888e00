"""Limits on a loader's batches, and loaders that are refused or read in order."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from samples import Stream
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from leyden.core.errors import ConfigurationError
from leyden.data.combined import CombinedLoader
from leyden.data.limits import (
    batches_of,
    check_not_empty,
    length_of,
    shuffles,
    warn_if_shuffled,
    without_shuffle,
)


@pytest.mark.parametrize(
    ("limit", "length", "expected"),
    [
        (1.0, 9, 9),
        (0.5, 9, 4),
        (0.0, 9, 0),
        (0, 9, 0),
        (1, 9, 1),
        (20, 9, 9),
        (1.0, None, None),
        (0.0, None, 0),
        (5, None, 5),
        (1.0, 0, 0),
        (0.5, 0, 0),
    ],
)
def test_a_limit_is_a_number_of_batches_or_a_fraction(limit: float, length: int | None, expected: int | None) -> None:
    assert batches_of(limit, length, "limit_train_batches") == expected


@pytest.mark.parametrize(
    ("limit", "length", "message"),
    [
        (0.01, 10, r"limit_val_batches=0.01 of 10 batches is less than one batch: pass at least 0.1"),
        (0.5, None, "no length"),
    ],
)
def test_an_impossible_limit_is_refused(limit: Any, length: int | None, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        batches_of(limit, length, "limit_val_batches")


def numbers(count: int) -> Any:
    return list(range(count))


def test_a_loader_without_a_length_has_length_none() -> None:
    assert length_of(DataLoader(numbers(5), 2)) == 3
    assert length_of(DataLoader(Stream(range(3)))) is None
    assert length_of(iter([1])) is None
    assert length_of([1, 2]) == 2


def test_empty_loaders_are_refused_with_the_likely_reason() -> None:
    with pytest.raises(ConfigurationError, match="validation loader has a length of 0.*dataset with samples"):
        check_not_empty([], "val")
    with pytest.raises(
        ConfigurationError, match="training loader.*3 samples, fewer than batch_size=8.*drop_last=False"
    ):
        check_not_empty(DataLoader(numbers(3), 8, drop_last=True), "train")
    check_not_empty(DataLoader(numbers(3)), "train")
    check_not_empty(DataLoader(Stream(range(3))), "train")


def test_a_shuffled_evaluation_loader_warns() -> None:
    with pytest.warns(UserWarning, match="validation loader shuffles"):
        warn_if_shuffled(DataLoader(numbers(4), shuffle=True), "val")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_shuffled(DataLoader(numbers(4)), "val")
    assert shuffles(DataLoader(numbers(4), batch_sampler=BatchSampler(RandomSampler(range(4)), 2, False)))


def test_overfitting_turns_off_shuffling_and_keeps_all_other_settings() -> None:
    collate = torch.tensor
    loader = DataLoader(numbers(10), 3, shuffle=True, drop_last=True, collate_fn=collate, num_workers=1)
    with pytest.warns(UserWarning, match="turned shuffling off"):
        fixed = without_shuffle(loader)
    assert [batch.tolist() for batch in fixed] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert (fixed.collate_fn, fixed.num_workers, fixed.batch_size, fixed.drop_last) == (collate, 1, 3, True)
    assert isinstance(loader.sampler, RandomSampler)
    with pytest.warns(UserWarning):
        assert list(without_shuffle(DataLoader(numbers(4), batch_size=None, shuffle=True))) == [0, 1, 2, 3]


def test_overfitting_turns_off_shuffling_inside_a_combined_loader() -> None:
    loader = CombinedLoader([DataLoader(numbers(4), shuffle=True), DataLoader(numbers(4))], "max_size")
    with pytest.warns(UserWarning):
        fixed = without_shuffle(loader)
    assert fixed.mode == "max_size" and not any(shuffles(part) for part in fixed.flattened)
    assert fixed.flattened[1] is loader.flattened[1]


def test_overfitting_leaves_loaders_it_cannot_order_unchanged() -> None:
    class CustomBatchSampler(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[1], [0]])

    for loader in (DataLoader(numbers(3)), DataLoader(Stream(range(3))), [1, 2]):
        assert without_shuffle(loader) is loader
    custom = DataLoader(numbers(2), batch_sampler=CustomBatchSampler())
    with pytest.warns(UserWarning, match="CustomBatchSampler has no batch_size"):
        assert without_shuffle(custom) is custom
