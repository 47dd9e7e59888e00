"""Addresses, the allocator's statistics and limit, streams, events, pinned memory, and two devices in one process."""

from __future__ import annotations

import csv
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hungry import Hungry, micro_batches_of, plain_loop, samples, split_batch
from models import QUIET, Line, Squares
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer
from leyden.callbacks import CSVLogger, DeviceStatsMonitor
from leyden.checkpoint.copies import Copies, HostMemory, addresses_of
from leyden.checkpoint.writer import Tensors
from leyden.core.errors import LeydenError
from leyden.core.text import size_of
from leyden.trainer.logging.values import are_finite, read_back, start_reading

MIB = 2**20
LIMIT = 512 * MIB


def trainer(device: torch.device, **arguments: Any) -> Trainer:
    return Trainer(**{**QUIET, "accelerator": device.type, "devices": 1, "max_epochs": 1, **arguments})


def keep_busy(device: torch.device) -> None:
    """Keeps a GPU busy for a tenth of a second or so: work that is enqueued next has to wait."""
    if device.type == "cuda":
        torch.cuda._sleep(2**28)


# addresses ------------------------------------------------------------------------------------------------------------
class Tied(Squares):
    """An embedding whose weight is also the head's, and a buffer that is a view of it."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleDict({"inside": nn.Linear(4, 4), "head": nn.Linear(4, 4, bias=False)}))
        self.net["head"].weight = self.net["inside"].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.net["head"](torch.tanh(self.net["inside"](x)))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> AdamW:
        return AdamW(self.parameters(), 1e-2)


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_addresses_are_those_of_stepped_memory(strategy: str, device: torch.device, tmp_path: Path) -> None:
    module = Tied()
    run = trainer(device, strategy=strategy, default_root_dir=tmp_path)
    run.fit(module, list(torch.randn(3, 8, 4)))
    inside, head = module.net["inside"], module.net["head"]
    assert head.weight is inside.weight
    parts = [getattr(parameter, "_local_tensor", parameter) for parameter in (inside.weight, inside.bias)]
    states = [run.optimizers[0].state[parameter] for parameter in (inside.weight, inside.bias)]
    moments = [getattr(part, "_local_tensor", part) for state in states for part in state.values()]
    expected = {tensor.untyped_storage().data_ptr() for tensor in (*parts, *moments)}
    # Two parameters, each with two moments and a count of steps.
    assert len(expected) == 8 and 0 not in expected
    assert addresses_of(run.optimizers) == expected
    assert parts[0][1:].untyped_storage().data_ptr() in expected
    assert torch.ones(3, device=device).untyped_storage().data_ptr() not in expected
    saved = run.save_checkpoint(tmp_path / "saved")
    again = Tied()
    again_run = trainer(device, max_epochs=2, default_root_dir=tmp_path)
    again_run.fit(again, list(torch.randn(3, 8, 4)), ckpt_path=saved)
    assert again.net["head"].weight is again.net["inside"].weight and again_run.global_step == 6


# streams, events and pinned memory ------------------------------------------------------------------------------------
def test_copies_wait_for_pending_work_and_the_next_step_waits_for_them(device: torch.device) -> None:
    """Copies of a save run on a stream of their own, beside the host and the stream of the steps."""
    weight = nn.Parameter(torch.ones(2**22 if device.type == "cuda" else 2**10, device=device))
    optimizer, memory = torch.optim.SGD([weight], lr=0.1), HostMemory()
    for value in (2.0, 3.0):
        keep_busy(device)
        with torch.no_grad():
            weight.fill_(value)
        copies = Copies(memory, addresses_of([optimizer]), ())
        content = copies.of("model", Tensors({"weight": weight.detach(), "other": weight.detach() + 1}))
        copies.begin()
        saves = threading.Thread(target=copies.run)
        saves.start()
        # As a step does: it first waits for the copies, then writes.
        copies.finish()
        with torch.no_grad():
            weight.fill_(-1.0)
        saves.join()
        copies.confirm()
        assert isinstance(content, Tensors)
        assert content.tensors["weight"].unique().tolist() == [value]
        assert content.tensors["other"].unique().tolist() == [value + 1]
    assert weight.unique().tolist() == [-1.0]


def test_host_memory_is_pinned_for_a_gpu_and_reused(device: torch.device) -> None:
    memory, like = HostMemory(), torch.ones(100, device=device, dtype=torch.bfloat16)
    buffers = []
    for _ in range(3):
        memory.begin()
        buffers.append(memory.room(("model", "weight"), like))
    assert len({buffer.data_ptr() for buffer in buffers}) == 1
    for buffer in buffers:
        assert buffer.device.type == "cpu" and buffer.dtype == torch.bfloat16
        assert buffer.is_pinned() == (device.type == "cuda")
    memory.begin()
    assert memory.room(("model", "weight"), like[:50]).shape == (50,)


def test_reading_starts_after_pending_work_and_before_later_work(device: torch.device) -> None:
    values = torch.arange(4.0, device=device)
    keep_busy(device)
    values.mul_(2)
    wait = start_reading(values)
    if device.type == "cuda":
        # On the CPU the values are read when they are waited for.
        keep_busy(device)
        values.zero_()
    assert wait() == [0.0, 2.0, 4.0, 6.0]


# statistics and limit -------------------------------------------------------------------------------------------------
@pytest.fixture
def limited(device: torch.device) -> Iterator[torch.device]:
    """Limits torch's allocator to 512 MiB on a GPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + LIMIT) / total)
    yield device
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)


class Rows(Hungry):
    """Needs 96 MiB per row on a GPU, so 512 MiB hold 5; on the CPU, more than 5 rows need more than any machine has.

    Args:
        device: where it trains.
        times: the factor of what a row needs.
    """

    def __init__(self, device: torch.device, times: int = 1) -> None:
        super().__init__()
        self.on, self.times = device, times

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = len(batch[0]) * self.times
        needed = rows * 96 * MIB if self.on.type == "cuda" else max(0, rows - 5) * 2**50
        torch.empty(needed, dtype=torch.uint8, device=self.on)
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("deterministic")
def test_batches_beyond_the_limit_are_split_with_the_weights_of_a_plain_loop(limited: torch.device) -> None:
    module, plain = Rows(limited), Hungry()
    x, y = samples(20)
    run = trainer(limited, accumulate_grad_batches="auto")
    run.fit(module, DataLoader(TensorDataset(x, y), 8))
    assert micro_batches_of(run) == 2 and module.rows == [4, 4, 4, 4, 2, 2]
    plain.net.to(limited)
    windows = [[split_batch(x[i : i + 8].to(limited), y[i : i + 8].to(limited), 2)] for i in range(0, 20, 8)]
    plain_loop(plain, windows)
    for name, value in plain.net.state_dict().items():
        torch.testing.assert_close(module.net.state_dict()[name], value, rtol=0, atol=1e-12, msg=name)


def test_a_row_beyond_the_limit_is_reported_with_peaks_and_total(limited: torch.device) -> None:
    with pytest.raises(LeydenError, match="cannot split it further") as caught:
        trainer(limited, accumulate_grad_batches="auto").fit(Rows(limited, times=6), [samples(2)])
    text = str(caught.value)
    assert "in forward with 1 of the batch's 2 samples; peak memory: forward " in text
    if limited.type == "cuda":
        assert f" of {size_of(torch.cuda.get_device_properties(limited).total_memory)}" in text


def test_the_next_fit_has_the_memory_of_one_that_ran_out(limited: torch.device) -> None:
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of memory on"):
            trainer(limited).fit(Rows(limited, times=2), [samples(4)])
    run = trainer(limited)
    run.fit(Rows(limited), [samples(4)])
    assert run.global_step == 1


def test_device_statistics_are_logged(device: torch.device, tmp_path: Path) -> None:
    if device.type == "cpu":
        pytest.importorskip("psutil")
    module = Line(1024, 1024)
    logger = CSVLogger(tmp_path)
    run = trainer(device, logger=logger, callbacks=[DeviceStatsMonitor()], log_every_n_steps=1)
    run.fit(module, list(torch.randn(3, 4, 1024)))
    rows = list(csv.DictReader(next(tmp_path.rglob("metrics.csv")).open()))
    name = {"cuda": "allocated_bytes.all.peak", "cpu": "cpu_vm_percent"}[device.type]
    found = [float(value) for row in rows if (value := row[f"DeviceStatsMonitor.on_train_batch_end/{name}"])]
    # Weights and gradients are there at the same time.
    least = 2 * sum(p.nbytes for p in module.parameters()) if device.type == "cuda" else 0
    assert len(found) == 3 and min(found) > least


# two devices in one process -------------------------------------------------------------------------------------------
def test_two_devices_in_one_process(device: torch.device, tmp_path: Path) -> None:
    """On the CPU, both are the CPU."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    devices = [torch.device(device.type, index) if device.type == "cuda" else device for index in range(2)]
    plans: list[Any] = [[1], [0]] if device.type == "cuda" else [1, 1]
    taken = torch.cuda.memory_allocated(0) if device.type == "cuda" else 0
    first = Squares(nn.Linear(64, 64))
    run = trainer(device, devices=plans[0], default_root_dir=tmp_path)
    run.fit(first, list(torch.randn(4, 8, 64)))
    assert next(first.parameters()).device == devices[1]
    assert device.type == "cpu" or torch.cuda.memory_allocated(0) == taken
    path = run.save_checkpoint(tmp_path / "saved")
    again = trainer(device, devices=plans[1], max_epochs=2, default_root_dir=tmp_path)
    second = Squares(nn.Linear(64, 64))
    again.fit(second, list(torch.randn(4, 8, 64)), ckpt_path=path)
    assert next(second.parameters()).device == devices[0] and again.global_step == 8
    values = {"first": first.net.weight.sum(), "second": second.net.weight.sum()}
    assert read_back(values) == {name: value.item() for name, value in values.items()}
    assert bool(are_finite([*first.parameters(), *second.parameters()]))
