"""Files written under a temporary name and renamed into place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from leyden.checkpoint.format import staging


@pytest.mark.parametrize("exists", [False, True])
def test_a_file_is_replaced_only_once_it_is_complete(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "scores.json"
    if exists:
        path.write_text("old")
    with staging.replacing(path) as temporary:
        temporary.write_text("new")
        assert staging.is_staging(temporary.name)
        assert path.exists() == exists
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["scores.json"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("written", [False, True])
def test_an_error_keeps_the_old_file_and_removes_the_temporary_one(
    tmp_path: Path, error: type[BaseException], written: bool
) -> None:
    path = tmp_path / "scores.json"
    path.write_text("old")
    with pytest.raises(error), staging.replacing(path) as temporary:
        if written:
            temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["scores.json"]
