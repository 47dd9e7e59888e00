"""Runs killed between the commit of a checkpoint and what follows it: the link, deletions, other callbacks' saves."""

from __future__ import annotations

import errno
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killed_saves
import pytest
from killed_saves import KINDS, callbacks, train
from programs import run_program

from leyden.callbacks import ModelCheckpoint
from leyden.callbacks.checkpointing import checkpoint_commit
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import MANIFEST, read_manifest


def names(folder: Path) -> list[str]:
    """Returns the folder's entries, with symlinks as `name -> target`."""
    return sorted(f"{p.name} -> {p.readlink()}" if p.is_symlink() else p.name for p in folder.iterdir())


def contents(folder: Path) -> dict[str, Any]:
    """Returns the files of all checkpoints in a folder, without times and paths."""
    files = (
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in (MANIFEST, "command.json")
    )
    return {str(path.relative_to(folder)): _timeless(path, folder.parent) for path in files}


def _timeless(path: Path, root: Path) -> Any:
    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if "seconds" not in key and key != "doomed"}
        return [strip(item) for item in value] if isinstance(value, list) else value

    return strip(json.loads(path.read_text().replace(str(root), ""))) if path.suffix == ".json" else path.read_bytes()


def kill(kind: str, root: Path, point: str, step: int) -> None:
    done = run_program([killed_saves.__file__, kind, root, point, step])
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("step", [8, 16])
def test_a_resume_points_last_to_the_checkpoint_that_a_kill_left_unlinked(tmp_path: Path, step: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(whole, callbacks("linked", whole))
    kill("linked", cut, "link", step)
    assert f"last -> epoch={step // 4 - 2}-step={step - 4}" in names(cut / "first")
    train(cut, callbacks("linked", cut))
    assert names(cut / "first") == names(whole / "first")


def test_a_resume_of_an_older_checkpoint_leaves_last_at_the_newest(tmp_path: Path) -> None:
    train(tmp_path, [ModelCheckpoint(tmp_path, save_last=True, save_top_k=-1)])
    again = ModelCheckpoint(tmp_path, save_last=True, save_top_k=-1)
    train(tmp_path, [again], ckpt_path=tmp_path / "epoch=0-step=4", max_epochs=1)
    assert "last -> epoch=3-step=16" in names(tmp_path)


@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "linked"])
def test_a_resume_makes_the_saves_that_were_due_in_the_same_hook(tmp_path: Path, kind: str, point: str) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(whole, callbacks(kind, whole))
    kill(kind, cut, point, 8)
    train(cut, callbacks(kind, cut))
    for folder in ("first", "second"):
        assert contents(cut / folder) == contents(whole / folder)


# manifests that cannot be read ----------------------------------------------------------------------------------------
@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], bool]], None]:
    """Returns a function that makes the manifests of some checkpoints unreadable, as EMFILE or ESTALE would."""

    def refuse(is_refused: Callable[[Path], bool]) -> None:
        def read(folder: Path) -> Any:
            if is_refused(folder):
                raise CheckpointError(folder / MANIFEST, "cannot be opened.") from OSError(errno.EMFILE, "too many")
            return read_manifest(folder)

        monkeypatch.setattr(checkpoint_commit, "read_manifest", read)

    return refuse


def test_a_checkpoint_that_could_not_be_identified_is_deleted_at_a_later_save(tmp_path: Path, refused: Any) -> None:
    left = iter([True, True, False])
    refused(lambda folder: "epoch=0" in folder.name and next(left, False))
    with pytest.warns(UserWarning, match=r"epoch=0-step=4.*cannot be opened.*next save tries again"):
        train(tmp_path, [ModelCheckpoint(tmp_path)], max_epochs=3)
    assert names(tmp_path) == ["epoch=2-step=12"]


def test_a_checkpoint_that_could_not_be_compared_is_deleted_at_a_later_save(tmp_path: Path, refused: Any) -> None:
    left = iter([False, True])
    refused(lambda folder: "epoch=0" in folder.name and next(left, False))
    with pytest.warns(UserWarning, match=r"epoch=0-step=4.*cannot be opened.*next save tries again"):
        train(tmp_path, [ModelCheckpoint(tmp_path)], max_epochs=3)
    assert names(tmp_path) == ["epoch=2-step=12"]


def test_a_resume_names_checkpoints_that_were_never_identified(tmp_path: Path, refused: Any) -> None:
    refused(lambda folder: "epoch=0" in folder.name)
    with pytest.warns(UserWarning, match="next save tries again"):
        train(tmp_path, [ModelCheckpoint(tmp_path)], max_epochs=2)
    refused(lambda folder: False)
    with pytest.warns(UserWarning, match=r"epoch=0-step=4 left the ranking, but could not be read then"):
        train(tmp_path, [ModelCheckpoint(tmp_path)], max_epochs=3)
    assert names(tmp_path) == ["epoch=0-step=4", "epoch=2-step=12"]
