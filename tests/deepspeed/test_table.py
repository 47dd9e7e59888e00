"""DeepSpeed's rows in the table of docs/strategies.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import table
import torch
from ranks.world import run_world

STRATEGIES = ("deepspeed_stage_2", "deepspeed_stage_3")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_quick_cells_of_the_table_are_correct(strategy: str, tmp_path: Path) -> None:
    table.check(strategy, "CI", tmp_path, size=2, other=1)


def test_other_names_of_the_strategy_train(tmp_path: Path) -> None:
    table.check_other_names(*STRATEGIES, size=2, folder=tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slow_cells_of_the_table_are_correct(strategy: str, tmp_path: Path) -> None:
    table.check(strategy, "full", tmp_path, size=2, other=1)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
            ],
        ),
    ],
)
def test_cells_of_the_table_work_in_a_world_of_one(device: str, tmp_path: Path) -> None:
    rows = table.rows_of(*STRATEGIES, run="CI")
    [found] = run_world(1, table.run_working, rows, str(tmp_path), environ={"TABLE_ACCELERATOR": device})
    assert found and not table.mismatches(found)
