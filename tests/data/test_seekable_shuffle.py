"""SeekableShuffle: each order is a permutation that looks random, at once at any position, and a run resumes in it."""

from __future__ import annotations

import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from ranks.world import run_world
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from leyden import SeekableShuffle, Trainer
from leyden.callbacks import ModelCheckpoint
from leyden.data.cursor import LoaderCursor
from leyden.data.limits import shuffles
from leyden.data.seek import can_slice, tail_of
from leyden.data.seekable_shuffle import CHUNK

SHORT = [4, 9, 0, 7, 6, 5, 8, 3, 2, 1]
LONG = [680798797, 381433250, 152583037, 398948669]


def shuffle(count: int, seed: int = 0, epoch: int = 0) -> SeekableShuffle:
    sampler = SeekableShuffle(count, seed)
    sampler.set_epoch(epoch)
    return sampler


# the order ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("counts", [range(70), (255, 256, 257, 1000, 4095), (CHUNK, CHUNK + 1, 3 * CHUNK + 5)])
def test_every_order_is_a_permutation(counts: Any) -> None:
    for count in counts:
        drawn = list(shuffle(count, seed=count))
        assert sorted(drawn) == list(range(count)) and len(shuffle(count)) == count


@pytest.mark.parametrize("count", [10**9, 2**62 - 1])
def test_a_huge_order_has_distinct_indices_and_any_position_at_once(count: int) -> None:
    sampler = shuffle(count, seed=3)
    places = [0, 1, count // 2, count - 1]
    assert [sampler[place] for place in places] == [sampler[place : place + 1].tolist()[0] for place in places]
    drawn = sampler[count - 200_000 :].tolist()
    assert len(set(drawn)) == 200_000 and min(drawn) >= 0 and max(drawn) < count
    assert list(itertools.islice(tail_of(sampler, count - 200_000), 5)) == drawn[:5]
    with pytest.raises(IndexError):
        sampler[count]


def test_orders_are_the_same_everywhere_and_differ_by_seed_epoch_and_count() -> None:
    """The numbers are part of a checkpoint's promise: another version must draw the same."""
    assert list(shuffle(10, seed=1, epoch=2)) == SHORT
    assert shuffle(10**9, seed=1, epoch=2)[:4].tolist() == LONG
    orders = {tuple(shuffle(50, seed, epoch)) for seed in (-1, 0, 1, 2**63) for epoch in range(3)}
    assert len(orders) == 12
    sampler = shuffle(50, seed=7)
    first = sampler.order
    sampler.set_epoch(1)
    assert first.tolist() == list(shuffle(50, seed=7)) != list(sampler)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


def deviation(observed: torch.Tensor, expected: float) -> float:
    """Returns how many standard deviations a chi-squared statistic is from its mean."""
    degrees = observed.numel() - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return (statistic - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_short_orders_are_all_equally_likely(count: int) -> None:
    orders = {order: number for number, order in enumerate(itertools.permutations(range(count)))}
    drawn = torch.tensor([orders[tuple(shuffle(count, seed))] for seed in range(60 * len(orders))])
    assert abs(deviation(drawn.bincount(minlength=len(orders)), 60)) < 4


@pytest.mark.parametrize("count", [100, 100_000])
def test_each_index_is_equally_likely_at_each_position(count: int) -> None:
    # In ten classes of positions and of indices.
    table = torch.zeros(10, 10)
    for seed in range(100 if count < CHUNK else 3):
        drawn = torch.tensor(shuffle(count, seed)[:].tolist())
        classes = torch.arange(count) * 10 // count * 10 + drawn * 10 // count
        table += classes.bincount(minlength=100).view(10, 10)
    # The margins are fixed, which leaves 81 degrees of freedom.
    expected = float(table.sum()) / 100
    statistic = float(((table - expected) ** 2 / expected).sum())
    assert abs(statistic - 81) < 4 * math.sqrt(2 * 81)


@pytest.mark.parametrize("count", [1000, 10**6, 10**9])
def test_neighbours_and_epochs_are_unrelated(count: int) -> None:
    size = min(count, 200_000)
    first = torch.tensor(shuffle(count, 1)[:size].tolist()).double() / count
    second = torch.tensor(shuffle(count, 1, epoch=1)[:size].tolist()).double() / count
    limit = 4.5 / math.sqrt(size)
    for one, other in ((first[:-1], first[1:]), (first[:-7], first[7:]), (first, second)):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < limit
    # A random order keeps one index in its place, on average, and goes up as often as down.
    fixed = sum(int((torch.tensor(shuffle(1000, seed)[:].tolist()) == torch.arange(1000)).sum()) for seed in range(300))
    assert abs(fixed - 300) < 4.5 * math.sqrt(300)
    assert abs(float((first[1:] > first[:-1]).double().mean()) - 0.5) < limit


@pytest.mark.parametrize("source", [-1, 2**62, True])
def test_impossible_counts_are_refused(source: Any) -> None:
    with pytest.raises(ValueError, match="SeekableShuffle"):
        SeekableShuffle(source)


# in a run -------------------------------------------------------------------------------------------------------------
COUNT = 23


def loader(**options: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(COUNT, dtype=torch.float32).view(-1, 1).expand(-1, 2).contiguous())
    return DataLoader(data, 4, sampler=SeekableShuffle(data, seed=5), **options)


def test_a_loader_continues_at_a_position_without_loading_what_was_before() -> None:
    sampler = SeekableShuffle(10**9, seed=5)
    assert can_slice(sampler) and can_slice(BatchSampler(sampler, 8, False))
    cursor = LoaderCursor(DataLoader(range(10**9), 8, sampler=SeekableShuffle(10**9, seed=5)))  # type: ignore[arg-type]
    batch = next(cursor.seek(2, 10**8))
    sampler.set_epoch(2)
    assert batch.tolist() == sampler[8 * 10**8 : 8 * 10**8 + 8].tolist()
    assert shuffles(cursor.loader)


class Seen(Line):
    """Records the samples of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.current_epoch, batch[0][:, 0].int().tolist()))
        return self.layer(batch[0]).mean() * 1e-3


def seen(folder: Path | str, **options: Any) -> list[tuple[int, list[int]]]:
    module = Seen()
    path = options.pop("ckpt_path", None)
    quiet = {**QUIET, "enable_checkpointing": True}
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    Trainer(**{**quiet, "max_epochs": 3, "callbacks": [saver], **options}).fit(module, loader(), ckpt_path=path)
    return module.seen


@pytest.mark.parametrize("steps", [3, 6, 8])
def test_a_run_resumes_at_its_next_sample(tmp_path: Path, steps: int) -> None:
    whole = seen(tmp_path / "whole")
    assert [[sample for at, batch in whole if at == epoch for sample in batch] for epoch in range(3)] == [
        list(shuffle(COUNT, 5, epoch)) for epoch in range(3)
    ]
    begun = seen(tmp_path / "begun", max_steps=steps)
    assert begun + seen(tmp_path / "rest", ckpt_path=tmp_path / "begun" / f"step={steps}") == whole


def seen_on_two_ranks(folder: str) -> list[tuple[int, list[int]]]:
    return seen(folder, strategy="ddp", max_steps=2)


def test_ranks_share_the_order_and_another_number_of_ranks_continues_it(tmp_path: Path) -> None:
    found = run_world(2, seen_on_two_ranks, str(tmp_path / "two"))
    order = list(shuffle(COUNT, 5))
    assert [[batch for _, batch in rank] for rank in found] == [
        [order[0:4], order[8:12]],
        [order[4:8], order[12:16]],
    ]
    rest = seen(tmp_path / "one", ckpt_path=tmp_path / "two" / "step=2", max_epochs=1)
    assert [sample for _, batch in rest for sample in batch] == order[16:]
