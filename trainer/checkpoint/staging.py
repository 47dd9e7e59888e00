"""Folders that are being written or deleted: temporary siblings, recognised and cleared when their process is gone."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import shutil
from pathlib import Path
from typing import Literal

from leyden.trainer.checkpoint.manifest import MANIFEST

# tmp: being written; old: moved aside by an overwrite that is not done; del: being deleted.
Kind = Literal["tmp", "old", "del"]
_PATTERN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old|del)-(?P<pid>\d+)-(?P<start>\d+)-(?P<host>\w+)-[0-9a-f]{8}")


def sibling(target: Path, kind: Kind) -> Path:
    """A new name beside `target` that tells which process of which host it belongs to."""
    pid = os.getpid()
    return target.with_name(f".{target.name}.{kind}-{pid}-{_started(pid)}-{_host()}-{secrets.token_hex(4)}")


def sweep(folder: Path) -> None:
    """Clears what killed processes of this host left in a folder, and puts back what an overwrite had moved aside.

    What cannot be cleared stays: it is invisible to readers, and the next writer tries again.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        match = _PATTERN.fullmatch(name)
        if match is None or match["host"] != _host() or _runs(int(match["pid"]), match["start"]):
            continue
        left, target = folder / name, folder / match["name"]
        if match["kind"] == "old" and (left / MANIFEST).is_file() and not os.path.lexists(target):
            with contextlib.suppress(OSError):
                os.rename(left, target)
            continue
        shutil.rmtree(left, ignore_errors=True)


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


def _host() -> str:
    return re.sub(r"\W", "_", platform.node()) or "host"


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
