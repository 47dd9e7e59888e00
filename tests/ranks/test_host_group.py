"""Next to a process group of another backend, such as NCCL, ranks have a gloo group: which tensors use which group."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import QUIET
from ranks.world import run_world
from silent_device import SILENT, RecordDuringTraining, WaitRecorder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, ConfigurationError, Trainer, TrainModule
from leyden.strategies.ddp import DDPStrategy

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "barrier", "_all_gather_base", "gather", "reduce_scatter")


class HostValues(TrainModule):
    """Has a buffer, returns a number of items, and logs a value of the host."""

    def __init__(self, by_number: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.by_number = by_number

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        items = len(batch[0])
        self.log("items", items, on_epoch=True)
        counted = items if self.by_number else torch.full((), items, device=self.device)
        return {"loss": self.net(batch[0]).sum(), "num_items": counted}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


class Recorder:
    """Records the backend and the device of all tensors passed to collectives."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()
        for name in COLLECTIVES:
            setattr(dist, name, self.recording(getattr(dist, name)))

    def recording(self, function: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            parts = [part for arg in args for part in (arg if isinstance(arg, list) else [arg])]
            for kind in {part.device.type for part in parts if isinstance(part, Tensor)}:
                self.seen.add((str(dist.get_backend(group)), kind))
            return function(*args, **kwargs)

        return collective


class StopsEarly(Callback):
    """Requests a stop on rank 1 alone."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or (trainer.global_rank == 1 and trainer.global_step == 2)


def keeps_bucket(state: Any, bucket: Any) -> Any:
    """Returns the bucket as it is, since the backend "fake" gives DDP no answer."""
    sent: Any = torch.futures.Future()
    sent.set_result(bucket.buffer())
    return sent


def on_a_silent_device(by_number: bool) -> tuple[set[tuple[str, str]], list[str], int, list[str]]:
    # Registers the backend "fake", which moves nothing.
    import torch.testing._internal.distributed.fake_pg

    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0)
    dist.init_process_group("fake", store=store, rank=rank, world_size=2)
    recorder = Recorder()
    # These arguments keep DDP from sending host tensors of its own, to compare shapes and to order its buckets.
    strategy = DDPStrategy(
        devices=[SILENT] * 2,
        ddp_comm_hook=keeps_bucket,
        init_sync=False,
        find_unused_parameters=True,
    )
    waits = WaitRecorder()
    trainer = Trainer(
        **{**QUIET, "accelerator": "auto"},
        strategy=strategy,
        max_epochs=2,
        accumulate_grad_batches=3,
        gradient_clip_val=1.0,
        callbacks=[StopsEarly(), RecordDuringTraining(waits)],
    )
    module = HostValues(by_number)
    # 11 batches on each rank, of which the last is smaller: windows of 3, 3, 3 and 2.
    with waits:
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(86, 3, device=SILENT)), 4, shuffle=True))
    gathered = strategy.ranks.all_gather_object(f"rank {trainer.global_rank}")
    return recorder.seen, waits.found, trainer.global_step, gathered


@pytest.mark.parametrize("by_number", [True, False])
def test_device_tensors_and_host_values_use_separate_groups(by_number: bool) -> None:
    for seen, waits, steps, gathered in run_world(2, on_a_silent_device, by_number, timeout=120):
        # NCCL rejects CPU tensors, and gloo rejects tensors of unknown devices.
        assert seen == {("fake", "meta"), ("gloo", "cpu")}
        assert waits == []
        assert steps == 3 and gathered == ["rank 0", "rank 1"]


def gather_mismatched(backend: str) -> str:
    trainer = Trainer(strategy=DDPStrategy(process_group_backend=backend), accelerator="cpu", logger=False)
    trainer.strategy.setup_environment()
    try:
        trainer.accelerator.all_gather(torch.ones(2 + trainer.global_rank))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_mismatched_cpu_tensors_raise_with_another_backend_too() -> None:
    for message in run_world(2, gather_mismatched, "cpu:gloo,cuda:gloo", timeout=60):
        assert "rank 0 has (2,) float32 and rank 1 has (3,) float32" in message
