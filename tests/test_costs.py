"""What Leyden does per step: exactly what costs.json records, so that no commit adds to it unnoticed."""

from __future__ import annotations

import pytest
from costs import SCENARIOS, changes, count, recorded


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_step_costs_what_is_recorded(scenario: str) -> None:
    different = changes(recorded(scenario), count(scenario))
    if different:
        pytest.fail(
            f"{scenario}, in 100 steps:\n{different}\nIf a rise is needed, or to keep a fall: run "
            "`python tests/costs.py --write`, and say in the commit message why the numbers change."
        )
