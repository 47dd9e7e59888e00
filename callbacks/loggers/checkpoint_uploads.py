"""Decides which checkpoints a logger with `log_model` uploads, and when."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leyden.callbacks.loggers.plain import json_value
from leyden.checkpoint.folder import identity
from leyden.checkpoint.format.bucket import BucketPath, place_of
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import read_manifest
from leyden.core.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.trainer.trainer import Trainer

SETTINGS = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only")
"""ModelCheckpoint arguments that are recorded with each uploaded checkpoint."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A checkpoint to upload."""

    path: str
    name: str
    """The path relative to the ModelCheckpoint's folder, unique within the run."""
    aliases: list[str]
    """The newest checkpoint has "latest", the best one "best"."""
    metadata: dict[str, Any]
    """Score, file name, and the ModelCheckpoint's settings, as plain values."""


class CheckpointUploads:
    """Tracks which checkpoints a logger has uploaded and which are still pending.

    With `log_model="all"` it uploads each checkpoint as soon as it is saved; with True those kept at the end of a fit,
    or each one as soon as it is saved if the ModelCheckpoint keeps all; with False none. Error messages name the owner,
    the class of the logger.
    """

    def __init__(self, log_model: bool | Literal["all"], owner: str) -> None:
        if log_model not in (True, False, "all"):
            raise ConfigurationError(
                f"{owner}(log_model={log_model!r}): use True (checkpoints kept at the end of a fit), 'all' (every "
                "checkpoint as it is saved) or False."
            )
        self._log_model, self._owner = log_model, owner
        self._deferred: list[ModelCheckpoint] = []
        """Callbacks whose checkpoints are uploaded at the end of the fit."""
        self._uploaded: dict[str, str] = {}
        """Identities of uploaded checkpoints, by path."""
        self._names: dict[str, str] = {}
        """Paths of uploaded checkpoints, by name."""

    def check(self, trainer: Trainer) -> None:
        """Raises ConfigurationError if checkpoints that would be uploaded are saved to a bucket."""
        for checkpoint in trainer.checkpoint_callbacks if self._log_model else ():
            folder = place_of(checkpoint.folder_below(trainer.run_folder or "."), "dirpath")
            if isinstance(folder, BucketPath):
                raise ConfigurationError(
                    f"{self._owner}(log_model={self._log_model!r}) uploads checkpoints from local folders, and "
                    f"{folder} is in a bucket. Leave log_model out: the checkpoints there outlive this machine too."
                )

    def after_save(self, checkpoint: ModelCheckpoint) -> list[Upload]:
        """Returns the checkpoints to upload now that a ModelCheckpoint has saved, oldest first."""
        if self._log_model == "all" or (self._log_model and checkpoint.save_top_k == -1):
            return self._new_uploads(checkpoint)
        if self._log_model and all(other is not checkpoint for other in self._deferred):
            self._deferred.append(checkpoint)
        return []

    def at_end(self, status: str) -> list[Upload]:
        """Returns the checkpoints to upload at the end of a run; none unless the run succeeded."""
        if status != "success":
            return []
        deferred, self._deferred = self._deferred, []
        return [upload for checkpoint in deferred for upload in self._new_uploads(checkpoint)]

    def _new_uploads(self, checkpoint: ModelCheckpoint) -> list[Upload]:
        """Returns the kept checkpoints that are not uploaded yet, oldest first, and counts them as uploaded."""
        kept: dict[str, str] = {}
        for path in checkpoint.kept_checkpoints():
            # The next save tries again.
            with suppress(CheckpointError):
                kept[path] = identity(read_manifest(Path(path)))
        new = {path: found for path, found in kept.items() if self._uploaded.get(path) != found}
        self._uploaded.update(new)
        return [self._upload_of(path, checkpoint) for path in sorted(new, key=_save_counter)]

    def _upload_of(self, path: str, checkpoint: ModelCheckpoint) -> Upload:
        aliases = ["latest"] if path == checkpoint.last_model_path else []
        aliases += ["best"] if path == checkpoint.best_model_path else []
        score = checkpoint.best_k_models.get(path)
        metadata = {
            "score": None if score is None else float(score),
            "original_filename": os.path.basename(path),
            type(checkpoint).__name__: {name: getattr(checkpoint, name) for name in SETTINGS},
        }
        return Upload(path, self._unique_name(path, checkpoint), aliases, json_value(metadata))

    def _unique_name(self, path: str, checkpoint: ModelCheckpoint) -> str:
        """Returns the name of a checkpoint, with a suffix if a checkpoint in another folder has the same name."""
        plain = os.path.relpath(path, checkpoint.dirpath).replace(os.sep, "/")
        name, version = plain, 1
        while self._names.setdefault(name, path) != path:
            name, version = f"{plain}-v{version}", version + 1
        return name


def _save_counter(path: str) -> int:
    """Returns the counter of a checkpoint within its folder, which grows with each save."""
    return read_manifest(Path(path)).save_counter
