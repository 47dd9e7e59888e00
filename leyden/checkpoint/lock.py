"""The lock on the folder of a run that resumes automatically, which keeps a second run out."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from leyden.checkpoint.format import staging
from leyden.checkpoint.format.bucket import BucketPath, Place
from leyden.checkpoint.format.errors import CheckpointError
from leyden.core.environment import hint_of_meeting
from leyden.core.errors import LeydenError
from leyden.core.paths import opener
from leyden.core.rank_zero import inform, to_stderr, warn
from leyden.launch.owner import Owner
from leyden.launch.processes import runs

NAME = ".leyden-lock"
BEAT = 10.0
"""Seconds between two heartbeats of an owner."""
SILENT = 60.0
"""Seconds without a heartbeat after which an owner on another host counts as gone."""
PAUSE = 0.1
"""Seconds to wait while another process is taking over an abandoned lock."""
ELSEWHERE = "Trainer(default_root_dir=…), or ModelCheckpoint(dirpath=…)"
_ENDED = b"ended "
"""Begins the content of an owner that has released its folder, in a bucket."""
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class RunLock(ABC):
    """The lock on a folder of checkpoints: a file that names its owner, which writes to it every few seconds.

    An owner on this host is gone as soon as its process is. An owner on another host, or in another container, is gone
    when it has not written for `silent` seconds, by the storage's clock or while this process watched.

    Args:
        folder: the folder.
        beat: seconds between two heartbeats.
        silent: seconds without a heartbeat after which an owner elsewhere counts as gone.
        elsewhere: the arguments that give a run a folder of its own, for the error of a refused run.

    Attributes:
        folder: the folder.
    """

    def __init__(self, folder: Place, beat: float, silent: float, elsewhere: str) -> None:
        self.folder = folder
        self._beat, self._silent, self._elsewhere = beat, silent, elsewhere
        self._content: bytes | None = None
        """The lock file's content while this process holds the folder; None otherwise."""
        self._released = threading.Event()
        self._writing = threading.RLock()
        """Keeps a heartbeat from writing the lock file again after its release. A finalizer may interrupt a beat."""

    def acquire(self) -> None:
        """Takes the folder. Waits up to `silent` seconds if only missing heartbeats can show that its owner is gone.

        In a read-only folder, it warns and holds no lock.

        Raises:
            LeydenError: if another run holds the folder; names the owner. Also if the lock file is not a plain file.
            CheckpointError: if the lock file cannot be written for another reason.
        """
        content = json.dumps(dataclasses.asdict(Owner.here())).encode()
        try:
            self._prepare()
            while not self._take(self._await_owner_end(), content):
                pass
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise CheckpointError(self.folder / NAME, f"cannot be written: {error.strerror or error}.") from error
            warn(f"{self.folder} is not writable ({error.strerror}), so nothing keeps a second run out of it.")
            return
        self._content = content
        threading.Thread(target=self._keep_alive, name="leyden-lock", daemon=True).start()

    def check_free(self) -> None:
        """Raises if another run holds the folder. Does not take the folder."""
        with self._reads():
            self._await_owner_end()

    def check_held(self) -> None:
        """Raises if another run has taken the folder over, for instance while this process was suspended."""
        with self._reads():
            found = None if self._content is None else self._read()
        if found is not None and found != self._content:
            owner = Owner.read(found.removeprefix(_ENDED))
            raise LeydenError(
                f"{self.folder} was taken over by {owner}, because this process gave no sign of life for "
                f"{self._silent:g} s. That run continues from the last checkpoint, and this one saves no more. End "
                "this run, or give it a folder of its own."
            )

    @contextlib.contextmanager
    def _reads(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(self.folder / NAME, f"cannot be read: {error.strerror or error}.") from error

    @property
    def is_released(self) -> bool:
        """True once `release` has been called: another run may hold the folder."""
        return self._released.is_set()

    def release(self) -> None:
        """Releases the folder, if this process holds it."""
        self._released.set()
        self.drop()

    def drop(self) -> None:
        """Releases the folder from a finalizer, without waiting. The heartbeat's thread ends at its next beat."""
        with self._writing, contextlib.suppress(OSError, LeydenError):
            content, self._content = self._content, None
            if content is not None and self._read() == content:
                self._give_up(content)

    def _read(self) -> bytes | None:
        found = self._read_with_time()
        return None if found is None else found[0]

    def _await_owner_end(self) -> bytes | None:
        """Waits until the lock file's owner is known to be gone.

        Returns:
            The content that the owner left in the lock file, or None if there is no lock file.

        Raises:
            LeydenError: if the owner is alive.
        """
        first, began, announced = self._read_with_time(), time.monotonic(), False
        while (found := self._read_with_time()) is not None and first is not None and not found[0].startswith(_ENDED):
            owner = Owner.read(found[0])
            if owner.is_here:
                if runs(owner.pid, owner.start):
                    raise self._refusal(owner)
                return found[0]
            if found != first and owner.place:
                raise self._refusal(owner)
            now = self._now()
            silence = max(time.monotonic() - began, 0.0 if now is None else now - found[1])
            if silence >= self._silent:
                return found[0]
            if not announced and owner.place:
                announced = True
                inform(
                    f"leyden: {self.folder} was left by {owner}, or is still in use. Waiting up to "
                    f"{self._silent - silence:.0f} s to find out.",
                    to_stderr,
                    every_rank=True,
                )
            time.sleep(min(1.0, self._silent / 10))
        return None

    def _refusal(self, owner: Owner) -> LeydenError:
        mine = owner.pid == os.getpid() and owner.is_here
        return LeydenError(
            f"{self.folder} belongs to a run that is under way: {'this very process' if mine else owner}. A "
            "second run would resume from the same checkpoints. Wait for the first run or stop it, or give this run a "
            f"folder of its own: {self._elsewhere}.{hint_of_meeting()}"
        )

    def _keep_alive(self) -> None:
        """Writes to the lock file at every beat, until the folder is released or another process has taken it."""
        while not self._released.wait(self._beat):
            # A beat that fails now may succeed next time, and only other hosts depend on beats.
            with self._writing, contextlib.suppress(OSError, LeydenError):
                content = self._content
                if content is None:
                    return
                found = self._read()
                if found not in (None, content):
                    return
                # If the lock file was deleted, it is created again.
                self._touch(content, found is None)

    # of a kind of storage ---------------------------------------------------------------------------------------------
    @abstractmethod
    def _prepare(self) -> None:
        """Makes the folder, if it does not exist."""

    @abstractmethod
    def _take(self, abandoned: bytes | None, content: bytes) -> bool:
        """Writes the lock file if it is still as it was read: abandoned with this content, or missing if that is None.

        Returns False if another process was quicker.
        """

    @abstractmethod
    def _give_up(self, content: bytes) -> None:
        """Removes the lock file, which this process holds."""

    @abstractmethod
    def _touch(self, content: bytes, is_gone: bool) -> None:
        """Renews the time of the lock file, which has this content. Creates it if it is gone."""

    @abstractmethod
    def _read_with_time(self) -> tuple[bytes, float] | None:
        """Returns the lock file's content and modification time, or None without a file."""

    @abstractmethod
    def _now(self) -> float | None:
        """Returns the time on the storage's clock; None if the storage is not writable."""


class FolderLock(RunLock):
    """The lock on a folder in a file system; see RunLock.

    The file is created by a hard link, which is atomic on network file systems too, or with O_EXCL if the file system
    has no links.

    Attributes:
        path: the lock file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        beat: float = BEAT,
        silent: float = SILENT,
        elsewhere: str = ELSEWHERE,
    ) -> None:
        super().__init__(Path(folder), beat, silent, elsewhere)
        self.path = Path(folder) / NAME

    def _prepare(self) -> None:
        os.makedirs(self.path.parent, exist_ok=True)

    def _take(self, abandoned: bytes | None, content: bytes) -> bool:
        return self._create(self.path, content) if abandoned is None else self._take_over(abandoned, content)

    def _give_up(self, content: bytes) -> None:
        self.path.unlink()

    def _touch(self, content: bytes, is_gone: bool) -> None:
        if is_gone:
            self._create(self.path, content)
        else:
            os.utime(self.path)

    def _now(self) -> float | None:
        return staging.clock_of(self.path.parent)

    def _create(self, path: Path, content: bytes) -> bool:
        """Creates a file atomically with its content. Returns False if the file exists."""
        if os.path.lexists(path):
            return False
        temporary = self._write_temporary(content)
        try:
            try:
                os.link(temporary, path)
            except FileExistsError:
                pass
            except OSError:
                return self._create_without_link(path, content)
            # NFS may lose the reply to a request that succeeded. The retry then fails with FileExistsError, so only the
            # link count tells whether this process created the file.
            return temporary.stat().st_nlink == 2
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _create_without_link(self, path: Path, content: bytes) -> bool:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with open(file, "wb") as stream:
            stream.write(content)
        return True

    def _write_temporary(self, content: bytes) -> Path:
        """Writes a temporary file. If this process is killed before removing it, a later save clears it."""
        temporary = staging.sibling(self.path, "tmp")
        temporary.write_bytes(content)
        return temporary

    def _take_over(self, abandoned: bytes, content: bytes) -> bool:
        """Takes the lock file over from an owner that is gone. Returns False if another process was quicker.

        A process must first create the claim file for the abandoned content. It may then replace the lock file, if that
        still has the abandoned content.
        """
        claims = self._claim(abandoned, content)
        if not claims:
            time.sleep(PAUSE)
            return False
        # Claims of killed processes are removed only after the lock file is replaced. Before that, another process
        # could create the first claim again.
        removable = claims[-1:]
        try:
            if self._read() != abandoned:
                return False
            os.replace(self._write_temporary(content), self.path)
            removable = claims
            return True
        finally:
            for claim in removable:
                with contextlib.suppress(OSError):
                    claim.unlink()

    def _claim(self, abandoned: bytes, content: bytes) -> list[Path]:
        """Creates the claim file for the abandoned content.

        A claim whose creator was killed is not removed here: two processes might do so at the same time, and the second
        would remove the first one's new claim. Instead, a claim on the dead claim's content is created, and so on.

        Returns:
            The chain of claims, this process's own last. Empty if a live process holds a claim.
        """
        claims: list[Path] = []
        claimed = abandoned
        while True:
            claims.append(self.path.with_name(f"{NAME}-{hashlib.sha256(claimed).hexdigest()[:16]}"))
            if self._create(claims[-1], content):
                return claims
            try:
                with open(claims[-1], "rb", opener=opener) as file:
                    claimed, since = file.read(1 << 16), os.fstat(file.fileno()).st_mtime
            except FileNotFoundError:
                return []
            claimant = Owner.read(claimed)
            now = staging.clock_of(self.path.parent)
            is_silent = now is not None and now - since >= self._silent
            is_alive = runs(claimant.pid, claimant.start) if claimant.is_here else not is_silent
            if is_alive:
                return []

    def _read_with_time(self) -> tuple[bytes, float] | None:
        """Returns the lock file's content and modification time, or None without a file.

        Both are as fresh as NFS allows, which revalidates a file on open.
        """
        try:
            with open(self.path, "rb", opener=opener) as file:
                return file.read(1 << 16), os.fstat(file.fileno()).st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None


class BucketLock(RunLock):
    """The lock on a folder in a bucket; see RunLock.

    Each owner has an object of its own, `.leyden-lock/<n>`, and the one with the highest number holds the folder. The
    next number is taken by a request that fails if the object exists. An owner that ends marks its object, so that one
    that wakes up later does not take the folder for its own.
    """

    def __init__(
        self,
        folder: BucketPath,
        beat: float = 2 * BEAT,
        silent: float = 2 * SILENT,
        elsewhere: str = ELSEWHERE,
    ) -> None:
        super().__init__(folder, beat, silent, elsewhere)
        self._owners = folder / NAME
        self._highest = 0
        """The highest number that was read."""
        self._own = 0
        """The number of this process; 0 before it holds the folder."""

    def _prepare(self) -> None:
        """Warns if the store ignores the condition of a request."""
        probe = self._probe("probe")
        if not probe.create(b"1"):
            raise OSError(f"{probe} has changed while it was written")
        if probe.create(b"2"):
            warn(
                f"{self.folder} is in a store that overwrites an object when asked to create it (If-None-Match), so "
                "two runs that start at the same moment may both take it. Give each run a folder of its own."
            )
        probe.delete([probe])

    def _take(self, abandoned: bytes | None, content: bytes) -> bool:
        number = self._highest + 1
        if not (self._owners / str(number)).create(content):
            return False
        self._own = number
        self._owners.delete([self._owners / str(found) for found in self._numbers() if found < number])
        return self._read() == content

    def _give_up(self, content: bytes) -> None:
        (self._owners / str(self._own)).write_bytes(_ENDED + content)

    def _touch(self, content: bytes, is_gone: bool) -> None:
        (self._owners / str(self._own)).write_bytes(content)

    def _numbers(self) -> list[int]:
        return [int(path.name) for path in self._owners.iterdir() if path.name.isdecimal()]

    def _read_with_time(self) -> tuple[bytes, float] | None:
        self._highest = max(self._numbers(), default=0)
        path = self._owners / str(self._highest)
        written = path.changed() if self._highest else None
        if written is None:
            return None
        return path.read_bytes(1 << 16), written.timestamp()

    def _now(self) -> float | None:
        clock = self._probe("clock")
        clock.write_bytes(b"")
        now = clock.changed()
        clock.delete([clock])
        return None if now is None else now.timestamp()

    def _probe(self, kind: str) -> BucketPath:
        return self._owners / f"{kind}-{secrets.token_hex(8)}"


def lock_on(folder: Place, elsewhere: str = ELSEWHERE) -> RunLock:
    """Returns the lock of a folder."""
    if isinstance(folder, BucketPath):
        return BucketLock(folder, elsewhere=elsewhere)
    return FolderLock(folder, elsewhere=elsewhere)
