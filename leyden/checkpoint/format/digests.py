"""The file of a run's digests, in JSON lines: the names of the module's tensors, and after each step their digests.

    {"format": 1, "algorithm": "xxh3_64", "tensors": {"layer.weight": "float32 (4, 2)", "layer.bias": "float32 (4,)"}}
    {"step": 0, "digests": ["5d1cf4a1e9d6d0c9", "2d06800538d394c2"]}
    {"step": 1, "digests": ["9a6e2ae6a4a3bd4f", "47b55c2b1f7f8c6e"]}

A line's digests are in the order of the tensors in the last line that lists them. Tensors are listed again if they
change.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leyden.checkpoint.format.manifest import XXH3, digest_of
from leyden.core.errors import LeydenError, StateError
from leyden.core.paths import opener
from leyden.core.saved_state import SavedState

FORMAT = 1
FIRST = "digests.jsonl"
NAMES = re.compile(r"digests(-v[1-9]\d*)?\.jsonl")
"""The names of such files. A run that finds another run's file in its folder takes the next name."""


class DigestsError(LeydenError):
    """Raised if a file of digests is missing or damaged, or cannot be compared with another one."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of a tensor.

    Attributes:
        form: the dtype, the shape and the sharding as a string. Only digests of the same form can be compared.
        value: the digest in hexadecimal.
    """

    form: str
    value: str


@dataclass(frozen=True, slots=True)
class Place:
    """The end of the file at some moment. A checkpoint holds it, and a resume truncates the file to it.

    Attributes:
        file: the file's name; "" before a file exists.
        size: the file's size in bytes.
        sum: the digest of these bytes, by which a resume recognizes its own run's file.
        step: the step of the last line; -1 before the first line.
    """

    file: str = ""
    size: int = 0
    sum: str = ""
    step: int = -1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Place:
        """Returns the place from its `to_dict`.

        Raises:
            StateError: if `to_dict` cannot have returned the state.
        """
        saved = SavedState(state)
        place = cls(
            saved.text("file"), saved.integer("size", least=0), saved.text("sum"), saved.integer("step", least=-1)
        )
        if place.file and not NAMES.fullmatch(place.file):
            raise StateError("file", f"is {place.file!r}, which is not the name of a file of digests")
        return place


class DigestFile:
    """The file of a run's digests, open for appending. `begin` and `resume` open it.

    `forms` are the tensors that the file listed last, and `hasher` has been updated with the file's bytes.
    """

    def __init__(self, path: Path, place: Place, forms: dict[str, str], hasher: Any) -> None:
        self.path = path
        self._step, self._size, self._forms, self._hasher = place.step, place.size, forms, hasher
        self._file = os.fdopen(opener(str(path), os.O_WRONLY | os.O_APPEND), "ab")

    @classmethod
    def begin(cls, folder: Path) -> DigestFile:
        """Creates a file in a folder, under the first free name."""
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
        """Truncates a file to a place and opens it. Returns None if the folder has no such file of the same run."""
        path, header, hasher, remaining = folder / place.file, b"", digest_of(XXH3)(), place.size
        if not place.file or not os.path.lexists(path):
            return None
        with open(path, "r+b", opener=opener) as file:
            while remaining and (line := file.readline(remaining)):
                hasher.update(memoryview(line))
                remaining -= len(line)
                header = line if line.startswith(b'{"format"') else header
            if remaining or hasher.hexdigest() != place.sum:
                return None
            file.truncate(place.size)
        return cls(path, place, json.loads(header)["tensors"] if header else {}, hasher)

    @property
    def place(self) -> Place:
        """The current end of the file."""
        return Place(self.path.name, self._size, self._hasher.hexdigest(), self._step)

    @property
    def step(self) -> int:
        """The step of the last line; -1 before the first line."""
        return self._step

    def append(self, step: int, digests: Mapping[str, Digest]) -> None:
        """Writes a line. It survives the end of this process, and after `flush` also a power failure.

        Raises:
            DigestsError: if the line cannot be written.
        """
        lines = []
        forms = {name: digest.form for name, digest in digests.items()}
        # Compare as lists, because dicts are equal whatever their order.
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
        """Truncates the file after the line of a step, if it has later ones."""
        hasher, size, last_step, forms = digest_of(XXH3)(), 0, -1, {}
        # A header is kept only if a line of digests that is kept follows it.
        header, header_forms = b"", {}
        with self.path.open("rb") as file:
            for line in file:
                entry = json.loads(line)
                if "tensors" in entry:
                    header, header_forms = line, entry["tensors"]
                    continue
                if entry["step"] > step:
                    break
                hasher.update(memoryview(header + line))
                size, last_step, forms = size + len(header) + len(line), entry["step"], header_forms
                header = b""
        self._file.truncate(size)
        self._hasher, self._size, self._step, self._forms = hasher, size, last_step, forms

    def flush(self) -> None:
        """Flushes the file to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Record:
    """A line of a file: the digests after a step, by tensor name."""

    step: int
    digests: Mapping[str, Digest]


def read_digests(path: Path) -> Iterator[Record]:
    """Yields the lines of a file. Ignores an incomplete last line.

    Raises:
        DigestsError: if this is not a file of digests, or it is damaged.
    """
    forms: dict[str, str] | None = None
    previous_step = -1
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = SavedState(json.loads(line))
                if "format" in entry:
                    forms = _forms(entry)
                    continue
                record = _record(entry, forms, previous_step)
            except (ValueError, RecursionError) as error:
                raise DigestsError(f"{path}, line {number}: is not a line of digests ({error}).") from error
            yield record
            previous_step = record.step


def _forms(entry: SavedState) -> dict[str, str]:
    if entry.integer("format") != FORMAT or entry.text("algorithm") != XXH3:
        raise StateError("format", "is not a format that this version of Leyden can read")
    tensors = entry.nested("tensors")
    return {name: tensors.text(name) for name in tensors.entries}


def _record(entry: SavedState, forms: Mapping[str, str] | None, previous_step: int) -> Record:
    step, values = entry.integer("step", least=previous_step + 1), [str(value) for value in entry.items("digests")]
    if forms is None or len(values) != len(forms):
        raise StateError("digests", f"has {len(values)} entries for {len(forms or ())} tensors")
    return Record(step, {name: Digest(form, value) for (name, form), value in zip(forms.items(), values, strict=True)})


__all__ = ["Digest", "DigestFile", "DigestsError", "Place", "Record", "read_digests"]
