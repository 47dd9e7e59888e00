"""Tests of this folder run in the environment that scripts/ray-env makes; elsewhere they are skipped."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # By what is installed: to Python, this folder is a package "ray" too.
    missing = "ray" not in (found.name.lower() for found in metadata.distributions())
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ray)
            # On a busy machine, Ray takes a minute to start two workers.
            item.add_marker(pytest.mark.timeout(900))
            if missing:
                item.add_marker(
                    pytest.mark.skip(reason="ray is not installed here: scripts/ray-env makes its environment")
                )
