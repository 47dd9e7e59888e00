"""Versions of the checkpoint format: recorded in the manifest, readable if earlier, and read without extra passes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leyden.accelerator.accelerator import Accelerator
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import MANIFEST, SHA256, XXH3, ChunkHasher, read_manifest
from leyden.checkpoint.format.safefile import CheckedFile
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter


def write_earlier_manifest(path: Path, data_ranks: tuple[int, ...] = ()) -> None:
    """Rewrites a checkpoint's manifest as earlier versions did, with SHA-256 for all files."""
    manifest = read_manifest(path)
    files = {}
    for name, entry in manifest.files.items():
        hasher = ChunkHasher(entry.chunk, SHA256)
        hasher.update((path / name).read_bytes())
        files[name] = hasher.entry()
    earlier = dataclasses.replace(manifest, files=files, data_ranks=data_ranks)
    (path / MANIFEST).write_bytes(earlier.to_bytes())


def test_the_manifest_names_the_checksum_algorithm_of_each_file(tmp_path: Path, write: Any) -> None:
    manifest = read_manifest(write(tmp_path / "one"))
    assert manifest.format == 3
    for name, entry in manifest.files.items():
        assert entry.algorithm == (XXH3 if name.endswith(".safetensors") else SHA256), name
    assert b'"xxh3_64": [' in manifest.to_bytes()


def test_a_checkpoint_without_tensors_is_readable_by_earlier_versions(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "plain") as writer:
        writer.json("a", 1)
        path = writer.commit(progress={})
    assert read_manifest(path).format == 1


@pytest.mark.parametrize(("version", "data_ranks"), [(1, ()), (2, (0, 0))])
def test_earlier_formats_are_read_and_damage_in_them_is_detected(
    version: int, data_ranks: tuple[int, ...], tmp_path: Path, write: Any, read: Any
) -> None:
    path = write(tmp_path / "one", 2)
    now = read(path)
    write_earlier_manifest(path, data_ranks)
    reader = CheckpointReader(path)
    assert reader.manifest.format == version
    reader.verify()
    before = read(path)
    assert before["progress"] == now["progress"] and before["hparams"] == now["hparams"]
    assert all(torch.equal(before["model"][name], tensor) for name, tensor in now["model"].items())
    for name in ("model.safetensors", "layout.json"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
        with pytest.raises(CheckpointError, match=f"{name}.* is damaged"):
            CheckpointReader(path).verify()
        (path / name).write_bytes(whole)


def test_an_unknown_checksum_algorithm_raises(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / "one")
    manifest = read_manifest(path)
    entry = dataclasses.replace(manifest.files["layout.json"], algorithm="md5")
    forged = dataclasses.replace(manifest, files={**manifest.files, "layout.json": entry})
    (path / MANIFEST).write_bytes(forged.to_bytes())
    with pytest.raises(CheckpointError, match="without checksums that this Leyden knows"):
        CheckpointReader(path)


def trained(seed: int) -> tuple[nn.Module, torch.optim.AdamW, Accelerator]:
    """Returns a model large enough for several chunks after a step, its optimizer and its Accelerator."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, 500), nn.BatchNorm1d(500), nn.Linear(500, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = Accelerator()
    accelerator.prepare(model, optimizer)
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, accelerator


def test_load_state_reads_optimizer_state_once_and_fills_weights_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, saved_optimizer, saving = trained(0)
    path = saving.save_state(tmp_path / "saved")
    model, optimizer, loading = trained(1)
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
    read: Counter[str] = Counter()
    read_exactly = CheckedFile._read_exactly

    def counting(self: CheckedFile, part: Any, views: list[memoryview], offset: int) -> None:
        read[self.path.name] += sum(map(len, views))
        read_exactly(self, part, views, offset)

    monkeypatch.setattr(CheckedFile, "_read_exactly", counting)
    loading.load_state(path)
    for mine, theirs in zip(model.state_dict().values(), source.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
        for key, value in saved_optimizer.state[theirs].items():
            assert torch.equal(optimizer.state[mine][key], value)
    assert addresses == [tensor.data_ptr() for tensor in model.state_dict().values()]
    sizes = {name: entry.size for name, entry in CheckpointReader(path).manifest.files.items()}
    # Opening a file also reads saved_optimizer header, along with the chunk that contains it.
    assert read["optimizer-0.safetensors"] < 1.05 * sizes["optimizer-0.safetensors"]
    assert read["model.safetensors"] < 2.1 * sizes["model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer-0.safetensors", "rank-0.json"])
def test_load_state_of_a_damaged_checkpoint_changes_nothing(name: str, tmp_path: Path) -> None:
    _, _, saving = trained(0)
    path = Path(saving.save_state(tmp_path / "saved"))
    data = bytearray((path / name).read_bytes())
    data[-2] ^= 1
    (path / name).write_bytes(data)
    model, optimizer, loading = trained(1)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    moments = [optimizer.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=f"{name}.* is damaged"):
        loading.load_state(path)
    for parameter, weight, moment in zip(model.parameters(), weights, moments, strict=True):
        assert torch.equal(parameter, weight) and torch.equal(optimizer.state[parameter]["exp_avg"], moment)


def test_the_error_for_damage_detected_late_says_that_weights_have_changed(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / "one")
    reader = CheckpointReader(path)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="Part of the weights have been replaced"):
        reader.fill({"weight": torch.zeros(4, 3), "bias": torch.zeros(3, dtype=torch.int64)})
