"""Reading a checkpoint. Every byte that is used was compared with its checksum; nothing in it is ever run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leyden.strategies.errors import nearest
from leyden.trainer.checkpoint import staging
from leyden.trainer.checkpoint.codec import Classes, decode
from leyden.trainer.checkpoint.errors import CheckpointError
from leyden.trainer.checkpoint.manifest import EXTRA, LAYOUT, OPTIMIZERS, PROGRESS, Manifest, read_manifest
from leyden.trainer.checkpoint.safefile import CheckedFile, read_tensors
from leyden.trainer.checkpoint.tensors import TensorSource, dtype_named, join, part_names

_MAX_JSON = 2**31


class CheckpointReader:
    """Reads one checkpoint. Nothing is read but the manifest until it is asked for.

    Args:
        path: the folder.

    Raises:
        CheckpointError: from every method, if a file is missing, damaged or not what it should be; names the file.

    Attributes:
        path: the folder.
        manifest: what `manifest.json` says.

    Example:
        >>> import tempfile
        >>> from leyden.trainer.checkpoint.writer import CheckpointWriter
        >>> with CheckpointWriter(f"{tempfile.mkdtemp()}/one") as writer:
        ...     writer.state("user", {"seen": {1, 2}})
        ...     path = writer.commit(progress={"global_step": 3})
        >>> reader = CheckpointReader(path)
        >>> reader.state("user"), reader.progress()
        ({'seen': {1, 2}}, {'global_step': 3})
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not os.path.lexists(self.path):
            # Killed within an overwrite, the old checkpoint stands aside and is put back now.
            staging.sweep(self.path.parent)
        if not self.path.is_dir():
            what = "is a file, and a checkpoint is a folder" if self.path.exists() else "is not there"
            raise CheckpointError(self.path, f"{what}. A file of another trainer is read by load_foreign.")
        self.manifest: Manifest = read_manifest(self.path)

    def verify(self) -> None:
        """Compares every byte of every file with its checksum."""
        # Hashing and reading release the interpreter lock, so threads share the work.
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            for _ in pool.map(self._verify_file, self.manifest.files):
                pass

    def verify_sizes(self) -> None:
        """Checks that every file is there with its size, and reads none."""
        for name in self.manifest.files:
            self._file(name).__exit__()

    def has(self, name: str) -> bool:
        """True if there is a file of that name, or a JSON or state of that name."""
        return name in self.manifest.files or f"{name}.json" in self.manifest.files

    def json(self, name: str) -> Any:
        """Reads what `CheckpointWriter.json` wrote."""
        name = name if name.endswith(".json") else f"{name}.json"
        with self._file(name) as file:
            data = file.read(_MAX_JSON)
            try:
                return json.loads(data, parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                raise CheckpointError(file.path, f"is no JSON ({type(error).__name__}: {error}).") from error

    def state(
        self,
        name: str,
        like: Any = None,
        types: Classes | None = None,
        device: str | torch.device | None = None,
    ) -> Any:
        """Reads what `CheckpointWriter.state` wrote.

        Args:
            name: the same.
            like: the state as it stands now, whose Enum classes, dataclasses and namedtuples are used for those saved.
                Without it they come back as values, SimpleNamespaces and tuples.
            types: further such classes.
            device: where tensors go that were not on the CPU when saved; the CPU if left out.
        """
        with self._blame(f"{name}.json"):
            parsed = self.json(name)
            return self._tree(parsed, f"{name}.json", device, like, types)

    def model(self, names: Iterable[str] | None = None, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """Reads the module's tensors, and the entries from `get_extra_state`, merged from all shards.

        Args:
            names: only these; all if left out.
            device: where to put them.
        """
        parsed = self.json(LAYOUT)
        with self._blame(LAYOUT):
            layout: dict[str, Any] = parsed["tensors"]
            extra = self.state(EXTRA) if parsed["extra"] else {}
            chosen = [*layout, *extra] if names is None else list(names)
            unknown = [name for name in chosen if name not in layout and name not in extra]
            if unknown:
                raise CheckpointError(
                    self.path, f"has no weights {unknown[0]!r}. {nearest(unknown[0], [*layout, *extra])}"
                )
            owners = {name: layout[name].get("alias_of", name) for name in chosen if name in layout}
            stored = self._shards([layout[owner] for owner in owners.values()])
            joined: dict[str, Tensor] = {}
            for owner in owners.values():
                if owner not in joined:
                    spec = layout[owner]
                    parts = {part: self._assemble(spec["parts"][part], stored) for part in part_names(spec)}
                    joined[owner] = join(spec, parts).to(device)
            return {name: joined[owners[name]] if name in owners else extra[name] for name in chosen}

    def optimizers(self, device: str | torch.device | None = None) -> list[dict[str, Any]]:
        """Reads the optimizers' states, for `optimizers.from_named`; an empty list if none were saved."""
        if not self.has(OPTIMIZERS):
            return []
        parsed = self.json(OPTIMIZERS)
        with self._blame(OPTIMIZERS):
            return [self._tree(entry, OPTIMIZERS, device) for entry in parsed["optimizers"]]

    def progress(self) -> dict[str, Any]:
        """What was given to `commit`."""
        progress = self.json(PROGRESS)
        if not isinstance(progress, dict):
            raise CheckpointError(self.path / PROGRESS, "is no JSON object.")
        return progress

    def _tree(
        self,
        parsed: Any,
        name: str,
        device: str | torch.device | None,
        like: Any = None,
        types: Classes | None = None,
    ) -> Any:
        tensors: Mapping[str, Tensor] = {}
        if parsed["tensors"] is not None:
            with self._file(parsed["tensors"]) as file, self._blame(parsed["tensors"]):
                tensors = read_tensors(file)
        return decode(
            parsed["tree"], TensorSource(tensors, device), like=like, types=types, where=str(self.path / name)
        )

    def _shards(self, specs: list[dict[str, Any]]) -> dict[tuple[str, str], Tensor]:
        """Reads the shards of some tensors, each file in one pass."""
        wanted: dict[str, list[str]] = {}
        for spec in specs:
            for part in spec["parts"].values():
                for name, key, _ in part["shards"]:
                    wanted.setdefault(name, []).append(key)
        found: dict[tuple[str, str], Tensor] = {}
        for name, keys in wanted.items():
            with self._file(name) as file, self._blame(name):
                found |= {(name, key): tensor for key, tensor in read_tensors(file, keys).items()}
        return found

    def _assemble(self, part: dict[str, Any], stored: Mapping[tuple[str, str], Tensor]) -> Tensor:
        shape, dtype = tuple(part["shape"]), dtype_named(part["dtype"])
        shards = [(stored[(name, key)], offsets) for name, key, offsets in part["shards"]]
        if len(shards) == 1 and tuple(shards[0][0].shape) == shape:
            return shards[0][0]
        if sum(shard.numel() for shard, _ in shards) != torch.Size(shape).numel():
            raise ValueError(f"the shards of a tensor of shape {shape} do not fill it")
        whole = torch.empty(shape, dtype=dtype)
        for shard, offsets in shards:
            place = whole
            for dim, (start, size) in enumerate(zip(offsets, shard.shape, strict=True)):
                place = place.narrow(dim, start, size)
            place.copy_(shard)
        return whole

    def _verify_file(self, name: str) -> None:
        with self._file(name) as file:
            file.verify()

    def _file(self, name: str) -> CheckedFile:
        entry = self.manifest.files.get(name)
        if entry is None:
            hint = nearest(name, self.manifest.files)
            raise CheckpointError(self.path / name, f"is no part of this checkpoint. {hint}")
        return CheckedFile(self.path, name, entry)

    @contextmanager
    def _blame(self, name: str) -> Iterator[None]:
        """What a forged file can provoke becomes one error that names it."""
        try:
            yield
        except CheckpointError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
            reason = f"does not hold what a checkpoint holds ({type(error).__name__}: {error})."
            raise CheckpointError(self.path / name, reason) from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
