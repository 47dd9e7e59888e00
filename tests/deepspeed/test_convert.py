"""`leyden convert` on folders that DeepSpeed's own engine saved, as Accelerate and Lightning lay them out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from ranks.world import run_world
from torch import nn

from leyden.checkpoint.reader import CheckpointReader


def save(folder: str) -> dict[str, dict[str, Any]]:
    """Saves a step of DeepSpeed's engine by its own method; returns the float32 masters."""
    from deepspeed.utils import safe_get_full_fp32_param

    from leyden.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy

    found = {}
    for stage, lower in ((2, False), (3, True)):
        strategy = DeepSpeedStrategy(stage=stage)
        strategy.setup_environment()
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": lower},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        engine = strategy.zero.library.initialize(model=model, optimizer=optimizer, config=config)[0]
        engine.backward(engine(torch.ones(2, 5, dtype=torch.bfloat16 if lower else torch.float32)).float().sum())
        engine.step()
        engine.save_checkpoint(f"{folder}/stage {stage}", "pytorch_model")
        found[f"stage {stage}"] = {name: safe_get_full_fp32_param(p).numpy() for name, p in model.named_parameters()}
        engine.destroy()
    return found


def convert(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leyden", "convert", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_convert_writes_the_masters_of_deepspeed_folders(tmp_path: Path) -> None:
    expected = run_world(2, save, str(tmp_path))[0]
    # Stage 2 stays in Accelerate's layout, stage 3 moves to Lightning's.
    shutil.move(tmp_path / "stage 3" / "pytorch_model", tmp_path / "stage 3" / "checkpoint")
    (tmp_path / "stage 3" / "latest").write_text("checkpoint")
    for name, weights in expected.items():
        refused = convert(name, cwd=tmp_path)
        assert refused.returncode == 2 and "in pickles" in refused.stderr and "--trust" in refused.stderr
        done = convert(name, "out " + name, "--trust", "--prefix", "net", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "4 tensors" in done.stdout and len(done.stdout.splitlines()) == 1
        found = CheckpointReader(tmp_path / f"out {name}").model()
        assert found.keys() == {f"net.{key}" for key in weights}
        assert all(found[f"net.{key}"].numpy().tobytes() == value.tobytes() for key, value in weights.items())
    next((tmp_path / "stage 2" / "pytorch_model").glob("*zero_pp_rank_1*optim*")).write_bytes(b"damaged")
    assert "cannot be read by DeepSpeed" in convert("stage 2", "again", "--trust", cwd=tmp_path).stderr
    assert not (tmp_path / "again").exists()
