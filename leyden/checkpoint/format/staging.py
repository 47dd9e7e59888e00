"""Temporary siblings of a checkpoint that is being written or deleted. They are cleared once their process is gone."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import MANIFEST, read_manifest
from leyden.core.errors import ConfigurationError
from leyden.launch.processes import place, runs, started

# tmp: being written. old: moved aside by an unfinished overwrite. del: being deleted.
Kind = Literal["tmp", "old", "del"]
BEAT = 30.0
"""Seconds between two heartbeats of a writer."""
SILENT = 3600.0
"""Seconds without a heartbeat after which a writer on another host counts as gone.

If the writer wakes up later, its folder is missing, and it raises.
"""
_PATTERN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old|del)-(?P<pid>\d+)-(?P<start>\d+)-(?P<host>\w+)-[0-9a-f]{8}")


def sibling(target: Path, kind: Kind) -> Path:
    """Returns a new temporary name in the target's folder, which identifies this process and host."""
    pid = os.getpid()
    return target.with_name(f".{target.name}.{kind}-{pid}-{started(pid)}-{place()}-{secrets.token_hex(4)}")


def check_length(name: str, folder: str | os.PathLike[str] | None = None) -> None:
    """Checks that a checkpoint's name, and the temporary one of its save, are short enough for the file system.

    Without an existing folder, the limit is that of common file systems, 255 bytes.

    Raises:
        ConfigurationError: if the name is too long.
    """
    longest = 255
    if folder is not None and hasattr(os, "pathconf"):
        with contextlib.suppress(OSError, ValueError):
            longest = os.pathconf(folder, "PC_NAME_MAX")
    longest -= len(os.fsencode(sibling(Path("x"), "tmp").name)) - 1
    size = len(os.fsencode(name))
    if size > longest:
        raise ConfigurationError(
            f"the checkpoint's name {name!r} has {size} bytes, and at most {longest} fit, because a save first writes "
            "under a longer, temporary name. Use a shorter filename."
        )


@contextlib.contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Yields a temporary sibling to write, and renames it to `path` at the end of the block.

    With a `mode`, the sibling exists with these permissions before anything is written.

    Readers see the old file or the complete new one. If the block raises, the old file stays and the sibling is
    removed. Nothing is flushed to disk: a file that must survive a power failure is flushed in the block, and its
    folder after it.
    """
    temporary = sibling(path, "tmp")
    try:
        if mode is not None:
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sweep(folder: Path, now: float | None = None) -> None:
    """Clears the leftovers of killed processes from a folder, and restores checkpoints that an overwrite moved aside.

    Leftovers of a process on this host are cleared once the process is gone. The processes of other hosts and
    containers are not visible, so their leftovers are cleared after `SILENT` seconds without a heartbeat. Leftovers
    that cannot be cleared stay. Readers ignore them, and the next writer tries again.

    Args:
        folder: a folder of checkpoints.
        now: the time on the clock of the folder's file system, as in `FolderHeartbeat.began`. None skips the leftovers
            of other hosts.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in _newest_first(folder, names):
        match = _PATTERN.fullmatch(name)
        if match is None or _is_alive(folder / name, match, now):
            continue
        leftover, target = folder / name, folder / match["name"]
        if match["kind"] == "old" and (leftover / MANIFEST).is_file() and not os.path.lexists(target):
            with contextlib.suppress(OSError):
                os.rename(leftover, target)
            continue
        if leftover.is_symlink() or leftover.is_file():
            with contextlib.suppress(OSError):
                leftover.unlink()
            continue
        shutil.rmtree(leftover, ignore_errors=True)


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
    """Returns True unless it is certain that no process is writing or deleting the folder."""
    if match["host"] == place():
        return runs(int(match["pid"]), match["start"])
    return now is None or now - _last_sign(path) < SILENT


def _last_sign(path: Path) -> float:
    """Returns when a folder or an entry in it last changed, by a write, a rename or a heartbeat."""
    signs = []
    with contextlib.suppress(OSError):
        for entry in [path, *(path.iterdir() if path.is_dir() and not path.is_symlink() else ())]:
            status = entry.lstat()
            signs.append(max(status.st_mtime, status.st_ctime))
    # If the folder vanished meanwhile, its process is at work.
    return max(signs, default=math.inf)


class FolderHeartbeat:
    """Touches a temporary folder every `BEAT` seconds, to tell other hosts that the folder is still being written.

    Attributes:
        began: the time of its creation, on the clock of its file system.
    """

    def __init__(self, folder: Path) -> None:
        self.began = folder.stat().st_mtime
        self._folder = folder
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="leyden-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT):
            try:
                os.utime(self._folder)
            except OSError:
                return

    def stop(self) -> None:
        """Stops the heartbeat. Called before the folder is renamed or removed."""
        self._stopped.set()


def standing(path: Path) -> Path:
    """Returns the path at which a checkpoint, or a link to one, can be read now.

    This is a temporary name if an overwrite that is unfinished, or was killed, has moved the checkpoint aside.

    Returns:
        The temporary name; or `path` itself if it exists, or if no checkpoint was moved aside.
    """
    if path.is_dir():
        return path
    # This also covers a link such as "last" whose target was moved aside.
    target = Path(os.path.realpath(path))
    sweep(target.parent)
    if target.is_dir():
        return path
    return next((aside for aside, name in set_aside(target.parent) if name == target.name), path)


def set_aside(folder: Path) -> list[tuple[Path, str]]:
    """Returns complete checkpoints that an overwrite moved aside, with their original names, if those are free."""
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
    """Sorts names so that the newest comes first, if several checkpoints of one name were moved aside.

    An older one exists if a power failure has undone its removal.
    """

    def counter(name: str) -> int:
        if ".old-" not in name:
            return 0
        try:
            return -read_manifest(folder / name).save_counter
        except (CheckpointError, OSError):
            return 0

    return sorted(names, key=lambda name: (counter(name), name))


def final(path: Path) -> Path:
    """Returns the path of the checkpoint that a temporary sibling belongs to; any other path as it is."""
    match = _PATTERN.fullmatch(path.name)
    return path if match is None else path.with_name(match["name"])


def is_staging(name: str) -> bool:
    """Returns True for the name of a temporary sibling, which is being written or deleted."""
    return _PATTERN.fullmatch(name) is not None


def fsync_folder(folder: Path) -> None:
    """Flushes a folder, so that renames in it survive a power failure. A no-op on Windows, which lacks such a call."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_above(folder: Path) -> None:
    """Flushes the parents of a new folder on its file system, so that the folder survives a power failure.

    Stops at a parent that cannot be flushed, such as another user's folder. It must have existed before.
    """
    with contextlib.suppress(OSError):
        device = folder.stat().st_dev
        for above in folder.parents:
            if above.stat().st_dev != device:
                return
            fsync_folder(above)
