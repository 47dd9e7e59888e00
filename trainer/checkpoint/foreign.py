"""Checkpoints of others. Only here, and only if trusted, is a pickle ever opened."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leyden.trainer.format.errors import CheckpointError
from leyden.trainer.format.safefile import CheckedFile, read_tensors


def load_foreign(path: str | os.PathLike[str], *, trust: bool = False) -> Any:
    """Loads a file that Leyden did not write: `.safetensors` always, a pickle (`.ckpt`, `.pt`, `.bin`) if trusted.

    Args:
        path: the file.
        trust: open a pickle: by torch's safe loader, and if that cannot read it, in full. That runs whatever code the
            file holds, so trust only files of people you trust.

    Raises:
        CheckpointError: if it is a pickle and not trusted, or cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(path, "is no file." if path.exists() else "is not there.")
    if path.suffix == ".safetensors":
        with CheckedFile(path.parent.resolve(), path.name, None) as file:
            try:
                return read_tensors(file)
            except (ValueError, RuntimeError, OverflowError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(path, f"is no sound safetensors file ({error}).") from error
    if not trust:
        raise CheckpointError(
            path, "is a pickle, which can run any code when loaded. If you trust who wrote it, pass trust=True."
        )
    return _unpickled(path)


def load_weights_only(path: str | os.PathLike[str], *, trust: bool = False) -> Any:
    """Loads a file of another trainer by torch's safe loader, which takes tensors and plain containers and runs
    nothing.

    Args:
        path: `.safetensors`, or a pickle.
        trust: what the safe loader refuses is unpickled in full, which runs whatever code the file holds.

    Raises:
        CheckpointError: if it holds more and is not trusted, or cannot be read.
    """
    path = Path(path)
    if trust or path.suffix == ".safetensors" or not path.is_file():
        return load_foreign(path, trust=trust)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if not isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(path, f"cannot be read ({type(error).__name__}: {error}).") from error
        raise CheckpointError(
            path,
            "holds more than weights, and to read that is to run the code it holds. If you trust who wrote it, pass "
            "trust=True (--trust).",
        ) from error


def _unpickled(path: Path) -> Any:
    # A damaged or hostile pickle may raise anything at all.
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if not isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(path, f"cannot be read ({type(error).__name__}: {error}).") from error
        warnings.warn(
            f"{path} holds more than weights, and is unpickled in full because of trust=True: its code runs now.",
            stacklevel=3,
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise CheckpointError(path, f"cannot be read ({type(error).__name__}: {error}).") from error


class ForeignWeights:
    """A file of another trainer, of which the weights are taken."""

    def __init__(self, path: Path, trust: bool, weights_only: bool | None = None) -> None:
        self.path = self.weights_file = path
        # By torch's safe loader nothing is run, trusted or not.
        self._loaded = (
            load_weights_only(path) if weights_only else load_foreign(path, trust=trust or weights_only is False)
        )

    def names(self) -> list[str]:
        """The names of the weights."""
        return list(self.model())

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copies weights into tensors where they are; of a DTensor only this rank's part."""
        from leyden.trainer.checkpoint.shards import copy_part

        found = self.model()
        for name, target in targets.items():
            copy_part(name, found[name], target)

    def model(self, names: Any = None, device: Any = "cpu") -> dict[str, Tensor]:
        """The weights: the file's own dict, or its entry `state_dict`."""
        found = self._loaded.get("state_dict", self._loaded) if isinstance(self._loaded, Mapping) else None
        if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
            raise CheckpointError(self.path, "holds no dict of tensors, neither by itself nor under 'state_dict'.")
        return dict(found)
