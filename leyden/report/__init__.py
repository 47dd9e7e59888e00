"""Pictures and tables of runs: one HTML page that needs no network and no other file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["write_report"]


def write_report(folders: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> Path:
    """Draws one or more runs in an HTML file, which appears complete or not at all.

    Args:
        folders: the folders of the runs, such as `logs/version_0`. Their curves share the charts.
        path: the file to write. An existing one is replaced.

    Returns:
        The path of the file.

    Raises:
        LeydenError: if a folder does not exist or holds nothing of a run, or if the file has no place.
    """
    from leyden.checkpoint.format import staging
    from leyden.core.errors import LeydenError
    from leyden.report.page import page_of
    from leyden.report.recorded import read_run

    target = Path(path)
    if target.is_dir():
        raise LeydenError(f"{target} is a folder. Pass the path of a file, such as {target / 'report.html'}.")
    if not target.parent.is_dir():
        raise LeydenError(f"there is no folder {target.parent} for {target.name}. Create it first.")
    runs = [read_run(Path(folder), name) for folder, name in zip(folders, _names(folders), strict=True)]
    with staging.replacing(target) as temporary:
        # Names may hold bytes that are no text.
        temporary.write_bytes(page_of(runs).encode("utf-8", "replace"))
    return target


def _names(folders: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Returns the shortest ends of the paths, of at least two parts, that tell the folders apart.

    Example:
        >>> _names(["a/logs/version_0", "b/logs/version_0"])
        ['a/logs/version_0', 'b/logs/version_0']
    """
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    for length in range(2, max(map(len, parts), default=2)):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return ["/".join(each) for each in parts]
