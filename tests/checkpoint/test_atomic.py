"""A checkpoint is complete or absent, after killed writers and full disks alike, and leftovers are cleared."""

from __future__ import annotations

import os
import shutil
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_program

from leyden.checkpoint.folder import all_checkpoints, delete, is_checkpoint, newest
from leyden.checkpoint.format import staging
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import CHUNK, read_manifest
from leyden.checkpoint.format.staging import is_staging
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter

HERE = Path(__file__).parent


def run(code: str, *args: object) -> str:
    """Runs code in a process of its own; returns its standard output."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = run_program(["-c", textwrap.dedent(code), *args], environ={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout


# For n = 0, 1, … a forked child is killed at its n-th file system call; the first child that finishes ends the loop.
# Children are forked so that torch is imported once.
KILLED_AT_EVERY_STEP = """
    import itertools, os, signal, sys, threading
    from pathlib import Path
    from conftest import write
    from leyden.checkpoint.folder import delete

    base, name, action = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    CALLS = set(sys.argv[4:]) or {
        *("open", "write", "flush", "fsync", "__exit__", "mkdir", "rename", "rmdir", "unlink", "listdir", "scandir"),
    }

    def die_at(count):
        # Threads flush files and share the count: next() is atomic in the interpreter.
        steps = itertools.count()
        def before(frame, event, function):
            if event == "c_call" and function.__name__ in CALLS and next(steps) >= count:
                os.kill(os.getpid(), signal.SIGKILL)
        threading.setprofile(before)
        sys.setprofile(before)

    for count in range(1000):
        folder = base / str(count)
        write(folder / "old", 1)
        pid = os.fork()
        if pid == 0:
            die_at(count)
            delete(folder / name) if action == "delete" else write(folder / name, 2, action == "overwrite")
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    print(count)
"""


def visible(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not is_staging(name))


def steps_of(folder: Path, read: Any) -> dict[str, float]:
    """Reads every visible checkpoint in full; returns the step of each."""
    return {name: float(read(folder / name)["model"]["weight"][0, 0]) for name in visible(folder)}


@pytest.mark.parametrize("action", ["new", "overwrite", "delete"])
def test_a_save_or_delete_killed_at_any_call_leaves_only_complete_checkpoints(
    action: str, tmp_path: Path, write: Any, read: Any
) -> None:
    name = "new" if action == "new" else "old"
    count = int(run(KILLED_AT_EVERY_STEP, tmp_path, name, action))
    assert count > (10 if action == "delete" else 60)
    seen = set()
    for number in range(count + 1):
        folder = tmp_path / str(number)
        before = visible(folder)
        found = newest(folder)
        steps = steps_of(folder, read)
        if action == "delete":
            assert steps in ({}, {"old": 1.0})
            assert (found is None) == (not steps)
        elif action == "new":
            assert steps in ({"old": 1.0}, {"old": 1.0, "new": 2.0})
            assert found == folder / ("new" if "new" in steps else "old")
        else:
            assert before in ([], ["old"])
            assert steps in ({"old": 1.0}, {"old": 2.0})
            assert found == folder / "old"
        seen.add(str(steps))
        # The next writer clears the leftovers, and continues the counter.
        highest = max([read_manifest(path).save_counter for path in all_checkpoints(folder)], default=0)
        last = write(folder / "last", 3)
        assert read_manifest(last).save_counter == highest + 1
        assert not [entry for entry in os.listdir(folder) if is_staging(entry)]
        assert newest(folder) == last
    assert len(seen) == 2


def test_opening_a_checkpoint_completes_a_killed_overwrite(tmp_path: Path, read: Any) -> None:
    # Killed only at renames: threads flush files, so a count of all calls may skip a rename.
    count = int(run(KILLED_AT_EVERY_STEP, tmp_path, "old", "overwrite", "rename"))
    aside = [number for number in range(count) if not visible(tmp_path / str(number))]
    assert aside
    for number in aside:
        assert float(read(tmp_path / str(number) / "old")["model"]["weight"][0, 0]) == 1.0


def moved_aside(path: Path) -> Path:
    """Moves a checkpoint aside, as an overwrite leaves it whose host dies between its two renames."""
    aside = path.with_name(f".{path.name}.old-1-1-gone_host-00000000")
    return path.rename(aside)


def test_a_checkpoint_moved_aside_by_another_host_is_found(tmp_path: Path, write: Any, read: Any) -> None:
    """Whether the other host's process is alive is unknown here, so the checkpoint is read where it is."""
    write(tmp_path / "old", 1)
    aside = moved_aside(write(tmp_path / "same", 2))
    assert newest(tmp_path, strict=True) == aside
    assert float(read(tmp_path / "same")["model"]["weight"][0, 0]) == 2.0
    assert aside.is_dir()
    assert read_manifest(write(tmp_path / "next", 3)).save_counter == 3
    write(tmp_path / "same", 4)
    assert float(read(tmp_path / "same")["model"]["weight"][0, 0]) == 4.0
    assert aside not in all_checkpoints(tmp_path)


@pytest.mark.parametrize("host", ["gone_host", staging.place()])
def test_the_newest_of_several_checkpoints_moved_aside_is_read(
    tmp_path: Path, write: Any, read: Any, host: str
) -> None:
    """A power cut may undo the removal of an earlier one."""
    written = [write(tmp_path / f"{value}", value) for value in (1, 2, 3)]
    for path, token in zip(written, ("00000000", "11111111", "0000000a"), strict=True):
        path.rename(tmp_path / f".same.old-1-1-{host}-{token}")
    assert float(read(tmp_path / "same")["model"]["weight"][0, 0]) == 3.0


def test_a_link_to_a_checkpoint_moved_aside_resolves(tmp_path: Path, write: Any, read: Any) -> None:
    (tmp_path / "last").symlink_to("same")
    aside = moved_aside(write(tmp_path / "same", 2))
    assert not (tmp_path / "last").exists()
    assert CheckpointReader(tmp_path / "last").path == aside
    assert float(read(tmp_path / "last")["model"]["weight"][0, 0]) == 2.0


def test_leftovers_of_another_host_are_cleared_once_its_heartbeats_stop(tmp_path: Path, write: Any) -> None:
    aside = moved_aside(write(tmp_path / "same", 1))
    left = tmp_path / ".half.tmp-1-1-gone_host-00000000"
    left.mkdir()
    (left / "part").touch()
    link = tmp_path / ".last.tmp-1-1-gone_host-00000000"
    link.symlink_to("same")
    now = staging.clock_of(tmp_path)
    assert now is not None
    for silent in (None, now, now + staging.SILENT - 60):
        staging.sweep(tmp_path, silent)
        assert aside.exists() and left.exists() and link.is_symlink()
    staging.sweep(tmp_path, now + staging.SILENT + 60)
    assert os.listdir(tmp_path) == ["same"]


def test_a_writer_sends_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BEAT", 0.01)
    with CheckpointWriter(tmp_path / "new") as writer:
        os.utime(writer.folder, (1, 1))
        deadline = time.monotonic() + 60
        while writer.folder.stat().st_mtime == 1:
            assert time.monotonic() < deadline
        writer.commit(progress={})


def test_links_and_files_of_killed_processes_are_cleared(tmp_path: Path, write: Any) -> None:
    script = """
        import os, sys
        from pathlib import Path
        from leyden.checkpoint.format import staging
        os.symlink("x", staging.sibling(Path(sys.argv[1], "last"), "tmp"))
        staging.sibling(Path(sys.argv[1], "metrics.csv"), "tmp").touch()
    """
    run(script, tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    write(tmp_path / "new")
    assert os.listdir(tmp_path) == ["new"]


def test_files_of_a_live_writer_are_kept(tmp_path: Path, write: Any) -> None:
    writer = CheckpointWriter(tmp_path / "slow")
    writer.json("a", 1)
    write(tmp_path / "quick")
    run(
        "import sys; from pathlib import Path; from conftest import write; write(Path(sys.argv[1]))", tmp_path / "other"
    )
    assert writer.commit(progress={}).name == "slow"
    assert CheckpointReader(tmp_path / "slow").json("a") == 1


FULL_DISK = """
    import resource, sys, torch
    from pathlib import Path
    from conftest import read, write
    from leyden.checkpoint.format.errors import CheckpointError
    from leyden.checkpoint.writer import CheckpointWriter

    folder = Path(sys.argv[1])
    old = write(folder / "old", 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    try:
        with CheckpointWriter(folder / "new") as writer:
            writer.json("small", 1)
            writer.model({"weight": torch.ones(1_000_000)})
            writer.commit(progress={})
    except CheckpointError as error:
        assert isinstance(error.__cause__, OSError), error.__cause__
        print(error)
"""


def test_a_full_disk_raises_and_leaves_no_files(tmp_path: Path, read: Any) -> None:
    message = run(FULL_DISK, tmp_path, 100_000)
    assert str(tmp_path / "new" / "model.safetensors") in message
    assert "File too large" in message
    assert "keep fewer checkpoints" in message
    assert os.listdir(tmp_path) == ["old"]
    assert float(read(tmp_path / "old")["model"]["weight"][0, 0]) == 1.0


def test_the_error_for_a_file_in_place_of_a_folder_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"file.*choose another path") as caught:
        CheckpointWriter(tmp_path / "file" / "new")
    assert isinstance(caught.value.__cause__, NotADirectoryError | FileExistsError)
    with pytest.raises(CheckpointError, match="is not a checkpoint and is not overwritten"):
        CheckpointWriter(tmp_path / "file", overwrite=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        CheckpointWriter(tmp_path / "folder", overwrite=True)


def test_the_error_for_a_folder_deleted_during_a_save_names_it(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "runs" / "new")
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(CheckpointError, match="runs/new/a.json: cannot be written: No such file") as caught:
        writer.json("a", 1)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(CheckpointError, match="committed or aborted"):
        writer.json("b", 1)


def test_a_name_is_never_used_twice(tmp_path: Path, write: Any, read: Any) -> None:
    paths = [write(tmp_path / "step=1", step) for step in (1, 2, 3)]
    assert [path.name for path in paths] == ["step=1", "step=1-v1", "step=1-v2"]
    assert [float(read(path)["model"]["weight"][0, 0]) for path in paths] == [1.0, 2.0, 3.0]
    (tmp_path / "taken").mkdir()
    assert write(tmp_path / "taken").name == "taken-v1"


def test_overwrite_replaces_a_checkpoint(tmp_path: Path, write: Any, read: Any) -> None:
    write(tmp_path / "last", 1, overwrite=True)
    assert write(tmp_path / "last", 2, overwrite=True) == tmp_path / "last"
    assert os.listdir(tmp_path) == ["last"]
    assert float(read(tmp_path / "last")["model"]["weight"][0, 0]) == 2.0
    assert read_manifest(tmp_path / "last").save_counter == 2


def test_an_error_in_a_writer_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), CheckpointWriter(tmp_path / "new") as writer:
        writer.json("a", 1)
        raise ZeroDivisionError
    with CheckpointWriter(tmp_path / "new") as writer:
        writer.json("a", 1)
    assert os.listdir(tmp_path) == []


def test_invalid_file_names_and_values_raise(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "new") as writer:
        for name in ("manifest", "../x", "/x", "a//b", "a\\b"):
            with pytest.raises(CheckpointError, match="cannot be written as"):
                writer.json(name, 1)
        writer.json("a", 1)
        with pytest.raises(CheckpointError, match="which exists"):
            writer.state("a", 1)
        with pytest.raises(CheckpointError, match="plain JSON"):
            writer.json("nan", float("nan"))
        writer.json("sub/folder/b.json", [2])
        path = writer.commit(progress={"epoch": 1, "global_step": 2, "x": 3}, world_size=4, strategy="fsdp")
    reader = CheckpointReader(path)
    assert reader.json("sub/folder/b") == [2]
    assert reader.has("a")
    assert reader.has("a.json")
    assert not reader.has("b")
    assert reader.progress() == {"epoch": 1, "global_step": 2, "x": 3}
    assert reader.manifest.progress == {"epoch": 1, "global_step": 2}
    assert (reader.manifest.world_size, reader.manifest.strategy) == (4, "fsdp")
    assert reader.manifest.versions["torch"] == torch.__version__
    assert not reader.optimizers()


def test_a_save_survives_a_change_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with CheckpointWriter("relative") as writer:
        writer.json("a", 1)
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert writer.commit(progress={}) == tmp_path / "relative"


def test_files_of_several_chunks_survive_a_round_trip(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "a": torch.randint(0, 255, (CHUNK + 12345,), dtype=torch.uint8),
        "b": torch.randint(0, 255, (CHUNK // 2,), dtype=torch.uint8),
        "c": torch.randint(0, 255, (CHUNK,), dtype=torch.uint8),
    }
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.model(tensors)
        path = writer.commit(progress={})
    entry = read_manifest(path).files["model.safetensors"]
    assert len(entry.sums) == -(-entry.size // entry.chunk) > 3
    reader = CheckpointReader(path)
    loaded = reader.model()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    # The last byte is in the last chunk, which "a" does not touch.
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert torch.equal(reader.model(["a"])["a"], tensors["a"])
    with pytest.raises(CheckpointError, match="checksum"):
        reader.model(["c"])
    with pytest.raises(CheckpointError, match="checksum"):
        reader.verify()
    reader.verify_sizes()


def test_newest_uses_the_save_counter_and_not_names_or_times(tmp_path: Path, write: Any) -> None:
    paths = [write(tmp_path / name, step) for step, name in enumerate(("z", "m", "a"), 1)]
    os.utime(paths[0], (2**31, 2**31))
    assert newest(tmp_path) == paths[2]
    assert all_checkpoints(tmp_path) == paths
    assert [read_manifest(path).save_counter for path in paths] == [1, 2, 3]


def test_newest_is_none_without_a_checkpoint_and_raises_if_all_are_damaged(tmp_path: Path, write: Any) -> None:
    assert newest(tmp_path / "none", strict=True) is None
    (tmp_path / "notes").mkdir()
    assert newest(tmp_path, strict=True) is None
    damaged = write(tmp_path / "c")
    (damaged / "rank-0.json").write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"rank-0\.json"):
        assert newest(tmp_path) is None
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match=r"only damaged.*rank-0\.json"):
        newest(tmp_path, strict=True)


def test_delete_accepts_only_checkpoints(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / "c")
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(path)
    for other in (tmp_path / "mine", tmp_path / "link", tmp_path / "none"):
        with pytest.raises(CheckpointError, match="not deleted"):
            delete(other)
    assert is_checkpoint(path)
    delete(path)
    assert sorted(os.listdir(tmp_path)) == ["link", "mine"]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Records in order which file or folder is flushed, renamed (with its new name) or removed."""
    seen: list[tuple[str, str]] = []
    fsync, rename, unlink = os.fsync, os.rename, os.unlink

    def flushed(descriptor: int) -> None:
        seen.append(("flush", os.path.realpath(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(old: Any, new: Any, **kwargs: Any) -> None:
        seen.append(("rename", os.path.basename(new)))
        rename(old, new, **kwargs)

    def unlinked(path: Any, **kwargs: Any) -> None:
        seen.append(("unlink", os.path.basename(path)))
        unlink(path, **kwargs)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "unlink", unlinked)
    return seen


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open files are read from /proc")
def test_files_are_flushed_before_the_rename_and_renamed_before_removal(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    """Across a power cut, only the flushes between them order renames and removals."""
    with CheckpointWriter(tmp_path / "saved") as writer:
        writer.model({"weight": torch.ones(4, 3)})
        writer.state("user", {"names": torch.arange(3)})
        path = writer.commit(progress={})
    named = events.index(("rename", "saved"))
    before = [name for kind, name in events[:named] if kind == "flush"]
    files = {file for file in path.rglob("*") if file.is_file()}
    assert {os.path.basename(name) for name in before} >= {file.name for file in files}
    staged = os.path.dirname(next(name for name in before if name.endswith("manifest.json")))
    assert before[-1] == staged and events[named + 1 :] == [("flush", str(tmp_path.resolve()))]

    events.clear()
    delete(path)
    kinds = [kind for kind, _ in events]
    assert kinds[:2] == ["rename", "flush"] and events[1] == ("flush", str(tmp_path.resolve()))
    assert set(kinds[2:]) == {"unlink"} and len(kinds) == 2 + len(files)
