"""Fixtures for the tests of progress bars."""

from __future__ import annotations

import pytest

from leyden.callbacks.bars import paced_bar


@pytest.fixture
def every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws the bar at every batch, however short batches are."""
    monkeypatch.setattr(paced_bar, "DRAW_SECONDS", 0.0)
    monkeypatch.setattr(paced_bar, "DRAW_SHARE", 0)
    monkeypatch.setattr(paced_bar, "LINE_SECONDS", 0.0)
