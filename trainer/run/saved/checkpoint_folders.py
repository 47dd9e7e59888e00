"""The folders in which a run keeps its checkpoints: those of its ModelCheckpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint


def checkpoint_callbacks(callbacks: Iterable[Callback]) -> list[ModelCheckpoint]:
    """The ModelCheckpoints among a run's callbacks."""
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint

    return [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]


def folder_of_last(callbacks: Iterable[Callback], root: str) -> Path:
    """Where "last" is looked for: the folder of the first ModelCheckpoint.

    Args:
        callbacks: of the run.
        root: the run's `default_root_dir`.
    """
    own = next((callback.dirpath for callback in checkpoint_callbacks(callbacks)), None)
    return Path(own) if own else Path(root) / "checkpoints"


def are_on_each_node(callbacks: Iterable[Callback]) -> bool:
    """True if every machine keeps checkpoints of its own, since they share no folder."""
    return any(callback.saves_on_each_node for callback in checkpoint_callbacks(callbacks))


def depth_of(callbacks: Iterable[Callback], root: str, folder: str) -> int:
    """How many levels of folders the names of checkpoints make below a folder.

    Args:
        callbacks: of the run.
        root: the run's `default_root_dir`.
        folder: in which they are.
    """
    own = (callback for callback in checkpoint_callbacks(callbacks) if callback.folder_below(root) == folder)
    return max((callback.depth for callback in own), default=0)


def home_of(callbacks: Iterable[Callback], root: str, path: Path) -> tuple[Path, int] | None:
    """The folder whose checkpoints are counted together with a path's, and the levels below it; None if none is.

    Args:
        callbacks: of the run.
        root: the run's `default_root_dir`.
        path: of a checkpoint.
    """
    for callback in checkpoint_callbacks(callbacks):
        folder = callback.folder_below(root)
        if callback.depth and path.parent.is_relative_to(folder):
            return Path(folder), max(depth_of(callbacks, root, folder), len(path.parent.relative_to(folder).parts))
    return None
