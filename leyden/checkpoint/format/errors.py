"""The errors of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from leyden.core.errors import ConfigurationError, LeydenError, StateError

if TYPE_CHECKING:
    from leyden.checkpoint.format.bucket import BucketPath

# Errors that code raises on unexpected input. LeydenError is a subclass of one of them, but already explains itself.
_MISFITS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, MemoryError)


class CheckpointError(LeydenError):
    """Raised if a checkpoint cannot be written, or must not be read.

    Args:
        path: the file or folder.
        reason: the problem and how to fix it, worded to follow the path.

    Attributes:
        path: the file or folder, as a `Path`; as a `BucketPath` in a bucket.
        reason: the argument of that name.
    """

    def __init__(self, path: str | os.PathLike[str] | BucketPath, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = Path(path) if isinstance(path, (str, os.PathLike)) else path
        self.reason = reason


class NoCheckpointError(CheckpointError):
    """Raised for a folder that never was a checkpoint, as opposed to a damaged checkpoint."""


class OtherRankError(CheckpointError):
    """Raised if another rank failed to do its part of a checkpoint. That rank's own error shows the cause."""

    of_another_rank = True


class UnsupportedStateError(ConfigurationError, TypeError):
    """Raised for state of a type that a checkpoint cannot hold.

    Args:
        where: the key path, such as `callbacks['Queue']['items'][3]`.
        kind: a description of the object at that path.
        hint: what to save instead.

    Attributes:
        where: the argument of that name.
        kind: the argument of that name.
    """

    def __init__(self, where: str, kind: str, hint: str = "Save tensors, numbers, strings or nests of them.") -> None:
        super().__init__(f"{where} is {kind}, which a checkpoint cannot hold without pickle. {hint}")
        self.where = where
        self.kind = kind


@contextmanager
def naming(path: str | os.PathLike[str] | BucketPath) -> Iterator[None]:
    """Adds the file's path to a ConfigurationError in the block, which is about state that does not fit the run."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


@contextmanager
def blame(path: str | os.PathLike[str] | BucketPath, where: str = "") -> Iterator[None]:
    """Turns any error that a file's content causes in the block into a CheckpointError that names file and entry.

    Example:
        >>> with blame("run/user.json", "order"):
        ...     {}["at"]
        Traceback (most recent call last):
        ...
        leyden.checkpoint.format.errors.CheckpointError: run/user.json: order cannot be restored (KeyError: 'at').
    """
    try:
        yield
    except StateError as error:
        # If the owner's keys already start with its name, do not repeat the name.
        key = error.key if not where or error.key.startswith(where) else f"{where}: {error.key}"
        raise CheckpointError(path, f"{key} {error.reason}.") from error
    except LeydenError:
        raise
    except _MISFITS as error:
        reason = f"cannot be restored ({type(error).__name__}: {error})."
        raise CheckpointError(path, f"{where} {reason}" if where else reason) from error
