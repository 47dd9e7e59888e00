"""Writes and reads safetensors files in one pass over their bytes, which are hashed on the way.

The format is that of https://github.com/huggingface/safetensors: eight bytes with the length of a JSON header, the
header, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from leyden.trainer.format.errors import CheckpointError
from leyden.trainer.format.manifest import CHUNK, MIN_CHUNK, ChunkHasher, FileEntry, open_inside
from leyden.trainer.format.tensors import NATIVE

if TYPE_CHECKING:
    from typing_extensions import Self

# The limit of the safetensors library itself.
MAX_HEADER = 100_000_000
_BUFFER = 1024 * 1024
_BY_NAME = {name: dtype for dtype, name in NATIVE.items()}


def write_file(path: Path, pieces: Iterable[memoryview | bytes], chunk: int = CHUNK) -> FileEntry:
    """Writes a new file, flushes it to disk and returns its entry for the manifest.

    Raises:
        OSError: if the file exists or cannot be written.
    """
    hasher = ChunkHasher(chunk)
    with open(path, "xb", buffering=_BUFFER // 4) as file:
        for piece in (part for whole in pieces for part in _pieces(memoryview(whole))):
            file.write(piece)
            hasher.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return hasher.entry()


def entry_of(path: Path) -> FileEntry:
    """Returns the manifest's entry of an existing file, which is flushed to disk."""
    hasher = ChunkHasher()
    with path.open("rb+") as file:
        while data := file.read(_BUFFER):
            hasher.update(data)
        os.fsync(file.fileno())
    return hasher.entry()


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), _BUFFER):
        yield view[start : start + _BUFFER]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileEntry:
    """Writes plain dense tensors to one safetensors file, fetching those on an accelerator one at a time.

    Args:
        path: a file that does not exist yet.
        tensors: dense tensors of safetensors' own dtypes, by key.
        metadata: strings for the header.

    Raises:
        OSError: if it cannot be written.
    """
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return write_stream(path, forms, lambda name: tensors[name].detach().to("cpu").contiguous(), metadata)


def write_stream(
    path: Path,
    forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    fetch: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Writes tensors to one safetensors file, with only one of them in memory at a time.

    Args:
        path: a file that does not exist yet.
        forms: dtype and shape of each tensor, by key.
        fetch: returns a tensor of that form, contiguous, on the CPU.
        metadata: strings for the header.

    Raises:
        OSError: if it cannot be written.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in forms.items()}
    # Wide dtypes first, so that every tensor is aligned to its own element size.
    names = sorted(forms, key=lambda name: (-forms[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        dtype, shape = forms[name]
        start, end = end, end + sizes[name]
        header[name] = {"dtype": NATIVE[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise OSError(f"{len(names)} tensors need a header of {len(text)} bytes, and safetensors allows {MAX_HEADER}")

    def pieces() -> Iterable[memoryview | bytes]:
        yield len(text).to_bytes(8, "little") + text
        for name in names:
            fetched = fetch(name)
            yield memory_of(fetched)
            # Freed before the next one is fetched.
            del fetched

    return write_file(path, pieces(), _chunk_of(max(sizes.values(), default=0), end))


def _chunk_of(largest: int, total: int) -> int:
    """Returns the number of bytes per checksum.

    Reading a part of a tensor reads the chunks at its ends in full, so chunks are small compared with large tensors, of
    which ranks read parts; but there are at most 131,072 in a file.
    """
    wanted = max(MIN_CHUNK, largest // 128, total >> 16)
    return int(min(CHUNK, 1 << (wanted.bit_length() - 1)))


def memory_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor without a copy. The tensor must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


class CheckedFile:
    """A file of a checkpoint that is verified as it is read: every chunk that is touched is read in full and checked.

    Args:
        folder: the checkpoint.
        name: the file in it.
        entry: its entry in the manifest; None for a file without a manifest, which is not verified.

    Raises:
        CheckpointError: if it cannot be opened or has another size.
    """

    def __init__(self, folder: Path, name: str, entry: FileEntry | None) -> None:
        self.path = folder / name
        descriptor, self.size = open_inside(folder, name)
        self._file: BinaryIO = os.fdopen(descriptor, "rb", buffering=0)
        self._entry = entry
        self._chunk_size = CHUNK if entry is None else entry.chunk
        if entry is not None and entry.size != self.size:
            self._file.close()
            raise CheckpointError(
                self.path,
                f"has {self.size} bytes instead of {entry.size}. It was cut short or changed: use another one.",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def verify(self, begin: int = 0, end: int | None = None) -> None:
        """Verifies all chunks, or those that begin at byte `begin` or later and before `end`.

        Raises:
            CheckpointError: if a byte differs.
        """
        first = -(-begin // self._chunk_size) * self._chunk_size
        for start in range(first, self.size if end is None else min(end, self.size), self._chunk_size):
            self._chunk(start, [])

    def read(self, limit: int) -> bytes:
        """Returns all bytes of the file, which must not be longer than `limit`."""
        if self.size > limit:
            raise CheckpointError(self.path, f"has {self.size} bytes, more than such a file can have ({limit}).")
        data = bytearray(self.size)
        self.fill([(0, memoryview(data))])
        return bytes(data)

    def head(self, tail_of: int = 8) -> tuple[int, bytes]:
        """Returns length and bytes of a safetensors header; the length is checked before memory is allocated."""
        first = bytearray(min(tail_of, self.size))
        self._file.seek(0)
        self._exactly(memoryview(first))
        length = int.from_bytes(first, "little")
        if self.size < tail_of or length > MAX_HEADER or length > self.size - tail_of:
            raise CheckpointError(
                self.path,
                f"is not a safetensors file: it asks for a header of {length} bytes in a file of {self.size}.",
            )
        data = bytearray(tail_of + length)
        self.fill([(0, memoryview(data))])
        return tail_of + length, bytes(data[tail_of:])

    def fill(self, targets: list[tuple[int, memoryview]]) -> None:
        """Reads into buffers, each with its offset in the file. They must not overlap.

        Raises:
            CheckpointError: if a chunk that they touch differs from the manifest, or ends early.
        """
        ordered = sorted((target for target in targets if len(target[1])), key=lambda target: target[0])
        by_chunk: dict[int, list[tuple[int, memoryview]]] = {}
        for offset, view in ordered:
            while len(view):
                start = offset - offset % self._chunk_size
                piece = view[: start + self._chunk_size - offset]
                by_chunk.setdefault(start, []).append((offset, piece))
                offset, view = offset + len(piece), view[len(piece) :]
        for start, pieces in by_chunk.items():
            self._chunk(start, pieces)

    def _chunk(self, start: int, pieces: list[tuple[int, memoryview]]) -> None:
        """Reads one chunk: pieces into their buffers, and what is between them only for the checksum."""
        digest = hashlib.sha256()
        position, end = start, min(start + self._chunk_size, self.size)
        scratch = memoryview(bytearray(min(_BUFFER, end - start)))
        try:
            self._file.seek(start)
            for offset, view in [*pieces, (end, memoryview(b""))]:
                if self._entry is None:
                    self._file.seek(offset)
                    position = offset
                while position < offset:
                    gap = scratch[: min(len(scratch), offset - position)]
                    self._exactly(gap)
                    digest.update(gap)
                    position += len(gap)
                # In pieces that are still in the CPU cache when they are hashed, which takes half the time of one big
                # read.
                for piece in _pieces(view):
                    self._exactly(piece)
                    digest.update(piece)
                position += len(view)
        except OSError as error:
            raise CheckpointError(self.path, f"cannot be read ({error}).") from error
        if self._entry is not None and digest.hexdigest() != self._entry.sha256[start // self._chunk_size]:
            raise CheckpointError(
                self.path, f"is damaged: the checksum of bytes {start} to {end} does not match. Use another checkpoint."
            )

    def _exactly(self, view: memoryview) -> None:
        while len(view):
            count = self._file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(self.path, "ends before its size: it was cut short. Use another checkpoint.")
            view = view[count:]


def read_tensors(file: CheckedFile) -> dict[str, Tensor]:
    """Reads all tensors of a safetensors file, each into its own memory.

    Raises:
        CheckpointError: if the file is damaged, or is not a safetensors file.
    """
    found: dict[str, Tensor] = {}
    targets = []
    for key, (dtype, shape, offset) in read_header(file).items():
        found[key] = torch.empty(shape, dtype=dtype)
        targets.append((offset, memory_of(found[key])))
    file.fill(targets)
    return found


def read_header(file: CheckedFile) -> dict[str, tuple[torch.dtype, tuple[int, ...], int]]:
    """Returns dtype, shape and offset of each tensor, after a check that they fill the file without gap or overlap.

    Raises:
        CheckpointError: if the header breaks a rule of the format.
    """
    begin, parsed = _parsed(file)
    found: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {}
    spans = []
    try:
        for name, entry in parsed.items():
            if name == "__metadata__":
                continue
            dtype, shape = _BY_NAME[entry["dtype"]], tuple(entry["shape"])
            start, end = entry["data_offsets"]
            if not all(type(number) is int and 0 <= number < 2**62 for number in (*shape, start, end)):
                raise ValueError(f"the tensor {name!r} has shape {shape} and offsets {start}, {end}")
            if end - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"the tensor {name!r} of {dtype} {shape} is given {end - start} bytes")
            found[name] = (dtype, shape, begin + start)
            spans.append((start, end))
        position = 0
        for start, end in sorted(spans):
            if start != position:
                raise ValueError(f"there is a gap or an overlap at byte {start}")
            position = end
        if begin + position != file.size:
            raise ValueError(f"its tensors end at byte {begin + position} of {file.size}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            file.path, f"is not a valid safetensors file ({type(error).__name__}: {error})."
        ) from error
    return found


def _parsed(file: CheckedFile) -> tuple[int, dict[str, Any]]:
    begin, text = file.head()
    try:
        parsed = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            file.path, f"is not a safetensors file: its header is not valid JSON ({error})."
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(file.path, "is not a safetensors file: its header is not a JSON object.")
    return begin, parsed


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it names a tensor twice")
    return found
