"""Loads checkpoints of other trainers. Only this file opens pickles, and only if the caller trusts them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.safefile import CheckedFile, read_tensors
from leyden.core.rank_zero import warn

VERSION = "pytorch-lightning_version"
OPTIMIZERS = "optimizer_states"
"""Entries of a Lightning file. Every file has VERSION; a file from which a run can continue also has OPTIMIZERS."""


def load_foreign(path: str | os.PathLike[str], *, trust: bool = False) -> Any:
    """Loads a file of another trainer: a `.safetensors` file, or with `trust` a pickle (`.ckpt`, `.pt`, `.bin`).

    Args:
        path: the file.
        trust: open a pickle, with torch's safe loader first. If that refuses it, unpickle it in full, which runs any
            code in the file. Trust only files from people you trust.

    Raises:
        CheckpointError: if the file is an untrusted pickle, or cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(path, "is not a file." if path.exists() else "does not exist.")
    if path.suffix == ".safetensors":
        with CheckedFile(path.parent.resolve(), path.name, None) as file:
            try:
                return read_tensors(file)
            except (ValueError, RuntimeError, OverflowError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(path, f"is not a valid safetensors file ({error}).") from error
    if not trust:
        raise CheckpointError(
            path, "is a pickle, which can run any code when loaded. If you trust who wrote it, pass trust=True."
        )
    try:
        return _loaded(path, weights_only=True)
    except pickle.UnpicklingError:
        warn(
            f"{path} holds more than weights, and is unpickled in full because of trust=True. Any code in it runs now.",
        )
    return _loaded(path, weights_only=False)


def load_weights_only(path: str | os.PathLike[str], *, trust: bool = False) -> Any:
    """Loads a file of another trainer that holds only tensors and plain containers, without running any code.

    A pickle is read by torch's safe loader. With `trust`, one that it refuses is unpickled in full, which runs any code
    in the file.

    Raises:
        CheckpointError: if the file holds other objects and is not trusted, or cannot be read.
    """
    path = Path(path)
    if trust or path.suffix == ".safetensors" or not path.is_file():
        return load_foreign(path, trust=trust)
    try:
        return _loaded(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            path,
            "holds more than weights, and reading it in full would run the code in it. If you trust who wrote it, pass "
            "trust=True (--trust).",
        ) from error


def _loaded(path: Path, weights_only: bool) -> Any:
    """Loads a pickle. With `weights_only`, raises UnpicklingError if torch's safe loader refuses it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only)
    except Exception as error:  # a damaged or hostile pickle may raise anything
        if weights_only and isinstance(error, pickle.UnpicklingError):
            raise
        raise CheckpointError(path, f"cannot be read ({type(error).__name__}: {error}).") from error


class ForeignWeights:
    """The weights in a file of another trainer.

    `weights_only` True reads the file only with torch's safe loader, False in full if necessary. By default `trust`
    decides, as for `load_foreign`. `loaded` is the file's content, if the caller has already read it.
    """

    def __init__(self, path: Path, trust: bool, weights_only: bool | None = None, loaded: Any = None) -> None:
        self.path = self.weights_file = path
        self._weights = "state_dict"
        if loaded is not None:
            self._loaded = loaded
            return
        if weights_only:
            # torch's safe loader runs no code, so the file need not be trusted.
            self._loaded = load_weights_only(path)
        else:
            self._loaded = load_foreign(path, trust=trust or weights_only is False)

    def entry(self, name: str) -> Any:
        """Returns an entry alongside the weights, such as Lightning's `hyper_parameters`; None if there is none."""
        return self._loaded.get(name) if isinstance(self._loaded, Mapping) and "state_dict" in self._loaded else None

    @property
    def loaded(self) -> Any:
        """The file's content."""
        return self._loaded

    @property
    def is_lightning(self) -> bool:
        """True for a Lightning file."""
        return self.entry(VERSION) is not None or self.holds_run

    @property
    def holds_run(self) -> bool:
        """True for a Lightning file that also has the states of its optimizers."""
        return isinstance(self.entry(OPTIMIZERS), list)

    def take_weights(self, entry: str) -> None:
        """Makes `model` read the weights from another entry than `state_dict`."""
        self._weights = entry

    def names(self) -> list[str]:
        """Returns the names of the weights."""
        return list(self.model())

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copies weights into existing tensors. Of sharded tensors, copies this rank's part."""
        from leyden.checkpoint.shards import copy_part

        weights = self.model()
        for name, target in targets.items():
            copy_part(name, weights[name], target)

    def model(self, names: Any = None, device: Any = "cpu") -> dict[str, Tensor]:
        """Returns the weights: the file's entry `state_dict`, or without one the file's own dict."""
        weights = self._loaded.get(self._weights, self._loaded) if isinstance(self._loaded, Mapping) else None
        if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
            raise CheckpointError(
                self.path, "holds no dict of tensors, neither at the top level nor under 'state_dict'."
            )
        return dict(weights)
