"""The manifest, which lists a checkpoint's files with their checksums. A folder without one is not a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from leyden.checkpoint.format.bucket import BucketPath, Place
from leyden.checkpoint.format.errors import CheckpointError

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
LAYOUT = "layout.json"
OPTIMIZERS = "optimizer.json"
PROGRESS = "progress.json"
# Entries of a state dict that are not tensors, from `get_extra_state`.
EXTRA = "model-extra"
# An entry alongside the hyperparameters' owners: which arguments were left out, and which one argument held them all.
KEPT = "kept"

# Version 2 adds `data_ranks`, version 3 files whose checksums are not SHA-256, version 4 `save_id`. A manifest has the
# lowest version that it needs, so that older versions of Leyden can read it.
FORMAT, HASHED, SHARED_RANKS, FIRST_FORMAT = 4, 3, 2, 1
SHA256, XXH3 = "sha256", "xxh3_64"
CHUNK = 64 * 1024 * 1024
MIN_CHUNK = 4 * 1024
# A manifest takes at most 70 bytes per 64 MiB chunk, so this is enough for 60 TB.
_MAX_MANIFEST = 64 * 1024 * 1024
_KIND = "leyden checkpoint"
MISSING = "is missing. The checkpoint is damaged: use another one."


class Hasher(Protocol):
    """The interface of hashlib's and xxhash's objects that Leyden uses."""

    def update(self, data: memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


# XXH3 takes a tenth of SHA-256's time, and misses one damaged chunk in 2**64. SHA-256 would be no safer against
# forgery, since an attacker who changes a file can change its checksum too.
ALGORITHMS = (SHA256, XXH3)


def digest_of(algorithm: str) -> Callable[[], Hasher]:
    """Returns the constructor of the hasher of one of ALGORITHMS."""
    if algorithm == SHA256:
        return hashlib.sha256
    from xxhash import xxh3_64

    return xxh3_64


def _digest_whole(algorithm: str) -> Callable[[memoryview], str]:
    """Returns a function that computes the digest of bytes in one go.

    For XXH3 this is one C call instead of three, which matters because chunks are small and many.
    """
    if algorithm == SHA256:
        return lambda data: hashlib.sha256(data).hexdigest()
    from xxhash import xxh3_64_hexdigest

    return xxh3_64_hexdigest


@dataclass(frozen=True)
class FileEntry:
    """The size of a file and the checksums of its chunks, in hexadecimal. An empty file has no chunks."""

    size: int
    sums: tuple[str, ...]
    chunk: int = CHUNK
    algorithm: str = SHA256


class ChunkHasher:
    """Computes the checksums of a file's chunks from the file's bytes, passed in order."""

    def __init__(self, chunk: int = CHUNK, algorithm: str = SHA256) -> None:
        self._chunk, self._algorithm, self._new_hasher = chunk, algorithm, digest_of(algorithm)
        self._digest_whole = _digest_whole(algorithm)
        self._size = 0
        self._sums: list[str] = []
        """Checksums of the chunks that are complete."""
        self._hasher = self._new_hasher()
        """Hashes the chunk that is not complete."""

    def update(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while len(view):
            piece = view[: self._chunk - self._size % self._chunk]
            self._size += len(piece)
            view = view[len(piece) :]
            if len(piece) == self._chunk:
                self._sums.append(self._digest_whole(piece))
                continue
            self._hasher.update(piece)
            if self._size % self._chunk == 0:
                self._sums.append(self._hasher.hexdigest())
                self._hasher = self._new_hasher()

    def entry(self) -> FileEntry:
        last_sum = [self._hasher.hexdigest()] if self._size % self._chunk else []
        return FileEntry(self._size, (*self._sums, *last_sum), self._chunk, self._algorithm)


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`.

    Attributes:
        files: all other files of the checkpoint, by their relative names.
        save_counter: the checkpoint's number in its parent folder, from 1; the newest has the highest.
        saved_at: the time of the save, in UTC, ISO 8601.
        progress: the run's epoch and global_step.
        world_size: the number of ranks that wrote the checkpoint.
        strategy: the name of the run's strategy.
        versions: the versions of leyden and torch.
        data_ranks: the data rank of each rank, if several ranks shared one; otherwise empty.
        save_id: the subfolder that holds the other files, of a checkpoint that was saved to a bucket; otherwise empty.
    """

    files: Mapping[str, FileEntry]
    save_counter: int
    saved_at: str
    progress: Mapping[str, Any]
    world_size: int
    strategy: str
    versions: Mapping[str, str] = field(default_factory=dict)
    data_ranks: tuple[int, ...] = ()
    save_id: str = ""

    @property
    def format(self) -> int:
        """The version of the file format."""
        if self.save_id:
            return FORMAT
        if any(entry.algorithm != SHA256 for entry in self.files.values()):
            return HASHED
        return SHARED_RANKS if self.data_ranks else FIRST_FORMAT

    def to_bytes(self) -> bytes:
        """Returns the file's bytes. The first line holds the digest of the rest, which reveals any change."""
        rest: dict[str, Any] = {
            "kind": _KIND,
            "format": self.format,
            "save_counter": self.save_counter,
            "saved_at": self.saved_at,
            "progress": dict(self.progress),
            "world_size": self.world_size,
            "strategy": self.strategy,
            **({"data_ranks": list(self.data_ranks)} if self.data_ranks else {}),
            **({"save_id": self.save_id} if self.save_id else {}),
            "versions": dict(self.versions),
            "files": {
                name: {"size": entry.size, "chunk": entry.chunk, entry.algorithm: list(entry.sums)}
                for name, entry in sorted(self.files.items())
            },
        }
        body = json.dumps(rest, indent=1, allow_nan=False)[1:].encode()
        return _head(body) + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parses and checks the bytes that `to_bytes` returned.

        Raises:
            ValueError: if a bit differs, or this is not a manifest; says which.
        """
        if not data.startswith(_HEAD):
            raise ValueError("it is not a manifest")
        size = len(_head(b""))
        if _head(data[size:]) != data[:size]:
            raise ValueError("its digest does not match: it was damaged or edited")
        try:
            parsed = json.loads(data)
            if parsed["kind"] != _KIND or int(parsed["format"]) > FORMAT:
                raise ValueError(f"its format {parsed['format']} is newer than this Leyden: update leyden to read it")
            files = {str(name): _entry(str(name), entry) for name, entry in parsed["files"].items()}
            manifest = cls(
                files=files,
                save_counter=int(parsed["save_counter"]),
                saved_at=str(parsed["saved_at"]),
                progress=dict(parsed["progress"]),
                world_size=int(parsed["world_size"]),
                strategy=str(parsed["strategy"]),
                versions=dict(parsed["versions"]),
                data_ranks=tuple(int(rank) for rank in parsed.get("data_ranks", ())),
                save_id=str(parsed.get("save_id", "")),
            )
        except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"it is not a manifest ({type(error).__name__}: {error})") from error
        if set(manifest.data_ranks) != set(range(len(set(manifest.data_ranks)))):
            raise ValueError(f"it lists the data ranks {list(manifest.data_ranks)}, of which one is missing")
        if manifest.save_id and unsafe(manifest.save_id):
            raise ValueError(f"it says that its files lie in {manifest.save_id!r}, {unsafe(manifest.save_id)}")
        for name, entry in manifest.files.items():
            reason = unsafe(name)
            if reason:
                raise ValueError(f"it lists the file {name!r}, {reason}")
            if entry.size < 0 or entry.chunk < 1 or len(entry.sums) != -(-entry.size // entry.chunk):
                raise ValueError(f"it lists {name!r} with {entry.size} bytes and {len(entry.sums)} checksums")
        return manifest


def _entry(name: str, entry: Mapping[str, Any]) -> FileEntry:
    algorithm = next((known for known in ALGORITHMS if known in entry), None)
    if algorithm is None:
        raise ValueError(f"it lists {name!r} without checksums that this Leyden knows")
    sums = tuple(str(digest) for digest in entry[algorithm])
    return FileEntry(int(entry["size"]), sums, int(entry.get("chunk", CHUNK)), algorithm)


_HEAD = b'{"digest": "'


def _head(body: bytes) -> bytes:
    return _HEAD + hashlib.sha256(body).hexdigest().encode() + b'",\n'


MAX_PARTS = 4_000_000
"""The number of lists and dicts that a JSON file of state may have."""


def parts_in(data: bytes) -> int:
    """Returns an upper bound for the number of lists and dicts in JSON."""
    return data.count(b"[") + data.count(b"{")


def unsafe(name: str) -> str | None:
    """Returns the reason why a file of this name must not be opened, or None if it may be opened."""
    if name.startswith("/") or ":" in name or "\\" in name or "\0" in name:
        return "which is not a plain relative name"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "which leads out of the checkpoint or is not a plain relative name"
    return None


def open_inside(folder: Path, name: str) -> tuple[int, int]:
    """Opens a regular file inside a folder. Returns its descriptor and its size.

    Raises:
        CheckpointError: if the file is missing, is not a regular file, or is a link to a file outside the folder.
    """
    path = folder / name
    reason = unsafe(name)
    if reason:
        raise CheckpointError(path, f"the checkpoint asks for the file {name!r}, {reason}.")
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            raise CheckpointError(path, "is a link to a file outside the checkpoint. Copy that file into it.")
        # Without O_NONBLOCK, opening a FIFO would hang.
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(real, flags)
    except FileNotFoundError as error:
        raise CheckpointError(path, MISSING) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(path, f"cannot be opened ({error}).") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(path, "is not a regular file. The checkpoint is damaged: use another one.")
    return descriptor, status.st_size


def read_manifest(folder: Place) -> Manifest:
    """Reads and checks the manifest of a checkpoint.

    Raises:
        CheckpointError: if the manifest is missing or damaged.
    """
    try:
        data = _bytes_of_manifest(folder)
        if len(data) > _MAX_MANIFEST:
            raise CheckpointError(folder / MANIFEST, f"has more than {_MAX_MANIFEST} bytes, too many for a manifest.")
        return Manifest.from_bytes(data)
    except ValueError as error:
        raise CheckpointError(folder / MANIFEST, f"cannot be trusted: {error}.") from error
    except FileNotFoundError as error:
        raise CheckpointError(folder / MANIFEST, MISSING) from error
    except OSError as error:
        raise CheckpointError(folder / MANIFEST, f"cannot be read ({error}).") from error


def _bytes_of_manifest(folder: Place) -> bytes:
    """Returns the bytes of a manifest, up to one more than it may have."""
    if isinstance(folder, BucketPath):
        return (folder / MANIFEST).read_bytes(_MAX_MANIFEST + 1)
    with os.fdopen(open_inside(folder, MANIFEST)[0], "rb") as file:
        return file.read(_MAX_MANIFEST + 1)
