"""XLA's rows in the table of docs/strategies.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import table
from xla import process

STRATEGIES = ("xla", "xla_fsdp")
# Importing it makes the fork server preload torch_xla.
assert process.on_xla


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_quick_cells_of_the_table_are_correct(strategy: str, tmp_path: Path) -> None:
    table.check(strategy, "CI", tmp_path, size=1, other=1, TABLE_DEVICES="4")


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slow_cells_of_the_table_are_correct(strategy: str, tmp_path: Path) -> None:
    table.check(strategy, "full", tmp_path, size=1, other=1, TABLE_DEVICES="4")
