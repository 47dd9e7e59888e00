"""HFModule(generation=) under stage 3, whose ranks gather each layer for each token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf.test_generation import check_equal, evaluated
from ranks.world import run_world


@pytest.mark.full
@pytest.mark.timeout(300)
def test_stage_3_generates_the_tokens_of_one_process(tmp_path: Path) -> None:
    kinds = ["llama", "t5"]
    found = run_world(2, evaluated, "zero3", kinds, str(tmp_path / "ranks"), timeout=280)
    check_equal(found, evaluated("single", kinds, str(tmp_path / "single")))
