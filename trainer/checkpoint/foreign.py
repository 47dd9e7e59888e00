"""Checkpoints of others. Only here, and only if trusted, is a pickle ever opened."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from leyden.trainer.checkpoint.errors import CheckpointError
from leyden.trainer.checkpoint.safefile import CheckedFile, read_tensors


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
    """Loads a file of another trainer by torch's safe loader, which takes tensors and plain containers and runs nothing.

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
            "holds more than weights, and to read that is to run the code it holds. If you trust who wrote it, pass trust=True "
            "(--trust).",
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
