"""What can go wrong with a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from leyden.strategies.errors import ConfigurationError, LeydenError


class CheckpointError(LeydenError):
    """A checkpoint that cannot be written, or that must not be read.

    Args:
        path: the file or folder it is about.
        reason: one sentence on what is wrong, and what to do.

    Attributes:
        path: the same, as a `Path`.
        reason: the same.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.path = Path(path)
        self.reason = reason


class OtherRankError(CheckpointError):
    """Another rank could not do its part of a checkpoint; that rank's own error is the one that tells."""

    of_another_rank = True


class UnsupportedStateError(ConfigurationError, TypeError):
    """State of a kind that a checkpoint cannot hold.

    Args:
        where: the key path, such as `callbacks['Queue']['items'][3]`.
        kind: what stands there.
        hint: what to do about it.

    Attributes:
        where: the same.
        kind: the same.
    """

    def __init__(self, where: str, kind: str, hint: str = "Save tensors, numbers, strings or nests of them.") -> None:
        super().__init__(f"{where} is {kind}, which a checkpoint cannot hold without pickle. {hint}")
        self.where = where
        self.kind = kind
