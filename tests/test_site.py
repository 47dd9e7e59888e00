"""The documentation as a site: its navigation, its lessons, and the built pages with their search."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LESSONS = sorted((DOCS / "start").glob("*.md"))


def test_every_page_is_in_the_navigation_exactly_once() -> None:
    trees = re.findall(r"```{toctree}\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.DOTALL)
    listed = Counter(line for tree in trees for line in tree.splitlines() if line and not line.startswith(":"))
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md") if "_build" not in path.parts}
    assert listed == Counter(pages - {"index"})


def test_every_public_name_has_an_api_page_exactly_once() -> None:
    listed = re.findall(r"^   ([\w.]+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    found: dict[int, str] = {}
    for name in listed:
        parent, _, last = f"leyden.{name}".rpartition(".")
        assert found.setdefault(id(getattr(importlib.import_module(parent), last)), name) == name
    for room in ("leyden", "leyden.trainer", "leyden.callbacks", "leyden.strategies", "leyden.hf", "leyden.optim"):
        module = importlib.import_module(room)
        missing = [name for name in module.__all__ if id(getattr(module, name)) not in found]
        assert [name for name in missing if not name.startswith("__")] == [], room


def test_the_page_for_users_of_composer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", (DOCS / "from-composer.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "docs/from-composer.md", "exec"), {"__name__": "page"})
    assert len(list((tmp_path / "saved").glob("epoch=*"))) == 2


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_lessons_run_in_their_order(tmp_path: Path) -> None:
    """In one folder, as a reader does: a block that begins with a file's name is saved, all others are run."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # The command is the checkout's, which may not be installed.
    prelude = 'set -euo pipefail; leyden() { python -m leyden "$@"; }\n'
    ran = 0
    for lesson in LESSONS:
        text = lesson.read_text(encoding="utf-8")
        assert 30 <= len(text.splitlines()) <= 80, lesson.name
        for language, block in re.findall(r"```(python|bash)\n(.*?)```", text, re.DOTALL):
            file = re.match(r"# (\w+\.py)\n", block)
            if file:
                (tmp_path / file[1]).write_text(block.partition("\n")[2], encoding="utf-8")
                continue
            # tests/test_packaging.py and the README's commands install.
            if "pip install" in block:
                continue
            command = ["bash", "-c", prelude + block] if language == "bash" else [sys.executable, "-c", block]
            done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, f"{lesson.name}:\n{block}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            ran += 1
    assert ran >= 12
