"""A run that continues by itself holds its folder alone: the lock that keeps a second one out."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import getpass
import hashlib
import json
import os
import platform
import secrets
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from leyden.strategies.errors import LeydenError
from leyden.strategies.launch.processes import place, runs, started
from leyden.trainer.format import staging
from leyden.trainer.format.errors import CheckpointError

NAME = ".leyden-lock"
BEAT = 10.0
"""Seconds between two signs of life of an owner."""
SILENT = 60.0
"""Seconds without one after which an owner on another host counts as gone."""
PAUSE = 0.1
"""Seconds between two looks at a lock that may be given up."""
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds a folder.

    Attributes:
        token: differs between all that ever held one.
        pid: its number.
        start: when it began, by which a reused number is recognised.
        place: the host since its boot, or the container, within which the number counts.
        host: name of the host.
        user: whose it is.
        script: what it runs.
        job: its job of SLURM; "" without one.
        since: when it took the folder.
    """

    token: str = ""
    pid: int = 0
    start: str = ""
    place: str = ""
    host: str = "?"
    user: str = "?"
    script: str = "?"
    job: str = ""
    since: str = "?"

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        pid, user = os.getpid(), "?"
        with contextlib.suppress(KeyError, OSError):
            # A container may run a number that has no name.
            user = getpass.getuser()
        script, job = os.path.basename(sys.argv[0]) or "python", os.environ.get("SLURM_JOB_ID", "")
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        return cls(secrets.token_hex(8), pid, started(pid), place(), platform.node(), user, script, job, since)

    @classmethod
    def read(cls, content: bytes) -> Owner:
        """The owner that wrote a lock; one without a place if it is half written or somebody else's file."""
        try:
            found = json.loads(content)
            values = {field.name: found[field.name] for field in dataclasses.fields(cls)}
        except (ValueError, KeyError, TypeError):
            return cls()
        sound = all(isinstance(value, int if name == "pid" else str) for name, value in values.items())
        return cls(**values) if sound else cls()

    @property
    def is_here(self) -> bool:
        """True if this host can tell whether it runs."""
        return self.place == place()

    def __str__(self) -> str:
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} of {self.user} on {self.host} ({self.script}{job}), since {self.since}"


class FolderLock:
    """The lock of a folder of checkpoints: a file with its owner, which the owner touches every few seconds.

    The file appears by a hard link, which is atomic on network file systems too; where there are no links, by O_EXCL.
    An owner on this host is gone as soon as its process is. One on another host, or in another container, is gone when
    it has not touched the file for `silent` seconds, by the file system's own clock or while this process watched.

    Args:
        folder: the folder; it is made if it is not there.
        beat: seconds between two signs of life.
        silent: seconds without one after which an owner elsewhere counts as gone.
        elsewhere: how a run gets a folder of its own, for the one that is refused.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        beat: float = BEAT,
        silent: float = SILENT,
        elsewhere: str = "Trainer(default_root_dir=…), or ModelCheckpoint(dirpath=…)",
    ) -> None:
        self.path = Path(folder) / NAME
        self._beat, self._silent, self._elsewhere = beat, silent, elsewhere
        self._content: bytes | None = None
        """What this process wrote; None while it does not hold the folder."""
        self._over = threading.Event()

    # for a run --------------------------------------------------------------------------------------------------------
    def acquire(self) -> None:
        """Takes the folder, waiting for at most `silent` seconds where only silence shows that its owner is gone.

        Raises:
            LeydenError: if another run holds it; names the owner.
            CheckpointError: if the file cannot be written, unless the folder is read-only: then nothing is held, with a
                warning.
        """
        content = json.dumps(dataclasses.asdict(Owner.here())).encode()
        try:
            os.makedirs(self.path.parent, exist_ok=True)
            while not self._create(self.path, content):
                before = self._await_end()
                if before is not None and self._replace(before, content):
                    break
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise CheckpointError(self.path, f"cannot be written: {error.strerror or error}.") from error
            warnings.warn(
                f"{self.path.parent} cannot be written to ({error.strerror}), so nothing keeps a second run out of it.",
                stacklevel=2,
            )
            return
        self._content = content
        threading.Thread(target=self._touch, name="leyden-lock", daemon=True).start()

    def check_free(self) -> None:
        """Raises if another run holds the folder; takes nothing."""
        self._await_end()

    def check_held(self) -> None:
        """Raises if another run has taken the folder since, for instance while this process slept."""
        found = None if self._content is None else self._read()
        if found is not None and found != self._content:
            raise LeydenError(
                f"{self.path.parent} was taken over by {Owner.read(found)}, since this process gave no sign of life "
                f"for {self._silent:g} s. That run continues from the last checkpoint, and this one saves no more: end "
                "it, or give it a folder of its own."
            )

    def release(self) -> None:
        """Gives the folder up, if this process holds it."""
        self._over.set()
        self.drop()

    def drop(self) -> None:
        """The same for a finalizer, which must wait for nothing: the thread ends with its next sign of life."""
        content, self._content = self._content, None
        if content is not None and self._read() == content:
            with contextlib.suppress(OSError):
                self.path.unlink()

    # the file ---------------------------------------------------------------------------------------------------------
    def _create(self, path: Path, content: bytes) -> bool:
        """Makes a file with its content at once; False if there is one."""
        if os.path.lexists(path):
            return False
        written = self._written(content)
        try:
            try:
                os.link(written, path)
            except FileExistsError:
                pass
            except OSError:
                return self._create_without_link(path, content)
            # An answer of NFS may get lost, and the repeated request finds the link there.
            return written.stat().st_nlink == 2
        finally:
            with contextlib.suppress(OSError):
                written.unlink()

    def _create_without_link(self, path: Path, content: bytes) -> bool:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with open(file, "wb") as stream:
            stream.write(content)
        return True

    def _written(self, content: bytes) -> Path:
        """A temporary file with this content, which a later save clears if this process is killed here."""
        written = staging.sibling(self.path, "tmp")
        written.write_bytes(content)
        return written

    def _replace(self, before: bytes, content: bytes) -> bool:
        """Takes the file over from an owner that is gone; False if another process has been quicker.

        Whoever makes the claim alone may replace the file, and only while it still holds what the claim is for.
        """
        claims = self._claim(before, content)
        if not claims:
            time.sleep(PAUSE)
            return False
        # Those of the killed go once the file is replaced: before that, another process could claim the first again.
        over = claims[-1:]
        try:
            if self._read() != before:
                return False
            os.replace(self._written(content), self.path)
            over = claims
            return True
        finally:
            for claim in over:
                with contextlib.suppress(OSError):
                    claim.unlink()

    def _claim(self, before: bytes, content: bytes) -> list[Path]:
        """Makes the claim for what the file holds; returns it and those that were left, nothing if another has it.

        A claim whose maker was killed is not removed, as two processes might do so at once, and the second one remove
        the claim of the first: the claim that counts is then the one for its content.
        """
        claims: list[Path] = []
        claimed = before
        while True:
            claims.append(self.path.with_name(f"{NAME}-{hashlib.sha256(claimed).hexdigest()[:16]}"))
            if self._create(claims[-1], content):
                return claims
            try:
                with open(claims[-1], "rb") as file:
                    claimed, since = file.read(1 << 16), os.fstat(file.fileno()).st_mtime
            except FileNotFoundError:
                return []
            maker = Owner.read(claimed)
            now = staging.clock_of(self.path.parent)
            is_silent = now is not None and now - since >= self._silent
            if runs(maker.pid, maker.start) if maker.is_here else not is_silent:
                return []

    def _read(self) -> bytes | None:
        found = self._look()
        return None if found is None else found[0]

    def _look(self) -> tuple[bytes, float] | None:
        """The file's content and time, both as new as an open brings them on NFS; None without a file."""
        try:
            with open(self.path, "rb") as file:
                return file.read(1 << 16), os.fstat(file.fileno()).st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None

    # its owner --------------------------------------------------------------------------------------------------------
    def _await_end(self) -> bytes | None:
        """Returns what the file holds when its owner is known to be gone, None if it is gone itself.

        Raises:
            LeydenError: if the owner lives.
        """
        first, began, announced = self._look(), time.monotonic(), False
        while (found := self._look()) is not None and first is not None:
            owner = Owner.read(found[0])
            if owner.is_here:
                if runs(owner.pid, owner.start):
                    raise self._refusal(owner)
                return found[0]
            if found != first and owner.place:
                raise self._refusal(owner)
            now = staging.clock_of(self.path.parent)
            silence = max(time.monotonic() - began, 0.0 if now is None else now - found[1])
            if silence >= self._silent:
                return found[0]
            if not announced and owner.place:
                announced = True
                print(
                    f"leyden: {self.path.parent} was left by {owner}, or is still in use: this is known in at most "
                    f"{self._silent - silence:.0f} s.",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(min(1.0, self._silent / 10))
        return None

    def _refusal(self, owner: Owner) -> LeydenError:
        mine = owner.pid == os.getpid() and owner.is_here
        return LeydenError(
            f"{self.path.parent} belongs to a run that is under way: {'this very process' if mine else owner}. One run "
            "continues there, and a second one would continue the same: wait for its end, or stop it. A run of another "
            f"kind needs a folder of its own: {self._elsewhere}."
        )

    def _touch(self) -> None:
        while not self._over.wait(self._beat):
            content = self._content
            if content is None:
                return
            # What fails now may work next time, and silence only matters elsewhere.
            with contextlib.suppress(OSError):
                found = self._read()
                if found == content:
                    os.utime(self.path)
                elif found is None:
                    # Somebody has cleaned up.
                    self._create(self.path, content)
                else:
                    return
