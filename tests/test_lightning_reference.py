"""docs/lightning-reference.md lists the names of Lightning's classes that differ; all others are the same."""

from __future__ import annotations

import re

import pytest
from lightning_surface import KINDS, SECTIONS, SURFACE, rows, same


def test_each_section_is_about_a_class_of_lightning() -> None:
    assert set(SECTIONS) <= set(SURFACE)
    assert sum(len(SURFACE[name][kind]) for name in SURFACE for kind in KINDS) > 700


# An empty class there.
@pytest.mark.parametrize("name", [name for name in SURFACE if name != "NeptuneLogger"])
def test_a_name_has_a_row_or_is_the_same_with_its_default(name: str) -> None:
    if name in ("LightningCLI", "LightningArgumentParser", "SaveConfigCallback"):
        pytest.importorskip("jsonargparse")
    found, others = same(name), rows(SECTIONS.get(name, ""))
    for kind in KINDS:
        names = {member for member in SURFACE[name][kind] if not member.startswith("*")}
        assert names - set(found[kind]) - set(others) == set(), kind
    assert set(others) <= {member for kind in KINDS for member in SURFACE[name][kind]}
    for member, text in others.items():
        assert re.match(r"(the same.|differs: |not here|not in this version: |as a property differs: )", text), member
