"""fp8 on a GPU with fp8 units: its kernels run, a GPT learns as well as in bf16, and the benchmark runs."""

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


def reason() -> str:
    """Returns why these tests cannot run here, or an empty string."""
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device here"
    capability = torch.cuda.get_device_capability()
    return "" if capability >= (8, 9) else f"fp8 needs compute capability 8.9, and this GPU has {capability}"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(reason()), reason=reason())]


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, *rest: Any) -> None:
        self.seen.append(outputs["loss"].detach() if isinstance(outputs, dict) else outputs.detach())


def trained(precision: Any, folder: Path, steps: int = 200) -> list[float]:
    spec = importlib.util.spec_from_file_location("lm", ROOT / "examples" / "lm.py")
    assert spec is not None and spec.loader is not None
    lm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lm)
    losses = Losses()
    torch.manual_seed(0)
    alphabet, loader, _ = lm.make_loaders(128, 16)
    trainer = Trainer(
        **{**QUIET, "accelerator": "cuda"},
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
def test_a_gpt_learns_as_well_as_in_bf16(recipe: Any, tmp_path: Path) -> None:
    fp8, bf16 = (trained(precision, tmp_path) for precision in (Float8Precision(recipe), "bf16-mixed"))
    ends = [sum(losses[-20:]) / 20 for losses in (fp8, bf16)]
    assert fp8 != bf16 and ends[1] < 0.65 * bf16[0]
    assert abs(ends[0] / ends[1] - 1) < 0.02, ends


def test_fp8_kernels_run(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        trained("fp8", tmp_path, steps=2)
    calls = {event.key: event.count for event in seen.key_averages()}
    # All 12 Linear layers of three blocks except the first: one product in forward and two in backward; two steps.
    assert calls["aten::_scaled_mm"] == (12 - 1) * 3 * 2


def test_the_benchmark_prints_speed_and_memory(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "fp8.py"), "--width", "512", "--depth", "2", "--length", "256"]
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [*command, "--steps", "4", "--repeats", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bf16-mixed")
    assert all("tokens/s" in line and "GiB" in line for line in done.stdout.splitlines())
