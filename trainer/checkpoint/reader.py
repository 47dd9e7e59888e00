"""Reads a checkpoint. Every byte that is used is compared with its checksum, and nothing in it is ever executed."""

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

from leyden.strategies.errors import ConfigurationError, nearest
from leyden.strategies.saved_state import SavedState
from leyden.trainer.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.trainer.format import staging
from leyden.trainer.format.codec import Classes, decode
from leyden.trainer.format.errors import CheckpointError, NoCheckpointError, blame
from leyden.trainer.format.manifest import (
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
from leyden.trainer.format.memory import room
from leyden.trainer.format.safefile import CheckedFile, read_tensors
from leyden.trainer.format.shard_table import Table, Want, check_spec, fill
from leyden.trainer.format.tensors import (
    TRANSLATED,
    Spec,
    TensorSource,
    dtype_named,
    is_sharded,
    join,
    part_names,
)

_MAX_JSON = 2**31
# Tables of many shards have more parts than MAX_PARTS, but then the tensors they describe have many bytes.
_BYTES_OF_A_PART = 256


class CheckpointReader:
    """Reads one checkpoint: the manifest at once, everything else on demand.

    Args:
        path: the folder.

    Raises:
        CheckpointError: from every method, if a file is missing, damaged or invalid; names the file.

    Attributes:
        path: the folder.
        manifest: the contents of `manifest.json`.
        weights_file: the file that lists the weights, for messages.

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
        self.path = staging.standing(Path(path))
        self.weights_file = self.path / LAYOUT
        if not self.path.is_dir():
            what = "is a file, and a checkpoint is a folder" if self.path.exists() else "does not exist"
            raise CheckpointError(self.path, f"{what}. Read files of other trainers with load_foreign.")
        if not any((self.path / name).exists() for name in (MANIFEST, LAYOUT, PROGRESS)):
            raise NoCheckpointError(self.path, _what_else(self.path))
        self.manifest: Manifest = read_manifest(self.path)
        # The chunks of each file that were read and found whole.
        self._verified: dict[str, set[int]] = {name: set() for name in self.manifest.files}
        self._ahead: list[dict[str, Any]] | None = None

    def verify(self, part: int = 0, parts: int = 1, unread: bool = False) -> None:
        """Compares every byte with its checksum, or those of one of `parts` equal parts of all files.

        Args:
            part: which of the parts.
            parts: their number.
            unread: leave out what this reader has read already.
        """
        total, start = sum(entry.size for entry in self.manifest.files.values()), 0
        first, last = total * part // parts, total * (part + 1) // parts
        spans = []
        for name, entry in self.manifest.files.items():
            # The first part includes empty files, since they may be missing.
            if (start < last and start + entry.size > first) or (not entry.size and part == 0):
                spans.append((name, max(0, first - start), min(entry.size, last - start)))
            start += entry.size
        for name, begin, end in spans:
            with self._file(name) as file:
                file.verify(begin, end, unread)

    def verify_sizes(self) -> None:
        """Checks that every file exists with its size, without reading any."""
        for name in self.manifest.files:
            self._file(name).__exit__()

    def has(self, name: str) -> bool:
        """Returns True if there is a file, a JSON file or a state of that name."""
        return name in self.manifest.files or f"{name}.json" in self.manifest.files

    def json(self, name: str) -> Any:
        """Reads what `CheckpointWriter.json` wrote."""
        name = name if name.endswith(".json") else f"{name}.json"
        with self._file(name) as file:
            data = file.read(_MAX_JSON)
            # A list or dict takes fifty times its bytes in memory, so too many of them are refused before they are
            # parsed.
            allowed = MAX_PARTS + sum(entry.size for entry in self.manifest.files.values()) // _BYTES_OF_A_PART
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
        types: Classes | None = None,
        device: str | torch.device | None = None,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Reads what `CheckpointWriter.state` wrote.

        Args:
            name: the name it was written under.
            like: the current state, whose Enum classes, dataclasses and namedtuples are used for the saved ones.
                Without it these are read as values, SimpleNamespaces and tuples.
            types: further such classes.
            device: the device of tensors that were not on the CPU when saved; the CPU by default.
            parameters: by name. Of what was saved in shards under the name of one that is sharded, and has its shape,
                only this rank's part is read, sharded as it is. All else is read whole.
        """
        with self._blame(f"{name}.json"):
            parsed = self.json(name)
            return self._tree(parsed, f"{name}.json", device, like, types, _named_alike(parameters or {}))

    def model(self, names: Iterable[str] | None = None, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """Reads the module's tensors, merged from all shards, and the entries from `get_extra_state`.

        Args:
            names: read only these; all by default.
            device: the device to put them on.
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
            stored = {owner: self._whole(layout[owner]["parts"]) for owner in dict.fromkeys(owners.values())}
            fill(self._file, [want for parts in stored.values() for want in parts.values()])
            joined: dict[str, Tensor] = {}
            for owner, parts in stored.items():
                spec = layout[owner]
                joined[owner] = join(spec, {part: parts[part].target for part in part_names(spec)}).to(device)
            return {name: joined[owners[name]] if name in owners else extra[name] for name in chosen}

    def layout(self) -> dict[str, dict[str, Any]]:
        """Returns the entry in `layout.json` of each of the module's tensors."""
        with self._blame(LAYOUT):
            tensors = SavedState(self.json(LAYOUT)).nested("tensors")
            specs = {name: tensors.nested(name) for name in tensors.entries}
            for spec in specs.values():
                check_spec(spec, specs)
            return {name: dict(spec.entries) for name, spec in specs.items()}

    def read_table(self, table: Table) -> Tensor:
        """Reads the whole tensor of a table, merged from its shards, in its stored form."""
        with self._blame(LAYOUT):
            want = self._whole({"": table})[""]
            fill(self._file, [want])
            return want.target

    def names(self) -> list[str]:
        """Returns the names of the module's tensors, and of the entries from `get_extra_state`."""
        parsed = self.json(LAYOUT)
        with self._blame(LAYOUT):
            return [*parsed["tensors"], *(self.state(EXTRA) if parsed["extra"] else {})]

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Reads the module's tensors into existing tensors, in their dtype; only this rank's part of sharded ones.

        Raises:
            CheckpointError: if a file is found damaged only now, since `verify` was not called or the file has changed
                meanwhile. Part of the tensors then have other values than before, and the error says so.
            ConfigurationError: if a shape differs; nothing has changed.
        """
        from leyden.trainer.checkpoint.shards import copy_part, parts_of

        with self._blame(LAYOUT):
            layout: dict[str, Any] = self.json(LAYOUT)["tensors"]
            specs = {name: layout[layout[name].get("alias_of", name)] for name in targets}
            shapes = {name: tuple(spec["shape"]) for name, spec in specs.items()}
        unlike = [
            f"{name!r} has shape {shapes[name]} in the checkpoint, and {tuple(target.shape)} here"
            for name, target in targets.items()
            if shapes[name] != tuple(target.shape)
        ]
        if unlike:
            more = f"; and {len(unlike) - 8} more" if len(unlike) > 8 else ""
            raise ConfigurationError(
                f"the checkpoint's weights do not fit: {'; '.join(unlike[:8])}{more}. Build the module as it was saved."
            )
        with self._blame(LAYOUT):
            wants: dict[tuple[Any, ...], Want] = {}
            for name, target in targets.items():
                spec = specs[name]
                if list(spec["parts"]) != [""] or dtype_named(spec["dtype"]) in TRANSLATED:
                    copy_part(name, self.model([name])[name], target)
                    continue
                for offsets, part in parts_of(target.detach()):
                    # Tied tensors are filled once.
                    key = (part.data_ptr(), tuple(part.shape), part.stride()) if part.numel() else (name,)
                    wants[key] = Want(spec["parts"][""], offsets, part)
            try:
                fill(self._file, wants.values())
            except CheckpointError as error:
                half = "Part of the weights have been replaced: load others before you go on."
                raise CheckpointError(error.path, f"{error.reason} {half}") from error

    def optimizer_count(self) -> int:
        """Returns the number of optimizers whose states were saved."""
        if not self.has(OPTIMIZERS):
            return 0
        parsed = self.json(OPTIMIZERS)
        with self._blame(OPTIMIZERS):
            return len(parsed["optimizers"])

    def optimizers(
        self, device: str | torch.device | None = None, like: Mapping[str, Tensor] | None = None
    ) -> list[dict[str, Any]]:
        """Reads the optimizers' states, for `optimizers.from_named`; an empty list if none were saved.

        Args:
            device: the device of tensors that were not on the CPU when saved; the CPU by default.
            like: the module's parameters by name. If one is a DTensor or a Fragment, so is the state of its shape, and
                only this rank's part is read.
        """
        if not self.has(OPTIMIZERS):
            return []
        ahead, self._ahead = self._ahead, None
        find = _of_optimizer(like or {})
        if ahead is not None and device is None and find is None:
            return ahead
        del ahead
        parsed = self.json(OPTIMIZERS)
        with self._blame(OPTIMIZERS):
            return [self._tree(entry, OPTIMIZERS, device, find=find) for entry in parsed["optimizers"]]

    def read_ahead(self) -> None:
        """Reads the optimizers' states now, as whole tensors on the CPU, and checks them on the way.

        The next call of `optimizers` returns them, if that is what it is asked for.
        """
        self._ahead = self.optimizers()

    def progress(self) -> dict[str, Any]:
        """Returns the progress that was passed to `commit`."""
        progress = self.json(PROGRESS)
        if not isinstance(progress, dict):
            raise CheckpointError(self.path / PROGRESS, "is not a JSON object.")
        return progress

    def _tree(
        self,
        parsed: Any,
        name: str,
        device: str | torch.device | None,
        like: Any = None,
        types: Classes | None = None,
        find: Sharded | None = None,
    ) -> Any:
        where, found = str(self.path / name), parsed["tensors"]
        tensors: Mapping[str, Tensor] = {}
        if isinstance(found, str):
            with self._file(found) as file, self._blame(found):
                tensors = read_tensors(file)
        elif found is not None:
            sharded = _sharded_keys(parsed["tree"], find, where)
            wants = self._whole({key: table for key, table in found.items() if key not in sharded})
            tensors = {key: want.target for key, want in wants.items()}
            rectangles: dict[str, list[Want]] = {}
            if sharded:
                from leyden.trainer.checkpoint.shards import room_for

                for key, (entry, parameter) in sharded.items():
                    rectangles[key], tensors[key] = room_for(found[key], entry, parameter)
            fill(self._file, [*wants.values(), *(want for part in rectangles.values() for want in part)])
        return decode(parsed["tree"], TensorSource(tensors, device), like=like, types=types, where=where)

    def _whole(self, tables: Mapping[str, Table]) -> dict[str, Want]:
        """Allocates whole tensors, by key, but not more bytes than the files have."""
        sizes = [math.prod(table["shape"]) * dtype_named(table["dtype"]).itemsize for table in tables.values()]
        if sum(sizes) > sum(entry.size for entry in self.manifest.files.values()):
            raise ValueError(f"tensors of {sum(sizes)} bytes are more than its files hold")
        return {
            key: Want(table, (0,) * len(table["shape"]), room(table["shape"], dtype_named(table["dtype"])))
            for key, table in tables.items()
        }

    def _file(self, name: str) -> CheckedFile:
        entry = self.manifest.files.get(name)
        if entry is None:
            hint = nearest(name, self.manifest.files)
            raise CheckpointError(self.path / name, f"is not part of this checkpoint. {hint}")
        return CheckedFile(self.path, name, entry, self._verified[name])

    def _blame(self, name: str) -> AbstractContextManager[None]:
        """Turns any error that a forged file can provoke into a CheckpointError that names the file."""
        return blame(self.path / name)


class _Forms:
    """Stands in for the tensors of a tree: returns their shapes without data, and remembers their keys."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[Tensor, str]] = {}

    def get(self, spec: Spec) -> Tensor:
        tensor = torch.empty(spec["shape"], device="meta")
        # Kept alive, so that its id is not reused.
        self._given[id(tensor)] = (tensor, spec.get("key", ""))
        return tensor

    def key(self, tensor: Tensor) -> str:
        return self._given[id(tensor)][1]


Sharded: TypeAlias = Callable[[Any], Iterable[tuple[str, Tensor, Tensor]]]
"""Finds in a tree what is to be sharded: the name of an entry, its tensor, and the parameter that it is sharded as."""


def _sharded_keys(tree: Any, find: Sharded | None, where: str) -> dict[str, tuple[str, Tensor]]:
    """Returns the keys of the tensors that are to be sharded, each with its entry name and its parameter."""
    if find is None:
        return {}
    forms = _Forms()
    found = find(decode(tree, forms, where=where))
    return {forms.key(tensor): (entry, parameter) for entry, tensor, parameter in found}


def _of_optimizer(parameters: Mapping[str, Tensor]) -> Sharded | None:
    """Finds the state of sharded parameters in an optimizer's, where each is under the name of its parameter."""
    sharded = {name: parameter for name, parameter in parameters.items() if is_sharded(parameter)}

    def find(tree: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, entries in tree["state"].items():
            if name in sharded and isinstance(entries, Mapping):
                for entry, value in entries.items():
                    # torch's "step" is a number, even if its parameter has one element.
                    if isinstance(value, Tensor) and value.shape == sharded[name].shape and entry != "step":
                        yield str(entry), value, sharded[name]

    return find if sharded else None


def _named_alike(parameters: Mapping[str, Tensor]) -> Sharded | None:
    """Finds tensors with the name and the shape of a sharded parameter, in dicts of any depth."""
    sharded = {name: parameter for name, parameter in parameters.items() if is_sharded(parameter)}

    def find(tree: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, value in tree.items() if isinstance(tree, Mapping) else ():
            if isinstance(value, Tensor) and name in sharded and value.shape == sharded[name].shape:
                yield name, value, sharded[name]
            yield from find(value)

    return find if sharded else None


def open_verified(
    path: str | os.PathLike[str], ranks: CheckpointRanks, ahead: Callable[[CheckpointReader], None] | None = None
) -> CheckpointReader:
    """Opens a checkpoint for several ranks, of which each verifies a part; all of them raise, or none.

    Args:
        path: the folder.
        ranks: the ranks that read it.
        ahead: reads what this rank needs into new memory; it is verified as it is read, and not read again. It raises
            only what `CheckpointReader` raises.

    Raises:
        CheckpointError: if one of them finds it missing or damaged.
    """
    readers: list[CheckpointReader] = []

    def look() -> tuple[str, str] | None:
        try:
            readers.append(CheckpointReader(path))
            if ahead is not None:
                ahead(readers[0])
            readers[0].verify(*ranks.share, unread=True)
        except CheckpointError as error:
            return str(error.path), error.reason
        return None

    for problem in ranks.each(look):
        if problem is not None:
            raise CheckpointError(*problem)
    return readers[0]


def _what_else(folder: Path) -> str:
    """Describes a folder that is not a checkpoint, and says what to do."""
    names = os.listdir(folder)
    if not names:
        return "is an empty folder: give a checkpoint."
    if any(name.startswith(("random_states_", "pytorch_model", "optimizer.bin")) for name in names):
        return "was saved by Accelerate: `leyden convert` makes a checkpoint of it."
    return f"is not a checkpoint: it has no {MANIFEST}."


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")
