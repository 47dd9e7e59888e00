"""Background uploads: their order, their failures, and copies that outlive a checkpoint."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from pathlib import Path

import pytest

from leyden.callbacks.loggers.background_uploads import BackgroundUploads, LinkedCopy, Task
from leyden.checkpoint.format.staging import is_staging
from leyden.core.errors import LeydenError


def test_tasks_run_in_order_in_the_background() -> None:
    uploads, go, done = BackgroundUploads("MyLogger"), threading.Event(), []

    def first() -> None:
        assert go.wait(60)
        done.append(("first", threading.current_thread().name))

    uploads.put(Task("first", first, lambda: done.append("end")))
    uploads.put(Task("second", lambda: done.append("second")))
    assert done == []
    go.set()
    uploads.wait()
    assert done == [("first", "leyden-uploads"), "end", "second"]
    # The thread has ended; the next task starts another.
    uploads.put(Task("third", lambda: done.append("third")))
    uploads.wait()
    uploads.report(raises=True)
    assert done[-1] == "third"
    copy = pickle.loads(pickle.dumps(uploads))
    copy.put(Task("fourth", lambda: done.append("fourth")))
    copy.wait()
    assert done[-1] == "fourth"


def test_a_failure_is_reported_once_and_does_not_stop_other_tasks() -> None:
    uploads, done = BackgroundUploads("MyLogger"), []

    def fails() -> None:
        raise OSError("no network")

    for needed in (False, True, True):
        uploads.put(Task("a file", fails, lambda: done.append("end"), is_needed=needed))
    uploads.put(Task("another", lambda: done.append("another")))
    uploads.wait()
    with (
        pytest.warns(UserWarning, match="MyLogger could not upload a file: OSError: no network") as warned,
        pytest.raises(LeydenError, match="MyLogger could not upload a file: OSError: no network"),
    ):
        uploads.report(raises=True)
    assert len(warned) == 2 and done == ["end", "end", "end", "another"]
    uploads.report(raises=True)
    uploads.put(Task("a file", fails))
    uploads.wait()
    with pytest.warns(UserWarning, match="could not upload"):
        uploads.report(raises=False)


def test_an_interrupted_run_abandons_pending_uploads_with_a_warning() -> None:
    uploads, go, done = BackgroundUploads("MyLogger"), threading.Event(), []
    uploads.put(Task("one", lambda: done.append(go.wait(60)), lambda: done.append("end of one")))
    uploads.put(Task("two", lambda: done.append("two"), lambda: done.append("end of two")))
    with pytest.warns(UserWarning, match="MyLogger did not upload one, two: the run was interrupted"):
        uploads.wait(0.01)
    assert done == ["end of two"]
    go.set()
    uploads.wait()
    assert done == ["end of two", True, "end of one"]


@pytest.mark.parametrize("links", [True, False])
def test_a_linked_copy_outlives_its_checkpoint(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "step=1"
    (folder / "inner").mkdir(parents=True)
    (folder / "a").write_text("a")
    (folder / "inner/b").write_text("b")
    (tmp_path / "last").symlink_to(folder)
    if not links:

        def refused(source: str, target: str) -> None:
            raise PermissionError("no hard links here")

        monkeypatch.setattr(os, "link", refused)
    copy = LinkedCopy(tmp_path / "last")
    assert ((folder / "a").stat().st_ino == (copy.path / "a").stat().st_ino) is links
    shutil.rmtree(folder)
    assert copy.path.parent == tmp_path and is_staging(copy.path.name)
    assert ((copy.path / "a").read_text(), (copy.path / "inner/b").read_text()) == ("a", "b")
    copy.remove()
    assert os.listdir(tmp_path) == ["last"]
    with pytest.raises(OSError, match="missing"):
        LinkedCopy(tmp_path / "missing")
    assert os.listdir(tmp_path) == ["last"]
