"""The user's code is told apart by real folders: a project's folder may be called leyden, torch or lib/python-work."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

from leyden.core.user_code import is_users, users_frame
from leyden.trainer import trainer

FILES = {
    "train.py": True,
    "<stdin>": True,
    "/home/me/leyden/train.py": True,
    "/home/me/leyden/trainer/loop.py": True,
    "/home/me/torch/train.py": True,
    "/home/me/lib/python-work/train.py": True,
    os.path.join(sys.prefix, "work", "train.py"): True,
    __file__: True,
    "/home/me/leyden/.venv/lib/python3.11/site-packages/rich/live.py": False,
    "/usr/lib/python3/dist-packages/rich/live.py": False,
    "<frozen runpy>": False,
    os.__file__: False,
    str(torch.__file__): False,
    str(trainer.__file__): False,
}


@pytest.mark.parametrize("file", FILES)
def test_files_of_the_user_are_told_by_their_folder(file: str) -> None:
    assert is_users(file) is FILES[file]


def test_the_users_frame_is_the_innermost_of_their_own_or_else_the_innermost_outside_of_leyden() -> None:
    def stack(*files: str) -> traceback.StackSummary:
        return traceback.StackSummary.from_list([(file, 1, "f", "") for file in files])

    def found(*files: str) -> str:
        frame = users_frame(stack(*files))
        assert frame is not None
        return frame.filename

    own, library, ours = "/home/me/leyden/train.py", "/x/site-packages/app/main.py", str(trainer.__file__)
    assert found(library, own, ours, library) == own
    assert found(library, ours) == library
    assert found(ours) == ours
    assert users_frame(stack()) is None


def test_a_script_in_the_folder_of_its_environment_is_the_code_of_the_run(tmp_path: Path) -> None:
    """`python -m venv .` makes the project's folder the prefix."""
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.prefix = {str(tmp_path)!r}\n"
        "from leyden.trainer.reporting.record import _folder_of_code; print(_folder_of_code())\n"
    )
    done = subprocess.run([sys.executable, script], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path)
