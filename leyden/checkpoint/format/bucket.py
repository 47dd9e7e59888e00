"""Checkpoints in buckets: S3, Google Cloud Storage, Azure, and stores that speak one of their protocols."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, TypeVar

from leyden.core.errors import ConfigurationError, needs
from leyden.core.paths import local_path

PART = 8 * 1024 * 1024
"""The fewest bytes in a part of an upload, except for the last."""
MOST_PARTS = 9_000
"""Parts of an upload. S3 accepts 10,000."""
PARALLEL = 4
TIMEOUT = timedelta(minutes=2)
"""How long a request may take. A part of 8 MiB needs 70 kB/s."""
RETRIES: Any = {
    "max_retries": 12,
    "retry_timeout": timedelta(minutes=5),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=15), "base": 4},
}
"""How a request is repeated that a store refuses for the moment, or that is cut off: for about a minute."""
SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "memory")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<bucket>[^/]*)/*(?P<key>.*)", re.DOTALL)


class BucketPath:
    """A file or a folder in a bucket, with the methods of `pathlib.Path` that checkpoints need.

    A bucket has no folders: a folder is what the keys of some objects begin with. It is no `os.PathLike`, so that no
    function for local files takes it by mistake.

    Args:
        url: such as `s3://bucket/runs/one`. obstore connects to the store, with the credentials in the environment.

    Raises:
        ConfigurationError: if the URL has an unknown scheme, no bucket or a part `..`; from every method that connects,
            if obstore rejects the settings.
        MissingExtraError: from every method that connects, if obstore is not installed.
        OSError: from every method that connects, if the store refuses or cannot be reached; names the cause.

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

    @property
    def parents(self) -> list[BucketPath]:
        """The folders above this one, the nearest first."""
        parts = self._key.split("/")[:-1]
        return [BucketPath("/".join([self._root, *parts[:count]])) for count in range(len(parts), -1, -1)]

    def absolute(self) -> BucketPath:
        """Returns this path: a URL is absolute."""
        return self

    def with_name(self, name: str) -> BucketPath:
        """Returns the file or folder of another name beside this one."""
        return self.parent / name

    def relative_to(self, folder: BucketPath) -> PurePosixPath:
        """Returns the path from a folder above.

        Raises:
            ValueError: if this path is not below the folder.
        """
        return PurePosixPath(str(self)).relative_to(str(folder))

    def is_file(self) -> bool:
        """Returns True if there is an object of this name."""
        return self.changed() is not None

    def changed(self) -> datetime | None:
        """Returns when the object was written, by the store's clock; None if there is no such object."""
        if not self._key:
            return None
        try:
            with _requests() as obstore:
                found: datetime = obstore.head(self._store, self._key)["last_modified"]
        except FileNotFoundError:
            return None
        return found

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
        with _requests() as obstore:
            found = obstore.list_with_delimiter(self._store, self._key or None)
        yield from sorted([*found["common_prefixes"], *(entry["path"] for entry in found["objects"])])

    def below(self) -> Iterator[tuple[BucketPath, datetime]]:
        """Yields all objects below this name, each with the time when it was written."""
        with _requests() as obstore:
            for page in obstore.list(self._store, self._key or None):
                for entry in page:
                    yield BucketPath(f"{self._root}/{entry['path']}"), entry["last_modified"]

    def delete(self, paths: Sequence[BucketPath]) -> None:
        """Deletes objects of this bucket. Ones that do not exist are skipped."""
        with _requests() as obstore:
            obstore.delete(self._store, [path._key for path in paths])

    def write_bytes(self, data: bytes) -> None:
        """Writes the object, or replaces it."""
        try:
            with _requests() as obstore:
                obstore.put(self._store, self._key, data, use_multipart=False)
        except OSError:
            # The store may have carried it out, and the answer was lost.
            if not self._holds(data):
                raise

    def create(self, data: bytes) -> bool:
        """Writes the object only if there is none of its name.

        A request that the store has carried out, but whose answer was lost, is repeated and then refused. So what the
        store holds decides: the data should be unique.

        Returns:
            True if the object holds the data now, False if it holds something else.
        """
        try:
            with _requests() as obstore:
                obstore.put(self._store, self._key, data, mode="create", use_multipart=False)
            return True
        except FileExistsError:
            return self._holds(data)
        except OSError:
            if not self._holds(data):
                raise
            return True

    def _holds(self, data: bytes) -> bool:
        """Returns True if the object is there, and holds these bytes."""
        try:
            return self.read_bytes(len(data) + 1) == data
        except FileNotFoundError:
            return False

    @contextmanager
    def upload(self, size: int) -> Iterator[Any]:
        """Yields a file to write, of about `size` bytes. The object exists after the block, unless the block raises.

        Up to `PARALLEL` parts are sent at a time, and as many are held in memory.
        """
        part = max(PART, -(-size // MOST_PARTS))
        with (
            _requests() as obstore,
            obstore.open_writer(self._store, self._key, buffer_size=part, max_concurrency=PARALLEL) as file,
        ):
            yield file

    def read_bytes(self, most: int) -> bytes:
        """Returns the object's bytes, or the first `most` of them."""
        with _requests() as obstore:
            found = obstore.get(self._store, self._key)
            if found.meta["size"] <= most:
                return bytes(found.bytes())
            return bytes(obstore.get_range(self._store, self._key, start=0, length=most))

    def download(self, target: Path) -> None:
        """Copies the object to a local file, whose folder is created."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with _requests() as obstore, target.open("wb") as file:
            for piece in obstore.get(self._store, self._key).stream():
                file.write(piece)

    def open_inside(self, name: str) -> tuple[BucketFile, int]:
        """Returns a file in this folder, and its size in bytes."""
        path = self / name
        with _requests() as obstore:
            size = int(obstore.head(path._store, path._key)["size"])
        return BucketFile(path._store, path._key), size


class BucketFile:
    """An object that is read in ranges of bytes."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key

    def close(self) -> None:
        """Does nothing: an object is not held open."""

    def part(self, begin: int, end: int) -> BucketPart:
        """Requests a range of bytes. Threads may call it at the same time."""
        if begin == end:
            return BucketPart(memoryview(b""), begin)
        with _requests() as obstore:
            return BucketPart(memoryview(obstore.get_range(self._store, self._key, start=begin, end=end)), begin)

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        """Fills buffers with the bytes from an offset on, in one request. Returns the number of bytes."""
        return self.part(offset, offset + sum(map(len, views))).read(views, offset)


class BucketPart:
    """Bytes of an object that are in memory, from the offset `begin` on."""

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
AnyPlace = TypeVar("AnyPlace", bound=Place)


def place_of(path: str | os.PathLike[str] | BucketPath, name: str) -> Place:
    """Returns the path that a user passed as the argument `name`, which may be the URL of a bucket.

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


def expanded(path: str | os.PathLike[str] | BucketPath, name: str) -> str:
    """Returns a path that a user passed as text, with `~` expanded; see `place_of`."""
    place = place_of(path, name)
    return str(place) if isinstance(place, BucketPath) else local_path(str(path), name)


def absolute(path: str | os.PathLike[str] | BucketPath, name: str) -> str:
    """Returns a path that a user passed as text: an absolute path, or a URL; see `place_of`."""
    place = place_of(path, name)
    return str(place) if isinstance(place, BucketPath) else os.path.abspath(place)


@functools.cache
def store_of(url: str) -> Any:
    """Returns obstore's store of a bucket, with the settings in the environment. It connects at the first request."""
    from obstore import exceptions
    from obstore.store import MemoryStore, from_url

    if url.startswith("memory:"):
        return MemoryStore()
    # Local servers have no certificates. obstore refuses http:// otherwise.
    is_plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    options: Any = {"timeout": TIMEOUT, "allow_http": is_plain}
    try:
        return from_url(url, client_options=options, retry_config=RETRIES)
    except (exceptions.BaseError, ValueError) as error:
        raise ConfigurationError(f"{url} cannot be used: {_cause(error)}") from error


@contextmanager
def _requests() -> Iterator[Any]:
    """Yields obstore, which only URLs need. Turns its errors in the block into OSErrors, which have a line of text."""
    with needs("obstore", "remote", "a URL of a bucket"):
        import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

    try:
        yield obstore
    except FileNotFoundError as error:
        raise FileNotFoundError(_cause(error)) from None
    except (AlreadyExistsError, PreconditionError) as error:
        raise FileExistsError(_cause(error)) from error
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
