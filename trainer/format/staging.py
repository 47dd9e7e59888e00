"""Temporary folders beside a checkpoint that is written or deleted, which are cleared when their process is gone."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import threading
from pathlib import Path
from typing import Literal

from leyden.strategies.launch.processes import place, runs, started
from leyden.trainer.format.errors import CheckpointError
from leyden.trainer.format.manifest import MANIFEST, read_manifest

# tmp: being written; old: moved aside by an unfinished overwrite; del: being deleted.
Kind = Literal["tmp", "old", "del"]
BEAT = 30.0
"""Seconds between two heartbeats of a writer."""
SILENT = 3600.0
"""Seconds without a heartbeat after which a writer on another host counts as gone. If it wakes up later, its folder is
missing, and it raises."""
_PATTERN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old|del)-(?P<pid>\d+)-(?P<start>\d+)-(?P<host>\w+)-[0-9a-f]{8}")


def sibling(target: Path, kind: Kind) -> Path:
    """Returns a new name beside `target` that identifies this process and host."""
    pid = os.getpid()
    return target.with_name(f".{target.name}.{kind}-{pid}-{started(pid)}-{place()}-{secrets.token_hex(4)}")


def sweep(folder: Path, now: float | None = None) -> None:
    """Clears what killed processes left in a folder, and restores what an overwrite had moved aside.

    The leftovers of a process on this host are cleared as soon as it is gone. Those of another host or container, whose
    processes are not visible from here, are cleared after `SILENT` seconds without a heartbeat. What cannot be cleared
    stays: readers ignore it, and the next writer tries again.

    Args:
        folder: a folder of checkpoints.
        now: the time on the clock of the folder's file system, as in `FolderHeartbeat.began`; None leaves what other
            hosts wrote.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in _newest_first(folder, names):
        match = _PATTERN.fullmatch(name)
        if match is None or _is_alive(folder / name, match, now):
            continue
        left, target = folder / name, folder / match["name"]
        if match["kind"] == "old" and (left / MANIFEST).is_file() and not os.path.lexists(target):
            with contextlib.suppress(OSError):
                os.rename(left, target)
            continue
        if left.is_symlink() or left.is_file():
            with contextlib.suppress(OSError):
                left.unlink()
            continue
        shutil.rmtree(left, ignore_errors=True)


def clock_of(folder: Path) -> float | None:
    """Returns the time on the clock of a folder's file system, for `sweep`; None if the folder is not writable."""
    probe = sibling(folder / "clock", "tmp")
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
    except OSError:
        return None
    return now


def _is_alive(path: Path, match: re.Match[str], now: float | None) -> bool:
    """Returns True unless it is certain that no process writes or deletes it any more."""
    if match["host"] == place():
        return runs(int(match["pid"]), match["start"])
    return now is None or now - _last_sign(path) < SILENT


def _last_sign(path: Path) -> float:
    """Returns when a folder or an entry in it last changed: a write, a rename, a heartbeat."""
    signs = []
    with contextlib.suppress(OSError):
        for entry in [path, *(path.iterdir() if path.is_dir() and not path.is_symlink() else ())]:
            status = entry.lstat()
            signs.append(max(status.st_mtime, status.st_ctime))
    # An entry that has just vanished shows that its process is at work.
    return max(signs, default=math.inf)


class FolderHeartbeat:
    """Touches a temporary folder every `BEAT` seconds until it is stopped, so that other hosts know it is being
    written.

    Args:
        folder: the folder, which was just made.

    Attributes:
        began: when it was made, on the clock of its file system.
    """

    def __init__(self, folder: Path) -> None:
        self.began = folder.stat().st_mtime
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="leyden-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            try:
                os.utime(self._folder)
            except OSError:
                return

    def stop(self) -> None:
        """Stops the heartbeat, before the folder is renamed or removed."""
        self._over.set()


def standing(path: Path) -> Path:
    """Finds where a checkpoint can be read: at its path, or aside if an overwrite is unfinished or was killed.

    Args:
        path: a checkpoint, or a link to one.

    Returns:
        The path itself if it exists, or if there is nothing aside either.
    """
    if path.is_dir():
        return path
    # This also covers a link such as "last" that points to nothing now.
    target = Path(os.path.realpath(path))
    sweep(target.parent)
    if target.is_dir():
        return path
    return next((aside for aside, name in set_aside(target.parent) if name == target.name), path)


def set_aside(folder: Path) -> list[tuple[Path, str]]:
    """Returns whole checkpoints that an overwrite moved aside and whose names are free, with those names."""
    found = []
    with contextlib.suppress(OSError):
        for name in _newest_first(folder, os.listdir(folder)):
            match = _PATTERN.fullmatch(name)
            if match is None or match["kind"] != "old" or os.path.lexists(folder / match["name"]):
                continue
            if (folder / name / MANIFEST).is_file():
                found.append((folder / name, match["name"]))
    return found


def _newest_first(folder: Path, names: list[str]) -> list[str]:
    """Sorts names so that the newest of several checkpoints that were moved aside from one name comes first.

    An earlier one is there if a power cut has undone its removal.
    """

    def counter(name: str) -> int:
        if ".old-" not in name:
            return 0
        try:
            return -read_manifest(folder / name).save_counter
        except (CheckpointError, OSError):
            return 0

    return sorted(names, key=lambda name: (counter(name), name))


def is_staging(name: str) -> bool:
    """Returns True for the name of a folder that is being written or deleted."""
    return _PATTERN.fullmatch(name) is not None


def fsync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power failure. Windows has no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_above(folder: Path) -> None:
    """Makes a folder survive a power failure that was made not long ago, with those above it on its file system.

    What cannot be flushed, such as a folder of somebody else, was there before.
    """
    with contextlib.suppress(OSError):
        device = folder.stat().st_dev
        for above in folder.parents:
            if above.stat().st_dev != device:
                return
            fsync_folder(above)
