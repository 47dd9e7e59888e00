"""`leyden fit` on ranks that it starts itself: one saved configuration, and one report of a failing rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

TESTS = Path(__file__).parents[1]
OPTIONS = [
    *("--data=configured.Points", "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"),
    *("--trainer.max_epochs=1", "--trainer.enable_progress_bar=false", "--trainer.resume=auto"),
]


def test_two_ranks_save_one_configuration_that_repeats_the_run(leyden: Callable[..., Any], tmp_path: Path) -> None:
    variables = {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    done = leyden("fit", "--model=configured.OwnNet", *OPTIONS, "--trainer.default_root_dir=a", **variables)
    assert done.returncode == 0, done.stderr
    [saved] = tmp_path.rglob("config*.yaml")
    assert saved == tmp_path / "a/logs/version_0/config.yaml"
    config = yaml.safe_load(saved.read_text())
    assert (config["trainer"]["devices"], config["seed_everything"]) == (2, 0)
    done = leyden("fit", f"--config={saved}", "--trainer.default_root_dir=b", **variables)
    assert done.returncode == 0, done.stderr
    one, two = (load_file(next((tmp_path / name).rglob("model.safetensors"))) for name in "ab")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.full
def test_a_ranks_error_is_shown_once_with_its_line(leyden: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(
        "from configured import OwnNet\nclass FailingStep(OwnNet):\n    def training_step(self, batch, batch_idx):\n"
        "        raise LookupError('no such word')\n"
    )
    variables = {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    done = leyden("fit", "--model=my_module.FailingStep", *OPTIONS, **variables)
    assert done.returncode == 1
    assert done.stderr.count("LookupError: no such word") == 1
    assert "training_step" in done.stderr
    assert "bug in Leyden" not in done.stderr
