"""CheckpointIO, by which a user's own code stores checkpoints; and the dict that it is handed in place of a folder."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.checkpoint.writer import CheckpointWriter
from leyden.trainer.format.errors import CheckpointError, blame
from leyden.trainer.format.manifest import LAYOUT, MANIFEST, PROGRESS, unsafe

FILES = "files"
"""The entry of all files but the weights'."""
OF_WEIGHTS = ("model", LAYOUT)
"""What the names of files begin with that the entry `state_dict` stands for."""


class CheckpointIO(ABC):
    """Stores checkpoints in its own way: a plugin of the Trainer's, with the contract of Lightning's.

    A checkpoint is a dict of plain containers, numbers, strings and tensors on the CPU, which `torch.load` reads with
    `weights_only=True`. `state_dict` holds the whole weights, `epoch` and `global_step` say where the run stood,
    `hyper_parameters` holds the module's, if it has any. `files` holds the rest, as the files of a checkpoint folder:
    other entries may be changed, this one not.

    Methods are called on the first rank alone. Objects with the four methods, such as Lightning's own, are taken, too.

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
        """Stores a checkpoint; returns once it is there.

        Args:
            checkpoint: the dict.
            path: its name, which `remove_checkpoint` and `load_checkpoint` are given, too.
            storage_options: what `Trainer.save_checkpoint` was given.
        """

    @abstractmethod
    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = None) -> dict[str, Any]:
        """Returns a checkpoint as it was stored.

        Args:
            path: its name.
            map_location: as of `torch.load`; always None here, as the strategy moves the weights.
        """

    @abstractmethod
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint that ModelCheckpoint keeps no longer."""

    def teardown(self) -> None:
        """Called when a run ends."""


def is_checkpoint_io(plugin: Any) -> bool:
    """Returns True for an object with the methods of a CheckpointIO."""
    methods = ("save_checkpoint", "load_checkpoint", "remove_checkpoint")
    return not isinstance(plugin, type) and all(callable(getattr(plugin, name, None)) for name in methods)


def pack(reader: CheckpointReader) -> dict[str, Any]:
    """Returns a checkpoint folder as the dict of a CheckpointIO."""
    progress = reader.progress()
    found: dict[str, Any] = {name: progress[name] for name in ("epoch", "global_step")}
    found["leyden_version"] = reader.manifest.versions.get("leyden", "")
    found["state_dict"] = reader.model()
    if reader.has("hparams"):
        values = reader.state("hparams").get("module", {})
        plain = {name: value for name, value in values.items() if _is_plain(value)}
        found |= {"hparams_name": "kwargs", "hyper_parameters": plain}
    names = [name for name in reader.manifest.files if not name.startswith(OF_WEIGHTS)]
    files = {name: (reader.path / name).read_bytes() for name in [*names, MANIFEST]}
    found[FILES] = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in files.items() if data}
    return found


def _is_plain(value: Any) -> bool:
    """Returns True for what torch's safe loader reads. All hyperparameters are in the files, too."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or type(value) in (bool, int, float, str, Tensor)


def is_packed(checkpoint: Any) -> bool:
    """Returns True for what `pack` returned."""
    return isinstance(checkpoint, Mapping) and isinstance(checkpoint.get(FILES), Mapping) and "state_dict" in checkpoint


def unpack(checkpoint: Mapping[str, Any], name: str, folder: Path) -> Path:
    """Makes a checkpoint folder of what `pack` returned, with the weights that the dict has now.

    Args:
        checkpoint: the dict.
        name: of the checkpoint, for messages.
        folder: where to make it.

    Raises:
        CheckpointError: if the dict is damaged; says where.
    """
    with blame(name, FILES), CheckpointWriter(folder / "checkpoint") as writer:
        files = {str(key): bytes(_plain(key, data, name).numpy()) for key, data in checkpoint[FILES].items()}
        manifest, progress = json.loads(files.pop(MANIFEST)), json.loads(files.pop(PROGRESS))
        for key, data in files.items():
            path = writer.folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        writer.adopt()
        writer.model(checkpoint["state_dict"])
        facts = {key: manifest[key] for key in ("world_size", "strategy", "data_ranks") if key in manifest}
        return writer.commit(progress=progress, **facts)


def _plain(key: Any, data: Any, name: str) -> Tensor:
    if unsafe(str(key)) or str(key).startswith(OF_WEIGHTS):
        raise CheckpointError(name, f"{FILES} has {key!r}, which is no file of a checkpoint's.")
    return torch.as_tensor(data, dtype=torch.uint8, device="cpu")
