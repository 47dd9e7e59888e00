"""The documentation is correct: its examples run, and the classes, links, files and functions that it names exist."""

from __future__ import annotations

import ast
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
from lightning_surface import SECTIONS, SURFACE, rows, same
from test_imports import FLOORS, SOURCES

import leyden

ROOT = Path(__file__).parents[1]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


def test_every_module_has_a_docstring() -> None:
    assert [name for name in modules() if not importlib.import_module(name).__doc__] == []


def test_the_readme_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(code.replace("max_epochs=3", "max_epochs=1, accelerator='cpu'"), "README.md", "exec"), names)
    assert list((tmp_path / "logs" / "version_0" / "checkpoints").iterdir())


def test_the_tour_of_the_trainer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 5
    # torch.compile looks up names in the module that defines them, which must be importable. "eager" needs no compiler.
    tour = types.ModuleType("tour")
    monkeypatch.setitem(sys.modules, "tour", tour)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for block in blocks:
        exec(compile(block, "docs/trainer.md", "exec"), vars(tour))


def recipes() -> tuple[str, list[tuple[str, str]]]:
    """Returns the setup code of docs/recipes.md, and each recipe's question and answer."""
    preamble, *parts = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split("\n### ")
    pairs = [part.split("\n## ")[0].partition("\n")[::2] for part in parts]
    return re.findall(r"```python\n(.*?)```", preamble, re.DOTALL)[0], [
        (question, answer) for question, answer in pairs
    ]


@pytest.mark.parametrize("question, answer", recipes()[1], ids=[question for question, _ in recipes()[1]])
def test_each_recipe_runs_standalone(
    question: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", answer, re.DOTALL)
    assert question.startswith("How do I ") and question.endswith("?") and len(code) == 1
    assert len([line for line in code[0].splitlines() if line.strip()]) <= 20
    assert re.search(r"\]\([\w-]+\.md", answer)  # A link to a page with more.
    if "import optuna" in code[0]:
        pytest.importorskip("optuna")  # Every other recipe runs with the extra `test`.
    module = types.ModuleType("recipe")
    monkeypatch.setitem(sys.modules, "recipe", module)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for block in (recipes()[0], code[0]):
        exec(compile(block, "docs/recipes.md", "exec"), vars(module))


def test_the_pages_on_models_of_transformers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("pages")
    monkeypatch.setitem(sys.modules, "pages", module)
    exec(compile(recipes()[0], "docs/recipes.md", "exec"), vars(module))
    for page in ("language-models.md", "from-hf-trainer.md"):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
        for block in blocks:
            exec(compile(block, f"docs/{page}", "exec"), vars(module))
    assert (tmp_path / "classifier" / "model.safetensors").is_file()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_there_are_at_least_thirty_recipes() -> None:
    questions = [question for question, _ in recipes()[1]]
    assert len(questions) == len(set(questions)) >= 30


def public_classes() -> set[str]:
    """Returns the names of the classes in callbacks/ and strategies/ that `leyden` itself does not export."""
    files = [path for room in ("callbacks", "strategies") for path in (ROOT / room).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    return {name for text in texts for name in re.findall(r"^class ([A-Z]\w+)", text, re.MULTILINE)} - set(
        leyden.__all__
    )


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.stem not in ("CONTRIBUTING", "api")], ids=lambda path: path.name
)
def test_documents_show_an_import_for_every_class_they_name(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    code = " ".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))
    imported: dict[str, str] = {}
    for module, names in re.findall(r"from (leyden[\w.]*) import (\w+(?:,\s+\w+)*|\([^)]*\))", code):
        imported |= dict.fromkeys(re.findall(r"\w+", names), module)
    for name, module in imported.items():
        assert hasattr(importlib.import_module(module), name), (module, name)
    named = set(re.findall(r"\b[A-Z]\w+", code)) & public_classes()
    assert sorted(named - set(imported)) == []


def test_the_lightning_reference_calls_no_available_name_missing() -> None:
    """A name that Leyden has gained belongs to those that are the same, or differ."""
    for name, section in SECTIONS.items():
        found = same(name)
        missing = [member for member, text in rows(section).items() if text.startswith("not ")]
        for member in missing:
            assert any(member in SURFACE[name][kind] and member not in found[kind] for kind in found), (name, member)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_resolve(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []


def headings(document: Path) -> set[str]:
    """Returns the anchors that GitHub makes of a document's headings."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_headings_resolve(document: Path) -> None:
    for name, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([^)]+)\)", document.read_text(encoding="utf-8")):
        assert anchor in headings(document.parent / name if name else document), (name, anchor)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_dotted_name_in_a_document_can_be_imported(document: Path) -> None:
    for name in re.findall(r"`(leyden(?:\.\w+)+)(?:\(\))?`", document.read_text(encoding="utf-8")):
        parent, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(parent), last) or importlib.util.find_spec(name) is not None, name


def message(error: ast.Call) -> str:
    """Returns the message of an error, with "…" for each placeholder."""
    [text] = error.args
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)  # type: ignore[misc]


def test_the_docs_list_exactly_the_errors_that_the_mesh_raises() -> None:
    page = (ROOT / "docs" / "parallel-errors.md").read_text(encoding="utf-8")
    prefixes = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    files = [*(ROOT / "strategies" / "mesh").rglob("*.py"), ROOT / "strategies" / "micro_batches.py"]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    calls = [node.exc for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    # A message of only "…" repeats another rank's error.
    errors = [text for call in calls if isinstance(call, ast.Call) and (text := message(call)) != "…"]
    assert len(prefixes) == len(set(prefixes)) > 20
    assert [text for text in errors if sum(text.startswith(words) for words in prefixes) != 1] == []
    assert [words for words in prefixes if not any(text.startswith(words) for text in errors)] == []


# what CONTRIBUTING.md names -------------------------------------------------------------------------------------------
GUIDE = ROOT / "CONTRIBUTING.md"
CALLBACK_BASE = "leyden.callbacks.base"


def members(node: ast.AST) -> set[str]:
    """Returns the names that a module or class defines: functions, classes, constants, and attributes set on `self`."""
    names: set[str] = set()
    for item in ast.walk(node) if isinstance(node, ast.ClassDef) else ast.iter_child_nodes(node):
        if item is not node and isinstance(item, (ast.FunctionDef, ast.ClassDef)):
            names.add(item.name)
        elif isinstance(item, (ast.Assign, ast.AnnAssign)):
            targets = item.targets if isinstance(item, ast.Assign) else [item.target]
            parts = [part for target in targets for part in getattr(target, "elts", [target])]
            names |= {part.id if isinstance(part, ast.Name) else getattr(part, "attr", "") for part in parts}
    return names


def defines(path: Path, name: str) -> bool:
    """Returns True if a file defines `function` (at the top level or in a class) or `Class.member`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    owner, _, member = name.partition(".")
    if not member:
        return any(name in members(node) for node in [tree, *[n for n in tree.body if isinstance(n, ast.ClassDef)]])
    return any(isinstance(node, ast.ClassDef) and node.name == owner and member in members(node) for node in tree.body)


def references() -> list[tuple[list[str], list[str]]]:
    """Returns the files and functions that each paragraph, list item and table row of CONTRIBUTING names."""
    text = re.sub(r"```.*?```", "", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    items = re.split(r"\n(?=\s*(?:[-*|]|\d+\.) ?)|\n\n", text)
    found = []
    for spans in (re.findall(r"`([^`\n]+)`", item) for item in items):
        files = [span for span in spans if re.fullmatch(r"[\w./-]+\.(py|md|json|bash)|[\w.-]+/[\w./-]*", span)]
        names = [span for span in spans if re.fullmatch(r"[A-Z]\w+\.\w+|[a-z_]\w*\(\)", span)]
        found.append((files, [name.removesuffix("()") for name in names]))
    return found


def test_every_file_that_contributing_names_exists() -> None:
    named = [file for files, _ in references() for file in files]
    assert len(named) > 20
    assert [file for file in named if not (ROOT / file).exists()] == []


def test_every_function_that_contributing_names_is_defined_in_a_file_it_names_alongside() -> None:
    checked = 0
    for files, names in references():
        sources = [ROOT / file for file in files if file.endswith(".py")]
        for name in names:
            assert any(defines(path, name) for path in sources), (name, files)
            checked += 1
    assert checked > 20


def test_tests_that_tested_md_names_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "tested.md").read_text(encoding="utf-8"))
    assert len(named) > 10
    for file, name in named:
        assert defines(ROOT / "tests" / "gpu" / file, name), f"{file}::{name}"


def test_files_that_docstrings_name_exist() -> None:
    checked = 0
    for path in SOURCES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
                continue
            for name in re.findall(r"`([\w./]+\.py)`", str(node.value.value)):
                # A script of the user's.
                if name == "train.py":
                    continue
                assert any((folder / name).exists() for folder in (ROOT, *path.parents)), f"{path}: {name}"
                checked += 1
    assert checked > 20


def test_contributing_lists_every_package_from_the_top_layer_down() -> None:
    floors = {
        prefix: number for number, prefixes in enumerate(FLOORS) for prefix in prefixes if prefix != CALLBACK_BASE
    }
    table = GUIDE.read_text(encoding="utf-8").split("| package, from the top |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = [[cell.removesuffix(".py").rstrip("/") for cell in re.findall(r"`([^`]+)`", row)] for row in rows]
    modules = [name.replace("/", ".") for names in named for name in names]
    numbers = [floors[name if name.startswith("leyden.") else f"leyden.{name}"] for name in modules]
    assert sorted(numbers, reverse=True) == numbers
    assert len(numbers) == len(floors)
