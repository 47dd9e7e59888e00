"""Finds, lists and deletes the checkpoints in a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.format import staging
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.listing import all_entries, levels, ordered
from leyden.checkpoint.format.manifest import MANIFEST, Manifest
from leyden.core.rank_zero import warn

if TYPE_CHECKING:
    from leyden.checkpoint.reader import CheckpointReader


def newest(
    folder: str | os.PathLike[str], *, depth: int = 0, strict: bool = False, ranks: CheckpointRanks | None = None
) -> Path | None:
    """Returns the newest checkpoint whose bytes all match their checksums. Skips damaged ones with a warning.

    Args:
        folder: the folder of the checkpoints.
        depth: the number of levels of folders below it that may also hold checkpoints.
        strict: raise if all checkpoints are damaged, instead of returning None.
        ranks: the ranks that search together. Rank 0 lists the checkpoints, and each rank verifies a part.

    Raises:
        CheckpointError: if `strict` is set and all checkpoints are damaged; names each.

    Example:
        >>> newest("no/such/folder") is None
        True
    """
    reader = newest_reader([(Path(folder), depth)], strict, ranks)
    return None if reader is None else reader.folder


def newest_reader(
    places: Sequence[tuple[Path, int]],
    strict: bool,
    ranks: CheckpointRanks | None,
    ahead: Callable[[CheckpointReader], None] | None = None,
    accepts: Callable[[Path], bool] | None = None,
) -> CheckpointReader | None:
    """Returns a reader of the newest checkpoint in several folders, as `newest` finds it in one.

    Args:
        places: the folders, each with its depth, as for `newest`.
        strict: as for `newest`.
        ranks: as for `newest`.
        ahead: as for `open_verified`.
        accepts: returns False for the checkpoints to leave out. Called on rank 0. None accepts all.
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
    places: Sequence[tuple[Path, int]], accepts: Callable[[Path], bool] | None
) -> list[tuple[int, str, tuple[str, str] | None]]:
    """Lists checkpoints, newest first: the folder's index, the name, and why the manifest of which file is unreadable.

    The entries are plain values, so that rank 0 can send them to the other ranks.
    """
    entries = []
    for index, (folder, depth) in enumerate(places):
        for key, path, found in all_entries(folder, depth):
            if accepts is None or accepts(path):
                reason = (str(found.path), found.reason) if isinstance(found, CheckpointError) else None
                entries.append((key, (index, str(path.relative_to(folder)), reason)))
    return [entry for _, entry in sorted(entries, key=lambda entry: entry[0], reverse=True)]


def all_checkpoints(folder: str | os.PathLike[str], depth: int = 0) -> list[Path]:
    """Returns the checkpoints in a folder that have a readable manifest, oldest first; see `newest` for `depth`."""
    return [path for path, found in ordered(Path(folder), depth) if isinstance(found, Manifest)]


def highest_counter(folder: Path, depth: int = 0) -> int:
    """Returns the highest save counter in a folder and `depth` levels below it, or 0 if there is no checkpoint."""
    return max((found.save_counter for _, found in ordered(folder, depth) if isinstance(found, Manifest)), default=0)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Returns True for a folder with a manifest, damaged or not."""
    path = Path(path)
    return not path.is_symlink() and path.is_dir() and os.path.lexists(path / MANIFEST)


def delete(path: str | os.PathLike[str]) -> None:
    """Deletes a checkpoint. Renames it first, so that a kill never leaves a partial checkpoint that looks whole.

    Raises:
        CheckpointError: if the folder is not a checkpoint, or cannot be deleted.
    """
    path = Path(os.path.abspath(path))
    if not is_checkpoint(path):
        raise CheckpointError(path, "is not a checkpoint, and is not deleted.")
    doomed = staging.sibling(path, "del")
    try:
        os.rename(path, doomed)
        staging.fsync_folder(path.parent)
        shutil.rmtree(doomed)
    except OSError as error:
        raise CheckpointError(path, f"cannot be deleted: {error.strerror or error}.") from error


def _sweep(places: Sequence[tuple[Path, int]]) -> None:
    for place in places:
        for level in levels(*place):
            staging.sweep(level)


def identity(manifest: Manifest) -> str:
    """Returns a string that tells checkpoints of the same name apart."""
    return f"{manifest.save_counter} {manifest.saved_at}"
