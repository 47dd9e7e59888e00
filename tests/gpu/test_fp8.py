"""fp8: a GPT learns as well as in bf16, its kernels run, and the benchmark runs. A CPU emulates it, in a few steps."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from leyden import Callback, Trainer, TrainModule
from leyden.strategies.precision import Float8Precision

ROOT = Path(__file__).parents[2]


pytest.importorskip("torchao")


@pytest.fixture
def units(device: torch.device) -> torch.device:
    """A GPU with fp8 units, or the CPU."""
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    return device


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, *rest: Any) -> None:
        self.seen.append(outputs["loss"].detach() if isinstance(outputs, dict) else outputs.detach())


def trained(precision: Any, device: torch.device, folder: Path, steps: int) -> list[float]:
    spec = importlib.util.spec_from_file_location("lm", ROOT / "examples" / "lm.py")
    assert spec is not None and spec.loader is not None
    lm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lm)
    losses = Losses()
    torch.manual_seed(0)
    alphabet, loader, _ = lm.make_loaders(128, 16)
    trainer = Trainer(
        **{**QUIET, "accelerator": device.type},
        devices=1,
        precision=precision,
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[losses],
        default_root_dir=folder,
    )
    trainer.fit(lm.CharacterGPT(alphabet, 128, 256, depth=3), loader)
    return [float(loss) for loss in losses.seen]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_gpt_learns_as_well_as_in_bf16(recipe: Any, units: torch.device, tmp_path: Path) -> None:
    steps = 200 if units.type == "cuda" else 2
    fp8, bf16 = (trained(name, units, tmp_path, steps) for name in (Float8Precision(recipe), "bf16-mixed"))
    ends = [sum(losses[-20:]) / len(losses[-20:]) for losses in (fp8, bf16)]
    assert fp8 != bf16 and (ends[1] < 0.65 * bf16[0] or steps == 2)
    assert abs(ends[0] / ends[1] - 1) < 0.02, ends


def test_fp8_kernels_run(cuda: torch.device, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        trained("fp8", cuda, tmp_path, steps=2)
    calls = {event.key: event.count for event in seen.key_averages()}
    # All 12 Linear layers of three blocks except the first: one product in forward and two in backward; two steps.
    assert calls["aten::_scaled_mm"] == (12 - 1) * 3 * 2


SIZES = {
    "cuda": "--width 512 --depth 2 --length 256 --steps 4",
    "cpu": "--width 64 --depth 1 --length 16 --batch-size 2 --warm-up 1 --steps 2 --no-compile",
}


def test_the_benchmark_prints_speed_and_memory(units: torch.device, tmp_path: Path) -> None:
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if units.type == "cpu" else {}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "fp8.py"), "--repeats", "1", *SIZES[units.type].split()],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **hidden},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bf16-mixed")
    lines = done.stdout.splitlines()
    assert all("tokens/s" in line and ("GiB" in line) == (units.type == "cuda") for line in lines)
