"""Where ranks wait for a device that is not the CPU: steps under FSDP, and the numbers of a pipeline."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy
from models import QUIET, Regression
from ranks.world import run_world
from samples import pairs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.strategies import DDPStrategy
from leyden.strategies.mesh.pipeline.numbers import NumberBroadcast


class Named(dict[str, Tensor]):
    """A batch with an attribute, whose class takes no pairs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def named(rows: list[Any]) -> Named:
    batch = Named("first")
    batch["x"], batch["y"] = (torch.stack(column) for column in zip(*rows, strict=True))
    return batch


def by_default(rows: list[Any]) -> dict[str, Tensor]:
    return defaultdict(list, named(rows))


class Step(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kinds = type(batch).__name__, getattr(batch, "name", None)
        loss: Tensor = super().training_step((batch["x"], batch["y"]), batch_idx)
        return loss


def fit(collate: Any) -> tuple[str, str | None]:
    with torch.device("toy"):
        module = Step(nn.Linear(4, 1), lambda module: torch.optim.AdamW(module.parameters(), 1e-2))
    trainer = Trainer(**{**QUIET, "accelerator": "toy"}, strategy="fsdp", max_steps=2)
    trainer.fit(module, DataLoader(pairs(8), 2, collate_fn=collate))
    kinds: tuple[str, str | None] = module.kinds
    return kinds


@pytest.mark.parametrize("collate", [named, by_default])
def test_a_batch_of_its_own_class_reaches_the_step(collate: Any) -> None:
    """torch's FSDP rebuilds the arguments of a root on a GPU, by their classes' constructors."""
    expected = {named: ("Named", "first"), by_default: ("defaultdict", None)}[collate]
    assert run_world(2, fit, collate, timeout=200) == [expected, expected]


def broadcast_numbers() -> tuple[list[Any], list[Any]]:
    strategy = DDPStrategy()
    strategy.place_on("toy", "auto", 1)
    strategy.setup_environment()
    device = strategy.root_device
    numbers = NumberBroadcast(dist.group.WORLD, 1, device)
    found = []
    with toy.Waits() as waits:
        for step in range(3):
            logged = [torch.full((), step / 2, device=device), torch.tensor(4.0), 0.1]
            read = numbers.send([["a", 1], ["b", 2], ["c", 3]], logged)
            if read is not None:
                found.append(read())
    return found, waits.found


def test_numbers_of_the_last_stage_arrive_without_a_wait() -> None:
    (found, waits), (own, waits_of_source) = run_world(2, broadcast_numbers, timeout=200)
    assert found == [([["a", 1], ["b", 2], ["c", 3]], [step / 2, 4.0, 0.1]) for step in range(3)]
    assert own == [] and waits == [] and waits_of_source == []
