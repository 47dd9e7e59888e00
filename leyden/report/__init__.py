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
        LeydenError: if a folder does not exist, or holds nothing of a run.
    """
    from leyden.checkpoint.format import staging
    from leyden.report.page import page_of
    from leyden.report.recorded import read_run

    runs = [read_run(Path(folder), name) for folder, name in zip(folders, _names(folders), strict=True)]
    target = Path(path)
    with staging.replacing(target) as temporary:
        temporary.write_text(page_of(runs), encoding="utf-8")
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
