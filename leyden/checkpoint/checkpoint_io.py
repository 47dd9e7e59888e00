"""CheckpointIO, a plugin that stores checkpoints in the user's own way, and the dict that it receives."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.checkpoint.format.errors import CheckpointError, blame
from leyden.checkpoint.format.manifest import LAYOUT, MANIFEST, PROGRESS, unsafe

if TYPE_CHECKING:
    from leyden.checkpoint.reader import CheckpointReader

FILES = "files"
"""The dict's entry that holds all files except those of the weights."""
OF_WEIGHTS = ("model", LAYOUT)
"""Prefixes of the names of the weights' files, which the entry `state_dict` replaces."""


class CheckpointIO(ABC):
    """Stores checkpoints in a custom way: a plugin for the Trainer, with the same contract as Lightning's CheckpointIO.

    A checkpoint is a dict of plain containers, numbers, strings and CPU tensors, which `torch.load` can read with
    `weights_only=True`. `state_dict` holds the whole weights, `epoch` and `global_step` the position of the run, and
    `hyper_parameters` the module's hyperparameters, if it has any, and `leyden_version` the version that saved
    it. `files` holds everything else, as the files of a checkpoint folder.
    The plugin may change all entries except `files`.

    Methods are called on rank 0 only. Any object with these methods works, such as a CheckpointIO of Lightning's.

    Example:
        >>> class TorchFiles(CheckpointIO):
        ...     def save_checkpoint(self, checkpoint, path, storage_options=None):
        ...         torch.save(checkpoint, path)
        ...     def load_checkpoint(self, path, map_location=None):
        ...         return torch.load(path, map_location=map_location, weights_only=True)
        ...     def remove_checkpoint(self, path):
        ...         os.remove(path)
        >>> is_checkpoint_io(TorchFiles())
        True
    """

    @abstractmethod
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Stores a checkpoint. Returns once it is stored.

        Args:
            checkpoint: the checkpoint's dict.
            path: the checkpoint's name, as later passed to `remove_checkpoint` and `load_checkpoint`.
            storage_options: the argument of `Trainer.save_checkpoint`.
        """

    @abstractmethod
    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = None) -> dict[str, Any]:
        """Returns the dict that was stored.

        Args:
            path: the checkpoint's name.
            map_location: as for `torch.load`. Leyden always passes None, because the strategy moves the weights.
        """

    @abstractmethod
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint that ModelCheckpoint no longer keeps."""

    def teardown(self) -> None:
        """Called at the end of a run."""


def is_checkpoint_io(plugin: Any) -> bool:
    """Returns True for an object with the methods of a CheckpointIO."""
    methods = ("save_checkpoint", "load_checkpoint", "remove_checkpoint")
    return not isinstance(plugin, type) and all(callable(getattr(plugin, name, None)) for name in methods)


def pack(reader: CheckpointReader) -> dict[str, Any]:
    """Converts a checkpoint folder to the dict that a CheckpointIO stores."""
    progress = reader.progress()
    checkpoint: dict[str, Any] = {name: progress[name] for name in ("epoch", "global_step")}
    checkpoint["leyden_version"] = reader.manifest.versions.get("leyden", "")
    checkpoint["state_dict"] = reader.model()
    if reader.has("hparams"):
        values = reader.state("hparams").get("module", {})
        plain = {name: value for name, value in values.items() if _is_plain(value)}
        checkpoint |= {"hparams_name": "kwargs", "hyper_parameters": plain}
    names = [name for name in reader.manifest.files if not name.startswith(OF_WEIGHTS)]
    files = {name: (reader.folder / name).read_bytes() for name in [*names, MANIFEST]}
    checkpoint[FILES] = {
        name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in files.items() if data
    }
    return checkpoint


def _is_plain(value: Any) -> bool:
    """Returns True if torch's safe loader can read the value. The files hold all hyperparameters, plain or not."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or type(value) in (bool, int, float, str, Tensor)


def is_packed(checkpoint: Any) -> bool:
    """Returns True for a dict from `pack`."""
    return isinstance(checkpoint, Mapping) and isinstance(checkpoint.get(FILES), Mapping) and "state_dict" in checkpoint


def unpack(checkpoint: Mapping[str, Any], name: str, folder: Path) -> Path:
    """Converts a dict from `pack` to a checkpoint in a folder, with the weights that are in the dict now.

    `name` is what messages call the checkpoint.

    Raises:
        CheckpointError: if the dict is damaged; names the entry.
    """
    from leyden.checkpoint.writer import CheckpointWriter

    with blame(name, FILES), CheckpointWriter(folder / "checkpoint") as writer:
        files = {str(key): bytes(_file_bytes(key, data, name).numpy()) for key, data in checkpoint[FILES].items()}
        manifest, progress = json.loads(files.pop(MANIFEST)), json.loads(files.pop(PROGRESS))
        for key, data in files.items():
            path = writer.folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        writer.adopt()
        writer.model(checkpoint["state_dict"])
        facts = {key: manifest[key] for key in ("world_size", "strategy", "data_ranks") if key in manifest}
        return Path(str(writer.commit(progress=progress, **facts)))


def _file_bytes(key: Any, data: Any, name: str) -> Tensor:
    """Returns the bytes of one of the dict's files. Raises CheckpointError if no such file may be written."""
    if unsafe(str(key)) or str(key).startswith(OF_WEIGHTS):
        raise CheckpointError(name, f"{FILES} has {key!r}, which is not a file of a checkpoint.")
    return torch.as_tensor(data, dtype=torch.uint8, device="cpu")
