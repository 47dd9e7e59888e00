"""docs/strategies.md is correct: each cell of its table runs, on as many ranks as the strategy needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import table

from leyden import Trainer
from leyden.core.errors import MissingExtraError
from leyden.strategies import NAMES, XLA_NAMES
from leyden.strategies.precision import NAMES as PRECISIONS

SIZES = {
    "single_device": (1, None),
    "ddp": (2, 1),
    "fsdp": (2, 1),
    "fsdp_cpu_offload": (2, 1),
    "hsdp": (4, 2),
    "tp": (2, 1),
    "fsdp_tp": (4, 2),
}
"""Number of ranks of each strategy, and number of ranks on which its checkpoints resume."""


@pytest.mark.parametrize("strategy", [name for name in SIZES if table.rows_of(name, run="CI")])
def test_quick_cells_of_the_table_are_correct(strategy: str, tmp_path: Path) -> None:
    table.check(strategy, "CI", tmp_path, *SIZES[strategy])


def test_other_names_of_the_strategies_train(tmp_path: Path) -> None:
    table.check_other_names("ddp", "fsdp", size=2, folder=tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("strategy", SIZES)
def test_slow_cells_of_the_table_are_correct(strategy: str, tmp_path: Path) -> None:
    table.check(strategy, "full", tmp_path, *SIZES[strategy])


def test_the_table_covers_every_strategy_precision_and_feature() -> None:
    rows, letters, others = table.rows(), table.reasons(), table.other_names()
    pairs = [(row.strategy, row.precision) for row in rows]
    assert len(pairs) == len(set(pairs))
    strategies = {strategy for strategy, _ in pairs}
    named = [name for name in NAMES if name != "auto" and "find_unused_parameters" not in name]
    assert sorted(strategies | others.keys()) == sorted(named) and set(others.values()) <= strategies
    assert sorted(pairs) == sorted((strategy, precision) for strategy in strategies for precision in PRECISIONS)
    used = set()
    for row in rows:
        assert list(row.marks) == list(table.FEATURES) and row.run in ("CI", "full", "never"), row
        for mark in row.marks.values():
            assert mark in (table.WORKS, table.MEANINGLESS, table.UNTRIED) or mark[:1] == table.REFUSED, row
            used |= {mark[1:]} if mark[:1] == table.REFUSED else set()
        # Rows that never run, and only those, have no cell that works or is known to raise.
        assert (row.run == "never") == (set(row.marks.values()) <= {table.UNTRIED, table.MEANINGLESS}), row
    assert used == set(letters)


def test_only_transformer_engine_rows_never_run() -> None:
    for row in table.rows():
        assert (row.run == "never") == (row.precision == "transformer-engine"), row
        if row.run == "never" and row.strategy not in XLA_NAMES and not row.strategy.startswith("deepspeed"):
            with pytest.raises(MissingExtraError, match="transformer-engine"):
                Trainer(strategy=row.strategy, precision=row.precision, logger=False, accelerator="cpu")
