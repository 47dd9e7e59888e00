"""Processes of this host: which ones are alive, and temporary folders that are deleted once their owner is gone."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from leyden.core.environment import is_running


@functools.cache
def place() -> str:
    """Returns a name for this boot of the host, or for this container, within which process IDs are unique."""
    space = ""
    with contextlib.suppress(OSError):
        space = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    name = re.sub(r"\W", "_", platform.node()) or "host"
    return f"{name}_{hashlib.sha256(space.encode()).hexdigest()[:8]}" if space else name


def started(pid: int) -> str:
    """Returns a process's start time in ticks since boot, which exposes a reused process ID.

    "gone" for a process that has ended, and "0" if there is no such process or no /proc.
    """
    fields = _stat(pid)
    if not fields:
        return "0"
    # A dead process is listed as a zombie until its parent reaps it.
    return "gone" if fields[0] in ("Z", "X") else fields[19]


def processor_seconds(pid: int) -> float:
    """Returns the processor time that a process has used. Infinity if there is no such process, or no /proc."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else math.inf


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/<pid>/stat from the state on. Empty if there is no such process, or no /proc."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def runs(pid: int, start: str) -> bool:
    """Returns True unless the process with this ID and start time has certainly ended."""
    if start != "0" and os.path.isdir("/proc/self"):
        return started(pid) == start
    if os.name == "nt":
        # On Windows, os.kill(pid, 0) would terminate the process.
        return True
    return is_running(pid)


def status_of(pid: int) -> dict[str, str]:
    """Returns the fields of /proc/<pid>/status. Empty if there is no such process, or no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def children(pid: int) -> list[int]:
    """Returns the IDs of a process's children. Empty if the kernel does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Returns the IDs of a process's children, grandchildren and so on."""
    found = children(pid)
    return found + [inner for child in found for inner in descendants(child)]


def available_cpus() -> int:
    """Returns the number of CPUs available to this process, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_each(ranks: int) -> int:
    """Returns the number of CPU threads per rank, for a given number of ranks on this machine."""
    return max(1, available_cpus() // ranks)


@contextlib.contextmanager
def temporary(kind: str) -> Iterator[Path]:
    """Creates a temporary folder for the block, and deletes folders that killed processes left behind."""
    clear_left_behind()
    owner = f"{place()}-{os.getpid()}-{started(os.getpid())}"
    with tempfile.TemporaryDirectory(prefix=f"leyden-{kind}-{owner}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def clear_left_behind() -> None:
    """Deletes the temporary folders of this host's processes that have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"leyden-*-{place()}-*"):
        process, start = path.name.split("-")[-3:-1]
        if process.isdigit() and not runs(int(process), start):
            shutil.rmtree(path, ignore_errors=True)
