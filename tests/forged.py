"""Forges checkpoints as an attacker would: a checksum is not a signature."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leyden.checkpoint.format.manifest import MANIFEST, read_manifest
from leyden.checkpoint.format.safefile import write_file


class Bomb:
    """Creates the folder `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def forge(folder: Path, name: str, data: bytes | None) -> None:
    """Replaces a file of a checkpoint, or removes it (None), and updates the manifest to match."""
    manifest = read_manifest(folder)
    files = {other: entry for other, entry in manifest.files.items() if other != name}
    (folder / name).unlink(missing_ok=True)
    if data is not None:
        files[name] = write_file(folder / name, [data])
    (folder / MANIFEST).write_bytes(dataclasses.replace(manifest, files=files).to_bytes())


def forge_json(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Forges a JSON file with a function that changes its parsed content in place."""
    tree = json.loads((folder / name).read_text())
    change(tree)
    forge(folder, name, json.dumps(tree).encode())
