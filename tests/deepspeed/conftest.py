"""Tests of this folder run in the environment that scripts/deepspeed-env makes; elsewhere they are skipped."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # By what is installed: to Python, this folder is a package "deepspeed" too.
    missing = "deepspeed" not in (found.name.lower() for found in metadata.distributions())
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.deepspeed)
            if missing:
                item.add_marker(
                    pytest.mark.skip(
                        reason="deepspeed is not installed here: scripts/deepspeed-env makes its environment"
                    )
                )
