"""Lists the checkpoints in a folder by their manifests, oldest first."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from leyden.checkpoint.format import staging
from leyden.checkpoint.format.bucket import AnyPlace, BucketPath
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest

Key: TypeAlias = tuple[int, int, str, str]
"""Sorts checkpoints by age."""
_REQUESTS = 8
"""Manifests of a bucket that are read at a time."""


def ordered(folder: AnyPlace, depth: int = 0) -> list[tuple[AnyPlace, Manifest | CheckpointError]]:
    """Returns every checkpoint with its manifest, oldest first. Unreadable ones come last, with the error."""
    entries = sorted(all_entries(folder, depth), key=lambda entry: entry[0])
    return [(path, manifest) for _, path, manifest in entries]


def all_entries(folder: AnyPlace, depth: int) -> list[tuple[Key, AnyPlace, Manifest | CheckpointError]]:
    """Returns every checkpoint with its manifest, or the error of reading it, after a key that sorts them by age.

    Raises:
        CheckpointError: if a bucket cannot be listed.
    """
    found: list[Any] = (
        _entries_in_bucket(folder, depth)
        if isinstance(folder, BucketPath)
        else [entry for level in levels(folder, depth) for entry in _entries(level)]
    )
    return found


def _entries_in_bucket(folder: BucketPath, depth: int) -> list[tuple[Key, BucketPath, Manifest | CheckpointError]]:
    entries: list[tuple[Key, BucketPath, Manifest | CheckpointError]] = []
    try:
        paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise CheckpointError(folder, f"cannot be listed: {error}.") from error
    with ThreadPoolExecutor(_REQUESTS) as pool:
        for path, found in zip(paths, pool.map(_manifest_in_bucket, paths), strict=True):
            if found is not None:
                entries.append((_key(path.name, found), path, found))
            elif depth:
                entries += _entries_in_bucket(path, depth - 1)
    return entries


def _manifest_in_bucket(path: BucketPath) -> Manifest | CheckpointError | None:
    """Returns a checkpoint's manifest or the error of reading it. None for a folder or file that has none."""
    try:
        return read_manifest(path)
    except CheckpointError as error:
        return None if isinstance(error.__cause__, FileNotFoundError) else error


def _key(name: str, found: Manifest | CheckpointError) -> Key:
    return (1, 0, "", name) if isinstance(found, CheckpointError) else (0, found.save_counter, found.saved_at, name)


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
    entries: list[tuple[Key, Path, Manifest | CheckpointError]] = []
    found: Manifest | CheckpointError
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
            found = read_manifest(path)
        except CheckpointError as error:
            found = error
        entries.append((_key(name, found), path, found))
    return entries


def _looks_like_checkpoint(path: Path) -> bool:
    # A checkpoint that has lost its manifest is listed too, so that the caller warns of the damage.
    return any(os.path.lexists(path / name) for name in (MANIFEST, "layout.json", "progress.json"))
