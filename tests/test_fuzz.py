"""A resume from a mutated checkpoint raises an error of Leyden's own, or ends with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_checkpoints import fuzz


def test_mutated_checkpoints_raise_or_change_nothing(tmp_path: Path) -> None:
    outcomes, defects = fuzz(range(40), tmp_path)
    assert defects == []
    assert outcomes["refused"] > 20 and outcomes["same"] > 0


@pytest.mark.full
def test_more_mutated_checkpoints_raise_or_change_nothing(tmp_path: Path) -> None:
    outcomes, defects = fuzz(range(1000, 1400), tmp_path)
    assert defects == [], outcomes
