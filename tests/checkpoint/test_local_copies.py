"""ModelCheckpoint(local_copy=True): a checkpoint is complete on disk before it is uploaded, and the newer resumes."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from buckets import BUCKET, Client, Server, serving
from models import Squares, sgd_with_momentum
from ranks.world import run_world
from same import differences, same_weights
from torch import nn
from torch.utils.data import DataLoader

from leyden import ConfigurationError, LeydenError, Trainer
from leyden.callbacks import Callback, ModelCheckpoint
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.folder import all_checkpoints, delete, identity, newest
from leyden.checkpoint.format import bucket
from leyden.checkpoint.format.bucket import BucketPath
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import read_manifest
from leyden.checkpoint.lock import NAME, BucketLock
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.staged import upload
from leyden.checkpoint.writer import CheckpointWriter
from leyden.trainer import CheckpointIO

URL = f"s3://{BUCKET}/run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(monkeypatch) as server:
        yield server


@pytest.fixture
def memory() -> str:
    """The URL of a folder in an empty store of this process."""
    bucket.store_of.cache_clear()
    return f"memory://{BUCKET}/run"


def copies(root: Path, url: str) -> list[str]:
    """Returns the names of the local copies, oldest first, after checking all of their bytes."""
    found = all_checkpoints(Path(root, "local_copies", *url.split("://")))
    for path in found:
        CheckpointReader(path).verify()
    return [path.name for path in found]


def uploaded(url: str) -> list[str]:
    return [path.name for path in all_checkpoints(BucketPath(url))]


def contents(url: str) -> dict[str, Any]:
    """Returns the newest checkpoint's weights and states."""
    path = newest(url, strict=True)
    assert path is not None
    reader = CheckpointReader(path)
    at = {name: value for name, value in reader.progress().items() if name != "seconds"}
    return {"name": path.name, "model": reader.model(), "optimizers": reader.optimizers(), "at": at}


def fit(root: Path, quiet: dict[str, Any], *callbacks: Callback, epochs: int = 2, path: str | None = "auto") -> Any:
    """Trains three steps an epoch, and returns the module and the Trainer."""
    torch.manual_seed(0)
    module = Squares(nn.Linear(4, 2), sgd_with_momentum)
    arguments = {**quiet, "enable_checkpointing": True, "max_epochs": epochs, "default_root_dir": root}
    trainer = Trainer(callbacks=list(callbacks), **arguments)
    trainer.fit(module, DataLoader(torch.randn(6, 4), batch_size=2, shuffle=True), ckpt_path=path)
    return module, trainer


def test_a_run_killed_before_its_upload_continues_from_its_local_copy(server: Server, tmp_path: Path) -> None:
    """The second checkpoint is complete on disk, and its manifest never reaches the bucket."""
    client = Client()
    try:
        assert client.run(url=f"{URL}/whole", root=str(tmp_path / "whole")) == 0
        pids: list[int] = []

        def kill(method: str, path: str) -> tuple[str, bytes] | None:
            if method != "PUT" or not path.endswith("step=4/manifest.json"):
                return None
            os.kill(pids.pop(), signal.SIGKILL)
            return "503 Slow Down", b""

        server.refuses = kill
        arguments = {"url": f"{URL}/one", "root": str(tmp_path), "local_copy": True}
        assert client.run(pids.append, **arguments) == -signal.SIGKILL
        assert uploaded(f"{URL}/one") == ["epoch=0-step=2"]
        assert "epoch=1-step=4" in copies(tmp_path, f"{URL}/one")
        server.refuses = lambda method, path: None
        server.requests.clear()
        assert client.run(**arguments) == 0
    finally:
        client.close()
    # The weights came from the disk, and were uploaded from there before training went on.
    read = [path for method, path, _ in server.requests if method == "GET" and path.endswith(".safetensors")]
    sent = [path for method, path, _ in server.requests if method == "PUT" and path.endswith("manifest.json")]
    assert read == []
    assert [path.split("/")[-2] for path in sent] == ["epoch=1-step=4", "epoch=1-step=6"]
    assert differences(contents(f"{URL}/one"), contents(f"{URL}/whole")) == []
    assert uploaded(f"{URL}/one") == copies(tmp_path, f"{URL}/one") == ["epoch=1-step=6"]
    files = CheckpointReader(f"{URL}/one/epoch=1-step=6").manifest.files
    assert len([path for path, _ in BucketPath(f"{URL}/one/epoch=1-step=6").below()]) == len(files) + 1
    assert len({path for path, _ in BucketPath(f"{URL}/one").below() if ".leyden-lock" not in str(path)}) == 1 + len(
        files
    )


def test_the_newer_of_both_is_resumed(memory: str, quiet: dict[str, Any], tmp_path: Path) -> None:
    """On a machine whose disk is empty or older, that is the bucket's."""

    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(memory, local_copy=True)

    whole, _ = fit(tmp_path / "whole", quiet, epochs=4, path=None)
    fit(tmp_path / "one", quiet, saves(), epochs=1)
    fit(tmp_path / "two", quiet, saves(), epochs=2)
    assert copies(tmp_path / "one", memory) == ["epoch=0-step=3"] and copies(tmp_path / "two", memory) == [
        "epoch=1-step=6"
    ]
    _, trainer = fit(tmp_path / "one", quiet, saves(), epochs=3, path="last")
    assert trainer.ckpt_path == f"{memory}/epoch=1-step=6"
    # The other machine's copy is old by now, and goes with its next save.
    resumed, trainer = fit(tmp_path / "two", quiet, saves(), epochs=4)
    assert trainer.ckpt_path == f"{memory}/epoch=2-step=9" and same_weights(whole, resumed)
    assert uploaded(memory) == copies(tmp_path / "two", memory) == ["epoch=3-step=12"]


def test_a_copy_that_is_damaged_is_skipped(memory: str, quiet: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "whole", quiet, epochs=2, path=None)
    fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True), epochs=1)
    [file] = tmp_path.rglob("run/epoch=0-step=3/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.warns(UserWarning, match="skipping a damaged checkpoint"):
        resumed, _ = fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True))
    assert same_weights(whole, resumed)


def test_an_evaluation_reads_the_copy_and_uploads_nothing(memory: str, quiet: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(memory, local_copy=True)
    module, trainer = fit(tmp_path, quiet, checkpoint)
    delete(f"{memory}/epoch=1-step=6")
    trainer.validate(module, DataLoader(torch.randn(6, 4), batch_size=2), ckpt_path="last")
    assert trainer.ckpt_path == str(Path(tmp_path, "local_copies", *memory.split("://"), "epoch=1-step=6"))
    assert uploaded(memory) == []


def test_a_run_from_scratch_is_newer_than_an_earlier_ones_copy(
    memory: str, quiet: dict[str, Any], tmp_path: Path
) -> None:
    """Also if the bucket has forgotten the earlier run, whose checkpoints were later in their run."""
    fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True), epochs=4)
    delete(f"{memory}/epoch=3-step=12")
    module, trainer = fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True), path=None)
    trainer.validate(module, DataLoader(torch.randn(6, 4), batch_size=2), ckpt_path="last")
    assert Path(str(trainer.ckpt_path)).name == "epoch=1-step=6"
    _, trainer = fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True), epochs=3)
    assert trainer.ckpt_path == f"{memory}/epoch=1-step=6"
    assert copies(tmp_path, memory) == ["epoch=2-step=9"]
    # It takes the place of a copy of the same name.
    delete(f"{memory}/epoch=2-step=9")
    fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True), epochs=3, path=None)
    assert uploaded(memory) == copies(tmp_path, memory) == ["epoch=2-step=9"]


def test_a_name_that_is_taken_gets_a_version_in_both_places(memory: str, quiet: dict[str, Any], tmp_path: Path) -> None:
    _, trainer = fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True))
    url = f"{memory}/epoch=1-step=6"
    assert str(trainer.save_checkpoint(url, overwrite=False)) == f"{url}-v1"
    assert uploaded(memory) == ["epoch=1-step=6", "epoch=1-step=6-v1"]
    assert copies(tmp_path, memory) == ["epoch=1-step=6-v1"]


def test_a_copy_of_weights_alone_is_not_resumed(memory: str, quiet: dict[str, Any], tmp_path: Path) -> None:
    def saves() -> list[Callback]:
        weights = ModelCheckpoint(f"{memory}/weights", save_weights_only=True, local_copy=True)
        return [ModelCheckpoint(memory, every_n_epochs=2, local_copy=True), weights]

    fit(tmp_path, quiet, *saves(), epochs=3)
    assert copies(tmp_path, f"{memory}/weights") == ["epoch=2-step=9"]
    _, trainer = fit(tmp_path, quiet, *saves(), epochs=4)
    assert trainer.ckpt_path == f"{memory}/epoch=1-step=6"


@pytest.mark.parametrize("path", ["auto", "last", "current"])
def test_one_copy_is_kept(memory: str, quiet: dict[str, Any], tmp_path: Path, path: str) -> None:
    module, trainer = fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True), epochs=1)
    if path != "current":
        fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True), path=path)
    else:
        trainer.max_epochs = 2
        trainer.fit(module, DataLoader(torch.randn(6, 4), batch_size=2), ckpt_path=path)
    assert uploaded(memory) == copies(tmp_path, memory) == ["epoch=1-step=6"]


def test_a_copy_that_an_overwrite_has_moved_aside_is_that_of_its_url(
    memory: str, quiet: dict[str, Any], tmp_path: Path
) -> None:
    """A process in another container was killed between the two renames of an overwrite."""
    fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True))
    folder = Path(tmp_path, "local_copies", *memory.split("://"))
    (folder / "epoch=1-step=6").rename(folder / ".epoch=1-step=6.old-12-34-elsewhere_abcdef01-0123abcd")
    delete(f"{memory}/epoch=1-step=6")
    _, trainer = fit(tmp_path, quiet, ModelCheckpoint(memory, save_top_k=-1, local_copy=True), epochs=3)
    assert trainer.ckpt_path == f"{memory}/epoch=1-step=6"
    assert uploaded(memory) == ["epoch=1-step=6", "epoch=2-step=9"]
    assert os.listdir(folder) == ["epoch=2-step=9"]


def test_a_run_that_has_nothing_left_to_do_deletes_the_older_copy(
    memory: str, quiet: dict[str, Any], tmp_path: Path
) -> None:
    """The kill came after the last upload, and before the copy of the previous one was deleted."""
    fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True), epochs=1)
    [older] = tmp_path.rglob("run/epoch=0-step=3")
    shutil.copytree(older, tmp_path / "aside")
    fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True))
    shutil.move(tmp_path / "aside", older)
    save = read_manifest(BucketPath(f"{memory}/epoch=1-step=6")).save_id
    fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True))
    assert copies(tmp_path, memory) == ["epoch=1-step=6"]
    # Nor does it upload what the bucket has.
    assert read_manifest(BucketPath(f"{memory}/epoch=1-step=6")).save_id == save


def test_a_newer_save_of_the_same_name_replaces_that_of_the_bucket(
    memory: str, quiet: dict[str, Any], tmp_path: Path
) -> None:
    url = BucketPath(f"{memory}/epoch=1-step=6")
    _, trainer = fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True))
    former = {path: path.read_bytes(2**20) for path, _ in url.below()}
    trainer.save_checkpoint(url)
    [copy] = tmp_path.rglob("run/epoch=1-step=6")
    assert identity(read_manifest(copy)) == identity(read_manifest(url))
    # The kill came before its upload.
    delete(url)
    for path, data in former.items():
        path.write_bytes(data)
    newer = identity(read_manifest(copy))
    assert newer != identity(read_manifest(url))
    fit(tmp_path, quiet, ModelCheckpoint(memory, save_top_k=2, local_copy=True), epochs=3)
    assert uploaded(memory) == ["epoch=1-step=6", "epoch=2-step=9"] and newer == identity(read_manifest(url))
    CheckpointReader(url).verify()
    assert not {path for path, _ in url.below()} & former.keys() - {url / "manifest.json"}


def test_copies_stay_in_their_folder_if_the_run_changes_the_current_one(
    memory: str, quiet: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaves(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            monkeypatch.chdir(tmp_path / "elsewhere")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    fit(Path("root"), quiet, ModelCheckpoint(memory, local_copy=True), Leaves())
    assert copies(tmp_path / "root", memory) == ["epoch=1-step=6"]


def test_a_trial_of_a_few_batches_uploads_nothing(memory: str, quiet: dict[str, Any], tmp_path: Path) -> None:
    """The run whose copy it finds may be at work."""
    fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True))
    delete(f"{memory}/epoch=1-step=6")
    fit(tmp_path, {**quiet, "fast_dev_run": True}, ModelCheckpoint(memory, local_copy=True))
    assert uploaded(memory) == [] and copies(tmp_path, memory) == ["epoch=1-step=6"]


def test_a_copy_leads_to_the_folder_of_its_run(memory: str, quiet: dict[str, Any], tmp_path: Path) -> None:
    """That folder holds no checkpoint yet when the run is killed before its first upload."""

    def run(epochs: int) -> Trainer:
        saves = ModelCheckpoint(memory, local_copy=True), ModelCheckpoint(every_n_epochs=50)
        return fit(tmp_path, quiet, *saves, epochs=epochs)[1]

    first = run(1)
    delete(f"{memory}/epoch=0-step=3")
    second = run(2)
    assert (second.ckpt_path, second.run_folder) == (f"{memory}/epoch=0-step=3", first.run_folder)


def test_copies_of_another_training_stay_as_they_are(memory: str, quiet: dict[str, Any], tmp_path: Path) -> None:
    class Other(Squares):
        pass

    fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True), epochs=1)
    fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True), path=None)
    delete(f"{memory}/epoch=1-step=6")
    arguments = {**quiet, "enable_checkpointing": True, "max_epochs": 3}
    other = Trainer(callbacks=ModelCheckpoint(memory, local_copy=True), **arguments)
    with pytest.raises(ConfigurationError, match="was saved by another run"):
        other.fit(Other(nn.Linear(4, 2), sgd_with_momentum), DataLoader(torch.randn(6, 4)), ckpt_path="auto")
    assert copies(tmp_path, memory) == ["epoch=0-step=3", "epoch=1-step=6"] and "epoch=1-step=6" not in uploaded(memory)


class Waits(Callback):
    """Lets the bucket take no manifest until training has come to a step."""

    def __init__(self, server: Server, step: int) -> None:
        self._step, self._came = step, threading.Event()
        server.before = self._hold
        self.began = threading.Event()

    def _hold(self, method: str, path: str) -> None:
        if method == "PUT" and path.endswith("manifest.json"):
            self.began.set()
            assert self._came.wait(60), "training waited for the bucket"

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            assert self.began.wait(60)
            assert copies(Path(trainer.default_root_dir), URL) == ["epoch=0-step=2"] and uploaded(URL) == []
            self._came.set()


def test_training_goes_on_while_the_bucket_is_slow(server: Server, quiet: dict[str, Any], tmp_path: Path) -> None:
    fit(tmp_path, quiet, ModelCheckpoint(URL, every_n_train_steps=2, local_copy=True), Waits(server, 3))
    assert uploaded(URL) == copies(tmp_path, URL) == ["epoch=1-step=6"]


def test_subfolders_and_best_ones_keep_one_copy(memory: str, quiet: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(memory, "{epoch}/{step}", save_top_k=2, every_n_train_steps=1, local_copy=True)
    _, trainer = fit(tmp_path, quiet, checkpoint)
    assert [path.name for path in all_checkpoints(BucketPath(memory), 1)] == ["step=5", "step=6"]
    assert [path.name for path in all_checkpoints(tmp_path / "local_copies", 4)] == ["step=6"]
    assert checkpoint.best_model_path == str(trainer.last_checkpoint) == f"{memory}/epoch=1/step=6"


def test_a_failed_upload_ends_the_run_and_is_made_up_for(
    server: Server, quiet: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bucket.RETRIES, "max_retries", 1)
    bucket.store_of.cache_clear()
    whole, _ = fit(tmp_path / "whole", quiet, path=None)
    server.fails = lambda method, path: method == "PUT" and "step=4/save-" in path
    with pytest.raises(CheckpointError, match=r"step=4: was not saved.*cannot be uploaded: .*503.*It is complete in /"):
        fit(tmp_path, quiet, ModelCheckpoint(URL, every_n_train_steps=2, local_copy=True))
    assert copies(tmp_path, URL)[-1] == "epoch=1-step=4" and uploaded(URL) == ["epoch=0-step=2"]
    server.fails = lambda method, path: False
    resumed, trainer = fit(tmp_path, quiet, ModelCheckpoint(URL, every_n_train_steps=2, local_copy=True))
    assert trainer.ckpt_path == f"{URL}/epoch=1-step=4" and same_weights(whole, resumed)
    assert uploaded(URL) == copies(tmp_path, URL) == ["epoch=1-step=6"]


def test_a_preempted_run_is_complete_on_disk_before_its_upload(
    server: Server, quiet: dict[str, Any], tmp_path: Path
) -> None:
    class Preempted(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 4:
                signal.raise_signal(signal.SIGUSR1)

    seen: list[list[str]] = []

    def look(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("preempted/manifest.json"):
            seen.append(copies(tmp_path, f"{URL}"))

    server.before = look
    quiet = {**quiet, "resume": "auto"}
    whole, _ = fit(tmp_path / "whole", quiet, path=None)
    with pytest.raises(SystemExit):
        fit(tmp_path, quiet, ModelCheckpoint(URL, local_copy=True), Preempted(), path=None)
    assert seen == [["epoch=0-step=3", "preempted"]] and copies(tmp_path, URL) == ["preempted"]
    shutil.rmtree(tmp_path / "local_copies")
    resumed, trainer = fit(tmp_path, quiet, ModelCheckpoint(URL, local_copy=True), path=None)
    assert trainer.ckpt_path == f"{URL}/preempted" and same_weights(whole, resumed)


# the upload -----------------------------------------------------------------------------------------------------------
def test_a_copy_that_another_run_has_replaced_is_not_uploaded(
    memory: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "one")
    manifest = read_manifest(path)
    write(path, 2, True)
    with pytest.raises(CheckpointError, match=r"one/.*has changed since it was written, and is not uploaded"):
        upload(path, manifest, BucketPath(f"{memory}/one"), CheckpointRanks(), False, lambda: None)
    assert list(BucketPath(memory).below()) == []


def test_a_run_that_loses_its_lock_during_an_upload_does_not_commit_it(
    server: Server, quiet: dict[str, Any], tmp_path: Path
) -> None:
    def take(method: str, path: str) -> None:
        if method == "PUT" and "/save-" in path:
            (BucketPath(URL) / NAME / "9").write_bytes(b"{}")

    for _ in ("during the save", "at the next start"):
        server.before = take
        with pytest.raises(LeydenError, match="was taken over"):
            fit(tmp_path, quiet, ModelCheckpoint(URL, local_copy=True))
        assert uploaded(URL) == [] and copies(tmp_path, URL) == ["epoch=0-step=3"]
        server.before = lambda method, path: None
        BucketPath(URL).delete([path for path, _ in (BucketPath(URL) / NAME).below()])
    lock = BucketLock(BucketPath(URL))
    lock.acquire()
    with pytest.raises(LeydenError, match="belongs to a run"):
        fit(tmp_path, quiet, ModelCheckpoint(URL, local_copy=True), path="last")
    assert uploaded(URL) == []
    lock.release()


def test_an_upload_holds_a_few_files_in_memory(server: Server, tmp_path: Path) -> None:
    size = 2**20
    with CheckpointWriter(tmp_path / "one") as writer:
        for number in range(16):
            writer.state(f"state-{number}", torch.zeros(size, dtype=torch.uint8))
        writer.commit(progress={})
    held: list[int] = []

    def look(method: str, path: str) -> None:
        if path.endswith(".safetensors"):
            # The server itself keeps what it gets in this process.
            read = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*pathlib*")])
            held.append(sum(trace.size for trace in read.traces))

    server.before = look
    arguments = BucketPath(f"{URL}/one"), CheckpointRanks(), False, lambda: None
    tracemalloc.start()
    try:
        upload(tmp_path / "one", read_manifest(tmp_path / "one"), *arguments)
    finally:
        tracemalloc.stop()
    assert size < max(held) < 8 * size


# ranks ----------------------------------------------------------------------------------------------------------------
def on_a_rank(folder: str, strategy: str, machines: int) -> tuple[bool, str | None, str | None]:
    """Trains in two parts, between which the bucket loses the newest checkpoint as if it had never come there.

    Then validates it, after the last machine's copy has been damaged.
    """
    from torch.distributed.tensor import DTensor

    rank = int(os.environ["RANK"])
    if machines == 2:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "2"}
    root = f"{folder}/{rank * machines // 2}"
    module, data = Squares(nn.Linear(4, 2), sgd_with_momentum), DataLoader(torch.randn(12, 4), batch_size=2)

    def run(epochs: int, *callbacks: Callback, path: str | None = None) -> tuple[list[torch.Tensor], Trainer]:
        torch.manual_seed(0)
        module = Squares(nn.Linear(4, 2), sgd_with_momentum)
        arguments: dict[str, Any] = {"accelerator": "cpu", "logger": False, "verbose": False, "default_root_dir": root}
        arguments |= {"devices": 2 // machines, "num_nodes": machines, "enable_progress_bar": False}
        arguments["enable_checkpointing"] = bool(callbacks)
        trainer = Trainer(max_epochs=epochs, strategy=strategy, callbacks=list(callbacks), **arguments)
        trainer.fit(module, DataLoader(torch.randn(12, 4), batch_size=2, shuffle=True), ckpt_path=path)
        return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in module.parameters()], trainer

    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(URL, every_n_train_steps=2, local_copy=True)

    whole, _ = run(2)
    _, first = run(1, saves(), path="auto")
    first.strategy.ranks.barrier()
    if rank == 0:
        delete(f"{URL}/epoch=0-step=2")
    resumed, trainer = run(2, saves(), path="auto")
    resumed_from = trainer.ckpt_path
    copy = Path(f"{root}/local_copies", *URL.split("://"), "epoch=1-step=6")
    # The first file, which rank 0 would verify for both if the machines shared the folder.
    file = copy / next(iter(read_manifest(copy).files))
    whole_file = file.read_bytes()
    trainer.strategy.ranks.barrier()
    if rank == 1:
        file.write_bytes(b"?" + whole_file[1:])
    trainer.strategy.ranks.barrier()
    trainer.validate(module, data, ckpt_path="last")
    trainer.strategy.ranks.barrier()
    file.write_bytes(whole_file)
    return all(map(torch.equal, whole, resumed)), resumed_from, trainer.ckpt_path


@pytest.mark.parametrize(("strategy", "machines"), [("ddp", 2), ("fsdp", 1)])
def test_ranks_upload_their_parts_and_resume_from_copies_of_all_machines(
    server: Server, tmp_path: Path, strategy: str, machines: int
) -> None:
    found = run_world(2, on_a_rank, str(tmp_path), strategy, machines, environ=server.environ)
    assert found == [(True, f"{URL}/epoch=0-step=2", f"{URL}/epoch=1-step=6")] * 2
    [path] = all_checkpoints(BucketPath(URL))
    CheckpointReader(path).verify()
    assert [copies(tmp_path / str(machine), URL) for machine in range(machines)] == [[path.name]] * machines
    for local in tmp_path.glob(f"*/local_copies/s3/{BUCKET}/run/{path.name}"):
        assert read_manifest(local).files == read_manifest(path).files


# bad input ------------------------------------------------------------------------------------------------------------
def test_a_local_copy_of_local_checkpoints_is_refused(quiet: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"local_copy=True\): checkpoints go to the run's folder.*Leave"):
        fit(tmp_path, quiet, ModelCheckpoint(local_copy=True))
    with pytest.raises(ConfigurationError, match=rf"checkpoints go to {tmp_path}/one, which is no bucket"):
        fit(tmp_path, quiet, ModelCheckpoint(tmp_path / "one", local_copy=True))


def test_a_folder_that_cannot_be_made_is_named_before_training(
    memory: str, quiet: dict[str, Any], tmp_path: Path
) -> None:
    class Never(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            raise AssertionError("training began")

    (tmp_path / "local_copies").touch()
    with pytest.raises(CheckpointError, match=r"local_copies/memory/runs/run: cannot be created for local_copy=True"):
        fit(tmp_path, quiet, ModelCheckpoint(memory, local_copy=True), Never())


def test_a_plugin_that_stores_checkpoints_has_no_local_copies(
    memory: str, quiet: dict[str, Any], tmp_path: Path
) -> None:
    class Nowhere(CheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            raise AssertionError("training began")

        def load_checkpoint(self, path: Any, map_location: Any = None) -> dict[str, Any]:
            raise AssertionError("training began")

        def remove_checkpoint(self, path: Any) -> None:
            raise AssertionError("training began")

    with pytest.raises(ConfigurationError, match=r"local_copy=True\) does not work with Nowhere"):
        fit(tmp_path, {**quiet, "plugins": Nowhere()}, ModelCheckpoint(memory, local_copy=True), path=None)
