"""Tests of this folder run in the environment that scripts/xla-env makes; elsewhere they are skipped."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("torch_xla") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xla)
            # XLA compiles for minutes on a machine that is busy with something else.
            item.add_marker(pytest.mark.timeout(900))
            if missing:
                item.add_marker(
                    pytest.mark.skip(reason="torch_xla is not installed: scripts/xla-env makes its environment")
                )
