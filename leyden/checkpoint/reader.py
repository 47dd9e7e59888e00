"""Reads a checkpoint. Every byte that is used is verified against its checksum, and nothing is ever executed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.folder import identity
from leyden.checkpoint.format import staging
from leyden.checkpoint.format.bucket import BucketPath, Place, place_of
from leyden.checkpoint.format.codec import decode
from leyden.checkpoint.format.errors import CheckpointError, NoCheckpointError, blame
from leyden.checkpoint.format.manifest import (
    EXTRA,
    LAYOUT,
    MANIFEST,
    MAX_PARTS,
    OPTIMIZERS,
    PROGRESS,
    Manifest,
    parts_in,
    read_manifest,
)
from leyden.checkpoint.format.safefile import CheckedFile, read_tensors
from leyden.checkpoint.format.shard_table import Table, Want, check_spec, fill
from leyden.checkpoint.format.tensors import (
    TRANSLATED,
    Spec,
    TensorSource,
    dtype_named,
    is_sharded,
    join,
    part_names,
)
from leyden.core.errors import ConfigurationError, nearest
from leyden.core.saved_state import SavedState

_MAX_JSON = 2**31
# JSON may have one part more than MAX_PARTS for every so many bytes of the checkpoint. Tables of many shards need it,
# and the tensors that they describe have many bytes.
_BYTES_PER_PART = 256


class CheckpointReader:
    """Reads one checkpoint: the manifest immediately, everything else on demand.

    Args:
        path: the checkpoint's folder, or its URL in a bucket.

    Raises:
        CheckpointError: from every method, if a file is missing, damaged or invalid; names the file.

    Attributes:
        path: the folder to read. It differs from the argument while an overwrite has moved the checkpoint aside, and
            after `stand_for`.
        manifest: the contents of `manifest.json`.
        weights_file: the path of the file that lists the weights, for messages.

    Example:
        >>> import tempfile
        >>> from leyden.checkpoint.writer import CheckpointWriter
        >>> with CheckpointWriter(f"{tempfile.mkdtemp()}/one") as writer:
        ...     writer.state("user", {"seen": {1, 2}})
        ...     path = writer.commit(progress={"global_step": 3})
        >>> reader = CheckpointReader(path)
        >>> reader.state("user"), reader.progress()
        ({'seen': {1, 2}}, {'global_step': 3})
    """

    def __init__(self, path: str | os.PathLike[str] | BucketPath) -> None:
        place = place_of(path, "path")
        self.path = place if isinstance(place, BucketPath) else staging.standing(place)
        self.weights_file = self.path / LAYOUT
        _check_is_checkpoint(self.path)
        self.manifest: Manifest = read_manifest(self.path)
        save = self.manifest.save_id
        self._files_folder = self.path / save if save else self.path
        # For each file the indices of the chunks that have been verified.
        self._verified: dict[str, set[int]] = {name: set() for name in self.manifest.files}
        self._optimizers_ahead: list[dict[str, Any]] | None = None
        """The result of `read_ahead`, until `optimizers` is called."""

    def stand_for(self, path: Place) -> None:
        """Takes the path of another checkpoint with the same bytes, and goes on reading this one."""
        self.path, self.weights_file = path, path / LAYOUT

    @property
    def folder(self) -> Path:
        """The checkpoint's folder, of a reader that reads a local one."""
        assert isinstance(self.path, Path), f"{self.path} is in a bucket"
        return self.path

    def verify(self, part: int = 0, parts: int = 1, unread: bool = False) -> None:
        """Verifies all files against their checksums, or one of several equal parts of their bytes.

        `unread` skips the chunks that this reader has already read, and so verified.
        """
        total, start = sum(entry.size for entry in self.manifest.files.values()), 0
        first, last = total * part // parts, total * (part + 1) // parts
        spans = []
        for name, entry in self.manifest.files.items():
            # Part 0 also covers empty files, which have no bytes but may be missing.
            if (start < last and start + entry.size > first) or (not entry.size and part == 0):
                spans.append((name, max(0, first - start), min(entry.size, last - start)))
            start += entry.size
        for name, begin, end in spans:
            with self._file(name) as file:
                file.verify(begin, end, unread)

    def verify_sizes(self) -> None:
        """Checks that every file exists and has its recorded size, without reading any file."""
        for name in self.manifest.files:
            self._file(name).__exit__()

    def has(self, name: str) -> bool:
        """Returns True if the checkpoint has a file, a JSON file or a state of this name."""
        return name in self.manifest.files or f"{name}.json" in self.manifest.files

    def json(self, name: str) -> Any:
        """Reads an object that `CheckpointWriter.json` wrote."""
        name = name if name.endswith(".json") else f"{name}.json"
        with self._file(name) as file:
            data = file.read(_MAX_JSON)
            # A parsed list or dict takes fifty times its bytes of JSON, so count them before parsing.
            allowed = MAX_PARTS + sum(entry.size for entry in self.manifest.files.values()) // _BYTES_PER_PART
            if parts_in(data) > allowed:
                raise CheckpointError(file.path, f"has {parts_in(data)} nested parts, more than the {allowed} allowed.")
            try:
                return json.loads(data, parse_constant=_no_constant)
            except (ValueError, RecursionError, MemoryError) as error:
                raise CheckpointError(file.path, f"is not valid JSON ({type(error).__name__}: {error}).") from error

    def state(
        self,
        name: str,
        like: Any = None,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Reads a state that `CheckpointWriter.state` wrote.

        Args:
            name: the name under which the state was written.
            like: the current state. Its Enum classes, dataclasses and namedtuples are used for the saved ones.
                Without it, they are read as plain values, SimpleNamespaces and tuples.
            parameters: the module's parameters by name. If a sharded parameter has the name and shape of a tensor that
                was saved in shards, only this rank's shard of the tensor is read, sharded like the parameter. All other
                tensors are read whole.
        """
        with self._blame(f"{name}.json"):
            return self._decode(self.json(name), f"{name}.json", _named_alike, parameters or {}, like)

    def model(self, names: Iterable[str] | None = None, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """Reads tensors of the module, merged from all shards, and entries from `get_extra_state`; all by default."""
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
            stored = {owner: self._allocate(layout[owner]["parts"]) for owner in dict.fromkeys(owners.values())}
            fill(self._file, [want for parts in stored.values() for want in parts.values()])
            joined: dict[str, Tensor] = {}
            for owner, parts in stored.items():
                spec = layout[owner]
                joined[owner] = join(spec, {part: parts[part].target for part in part_names(spec)}).to(device)
            return {name: joined[owners[name]] if name in owners else extra[name] for name in chosen}

    def layout(self) -> dict[str, dict[str, Any]]:
        """Returns each module tensor's entry in `layout.json`, by name."""
        with self._blame(LAYOUT):
            tensors = SavedState(self.json(LAYOUT)).nested("tensors")
            specs = {name: tensors.nested(name) for name in tensors.entries}
            for spec in specs.values():
                check_spec(spec, specs)
            return {name: dict(spec.entries) for name, spec in specs.items()}

    def read_table(self, table: Table) -> Tensor:
        """Reads the whole tensor that a table describes, merged from its shards, in its stored form."""
        with self._blame(LAYOUT):
            want = self._allocate({"": table})[""]
            fill(self._file, [want])
            return want.target

    def names(self) -> list[str]:
        """Returns the names of the module's tensors and of the entries from `get_extra_state`."""
        parsed = self.json(LAYOUT)
        with self._blame(LAYOUT):
            return [*parsed["tensors"], *(self.state(EXTRA) if parsed["extra"] else {})]

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Reads the module's tensors into existing tensors, in their dtype. Of sharded tensors, reads this rank's part.

        Raises:
            CheckpointError: if a file turns out to be damaged only now, because `verify` was not called or the file has
                changed since. Some of the tensors then have new values already, and the error reports it.
            ConfigurationError: if a shape differs; no tensor has changed.
        """
        from leyden.checkpoint.shards import copy_part, parts_of

        with self._blame(LAYOUT):
            layout: dict[str, Any] = self.json(LAYOUT)["tensors"]
            specs = {name: layout[layout[name].get("alias_of", name)] for name in targets}
            shapes = {name: tuple(spec["shape"]) for name, spec in specs.items()}
        misfits = [
            f"{name!r} has shape {shapes[name]} in the checkpoint, and {tuple(target.shape)} in the module"
            for name, target in targets.items()
            if shapes[name] != tuple(target.shape)
        ]
        if misfits:
            more = f"; and {len(misfits) - 8} more" if len(misfits) > 8 else ""
            raise ConfigurationError(
                f"the checkpoint's weights do not fit: {'; '.join(misfits[:8])}{more}. Build the module as it was "
                "saved."
            )
        with self._blame(LAYOUT):
            wants: dict[tuple[Any, ...], Want] = {}
            for name, target in targets.items():
                spec = specs[name]
                if list(spec["parts"]) != [""] or dtype_named(spec["dtype"]) in TRANSLATED:
                    copy_part(name, self.model([name])[name], target)
                    continue
                for offsets, part in parts_of(target.detach()):
                    # Tied tensors share a key, so they are filled once.
                    key = (part.data_ptr(), tuple(part.shape), part.stride()) if part.numel() else (name,)
                    wants[key] = Want(spec["parts"][""], offsets, part)
            try:
                fill(self._file, wants.values())
            except CheckpointError as error:
                warning = "Part of the weights have been replaced: load another checkpoint before you continue."
                raise CheckpointError(error.path, f"{error.reason} {warning}") from error

    def optimizer_count(self) -> int:
        """Returns the number of optimizers whose states were saved."""
        if not self.has(OPTIMIZERS):
            return 0
        parsed = self.json(OPTIMIZERS)
        with self._blame(OPTIMIZERS):
            return len(parsed["optimizers"])

    def optimizers(self, like: Mapping[str, Tensor] | None = None) -> list[dict[str, Any]]:
        """Reads the optimizers' states, for `optimizers.from_named`; an empty list if none were saved.

        Args:
            like: the module's parameters by name. If a parameter is a DTensor or a Fragment, state of the same shape is
                returned as one too, and only this rank's part of it is read.
        """
        if not self.has(OPTIMIZERS):
            return []
        ahead, self._optimizers_ahead = self._optimizers_ahead, None
        if ahead is not None and not _sharded(like or {}):
            return ahead
        del ahead
        parsed = self.json(OPTIMIZERS)
        with self._blame(OPTIMIZERS):
            return [self._decode(entry, OPTIMIZERS, _of_parameters, like or {}) for entry in parsed["optimizers"]]

    def read_ahead(self) -> None:
        """Reads the optimizers' states early, as whole tensors, which also verifies them.

        The next call of `optimizers` returns them if it asks for whole tensors.
        """
        self._optimizers_ahead = self.optimizers()

    def progress(self) -> dict[str, Any]:
        """Returns the progress that was passed to `commit`."""
        progress = self.json(PROGRESS)
        if not isinstance(progress, dict):
            raise CheckpointError(self.path / PROGRESS, "is not a JSON object.")
        return progress

    def _decode(
        self,
        parsed: Any,
        name: str,
        find: FindSharded,
        parameters: Mapping[str, Tensor],
        like: Any = None,
    ) -> Any:
        """Decodes a tree of state, after reading its tensors.

        Args:
            parsed: the JSON of the tree, and either the file of its tensors, their tables, or None.
            name: the name of the JSON file, for errors.
            find: finds the tensors that belong to sharded parameters, of which only this rank's part is read.
            parameters: the module's parameters by name.
            like: the current state; see `state`.
        """
        where, stored = str(self.path / name), parsed["tensors"]
        tensors: Mapping[str, Tensor] = {}
        if isinstance(stored, str):
            with self._file(stored) as file, self._blame(stored):
                tensors = read_tensors(file)
        elif stored is not None:
            sharded = _sharded_keys(parsed["tree"], find, _sharded(parameters), where)
            whole = self._allocate({key: table for key, table in stored.items() if key not in sharded})
            tensors = {key: want.target for key, want in whole.items()}
            wants = list(whole.values())
            if sharded:
                from leyden.checkpoint.shards import room_for

                for key, (entry, parameter) in sharded.items():
                    own_part, tensors[key] = room_for(stored[key], entry, parameter)
                    wants += own_part
            fill(self._file, wants)
        return decode(parsed["tree"], TensorSource(tensors), like=like, where=where)

    def _allocate(self, tables: Mapping[str, Table]) -> dict[str, Want]:
        """Allocates whole tensors to read into, by key. Refuses to allocate more bytes than the files have."""
        sizes = [math.prod(table["shape"]) * dtype_named(table["dtype"]).itemsize for table in tables.values()]
        if sum(sizes) > sum(entry.size for entry in self.manifest.files.values()):
            raise ValueError(f"its tensors would take {sum(sizes)} bytes, more than the checkpoint's files have")
        return {key: Want.whole(table) for key, table in tables.items()}

    def _file(self, name: str) -> CheckedFile:
        entry = self.manifest.files.get(name)
        if entry is None:
            hint = nearest(name, self.manifest.files)
            raise CheckpointError(self.path / name, f"is not part of this checkpoint. {hint}")
        return CheckedFile(self._files_folder, name, entry, self._verified[name])

    def _blame(self, name: str) -> AbstractContextManager[None]:
        """Turns any error that a forged file can cause into a CheckpointError that names the file."""
        return blame(self.path / name)


class _MetaTensors:
    """A tensor source for `decode` that returns meta tensors, which have shapes but no data, and records their keys."""

    def __init__(self) -> None:
        self._returned: dict[int, tuple[Tensor, str]] = {}

    def get(self, spec: Spec) -> Tensor:
        tensor = torch.empty(spec["shape"], device="meta")
        # The reference keeps the tensor alive, so that its id is not reused.
        self._returned[id(tensor)] = (tensor, spec.get("key", ""))
        return tensor

    def key(self, tensor: Tensor) -> str:
        return self._returned[id(tensor)][1]


FindSharded: TypeAlias = Callable[[Any, Mapping[str, Tensor]], Iterable[tuple[str, Tensor, Tensor]]]
"""A function that finds the tensors in a tree that should be sharded like one of some parameters.

It yields the name of the tensor's entry, the tensor, and the parameter.
"""


def _sharded(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in parameters.items() if is_sharded(parameter)}


def _sharded_keys(
    tree: Any, find: FindSharded, sharded: Mapping[str, Tensor], where: str
) -> dict[str, tuple[str, Tensor]]:
    """Returns the keys of the tensors that should be sharded, each with its entry's name and its parameter."""
    if not sharded:
        return {}
    source = _MetaTensors()
    found = find(decode(tree, source, where=where), sharded)
    return {source.key(tensor): (entry, parameter) for entry, tensor, parameter in found}


def _of_parameters(tree: Any, sharded: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Finds the state of sharded parameters in an optimizer's state, keyed by parameter name."""
    for name, entries in tree["state"].items():
        if name in sharded and isinstance(entries, Mapping):
            for entry, value in entries.items():
                # torch's "step" is a scalar counter, even if the parameter has the same shape.
                if isinstance(value, Tensor) and value.shape == sharded[name].shape and entry != "step":
                    yield str(entry), value, sharded[name]


def _named_alike(tree: Any, sharded: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Finds the tensors with the name and shape of a sharded parameter, in nested dicts."""
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Tensor) and name in sharded and value.shape == sharded[name].shape:
            yield name, value, sharded[name]
        yield from _named_alike(value, sharded)


def open_verified(
    path: str | os.PathLike[str] | BucketPath,
    ranks: CheckpointRanks,
    ahead: Callable[[CheckpointReader], None] | None = None,
) -> CheckpointReader:
    """Opens a checkpoint on several ranks, each of which verifies a part. Either all ranks raise, or none does.

    `ahead` reads what this rank needs into new memory. Reading verifies those chunks, so the verification does not read
    them again. It may raise only the errors of `CheckpointReader`.

    Raises:
        CheckpointError: if a rank finds the checkpoint missing or damaged.
    """
    readers: list[CheckpointReader] = []

    def open_and_verify() -> tuple[tuple[str, str] | None, str]:
        try:
            readers.append(CheckpointReader(path))
            if ahead is not None:
                ahead(readers[0])
            readers[0].verify(*ranks.share_of(readers[0].path), unread=True)
        except CheckpointError as error:
            return (str(error.path), error.reason), ""
        return None, identity(readers[0].manifest)

    saves = set()
    for problem, save in ranks.each(open_and_verify):
        if problem is not None:
            raise CheckpointError(*problem)
        saves.add(save)
    if len(saves) > 1:
        # Each machine has a folder of its own.
        raise CheckpointError(path, "is not of the same save on all machines.")
    return readers[0]


def _check_is_checkpoint(place: Place) -> None:
    """Raises CheckpointError for anything but the folder of a checkpoint, damaged or not."""
    try:
        if any((place / name).is_file() for name in (MANIFEST, LAYOUT, PROGRESS)):
            return
        if place.is_dir():
            raise NoCheckpointError(place, _not_a_checkpoint([path.name for path in place.iterdir()]))
        what = "is a file, but a checkpoint is a folder" if place.exists() else "does not exist"
    except OSError as error:
        raise CheckpointError(place, f"cannot be read: {error}.") from error
    raise CheckpointError(place, f"{what}. Read files of other trainers with load_foreign.")


def _not_a_checkpoint(names: list[str]) -> str:
    """Returns the error's words for a folder that is not a checkpoint: what it is instead, and what to do."""
    if not names:
        return "is an empty folder. Pass the folder of a checkpoint."
    if any(name.startswith(("random_states_", "pytorch_model", "optimizer.bin")) for name in names):
        return "was saved by Accelerate: `leyden convert` turns it into a checkpoint."
    return f"is not a checkpoint: it has no {MANIFEST}."


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")
