"""A checkpoint that is being written: a temporary folder until a rename, or parts in a bucket until their manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import re
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path, PurePath

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.copies import Content, Text
from leyden.checkpoint.folder import is_checkpoint, is_taken
from leyden.checkpoint.format import staging
from leyden.checkpoint.format.bucket import PARALLEL, PART, BucketPath, Place
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import MANIFEST, ChunkHasher, FileEntry, Manifest, read_manifest
from leyden.checkpoint.format.safefile import contents_of, entry_of, write_file
from leyden.checkpoint.format.unflushed import Unflushed

LEFT_BEHIND = timedelta(days=1)
"""Age after which the parts of a save that has no manifest are deleted, where another run may be saving."""
_SAVE_ID = re.compile(r"save-[0-9a-f]{16}")


class Staged(ABC):
    """A checkpoint that several ranks write, and that readers see only once it is committed.

    Attributes:
        target: the path that the checkpoint should get.
        overwrite: whether it may replace a checkpoint there.
    """

    target: Place
    overwrite: bool

    @abstractmethod
    def begin(self) -> str:
        """Makes the place to write in, on the keeper. Returns what the other ranks `join`."""

    @abstractmethod
    def join(self, begun: str) -> None:
        """Enters the place that the keeper has made. All ranks call it, the keeper too.

        Raises:
            CheckpointError: if this rank does not see that place.
        """

    @property
    def planned(self) -> Place:
        """The path that `commit` will give the checkpoint, unless another process takes that name first."""
        return self.target if self.overwrite else free_path(self.target)

    @property
    @abstractmethod
    def folder(self) -> Path:
        """A local folder, for files that user code writes."""

    @abstractmethod
    def found(self, is_first: bool) -> list[str]:
        """Returns the names of the files in `folder` that this rank can add."""

    @abstractmethod
    def add(self, name: str) -> FileEntry:
        """Adds a file of `folder` to the checkpoint."""

    @abstractmethod
    def write(self, name: str, content: Content) -> FileEntry:
        """Writes a file."""

    def flush(self) -> None:
        """Waits until everything that this rank has written survives a power failure."""

    @property
    def save_id(self) -> str:
        """The manifest's entry of that name."""
        return ""

    @abstractmethod
    def commit(self, manifest: Manifest, same_name: bool, check: Callable[[], None]) -> Place:
        """Makes the checkpoint visible, and returns its path.

        Args:
            manifest: the manifest of all files.
            same_name: raise if the target exists, instead of appending a version to its name.
            check: called just before readers can see the checkpoint; raises to prevent it.
        """

    @abstractmethod
    def abort(self, is_keeper: bool) -> None:
        """Removes what was written."""


def free_path(target: Place) -> Place:
    """Returns a checkpoint's path, with the first free version appended if it is taken."""
    return next(path for path in _candidates(target) if not is_taken(path))


def _candidates(target: Place) -> Iterator[Place]:
    """Yields the paths that a checkpoint may get, in order of preference."""
    yield target
    for version in itertools.count(1):
        yield target.with_name(f"{target.name}-v{version}")


class StagedFolder(Staged):
    """A checkpoint in a temporary folder, which a rename commits."""

    def __init__(self, target: Path, overwrite: bool) -> None:
        self.target: Path = target
        self.overwrite = overwrite
        self._unflushed = Unflushed()
        self._heartbeat: staging.FolderHeartbeat | None = None

    def begin(self) -> str:
        target = self.target
        if self.overwrite and os.path.lexists(target) and not _is_replaceable(target):
            what = "is a link" if target.is_symlink() else "is not a checkpoint"
            raise CheckpointError(target, f"{what} and is not overwritten. Choose another path.")
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = staging.sibling(target, "tmp")
        folder.mkdir()
        self._heartbeat = staging.FolderHeartbeat(folder)
        staging.sweep(target.parent, self._heartbeat.began)
        return str(folder)

    def join(self, begun: str) -> None:
        self._folder = Path(begun)
        if not self._folder.is_dir():
            raise CheckpointError(
                self._folder,
                "is not visible to every rank. Save checkpoints in a folder that all machines share, or use "
                "ModelCheckpoint(save_on_each_node=True).",
            )

    @property
    def folder(self) -> Path:
        return self._folder

    def found(self, is_first: bool) -> list[str]:
        # All ranks see the same folder.
        return _files_in(self._folder) if is_first else []

    def add(self, name: str) -> FileEntry:
        return entry_of(self._folder / name)

    def write(self, name: str, content: Content) -> FileEntry:
        path = self._folder / name
        if "/" in name:
            path.parent.mkdir(parents=True, exist_ok=True)
        return content.write(path, self._unflushed)

    def flush(self) -> None:
        self._unflushed.flush()

    def commit(self, manifest: Manifest, same_name: bool, check: Callable[[], None]) -> Place:
        for name, entry in manifest.files.items():
            self._check_size(name, entry)
        parent = self.target.parent
        if not any(is_checkpoint(path) for path in parent.iterdir() if not staging.is_staging(path.name)):
            # This is the run's first checkpoint, so the folders above it may be new as well.
            staging.fsync_above(parent)
        write_file(self._folder / MANIFEST, [manifest.to_bytes()])
        for folder in {self._folder / above for name in manifest.files for above in PurePath(name).parents}:
            staging.fsync_folder(folder)
        self._stop_heartbeat()
        check()
        if self.overwrite and os.path.lexists(self.target):
            return self._replace_target()
        return self._move_into_place(same_name)

    def _check_size(self, name: str, entry: FileEntry) -> None:
        """Raises if this rank does not see the whole file, as when another machine wrote it to its own disk."""
        try:
            size = os.stat(self._folder / name).st_size
        except FileNotFoundError:
            size = 0
        if size != entry.size:
            raise CheckpointError(
                self.target / name,
                f"was written with {entry.size} bytes by another rank, and has {size} on this one. Save checkpoints in "
                "a folder that all machines share.",
            )

    def _move_into_place(self, same_name: bool) -> Path:
        """Renames the folder to the first free name. If another writer takes that name first, tries the next one."""
        if same_name and os.path.lexists(self.target):
            raise CheckpointError(self.target, "exists on this machine, but not on the first one. Remove it.")
        for path in _candidates(self.target):
            if is_taken(path):
                continue
            assert isinstance(path, Path)
            try:
                os.rename(self._folder, path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue
            staging.fsync_folder(path.parent)
            return path
        raise AssertionError("unreachable: itertools.count does not end")

    def _replace_target(self) -> Path:
        """Replaces the old checkpoint with two renames.

        After a kill between them, readers find the old checkpoint under its temporary name, and the next `sweep`
        restores it.
        """
        aside = staging.sibling(self.target, "old")
        os.rename(self.target, aside)
        try:
            os.rename(self._folder, self.target)
        except OSError:
            os.rename(aside, self.target)
            raise
        staging.fsync_folder(self.target.parent)
        shutil.rmtree(aside, ignore_errors=True)
        return self.target

    def abort(self, is_keeper: bool) -> None:
        self._stop_heartbeat()
        self._unflushed.close()
        if is_keeper:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()


class StagedUpload(Staged):
    """A checkpoint in a bucket: its files lie below `<target>/<save id>/`, and its manifest is the commit.

    No object is renamed or written twice but the manifest, which names the save whose files belong to it. A new save
    under the same name therefore replaces the old one in a single request.
    """

    def __init__(self, target: BucketPath, overwrite: bool) -> None:
        self.target: BucketPath = target
        self.overwrite = overwrite
        self._save_id = ""
        self._may_be_visible = False
        """The manifest has been sent, and whether the store has it may be unknown: its files must stay."""
        self._own: Path | None = None
        """Local folder for files of user code; None until it is used."""
        self._pool = ThreadPoolExecutor(PARALLEL, "leyden-upload")
        self._uploads: list[Future[None]] = []
        """Files of JSON that are on their way."""

    @property
    def save_id(self) -> str:
        return self._save_id

    @property
    def planned(self) -> Place:
        # Chosen once, by the keeper: each look is a request.
        return self._path

    def begin(self) -> str:
        return self.begin_at(super().planned)

    def begin_at(self, path: Place) -> str:
        """Returns what all ranks `join` to write a checkpoint that gets this very path."""
        return f"{path}/save-{secrets.token_hex(8)}"

    def join(self, begun: str) -> None:
        self._parts = BucketPath(begun)
        self._save_id = self._parts.name
        self._path = self._parts.parent

    @property
    def folder(self) -> Path:
        if self._own is None:
            self._own = Path(tempfile.mkdtemp(prefix="leyden-save-"))
        return self._own

    def found(self, is_first: bool) -> list[str]:
        return [] if self._own is None else _files_in(self._own)

    def add(self, name: str) -> FileEntry:
        path = self.folder / name
        return write_file(self._parts / name, contents_of(path), size=path.stat().st_size)

    def write(self, name: str, content: Content) -> FileEntry:
        if not isinstance(content, Text):
            return content.write(self._parts / name, Unflushed())
        return self._write_bytes(name, content.data, ChunkHasher())

    def send(self, file: Path, name: str, entry: FileEntry) -> None:
        """Uploads a file of a checkpoint on disk, whose manifest has this entry.

        Raises:
            CheckpointError: if the file is no longer as it was written.
        """
        if entry.size <= PART:
            if len(self._uploads) >= PARALLEL:
                # Without this, all small files would be in memory at once.
                self._uploads.pop(0).result()
            sent = self._write_bytes(name, file.read_bytes(), ChunkHasher(entry.chunk, entry.algorithm))
        else:
            pieces = contents_of(file)
            sent = write_file(self._parts / name, pieces, entry.chunk, entry.algorithm, size=entry.size)
        if sent != entry:
            raise CheckpointError(file, "has changed since it was written, and is not uploaded.")

    def _write_bytes(self, name: str, data: bytes, hasher: ChunkHasher) -> FileEntry:
        """Uploads a small file behind the next ones; see `flush`."""
        path = self._parts / name
        hasher.update(data)
        try:
            self._uploads.append(self._pool.submit(path.write_bytes, data))
        except RuntimeError:
            # The script has ended while a last save is running, and Python no longer starts threads.
            path.write_bytes(data)
        return hasher.entry()

    def flush(self) -> None:
        uploads, self._uploads = self._uploads, []
        for upload in uploads:
            upload.result()

    def commit(self, manifest: Manifest, same_name: bool, check: Callable[[], None]) -> Place:
        path, data = self._path / MANIFEST, manifest.to_bytes()
        self._check_uploaded(manifest)
        replaced = _save_named_in(self._path) if self.overwrite else None
        check()
        self._may_be_visible = True
        if self.overwrite:
            path.write_bytes(data)
        elif not path.create(data):
            self._may_be_visible = False
            raise CheckpointError(
                self._path, "was saved by another process meanwhile, and is kept. Give each run a folder of its own."
            )
        self._end()
        # What cannot be deleted now stays until the next run saves here. The checkpoint is complete.
        with contextlib.suppress(OSError):
            if replaced is not None:
                _delete_below(self._path / replaced)
            if self._path.parent not in _SWEPT:
                sweep(self._path.parent, path.changed())
        return self._path

    def abort(self, is_keeper: bool) -> None:
        self._end()
        if is_keeper and not self._may_be_visible:
            with contextlib.suppress(OSError):
                _delete_below(self._parts)

    def _check_uploaded(self, manifest: Manifest) -> None:
        """Raises if another process has deleted files of this save, as those of a killed one."""
        found = {str(path.relative_to(self._parts)) for path, _ in self._parts.below()}
        for name in sorted(manifest.files.keys() - found):
            raise CheckpointError(
                self._parts / name, "was deleted by another run before the save ended. Give each run its own folder."
            )

    def _end(self) -> None:
        """Ends this rank's work: waits for uploads, and removes the local folder."""
        self._pool.shutdown(cancel_futures=True)
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None


def upload(
    copy: Path,
    manifest: Manifest,
    target: BucketPath,
    ranks: CheckpointRanks,
    overwrite: bool,
    check: Callable[[], None],
) -> BucketPath:
    """Uploads a complete checkpoint from disk. All ranks call it, and each sends a part of the files.

    Every rank sees all of them. `check` is called just before readers can see the checkpoint, and raises to prevent it.

    Raises:
        CheckpointError: on all ranks, if one cannot send its files. The folder stays.
    """
    staged = StagedUpload(target, overwrite)
    staged.join(ranks.first(lambda: staged.begin_at(target)))

    def send() -> None:
        largest_first = sorted(manifest.files.items(), key=lambda file: (-file[1].size, file[0]))
        for name, entry in largest_first[ranks.rank :: ranks.size]:
            staged.send(copy / name, name, entry)
        staged.flush()

    try:
        with _naming(copy, target):
            ranks.each(send)
            ranks.first(lambda: staged.commit(dataclasses.replace(manifest, save_id=staged.save_id), False, check))
    except BaseException:
        staged.abort(ranks.rank == 0)
        raise
    return target


@contextlib.contextmanager
def _naming(copy: Path, target: BucketPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            target, f"cannot be uploaded: {error}. It is complete in {copy}, and the next start here uploads it."
        ) from error


_SWEPT: set[BucketPath] = set()
"""Folders in buckets that this process has swept."""


def sweep(folder: BucketPath, now: datetime | None) -> None:
    """Deletes the files of killed saves from a folder in a bucket.

    Args:
        folder: the folder of checkpoints.
        now: the time on the store's clock: files from the last day may be those of a save that another process is
            writing, and stay. None if no other process saves here.

    Raises:
        OSError: if the bucket cannot be listed.
    """
    _SWEPT.add(folder)
    for checkpoint in folder.iterdir():
        _sweep_checkpoint(checkpoint, now)


def _sweep_checkpoint(checkpoint: BucketPath, now: datetime | None) -> None:
    """Deletes the files of saves that the checkpoint's manifest does not name."""
    found = {path.name for path in checkpoint.iterdir()}
    saves = [name for name in found if _SAVE_ID.fullmatch(name)]
    if MANIFEST in found and len(saves) == 1:
        return
    for save in saves:
        files = list((checkpoint / save).below())
        is_dead = now is None or all(now - written > LEFT_BEHIND for _, written in files)
        if is_dead and not _is_in_use(checkpoint, save):
            checkpoint.delete([path for path, _ in files])


def _delete_below(folder: BucketPath) -> None:
    folder.delete([path for path, _ in folder.below()])


def _save_named_in(checkpoint: BucketPath) -> str | None:
    """Returns the save that the checkpoint's manifest names; None without a readable manifest that names one."""
    try:
        save = read_manifest(checkpoint).save_id
    except CheckpointError:
        return None
    return save if _SAVE_ID.fullmatch(save) else None


def _is_in_use(checkpoint: BucketPath, save: str) -> bool:
    """Returns True unless it is certain that the checkpoint's files are those of another save."""
    try:
        return read_manifest(checkpoint).save_id == save
    except CheckpointError:
        return (checkpoint / MANIFEST).is_file()


def _files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _is_replaceable(path: Path) -> bool:
    """Returns True if `overwrite` may replace the path: a checkpoint or an empty folder."""
    return is_checkpoint(path) or (path.is_dir() and not path.is_symlink() and not os.listdir(path))
