"""Reads weights from a folder of transformers, or any other folder with `model.safetensors` or its index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from leyden.checkpoint.conversions import converted, is_model
from leyden.checkpoint.format.errors import CheckpointError, blame
from leyden.checkpoint.format.manifest import LAYOUT, MANIFEST, PROGRESS
from leyden.checkpoint.format.safefile import CheckedFile, read_header
from leyden.checkpoint.format.shard_table import Table, Want, fill, whole_table
from leyden.core.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_INDEX = 2**28


class HuggingFaceFolder:
    """The weights in a folder that `save_pretrained` wrote. Each rank reads only its own part of sharded tensors.

    Their tables are read from the folder's files, unless they are given.

    Raises:
        CheckpointError: if a file is missing or invalid; names the file.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> folder = tempfile.mkdtemp()
        >>> save_file({"weight": torch.ones(2)}, f"{folder}/model.safetensors")
        >>> HuggingFaceFolder(folder).model()
        {'weight': tensor([1., 1.])}
    """

    def __init__(self, path: str | Path, tables: Mapping[str, Table] | None = None) -> None:
        self.path = Path(path)
        self.weights_file = self.path / (INDEX if (self.path / INDEX).is_file() else WHOLE)
        self._tables = self._read_tables() if tables is None else tables

    def _read_tables(self) -> dict[str, Table]:
        tables: dict[str, Table] = {}
        for name in self._files():
            with self._open(name) as file:
                for key, (dtype, shape, _) in read_header(file).items():
                    tables[key] = whole_table(dtype, shape, name, key)
        return tables

    @staticmethod
    def is_one(path: Path) -> bool:
        """Returns True for such a folder. Returns False for Leyden's checkpoints, which may have the same files."""
        is_leydens = any((path / name).exists() for name in (MANIFEST, LAYOUT, PROGRESS))
        return not is_leydens and any((path / name).is_file() for name in (WHOLE, INDEX))

    def _files(self) -> list[str]:
        if self.weights_file.name == WHOLE:
            return [WHOLE]
        with blame(self.weights_file), self._open(INDEX) as file:
            return sorted(set(json.loads(file.read(_MAX_INDEX))["weight_map"].values()))

    def _open(self, name: str) -> CheckedFile:
        return CheckedFile(self.path.resolve(), name, None)

    def names(self) -> list[str]:
        """Returns the names of the weights."""
        return list(self._tables)

    def fill(self, targets: Mapping[str, Tensor | DTensor]) -> None:
        """Reads weights into existing tensors, in their dtype. Of sharded tensors, reads this rank's part.

        Raises:
            ConfigurationError: if a shape differs.
        """
        from leyden.checkpoint.shards import parts_of

        for name, target in targets.items():
            shape = tuple(self._tables[name]["shape"])
            if shape != tuple(target.shape):
                raise ConfigurationError(
                    f"the weights of {self.path} do not fit: {name!r} has shape {shape} in the folder, and "
                    f"{tuple(target.shape)} in the model. Build the model with the folder's config.json."
                )
        wants = [
            Want(self._tables[name], offsets, part)
            for name, target in targets.items()
            for offsets, part in parts_of(target.detach())
        ]
        with blame(self.weights_file):
            fill(self._open, wants)

    def model(self, names: Iterable[str] | None = None, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """Reads whole tensors; all by default."""
        chosen = list(self._tables) if names is None else list(names)
        unknown = next((name for name in chosen if name not in self._tables), None)
        if unknown is not None:
            raise CheckpointError(self.path, f"has no weights {unknown!r}. {nearest(unknown, self._tables)}")
        wants = {name: Want.whole(self._tables[name]) for name in chosen}
        with blame(self.weights_file):
            fill(self._open, wants.values())
        return {name: want.target.to(device) for name, want in wants.items()}

    def within(self, module: nn.Module) -> HuggingFaceFolder:
        """Returns the same weights under their names in a module. The folder's model may be a submodule of it.

        Raises:
            ConfigurationError: if the weights fit several submodules equally well.
        """
        wanted = set(module.state_dict())
        candidates: dict[str, dict[str, Table]] = {}
        for name, submodule in module.named_modules():
            own = converted(submodule, self._tables) if is_model(submodule) else self._tables
            candidates[name] = {f"{name}.{key}" if name else key: table for key, table in own.items()}
        counts = {name: len(wanted & tables.keys()) for name, tables in candidates.items()}
        most = max(counts.values())
        if not most:
            return self
        best = [name for name, count in counts.items() if count == most]
        if len(best) > 1:
            raise ConfigurationError(
                f"the weights of {self.path} fit several submodules ({', '.join(best)}). Load them in configure_model, "
                "with from_pretrained."
            )
        return HuggingFaceFolder(self.path, candidates[best[0]])
