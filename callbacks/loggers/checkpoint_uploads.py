"""Which checkpoints a logger with `log_model` uploads, and when."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leyden.callbacks.loggers.plain import json_value
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.checkpoint.folder import identity
from leyden.trainer.format.manifest import read_manifest

if TYPE_CHECKING:
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint

SETTINGS = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only")
"""Arguments of a ModelCheckpoint that are uploaded with its checkpoints."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A checkpoint that is to be uploaded.

    Attributes:
        path: of its folder.
        name: its path below the ModelCheckpoint's folder; no other checkpoint of the run has it.
        aliases: "latest" for the newest one, "best" for the best.
        metadata: score, name, and how it was chosen, as plain values.
    """

    path: str
    name: str
    aliases: list[str]
    metadata: dict[str, Any]


class CheckpointUploads:
    """The checkpoints that a logger has uploaded, and those it has still to.

    Args:
        log_model: True for those that are kept at the end of a fit, and for each one at once where a ModelCheckpoint
            keeps all; "all" for each one at once; False for none.
        owner: the logger's class, for errors.

    Raises:
        ConfigurationError: for another `log_model`.
    """

    def __init__(self, log_model: bool | Literal["all"], owner: str) -> None:
        if log_model not in (True, False, "all"):
            raise ConfigurationError(
                f"{owner}(log_model={log_model!r}): use True (the checkpoints kept at the end of a fit), 'all' (each "
                "one when it is saved) or False."
            )
        self._log_model = log_model
        self._waiting: list[ModelCheckpoint] = []
        self._uploaded: dict[str, str] = {}
        """Identities by path."""
        self._names: dict[str, str] = {}
        """Paths by name."""

    def after_save(self, checkpoint: ModelCheckpoint) -> list[Upload]:
        """Returns what is to be uploaded now that a ModelCheckpoint has saved, oldest first."""
        if self._log_model == "all" or (self._log_model and checkpoint.save_top_k == -1):
            return self._new(checkpoint)
        if self._log_model and all(one is not checkpoint for one in self._waiting):
            self._waiting.append(checkpoint)
        return []

    def at_end(self, status: str) -> list[Upload]:
        """Returns what is to be uploaded at the end of a run; nothing unless it succeeded."""
        if status != "success":
            return []
        waiting, self._waiting = self._waiting, []
        return [upload for checkpoint in waiting for upload in self._new(checkpoint)]

    def _new(self, checkpoint: ModelCheckpoint) -> list[Upload]:
        found = {path: identity(path) for path in checkpoint.kept_checkpoints()}
        new = {path: who for path, who in found.items() if who is not None and self._uploaded.get(path) != who}
        self._uploaded.update(new)
        return [self._described(path, checkpoint) for path in sorted(new, key=_counter)]

    def _described(self, path: str, checkpoint: ModelCheckpoint) -> Upload:
        aliases = ["latest"] if path == checkpoint.last_model_path else []
        aliases += ["best"] if path == checkpoint.best_model_path else []
        score = checkpoint.best_k_models.get(path)
        metadata = {
            "score": None if score is None else float(score),
            "original_filename": os.path.basename(path),
            type(checkpoint).__name__: {name: getattr(checkpoint, name) for name in SETTINGS},
        }
        return Upload(path, self._name(path, checkpoint), aliases, json_value(metadata))

    def _name(self, path: str, checkpoint: ModelCheckpoint) -> str:
        """The name of a checkpoint; one of another folder that has it already gets another ending."""
        plain = os.path.relpath(path, checkpoint.dirpath).replace(os.sep, "/")
        name, version = plain, 1
        while self._names.setdefault(name, path) != path:
            name, version = f"{plain}-v{version}", version + 1
        return name


def _counter(path: str) -> int:
    """The number of a checkpoint among those of its folder, which grows with each save."""
    return read_manifest(Path(path)).save_counter
