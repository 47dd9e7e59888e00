"""Checkpoints in buckets: S3, Google Cloud Storage, Azure, and stores that speak one of their protocols."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from leyden.core.errors import ConfigurationError, needs
from leyden.core.paths import local_path

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "memory")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<bucket>[^/]*)/*(?P<key>.*)", re.DOTALL)


class BucketPath:
    """A file or a folder in a bucket, with the methods of `pathlib.Path` that reading a checkpoint needs.

    A bucket has no folders: a folder is what the keys of some objects begin with. It is no `os.PathLike`, so that no
    function for local files takes it by mistake.

    Args:
        url: such as `s3://bucket/runs/one`. obstore connects to the store, with the credentials in the environment.

    Raises:
        ConfigurationError: if the URL has an unknown scheme, no bucket or a part `..`; from every method that reads, if
            obstore rejects the settings.
        MissingExtraError: from every method that reads, if obstore is not installed.

    Example:
        >>> checkpoint = BucketPath("memory://bucket/run/") / "step=5"
        >>> str(checkpoint), checkpoint.name, checkpoint.is_dir()
        ('memory://bucket/run/step=5', 'step=5', False)
    """

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        scheme, bucket, key = ("", "", "") if match is None else match.group("scheme", "bucket", "key")
        if scheme not in SCHEMES:
            raise ConfigurationError(f"{url!r} is not a URL of a bucket. Known: {', '.join(SCHEMES)}.")
        if not bucket:
            raise ConfigurationError(f"{url!r} names no bucket: write {scheme}://bucket/folder.")
        parts = list(filter(None, key.split("/")))
        if "." in parts or ".." in parts:
            raise ConfigurationError(f"{url!r}: . and .. mean nothing in a bucket. Write the URL without them.")
        self._root, self._key = f"{scheme}://{bucket}", "/".join(parts)

    @property
    def _store(self) -> Any:
        return store_of(self._root)

    def __truediv__(self, name: str) -> BucketPath:
        return BucketPath(f"{self}/{name}")

    def __str__(self) -> str:
        return f"{self._root}/{self._key}".rstrip("/")

    def __repr__(self) -> str:
        return f"BucketPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self._key.rpartition("/")[2]

    @property
    def parent(self) -> BucketPath:
        """The folder that holds this file or folder."""
        return BucketPath(f"{self._root}/{self._key.rpartition('/')[0]}")

    def is_file(self) -> bool:
        """Returns True if there is an object of this name."""
        obstore = _obstore()
        if not self._key:
            return False
        try:
            with _requests():
                obstore.head(self._store, self._key)
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Returns True if there is an object below this name."""
        return next(self._listed(), None) is not None

    def exists(self) -> bool:
        """Returns True if there is an object of or below this name."""
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """Returns False: buckets have no links."""
        return False

    def iterdir(self) -> Iterator[BucketPath]:
        """Yields the files and folders directly in this folder."""
        for key in self._listed():
            yield BucketPath(f"{self._root}/{key}")

    def _listed(self) -> Iterator[str]:
        obstore = _obstore()
        with _requests():
            found = obstore.list_with_delimiter(self._store, self._key or None)
        yield from sorted([*found["common_prefixes"], *(entry["path"] for entry in found["objects"])])

    def read_bytes(self, most: int) -> bytes:
        """Returns the object's bytes, or the first `most` of them."""
        obstore = _obstore()
        with _requests():
            found = obstore.get(self._store, self._key)
            if found.meta["size"] <= most:
                return bytes(found.bytes())
            return bytes(obstore.get_range(self._store, self._key, start=0, length=most))

    def open_inside(self, name: str) -> tuple[BucketFile, int]:
        """Returns a file in this folder, and its size in bytes."""
        obstore = _obstore()
        path = self / name
        with _requests():
            size = int(obstore.head(path._store, path._key)["size"])
        return BucketFile(path._store, path._key), size


class BucketFile:
    """An object that is read in ranges of bytes.

    Args:
        store: obstore's store of the bucket.
        key: the object's key.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key

    def close(self) -> None:
        """Does nothing: an object is not held open."""

    def part(self, begin: int, end: int) -> BucketPart:
        """Requests a range of bytes. Threads may call it at the same time."""
        obstore = _obstore()
        if begin == end:
            return BucketPart(memoryview(b""), begin)
        with _requests():
            return BucketPart(memoryview(obstore.get_range(self._store, self._key, start=begin, end=end)), begin)

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        """Fills buffers with the bytes from an offset on, in one request. Returns the number of bytes."""
        return self.part(offset, offset + sum(map(len, views))).read(views, offset)


class BucketPart:
    """Bytes of an object that are in memory.

    Args:
        data: the bytes.
        begin: their offset in the object.
    """

    def __init__(self, data: memoryview, begin: int) -> None:
        self._data, self._begin = data, begin

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        """Fills buffers with the bytes from an offset on, as far as there are any. Returns the number of bytes."""
        start = position = offset - self._begin
        for view in views:
            taken = self._data[position : position + len(view)]
            view[: len(taken)] = taken
            position += len(taken)
        return position - start


Place: TypeAlias = Path | BucketPath
"""A local file or folder, or one in a bucket."""


def place_of(path: str | os.PathLike[str] | BucketPath, name: str) -> Place:
    """Returns the path that a user passed, which may be the URL of a bucket.

    Args:
        path: the path or URL.
        name: the argument's name, for errors.

    Raises:
        ConfigurationError: for a URL that does not name a folder in a bucket, or holds credentials.
    """
    if isinstance(path, BucketPath):
        return path
    match = _URL.match(os.fspath(path))
    if match is None or match["scheme"] not in SCHEMES:
        return Path(local_path(path, name))
    before, at, _ = match["bucket"].partition("@")
    # Azure writes container@account.
    has_user = bool(at) and (":" in before or not match["scheme"].startswith("abfs"))
    if has_user or "?" in match["key"]:
        raise ConfigurationError(
            f"{name}: a URL of {match['scheme']}:// holds credentials, which would end up in logs and checkpoints. "
            "Pass them in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and the URL without "
            "them."
        )
    return BucketPath(os.fspath(path))


def _obstore() -> Any:
    """Returns the package, which only URLs need."""
    with needs("obstore", "remote", "a URL of a bucket"):
        import obstore
    return obstore


@functools.cache
def store_of(url: str) -> Any:
    """Returns obstore's store of a bucket, with the settings in the environment. It connects at the first request."""
    from obstore import exceptions
    from obstore.store import MemoryStore, from_url

    if url.startswith("memory:"):
        return MemoryStore()
    # Local servers have no certificates. obstore refuses http:// otherwise.
    is_plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    options: Any = {"allow_http": True} if is_plain else None
    try:
        return from_url(url, client_options=options)
    except (exceptions.BaseError, ValueError) as error:
        raise ConfigurationError(f"{url} cannot be used: {_cause(error)}") from error


@contextmanager
def _requests() -> Iterator[None]:
    """Turns obstore's errors in the block into OSErrors, which have a line of text."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(_cause(error)) from None
    except BaseError as error:
        raise OSError(_cause(error)) from error


def _cause(error: Exception) -> str:
    """Returns an error of obstore as one line, without the structures that it prints for debugging."""
    text = " ".join(str(error).partition("\n\nDebug source:")[0].split())
    if "/latest/api/token" not in text:
        return text
    return (
        "no credentials are in the environment, and this machine has no role of AWS: set AWS_ACCESS_KEY_ID and "
        f"AWS_SECRET_ACCESS_KEY ({text})"
    )
