"""What the CPU forgives and a GPU does not: a thread without its device, and gradients that only gloo sums."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from models import QUIET, Regression
from ranks.world import run_world
from samples import pairs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Accelerator, Trainer
from leyden.callbacks import ModelCheckpoint


def test_the_thread_of_a_save_uses_its_ranks_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on the first GPU. A copy there would make a context on it for every rank of the machine."""
    calls: list[tuple[str, str]] = []

    def noting(name: str, function: Any) -> Any:
        def noted(argument: Any) -> Any:
            calls.append((threading.current_thread().name, f"{name} {getattr(argument, 'device', argument)}"))
            return function(argument)

        return staticmethod(noted)

    monkeypatch.setattr(toy.Runtime, "set_device", noting("set_device", lambda device: None))
    monkeypatch.setattr(toy.Runtime, "stream", noting("stream", lambda stream: stream))
    saves = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, asynchronous=True)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": None, "accelerator": "toy"},
        max_steps=8,
        default_root_dir=tmp_path,
        callbacks=[saves],
    )
    trainer.fit(Regression(nn.Linear(4, 1), lambda own: torch.optim.Adam(own.parameters())), DataLoader(pairs(16), 2))
    in_threads = [call for thread, call in calls if thread == "leyden-save"]
    assert len(list(tmp_path.rglob("*step=*"))) == 4
    assert in_threads.count("set_device toy:0") == 4
    assert in_threads[0] == "set_device toy:0" and "stream toy:0" in in_threads


class Table(Regression):
    def __init__(self, sparse: bool) -> None:
        super().__init__(nn.Linear(4, 1), lambda module: torch.optim.SGD(module.parameters(), 0.1))
        self.table = nn.Embedding(8, 4, sparse=sparse)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss: Tensor = super().training_step((x + self.table(x[:, 0].abs().long() % 8), y), batch_idx)
        return loss


def fit(sparse: bool, frozen: bool) -> int:
    module = Table(sparse)
    module.table.requires_grad_(not frozen)
    trainer = Trainer(**{**QUIET, "accelerator": "toy"}, strategy="ddp", max_steps=2)
    trainer.fit(module, DataLoader(pairs(8), 2))
    return trainer.global_step


def prepare() -> None:
    Accelerator().prepare(nn.Embedding(4, 2, sparse=True))


REFUSED = (
    "{} has sparse=True, and toygloo sums dense gradients only. Leave sparse out, or use "
    "DDPStrategy(process_group_backend='gloo')."
)


def test_sparse_gradients_on_a_device_are_refused_before_a_step() -> None:
    assert f"ConfigurationError: {REFUSED.format('table')}" in run_world(2, fit, True, False, may_fail=True)
    assert f"ConfigurationError: {REFUSED.format('the model')}" in run_world(2, prepare, may_fail=True)


@pytest.mark.parametrize(("sparse", "frozen"), [(True, True), (False, False)])
def test_other_embeddings_train(sparse: bool, frozen: bool) -> None:
    assert run_world(2, fit, sparse, frozen) == [2, 2]
