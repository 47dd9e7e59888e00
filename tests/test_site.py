"""The documentation as a site: its navigation, its lessons, and the built pages with their search."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
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


def test_every_picture_is_shown_and_every_shown_picture_exists() -> None:
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *LESSONS]
    shown = {
        (page.parent / picture).resolve()
        for page in pages
        for picture in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
        if not picture.startswith("http")
    }
    # The site's logo.
    assert shown | {DOCS / "pictures" / "jar.svg"} == set((DOCS / "pictures").iterdir())


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


@pytest.mark.parametrize("page, saved", [("index.md", 1), ("from-composer.md", 2)])
def test_the_code_of_a_page_runs(page: str, saved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, page, "exec"), {"__name__": "page"})
    assert len(list(tmp_path.rglob("epoch=*"))) == saved


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


# the built site -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy of the pages with warnings as errors."""
    for package in ("sphinx", "myst_parser", "shibuya", "sphinx_copybutton", "jsonargparse"):
        pytest.importorskip(package, reason="the extra `docs` is not installed")
    checkout = tmp_path_factory.mktemp("checkout")
    # The API pages are generated next to the others, and pages link to sources.
    names = ("docs", "leyden", "trainer", "callbacks", "strategies", "tests", "examples", "scripts")
    subprocess.run(["cp", "--archive", *(ROOT / name for name in names), checkout], check=True)
    for made in ("api", "_build"):
        shutil.rmtree(checkout / "docs" / made, ignore_errors=True)
    built = checkout / "docs" / "_build"
    command = [sys.executable, "-m", "sphinx", "-E", "-q", "-W", "--keep-going", checkout / "docs", built]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(checkout)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return built


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in [*DOCS.glob("*.md"), *LESSONS]}
    assert [page for page in pages if not (site / page).is_file()] == []
    assert "start/1-first-run" in (site / "llms.txt").read_text(encoding="utf-8")
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:link|script|img|iframe|source)\b[^>]*>", page.read_text(encoding="utf-8"))
        assert [tag for tag in tags if re.search(r"(?:src|href)=.?(?:https?:)?//", tag)] == [], page.name


SEARCH = """
const fs = require("fs"), vm = require("vm"), root = process.argv[1] + "/";
const page = { getElementById: () => null, addEventListener: () => {}, readyState: "loading" };
const context = vm.createContext({ document: page, localStorage: { setItem() {} }, URLSearchParams, console });
context.window = context;
for (const name of ["documentation_options", "doctools", "sphinx_highlight", "language_data", "searchtools"])
    vm.runInContext(fs.readFileSync(root + "_static/" + name + ".js", "utf8"), context);
vm.runInContext(fs.readFileSync(root + "searchindex.js", "utf8"), context);
for (const question of process.argv.slice(2)) {
    context.question = question;
    const found = vm.runInContext("Search._performSearch(...Search._parseQuery(question))", context);
    console.log(JSON.stringify(found.reverse().slice(0, 3).map(([name, title, anchor]) => name + anchor)));
}
"""
"""Asks the site's own search, and prints the first three results of each question."""

QUESTIONS = {
    "where are my checkpoints": "start/5-look-at-it",
    "how do I continue": "start/4-kill-it-and-go-on",
    "how do I add a metric": "start/2-your-own-model",
    "why is it slow": "start/5-look-at-it",
    "how do I use two GPUs": "start/3-two-processes",
    "resume": "checkpoints",
    "metric": "recipes",
    "slow": "data",
    "GPUs": "start/3-two-processes",
}
"""A newcomer's questions, in full and as one word, and the page that answers."""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_search_answers_questions_of_a_newcomer(site: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("the site's search runs under node")
    done = subprocess.run([node, "-e", SEARCH, site, *QUESTIONS], capture_output=True, text=True, check=True)
    found = dict(zip(QUESTIONS, map(json.loads, done.stdout.splitlines()), strict=True))
    for question, page in QUESTIONS.items():
        assert page in [name.partition("#")[0] for name in found[question]], (question, found[question])
