"""Damaged and hostile checkpoints: never loaded, their code never run, the file named, an intact one found instead."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import Bomb, forge

from leyden import checkpoint
from leyden.checkpoint import writer as writer_module
from leyden.checkpoint.folder import newest
from leyden.checkpoint.foreign import load_foreign
from leyden.checkpoint.format.errors import CheckpointError, UnsupportedStateError
from leyden.checkpoint.format.manifest import MANIFEST, FileEntry, Manifest, read_manifest
from leyden.checkpoint.format.safefile import MAX_HEADER
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter

FILES = [
    "manifest.json",
    "progress.json",
    "layout.json",
    "model.safetensors",
    "optimizer.json",
    "optimizer-0.safetensors",
    "rank-0.json",
    "rank-0.safetensors",
    "callbacks.json",
    "hparams.json",
]


@pytest.fixture
def pair(tmp_path: Path, write: Any) -> tuple[Path, Path]:
    """Writes an intact checkpoint, and a newer one for the test to damage."""
    return write(tmp_path / "old", 1), write(tmp_path / "new", 2)


def assert_rejected(old: Path, new: Path, name: str, read: Any) -> None:
    """Asserts that opening the newer checkpoint raises and names the file, and that the older one is found."""
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(new).verify()
    assert str(new / name) in str(caught.value)
    with pytest.raises(CheckpointError, match=name):
        read(new)
    with pytest.warns(UserWarning, match=name):
        assert newest(old.parent) == old
    assert float(read(old)["model"]["weight"][0, 0]) == 1.0


def test_an_intact_checkpoint_has_all_listed_files_and_verifies(pair: tuple[Path, Path]) -> None:
    assert sorted(os.listdir(pair[1])) == sorted(FILES)
    CheckpointReader(pair[1]).verify()
    assert newest(pair[1].parent) == pair[1]


@pytest.mark.parametrize("position", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_detected(pair: tuple[Path, Path], read: Any, name: str, position: float) -> None:
    data = bytearray((pair[1] / name).read_bytes())
    data[int(position * (len(data) - 1))] ^= 1 << int(position * 7)
    (pair[1] / name).write_bytes(data)
    assert_rejected(*pair, name, read)


def test_a_flip_of_any_bit_in_the_manifest_is_detected(pair: tuple[Path, Path]) -> None:
    good = (pair[1] / MANIFEST).read_bytes()
    for index in range(len(good) * 8):
        data = bytearray(good)
        data[index // 8] ^= 1 << index % 8
        with pytest.raises(ValueError, match=r"manifest|digest"):
            Manifest.from_bytes(bytes(data))


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_detected(pair: tuple[Path, Path], read: Any, name: str, keep: float) -> None:
    os.truncate(pair[1] / name, int(os.path.getsize(pair[1] / name) * keep))
    assert_rejected(*pair, name, read)


@pytest.mark.parametrize("name", FILES)
def test_an_extended_file_is_detected(pair: tuple[Path, Path], read: Any, name: str) -> None:
    with open(pair[1] / name, "ab") as file:
        file.write(b" ")
    assert_rejected(*pair, name, read)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_detected(pair: tuple[Path, Path], read: Any, name: str) -> None:
    (pair[1] / name).unlink()
    assert_rejected(*pair, name, read)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_or_a_fifo_in_place_of_a_file_is_detected(pair: tuple[Path, Path], read: Any, name: str) -> None:
    (pair[1] / name).unlink()
    (pair[1] / name).mkdir()
    assert_rejected(*pair, name, read)
    (pair[1] / name).rmdir()
    os.mkfifo(pair[1] / name)
    assert_rejected(*pair, name, read)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("forged", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_place_of_a_file_is_never_loaded(
    pair: tuple[Path, Path], read: Any, name: str, forged: bool, zipped: bool, tmp_path: Path
) -> None:
    mark = tmp_path / "code-was-run"
    source = tmp_path / "bomb"
    torch.save(Bomb(mark), source) if zipped else source.write_bytes(pickle.dumps(Bomb(mark)))
    if forged and name != MANIFEST:
        forge(pair[1], name, source.read_bytes())
        with pytest.raises(CheckpointError, match=name):
            read(pair[1])
    else:
        shutil.copy(source, pair[1] / name)
        assert_rejected(*pair, name, read)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))  # proves that the payload works
    assert mark.exists()


def with_names(manifest: Manifest, files: dict[str, FileEntry]) -> bytes:
    return Manifest(files, manifest.save_counter, manifest.saved_at, {}, 1, "x").to_bytes()


@pytest.mark.parametrize(
    "name", ["../outside.json", "/etc/passwd", "a/../../outside.json", "C:\\x", "..", "", "./a", "a\0b"]
)
def test_a_manifest_entry_outside_the_folder_is_rejected(pair: tuple[Path, Path], read: Any, name: str) -> None:
    manifest = read_manifest(pair[1])
    (pair[1] / MANIFEST).write_bytes(with_names(manifest, {**manifest.files, name: FileEntry(0, ())}))
    assert_rejected(*pair, MANIFEST, read)


@pytest.mark.parametrize("where", ["rank-0.json", "layout.json"])
@pytest.mark.parametrize("name", ["../old/rank-0.safetensors", "/etc/passwd", "unlisted.safetensors"])
def test_a_reference_to_a_file_outside_the_checkpoint_is_rejected(
    pair: tuple[Path, Path], read: Any, where: str, name: str
) -> None:
    text = (pair[1] / where).read_text()
    inside = "rank-0.safetensors" if where == "rank-0.json" else "model.safetensors"
    assert inside in text
    shutil.copy(pair[1] / inside, pair[1] / "unlisted.safetensors")
    forge(pair[1], where, text.replace(inside, name).encode())
    with pytest.raises(CheckpointError, match="not part of this checkpoint"):
        read(pair[1])


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_folder_is_rejected(pair: tuple[Path, Path], read: Any, name: str) -> None:
    (pair[1] / name).unlink()
    (pair[1] / name).symlink_to(pair[0] / name)
    assert_rejected(*pair, name, read)


def header(entries: Any) -> bytes:
    return framed(json.dumps(entries).encode())


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
SAFETENSORS = {
    "oversized header": (2**63).to_bytes(8, "little") + b"{}",
    "header over the limit": (MAX_HEADER + 1).to_bytes(8, "little") + b"{}",
    "header longer than the file": (100).to_bytes(8, "little") + b"{}",
    "no header": b"",
    "short": b"\0\0",
    "no JSON": (4).to_bytes(8, "little") + b"\x80\x04N.",
    "deep JSON": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "a list": header([]),
    "offsets beyond the end": header({"weight": {**ONE, "data_offsets": [0, 400]}}) + b"1234",
    "wrong size": header({"weight": {**ONE, "shape": [2]}}) + b"1234",
    "negative shape": header({"weight": {**ONE, "shape": [-1, -1]}}) + b"1234",
    "enormous shape": header({"weight": {**ONE, "shape": [2**62, 2**62]}}) + b"1234",
    "enormous empty shape": header({"weight": {**ONE, "shape": [2**61, 2**61, 0], "data_offsets": [0, 0]}}),
    "true as a size": header({"weight": {**ONE, "shape": [True]}}) + b"1234",
    "unknown dtype": header({"weight": {**ONE, "dtype": "OBJ"}}) + b"1234",
    "overlap": header({"weight": ONE, "bias": ONE}) + b"1234",
    "gap": header({"weight": {**ONE, "data_offsets": [4, 8]}}) + b"12345678",
    "trailing bytes": header({"weight": ONE}) + b"12345678",
    "duplicate name": framed(b'{"w":%s,"w":%s}' % ((json.dumps(ONE).encode(),) * 2)) + b"1234",
    "other tensors": header({"other": ONE}) + b"1234",
}


@pytest.mark.parametrize("kind", SAFETENSORS)
def test_a_forged_safetensors_file_raises(pair: tuple[Path, Path], kind: str) -> None:
    forge(pair[1], "model.safetensors", SAFETENSORS[kind])
    reader = CheckpointReader(pair[1])
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        reader.model()


BOMBS = [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 100_000, b"", b"\xff\xfe", b"NaN", b"[]", b"{}", b"null"]


@pytest.mark.parametrize("name", ["layout.json", "optimizer.json", "rank-0.json", "callbacks.json", "progress.json"])
@pytest.mark.parametrize("data", BOMBS, ids=lambda data: repr(data[:6]))
def test_a_forged_json_file_raises(pair: tuple[Path, Path], read: Any, name: str, data: bytes) -> None:
    if (name, data) == ("progress.json", b"{}"):
        pytest.skip("an empty progress is valid")
    forge(pair[1], name, data)
    with pytest.raises(CheckpointError, match=name):
        read(pair[1])


@pytest.mark.parametrize(
    "change",
    [
        lambda layout: layout["tensors"]["weight"].update(shape=[3, 5]),
        lambda layout: layout["tensors"]["weight"].update(strides=[1, 2**40]),
        lambda layout: layout["tensors"]["weight"].update(alias_of="weight2"),
        lambda layout: layout["tensors"]["weight"]["parts"][""].update(shape=[10**9, 10**9]),
        lambda layout: layout["tensors"]["weight"]["parts"][""].update(shape=[5, 3], shards=[]),
        lambda layout: layout["tensors"]["weight"]["parts"][""]["shards"][0].__setitem__(1, "bias"),
        lambda layout: layout["tensors"].update(weight=3),
        lambda layout: layout.update(extra=["x"]),
    ],
)
def test_a_forged_layout_raises(pair: tuple[Path, Path], change: Callable[[Any], None]) -> None:
    layout = json.loads((pair[1] / "layout.json").read_text())
    change(layout)
    forge(pair[1], "layout.json", json.dumps(layout).encode())
    with pytest.raises(CheckpointError, match="new"):
        CheckpointReader(pair[1]).model()


def test_overlapping_shards_never_expose_uninitialized_memory(tmp_path: Path) -> None:
    """The sizes add up, but some rows of the tensor would be left uninitialized."""
    with CheckpointWriter(tmp_path / "one") as writer:
        writer.model({"weight": torch.ones(4, 3)})
        path = writer.commit(progress={})
    layout = json.loads((path / "layout.json").read_text())
    shard = ["model.safetensors", "weight", [0, 0], [2, 3]]
    layout["tensors"]["weight"]["parts"][""]["shards"] = [shard, shard]
    forge(path, "layout.json", json.dumps(layout).encode())
    with pytest.raises(CheckpointError, match="do not fill"):
        CheckpointReader(path).model()
    with pytest.raises(CheckpointError, match="do not fill"):
        CheckpointReader(path).fill({"weight": torch.empty(4, 3)})


@pytest.mark.parametrize("kind", ["stride 0", "empty strings"])
def test_a_small_file_cannot_request_a_large_allocation(tmp_path: Path, kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    with CheckpointWriter(tmp_path / "one") as writer:
        writer.state("user", {"tensor": torch.ones(1).expand(9), "array": numpy.array(["a", "b"])})
        path = writer.commit(progress={})
    user = json.loads((path / "user.json").read_text())
    if kind == "stride 0":
        user["tree"]["tensor"]["shape"] = [2**31]
    else:
        user["tree"]["array"].update(dtype="<U0", shape=[2**31])
    forge(path, "user.json", json.dumps(user).encode())
    with pytest.raises(CheckpointError, match=r"user\.json"):
        CheckpointReader(path).state("user")


def test_deeply_nested_json_raises_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointWriter(tmp_path / "one") as writer:
        writer.state("user", [])
        path = writer.commit(progress={})
    forge(path, "user.json", b'{"tensors": null, "tree": [' + b"[[]]," * 2_100_000 + b"[]]}")
    with pytest.raises(CheckpointError, match="4200003 nested parts"):
        CheckpointReader(path).state("user")
    # The writer enforces the same limit.
    monkeypatch.setattr(writer_module, "MAX_PARTS", 100)
    with (
        CheckpointWriter(path) as writer,
        pytest.raises(UnsupportedStateError, match="user is a nest of 103 lists and"),
    ):
        writer.state("user", [[] for _ in range(101)])


def test_the_error_for_a_newer_format_asks_for_an_update(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lowering the supported format stands in for a newer checkpoint, whose digest would differ.
    monkeypatch.setattr("leyden.checkpoint.format.manifest.FORMAT", 0)
    with pytest.raises(CheckpointError, match="update leyden"):
        CheckpointReader(pair[1])


def test_opening_a_path_without_a_checkpoint_raises(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        CheckpointReader(tmp_path / "none")
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="load_foreign"):
        CheckpointReader(tmp_path / "file")
    with pytest.raises(CheckpointError, match="has no manifest.json"):
        CheckpointReader(tmp_path)


def test_only_foreign_py_can_open_a_pickle() -> None:
    package = Path(checkpoint.__file__).parent
    for file in package.glob("*.py"):
        names = {
            alias.name if isinstance(node, ast.Import) else node.module
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)}
        opens_pickles = bool(names & {"pickle", "marshal", "shelve"}) or bool(
            calls & {"torch.load", "eval", "exec", "numpy.load"}
        )
        assert opens_pickles == (file.name == "foreign.py"), file.name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_foreign_pickle_needs_trust(tmp_path: Path) -> None:
    mark = tmp_path / "code-was-run"
    torch.save({"state": Bomb(mark)}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="trust=True"):
        load_foreign(tmp_path / "x.ckpt")
    assert not mark.exists()
    load_foreign(tmp_path / "x.ckpt", trust=True)
    assert mark.exists()


def test_a_foreign_pickle_of_weights_is_not_unpickled_in_full(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    assert torch.equal(load_foreign(tmp_path / "x.pt", trust=True)["w"], torch.ones(2))
    assert not [warning for warning in recwarn if "unpickled in full" in str(warning.message)]
    torch.save({"state": Bomb(tmp_path / "mark")}, tmp_path / "y.pt")
    with pytest.warns(UserWarning, match="unpickled in full"):
        load_foreign(tmp_path / "y.pt", trust=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("data", [b"", b"garbage", b"\x80\x04."])
def test_an_unreadable_foreign_file_raises(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        load_foreign(tmp_path / "x.pt", trust=True)


def test_foreign_safetensors_load_without_trust(tmp_path: Path) -> None:
    import safetensors.torch

    weights = {"a": torch.ones(3, 2, dtype=torch.bfloat16), "b": torch.tensor(1)}
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors")
    loaded = load_foreign(tmp_path / "w.safetensors")
    assert torch.equal(loaded["a"], weights["a"])
    assert torch.equal(loaded["b"], weights["b"])
    for data in SAFETENSORS.values():
        (tmp_path / "bad.safetensors").write_bytes(data)
        if data not in (SAFETENSORS["other tensors"],):
            with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
                load_foreign(tmp_path / "bad.safetensors")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_foreign(tmp_path / "none.safetensors")
