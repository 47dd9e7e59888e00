"""Lists the checkpoints in a folder by their manifests, oldest first."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from leyden.checkpoint.format import staging
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest

Key: TypeAlias = tuple[int, int, str, str]
"""Sorts checkpoints by age."""


def ordered(folder: Path, depth: int = 0) -> list[tuple[Path, Manifest | CheckpointError]]:
    """Returns every checkpoint with its manifest, oldest first. Unreadable ones come last, with the error."""
    entries = sorted(all_entries(folder, depth), key=lambda entry: entry[0])
    return [(path, manifest) for _, path, manifest in entries]


def all_entries(folder: Path, depth: int) -> list[tuple[Key, Path, Manifest | CheckpointError]]:
    """Returns every checkpoint with its manifest, or the error of reading it, after a key that sorts them by age."""
    return [entry for level in levels(folder, depth) for entry in _entries(level)]


def levels(folder: Path, depth: int) -> list[Path]:
    """Returns a folder, and the folders up to `depth` levels below it that are not checkpoints."""
    folders = level = [folder]
    for _ in range(depth):
        below: list[Path] = []
        for parent in level:
            with suppress(OSError):
                below += [path for path in sorted(parent.iterdir()) if _may_hold_checkpoints(path)]
        folders, level = folders + below, below
    return folders


def _may_hold_checkpoints(path: Path) -> bool:
    return (
        path.is_dir()
        and not path.is_symlink()
        and not staging.is_staging(path.name)
        and not _looks_like_checkpoint(path)
    )


def _entries(folder: Path) -> list[tuple[Key, Path, Manifest | CheckpointError]]:
    """Returns the checkpoints directly in a folder, each preceded by a key that sorts them by age."""
    found: list[tuple[Key, Path, Manifest | CheckpointError]] = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    aside = {path.name for path, _ in staging.set_aside(folder)}
    for name in names:
        path = folder / name
        if staging.is_staging(name) and name not in aside:
            continue
        # A link such as "last" points to a checkpoint that is listed under its own name.
        if path.is_symlink() or not path.is_dir() or not _looks_like_checkpoint(path):
            continue
        try:
            manifest = read_manifest(path)
            found.append(((0, manifest.save_counter, manifest.saved_at, name), path, manifest))
        except CheckpointError as error:
            found.append(((1, 0, "", name), path, error))
    return found


def _looks_like_checkpoint(path: Path) -> bool:
    # A checkpoint that has lost its manifest is listed too, so that the caller warns of the damage.
    return any(os.path.lexists(path / name) for name in (MANIFEST, "layout.json", "progress.json"))
