"""`Trainer.sample_indices` on two ranks: each knows its own samples and, without a message, those of all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import QUIET, Line
from ranks.world import run_world
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from leyden import Callback, Trainer
from leyden.callbacks import NonFiniteError, NonFiniteGuard

SAMPLES = 11


class Batches:
    """A user's own batch sampler, with batches of several sizes."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        yield from (order[start : start + 3] for start in range(0, 9, 3))
        yield from ([order[9]], [order[10]])


class IndexRecorder(Callback):
    def __init__(self) -> None:
        self.found: list[tuple[list[int], Any, Any]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        of_all_ranks = trainer.sample_indices(all_ranks=True)
        self.found.append((batch[0][:, 0].int().tolist(), trainer.sample_indices(), of_all_ranks))


def data(bad: int = -1) -> TensorDataset:
    x = torch.arange(SAMPLES).float().repeat(2, 1).T
    return TensorDataset(torch.where(torch.arange(SAMPLES)[:, None] == bad, torch.inf, x))


def indices_of(loader: DataLoader[Any], **arguments: Any) -> list[tuple[list[int], Any, Any]]:
    recorder = IndexRecorder()
    torch.manual_seed(1)
    Trainer(strategy="ddp", devices=2, max_epochs=2, callbacks=[recorder], **QUIET, **arguments).fit(Line(), loader)
    return recorder.found


def on_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {
        "shuffled": indices_of(DataLoader(data(), 3, shuffle=True)),
        "even": indices_of(DataLoader(data(), 3, shuffle=True), even_batches=True),
        "batches": indices_of(DataLoader(data(), batch_sampler=Batches())),  # type: ignore[arg-type]
    }
    split: Any = DistributedSampler(data(), 2, int(os.environ["RANK"]))
    found["split"] = indices_of(DataLoader(data(), 3, sampler=split))
    trainer = Trainer(strategy="ddp", devices=2, max_epochs=1, callbacks=[NonFiniteGuard()], **QUIET)
    # Last: an error ends all ranks, of which one reports it.
    with pytest.raises((NonFiniteError, SystemExit)) as caught:
        trainer.fit(Line(), DataLoader(data(8), 2, sampler=split))
    found["guard"] = str(caught.value)
    return found


def test_sample_indices_match_the_loaded_samples_and_the_global_batch() -> None:
    ranks: list[dict[str, Any]] = run_world(2, on_ranks)
    for name in ("shuffled", "even", "batches", "split"):
        for loaded, reported, _ in [*ranks[0][name], *ranks[1][name]]:
            assert loaded == reported, name
    for name in ("shuffled", "batches"):
        # Without the third step, in which rank 1 has nothing: the user's fifth batch is rank 0's.
        batches: Any = zip(ranks[0][name][:2], ranks[1][name][:2], strict=True)
        assert all(one[2] == other[2] == one[0] + other[0] for one, other in batches), name
    drawn: list[int] = [index for _, _, of_all_ranks in ranks[0]["shuffled"][:2] for index in of_all_ranks]
    assert sorted(drawn) == list(range(SAMPLES))
    assert [of_all_ranks for _, _, of_all_ranks in ranks[0]["split"]] == [None] * 4
    # Rank 0's part of the shuffled order, then rank 1's.
    orders = [list(map(int, DistributedSampler(data(), 2, rank))) for rank in range(2)]
    at = next(start for start in range(0, 6, 2) if 8 in orders[0][start : start + 2] + orders[1][start : start + 2])
    shown = ", ".join(map(str, orders[0][at : at + 2] + orders[1][at : at + 2]))
    assert f"Its samples are {shown} of" in ranks[0]["guard"] + ranks[1]["guard"]
