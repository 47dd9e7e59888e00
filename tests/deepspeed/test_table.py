"""DeepSpeed's rows in the table of docs/strategies.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import table

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
