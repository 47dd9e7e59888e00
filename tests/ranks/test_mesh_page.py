"""docs/parallel.md runs unchanged on two ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from ranks.world import run_world

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


def run_page(folder: str) -> float:
    """Runs all code blocks of the page; returns the last loss of its first run."""
    os.chdir(folder)
    names: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return float(names["trainer"].callback_metrics["loss"])  # type: ignore[attr-defined]


@pytest.mark.full
def test_the_code_of_the_parallel_page_runs_unchanged(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    first, second = run_world(2, run_page, str(tmp_path))
    assert first == second > 0
    assert list((tmp_path / "logs" / "version_0" / "checkpoints").iterdir())
