"""The steps after a ModelCheckpoint's commit: link the newest checkpoint, delete old ones, notify the loggers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.checkpoint.folder import delete, identity, is_taken
from leyden.checkpoint.format import staging
from leyden.checkpoint.format.bucket import BucketPath, Place, place_of
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import read_manifest
from leyden.core.rank_zero import warn

if TYPE_CHECKING:
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.checkpoint.checkpoint_io import CheckpointIO
    from leyden.checkpoint.saves import PendingSave
    from leyden.trainer.trainer import Trainer


class FolderStorage:
    """Identifies and deletes old checkpoints, in folders and in buckets. Methods that fail raise CheckpointError."""

    def identity(self, path: str) -> str | None:
        """Returns a text that tells checkpoints of the same name apart; None if there is no checkpoint."""
        return identity(read_manifest(place_of(path, "path"))) if self.is_taken(path) else None

    def exists(self, path: str) -> bool:
        """Returns True if there is a checkpoint at the path."""
        return is_taken(path)

    def is_taken(self, path: str) -> bool:
        """Returns True if a save to the path would replace something."""
        return is_taken(path)

    def make(self, folder: str) -> None:
        """Creates the folder of checkpoints. In a bucket, checks that it can be listed."""
        place = place_of(folder, "dirpath")
        try:
            if isinstance(place, BucketPath):
                place.is_dir()
            else:
                os.makedirs(place, exist_ok=True)
        except OSError as error:
            raise CheckpointError(place, f"cannot be created ({error.strerror or error}). Change dirpath.") from error

    def delete(self, path: str) -> None:
        delete(path)


class PluginStorage(FolderStorage):
    """Deletes old checkpoints through the plugin that stored them, wherever they are."""

    def __init__(self, plugin: CheckpointIO) -> None:
        self._plugin = plugin

    def identity(self, path: str) -> str | None:
        return ""

    def exists(self, path: str) -> bool:
        return True

    def is_taken(self, path: str) -> bool:
        return os.path.lexists(path)

    def make(self, folder: str) -> None:
        # The plugin stores what is in a bucket, with its own means.
        if isinstance(place_of(folder, "dirpath"), Path):
            super().make(folder)

    def delete(self, path: str) -> None:
        try:
            self._plugin.remove_checkpoint(path)
        except Exception as error:
            raise CheckpointError(path, f"{type(self._plugin).__name__} cannot remove it ({error}).") from error


def storage_of(trainer: Trainer) -> FolderStorage:
    """Returns the storage of a Trainer's checkpoints: its CheckpointIO plugin, or else folders."""
    plugin = trainer.checkpoint_io
    return FolderStorage() if plugin is None else PluginStorage(plugin)


@dataclass
class BackgroundSave:
    """An asynchronous save of a ModelCheckpoint."""

    save: PendingSave
    path: str
    """The path that the save was started with."""
    ranking_before: Mapping[str, Any]
    """The ranking without this checkpoint, restored if the save fails."""
    to_delete: dict[str, str | None]
    """Path → identity of the checkpoints to delete after the commit; later, of those not deleted."""
    link: Path | None
    """The symlink to point to the checkpoint."""
    old_link: Path | None
    """The symlink to the previous checkpoint."""
    is_keeper: bool
    """Whether this rank links and deletes."""
    storage: FolderStorage

    def finish(self, written: Place) -> None:
        """Links the checkpoint and deletes old ones. Called in the writing thread, after the commit."""
        if self.is_keeper:
            self.to_delete = after_commit(str(written), self.link, self.old_link, self.to_delete, self.storage)
        else:
            self.to_delete = {}


def after_commit(
    written: str,
    link: Path | None,
    old_link: Path | None,
    to_delete: Mapping[str, str | None],
    storage: FolderStorage,
) -> dict[str, str | None]:
    """Points the link to the new checkpoint, then deletes old ones, given as path → identity.

    The old link is deleted too, if it has another name.

    Returns:
        The checkpoints that could not be deleted. The next save tries again.
    """
    # A plugin may store the checkpoint elsewhere; then there is nothing to link to.
    if link is not None and os.path.lexists(written):
        _point(link, written)
        if old_link is not None and old_link != link and old_link.is_symlink():
            old_link.unlink()
    return delete_each(to_delete, storage)


def link_to_move(link: Path | None, newest: str) -> Path | None:
    """Returns the link that a resumed run must point to its newest checkpoint; None if it leads to a later one."""
    if link is None:
        return None
    try:
        return None if read_manifest(link).save_counter > read_manifest(place_of(newest, "path")).save_counter else link
    except CheckpointError:
        return link


def follows(path: str, trainer: Trainer) -> bool:
    """Returns True if a checkpoint holds the same step as the one that a run resumes, and was committed after it."""
    try:
        own, other = (read_manifest(place_of(place, "path")) for place in (path, trainer.ckpt_path or ""))
    except CheckpointError:
        return False
    return own.progress == other.progress and own.saved_at > other.saved_at


def notify_loggers(trainer: Trainer, checkpoint: ModelCheckpoint) -> None:
    """Notifies the loggers on rank 0, the only rank that logs, that a checkpoint is committed."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        logger.after_save_checkpoint(checkpoint)


def report_of(checkpoint: ModelCheckpoint, path: str, step: int, is_ranked: bool, verb: str) -> str:
    """Returns the line that `verbose=True` prints for a save."""
    monitor, score, best = checkpoint.monitor, checkpoint.current_score, checkpoint.save_top_k
    if monitor is None or score is None:
        return f"step {step}: {verb} {path}"
    rank = "not among the best" if not is_ranked else f"among the best {best}" if best > 0 else "kept"
    return f"step {step}: {monitor} = {float(score):.5f}, {rank}: {verb} {path}"


def delete_each(to_delete: Mapping[str, str | None], storage: FolderStorage) -> dict[str, str | None]:
    """Deletes checkpoints, and returns those that could not be deleted.

    A checkpoint whose identity has changed is left alone: another run has reused its name. An identity of None could
    not be read when the checkpoint left the ranking of this run, and is read now.
    """
    remaining: dict[str, str | None] = {}
    for path, saved_identity in to_delete.items():
        try:
            found = storage.identity(path)
            if found is not None and saved_identity in (None, found):
                storage.delete(path)
        except CheckpointError as error:
            warn(f"an old checkpoint was not deleted: {error} The next save tries again.")
            remaining[path] = saved_identity
    return remaining


def _point(link: Path, written: str) -> None:
    """Points the symlink to a checkpoint, atomically. An existing file or folder of that name is left alone."""
    if os.path.lexists(link) and not link.is_symlink():
        return
    # If the file system does not support symlinks, ckpt_path="last" still finds the checkpoint itself.
    with contextlib.suppress(OSError), staging.replacing(link) as new:
        os.symlink(os.path.relpath(written, link.parent), new, target_is_directory=True)
