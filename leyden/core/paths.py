"""Paths that users pass: local ones, with `~` expanded. URLs are refused, since no part of Leyden writes to one."""

from __future__ import annotations

import os
import re

from leyden.core.errors import ConfigurationError

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
            f"{name}={text!r} is a URL, and Leyden reads and writes only local and mounted folders. Mount the storage "
            "(s3fs, gcsfuse and rclone do), or pass a local path and copy the files yourself."
        )
    return text
