"""The file of a run's digests: which tensors its module has, and a digest of each after a step, in lines of JSON.

    {"format": 1, "algorithm": "xxh3_64", "tensors": {"layer.weight": "float32 (4, 2)", "layer.bias": "float32 (4,)"}}
    {"step": 0, "digests": ["5d1cf4a1e9d6d0c9", "2d06800538d394c2"]}
    {"step": 1, "digests": ["9a6e2ae6a4a3bd4f", "47b55c2b1f7f8c6e"]}

The digests of a line belong to the tensors above it, in their order. The tensors are named again where they change.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leyden.strategies.errors import LeydenError, StateError
from leyden.strategies.saved_state import SavedState
from leyden.trainer.format.manifest import XXH3, digest_of

FORMAT = 1
FIRST = "digests.jsonl"
NAMES = re.compile(r"digests(-v[1-9]\d*)?\.jsonl")
"""A run that finds another one's file in its folder takes the next of these names."""
_PIECE = 1024 * 1024


class DigestsError(LeydenError):
    """A file of digests that is missing, damaged, or that cannot be compared with another one."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of a tensor.

    Attributes:
        form: dtype and shape, and how the tensor is cut into shards; digests compare only where these are the same.
        value: in hexadecimal.
    """

    form: str
    value: str


@dataclass(frozen=True, slots=True)
class Place:
    """How far a file has been written. A checkpoint holds it, and a resume cuts the file to it.

    Attributes:
        file: its name; "" before there is one.
        size: bytes.
        sum: the digest of these bytes, by which a resume knows the file of its own run.
        step: of the last line; -1 before the first.
    """

    file: str = ""
    size: int = 0
    sum: str = ""
    step: int = -1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Place:
        """The place that `to_dict` has returned.

        Raises:
            StateError: if it cannot have.
        """
        saved = SavedState(state)
        place = cls(
            saved.text("file"), saved.integer("size", least=0), saved.text("sum"), saved.integer("step", least=-1)
        )
        if place.file and not NAMES.fullmatch(place.file):
            raise StateError("file", f"is {place.file!r}, which is no name of a file of digests")
        return place


class DigestFile:
    """The file of a run, while it is written.

    Args:
        path: of the file, which is there.
        place: how far it is written.
        forms: the tensors that it has named last.
        hasher: has read what is written.
    """

    def __init__(self, path: Path, place: Place, forms: dict[str, str], hasher: Any) -> None:
        self.path = path
        self._step, self._size, self._forms, self._hasher = place.step, place.size, forms, hasher
        self._file = path.open("ab")

    @classmethod
    def begin(cls, folder: Path) -> DigestFile:
        """Makes a file in a folder, under the first name that is free."""
        folder.mkdir(parents=True, exist_ok=True)
        version = 0
        while True:
            path = folder / (FIRST if version == 0 else f"digests-v{version}.jsonl")
            try:
                path.touch(exist_ok=False)
                return cls(path, Place(path.name), {}, digest_of(XXH3)())
            except FileExistsError:
                version += 1

    @classmethod
    def resume(cls, folder: Path, place: Place) -> DigestFile | None:
        """Cuts a file to where it was, and goes on with it; None if it is not in the folder, or is another run's."""
        path, named, hasher, left = folder / place.file, b"", digest_of(XXH3)(), place.size
        if not place.file or not path.is_file():
            return None
        with path.open("rb") as file:
            while left and (line := file.readline(left)):
                hasher.update(memoryview(line))
                left -= len(line)
                named = line if line.startswith(b'{"format"') else named
        if left or hasher.hexdigest() != place.sum:
            return None
        os.truncate(path, place.size)
        return cls(path, place, json.loads(named)["tensors"] if named else {}, hasher)

    @property
    def place(self) -> Place:
        """How far it is written."""
        return Place(self.path.name, self._size, self._hasher.hexdigest(), self._step)

    @property
    def step(self) -> int:
        """The step of the last line; -1 before the first."""
        return self._step

    def append(self, step: int, digests: Mapping[str, Digest]) -> None:
        """Writes a line. It outlives this process, and after `flush` the machine.

        Raises:
            DigestsError: if it cannot be written.
        """
        lines = []
        forms = {name: digest.form for name, digest in digests.items()}
        # dicts of other orders are equal, too.
        if list(forms.items()) != list(self._forms.items()):
            lines.append({"format": FORMAT, "algorithm": XXH3, "tensors": forms})
        lines.append({"step": step, "digests": [digest.value for digest in digests.values()]})
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise DigestsError(f"{self.path}: cannot be written: {error.strerror}.") from error
        self._hasher.update(memoryview(text))
        self._size += len(text)
        self._step, self._forms = step, forms

    def go_back(self, step: int) -> None:
        """Cuts the lines after those of a step."""
        hasher, size, last, forms = digest_of(XXH3)(), 0, -1, {}
        naming, named = b"", {}
        with self.path.open("rb") as file:
            for line in file:
                entry = json.loads(line)
                if "tensors" in entry:
                    naming, named = line, entry["tensors"]
                    continue
                if entry["step"] > step:
                    break
                hasher.update(memoryview(naming + line))
                size, last, forms = size + len(naming) + len(line), entry["step"], named
                naming = b""
        os.truncate(self.path, size)
        self._hasher, self._size, self._step, self._forms = hasher, size, last, forms

    def flush(self) -> None:
        """Brings what is written to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Record:
    """A line of a file: the digests after a step, by the names of the tensors."""

    step: int
    digests: Mapping[str, Digest]


def read_digests(path: Path) -> Iterator[Record]:
    """Reads the lines of a file, one at a time. The rest of a line that was being written is passed over.

    Raises:
        DigestsError: if it is not a file of digests, or is damaged.
    """
    forms: dict[str, str] | None = None
    before = -1
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = SavedState(json.loads(line))
                if "format" in entry:
                    forms = _forms(entry)
                    continue
                record = _record(entry, forms, before)
            except (ValueError, RecursionError) as error:
                raise DigestsError(f"{path}, line {number}: is no line of digests ({error}).") from error
            yield record
            before = record.step


def _forms(entry: SavedState) -> dict[str, str]:
    if entry.integer("format") != FORMAT or entry.text("algorithm") != XXH3:
        raise StateError("format", "is not one that this version of Leyden knows")
    tensors = entry.nested("tensors")
    return {name: tensors.text(name) for name in tensors.entries}


def _record(entry: SavedState, forms: Mapping[str, str] | None, before: int) -> Record:
    step, values = entry.integer("step", least=before + 1), [str(value) for value in entry.items("digests")]
    if forms is None or len(values) != len(forms):
        raise StateError("digests", f"are {len(values)}, and the tensors above are {len(forms or ())}")
    return Record(step, {name: Digest(form, value) for (name, form), value in zip(forms.items(), values, strict=True)})


__all__ = ["Digest", "DigestFile", "DigestsError", "Place", "Record", "read_digests"]
