"""Checkpoints are read from a bucket like from a folder: the same values, in ranges, checked by their checksums."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from buckets import BUCKET, Server, serving, upload
from click.testing import CliRunner
from models import SAVED, Regression, sgd_with_momentum
from obstore.store import MemoryStore
from ranks.world import run_world
from same import differences, same_weights
from torch import nn
from torch.utils.data import DataLoader

from leyden import Accelerator, ConfigurationError, Trainer
from leyden.callbacks import ModelCheckpoint
from leyden.checkpoint.format import bucket
from leyden.checkpoint.format.bucket import RETRIES, BucketPath, place_of, store_of
from leyden.checkpoint.format.errors import CheckpointError, NoCheckpointError
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter
from leyden.cli.checkpoint.checkpoints import command as group
from leyden.cli.checkpoint.checkpoints import merge_command
from leyden.core.errors import MissingExtraError
from leyden.trainer import CheckpointIO

URL = f"s3://{BUCKET}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(monkeypatch) as server:
        yield server


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with one tensor of several chunks and one small tensor."""
    with CheckpointWriter(tmp_path / "step=1") as writer:
        writer.model({"large": torch.randn(3000, 1000), "small": torch.arange(5, dtype=torch.uint8)})
        writer.state("user", {"seen": {1, 2}, "tensor": torch.ones(3)})
        return writer.commit(progress={"epoch": 0, "global_step": 1})


def test_a_bucket_gives_what_the_folder_gives(checkpoint: Path, server: Server) -> None:
    upload(server.store(), checkpoint, "team/step=1")
    local, remote = CheckpointReader(checkpoint), CheckpointReader(f"{URL}/team/step=1/")
    remote.verify()
    remote.verify_sizes()
    assert remote.manifest == local.manifest and remote.progress() == local.progress()
    assert differences(remote.model(), local.model()) == []
    assert differences(remote.state("user"), local.state("user")) == []
    assert str(remote.path) == f"{URL}/team/step=1" and remote.path.name == "step=1"


def test_only_the_ranges_of_a_tensor_are_requested(checkpoint: Path, server: Server) -> None:
    upload(server.store(), checkpoint, "one")
    reader = CheckpointReader(f"{URL}/one")
    server.requests.clear()
    assert torch.equal(reader.model(["small"])["small"], torch.arange(5, dtype=torch.uint8))
    ranges = [span.removeprefix("bytes=").split("-") for _, path, span in server.requests if "safetensors" in path]
    taken = sum(int(last) - int(first) + 1 for first, last in (span for span in ranges if len(span) == 2))
    assert 0 < taken < 600_000 < (checkpoint / "model.safetensors").stat().st_size
    assert len(server.requests) < 10


def test_damage_and_loss_are_named(checkpoint: Path, server: Server) -> None:
    store = server.store()
    upload(store, checkpoint, "one")
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[7_000_000] ^= 1
    obstore.put(store, "one/model.safetensors", bytes(data))
    with pytest.raises(CheckpointError, match=f"{URL}/one/model.safetensors: is damaged"):
        CheckpointReader(f"{URL}/one").verify()
    obstore.put(store, "one/model.safetensors", bytes(data[:-1]))
    with pytest.raises(CheckpointError, match="bytes instead of"):
        CheckpointReader(f"{URL}/one").verify_sizes()
    obstore.delete(store, "one/model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors: is missing"):
        CheckpointReader(f"{URL}/one").model()
    obstore.delete(store, "one/manifest.json")
    with pytest.raises(CheckpointError, match="manifest.json: is missing"):
        CheckpointReader(f"{URL}/one")


def test_requests_that_fail_for_a_while_are_repeated(checkpoint: Path, server: Server) -> None:
    upload(server.store(), checkpoint, "one")
    failed: dict[str, int] = {}

    def twice(method: str, path: str) -> bool:
        failed[path] = failed.get(path, 0) + 1
        return failed[path] <= 2

    server.fails = twice
    reader = CheckpointReader(f"{URL}/one")
    reader.verify()
    assert differences(reader.model(), CheckpointReader(checkpoint).model()) == []
    assert len(failed) >= 3 and max(failed.values()) > 2


def test_what_is_no_checkpoint_is_named(checkpoint: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(server.store(), checkpoint, "runs/step=1")
    with pytest.raises(NoCheckpointError, match=f"{URL}/runs: is not a checkpoint: it has no manifest.json"):
        CheckpointReader(f"{URL}/runs")
    with pytest.raises(CheckpointError, match=f"{URL}/other: does not exist"):
        CheckpointReader(f"{URL}/other")
    with pytest.raises(CheckpointError, match="s3://absent/step=1: .*(NoSuchBucket|does not exist)"):
        CheckpointReader("s3://absent/step=1")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://me:hunter2@runs/one", "holds credentials.*AWS_ACCESS_KEY_ID"),
        ("s3://runs/one?X-Amz-Signature=hunter2", "holds credentials"),
        ("s3:///one", "names no bucket"),
        ("s3://runs/../one", r"\.\. mean nothing"),
        ("ftp://runs/one", "ftp://runs/one.*is a URL"),
    ],
)
def test_bad_urls_are_refused_without_their_secrets(url: str, message: str, quiet: Any) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        Trainer(**quiet).fit(Regression(nn.Linear(1, 1)), ckpt_path=url)
    assert "hunter2" not in str(caught.value)


def data() -> DataLoader[Any]:
    x = torch.linspace(-1, 1, 24).reshape(-1, 1)
    return DataLoader(list(zip(x, 2 * x, strict=True)), batch_size=2, shuffle=True)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))


def module() -> Regression:
    return Regression(net(), sgd_with_momentum)


def test_a_fit_resumes_from_a_url_with_the_bits_of_a_folder(tmp_path: Path, quiet: Any, server: Server) -> None:
    whole = module()
    arguments = {**quiet, "max_epochs": 2, "enable_checkpointing": True}
    torch.manual_seed(2)
    Trainer(callbacks=ModelCheckpoint(filename="{step}", every_n_train_steps=5, save_top_k=-1), **arguments).fit(
        whole, data()
    )
    saved = tmp_path / SAVED / "step=5"
    upload(server.store(), saved, "step=5")
    resumed, half = module(), module()
    trainer = Trainer(**arguments)
    trainer.fit(resumed, data(), ckpt_path=f"{URL}/step=5")
    assert same_weights(whole, resumed) and trainer.ckpt_path == f"{URL}/step=5"
    # The run has a folder of its own.
    assert Path(trainer.checkpoint_callback.best_model_path).parent == tmp_path / "version_1" / "checkpoints"
    Trainer(**quiet).validate(half, data(), ckpt_path=f"{URL}/step=5")
    assert same_weights(half, Regression.load_from_checkpoint(f"{URL}/step=5", net=net()))
    assert differences(dict(half.state_dict()), CheckpointReader(saved).model()) == []


def on_a_rank(folder: str) -> bool:
    """Loads a checkpoint of one process into a sharded model, from a bucket; True if each rank has its own part."""
    from torch.distributed.tensor import DTensor

    loaded = module()
    arguments = {"accelerator": "cpu", "devices": 2, "barebones": True, "strategy": "fsdp"}
    Trainer(max_epochs=2, **arguments).fit(loaded, data(), ckpt_path=f"{URL}/step=5")
    reference = module()
    Trainer(max_epochs=2, **arguments).fit(reference, data(), ckpt_path=f"{folder}/step=5")
    parts = [[p.to_local() for p in m.parameters() if isinstance(p, DTensor)] for m in (loaded, reference)]
    return len(parts[0]) == 4 and all(map(torch.equal, *parts))


def test_ranks_read_their_shards_from_a_url(tmp_path: Path, quiet: Any, server: Server) -> None:
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)
    arguments = {**quiet, "enable_checkpointing": True}
    Trainer(max_epochs=1, callbacks=saves, **arguments).fit(module(), data())
    upload(server.store(), tmp_path / "step=5", "step=5")
    assert run_world(2, on_a_rank, str(tmp_path), environ=server.environ) == [True, True]


def test_the_accelerator_loads_from_a_url(tmp_path: Path, server: Server) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())
    accelerator.save_state(tmp_path / "state")
    upload(server.store(), tmp_path / "state", "state")
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(f"{URL}/state")
    assert differences(dict(model.state_dict()), saved) == []


def test_the_command_line_reads_urls(checkpoint: Path, tmp_path: Path, server: Server) -> None:
    def output(*words: Any) -> str:
        result = CliRunner().invoke(
            group if words[0] != "merge" else merge_command, list(map(str, words))[words[0] == "merge" :]
        )
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.output

    upload(server.store(), checkpoint, "runs/step=1")
    assert "step=1 " in output("ls", f"{URL}/runs")
    assert output("verify", f"{URL}/runs").startswith(f"whole    {URL}/runs/step=1")
    assert "2 tensors with 3,000,005 elements" in output("show", f"{URL}/runs/step=1")
    output("merge", f"{URL}/runs/step=1", tmp_path / "merged.safetensors")
    assert (tmp_path / "merged.safetensors").stat().st_size > 12_000_000


def test_empty_objects_odd_names_and_a_whole_bucket(server: Server) -> None:
    store, whole = server.store(), BucketPath(URL)
    obstore.put(store, "odd/empty", b"")
    obstore.put(store, "odd/a?b %20ü", b"123")
    assert (whole / "odd" / "empty").read_bytes(10) == b""
    assert whole.open_inside("odd/empty")[0].part(0, 0).read([memoryview(bytearray(2))], 0) == 0
    assert [path.name for path in (whole / "odd").iterdir()] == ["a?b %20ü", "empty"]
    assert (whole / "odd" / "a?b %20ü").read_bytes(2) == b"12"
    assert whole.is_dir() and not whole.is_file() and whole / "odd" in list(whole.iterdir())


def test_a_file_of_more_parts_than_a_store_takes_has_larger_ones(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "MOST_PARTS", 2)
    path = BucketPath(f"{URL}/large")
    with path.upload(5 * bucket.PART) as file:
        for number in range(5):
            file.write(bytes([number]) * bucket.PART)
    assert [method for method, name, _ in server.requests if name.endswith("/large")].count("PUT") == 2
    assert path.read_bytes(6 * bucket.PART) == b"".join(bytes([number]) * bucket.PART for number in range(5))


def test_a_plugin_gets_urls_and_needs_no_obstore(tmp_path: Path, quiet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stored(CheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            saved.append(path)

        def remove_checkpoint(self, path: Any) -> None:
            removed.append(path)

        def load_checkpoint(self, path: Any, map_location: Any = None) -> Any:
            loaded.append(path)
            return {"state_dict": {name: torch.zeros_like(value) for name, value in module().state_dict().items()}}

    saved: list[str] = []
    removed: list[str] = []
    loaded: list[str] = []
    monkeypatch.setitem(sys.modules, "obstore", None)
    zeros = module()
    Trainer(plugins=[Stored()], **quiet).validate(zeros, data(), ckpt_path="s3://runs/one")
    assert loaded == ["s3://runs/one"] and not any(parameter.any() for parameter in zeros.parameters())
    saves = ModelCheckpoint("s3://runs/mine", "{step}", save_top_k=2)
    arguments = {**quiet, "enable_checkpointing": True}
    Trainer(plugins=[Stored()], callbacks=saves, max_epochs=3, **arguments).fit(module(), data())
    assert saved == [f"s3://runs/mine/step={step}" for step in (12, 24, 36)] and removed == saved[:1]
    with pytest.raises(MissingExtraError, match=r"leyden\[remote\]"):
        Trainer(**quiet).validate(module(), data(), ckpt_path="s3://runs/one")


def test_an_azure_account_is_no_password() -> None:
    place = place_of("abfss://box@account.dfs.core.windows.net/run", "path")
    assert str(place) == "abfss://box@account.dfs.core.windows.net/run"
    with pytest.raises(ConfigurationError, match="credentials"):
        place_of("abfss://me:hunter2@account/run", "path")


def test_missing_credentials_are_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # The address of a cloud's metadata service, here one where nobody answers.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(RETRIES, "max_retries", 1)
    store_of.cache_clear()
    with pytest.raises(CheckpointError, match="no credentials .*AWS_ACCESS_KEY_ID"):
        CheckpointReader(f"{URL}/one")


def test_paths_in_buckets_behave_like_paths() -> None:
    one = BucketPath("memory://bucket/a//b/")
    assert str(one) == "memory://bucket/a/b" and one == BucketPath("memory://bucket/a/b") and len({one, one / "c"}) == 2
    assert one.parent / "b" == one and str(one.parent.parent) == "memory://bucket" and (one / "c").name == "c"
    assert isinstance(one._store, MemoryStore) and not one.exists()
    obstore.put(one._store, "a/b/c", b"12")
    assert one.is_dir() and not one.is_file() and (one / "c").is_file() and not (one / "c").is_dir()
    assert list(one.iterdir()) == [one / "c"] and (one / "c").read_bytes(1) == b"1"
