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
    from leyden.trainer.trainer import Trainer


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
    """

    save: PendingSave
    path: str
    before: Mapping[str, Any]
    doomed: dict[str, str | None]
    link: Path | None
    is_keeper: bool

    def follow(self, written: Path) -> None:
        """Links and deletes, now that the checkpoint is committed."""
        self.doomed = after_commit(str(written), self.link, self.doomed) if self.is_keeper else {}


def after_commit(written: str, link: Path | None, doomed: Mapping[str, str | None]) -> dict[str, str | None]:
    """Links the new checkpoint, then deletes old ones.

    Args:
        written: the path of the new one.
        link: that is to point to it; None for no link.
        doomed: the old ones by path, each with its identity.

    Returns:
        Those that could not be deleted, which the next save tries again.
    """
    if link is not None:
        _point(link, written)
    return delete_each(doomed)


def tell_loggers(trainer: Trainer, checkpoint: ModelCheckpoint) -> None:
    """Tells the loggers of a checkpoint that is committed; on the first rank, which writes."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        logger.after_save_checkpoint(checkpoint)


def delete_each(doomed: Mapping[str, str | None]) -> dict[str, str | None]:
    """Deletes checkpoints, unless another run has used the name for another one; returns those that it could not."""
    left: dict[str, str | None] = {}
    for path, who in doomed.items():
        if who is None or identity(path) != who:
            continue
        try:
            delete(path)
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
