"""The figures of a GPU: speed, synchronizations, stalls of saves and memory of GPT-2. Recorded, never asserted."""

from __future__ import annotations

import statistics
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leyden.core.text import size_of

with pytest.MonkeyPatch.context() as patch:
    # Only for this import: benchmarks/ranks.py would hide tests/ranks.
    patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from gpt2 import SYNC, Size, median_ratio, peaks, speeds, stalls, syncs

# Compiling GPT-2 takes a minute or more.
pytestmark = pytest.mark.timeout(600)
TINY = {"vocabulary": 64, "width": 32, "heads": 2, "depth": 2, "length": 16, "batch_size": 2}
FEW = {"steps": 3, "warm_up": 2, "rounds": 1}


def size_on(device: torch.device, **settings: Any) -> Size:
    """Returns GPT-2's size on a GPU, and a tiny one on the CPU."""
    return Size(device.type, **{**(TINY | FEW if device.type == "cpu" else {}), **settings})


@pytest.mark.parametrize("compiled", ["eager", "compiled"])
def test_tokens_per_second(device: torch.device, compiled: str, record_property: Any) -> None:
    backends = {"eager": None, "compiled": "inductor" if device.type == "cuda" else "aot_eager"}
    found = speeds(size_on(device), backends[compiled])
    for name, values in found.items():
        record_property(name, f"{statistics.median(values):,.0f} tokens/s")
    record_property("Leyden by hand-written", f"{median_ratio(found):.3f}")
    assert [len(values) for values in found.values()] == [size_on(device).rounds] * 2


def test_a_step_without_synchronization(device: torch.device, record_property: Any) -> None:
    size = size_on(device)
    lines = syncs(size, size.model())
    record_property("synchronizations", f"{lines.total()} in {size.steps} steps")
    for line, count in lines.most_common():
        record_property(line, count)
    assert device.type == "cuda" or not lines


def test_synchronizations_are_counted_by_line(device: torch.device) -> None:
    """Shows that the count finds them: on a GPU really, on the CPU by torch's own words."""
    size = size_on(device, depth=1, steps=3, warm_up=2)
    model = size.model()

    def synchronizing(batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = model.loss(batch)
        if device.type == "cuda":
            loss.item()
        elif batch_idx >= size.warm_up:
            warnings.warn(f"{SYNC} CUDA operation", stacklevel=1)
        return loss

    model.training_step = synchronizing
    assert [count for line, count in syncs(size, model).items() if line.endswith("in synchronizing")] == [size.steps]


def test_the_stall_of_a_save(device: torch.device, record_property: Any, tmp_path: Path) -> None:
    found = stalls(size_on(device, rounds=1), tmp_path)
    for name, seconds in found.items():
        record_property(name, f"{1000 * statistics.median(seconds):,.0f} ms")
    assert list(found) == ["leyden, synchronous", "leyden, asynchronous", "torch.save"]
    assert not list(tmp_path.iterdir())


def test_peak_memory_beside_the_estimate(device: torch.device, record_property: Any) -> None:
    found = peaks(size_on(device))
    record_property("measured", size_of(found.measured))
    record_property("leyden estimate, without activations", size_of(found.estimated))
    text = found.activations if isinstance(found.activations, str) else size_of(found.estimated + found.activations)
    record_property("leyden estimate, with activations", text)
    # Weights, gradients and the optimizer's state exist at the same time.
    assert found.measured > found.estimated / 2
