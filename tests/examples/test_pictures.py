"""The examples that draw what they have learned: each learns, and writes its picture."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.full


def run(folder: Path, example: str, *arguments: str) -> str:
    pytest.importorskip("matplotlib", reason="pip install 'leyden[examples]'")
    command = [sys.executable, EXAMPLES / example, *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def is_small_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size <= 60_000


def test_digits_are_segmented(tmp_path: Path) -> None:
    iou = re.search(r"mean IoU (\d\.\d+)", run(tmp_path, "segmentation.py", "--steps", "200", "--out", "masks.png"))
    # If everything were background: 0.09.
    assert iou is not None and float(iou[1]) > 0.3
    assert is_small_picture(tmp_path / "masks.png")


def test_generated_digits_are_those_that_were_asked_for(tmp_path: Path) -> None:
    share = re.search(r"(\d+)% of the samples", run(tmp_path, "diffusion.py", "--steps", "300", "--out", "digits.png"))
    # By chance: 10%.
    assert share is not None and int(share[1]) > 60
    assert is_small_picture(tmp_path / "digits.png")


def test_a_model_predicts_without_leyden(tmp_path: Path) -> None:
    output = run(tmp_path, "inference.py", "--steps", "150")
    accuracy = re.search(r"without Leyden: accuracy (\d\.\d+), logits as in training", output)
    assert accuracy is not None and float(accuracy[1]) > 0.9
    assert is_small_picture(tmp_path / "out" / "inference.png")
    # The exported files are those of the checkpoint that is passed.
    [checkpoint] = (tmp_path / "out" / "inference" / "version_0" / "checkpoints").iterdir()
    again = run(tmp_path, "inference.py", "--checkpoint", str(checkpoint), "--folder", "again", "--out", "again.png")
    assert f"accuracy {accuracy[1]}" in again and "Epoch" not in again
    weights = [tmp_path / folder / "net.safetensors" for folder in ("out/inference", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_killed_sweep_continues_the_trial_that_it_interrupted(tmp_path: Path) -> None:
    optuna: Any = pytest.importorskip("optuna", reason="pip install 'leyden[examples]'")
    options = ("--trials", "3", "--epochs", "3", "--root", "sweep")
    killed = f"""
import os, signal, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import sweep
class Killed(sweep.Pruning):
    def on_validation_end(self, trainer, module):
        super().on_validation_end(trainer, module)
        if self.trial.number == 1 and trainer.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
sweep.Pruning = Killed
sys.argv[1:] = {options}
sweep.main()
"""
    ended = subprocess.run([sys.executable, "-c", killed], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    output = run(tmp_path, "sweep.py", *options)
    best = re.search(r"best accuracy (\d\.\d+)", output)
    assert best is not None and float(best[1]) > 0.9
    assert is_small_picture(tmp_path / "sweep" / "trials.png")

    study = optuna.load_study(study_name="digits", storage=f"sqlite:///{tmp_path / 'sweep' / 'study.db'}")
    first, interrupted, continued, last = study.trials
    assert [first.state.name, interrupted.state.name] == ["COMPLETE", "FAIL"]
    assert {continued.state.name, last.state.name} <= {"COMPLETE", "PRUNED"}
    assert continued.params == interrupted.params and last.params != first.params
    # The continued trial has the values of the epochs that were left, and no run of its own.
    assert set(interrupted.intermediate_values) == {1, 2} and min(continued.intermediate_values) == 2
    assert len(list((tmp_path / "sweep").glob("version_*"))) == 3
