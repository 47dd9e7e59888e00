"""Paths that users pass: local ones, with `~` expanded; URLs are refused, since Leyden writes to none.

And existing files of a run's folder, which may come from elsewhere: links and special files are refused. A link would
lead a resume, which truncates the files that it continues, to a file outside of the folder. Opening a FIFO would wait
forever.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat

from leyden.core.errors import ConfigurationError, LeydenError

# `Path("s3://bucket")` has lost a slash; drives of Windows have one letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def local_path(path: str | os.PathLike[str], name: str) -> str:
    """Returns a path as text, with `~` expanded.

    Args:
        path: the path that the user passed.
        name: the argument's name, for the error.

    Raises:
        ConfigurationError: for a URL.

    Example:
        >>> local_path("s3://bucket/run", "dirpath")
        Traceback (most recent call last):
        ...
        leyden.core.errors.ConfigurationError: dirpath='s3://bucket/run' is a URL, ...
    """
    text = os.path.expanduser(os.fspath(path))
    if _URL.match(text):
        raise ConfigurationError(
            f"{name}={text!r} is a URL, and this takes only local and mounted folders. Mount the storage (s3fs, "
            "gcsfuse and rclone do), or pass a local path and copy the files yourself."
        )
    return text


def opener(path: str, flags: int) -> int:
    """Opens a file that must not be a link or a special file, for `open(path, mode, opener=opener)`.

    Raises:
        LeydenError: names the file.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> os.symlink("/etc/hostname", f"{folder}/metrics.csv")
        >>> open(f"{folder}/metrics.csv", opener=opener)
        Traceback (most recent call last):
        ...
        leyden.core.errors.LeydenError: /.../metrics.csv is a link, ...
    """
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"):
        flags |= getattr(os, name, 0)
    check_plain(path)
    file = os.open(path, flags, 0o666)
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        raise _refusal(path, mode)
    return file


def check_plain(path: str | os.PathLike[str]) -> None:
    """Raises LeydenError if the path exists and is not a plain file."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise _refusal(path, mode)


def _refusal(path: str | os.PathLike[str], mode: int) -> LeydenError:
    kind = "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "not a plain file"
    return LeydenError(
        f"{os.fspath(path)} is {kind}, and Leyden continues only plain files in a run's folder: put a copy of the file "
        "in its place, or remove it."
    )
