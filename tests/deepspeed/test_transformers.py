"""Models of `transformers` that stage 3 shards while configure_model builds them."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.test_transformers_start import MODELS, state_of
from ranks.world import run_world

from leyden.strategies import DeepSpeedStrategy


def other_values() -> dict[str, list[str]]:
    """Returns the names of tensors that do not start from the values of a plain build, for each model."""
    found = {}
    for kind in MODELS:
        started: Any = state_of(DeepSpeedStrategy(stage=3), kind)
        plain = state_of("ddp", kind)
        found[kind] = [name for name, value in plain.items() if started[name] != value]
    return found


@pytest.mark.timeout(300)
def test_models_sharded_by_stage_3_start_from_the_values_of_a_plain_build() -> None:
    found = run_world(2, other_values, timeout=280)
    assert found == [{kind: [] for kind in MODELS}] * 2
