"""The checkpoint folders of a run, which its ModelCheckpoints determine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint


def checkpoint_callbacks(callbacks: Iterable[Callback]) -> list[ModelCheckpoint]:
    """Returns the ModelCheckpoints among a run's callbacks."""
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint

    return [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]


def folder_of_last(callbacks: Iterable[Callback], root: str) -> Path:
    """Returns the folder in which "last" is searched for: that of the first ModelCheckpoint.

    Args:
        callbacks: the run's callbacks.
        root: the run's `default_root_dir`.
    """
    own = next((callback.dirpath for callback in checkpoint_callbacks(callbacks)), None)
    return Path(own) if own else Path(root) / "checkpoints"


def are_on_each_node(callbacks: Iterable[Callback]) -> bool:
    """Returns True if every machine keeps its own checkpoints, because the machines share no folder."""
    return any(callback.saves_on_each_node for callback in checkpoint_callbacks(callbacks))


def depth_of(callbacks: Iterable[Callback], root: str, folder: str) -> int:
    """Returns the number of subfolder levels that the names of checkpoints create below a folder.

    Args:
        callbacks: the run's callbacks.
        root: the run's `default_root_dir`.
        folder: the folder of the checkpoints.
    """
    own = (callback for callback in checkpoint_callbacks(callbacks) if callback.folder_below(root) == folder)
    return max((callback.depth for callback in own), default=0)


def home_of(callbacks: Iterable[Callback], root: str, path: Path) -> tuple[Path, int] | None:
    """Returns the ModelCheckpoint folder above a path, and the subfolder levels below it.

    None if no ModelCheckpoint with subfolders saves there.

    Args:
        callbacks: the run's callbacks.
        root: the run's `default_root_dir`.
        path: the path of a checkpoint.
    """
    for callback in checkpoint_callbacks(callbacks):
        folder = callback.folder_below(root)
        if callback.depth and path.parent.is_relative_to(folder):
            return Path(folder), max(depth_of(callbacks, root, folder), len(path.parent.relative_to(folder).parts))
    return None
