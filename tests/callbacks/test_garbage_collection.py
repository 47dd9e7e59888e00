"""GarbageCollection: all ranks collect at the same steps, and automatic collection is restored afterwards."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import QUIET, Line
from ranks.world import run_world
from torch.utils.data import DataLoader, Dataset

from leyden import Callback, ConfigurationError, Trainer
from leyden.callbacks import GarbageCollection


class Cycle:
    """An object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


class CycleNet(Line):
    """Creates a cycle in each step; records how many are alive and whether automatic collection is enabled."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.cycles: list[weakref.ref[Cycle]] = []
        self.alive: list[int] = []
        self.enabled: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.cycles.append(weakref.ref(Cycle()))
        self.alive.append(sum(cycle() is not None for cycle in self.cycles))
        self.enabled.append(gc.isenabled())
        if batch_idx == self.fails_at:
            raise RuntimeError("on purpose")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.cycles.append(weakref.ref(Cycle()))


class CollectionRecorder(Callback):
    """Records the steps of the fit at which Python runs a full collection."""

    def __init__(self) -> None:
        self.at: list[int] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.note = lambda phase, info: (
            self.at.append(trainer.global_step) if phase == "start" and info["generation"] == 2 else None
        )
        gc.callbacks.append(self.note)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        gc.callbacks.remove(self.note)


@pytest.fixture(autouse=True)
def _automatic() -> Iterator[None]:
    assert gc.isenabled()
    yield
    assert gc.isenabled(), "automatic collection was not restored"


def fit(collection: GarbageCollection, module: CycleNet | None = None, count: int = 7, **arguments: Any) -> CycleNet:
    module = module or CycleNet()
    extra = arguments.pop("extra", [])
    trainer = Trainer(**{**QUIET, "max_epochs": 1, "callbacks": [*extra, collection], **arguments})
    trainer.fit(module, DataLoader(torch.ones(count, 2), 1))
    return module


@pytest.mark.parametrize(("batches", "alive"), [(1, [1, 2, 3, 1, 2, 3, 1]), (2, [1, 2, 3, 4, 5, 6, 1])])
def test_cycles_are_freed_at_every_nth_step(batches: int, alive: list[int]) -> None:
    collection = GarbageCollection(every_n_steps=3)
    module = fit(collection, accumulate_grad_batches=batches)
    assert module.alive == alive and not any(module.enabled)
    assert collection.collections == 1 + len(alive) // (3 * batches)


def test_generation_zero_collects_new_cycles() -> None:
    collection = GarbageCollection(every_n_steps=3, generation=0)
    assert fit(collection).alive == [1, 2, 3, 1, 2, 3, 1]


def test_automatic_collection_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(GarbageCollection(), CycleNet(fails_at=2))


def test_automatic_collection_stays_off_if_the_user_disabled_it() -> None:
    gc.disable()
    try:
        fit(GarbageCollection())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_each_fit_resets_the_count_and_validation_collects() -> None:
    collection = GarbageCollection(every_n_steps=2)
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=collection, num_sanity_val_steps=0)
    for validates in (False, True):
        module = CycleNet()
        trainer.fit(module, DataLoader(torch.ones(3, 2), 1), DataLoader(torch.ones(5, 2), 1) if validates else None)
        assert collection.collections == 2 + 2 * validates
    trainer.validate(module, DataLoader(torch.ones(5, 2), 1), verbose=False)
    assert collection.collections == 4


def on_ranks() -> dict[str, list[int]]:
    found = {}
    for strategy in ("ddp", "fsdp"):
        steps = CollectionRecorder()
        # The second rank has allocated other objects, and has no sample of the last global batch.
        junk = [[number] for number in range(50_000 * int(os.environ["RANK"]))]
        fit(GarbageCollection(every_n_steps=2), count=7, strategy=strategy, extra=[steps])
        found[strategy] = steps.at
        del junk
    return found


def test_ranks_collect_at_the_same_steps() -> None:
    assert run_world(2, on_ranks) == [{"ddp": [0, 2, 4], "fsdp": [0, 2, 4]}] * 2


@pytest.mark.parametrize(
    "arguments", [{"every_n_steps": 0}, {"every_n_steps": True}, {"generation": 3}, {"generation": None}]
)
def test_invalid_arguments_raise(arguments: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"GarbageCollection\("):
        GarbageCollection(**arguments)


class CollectionEnabled(Dataset[Any]):
    """Samples that report whether automatic collection is enabled in the process that creates them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(gc.isenabled()))


class BatchSumRecorder(Line):
    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sums.append(batch.sum().item())
        return super().training_step(batch, batch_idx)


def test_loader_workers_keep_the_users_garbage_collection_setting() -> None:
    def seen() -> list[float]:
        module = BatchSumRecorder()
        loader = DataLoader(CollectionEnabled(), 2, num_workers=1, multiprocessing_context="fork")
        Trainer(**QUIET, max_epochs=1, callbacks=GarbageCollection(1)).fit(module, loader)
        return module.sums

    assert seen() == [4, 4] and gc.isenabled()
    gc.disable()
    try:
        assert seen() == [0, 0]
    finally:
        gc.enable()
