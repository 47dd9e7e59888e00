"""The errors that Leyden raises, and the wording they share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LeydenError(RuntimeError):
    """Base class of every error that Leyden itself raises during a run."""


class ConfigurationError(LeydenError, ValueError):
    """An argument, or a combination of arguments, that cannot work. The message names the fix."""


class StateError(LeydenError, ValueError):
    """Saved state that its owner cannot have written: an entry is missing, of another kind, or out of range.

    Args:
        key: the entry, such as `last_step`, or a path to it.
        reason: what is wrong with it.

    Attributes:
        key: the same.
        reason: the same.

    Example:
        >>> str(StateError("batch", "is -3, and must be at least 0"))
        'batch is -3, and must be at least 0'
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key} {reason}")
        self.key = key
        self.reason = reason


class MissingExtraError(LeydenError, ImportError):
    """An optional package is needed and not installed.

    Args:
        package: the name on the package index.
        extra: the pip extra of Leyden that brings it, or None where there is none.
        purpose: what it was needed for.

    Example:
        >>> str(MissingExtraError("wandb", "wandb", "WandbLogger"))
        "WandbLogger needs the package 'wandb': pip install 'leyden[wandb]'"
    """

    def __init__(self, package: str, extra: str | None, purpose: str) -> None:
        install = f"'leyden[{extra}]'" if extra else package
        super().__init__(f"{purpose} needs the package '{package}': pip install {install}")


OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")
"""What is said by torch's allocators, CUDA itself, its libraries and the system."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for the errors by which torch, a GPU's libraries and the system say that memory is short."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint that ends an error about an unknown name: the nearest known one, and all of them.

    Example:
        >>> nearest("bf61", ["bf16", "fp16"])
        "Did you mean 'bf16'? Known: bf16, fp16."
    """
    names = [str(item) for item in known]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    return f"{hint}Known: {', '.join(names)}."
