"""Uploads beside the training: one thread, and copies of checkpoints that outlive the checkpoints."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from leyden.strategies.errors import LeydenError
from leyden.trainer.format import staging


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Task:
    """Something to upload.

    Attributes:
        what: in words, for errors.
        run: uploads it.
        end: called once it is uploaded, has failed, or is given up.
        is_needed: its failure is an error; else a warning.
    """

    what: str
    run: Callable[[], None]
    end: Callable[[], None] = _nothing
    is_needed: bool = True

    def carry_out(self) -> None:
        """Uploads it."""
        try:
            self.run()
        finally:
            self.end()


class BackgroundUploads:
    """Carries out uploads in a thread, in their order. The thread lives only while there is work.

    Args:
        owner: the logger's class, for errors.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: deque[Task] = deque()
        """The first one is under way."""
        self._changed = threading.Condition()
        self._is_running = False
        self._failed: list[tuple[Task, Exception]] = []

    def __reduce__(self) -> tuple[type, tuple[str]]:
        # A thread stays in its process: a copy has nothing to do.
        return type(self), (self._owner,)

    def put(self, task: Task) -> None:
        """Adds a task."""
        with self._changed:
            self._tasks.append(task)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._work, name="leyden-uploads", daemon=True).start()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until all is uploaded.

        Args:
            seconds: after which the rest is given up, with a warning; None for no end.
        """
        with self._changed:
            if self._changed.wait_for(lambda: not self._is_running, seconds):
                return
            left = list(self._tasks)
            self._tasks.clear()
        warnings.warn(
            f"{self._owner} has not uploaded {', '.join(task.what for task in left)}: the run was interrupted.",
            stacklevel=3,
        )
        # What is under way ends with the process.
        for task in left[1:]:
            task.end()

    def report(self, raises: bool) -> None:
        """Reports what has failed since the last call.

        Args:
            raises: False for warnings alone, where another error ends the run.

        Raises:
            LeydenError: for the first needed task that failed.
        """
        with self._changed:
            failed, self._failed = self._failed, []
        first: tuple[str, Exception] | None = None
        for task, error in failed:
            words = f"{self._owner} could not upload {task.what}: {type(error).__name__}: {error}"
            if task.is_needed and raises and first is None:
                first = words, error
            else:
                warnings.warn(words, stacklevel=3)
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
            failure: Exception | None = None
            try:
                task.carry_out()
            except Exception as error:
                failure = error
            with self._changed:
                if failure is not None:
                    self._failed.append((task, failure))
                if self._tasks and self._tasks[0] is task:
                    self._tasks.popleft()


class LinkedCopy:
    """A copy of a checkpoint of hard links, which costs no room, and stays when the checkpoint is deleted.

    It is beside the checkpoint, under a name that readers ignore and that is cleared when its process is gone.

    Args:
        checkpoint: its folder.

    Attributes:
        path: of the copy.
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
        """Deletes it."""
        self._heartbeat.stop()
        shutil.rmtree(self.path, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Some file systems have no hard links.
        shutil.copy2(source, target)
