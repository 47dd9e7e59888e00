"""Goal: the checkpoint that a run resumes and the parts to restore, from the arguments of fit and of the Trainer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leyden.checkpoint.format.bucket import place_of
from leyden.core.errors import ConfigurationError, nearest
from leyden.trainer.arguments.replay import replay_of
from leyden.trainer.saved.checkpoint_folders import checkpoint_callbacks

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback
    from leyden.trainer.arguments.arguments import Arguments

PARTS = ("weights", "optimizers", "progress", "rng", "callbacks", "loaders")


@dataclass(frozen=True, slots=True)
class Goal:
    """The checkpoint that a run resumes, and the parts to restore.

    Attributes:
        path: a path, "last", "best", "auto", "current", or None to start from scratch.
        parts: the parts to restore.
        trust: True to allow unpickling a file of another trainer.
        same_run: True to treat the checkpoint as this run's own, whatever its record says.
        weights_only: True to read pickle files of other trainers with torch's safe loader only, which needs no trust.
            False to unpickle them in full if necessary, like `trust`.

    Raises:
        ConfigurationError: if `weights_only` is neither True, False nor None.
    """

    path: str | os.PathLike[str] | None = None
    parts: frozenset[str] = frozenset(PARTS)
    trust: bool = False
    same_run: bool = False
    weights_only: bool | None = None

    def __post_init__(self) -> None:
        if self.weights_only not in (None, True, False):
            raise ConfigurationError(f"weights_only={self.weights_only!r}: use True, False or None.")
        if self.path is not None:
            place_of(self.path, "ckpt_path")

    @property
    def continues(self) -> bool:
        """True if the run continues the Trainer's last fit from memory."""
        return self.path == "current"


def wanted_parts(restore: str | Sequence[str]) -> frozenset[str]:
    """Returns the parts that the argument `restore` of fit names.

    Raises:
        ConfigurationError: if a part is unknown; suggests the closest name.
    """
    if restore == "all":
        return frozenset(PARTS)
    if isinstance(restore, str):
        restore = (restore,)
    elif not isinstance(restore, Iterable):
        raise ConfigurationError(f"restore={restore!r}: use 'all', 'weights', or a set of {', '.join(PARTS)}.")
    names = tuple(restore)
    for name in names:
        if name not in PARTS:
            raise ConfigurationError(
                f"restore={restore!r}: there is no part {name!r}. {nearest(name, ('all', *PARTS))}"
            )
    return frozenset(names)


def goal_of_fit(
    arguments: Arguments,
    ckpt_path: str | os.PathLike[str] | None,
    restore: str | Sequence[str],
    trust: bool,
    same_run: bool,
    weights_only: bool | None,
) -> Goal:
    """Returns the goal of a fit, from its own arguments and the Trainer's; see `Trainer.fit`."""
    replay = replay_of(arguments)
    if replay is not None:
        return Goal(replay.checkpoint, frozenset(PARTS))
    ckpt_path = arguments.resume if ckpt_path is None else ckpt_path
    return Goal(ckpt_path, wanted_parts(restore), trust, same_run, weights_only)


def goal_of_weights(ckpt_path: str | os.PathLike[str] | None, weights_only: bool | None, trust: bool) -> Goal:
    """Returns the goal of an evaluation or prediction, which restores weights only."""
    return Goal(ckpt_path, frozenset({"weights"}), trust, weights_only=weights_only)


def with_best_path(callbacks: Iterable[Callback], goal: Goal) -> Goal:
    """Returns the goal with "best" resolved to a path. Must be called before a new fit clears the ranking.

    Raises:
        ConfigurationError: if there is no best checkpoint yet.
    """
    if goal.path != "best":
        return goal
    best = next((callback.best_model_path for callback in checkpoint_callbacks(callbacks)), "")
    if not best:
        raise ConfigurationError(
            "ckpt_path='best', but no ModelCheckpoint of this Trainer has saved a best checkpoint yet: pass a path, or "
            "'last'."
        )
    return dataclasses.replace(goal, path=best)
