"""Every version resumes the checkpoints written by version 2a2da38 bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from frozen import runs
from ranks.world import run_world

HERE = Path(__file__).parent


def expected(kind: str) -> list[dict[str, Any]]:
    """Returns what each rank did after the checkpoint, in the run that wrote it."""
    found: list[dict[str, Any]] = json.loads((HERE / kind / "after.json").read_text())
    return found


def resumed(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Resumes from a copy of the checkpoint; returns what each rank does now."""
    checkpoint = folder / "checkpoint"
    shutil.copytree(HERE / kind / "checkpoint", checkpoint)
    if kind == "own_loop":
        return [runs.own_loop(str(folder / "unused"), str(checkpoint))]
    _, size = runs.STRATEGIES[kind]
    arguments = (kind, str(folder / "run"), str(checkpoint))
    return [runs.fit(*arguments)] if size == 1 else run_world(size, runs.fit, *arguments)


@pytest.mark.parametrize("kind", [*runs.STRATEGIES, "own_loop"])
def test_a_frozen_checkpoint_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    now, then = resumed(kind, tmp_path), expected(kind)
    weights = runs.continued(HERE / kind / "checkpoint", then)
    for rank, (done, was) in enumerate(zip(now, then, strict=True)):
        assert done["batches"] == was["batches"], f"rank {rank}: other samples, order or random numbers"
        assert done["values"] == was["values"]
        assert done["end"] == was["end"]
        # Under FSDP, only rank 0 has full weights.
        assert done["weights"] == ({} if kind == "fsdp" and rank else weights)


@pytest.mark.parametrize("kind", [*runs.STRATEGIES, "own_loop"])
def test_plain_adamw_reproduces_the_weights_of_the_frozen_run(kind: str) -> None:
    """Checks `continued`: the run that wrote the checkpoint ended with the same weights, up to rounding."""
    then = expected(kind)
    for name, weight in runs.continued(HERE / kind / "checkpoint", then).items():
        assert weight == [pytest.approx(row, rel=1e-6) for row in then[0]["weights"][name]], name


def test_every_frozen_checkpoint_was_saved_within_an_epoch() -> None:
    for kind in runs.STRATEGIES:
        progress = json.loads((HERE / kind / "checkpoint" / "progress.json").read_text())
        assert (progress["epoch"], progress["batch"], progress["global_step"]) == (0, 2 * runs.SAVED, runs.SAVED)
