"""Reads and checks the state of a ModelCheckpoint: names in its folder, scores and counters."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leyden.strategies.errors import ConfigurationError, StateError
from leyden.strategies.saved_state import SavedState, brief


@dataclass(frozen=True, slots=True)
class Books:
    """The ranking of a ModelCheckpoint, with the current paths of its checkpoints.

    Attributes:
        former: the folder of earlier checkpoints that stay there, if the folder has changed; else None.
        best_model_path: "" if there is none, as for `last_model_path`.
        ranked: path → score of checkpoints that are kept for their score.
        recent: checkpoints that are kept because they are the newest.
        doomed: path → identity of checkpoints that are to be deleted.
    """

    former: str | None = None
    best_model_path: str = ""
    best_model_score: float | None = None
    current_score: float | None = None
    last_model_path: str = ""
    ranked: Mapping[str, float] = field(default_factory=dict)
    recent: tuple[str, ...] = ()
    doomed: Mapping[str, str | None] = field(default_factory=dict)
    saved_step: int = -1
    saved_batch: int = -1
    seconds_since_save: float | None = None


def read_books(state: Mapping[str, Any], here: str | None) -> Books:
    """Reads the state that a ModelCheckpoint saved.

    Args:
        state: from a checkpoint, which anybody may have written: its paths must be names inside the folder.
        here: the folder of the current run.

    Raises:
        StateError: if ModelCheckpoint cannot have written an entry; names it.
    """
    saved = SavedState(state)
    before = None if saved.is_none("dirpath") else saved.text("dirpath")
    folder = _Folder(here, before)
    scores = saved.nested("best_k_models", {})
    books = Books(
        best_model_path=folder.best(saved),
        best_model_score=_score(saved, "best_model_score"),
        current_score=_score(saved, "current_score"),
        last_model_path=folder.path(saved, "last_model_path", saved.text("last_model_path", "")),
        ranked={
            folder.path(saved, "best_k_models", name): scores.number(name, least=-math.inf) for name in scores.entries
        },
        recent=tuple(folder.path(saved, "recent", name) for name in saved.items("recent", ())),
        doomed={
            folder.path(saved, "doomed", name): _identity(name, who)
            for name, who in saved.nested("doomed", {}).entries.items()
        },
        saved_step=saved.integer("saved_step", -1, least=-1),
        saved_batch=saved.integer("saved_batch", -1, least=-1),
        seconds_since_save=None if saved.is_none("seconds_since_save") else saved.number("seconds_since_save", least=0),
    )
    if not folder.was_left(saved.text("last_model_path", "")):
        return books
    return Books(
        former=before,
        current_score=books.current_score,
        saved_step=books.saved_step,
        saved_batch=books.saved_batch,
        seconds_since_save=books.seconds_since_save,
    )


def write_scores(scores: Mapping[str, Tensor], path: str | os.PathLike[str] | None, folder: str | None) -> None:
    """Writes paths and scores as YAML, by default into the folder of the checkpoints.

    Raises:
        ConfigurationError: without a path, if the folder is not known yet.
    """
    import yaml

    if path is None and folder is None:
        raise ConfigurationError("ModelCheckpoint.to_yaml(): there is no folder before a fit: give a filepath.")
    target = Path(folder or "", "best_k_models.yaml") if path is None else Path(path)
    target.write_text(yaml.safe_dump({name: float(score) for name, score in scores.items()}), encoding="utf-8")


class _Folder:
    """Resolves the names in a saved state to paths in a folder."""

    def __init__(self, here: str | None, before: str | None) -> None:
        self._here = here
        self._before = before

    def path(self, saved: SavedState, key: str, name: Any) -> str:
        """Returns the path of a name; older checkpoints have absolute ones, which must be in the folder."""
        name = self._inside(name) if isinstance(name, str) else None
        if name is None:
            raise StateError(saved.path(key), "names a path outside the folder of checkpoints")
        return os.path.join(self._here, name) if name and self._here is not None else name

    def best(self, saved: SavedState) -> str:
        """Returns the path of the best checkpoint; "" if it is in another folder, as earlier versions wrote it."""
        name = saved.text("best_model_path", "")
        outside = os.path.isabs(name) and self._inside(name) is None
        return "" if outside else self.path(saved, "best_model_path", name)

    def was_left(self, last: str) -> bool:
        """Returns True if earlier checkpoints are in another folder, which was not moved here."""
        here, before, name = self._here, self._before, self._inside(last)
        if here is None or before in (None, here) or not name:
            return False
        return not os.path.isdir(os.path.join(here, name)) and os.path.isdir(os.path.join(before or "", name))

    def _inside(self, name: str) -> str | None:
        """Returns the name relative to the folder; None if it leads out of it."""
        if not name:
            return ""
        if os.path.isabs(name):
            homes = [home for home in (self._here, self._before) if home]
            name = next((os.path.relpath(name, home) for home in homes if _holds(home, name)), "..")
        parts = name.replace("\\", "/").split("/")
        if "\0" in name or os.path.splitdrive(name)[0] or any(part in ("", ".", "..") for part in parts):
            return None
        # A link in the folder may lead out of it.
        if self._here is not None and not _holds(
            os.path.realpath(self._here), os.path.realpath(os.path.dirname(os.path.join(self._here, name)))
        ):
            return None
        return name


def _holds(folder: str, path: str) -> bool:
    return os.path.normpath(path) == path and (path == folder or path.startswith(os.path.join(folder, "")))


def _identity(name: str, who: Any) -> str | None:
    if who is not None and not isinstance(who, str):
        raise StateError(f"doomed.{name}", f"is {brief(who)}, and must be a string")
    return who


def _score(saved: SavedState, key: str) -> float | None:
    return None if saved.is_none(key) else saved.number(key)


def number_of(score: Tensor | None) -> float | None:
    """A score as a checkpoint holds it."""
    return None if score is None else float(score)


def score_of(number: float | None) -> Tensor | None:
    """A score as the callback shows it, from what a checkpoint holds."""
    return None if number is None else torch.tensor(number, dtype=torch.float64)
