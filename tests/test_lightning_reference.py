"""docs/lightning-reference.md covers every name of Lightning's classes, and those it calls the same are the same."""

from __future__ import annotations

import re

import pytest
from lightning_surface import SECTIONS, SURFACE, rows, same

KINDS = ("arguments", "methods", "properties")


def listed(section: str, kind: str) -> list[str]:
    """Returns the names that a section calls the same."""
    found = re.search(rf"^{kind.capitalize()}, the same: (.*?)\.$", section, re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", found[1]) if found else []


def test_every_class_has_a_section() -> None:
    assert list(SECTIONS) == list(SURFACE)
    assert sum(len(SURFACE[name][kind]) for name in SURFACE for kind in KINDS) > 700


@pytest.mark.parametrize("name", SURFACE)
def test_every_name_is_covered_and_those_called_the_same_have_the_same_default(name: str) -> None:
    if name in ("LightningCLI", "LightningArgumentParser", "SaveConfigCallback"):
        pytest.importorskip("jsonargparse")
    section, found = SECTIONS[name], same(name)
    others = rows(section)
    for kind in KINDS:
        names = [member for member in SURFACE[name][kind] if not member.startswith("*")]
        assert set(listed(section, kind)) <= set(found[kind]), kind
        assert set(names) <= set(listed(section, kind)) | set(others), kind
    known = {member for kind in KINDS for member in SURFACE[name][kind]}
    assert set(others) <= known
    for member, text in others.items():
        assert re.match(r"(the same|differs: |not here|not in this version: |as a property differs: )", text), member
