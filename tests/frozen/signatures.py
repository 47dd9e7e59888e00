"""Records public names and signatures: `python tests/frozen/signatures.py` writes them to signatures.json.

Public names are those that `leyden`, its three rooms and `leyden.hf` export, and those that the docs and examples
import.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = Path(__file__).with_name("signatures.json")


def public_names() -> list[str]:
    """Returns names such as "leyden.trainer:Trainer", sorted."""
    found = set()
    for room in ("leyden", "leyden.trainer", "leyden.callbacks", "leyden.strategies", "leyden.hf"):
        module = importlib.import_module(room)
        exported = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        for name in exported:
            value = getattr(module, name)
            if getattr(value, "__module__", "").startswith("leyden"):
                found.add(f"{room}:{name}")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]:
        for line in re.findall(r"^\s*(from leyden[\w.]* import [\w, ]+)$", path.read_text(), re.M):
            imported = ast.parse(line.strip()).body[0]
            assert isinstance(imported, ast.ImportFrom)
            found |= {f"{imported.module}:{alias.name}" for alias in imported.names}
    return sorted(found)


def described(name: str) -> dict[str, str]:
    """Returns the signatures of a public name: its own under "", its public methods', and "property" for a property.

    Methods of strategies are left out: the contract of strategies has its own conformance tests.

    Raises:
        ImportError: the module does not exist.
        AttributeError: the module has no such name.
    """
    module, _, attribute = name.partition(":")
    value = getattr(importlib.import_module(module), attribute)
    found = {"": signature_of(value)} if callable(value) else {}
    if inspect.isclass(value) and "leyden.strategies.base" not in {base.__module__ for base in value.__mro__}:
        found |= dict(sorted(members(value)))
    return found


def members(cls: type) -> Iterator[tuple[str, str]]:
    """Yields the public methods and properties of a class and of its bases in Leyden."""
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("leyden"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_"):
                continue
            if isinstance(value, property):
                yield name, "property"
            elif isinstance(value, (staticmethod, classmethod)) or inspect.isfunction(value):
                yield name, signature_of(getattr(cls, name))


def signature_of(function: Any) -> str:
    """Returns text such as "(self, path, *, exact=True)", with ... for a default that is not a plain value."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return "(*args, **kwargs)"
    plain = [
        parameter.replace(annotation=parameter.empty, default=_shown_default(parameter))
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def _shown_default(parameter: inspect.Parameter) -> Any:
    default = parameter.default
    plain = isinstance(default, (bool, int, float, str, tuple, type(None))) and not isinstance(default, enum.Enum)
    return default if plain or default is parameter.empty else _Other()


class _Other:
    """A placeholder for a default that is not a plain value."""

    def __repr__(self) -> str:
        return "..."


def current() -> dict[str, dict[str, str]]:
    """Returns the signatures of all public names; an object with several names is listed under the first."""
    homes: dict[int, str] = {}
    return {name: described(name) for name in public_names() if homes.setdefault(_identity(name), name) == name}


def _identity(name: str) -> int:
    module, _, attribute = name.partition(":")
    return id(getattr(importlib.import_module(module), attribute))


def with_additions() -> dict[str, dict[str, str]]:
    """Returns what is recorded, and the names and methods that have come since. A former path of a name stays."""
    recorded: dict[str, dict[str, str]] = json.loads(SNAPSHOT.read_text())
    now = current()
    return {name: {**recorded.get(name, {}), **now.get(name, {})} for name in sorted({*recorded, *now})}


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(with_additions(), indent=1, ensure_ascii=False) + "\n")
