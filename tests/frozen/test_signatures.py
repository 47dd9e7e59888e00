"""Public signatures only grow: what signatures.json records works in every later version."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator

import pytest
from frozen.signatures import SNAPSHOT, described

RECORDED: dict[str, dict[str, str]] = json.loads(SNAPSHOT.read_text())


def lost(was: str, now: str) -> Iterator[str]:
    """What a caller of an old signature would trip over in the new one."""
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
            yield f"{name} is no longer taken"
    if [name for name, _ in after[: len(before)]] != [name for name, _ in before] and new.vararg is None:
        yield "positional arguments stand in another order"
    known = {**dict(before), **keywords(old)}
    for name, default in named.items():
        if name not in known and default is None:
            yield f"{name} is now needed"


def arguments_of(signature: str) -> ast.arguments:
    function = ast.parse(f"def f{signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.args


def positional(arguments: ast.arguments) -> list[tuple[str, str | None]]:
    """Names with their defaults, as text."""
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
        assert list(lost(signature, now.get(member, "property"))) == [], f"{name}.{member}"


@pytest.mark.parametrize(
    ("now", "complaint"),
    [
        ("(b, a=1)", "positional arguments stand in another order"),
        ("(a=1)", "b is no longer taken"),
        ("(a, b)", "the default of a was 1 and is None"),
        ("(a=2, b=2)", "the default of a was 1 and is 2"),
        ("(a=1, b=2, *, c)", "c is now needed"),
        ("(a=1, *, b=2)", "positional arguments stand in another order"),
    ],
)
def test_a_signature_that_shrinks_is_noticed(now: str, complaint: str) -> None:
    assert complaint in list(lost("(a=1, b=2)", now))


@pytest.mark.parametrize("now", ["(a=1, b=2, c=3)", "(a=1, b=2, *, c=3)", "(*args, a=1, b=2, **kwargs)"])
def test_a_signature_that_grows_is_not(now: str) -> None:
    assert list(lost("(a=1, b=2)", now)) == []
