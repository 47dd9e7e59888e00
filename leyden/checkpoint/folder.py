"""Finds, lists and deletes the checkpoints in a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.format import staging
from leyden.checkpoint.format.bucket import AnyPlace, BucketPath, Place, place_of
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.listing import all_entries, levels, ordered
from leyden.checkpoint.format.manifest import MANIFEST, Manifest
from leyden.core.rank_zero import warn

if TYPE_CHECKING:
    from leyden.checkpoint.reader import CheckpointReader


def newest(
    folder: str | os.PathLike[str] | BucketPath,
    *,
    depth: int = 0,
    strict: bool = False,
    ranks: CheckpointRanks | None = None,
) -> Place | None:
    """Returns the newest checkpoint whose bytes all match their checksums. Skips damaged ones with a warning.

    Args:
        folder: the folder of the checkpoints, or its URL in a bucket.
        depth: the number of levels of folders below it that may also hold checkpoints.
        strict: raise if all checkpoints are damaged, instead of returning None.
        ranks: the ranks that search together. Rank 0 lists the checkpoints, and each rank verifies a part.

    Raises:
        CheckpointError: if `strict` is set and all checkpoints are damaged; names each.

    Example:
        >>> newest("no/such/folder") is None
        True
    """
    reader = newest_reader([(place_of(folder, "folder"), depth)], strict, ranks)
    return None if reader is None else reader.path


def newest_reader(
    places: Sequence[tuple[Place, int]],
    strict: bool,
    ranks: CheckpointRanks | None,
    ahead: Callable[[CheckpointReader], None] | None = None,
    accepts: Callable[[Place], bool] | None = None,
) -> CheckpointReader | None:
    """Returns a reader of the newest checkpoint in several folders, as `newest` finds it in one.

    The folders come with their depths. `ahead` is that of `open_verified`. `accepts`, called on rank 0, returns False
    for checkpoints to leave out.
    """
    from leyden.checkpoint.reader import open_verified

    ranks = CheckpointRanks() if ranks is None else ranks
    damaged: list[CheckpointError] = []
    ranks.keep(lambda: _sweep(places))
    for index, name, reason in ranks.first(lambda: _newest_first(places, accepts)):
        path = places[index][0] / name
        try:
            if reason is not None:
                raise CheckpointError(*reason)
            return open_verified(path, ranks, ahead)
        except CheckpointError as error:
            damaged.append(error)
            if ranks.rank == 0:
                warn(f"skipping a damaged checkpoint: {error}")
    if damaged and strict:
        listed = "; ".join(str(error) for error in damaged)
        raise CheckpointError(
            places[0][0], f"holds only damaged checkpoints. Remove them to start from scratch. {listed}"
        )
    return None


def _newest_first(
    places: Sequence[tuple[Place, int]], accepts: Callable[[Place], bool] | None
) -> list[tuple[int, str, tuple[str, str] | None]]:
    """Lists checkpoints, newest first: the folder's index, the name, and why the manifest of which file is unreadable.

    The entries are plain values, so that rank 0 can send them to the other ranks.
    """
    entries = []
    for index, (folder, depth) in enumerate(places):
        for key, path, found in all_entries(folder, depth):
            if accepts is None or accepts(path):
                reason = (str(found.path), found.reason) if isinstance(found, CheckpointError) else None
                entries.append((key, (index, _relative(path, folder), reason)))
    return [entry for _, entry in sorted(entries, key=lambda entry: entry[0], reverse=True)]


def _relative(path: Place, folder: Place) -> str:
    if isinstance(path, BucketPath):
        assert isinstance(folder, BucketPath)
        return str(path.relative_to(folder))
    return str(path.relative_to(str(folder)))


def all_checkpoints(folder: AnyPlace, depth: int = 0) -> list[AnyPlace]:
    """Returns the checkpoints in a folder that have a readable manifest, oldest first; see `newest` for `depth`."""
    return [path for path, found in ordered(folder, depth) if isinstance(found, Manifest)]


def highest_counter(folder: Place, depth: int = 0) -> int:
    """Returns the highest save counter in a folder and `depth` levels below it, or 0 if there is no checkpoint."""
    return max((found.save_counter for _, found in ordered(folder, depth) if isinstance(found, Manifest)), default=0)


def is_checkpoint(path: str | os.PathLike[str] | BucketPath) -> bool:
    """Returns True for a folder with a manifest, damaged or not."""
    path = place_of(path, "path")
    if isinstance(path, BucketPath):
        return (path / MANIFEST).is_file()
    return not path.is_symlink() and path.is_dir() and os.path.lexists(path / MANIFEST)


def is_taken(path: str | os.PathLike[str] | BucketPath) -> bool:
    """Returns True if a save to this path would replace something. A bucket has no folders, only checkpoints."""
    path = place_of(path, "path")
    return is_checkpoint(path) if isinstance(path, BucketPath) else os.path.lexists(path)


def delete(path: str | os.PathLike[str] | BucketPath) -> None:
    """Deletes a checkpoint.

    Renames it first, or in a bucket deletes its manifest first, so that a kill never leaves a partial checkpoint that
    looks whole.

    Raises:
        CheckpointError: if the folder is not a checkpoint, or cannot be deleted.
    """
    place = place_of(path, "path")
    if not is_checkpoint(place):
        raise CheckpointError(place, "is not a checkpoint, and is not deleted.")
    if isinstance(place, BucketPath):
        _delete_from_bucket(place)
        return
    path = Path(os.path.abspath(place))
    doomed = staging.sibling(path, "del")
    try:
        os.rename(path, doomed)
        staging.fsync_folder(path.parent)
        shutil.rmtree(doomed)
    except OSError as error:
        raise CheckpointError(path, f"cannot be deleted: {error.strerror or error}.") from error


def _delete_from_bucket(path: BucketPath) -> None:
    try:
        path.delete([path / MANIFEST])
        path.delete([file for file, _ in path.below()])
    except OSError as error:
        raise CheckpointError(path, f"cannot be deleted: {error}.") from error


def _sweep(places: Sequence[tuple[Place, int]]) -> None:
    for folder, depth in places:
        for level in levels(folder, depth) if isinstance(folder, Path) else ():
            staging.sweep(level)


def identity(manifest: Manifest) -> str:
    """Returns a string that tells checkpoints of the same name apart."""
    return f"{manifest.save_counter} {manifest.saved_at}"
