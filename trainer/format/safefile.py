"""Writes and reads safetensors files in one pass over their bytes, which are hashed on the way.

The format is that of https://github.com/huggingface/safetensors: eight bytes with the length of a JSON header, the
header, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from leyden.trainer.format.errors import CheckpointError
from leyden.trainer.format.manifest import CHUNK, MIN_CHUNK, SHA256, XXH3, ChunkHasher, FileEntry, open_inside
from leyden.trainer.format.memory import room
from leyden.trainer.format.tensors import NATIVE
from leyden.trainer.format.unflushed import Unflushed

if TYPE_CHECKING:
    from typing_extensions import Self

# The limit of the safetensors library itself.
MAX_HEADER = 100_000_000
# What is read or written at once: it stays in a CPU's cache between the copy and the checksum.
_PIECE = 512 * 1024
# Bytes after which the system starts writing to the disk.
_AHEAD = 8 * 1024 * 1024
# The most bytes of a tensor that are copied at a time, where it cannot be written as it is.
_COPIED = 16 * 1024 * 1024
# A thread's share of a read, a multiple of any chunk; the fewest bytes that are worth threads; their number.
_STRETCH = CHUNK // 4
_IN_THREADS = 2 * 1024 * 1024
_THREADS = 4
# The system's limit for one call, which is 1024 on Linux and macOS.
_VIEWS = 512
_BY_NAME = {name: dtype for dtype, name in NATIVE.items()}


def write_file(
    path: Path,
    pieces: Iterable[memoryview | bytes],
    chunk: int = CHUNK,
    algorithm: str = SHA256,
    unflushed: Unflushed | None = None,
) -> FileEntry:
    """Writes a new file and returns its entry for the manifest.

    Args:
        path: of a file that does not exist yet.
        pieces: its bytes.
        chunk: the number of bytes per checksum.
        algorithm: of the checksums.
        unflushed: takes over the file, and flushes it later; None to flush it to disk now.

    Raises:
        OSError: if the file exists or cannot be written.
    """
    hasher = ChunkHasher(chunk, algorithm)
    file: BinaryIO = open(path, "xb", buffering=_PIECE // 2)  # noqa: SIM115
    try:
        begun = written = 0
        for piece in (part for whole in pieces for part in _pieces(memoryview(whole))):
            # Hashed first, which leaves it in the CPU's cache for the copy.
            hasher.update(piece)
            file.write(piece)
            written += len(piece)
            if written - begun >= _AHEAD:
                _start_writing(file, begun, written)
                begun = written
        file.flush()
        if unflushed is not None:
            unflushed.add(path.name, file)
            return hasher.entry()
        os.fsync(file.fileno())
    except BaseException:
        file.close()
        raise
    file.close()
    return hasher.entry()


def _start_writing(file: BinaryIO, begin: int, end: int) -> None:
    """Has the system start to write bytes to the disk, so that it works while the rest is still being copied."""
    if hasattr(os, "posix_fadvise"):
        # Linux starts to write what is dirty, and keeps it in memory as it is not clean yet.
        os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)


def entry_of(path: Path) -> FileEntry:
    """Returns the manifest's entry of an existing file, which is flushed to disk."""
    hasher = ChunkHasher(CHUNK, XXH3)
    with path.open("rb+") as file:
        while data := file.read(_PIECE):
            hasher.update(data)
        os.fsync(file.fileno())
    return hasher.entry()


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), _PIECE):
        yield view[start : start + _PIECE]


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    unflushed: Unflushed | None = None,
) -> FileEntry:
    """Writes plain dense tensors to one safetensors file. Contiguous ones on the CPU are not copied.

    Args:
        path: a file that does not exist yet.
        tensors: dense tensors of safetensors' own dtypes, by key.
        metadata: strings for the header.
        unflushed: takes over the file, and flushes it later; None to flush it to disk now.

    Raises:
        OSError: if it cannot be written.
    """
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return write_stream(path, forms, lambda name: tensors[name].detach(), metadata, unflushed)


def write_stream(
    path: Path,
    forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    fetch: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
    unflushed: Unflushed | None = None,
) -> FileEntry:
    """Writes tensors to one safetensors file, with only one of them in memory at a time.

    Args:
        path: a file that does not exist yet.
        forms: dtype and shape of each tensor, by key.
        fetch: returns a tensor of that form.
        metadata: strings for the header.
        unflushed: takes over the file, and flushes it later; None to flush it to disk now.

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
            yield from _bytes_of(fetched)
            # Freed before the next one is fetched.
            del fetched

    return write_file(path, pieces(), _chunk_of(max(sizes.values(), default=0), end), XXH3, unflushed)


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a tensor in order; what needs a copy is copied in parts of up to `_COPIED` bytes."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield memory_of(tensor)
        return
    # XLA would compile a program for each part.
    if tensor.nbytes <= _COPIED or tensor.device.type == "xla":
        part = tensor.to("cpu").contiguous()
        yield memory_of(part)
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    size = tensor.shape[dim]
    rows = max(1, size * _COPIED // tensor.nbytes)
    for start in range(0, size, rows):
        yield from _bytes_of(tensor.narrow(dim, start, min(rows, size - start)))


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
        verified: the numbers of chunks that have been found whole, to which reading adds.

    Raises:
        CheckpointError: if it cannot be opened or has another size.
    """

    def __init__(self, folder: Path, name: str, entry: FileEntry | None, verified: set[int] | None = None) -> None:
        self.path = folder / name
        descriptor, self.size = open_inside(folder, name)
        self._file: BinaryIO = os.fdopen(descriptor, "rb", buffering=0)
        self._entry = entry
        self._chunk = CHUNK if entry is None else entry.chunk
        self._verified = set[int]() if verified is None else verified
        # Where a read cannot name its place, seeking and reading are one act.
        self._seeking = threading.Lock()
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

    def verify(self, begin: int = 0, end: int | None = None, unread: bool = False) -> None:
        """Verifies the chunks that begin at byte `begin` or later and before `end`.

        Args:
            begin: a byte of the file.
            end: another; None for the end of the file.
            unread: leave out chunks that have been read and found whole.

        Raises:
            CheckpointError: if a byte differs.
        """
        stretches: list[_Stretch] = []
        for number in range(-(-begin // self._chunk), -(-(self.size if end is None else end) // self._chunk)):
            start = number * self._chunk
            if start >= self.size or (unread and number in self._verified):
                continue
            stop = min(start + self._chunk, self.size)
            if stretches and stretches[-1].end == start and stop - stretches[-1].begin <= _STRETCH:
                stretches[-1].end = stop
            else:
                stretches.append(_Stretch(start, stop))
        self._read(stretches)

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
        self._exactly([memoryview(first)], 0)
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
        stretches: list[_Stretch] = []
        size = max(_STRETCH, self._chunk) // self._chunk * self._chunk
        for offset, view in sorted((target for target in targets if len(target[1])), key=lambda target: target[0]):
            while len(view):
                stop = min(offset - offset % size + size, offset + len(view))
                begin, end = offset - offset % self._chunk, min(-(-stop // self._chunk) * self._chunk, self.size)
                if not stretches or begin > stretches[-1].end or (begin % size == 0 and begin == stretches[-1].end):
                    stretches.append(_Stretch(begin, end))
                stretches[-1].end = end
                stretches[-1].pieces.append((offset, view[: stop - offset]))
                offset, view = stop, view[stop - offset :]
        self._read(stretches)

    def _read(self, stretches: list[_Stretch]) -> None:
        """Reads stretches of the file, of which each is checked by itself: reading and hashing leave others running."""
        try:
            if sum(stretch.end - stretch.begin for stretch in stretches) < _IN_THREADS or len(stretches) == 1:
                for stretch in stretches:
                    self._stretch(stretch)
                return
            with ThreadPoolExecutor(min(_THREADS, len(stretches))) as pool:
                for _ in pool.map(self._stretch, stretches):
                    pass
        except OSError as error:
            raise CheckpointError(self.path, f"cannot be read ({error}).") from error

    def _stretch(self, stretch: _Stretch) -> None:
        """Reads the pieces of a stretch into their buffers, and what is between them only for the checksums."""
        if self._entry is None:
            for offset, view in stretch.pieces:
                self._exactly([view], offset)
            return
        hasher = ChunkHasher(self._chunk, self._entry.algorithm)
        position = stretch.begin
        for views in stretch.batches():
            self._exactly(views, position)
            for view in views:
                hasher.update(view)
                position += len(view)
        first = stretch.begin // self._chunk
        for number, digest in enumerate(hasher.entry().sums, first):
            if digest != self._entry.sums[number]:
                start = number * self._chunk
                end = min(start + self._chunk, self.size)
                raise CheckpointError(
                    self.path,
                    f"is damaged: the checksum of bytes {start} to {end} does not match. Use another checkpoint.",
                )
        self._verified.update(range(first, -(-stretch.end // self._chunk)))

    def _exactly(self, views: list[memoryview], offset: int) -> None:
        """Fills buffers one after the other with the bytes from `offset` on."""
        wanted = sum(map(len, views))
        while wanted:
            count = self._some(views, offset)
            if not count:
                raise CheckpointError(self.path, "ends before its size: it was cut short. Use another checkpoint.")
            offset, wanted = offset + count, wanted - count
            if wanted:
                views = _after(views, count)

    def _some(self, views: list[memoryview], offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), views, offset)
        with self._seeking:
            self._file.seek(offset)
            return int(self._file.readinto(views[0]) or 0)  # type: ignore[attr-defined]


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Returns what is left of buffers of which the first `count` bytes are filled."""
    left: list[memoryview] = []
    for view in views:
        taken = min(count, len(view))
        count -= taken
        if taken < len(view):
            left.append(view[taken:])
    return left


@dataclass(slots=True)
class _Stretch:
    """Whole chunks that are read one after the other, with the buffers of the pieces that are wanted of them."""

    begin: int
    end: int
    pieces: list[tuple[int, memoryview]] = field(default_factory=list)

    def batches(self) -> Iterator[list[memoryview]]:
        """Yields the buffers for all bytes from begin to end, as many as are read at once."""
        spare = memoryview(b"")
        batch: list[memoryview] = []
        size = position = 0
        for view in self._views():
            if isinstance(view, int):
                if not len(spare):
                    spare = memoryview(bytearray(min(_PIECE, self.end - self.begin)))
                view = spare[size : size + view]
            batch.append(view)
            size, position = size + len(view), position + len(view)
            if position % _PIECE == 0 or len(batch) >= _VIEWS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _views(self) -> Iterator[memoryview | int]:
        """Yields parts of the wanted pieces, and the sizes of parts between them, none across a multiple of _PIECE."""
        position = self.begin
        for offset, view in [*self.pieces, (self.end, memoryview(b""))]:
            while position < offset:
                step = min(_PIECE - (position - self.begin) % _PIECE, offset - position)
                yield step
                position += step
            while len(view):
                step = min(_PIECE - (position - self.begin) % _PIECE, len(view))
                yield view[:step]
                position, view = position + step, view[step:]


def read_tensors(file: CheckedFile) -> dict[str, Tensor]:
    """Reads all tensors of a safetensors file, each into its own memory.

    Raises:
        CheckpointError: if the file is damaged, or is not a safetensors file.
    """
    found: dict[str, Tensor] = {}
    targets = []
    for key, (dtype, shape, offset) in read_header(file).items():
        found[key] = room(shape, dtype)
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
