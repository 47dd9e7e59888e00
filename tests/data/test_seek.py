"""A sampler's tail equals the indices after the skipped ones and leaves the generator in the same state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from leyden import SeekableShuffle
from leyden.data.seek import CHUNK, DrawsFromGlobalRNG, Tail, can_slice, tail_of

Make = Callable[[torch.Generator | None], Any]
WEIGHTS = [1.0 + i for i in range(150)]
SAMPLERS: dict[str, tuple[Make, int]] = {
    "sequential": (lambda g: SequentialSampler(range(100)), 100),
    "random": (lambda g: RandomSampler(range(100), generator=g), 100),
    "fewer": (lambda g: RandomSampler(range(100), num_samples=30, generator=g), 30),
    "rounds": (lambda g: RandomSampler(range(10), num_samples=95, generator=g), 95),
    "whole_rounds": (lambda g: RandomSampler(range(10), num_samples=90, generator=g), 90),
    "replacement": (lambda g: RandomSampler(range(10), True, 100, generator=g), 100),
    "replacement_32s": (lambda g: RandomSampler(range(10), True, 96, generator=g), 96),
    "replacement_one": (lambda g: RandomSampler(range(10), True, 1, generator=g), 1),
    "subset": (lambda g: SubsetRandomSampler(range(5, 90), generator=g), 85),
    "weighted": (lambda g: WeightedRandomSampler(WEIGHTS, 100, generator=g), 100),
    "weighted_without_replacement": (lambda g: WeightedRandomSampler(WEIGHTS, 100, False, generator=g), 100),
    "range": (lambda g: range(3, 80), 77),
    "seekable": (lambda g: SeekableShuffle(90, seed=2), 90),
    "list": (lambda g: [4, 1, 3, 2], 4),
}


def batched(make: Make, size: int, drop_last: bool) -> Make:
    return lambda g: BatchSampler(make(g), size, drop_last)


CASES = {name: make for name, (make, _) in SAMPLERS.items()} | {
    f"{name}_by_{size}{'_dropped' * drop}": batched(make, size, drop)
    for (name, (make, _)), (size, drop) in itertools.product(
        SAMPLERS.items(), [(1, False), (7, False), (7, True), (32, False)]
    )
}


@pytest.mark.parametrize("own_generator", [True, False], ids=["custom", "global"])
@pytest.mark.parametrize("name", CASES)
def test_a_tail_equals_the_rest_of_the_sampler(name: str, own_generator: bool) -> None:
    make = CASES[name]
    torch.manual_seed(4)
    whole = list(make(torch.Generator().manual_seed(3) if own_generator else None))
    assert can_slice(make(None))
    for skip in sorted({*range(1, 12), 31, 32, 33, 64, len(whole) - 1, len(whole)}):
        if not 0 < skip <= len(whole):
            continue
        plain, ours = (torch.Generator().manual_seed(3) if own_generator else None for _ in range(2))
        torch.manual_seed(4)
        drawn = iter(make(plain))
        assert list(itertools.islice(drawn, skip)) == whole[:skip]
        state_after_skip = torch.get_rng_state() if plain is None else plain.get_state()
        after = list(drawn)
        end = torch.get_rng_state() if plain is None else plain.get_state()
        torch.manual_seed(4)
        rest = Tail(make(ours), skip).advance()
        # Before its first index, the generator is in the state in which the skipped draws left it.
        assert torch.equal(torch.get_rng_state() if ours is None else ours.get_state(), state_after_skip), skip
        assert list(rest) == after == whole[skip:]
        assert torch.equal(torch.get_rng_state() if ours is None else ours.get_state(), end), skip


COUNT = 2 * CHUNK + 77


@pytest.mark.parametrize(
    "make",
    [
        lambda g: RandomSampler(range(COUNT), generator=g),
        lambda g: RandomSampler(range(1000), True, COUNT, generator=g),
        lambda g: WeightedRandomSampler(torch.ones(COUNT), COUNT, generator=g),
    ],
    ids=["random", "replacement", "weighted"],
)
def test_a_tail_of_several_chunks_equals_the_rest_of_the_sampler(make: Make) -> None:
    whole = list(make(torch.Generator().manual_seed(3)))
    for skip in (1, CHUNK - 1, CHUNK + 5, COUNT - 1):
        assert list(tail_of(make(torch.Generator().manual_seed(3)), skip)) == whole[skip:]


class CustomSampler(Sampler[int]):
    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(20):
            self.drawn += 1
            yield index


class OtherOrder(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class SameOrder(RandomSampler):
    """A subclass that keeps the order."""


def test_only_known_orders_are_sliced() -> None:
    assert can_slice(SameOrder(range(4)))
    assert not can_slice(OtherOrder(range(4)))
    assert not can_slice(CustomSampler())
    assert not can_slice(BatchSampler(CustomSampler(), 2, False))
    assert list(Tail(OtherOrder(range(4)), 2)) == [2, 3, 4]


def test_a_sampler_changed_by_torch_is_iterated_instead_of_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_order(self: RandomSampler) -> Iterator[int]:
        yield from torch.randperm(self.num_samples, generator=self.generator).flip(0).tolist()

    monkeypatch.setattr(RandomSampler, "__iter__", reversed_order)
    sampler = RandomSampler(range(50), generator=torch.Generator().manual_seed(2))
    whole = list(sampler)
    sampler.generator.manual_seed(2)
    assert not can_slice(sampler)
    assert list(Tail(sampler, 20)) == whole[20:]


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_custom_sampler_is_drawn_no_further_than_the_position(drop_last: bool) -> None:
    custom = CustomSampler()
    rest = Tail(BatchSampler(custom, 3, drop_last), 4).advance()
    assert custom.drawn == 12
    assert list(rest) == [[12, 13, 14], [15, 16, 17]] + [[18, 19]] * (not drop_last)


def test_a_sampler_drawing_from_the_global_generator_is_detected() -> None:
    def numbers(first_only: bool) -> Iterator[int]:
        torch.rand(())
        for index in range(9):
            if not first_only:
                torch.rand(())
            yield index

    class GlobalDraws(Sampler[int]):
        first_only = True

        def __iter__(self) -> Iterator[int]:
            return numbers(self.first_only)

    sampler = GlobalDraws()
    assert list(Tail(sampler, 5)) == [5, 6, 7, 8]
    sampler.first_only = False
    assert list(Tail(sampler, 1)) == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(DrawsFromGlobalRNG):
        Tail(sampler, 2).advance()
    with pytest.raises(DrawsFromGlobalRNG):
        Tail(BatchSampler(sampler, 2, False), 1).advance()
