"""The checkpoint folders of a run, which its ModelCheckpoints determine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from leyden.checkpoint.format import staging
from leyden.checkpoint.format.bucket import BucketPath, Place, place_of

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's folder."""


def checkpoint_callbacks(callbacks: Iterable[Callback]) -> list[ModelCheckpoint]:
    """Returns the ModelCheckpoints among a run's callbacks."""
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint

    return [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]


def folder_of_last(callbacks: Iterable[Callback], root: str) -> Place:
    """Returns the folder that is locked, and that holds checkpoints of preempted runs: the first ModelCheckpoint's."""
    first = next(iter(checkpoint_callbacks(callbacks)), None)
    return _below(root) if first is None else place_of(first.folder_below(root), "dirpath")


def places_of(callbacks: Iterable[Callback], root: str | None) -> list[tuple[Place, int]]:
    """Returns the folders in which "last" is searched for, each with the number of subfolder levels in names.

    Without a root, only the folders that the user named.
    """
    own = checkpoint_callbacks(callbacks)
    if not own:
        return [] if root is None else [(_below(root), 0)]
    depths: dict[str, int] = {}
    for callback in own:
        if root is not None or not callback.uses_run_folder:
            folder = callback.folder_below(root or "")
            depths[folder] = max(depths.get(folder, 0), callback.depth)
    return [(place_of(folder, "dirpath"), depth) for folder, depth in depths.items()]


def copies_of(callbacks: Iterable[Callback]) -> list[tuple[Path, int]]:
    """Returns the folders of local copies on this machine, each with the number of subfolder levels in names."""
    own = checkpoint_callbacks(callbacks)
    return [(callback.copied[1], callback.depth) for callback in own if callback.copied is not None]


def copy_of(path: Place, callbacks: Iterable[Callback]) -> Path | None:
    """Returns where a checkpoint of a bucket is completed before its upload; None if it has no local copy."""
    for folder, copies in _copied(callbacks):
        if isinstance(path, BucketPath) and folder in path.parents:
            return copies / path.relative_to(folder)
    return None


def original_of(path: Place, callbacks: Iterable[Callback]) -> BucketPath | None:
    """Returns the URL of a local copy, also of one that an overwrite moved aside; None for any other checkpoint."""
    for folder, copies in _copied(callbacks):
        if isinstance(path, Path) and path.is_relative_to(copies):
            return folder / staging.final(path).relative_to(copies).as_posix()
    return None


def _copied(callbacks: Iterable[Callback]) -> list[tuple[BucketPath, Path]]:
    return [callback.copied for callback in checkpoint_callbacks(callbacks) if callback.copied is not None]


def copies_are_on_each_node(callbacks: Iterable[Callback]) -> bool:
    """Returns True if every machine keeps its own local copies."""
    return any(callback.copies_on_each_node for callback in checkpoint_callbacks(callbacks))


def _below(root: str) -> Place:
    return place_of(root, "default_root_dir") / CHECKPOINTS


def are_on_each_node(callbacks: Iterable[Callback]) -> bool:
    """Returns True if every machine keeps its own checkpoints, because the machines share no folder."""
    return any(callback.saves_on_each_node for callback in checkpoint_callbacks(callbacks))
