"""Public signatures only grow: calls that signatures.json allows work in every later version."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator

import pytest
from frozen.signatures import SNAPSHOT, described, with_additions

RECORDED: dict[str, dict[str, str]] = json.loads(SNAPSHOT.read_text())


def breaking_changes(was: str, now: str) -> Iterator[str]:
    """Yields the changes from an old signature to a new one that break callers."""
    if was == "property" or now == "property":
        return
    old, new = arguments_of(was), arguments_of(now)
    before, after = positional(old), positional(new)
    named = {**dict(after), **keywords(new)}
    for name, default in {**dict(before), **keywords(old)}.items():
        if name in named:
            if default is not None and named[name] != default:
                yield f"the default of {name} was {default} and is {named[name]}"
        elif new.kwarg is None:
            yield f"{name} is no longer accepted"
    if [name for name, _ in after[: len(before)]] != [name for name, _ in before] and new.vararg is None:
        yield "positional arguments are reordered"
    known = {**dict(before), **keywords(old)}
    for name, default in named.items():
        if name not in known and default is None:
            yield f"{name} is now required"


def arguments_of(signature: str) -> ast.arguments:
    function = ast.parse(f"def f{signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.args


def positional(arguments: ast.arguments) -> list[tuple[str, str | None]]:
    """Returns the names of positional arguments with their defaults, as text."""
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    defaults = [None] * (len(names) - len(arguments.defaults)) + [ast.unparse(value) for value in arguments.defaults]
    return list(zip(names, defaults, strict=True))


def keywords(arguments: ast.arguments) -> dict[str, str | None]:
    return {
        argument.arg: None if default is None else ast.unparse(default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_signature_still_works(name: str) -> None:
    now = described(name)
    owner = getattr(importlib.import_module(name.partition(":")[0]), name.partition(":")[2])
    for member, signature in RECORDED[name].items():
        assert member in now or hasattr(owner, member), f"{name}.{member} is gone"
        assert list(breaking_changes(signature, now.get(member, "property"))) == [], f"{name}.{member}"


def test_every_public_name_and_method_is_recorded() -> None:
    missing = {name: sorted(set(found) - set(RECORDED.get(name, {}))) for name, found in with_additions().items()}
    missing = {name: members for name, members in missing.items() if members or name not in RECORDED}
    assert not missing, f"run python tests/frozen/signatures.py to record {missing}"


@pytest.mark.parametrize(
    ("now", "complaint"),
    [
        ("(b, a=1)", "positional arguments are reordered"),
        ("(a=1)", "b is no longer accepted"),
        ("(a, b)", "the default of a was 1 and is None"),
        ("(a=2, b=2)", "the default of a was 1 and is 2"),
        ("(a=1, b=2, *, c)", "c is now required"),
        ("(a=1, *, b=2)", "positional arguments are reordered"),
    ],
)
def test_incompatible_signatures_are_detected(now: str, complaint: str) -> None:
    assert complaint in list(breaking_changes("(a=1, b=2)", now))


@pytest.mark.parametrize("now", ["(a=1, b=2, c=3)", "(a=1, b=2, *, c=3)", "(*args, a=1, b=2, **kwargs)"])
def test_extended_signatures_are_accepted(now: str) -> None:
    assert list(breaking_changes("(a=1, b=2)", now)) == []
