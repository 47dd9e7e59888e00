"""The processes of this host: which ones still run, and temporary folders that are cleared once theirs is gone."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from leyden.strategies.launch.environment import is_running


@functools.cache
def place() -> str:
    """Returns a name for this host since boot, or this container, within which a process number is unique."""
    space = ""
    with contextlib.suppress(OSError):
        space = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    name = re.sub(r"\W", "_", platform.node()) or "host"
    return f"{name}_{hashlib.sha256(space.encode()).hexdigest()[:8]}" if space else name


def started(pid: int) -> str:
    """Returns when a process began, in ticks since boot, to recognise a reused number; "0" if there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "0"
    # A killed process is listed as a zombie until its parent collects its status.
    return "gone" if fields[0] in ("Z", "X") else fields[19]


def runs(pid: int, start: str) -> bool:
    """Returns True unless it is certain that the process which began then has ended."""
    if start != "0" and os.path.isdir("/proc/self"):
        return started(pid) == start
    if os.name == "nt":
        # os.kill(pid, 0) would end the process on Windows.
        return True
    return is_running(pid)


def status_of(pid: int) -> dict[str, str]:
    """Returns what /proc says about a process, by name; nothing where there is none, or no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def children(pid: int) -> list[int]:
    """Returns the processes that one has started; none where the kernel does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Returns the processes that one has started, and those that they have."""
    found = children(pid)
    return found + [inner for child in found for inner in descendants(child)]


def available_cpus() -> int:
    """Returns the number of CPUs that this process may use; in a container they can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_each(ranks: int) -> int:
    """Returns the CPU threads of each of so many ranks on this machine."""
    return max(1, available_cpus() // ranks)


@contextlib.contextmanager
def temporary(kind: str) -> Iterator[Path]:
    """A folder of this process that lasts as long as the block. Those that killed processes have left are deleted.

    Args:
        kind: part of its name.
    """
    clear_left_behind()
    owner = f"{place()}-{os.getpid()}-{started(os.getpid())}"
    with tempfile.TemporaryDirectory(prefix=f"leyden-{kind}-{owner}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def clear_left_behind() -> None:
    """Deletes the temporary folders of processes of this host that are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"leyden-*-{place()}-*"):
        process, start = path.name.split("-")[-3:-1]
        if process.isdigit() and not runs(int(process), start):
            shutil.rmtree(path, ignore_errors=True)
