"""Workers of a loader go home by themselves when a Trainer is let go of; they are not waited for, nor ended by a signal."""

from __future__ import annotations

import gc
import multiprocessing
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.utils.data._utils as data_utils
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from leyden import Trainer, TrainModule


class Module(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.workers: list[BaseProcess] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.workers = multiprocessing.active_children()
        return self.net(batch[0]).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def workers_of_a_run(persistent: bool, **limit: Any) -> list[BaseProcess]:
    batches = BatchSampler(SequentialSampler(range(32)), 4, False)
    data = TensorDataset(torch.ones(32, 1))
    loader = DataLoader(
        data, batch_sampler=batches, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    module = Module()
    Trainer(accelerator="cpu", barebones=True, **limit).fit(module, loader)
    return module.workers


@pytest.mark.parametrize(
    ("persistent", "limit"),
    [(True, {"max_epochs": 2}), (True, {"max_steps": 3}), (False, {"max_steps": 3})],
    ids=["persistent", "persistent, within an epoch", "within an epoch"],
)
def test_workers_go_home_by_themselves(
    persistent: bool, limit: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # For how long torch waits for a worker; one that is still there then was never told to go.
    monkeypatch.setattr(data_utils, "MP_STATUS_CHECK_INTERVAL", 30.0)
    monkeypatch.setattr(data_utils.worker, "MP_STATUS_CHECK_INTERVAL", 90.0)
    join, waited_for = BaseProcess.join, []

    def joined(self: BaseProcess, timeout: float | None = None) -> None:
        join(self, timeout)
        if self.is_alive():
            waited_for.append(self.pid)

    monkeypatch.setattr(BaseProcess, "join", joined)
    # A cycle that is collected before it is counted would hide what this is about.
    gc.disable()
    try:
        workers = workers_of_a_run(persistent, **limit)
    finally:
        gc.enable()
    gc.collect()
    for worker in workers:
        worker.join()
    assert len(workers) == 2 and waited_for == []
