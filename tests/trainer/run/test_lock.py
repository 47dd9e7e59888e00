"""The lock of a checkpoint folder: it keeps a second run out, and a dead run's lock is taken over."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SAVED, Line
from programs import run_in_fork
from ranks.world import run_world

from leyden import Callback, LeydenError, Trainer
from leyden.callbacks import ModelCheckpoint
from leyden.checkpoint.folder import all_checkpoints
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.lock import NAME, FolderLock, Owner

RANK = int(os.environ.get("RANK", "0"))
QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 1}


def write(folder: Path, age: float = 0.0, **fields: Any) -> Path:
    """Writes the lock of another process, by default one on another host; returns the folder."""
    owner = dataclasses.replace(Owner.here(), **{"place": "elsewhere", "host": "gpu7", "user": "ada", **fields})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(json.dumps(dataclasses.asdict(owner)))
    then = (folder / NAME).stat().st_mtime - age
    os.utime(folder / NAME, (then, then))
    return folder


def owner_of(folder: Path) -> Owner:
    return Owner.read((folder / NAME).read_bytes())


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[FolderLock]:
    folder_lock = FolderLock(tmp_path)
    yield folder_lock
    folder_lock.release()


# the lock file --------------------------------------------------------------------------------------------------------
def test_a_folder_stays_locked_until_it_is_released(lock: FolderLock, tmp_path: Path) -> None:
    lock.acquire()
    assert owner_of(tmp_path).pid == os.getpid()
    with pytest.raises(LeydenError, match=r"belongs to a run that is under way: this very process.*default_root_dir"):
        FolderLock(tmp_path).acquire()
    with pytest.raises(LeydenError, match="belongs to a run"):
        FolderLock(tmp_path).check_free()
    assert run_in_fork(FolderLock(tmp_path).acquire) == 1
    lock.release()
    lock.release()
    assert os.listdir(tmp_path) == []
    FolderLock(tmp_path).check_free()


def test_the_lock_of_a_killed_local_process_is_taken_over_at_once(lock: FolderLock, tmp_path: Path) -> None:
    def killed() -> None:
        FolderLock(tmp_path).acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    assert run_in_fork(killed) == -signal.SIGKILL
    assert owner_of(tmp_path).pid != os.getpid()
    lock.acquire()
    assert owner_of(tmp_path).pid == os.getpid()
    assert os.listdir(tmp_path) == [NAME]


def test_a_reused_pid_does_not_keep_a_dead_owners_lock(lock: FolderLock, tmp_path: Path) -> None:
    here = Owner.here()
    write(tmp_path, place=here.place, start=str(int(here.start) - 1))
    lock.acquire()
    assert owner_of(tmp_path).start == here.start


def test_an_owner_with_the_same_pid_in_another_container_expires_without_heartbeats(tmp_path: Path) -> None:
    write(tmp_path, place=f"{Owner.here().place}_other")
    # Pid and start time are those of this live process, but the other container cannot be inspected.
    taken = FolderLock(tmp_path, silent=0.05)
    taken.acquire()
    assert owner_of(tmp_path).place == Owner.here().place
    taken.release()


def test_another_hosts_lock_is_taken_over_once_its_heartbeats_stop(
    lock: FolderLock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, age=3600.0)
    lock.acquire()
    lock.release()
    # No wait, so no message.
    assert capsys.readouterr().err == ""
    write(tmp_path, job="17")
    short = FolderLock(tmp_path, silent=0.2)
    short.acquire()
    assert "was left by process" in capsys.readouterr().err
    short.release()


def test_a_lock_dated_in_the_future_still_expires(lock: FolderLock, tmp_path: Path) -> None:
    # Written by a host whose clock is an hour ahead: its silence is timed here.
    write(tmp_path, age=-3600.0)
    ahead = FolderLock(tmp_path, silent=0.2)
    ahead.acquire()
    ahead.release()


def test_a_lock_with_heartbeats_from_another_host_is_not_taken_over(tmp_path: Path) -> None:
    write(tmp_path, job="17", script="train.py")
    stop = threading.Event()

    def beat() -> None:
        count = 0
        while not stop.wait(0.01):
            count += 1
            os.utime(tmp_path / NAME, (count, count))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(LeydenError, match=r"of ada on gpu7 \(train.py, SLURM job 17\), since"):
            FolderLock(tmp_path, silent=1e12).acquire()
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff\xfe", json.dumps({"token": 1}).encode()])
def test_an_old_half_written_lock_is_taken_over(content: bytes, lock: FolderLock, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(content)
    os.utime(tmp_path / NAME, (0, 0))
    lock.acquire()
    assert owner_of(tmp_path).pid == os.getpid()


def test_the_claim_of_a_killed_process_is_cleared(tmp_path: Path) -> None:
    write(tmp_path, age=3600.0)
    lock = FolderLock(tmp_path, silent=0.2)
    claim = tmp_path / f"{NAME}-{hashlib.sha256((tmp_path / NAME).read_bytes()).hexdigest()[:16]}"
    claim.touch()
    os.utime(claim, (0, 0))
    lock.acquire()
    assert os.listdir(tmp_path) == [NAME]
    lock.release()


def be_killed_with_a_claim(folder: Path) -> None:
    """Starts to take over the folder, and is killed between making its claim and replacing the lock."""
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,misc]
    FolderLock(folder, silent=3600.0).acquire()


def test_claims_of_killed_local_processes_delay_no_takeover(tmp_path: Path) -> None:
    assert run_in_fork(lambda: FolderLock(tmp_path).acquire()) == 0
    for claims in (1, 2):
        assert run_in_fork(lambda: be_killed_with_a_claim(tmp_path)) == -signal.SIGKILL
        assert len([name for name in os.listdir(tmp_path) if name.startswith(f"{NAME}-")]) == claims
    lock = FolderLock(tmp_path, silent=3600.0)
    lock.acquire()
    assert owner_of(tmp_path).pid == os.getpid()
    assert [name for name in os.listdir(tmp_path) if name.startswith(NAME)] == [NAME]
    lock.release()


@pytest.mark.parametrize(
    ("has_dead_owner", "stale_claims"),
    [(False, 0), (True, 0), (True, 2)],
    ids=["free folder", "dead owner", "dead owner and stale claims"],
)
def test_exactly_one_of_many_concurrent_processes_gets_the_lock(
    has_dead_owner: bool, stale_claims: int, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if has_dead_owner:
        write(folder, age=3600.0)
    for _ in range(stale_claims):
        run_in_fork(lambda: be_killed_with_a_claim(folder))
    start, end = os.pipe(), os.pipe()
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            os.close(start[1])
            os.close(end[1])
            os.read(start[0], 1)
            code = 1
            try:
                FolderLock(folder).acquire()
                code = 0
            except LeydenError:
                pass
            (tmp_path / str(number)).touch()
            # The owner stays alive until all have tried.
            os.read(end[0], 1)
            os._exit(code)
        children.append(child)
    os.close(start[1])
    while len(os.listdir(tmp_path)) < 9:
        os.sched_yield()
    os.close(end[1])
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(codes) == [0] + [1] * 7
    assert [name for name in os.listdir(folder) if name.startswith(NAME)] == [NAME]


def test_locking_works_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    lock = FolderLock(tmp_path)
    lock.acquire()
    with pytest.raises(LeydenError, match="this very process"):
        FolderLock(tmp_path).acquire()
    assert os.listdir(tmp_path) == [NAME]
    lock.release()


def test_a_folder_on_a_read_only_file_system_warns_that_it_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", read_only)
    with pytest.warns(UserWarning, match="Read-only file system.*nothing keeps a second run out"):
        FolderLock(tmp_path).acquire()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        FolderLock(tmp_path / "file").acquire()


def test_a_heartbeat_restores_a_deleted_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, beat=0.01)
    lock.acquire()
    before = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).unlink()
    while not (tmp_path / NAME).exists():
        os.sched_yield()
    assert (tmp_path / NAME).read_bytes() == before
    lock.release()


# runs -----------------------------------------------------------------------------------------------------------------
def fit(folder: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    trainer = Trainer(**{**QUIET, "resume": "auto", **arguments}, default_root_dir=folder, callbacks=list(callbacks))
    trainer.fit(Line(), [torch.ones(1, 2)] * 4)
    return trainer


class InSecondStep(Callback):
    """Calls a function in the second step."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.action()


def test_auto_resume_locks_the_folder_until_the_run_ends(tmp_path: Path) -> None:
    folder, seen = tmp_path / SAVED, []

    def second() -> None:
        seen.append(owner_of(folder).pid)
        module, saved = Line(), str(next(folder.glob("epoch=*")))
        for ckpt_path in ("auto", saved):
            trainer = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=ModelCheckpoint())
            with pytest.raises(LeydenError, match="belongs to a run that is under way: this very process"):
                trainer.fit(module, [torch.ones(1, 2)] * 4, ckpt_path=ckpt_path)
        # A new run has a folder of its own, without a lock unless it resumes automatically.
        fit(tmp_path, resume=None)
        # Another folder, a fit that writes nothing and an evaluation need no lock.
        fit(tmp_path / "other")
        fit(tmp_path, fast_dev_run=True)
        fit(tmp_path, resume=None, enable_checkpointing=False)
        Trainer(**QUIET, default_root_dir=tmp_path).predict(module, [torch.ones(1, 2)])

    fit(tmp_path, InSecondStep(second), ModelCheckpoint(every_n_train_steps=1))
    assert seen == [os.getpid()]
    assert not (folder / NAME).exists()
    # The lock is also released after an error.
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "error", InSecondStep(lambda: 1 / 0))
    assert not (tmp_path / "error" / SAVED / NAME).exists()


def test_runs_without_auto_resume_share_a_folder_unlocked(tmp_path: Path) -> None:
    seen: list[bool] = []

    def second() -> None:
        seen.append((tmp_path / "shared" / NAME).exists())
        fit(tmp_path, ModelCheckpoint(tmp_path / "shared"), resume=None)

    fit(tmp_path, InSecondStep(second), ModelCheckpoint(tmp_path / "shared"), resume=None)
    assert seen == [False]
    assert len(all_checkpoints(tmp_path / "shared")) == 2


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    assert (
        run_in_fork(lambda: fit(tmp_path, InSecondStep(lambda: os.kill(os.getpid(), signal.SIGKILL))))
        == -signal.SIGKILL
    )
    assert (tmp_path / SAVED / NAME).exists()
    trainer = fit(tmp_path)
    assert (trainer.global_step, trainer.run_folder) == (4, str(tmp_path / "version_1"))
    assert not (tmp_path / "version_1" / "checkpoints" / NAME).exists()


def test_a_run_whose_lock_was_taken_over_stops_saving(tmp_path: Path) -> None:
    folder = tmp_path / SAVED
    with pytest.raises(LeydenError, match=r"was taken over by process \d+ of ada on gpu7.*saves no more"):
        fit(tmp_path, InSecondStep(lambda: write(folder)), ModelCheckpoint(every_n_train_steps=1, save_top_k=-1))
    assert [path.name for path in all_checkpoints(folder)] == ["epoch=0-step=1"]
    # The new owner's lock stays.
    assert owner_of(folder).host == "gpu7"


def on_two_ranks(folder: Path) -> None:
    pids: list[int] = []
    record = InSecondStep(lambda: pids.append(owner_of(folder / SAVED).pid))
    trainer = fit(folder, record, strategy="ddp")
    assert trainer.strategy.ranks.broadcast(os.getpid()) == pids[0]
    assert not trainer.strategy.ranks.broadcast((folder / SAVED / NAME).exists())
    if RANK == 0:
        write(folder / SAVED, place=Owner.here().place)
    trainer.strategy.ranks.barrier()
    fit(folder, strategy="ddp")


def test_rank_0_locks_for_all_ranks_and_a_locked_folder_stops_all(tmp_path: Path) -> None:
    first, second = run_world(2, on_two_ranks, tmp_path, may_fail=True)
    # As for every error, rank 0's is shown, and the other rank ends with it.
    assert "belongs to a run that is under way" in first
    assert second == 1
