"""Folders that are being written or deleted: temporary siblings, recognised and cleared when their process is gone."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import platform
import re
import secrets
import shutil
import threading
from pathlib import Path
from typing import Literal

from leyden.trainer.format.manifest import MANIFEST

# tmp: being written; old: moved aside by an overwrite that is not done; del: being deleted.
Kind = Literal["tmp", "old", "del"]
BEAT = 30.0
"""Seconds between two signs of life of a writer."""
SILENT = 3600.0
"""Seconds without one after which a writer on another host is gone. One that wakes up later finds its folder missing, and raises."""
_PATTERN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old|del)-(?P<pid>\d+)-(?P<start>\d+)-(?P<host>\w+)-[0-9a-f]{8}")


def sibling(target: Path, kind: Kind) -> Path:
    """A new name beside `target` that tells which process of which host it belongs to."""
    pid = os.getpid()
    return target.with_name(f".{target.name}.{kind}-{pid}-{_started(pid)}-{_host()}-{secrets.token_hex(4)}")


def sweep(folder: Path, now: float | None = None) -> None:
    """Clears what killed processes left in a folder, and puts back what an overwrite had moved aside.

    What a process of this host left is cleared as soon as it is gone. That of another host, or container, is cleared when it has
    given no sign of life for `SILENT` seconds, since its process cannot be seen from here. What cannot be cleared stays: it is
    invisible to readers, and the next writer tries again.

    Args:
        folder: with checkpoints in it.
        now: the time by the clock of the folder's file system, as `Heartbeat` has it; None leaves what is of other hosts.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
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
    """The time by the clock of a folder's file system, for `sweep`; None where nothing can be written."""
    probe = sibling(folder / "clock", "tmp")
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
    except OSError:
        return None
    return now


def _is_alive(path: Path, match: re.Match[str], now: float | None) -> bool:
    """True unless it is certain that nobody writes or deletes it any more."""
    if match["host"] == _host():
        return _runs(int(match["pid"]), match["start"])
    return now is None or now - _last_sign(path) < SILENT


def _last_sign(path: Path) -> float:
    """When something last happened to a folder or what is directly in it: a write, a rename, a heartbeat."""
    signs = []
    with contextlib.suppress(OSError):
        for entry in [path, *(path.iterdir() if path.is_dir() and not path.is_symlink() else ())]:
            status = entry.lstat()
            signs.append(max(status.st_mtime, status.st_ctime))
    # What has just vanished is somebody's who is at work.
    return max(signs, default=math.inf)


class Heartbeat:
    """Shows other hosts that a temporary folder is being written: touches it every `BEAT` seconds until it is stopped.

    Args:
        folder: the folder, which was just made.

    Attributes:
        began: when that was, by the clock of its file system.
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
        """Ends it, before the folder is renamed or removed."""
        self._over.set()


def standing(path: Path) -> Path:
    """Where the checkpoint of a name can be read: there, or aside, while an overwrite of it is not done or was killed.

    Args:
        path: a checkpoint, or a link to one.

    Returns:
        The path itself wherever it is there, and where nothing is.
    """
    if path.is_dir():
        return path
    # Also where a link such as "last" points to nothing now.
    target = Path(os.path.realpath(path))
    sweep(target.parent)
    if target.is_dir():
        return path
    return next((aside for aside, name in set_aside(target.parent) if name == target.name), path)


def set_aside(folder: Path) -> list[tuple[Path, str]]:
    """Whole checkpoints that an overwrite moved aside and whose names are free, with those names."""
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):
            match = _PATTERN.fullmatch(name)
            if match is None or match["kind"] != "old" or os.path.lexists(folder / match["name"]):
                continue
            if (folder / name / MANIFEST).is_file():
                found.append((folder / name, match["name"]))
    return found


def is_staging(name: str) -> bool:
    """True for the name of a folder that is being written or deleted."""
    return _PATTERN.fullmatch(name) is not None


def fsync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power cut. Windows has no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@functools.cache
def _host() -> str:
    """This host since it was booted, or this container: wherever a process number means the same process."""
    space = ""
    with contextlib.suppress(OSError):
        space = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    name = re.sub(r"\W", "_", platform.node()) or "host"
    return f"{name}_{hashlib.sha256(space.encode()).hexdigest()[:8]}" if space else name


def _started(pid: int) -> str:
    """When a process began, in ticks since boot; it tells a reused number apart. "0" where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "0"
    # A killed process stays listed as a zombie until its parent asks for its status.
    return "gone" if fields[0] in ("Z", "X") else fields[19]


def _runs(pid: int, start: str) -> bool:
    if start != "0" and os.path.isdir("/proc/self"):
        return _started(pid) == start
    if os.name == "nt":
        # os.kill(pid, 0) would end the process there; what is left stays until it is deleted by hand.
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
