"""Reads and validates the saved state of a ModelCheckpoint: checkpoint names, scores and counters."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leyden.checkpoint.format import staging
from leyden.checkpoint.format.bucket import BucketPath, place_of
from leyden.core.errors import ConfigurationError, StateError
from leyden.core.saved_state import SavedState, brief


@dataclass(frozen=True, slots=True)
class SavedRanking:
    """The saved state of a ModelCheckpoint, with names resolved to current paths."""

    previous_folder: str | None = None
    """The folder of the earlier checkpoints, if the run now saves in another one."""
    best_model_path: str = ""
    best_model_score: float | None = None
    current_score: float | None = None
    last_model_path: str = ""
    ranked: Mapping[str, float] = field(default_factory=dict)
    """Path → score of the checkpoints kept for their score."""
    recent: tuple[str, ...] = ()
    """The checkpoints kept because they are the newest."""
    to_delete: Mapping[str, str | None] = field(default_factory=dict)
    """Path → identity of the checkpoints to delete."""
    saved_step: int = -1
    saved_batch: int = -1
    seconds_since_save: float | None = None


def read_ranking(state: Mapping[str, Any], folder: str | None) -> SavedRanking:
    """Reads the state that a ModelCheckpoint saved. It is untrusted: its paths must lie inside the run's folder.

    Raises:
        StateError: names an entry that ModelCheckpoint cannot have written.
    """
    saved = SavedState(state)
    saved_folder = None if saved.is_none("dirpath") else saved.text("dirpath")
    paths = _Paths(folder, saved_folder)
    scores = saved.nested("best_k_models", {})
    ranking = SavedRanking(
        best_model_path=paths.best(saved),
        best_model_score=_score(saved, "best_model_score"),
        current_score=_score(saved, "current_score"),
        last_model_path=paths.path(saved, "last_model_path", saved.text("last_model_path", "")),
        ranked={
            paths.path(saved, "best_k_models", name): scores.number(name, least=-math.inf) for name in scores.entries
        },
        recent=tuple(paths.path(saved, "recent", name) for name in saved.items("recent", ())),
        to_delete={
            paths.path(saved, "doomed", name): _identity(name, identity)
            for name, identity in saved.nested("doomed", {}).entries.items()
        },
        saved_step=saved.integer("saved_step", -1, least=-1),
        saved_batch=saved.integer("saved_batch", -1, least=-1),
        seconds_since_save=None if saved.is_none("seconds_since_save") else saved.number("seconds_since_save", least=0),
    )
    if not paths.were_left_behind(saved.text("last_model_path", "")):
        return ranking
    return SavedRanking(
        previous_folder=saved_folder,
        current_score=ranking.current_score,
        saved_step=ranking.saved_step,
        saved_batch=ranking.saved_batch,
        seconds_since_save=ranking.seconds_since_save,
    )


def write_scores(scores: Mapping[str, Tensor], path: str | os.PathLike[str] | None, folder: str | None) -> None:
    """Writes paths and scores as YAML; by default to `best_k_models.yaml` in the checkpoint folder.

    Raises:
        ConfigurationError: if no path is given and the folder is not known yet.
    """
    import yaml

    if path is None and folder is None:
        raise ConfigurationError("ModelCheckpoint.to_yaml() has no default folder before a fit: pass a filepath.")
    target = place_of(os.path.join(folder or "", "best_k_models.yaml") if path is None else path, "filepath")
    text = yaml.safe_dump({name: float(score) for name, score in scores.items()})
    if isinstance(target, BucketPath):
        target.write_bytes(text.encode())
        return
    with staging.replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


class _Paths:
    """Resolves the names in a state, saved when checkpoints went to `saved_folder`, to paths in the current folder."""

    def __init__(self, folder: str | None, saved_folder: str | None) -> None:
        self._folder, self._saved_folder = folder, saved_folder

    def path(self, saved: SavedState, key: str, name: Any) -> str:
        """Returns the path of a name. Earlier versions saved absolute paths, which must lie in the folder."""
        name = self._relative(name) if isinstance(name, str) else None
        if name is None:
            raise StateError(saved.path(key), "names a path outside the checkpoint folder")
        return os.path.join(self._folder, name) if name and self._folder is not None else name

    def best(self, saved: SavedState) -> str:
        """Returns the path of the best checkpoint; "" if an earlier version recorded one in another folder."""
        name = saved.text("best_model_path", "")
        is_outside = os.path.isabs(name) and self._relative(name) is None
        return "" if is_outside else self.path(saved, "best_model_path", name)

    def were_left_behind(self, last: str) -> bool:
        """Returns True if the folder has changed and the earlier checkpoints are still in the previous one."""
        folder, previous, name = self._folder, self._saved_folder, self._relative(last)
        if folder is None or previous in (None, folder) or not name:
            return False
        return not os.path.isdir(os.path.join(folder, name)) and os.path.isdir(os.path.join(previous or "", name))

    def _relative(self, name: str) -> str | None:
        """Returns the name relative to the folder; None if it leads out of the folder."""
        if not name:
            return ""
        if os.path.isabs(name):
            folders = [folder for folder in (self._folder, self._saved_folder) if folder]
            name = next((os.path.relpath(name, folder) for folder in folders if _contains(folder, name)), "..")
        parts = name.replace("\\", "/").split("/")
        if "\0" in name or os.path.splitdrive(name)[0] or any(part in ("", ".", "..") for part in parts):
            return None
        if self._folder is None:
            return name
        # A symlink in the folder may lead out of it.
        parent = os.path.realpath(os.path.dirname(os.path.join(self._folder, name)))
        return name if _contains(os.path.realpath(self._folder), parent) else None


def _contains(folder: str, path: str) -> bool:
    return os.path.normpath(path) == path and (path == folder or path.startswith(os.path.join(folder, "")))


def _identity(name: str, identity: Any) -> str | None:
    if identity is not None and not isinstance(identity, str):
        raise StateError(f"doomed.{name}", f"is {brief(identity)}, and must be a string")
    return identity


def _score(saved: SavedState, key: str) -> float | None:
    return None if saved.is_none(key) else saved.number(key)


def best_of(scores: Mapping[str, Tensor], mode: str) -> str:
    return (min if mode == "min" else max)(scores, key=lambda path: float(scores[path]))


def worst_of(scores: Mapping[str, Tensor], mode: str) -> str:
    """Returns the path with the worst score. Of equal scores the newer is worse, so the older checkpoint is kept."""
    return (max if mode == "min" else min)(list(scores)[::-1], key=lambda path: float(scores[path]))


def number_of(score: Tensor | None) -> float | None:
    """Returns a score in the form that a checkpoint holds."""
    return None if score is None else float(score)


def score_of(number: float | None) -> Tensor | None:
    """Returns a score in the form of the callback's attributes."""
    return None if number is None else tensor_of(number)


def tensor_of(number: float) -> Tensor:
    """Returns a number as a float32 tensor, as most metrics are; as float64 if float32 cannot represent it."""
    wide = torch.tensor(number, dtype=torch.float64)
    narrow = wide.float()
    return narrow if narrow.double() == wide or number != number else wide
