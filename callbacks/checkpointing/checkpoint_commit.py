"""What ModelCheckpoint does once a checkpoint is committed: the link to the newest one, the end of old ones, and the
news for loggers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.trainer.checkpoint.folder import delete, identity
from leyden.trainer.format import staging
from leyden.trainer.format.errors import CheckpointError

if TYPE_CHECKING:
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.trainer.checkpoint.background import PendingSave
    from leyden.trainer.checkpoint.checkpoint_io import CheckpointIO
    from leyden.trainer.trainer import Trainer


class Folders:
    """Checkpoints that are folders: how the old ones are recognised and deleted."""

    def identity(self, path: str) -> str | None:
        """Returns a text that differs between checkpoints of the same name; None for one that is not deleted."""
        return identity(path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def delete(self, path: str) -> None:
        """Deletes a checkpoint.

        Raises:
            CheckpointError: if it cannot be deleted.
        """
        delete(path)


class Stored(Folders):
    """Checkpoints that a plugin has stored, wherever it may be.

    Args:
        plugin: that removes them, too.
    """

    def __init__(self, plugin: CheckpointIO) -> None:
        self._plugin = plugin

    def identity(self, path: str) -> str | None:
        return ""

    def exists(self, path: str) -> bool:
        return True

    def delete(self, path: str) -> None:
        try:
            self._plugin.remove_checkpoint(path)
        except Exception as error:
            raise CheckpointError(path, f"{type(self._plugin).__name__} cannot remove it ({error}).") from error


def kept_in(trainer: Trainer) -> Folders:
    """What a Trainer's checkpoints are kept in."""
    plugin = trainer.checkpoint_io
    return Folders() if plugin is None else Stored(plugin)


@dataclass
class Following:
    """A checkpoint that a thread writes, and what follows its commit in that thread.

    Attributes:
        save: the Trainer's record of it.
        path: where it was going to be.
        before: the ranking without it, in case it fails.
        doomed: checkpoints to delete after its commit, by path; later those that could not be deleted.
        link: that is to point to it; None for no link.
        is_keeper: this rank deletes and links.
        place: what checkpoints are kept in.
    """

    save: PendingSave
    path: str
    before: Mapping[str, Any]
    doomed: dict[str, str | None]
    link: Path | None
    is_keeper: bool
    place: Folders

    def follow(self, written: Path) -> None:
        """Links and deletes, now that the checkpoint is committed."""
        self.doomed = after_commit(str(written), self.link, self.doomed, self.place) if self.is_keeper else {}


def after_commit(
    written: str, link: Path | None, doomed: Mapping[str, str | None], place: Folders
) -> dict[str, str | None]:
    """Links the new checkpoint, then deletes old ones.

    Args:
        written: the path of the new one.
        link: that is to point to it; None for no link.
        doomed: the old ones by path, each with its identity.
        place: what they are kept in.

    Returns:
        Those that could not be deleted, which the next save tries again.
    """
    # A plugin may keep it elsewhere.
    if link is not None and os.path.lexists(written):
        _point(link, written)
    return delete_each(doomed, place)


def notify_loggers(trainer: Trainer, checkpoint: ModelCheckpoint) -> None:
    """Notifies the loggers that a checkpoint is committed; on the first rank, which writes."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        logger.after_save_checkpoint(checkpoint)


def report_of(checkpoint: ModelCheckpoint, path: str, step: int, ranks: bool, verb: str) -> str:
    """The line that `verbose=True` prints of a checkpoint that is saved."""
    monitor, score, best = checkpoint.monitor, checkpoint.current_score, checkpoint.save_top_k
    if monitor is None or score is None:
        return f"step {step}: {verb} {path}"
    place = "not among the best" if not ranks else f"among the best {best}" if best > 0 else "kept"
    return f"step {step}: {monitor} = {float(score):.5f}, {place}: {verb} {path}"


def delete_each(doomed: Mapping[str, str | None], place: Folders) -> dict[str, str | None]:
    """Deletes checkpoints, unless another run has used the name for another one; returns those that it could not."""
    left: dict[str, str | None] = {}
    for path, who in doomed.items():
        if who is None or place.identity(path) != who:
            continue
        try:
            place.delete(path)
        except CheckpointError as error:
            warnings.warn(f"an old checkpoint was not deleted: {error}", stacklevel=2)
            left[path] = who
    return left


def _point(link: Path, written: str) -> None:
    """Points the link to a checkpoint, atomically; leaves a folder of that name alone."""
    if os.path.lexists(link) and not link.is_symlink():
        return
    new = staging.sibling(link, "tmp")
    try:
        os.symlink(os.path.relpath(written, link.parent), new, target_is_directory=True)
        os.replace(new, link)
    except OSError:
        # The file system has no links: the checkpoint itself is kept, and ckpt_path="last" finds it.
        new.unlink(missing_ok=True)
