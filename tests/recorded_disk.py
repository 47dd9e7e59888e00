"""Records what a program does to a folder, by strace, as operations on inodes."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

_MARK = "/leyden-committed/"

Inode: TypeAlias = int
ROOT: Inode = 0


@dataclass(frozen=True)
class Entries:
    """Changes to a folder's entries that happen together: name → inode, or None for a removed name."""

    folder: Inode
    names: dict[str, Inode | None]


@dataclass(frozen=True)
class Data:
    """Bytes written into a file."""

    file: Inode
    offset: int
    content: bytes


@dataclass(frozen=True)
class Sync:
    """An fsync of a file or a folder."""

    inode: Inode


@dataclass(frozen=True)
class Committed:
    """The point at which the checkpoint of a step was reported as saved."""

    step: int


Operation: TypeAlias = Entries | Data | Sync | Committed


@dataclass
class Record:
    """Operations in the order of their completion, and what each inode is: a folder, a file, or a link's target."""

    operations: list[Operation] = field(default_factory=list)
    kinds: dict[Inode, Literal["folder", "file"] | str] = field(default_factory=lambda: {ROOT: "folder"})


_CALLS = (
    "openat,open,creat,write,writev,pwrite64,pwritev,pwritev2,fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat,"
    "unlink,unlinkat,rmdir,symlink,symlinkat,link,linkat,truncate,ftruncate,fallocate,copy_file_range,sendfile,"
    "sync_file_range,close,dup,dup2,dup3,fcntl,lseek,access,faccessat,faccessat2"
)


def record(program: Sequence[str], folder: Path) -> Record:
    """Runs a program under strace; records its operations on `folder`, which is empty at first."""
    with tempfile.TemporaryDirectory() as traces:
        command = ["strace", "-f", "-ff", "-ttt", "-T", "-qq", "-xx", "-s", str(2**24), "--seccomp-bpf"]
        command += ["-o", f"{traces}/trace", "-e", f"trace={_CALLS}", *program]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the recorded run failed: {done.stdout}{done.stderr}")
        tracker = _Tracker(folder)
        for call in sorted(itertools.chain(*map(_calls, sorted(Path(traces).iterdir()))), key=lambda call: call.at):
            tracker.take(call)
    return tracker.record


def mark(step: int) -> None:
    """Marks in the record that the checkpoint of a step is reported as saved."""
    os.access(f"{_MARK}{step}", os.F_OK)


@dataclass(frozen=True)
class _Call:
    at: float
    name: str
    arguments: tuple[str, ...]
    result: int

    def number(self, index: int) -> int:
        return int(self.arguments[index], 0)

    def text(self, index: int) -> bytes:
        return bytes.fromhex(self.arguments[index].strip('"').replace("\\x", ""))


_LINE = re.compile(r"(?P<time>[\d.]+) (?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+).*<(?P<took>[\d.]+)>$")


def _calls(trace: Path) -> Iterator[_Call]:
    for line in trace.read_text().splitlines():
        found = _LINE.match(line)
        # A call cut off by the end of the process has no result. A failed call changes nothing; a mark always fails.
        if found is None or (int(found["result"]) < 0 and _MARK.encode().hex(" ").replace(" ", "\\x") not in line):
            continue
        # Another thread may get the descriptor while close() still runs.
        at = float(found["time"]) + (0.0 if found["name"] == "close" else float(found["took"]))
        yield _Call(at, found["name"], tuple(_split(found["arguments"])), int(found["result"]))


def _split(arguments: str) -> list[str]:
    # Strings are in hexadecimal, so every comma outside brackets ends an argument.
    return re.findall(r"(?:\[[^\]]*\]|[^,\[])+", arguments.replace(", ", ","))


class _Tracker:
    """Tracks descriptors and names, to determine the inode of each call."""

    def __init__(self, root: Path) -> None:
        self.record = Record()
        self._root = os.fsencode(os.path.realpath(root))
        self._open: dict[int, Inode] = {}
        self._positions: dict[int, int] = {}
        self._tree: dict[Inode, dict[str, Inode]] = {ROOT: {}}
        self._sizes: dict[Inode, int] = {}

    def take(self, call: _Call) -> None:
        """Records what a call did to the folder."""
        name = call.name.removesuffix("at2").removesuffix("at") if call.name != "creat" else call.name
        at = call.name.endswith(("at", "at2")) and call.name != "creat"
        if name == "access" or name == "facces":
            self._mark(call.text(1 if at else 0))
        elif name == "open":
            self._opened(call, 1 if at else 0)
        elif name == "close":
            self._open.pop(call.number(0), None)
        elif name in ("dup", "dup2", "dup3", "fcntl"):
            if (name != "fcntl" or "F_DUPFD" in call.arguments[1]) and call.number(0) in self._open:
                self._open[call.result] = self._open[call.number(0)]
                self._positions[call.result] = self._positions.get(call.number(0), 0)
        elif name == "lseek":
            self._positions[call.number(0)] = call.result
        elif name in ("fsync", "fdatasync"):
            if call.number(0) in self._open:
                self._add(Sync(self._open[call.number(0)]))
        elif name in ("write", "pwrite64"):
            self._wrote(call)
        elif name in ("mkdir", "rename", "unlink", "rmdir", "symlink"):
            self._renamed(name, call, at)
        elif self._touches(call):
            raise NotImplementedError(f"{call.name} changes the folder in a way that is not supported")

    def _add(self, operation: Operation) -> None:
        self.record.operations.append(operation)
        if isinstance(operation, Entries):
            for name, inode in operation.names.items():
                if inode is None:
                    self._tree[operation.folder].pop(name, None)
                else:
                    self._tree[operation.folder][name] = inode

    def _new(self, kind: str) -> Inode:
        inode = len(self.record.kinds)
        self.record.kinds[inode] = kind
        self._tree[inode] = {}
        return inode

    def _mark(self, path: bytes) -> None:
        if path.startswith(_MARK.encode()):
            self._add(Committed(int(path.rpartition(b"/")[2])))

    def _opened(self, call: _Call, index: int) -> None:
        place = self._place(call, index)
        if place is None:
            return
        folder, name = place
        inode = self._tree[folder].get(name) if name else folder
        flags = call.arguments[index + 1]
        if inode is None:
            if "O_CREAT" not in flags:
                raise NotImplementedError(f"{name} was opened, but no recorded call created it")
            inode = self._new("file")
            self._sizes[inode] = 0
            self._add(Entries(folder, {name: inode}))
        elif "O_TRUNC" in flags or "O_TMPFILE" in flags:
            raise NotImplementedError(f"{name} was truncated, which is not supported")
        self._open[call.result] = inode
        self._positions[call.result] = self._sizes.get(inode, 0) if "O_APPEND" in flags else 0

    def _wrote(self, call: _Call) -> None:
        descriptor = call.number(0)
        if descriptor not in self._open:
            return
        inode, content = self._open[descriptor], call.text(1)[: call.result]
        offset = call.number(3) if call.name == "pwrite64" else self._positions[descriptor]
        if call.name == "write":
            self._positions[descriptor] = offset + call.result
        self._sizes[inode] = max(self._sizes[inode], offset + len(content))
        self._add(Data(inode, offset, content))

    def _renamed(self, name: str, call: _Call, at: bool) -> None:
        first = 1 if at else 0
        if name == "symlink":
            place = self._place(call, first + 1)
            if place is not None:
                self._add(Entries(place[0], {place[1]: self._new(os.fsdecode(call.text(0)))}))
            return
        place = self._place(call, first)
        if name == "rename":
            target = self._place(call, 3 if at else 1)
            if place is None and target is None:
                return
            if place is None or target is None or place[0] != target[0]:
                raise NotImplementedError("a rename from one folder to another is not supported")
            inode = self._tree[place[0]][place[1]]
            self._add(Entries(place[0], {place[1]: None, target[1]: inode}))
        elif place is not None:
            self._add(Entries(place[0], {place[1]: self._new("folder") if name == "mkdir" else None}))

    def _place(self, call: _Call, index: int) -> tuple[Inode, str] | None:
        """Returns the folder and the name that a path argument refers to; None for a path outside."""
        path = call.text(index)
        folder = ROOT
        if path.startswith(self._root + b"/") or path == self._root:
            parts = path[len(self._root) :].split(b"/")
        elif path.startswith(b"/"):
            return None
        else:
            base = call.arguments[index - 1] if index else "AT_FDCWD"
            if base != "AT_FDCWD":
                if int(base) not in self._open:
                    return None
                folder = self._open[int(base)]
            # The program's working folder is the root.
            parts = path.split(b"/")
        names = [os.fsdecode(part) for part in parts if part not in (b"", b".")]
        for name in names[:-1]:
            if name not in self._tree[folder]:
                return None
            folder = self._tree[folder][name]
        return folder, names[-1] if names else ""

    def _touches(self, call: _Call) -> bool:
        first = call.arguments[0]
        descriptors = (int(argument) for argument in call.arguments if argument.isdecimal())
        return (first.startswith('"') and call.text(0).startswith(self._root)) or any(
            descriptor in self._open for descriptor in descriptors
        )
