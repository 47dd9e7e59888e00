"""Checkpoints are saved to a bucket as to a folder: whole or not at all, whenever a process or a request fails."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeAlias

import boto3
import libfaketime
import obstore
import pytest
import torch
from buckets import BUCKET, Client, Clients, Server, serving
from models import Squares, sgd_with_momentum
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from ranks.world import run_world
from same import differences, same_weights
from torch import nn
from torch.utils.data import DataLoader

from leyden import Accelerator, ConfigurationError, LeydenError, Trainer
from leyden.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from leyden.callbacks.loggers.wandb_logger import WandbLogger
from leyden.checkpoint import saves, staged
from leyden.checkpoint.folder import all_checkpoints, newest
from leyden.checkpoint.format import bucket
from leyden.checkpoint.format.bucket import BucketPath
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import MANIFEST, read_manifest
from leyden.checkpoint.lock import NAME, SILENT, BucketLock
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.staged import StagedUpload
from leyden.checkpoint.writer import CheckpointWriter
from leyden.cli.main import main
from leyden.launch.owner import Owner
from leyden.report.recorded import FILE
from leyden.utils import ProjectConfiguration

URL = f"s3://{BUCKET}"
WRITES = ("PUT", "POST", "DELETE")
FILES = 14
"""Files of a checkpoint, with its manifest."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(monkeypatch) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


@pytest.fixture
def clients(server: Server) -> Iterator[Clients]:
    clients = Clients()
    yield clients
    clients.close()


def keys(server: Server, folder: str) -> list[str]:
    """Returns the names of the objects in a folder, with the identifiers of saves left out."""
    found = [entry["path"] for page in obstore.list(server.store(), folder) for entry in page]
    names = [key.removeprefix(f"{folder}/") for key in found if ".leyden-lock" not in key]
    return sorted("/".join(part for part in name.split("/") if not part.startswith("save-")) for name in names)


def contents(url: str) -> dict[str, Any]:
    """Returns the newest checkpoint's weights and states, after checking all of its bytes."""
    path = newest(url, strict=True)
    assert path is not None
    reader = CheckpointReader(path)
    at = {name: value for name, value in reader.progress().items() if name != "seconds"}
    return {"name": path.name, "model": reader.model(), "optimizers": reader.optimizers(), "at": at}


def name_of(method: str, path: str) -> str:
    """Returns a name for a request, without what is random in its path."""
    return f"{method} {re.sub('[0-9a-f]{16}', '', path)}"


class Killer:
    """Kills a run at one of its writing requests.

    Args:
        number: which one, from 0.
        after: kill after the request is carried out; otherwise it is cut off.
        name: counts only the requests of this name.
    """

    def __init__(self, server: Server, number: int, after: bool, name: str = "") -> None:
        self.pid, self._number, self._after, self._name = 0, number, after, name
        server.cuts = lambda method, path: self._at(method, path, False)
        server.after = lambda method, path: self._at(method, path, True)
        self._lock, self._seen = threading.Lock(), {False: 0, True: 0}
        self.has_killed = False

    def _at(self, method: str, path: str, after: bool) -> bool:
        if method not in WRITES or self._name not in ("", name_of(method, path)):
            return False
        with self._lock:
            number = self._seen[after]
            self._seen[after] += 1
        if (number, after) != (self._number, self._after) or not self.pid:
            return False
        self.has_killed = True
        os.kill(self.pid, signal.SIGKILL)
        return True

    def aim(self, pid: int) -> None:
        self.pid = pid


def spare(server: Server) -> None:
    """Ends what a Killer does."""
    server.cuts = lambda method, path: False
    server.after = lambda method, path: None


def check_kills(server: Server, client: Client, tmp_path: Path, numbers: list[int] | None, **options: Any) -> int:
    """Kills runs at requests, starts each again, and compares it with a run that nobody killed.

    Args:
        numbers: the numbers of the requests; None for all.
        **options: arguments of ModelCheckpoint.

    Returns:
        The number of kills.
    """
    assert client.run(url=f"{URL}/whole", root=str(tmp_path / "whole"), **options) == 0
    expected, names, kills = contents(f"{URL}/whole"), keys(server, "whole"), 0
    for number in range(1000) if numbers is None else numbers:
        for after in (False, True):
            name = f"{number}-{after}"
            arguments = {"url": f"{URL}/{name}", "root": str(tmp_path / name), **options}
            killer = Killer(server, number, after)
            code = client.run(killer.aim, **arguments)
            spare(server)
            assert code == (-signal.SIGKILL if killer.has_killed else 0)
            if not killer.has_killed:
                assert numbers is None, f"request {number} was never made"
                return kills
            kills += 1
            assert client.run(**arguments) == 0, name
            assert differences(contents(f"{URL}/{name}"), expected) == [], name
            assert keys(server, name) == names, name
    return kills


def test_a_killed_run_continues_exactly_and_leaves_nothing_behind(
    server: Server, client: Client, tmp_path: Path
) -> None:
    """Killed in the second save: at a file in the middle, at the manifest, and at the removal of the first save."""
    second = 4 + FILES
    numbers = [second + 5, second + FILES - 1, second + FILES]
    assert check_kills(server, client, tmp_path, numbers, asynchronous=True) == 2 * len(numbers)


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "options", [{}, {"asynchronous": True}, {"save_last": True, "save_top_k": 2}, {"local_copy": True}], ids=str
)
def test_a_run_may_be_killed_at_every_request(
    server: Server, client: Client, tmp_path: Path, options: dict[str, Any]
) -> None:
    assert check_kills(server, client, tmp_path, None, **options) > 90


# a fit ----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def memory() -> str:
    """The URL of an empty store in this process."""
    bucket.store_of.cache_clear()
    return f"memory://{BUCKET}"


def objects(url: str) -> list[str]:
    """Returns the names of all objects below a URL."""
    folder = BucketPath(url)
    return sorted(str(path.relative_to(folder)) for path, _ in folder.below())


def fit(quiet: dict[str, Any], *callbacks: Callback, epochs: int = 2, path: str | None = None, **arguments: Any) -> Any:
    """Trains three steps an epoch, and returns the module and the Trainer."""
    torch.manual_seed(0)
    module = Squares(nn.Linear(4, 2), sgd_with_momentum)
    arguments = {**quiet, "enable_checkpointing": True, "max_epochs": epochs, **arguments}
    trainer = Trainer(callbacks=list(callbacks), **arguments)
    trainer.fit(module, DataLoader(torch.randn(6, 4), batch_size=2, shuffle=True), ckpt_path=path)
    return module, trainer


@pytest.mark.parametrize("asynchronous", [False, True])
def test_auto_and_last_continue_from_a_bucket(memory: str, quiet: dict[str, Any], asynchronous: bool) -> None:
    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(f"{memory}/run", save_top_k=2, asynchronous=asynchronous)

    whole, _ = fit(quiet, epochs=4)
    fit(quiet, saves(), epochs=2, path="auto")
    fit(quiet, saves(), epochs=3, path="auto")
    resumed, trainer = fit(quiet, saves(), epochs=4, path="last")
    assert same_weights(whole, resumed) and trainer.ckpt_path == f"{memory}/run/epoch=2-step=9"
    # The ranking went along.
    assert [path.name for path in all_checkpoints(BucketPath(f"{memory}/run"))] == ["epoch=2-step=9", "epoch=3-step=12"]
    assert trainer.checkpoint_callback.best_model_path == str(trainer.last_checkpoint)
    # Without a monitor nothing is scored; the file lies beside the checkpoints.
    trainer.checkpoint_callback.to_yaml()
    assert BucketPath(f"{memory}/run/best_k_models.yaml").read_bytes(100) == b"{}\n"


def test_a_root_in_a_bucket_is_for_checkpoints_alone(
    memory: str, quiet: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, _ = fit(quiet, epochs=3)
    root = {"default_root_dir": f"{memory}/root", "logger": True}
    _, first = fit({**quiet, **root}, epochs=2, path="auto")
    resumed, trainer = fit({**quiet, **root}, epochs=3, path="auto")
    assert same_weights(whole, resumed) and trainer.ckpt_path == first.checkpoint_callback.best_model_path
    assert trainer.ckpt_path == f"{memory}/root/checkpoints/epoch=1-step=6"
    # On the same machine the run also continues its local files.
    assert trainer.run_folder == first.run_folder and Path(trainer.run_folder).is_relative_to(Path("."))
    assert not [path for path in tmp_path.iterdir() if ":" in path.name]
    # The next Trainer, with a folder of its own, leaves the bucket.
    checkpoint = first.checkpoint_callback
    _, local = fit({**quiet, "default_root_dir": str(tmp_path / "local")}, checkpoint, epochs=1)
    assert Path(local.checkpoint_callback.best_model_path).is_relative_to(tmp_path / "local")


def test_a_preempted_run_without_a_model_checkpoint_continues_from_its_bucket(
    memory: str, quiet: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Preempted(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 4:
                signal.raise_signal(signal.SIGUSR1)

    monkeypatch.chdir(tmp_path)
    whole, _ = fit(quiet)
    root = {"default_root_dir": f"{memory}/root", "enable_checkpointing": False, "resume": "auto"}
    with pytest.raises(SystemExit) as left:
        fit(quiet, Preempted(), **root)
    assert left.value.code == 75 and not list(tmp_path.glob("*/checkpoints/preempted"))
    resumed, trainer = fit(quiet, **root)
    assert same_weights(whole, resumed) and trainer.ckpt_path == f"{memory}/root/checkpoints/preempted"


def test_the_pages_trainers_continue_from_their_bucket(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    docs = Path(__file__).parents[2] / "docs"
    s3 = boto3.client("s3", endpoint_url=server.environ["AWS_ENDPOINT_URL"])
    s3.create_bucket(Bucket="team")
    page = (docs / "clusters.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    # As `leyden launch --resume auto` and a short run would have it.
    quick = 'max_epochs=epochs, resume="auto", accelerator="cpu", '
    block = block.replace("Trainer(", f"Trainer({quick}").replace("steps=500", "steps=2")
    names: dict[str, Any] = {"Trainer": Trainer, "ModelCheckpoint": ModelCheckpoint, "module": Squares(nn.Linear(4, 2))}
    names["loader"] = DataLoader(torch.randn(8, 4), batch_size=2)
    for epochs in (1, 2):
        exec(block, {**names, "epochs": epochs}, names)
    assert names["trainer"].ckpt_path == "s3://team/digits/checkpoints/epoch=0-step=4"
    assert names["trainer"].global_step == 8


def test_names_are_taken_replaced_and_numbered(memory: str) -> None:
    def save(value: float, overwrite: bool) -> str:
        with CheckpointWriter(f"{memory}/runs/one", overwrite=overwrite) as writer:
            writer.model({"weight": torch.tensor(value)})
            return str(writer.commit(progress={"epoch": 0, "global_step": 1}))

    assert save(1.0, False) == f"{memory}/runs/one" and save(2.0, False) == f"{memory}/runs/one-v1"
    before = objects(f"{memory}/runs/one")
    assert save(3.0, True) == f"{memory}/runs/one"
    after = objects(f"{memory}/runs/one")
    assert len(before) == len(after) and set(before) & set(after) == {"manifest.json"}
    values = [CheckpointReader(path).model()["weight"].item() for path in all_checkpoints(BucketPath(f"{memory}/runs"))]
    assert values == [2.0, 3.0]


def test_a_failed_save_leaves_nothing_and_keeps_the_old_one(memory: str) -> None:
    for is_good in (True, False, True):
        try:
            with CheckpointWriter(f"{memory}/runs/one", overwrite=True) as writer:
                writer.model({"weight": torch.ones(3)})
                if not is_good:
                    before = objects(memory)
                    raise KeyboardInterrupt
                writer.commit(progress={"epoch": 0, "global_step": 1})
        except KeyboardInterrupt:
            assert len(objects(memory)) < len(before)
            CheckpointReader(f"{memory}/runs/one").verify()
    assert len(objects(memory)) == 4


def test_a_downloaded_checkpoint_is_read_from_its_folder(memory: str, tmp_path: Path) -> None:
    with CheckpointWriter(f"{memory}/runs/one") as writer:
        writer.model({"weight": torch.arange(3.0)})
        url = writer.commit(progress={"epoch": 0, "global_step": 1})
    assert isinstance(url, BucketPath)
    for path, _ in url.below():
        target = tmp_path / "one" / path.relative_to(url)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes(1 << 20))
    reader = CheckpointReader(tmp_path / "one")
    reader.verify()
    assert torch.equal(reader.model()["weight"], torch.arange(3.0)) and reader.manifest.format == 4


def test_files_of_killed_saves_are_deleted_once_they_are_old(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("two/save-0123456789abcdef", "one/save-0123456789abcdef", "two/notes", "notes/save-it"):
        BucketPath(f"{memory}/runs/{name}/file").write_bytes(b"1")

    def save() -> list[str]:
        monkeypatch.setattr(staged, "_SWEPT", set())
        with CheckpointWriter(f"{memory}/runs/one", overwrite=True) as writer:
            writer.commit(progress={"epoch": 0, "global_step": 1})
        return [name for name in objects(f"{memory}/runs") if name.endswith("file")]

    # Another process may be at work on them.
    assert len(save()) == 4 and len(save()) == 4
    monkeypatch.setattr(staged, "LEFT_BEHIND", timedelta(0))
    assert save() == ["notes/save-it/file", "two/notes/file"]


def test_only_the_first_of_two_creates_an_object(memory: str) -> None:
    path = BucketPath(f"{memory}/one")
    assert [path.create(data) for data in (b"1", b"2", b"1")] == [True, False, True]
    assert path.read_bytes(9) == b"1"


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_files_of_a_checkpoint_are_never_swept(memory: str, is_damaged: bool) -> None:
    with CheckpointWriter(f"{memory}/runs/one") as writer:
        writer.model({"weight": torch.ones(3)})
        one = writer.commit(progress={"epoch": 0, "global_step": 1})
    before = objects(str(one))
    BucketPath(f"{one}/save-0123456789abcdef/file").write_bytes(b"1")
    if is_damaged:
        BucketPath(f"{one}/{MANIFEST}").write_bytes(b"{")
    staged.sweep(BucketPath(f"{memory}/runs"), None)
    assert [name for name in objects(str(one)) if not (is_damaged and name.endswith("file"))] == before


def test_two_saves_to_one_name_at_a_time_are_both_whole(memory: str) -> None:
    with CheckpointWriter(f"{memory}/runs/one", overwrite=True) as slow:
        slow.model({"weight": torch.tensor(1.0)})
        for value in (2.0, 3.0):
            with CheckpointWriter(f"{memory}/runs/one", overwrite=True) as writer:
                writer.model({"weight": torch.tensor(value)})
                writer.commit(progress={"epoch": 0, "global_step": 1})
        slow.commit(progress={"epoch": 0, "global_step": 1})
    CheckpointReader(f"{memory}/runs/one").verify()
    assert len(objects(f"{memory}/runs/one")) == 4


def test_a_save_whose_files_another_run_has_swept_is_not_committed(memory: str) -> None:
    with (
        pytest.raises(CheckpointError, match=r"was deleted by another run"),
        CheckpointWriter(f"{memory}/runs/one") as writer,
    ):
        writer.model({"weight": torch.ones(3)})
        writer.write()
        staged.sweep(BucketPath(f"{memory}/runs"), None)
        writer.commit(progress={"epoch": 0, "global_step": 1})
    assert objects(memory) == []


def test_a_later_fit_of_a_process_sees_what_others_have_saved_meanwhile(memory: str, quiet: dict[str, Any]) -> None:
    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(f"{memory}/run", save_top_k=-1)

    fit(quiet, saves(), epochs=1, path="auto")
    path = BucketPath(f"{memory}/run/epoch=0-step=3")
    (path / MANIFEST).write_bytes(dataclasses.replace(read_manifest(path), save_counter=5).to_bytes())
    fit(quiet, saves(), epochs=2, path="auto")
    assert newest(f"{memory}/run") == BucketPath(f"{memory}/run/epoch=1-step=6")


def test_an_abandoned_save_is_not_committed_after_the_run_has_released_its_folder(
    memory: str, quiet: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C does not wait for the upload to end."""

    class Interrupts(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                raise KeyboardInterrupt

    went_on, upload = threading.Event(), StagedUpload.write

    def slow(staged: StagedUpload, name: str, content: Any) -> Any:
        assert went_on.wait(60)
        return upload(staged, name, content)

    monkeypatch.setattr(saves, "_ABANDONED", 0.1)
    monkeypatch.setattr(StagedUpload, "write", slow)
    checkpoint = ModelCheckpoint(f"{memory}/run", every_n_train_steps=1, asynchronous=True)
    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="was not saved"):
        fit(quiet, checkpoint, Interrupts(), path="auto")
    went_on.set()
    for thread in threading.enumerate():
        if thread.name == "leyden-save":
            thread.join()
    assert [name for name in objects(f"{memory}/run") if NAME not in name] == []


def test_a_run_rolls_back_to_a_checkpoint_in_a_bucket(memory: str, quiet: dict[str, Any]) -> None:
    class Back(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3 and not reached:
                reached.append(trainer.roll_back())

    reached: list[Any] = []
    saves = ModelCheckpoint(f"{memory}/run", every_n_train_steps=2)
    _, trainer = fit(quiet, saves, Back(), path="auto")
    assert reached == [BucketPath(f"{memory}/run/epoch=0-step=2")] and trainer.global_step == 5


def test_a_failed_run_is_saved_to_a_bucket(memory: str, quiet: dict[str, Any]) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise ValueError("no more")

    last = OnExceptionCheckpoint(f"{memory}/failed")
    with pytest.raises(ValueError, match="no more"):
        fit(quiet, last, Fails())
    assert str(last.saved_path) == f"{memory}/failed/on_exception"
    CheckpointReader(f"{memory}/failed/on_exception").verify()


def test_a_logger_does_not_pretend_to_upload_checkpoints_from_a_bucket(
    memory: str, quiet: dict[str, Any], tmp_path: Path
) -> None:
    logger = WandbLogger(save_dir=tmp_path, offline=True, log_model=True)
    with pytest.raises(ConfigurationError, match=rf"WandbLogger\(log_model=True\).*{memory}/run is in a bucket"):
        fit(quiet, ModelCheckpoint(f"{memory}/run"), logger=logger)
    assert objects(memory) == []


def test_a_report_names_a_checkpoint_in_a_bucket(memory: str, quiet: dict[str, Any]) -> None:
    _, trainer = fit(quiet, ModelCheckpoint(f"{memory}/run"), report=True, logger=True)
    [record] = Path(trainer.run_folder).rglob(FILE)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert f"{memory}/run/epoch=1-step=6" in [line.get("path") for line in lines]


def test_an_accelerator_keeps_its_project_in_a_bucket(memory: str) -> None:
    def loop(values: list[float]) -> float:
        accelerator = Accelerator(
            cpu=True, project_dir=f"{memory}/project", resume="auto", project_config=ProjectConfiguration(total_limit=2)
        )
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: Path(folder, "own").write_text("1"))
        accelerator.load_state()
        for value in values:
            nn.init.constant_(model.weight, value)
            accelerator.save_state()
        accelerator.end_training()
        return float(model.weight)

    loop([1.0, 2.0, 3.0])
    assert loop([]) == 3.0
    kept = all_checkpoints(BucketPath(f"{memory}/project/checkpoints"))
    assert [path.name for path in kept] == ["checkpoint_1", "checkpoint_2"]
    assert all(CheckpointReader(path).has("own") for path in kept)


def test_the_command_line_converts_from_and_to_a_bucket(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.arange(3.0)}, tmp_path / "theirs.pt")
    BucketPath(f"{memory}/theirs.pt").write_bytes((tmp_path / "theirs.pt").read_bytes())
    assert main(["convert", f"{memory}/theirs.pt"]) == 0
    assert torch.equal(CheckpointReader(tmp_path / "theirs-leyden").model()["weight"], torch.arange(3.0))
    assert main(["convert", f"{memory}/theirs.pt", f"{memory}/ours/one"]) == 0
    assert main(["checkpoint", "ls", f"{memory}/ours"]) == 0 and "one " in capsys.readouterr().out
    assert main(["checkpoint", "verify", f"{memory}/ours"]) == 0 and "whole" in capsys.readouterr().out
    assert main(["convert", f"{memory}/absent.pt"]) != 0 and "does not exist" in capsys.readouterr().err


# ranks ----------------------------------------------------------------------------------------------------------------
def on_a_rank(strategy: str, asynchronous: bool) -> bool:
    """Trains in two parts with checkpoints in a bucket, and in one part without; True if the weights are the same."""
    from torch.distributed.tensor import DTensor

    def run(epochs: int, *callbacks: Callback, path: str | None = None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = Squares(nn.Linear(4, 2), sgd_with_momentum)
        arguments: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False, "verbose": False}
        trainer = Trainer(
            max_epochs=epochs, strategy=strategy, callbacks=list(callbacks), enable_progress_bar=False, **arguments
        )
        trainer.fit(module, DataLoader(torch.randn(12, 4), batch_size=2, shuffle=True), ckpt_path=path)
        return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in module.parameters()]

    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(f"{URL}/{strategy}", every_n_train_steps=2, asynchronous=asynchronous)

    whole = run(2)
    run(1, saves(), path="auto")
    return all(map(torch.equal, whole, run(2, saves(), path="auto")))


@pytest.mark.parametrize(("strategy", "asynchronous"), [("ddp", True), ("fsdp", False)])
def test_ranks_save_their_own_parts_and_resume_exactly(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, asynchronous: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_world(2, on_a_rank, strategy, asynchronous, environ=server.environ) == [True, True]
    files = {path.rpartition("/")[2] for method, path, _ in server.requests if method == "PUT"}
    assert {"rank-0.json", "rank-1.json"} <= files
    assert ("model-00002-of-00002.safetensors" in files) == (strategy == "fsdp")
    [path] = all_checkpoints(BucketPath(f"{URL}/{strategy}"))
    assert len(objects(str(path))) == len(CheckpointReader(path).manifest.files) + 1


Kill: TypeAlias = tuple[int, str, int, bool]
"""A rank, the name of a request, which of that name from 0, and whether to kill the rank after it."""


def kills_of_a_save(server: Server) -> list[Kill]:
    """Returns all kills from the lock through the second save, which removes the first, to the release of the lock."""
    names = [name_of(method, path) for method, path, _ in server.requests if method in WRITES]
    # The test's own requests, which make the bucket, come before the lock.
    del names[: next(at for at, name in enumerate(names) if ".leyden-lock" in name)]
    points = [(at, name, names[:at].count(name)) for at, name in enumerate(names) if not re.search("step=[26]", name)]
    # Rank 1 may have ended once the last manifest is there, when rank 0 removes the save before and releases the lock.
    last = max(at for at, name in enumerate(names) if name.endswith(MANIFEST))
    return [
        (rank, *point, after)
        for at, *point in points
        for rank in ((0, 1) if at < last else (0,))
        for after in (False, True)
    ]


def check_kills_of_a_rank(
    server: Server, clients: Clients, tmp_path: Path, kills: list[Kill] | None, **options: Any
) -> int:
    """Kills one of two ranks at requests, starts both again, and compares with a run that nobody killed.

    Args:
        kills: None for all of a save.
        **options: arguments of `bucket_client.train`.

    Returns:
        The number of kills.
    """
    assert clients.run(url=f"{URL}/run", root=str(tmp_path / "whole"), **options) == [0, 0]
    expected, names = contents(f"{URL}/run"), keys(server, "run")
    kills = kills_of_a_save(server) if kills is None else kills
    for number, kill in enumerate(kills):
        victim, name, nth, after = kill
        arguments = {"url": f"{URL}/run", "root": str(tmp_path / str(number)), **options}
        BucketPath(URL).delete([path for path, _ in BucketPath(f"{URL}/run").below()])
        killer = Killer(server, nth, after, name)
        codes = clients.run({victim: killer.aim}, **arguments)
        spare(server)
        assert killer.has_killed and codes[victim] == -signal.SIGKILL, kill
        for path in all_checkpoints(BucketPath(f"{URL}/run")):
            CheckpointReader(path).verify()
        assert clients.run(**arguments) == [0, 0], kill
        assert differences(contents(f"{URL}/run"), expected) == [], kill
        assert keys(server, "run") == names, kill
    return len(kills)


def test_either_of_two_ranks_may_be_killed_while_both_save(server: Server, clients: Clients, tmp_path: Path) -> None:
    """Killed in the second save: at a part of each rank, at the manifest, and at the removal of the first save."""
    save, removal = f"PUT /{BUCKET}/run/epoch=1-step=4", f"POST /{BUCKET}"
    kills = [
        (0, f"{save}/save-/model-00001-of-00002.safetensors", 0, True),
        (1, f"{save}/save-/model-00002-of-00002.safetensors", 0, False),
        (0, f"{save}/{MANIFEST}", 0, False),
        (1, f"{save}/{MANIFEST}", 0, True),
        # The first one clears up after the lock.
        (0, removal, 1, False),
    ]
    assert check_kills_of_a_rank(server, clients, tmp_path, kills, strategy="fsdp") == len(kills)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [{"strategy": "fsdp"}, {"strategy": "ddp", "asynchronous": True}], ids=str)
def test_either_of_two_ranks_may_be_killed_at_every_request_of_a_save(
    server: Server, clients: Clients, tmp_path: Path, options: dict[str, Any]
) -> None:
    assert check_kills_of_a_rank(server, clients, tmp_path, None, **options) > 80


# requests that fail ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["fails", "loses", "cuts"])
def test_a_run_survives_requests_that_fail_once(server: Server, quiet: dict[str, Any], kind: str) -> None:
    """Each request of each object is refused once, or carried out without an answer, or cut off."""
    seen: set[tuple[str, str]] = set()

    def once(method: str, path: str) -> bool:
        is_new = (method, path) not in seen and method in WRITES
        seen.add((method, path))
        return is_new

    setattr(server, kind, once)
    whole, _ = fit(quiet)
    fit(quiet, ModelCheckpoint(f"{URL}/run"), epochs=1, path="auto")
    resumed, _ = fit(quiet, ModelCheckpoint(f"{URL}/run"), path="auto")
    assert same_weights(whole, resumed) and len(seen) > 2 * FILES
    assert len(all_checkpoints(BucketPath(f"{URL}/run"))) == 1


def test_a_manifest_whose_answer_is_lost_for_good_keeps_its_files(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bucket.RETRIES, "max_retries", 1)
    bucket.store_of.cache_clear()
    server.loses = lambda method, path: method == "PUT" and path.endswith("manifest.json")
    server.fails = lambda method, path: method == "GET" and path.endswith("manifest.json")
    with (
        pytest.raises(CheckpointError, match=r"one: cannot be written: .*503"),
        CheckpointWriter(f"{URL}/one") as writer,
    ):
        writer.model({"weight": torch.ones(3)})
        writer.commit(progress={"epoch": 0, "global_step": 1})
    server.loses = server.fails = lambda method, path: False
    CheckpointReader(f"{URL}/one").verify()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        ("404 Not Found", "NoSuchBucket", "NoSuchBucket"),
        ("403 Forbidden", "AccessDenied", "AccessDenied"),
        ("403 Forbidden", "RequestTimeTooSkewed", "RequestTimeTooSkewed"),
        ("301 Moved Permanently", "PermanentRedirect", "region"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_named_before_training(
    server: Server, quiet: dict[str, Any], status: str, code: str, words: str
) -> None:
    class Starts(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            raise AssertionError("training began")

    body = f"<Error><Code>{code}</Code><Message>told by the server</Message></Error>".encode()
    server.refuses = lambda method, path: (status, body)
    with pytest.raises(CheckpointError, match=rf"s3://runs/run.*{words}"):
        fit(quiet, ModelCheckpoint(f"{URL}/run"), Starts())


# two runs -------------------------------------------------------------------------------------------------------------
def test_two_runs_do_not_share_a_folder(server: Server, client: Client, tmp_path: Path) -> None:
    lock = BucketLock(BucketPath(f"{URL}/run"))
    lock.acquire()
    with pytest.raises(LeydenError, match="belongs to a run that is under way: this very process"):
        BucketLock(BucketPath(f"{URL}/run")).acquire()
    with pytest.raises(LeydenError, match="belongs to a run that is under way"):
        BucketLock(BucketPath(f"{URL}/run")).check_free()
    assert client.run(url=f"{URL}/run", root=str(tmp_path)) == 1
    assert objects(f"{URL}/run") == [f"{NAME}/1"]
    lock.release()
    assert client.run(url=f"{URL}/run", root=str(tmp_path)) == 0
    # Its owner ended, so the next one need not wait.
    assert [name for name in objects(f"{URL}/run") if NAME in name] == [f"{NAME}/2"]


def from_elsewhere(lock: BucketLock) -> bytes:
    """Makes it look as if another machine held the folder, and returns the content of the lock."""
    content = json.dumps({**dataclasses.asdict(Owner.here()), "place": "another machine"}).encode()
    lock._own, lock._content = 1, content
    (lock.folder / NAME / "1").write_bytes(content)  # type: ignore[union-attr]
    return content


def test_a_silent_owner_on_another_machine_loses_the_folder(memory: str, capfd: pytest.CaptureFixture[str]) -> None:
    folder = BucketPath(f"{memory}/run")
    former, lock = BucketLock(folder), BucketLock(folder, silent=0.3)
    from_elsewhere(former)
    lock.acquire()
    assert "was left by" in capfd.readouterr().err
    lock.check_held()
    with pytest.raises(LeydenError, match="was taken over by"):
        former.check_held()
    # Nor does it get the folder back by a heartbeat, or when the new owner has ended.
    lock.release()
    with pytest.raises(LeydenError, match="was taken over by"):
        former.check_held()
    former.release()
    assert objects(f"{memory}/run") == [f"{NAME}/2"]


def test_an_owner_on_another_machine_that_gives_signs_of_life_keeps_the_folder(memory: str) -> None:
    folder = BucketPath(f"{memory}/run")
    former, lock = BucketLock(folder), BucketLock(folder, silent=3.0)
    content = from_elsewhere(former)
    timer = threading.Timer(0.5, lambda: (folder / NAME / "1").write_bytes(content.replace(b"}", b" }")))
    timer.start()
    with pytest.raises(LeydenError, match="belongs to a run that is under way"):
        lock.acquire()
    timer.join()
    assert objects(f"{memory}/run") == [f"{NAME}/1"]


@pytest.mark.parametrize("hours", [1, -1])
def test_a_run_whose_clock_is_off_goes_by_that_of_the_store(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str], hours: int
) -> None:
    """libfaketime moves the clock of the whole process, that of obstore too: S3 would refuse its signatures."""
    _, preload = libfaketime.get_reload_information()
    client = Client(**preload, FAKETIME=f"{hours:+}h", NO_FAKE_STAT="1")
    try:
        living, dead = (BucketLock(BucketPath(f"{URL}/{name}"), beat=0.1) for name in ("living", "dead"))
        from_elsewhere(living), from_elsewhere(dead)
        beats = threading.Thread(target=living._keep_alive)
        beats.start()
        # As if it had been silent for a second longer than an owner may be.
        backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        backend.buckets[BUCKET].keys[f"dead/{NAME}/1"].last_modified -= timedelta(seconds=2 * SILENT + 1)
        assert client.run(url=f"{URL}/living", root=str(tmp_path)) == 1
        assert "belongs to a run that is under way" in capfd.readouterr().err
        assert client.run(url=f"{URL}/dead", root=str(tmp_path)) == 0
        assert "Waiting" not in capfd.readouterr().err
    finally:
        client.close()
        living.release()
        beats.join()
    owner = Owner.read((dead.folder / NAME / "2").read_bytes(1 << 16).removeprefix(b"ended "))
    since = datetime.strptime(owner.since, "%Y-%m-%d %H:%M:%S %z")
    assert abs(since - datetime.now(timezone.utc) - timedelta(hours=hours)) < timedelta(minutes=30)


def test_a_heartbeat_does_not_take_a_released_folder_back(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BucketPath(f"{memory}/run")
    lock, touch, began = BucketLock(folder, beat=0.01), BucketLock._touch, threading.Event()

    def slow(lock: BucketLock, content: bytes, is_gone: bool) -> None:
        began.set()
        lock._released.wait(10)
        time.sleep(0.2)
        touch(lock, content, is_gone)

    monkeypatch.setattr(BucketLock, "_touch", slow)
    lock.acquire()
    assert began.wait(10)
    lock.release()
    time.sleep(0.5)
    BucketLock(folder).check_free()


def test_a_lost_lock_stops_a_save_before_its_manifest(memory: str, quiet: dict[str, Any]) -> None:
    class Loses(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2:
                (BucketPath(f"{memory}/run") / NAME / "2").write_bytes(b"{}")

    with pytest.raises(LeydenError, match="was taken over"):
        fit(quiet, ModelCheckpoint(f"{memory}/run"), Loses(), path="auto")
    assert all_checkpoints(BucketPath(f"{memory}/run")) == []


def test_a_store_that_ignores_conditions_is_warned_of(server: Server) -> None:
    server.is_conditional = False
    with pytest.warns(UserWarning, match="If-None-Match"):
        BucketLock(BucketPath(f"{URL}/run")).acquire()


def test_a_name_that_no_url_can_have_is_refused_before_training(memory: str, quiet: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"\{step\}\?.*Leave it out"):
        fit(quiet, ModelCheckpoint(f"{memory}/run", "{step}?"))


def test_a_password_in_a_url_is_never_shown(quiet: dict[str, Any]) -> None:
    for call in (ModelCheckpoint, lambda url: Trainer(**{**quiet, "default_root_dir": url}), OnExceptionCheckpoint):
        with pytest.raises(ConfigurationError, match="holds credentials") as caught:
            call("s3://me:hunter2@runs/one")
        assert "hunter2" not in str(caught.value)


# cost -----------------------------------------------------------------------------------------------------------------
def save_large(megabytes: int) -> int:
    """Saves a tensor to a bucket, and returns by how many bytes this process grew at most meanwhile."""
    tensor = torch.zeros(megabytes << 20, dtype=torch.uint8) + 1
    # What a first upload loads and starts is not counted.
    BucketPath(f"{URL}/first").write_bytes(b"1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with CheckpointWriter(f"{URL}/large") as writer:
        writer.model({"weight": tensor})
        writer.commit(progress={"epoch": 0, "global_step": 1})
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def test_a_large_tensor_costs_the_requests_and_bytes_of_boto3_and_little_memory(server: Server, tmp_path: Path) -> None:
    grown = run_world(1, save_large, 160, environ=server.environ)[0]
    assert grown < 64_000_000
    [path] = [path for path, _ in BucketPath(f"{URL}/large").below() if path.name == "model.safetensors"]
    own = [(method, size) for method, name, size in server.sent if name.endswith("model.safetensors")]
    (tmp_path / "model.safetensors").write_bytes(path.read_bytes(1 << 30))
    server.sent.clear()
    boto3.client("s3", endpoint_url=server.environ["AWS_ENDPOINT_URL"]).upload_file(
        str(tmp_path / "model.safetensors"), BUCKET, "theirs/model.safetensors"
    )
    theirs = [(method, size) for method, name, size in server.sent if name.endswith("model.safetensors")]
    assert [method for method, _ in own] == [method for method, _ in theirs] and len(own) == 23
    assert sum(size for _, size in own) <= sum(size for _, size in theirs) + 23 * 200
