"""What the docs show runs: every example in a docstring, the README's example, and its links."""

from __future__ import annotations

import doctest
import functools
import importlib
import importlib.util
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import leyden

ROOT = Path(__file__).parents[1]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def modules() -> list[str]:
    return sorted(found.name for found in pkgutil.walk_packages(leyden.__path__, "leyden."))


def test_every_example_in_a_docstring_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    attempted = 0
    for name in modules():
        result = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
        assert result.failed == 0, name
        attempted += result.attempted
    assert attempted > 60


def test_every_module_says_what_it_is() -> None:
    assert [name for name in modules() if not importlib.import_module(name).__doc__] == []


def test_the_readme_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(code.replace("max_epochs=3", "max_epochs=1, accelerator='cpu'"), "README.md", "exec"), names)
    assert list((tmp_path / "checkpoints").iterdir())


def test_the_tour_of_the_trainer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 5
    # A module that can be imported, where torch.compile looks for the names of what it compiles; and no C++ compiler.
    tour = types.ModuleType("tour")
    monkeypatch.setitem(sys.modules, "tour", tour)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for block in blocks:
        exec(compile(block, "docs/trainer.md", "exec"), vars(tour))


def public_classes() -> set[str]:
    """The names of classes that stand in callbacks/ and strategies/, but for those that `leyden` itself has."""
    files = [path for room in ("callbacks", "strategies") for path in (ROOT / room).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    return {name for text in texts for name in re.findall(r"^class ([A-Z]\w+)", text, re.MULTILINE)} - set(
        leyden.__all__
    )


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.stem != "CONTRIBUTING"], ids=lambda path: path.name
)
def test_every_class_that_a_document_names_has_its_import_line(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    code = " ".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))
    imported: dict[str, str] = {}
    for module, names in re.findall(r"from (leyden[\w.]*) import (\w+(?:,\s+\w+)*|\([^)]*\))", code):
        imported |= dict.fromkeys(re.findall(r"\w+", names), module)
    for name, module in imported.items():
        assert hasattr(importlib.import_module(module), name), (module, name)
    named = set(re.findall(r"\b[A-Z]\w+", code)) & public_classes()
    assert sorted(named - set(imported)) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_dotted_name_that_a_document_gives_can_be_imported(document: Path) -> None:
    for name in re.findall(r"`(leyden(?:\.\w+)+)(?:\(\))?`", document.read_text(encoding="utf-8")):
        parent, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(parent), last) or importlib.util.find_spec(name) is not None, name
