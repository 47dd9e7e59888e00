"""Background uploads: a worker thread, and hard-link copies that outlive the checkpoints they copy."""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from leyden.checkpoint.format import staging
from leyden.core.errors import LeydenError
from leyden.core.rank_zero import warn


@dataclass(frozen=True, slots=True)
class Task:
    """An upload to perform."""

    what: str
    """A description of the upload, for error messages."""
    run: Callable[[], None]
    end: Callable[[], None] = lambda: None
    """Called when the upload has succeeded, failed, or been abandoned."""
    is_needed: bool = True
    """Whether a failure is an error; otherwise it is a warning."""

    def carry_out(self) -> None:
        try:
            self.run()
        finally:
            self.end()


class BackgroundUploads:
    """Performs uploads in a background thread, in order. The thread lives only while there is work.

    Error messages name the owner, the class of the logger.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: deque[Task] = deque()
        """Pending tasks. The first one is in progress."""
        self._changed = threading.Condition()
        self._is_running = False
        self._failed: list[tuple[Task, Exception]] = []

    def __reduce__(self) -> tuple[type, tuple[str]]:
        # Threads do not cross processes, so a copy starts without tasks.
        return type(self), (self._owner,)

    def put(self, task: Task) -> None:
        with self._changed:
            self._tasks.append(task)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._work, name="leyden-uploads", daemon=True).start()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until all uploads have finished. After a timeout, the remaining ones are abandoned with a warning."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._is_running, seconds):
                return
            abandoned = list(self._tasks)
            self._tasks.clear()
        warn(f"{self._owner} did not upload {', '.join(task.what for task in abandoned)}: the run was interrupted.")
        # The first one is in progress, and ends with the process.
        for task in abandoned[1:]:
            task.end()

    def report(self, raises: bool) -> None:
        """Reports the uploads that failed since the last call.

        It only warns if another error already ends the run.

        Raises:
            LeydenError: for the first failed task with `is_needed`.
        """
        with self._changed:
            failed, self._failed = self._failed, []
        first: tuple[str, Exception] | None = None
        for task, error in failed:
            message = f"{self._owner} could not upload {task.what}: {type(error).__name__}: {error}"
            if task.is_needed and raises and first is None:
                first = message, error
            else:
                warn(message)
        if first is not None:
            raise LeydenError(first[0]) from first[1]

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._tasks:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                task = self._tasks[0]
            try:
                task.carry_out()
            except Exception as error:
                with self._changed:
                    self._failed.append((task, error))
            with self._changed:
                if self._tasks and self._tasks[0] is task:
                    self._tasks.popleft()


class LinkedCopy:
    """A copy of a checkpoint made of hard links: it takes no disk space, and outlives the checkpoint.

    The copy lies next to the checkpoint, at `path`, a temporary name. Readers ignore it, and it is swept once its
    process has ended.
    """

    def __init__(self, checkpoint: str | os.PathLike[str]) -> None:
        source = Path(os.path.realpath(checkpoint))
        self.path = staging.sibling(source, "tmp")
        self.path.mkdir()
        self._heartbeat = staging.FolderHeartbeat(self.path)
        try:
            shutil.copytree(source, self.path, copy_function=_link, dirs_exist_ok=True)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        self._heartbeat.stop()
        shutil.rmtree(self.path, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        # The file system does not support hard links.
        shutil.copy2(source, target)
