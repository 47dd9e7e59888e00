"""Files written and read in pieces, by threads, with checksums computed on the way."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from leyden.checkpoint.format import safefile
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import CHUNK, SHA256, XXH3, ChunkHasher
from leyden.checkpoint.format.safefile import CheckedFile, write_file, write_stream
from leyden.checkpoint.format.unflushed import Unflushed


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrinks the sizes of pieces, so that a few kilobytes take every path."""
    for name, size in (
        ("_PIECE", 1000),
        ("_STRETCH", 4000),
        ("_MIN_THREADED", 3000),
        ("_MAX_VIEWS", 5),
        ("_COPIED", 600),
    ):
        monkeypatch.setattr(safefile, name, size)


def spans(size: int, count: int, seed: int) -> list[tuple[int, int]]:
    """Returns disjoint spans of a file in random order; some touch, some are empty."""
    dice = random.Random(seed)
    marks = sorted(dice.choices(range(size + 1), k=2 * count))
    found = list(zip(marks[::2], marks[1::2], strict=True))
    dice.shuffle(found)
    return found


@pytest.mark.parametrize("algorithm", [SHA256, XXH3])
@pytest.mark.parametrize("chunk", [7, 256, 5000, CHUNK])
@pytest.mark.parametrize("count", [1, 3, 60])
def test_reading_parts_of_a_file_verifies_only_their_chunks(
    algorithm: str, chunk: int, count: int, tmp_path: Path
) -> None:
    data = random.Random(0).randbytes(20_011)
    entry = write_file(tmp_path / "file", [data[:3], data[3:3], data[3:]], chunk, algorithm)
    assert (tmp_path / "file").read_bytes() == data and entry.size == len(data)
    wanted = spans(len(data), count, seed=chunk + count)
    for known in (entry, None):
        buffers = [(begin, memoryview(bytearray(end - begin))) for begin, end in wanted]
        verified: set[int] = set()
        with CheckedFile(tmp_path, "file", known, verified) as file:
            file.fill(buffers)
        assert all(bytes(view) == data[begin : begin + len(view)] for begin, view in buffers)
        touched = {number for begin, end in wanted if end > begin for number in range(begin // chunk, -(-end // chunk))}
        assert verified == (touched if known else set())

    # A byte in every fifth chunk is damaged: reads of these chunks raise, other reads do not.
    damaged = set(range(0, len(data), 5 * chunk))
    (tmp_path / "file").write_bytes(bytes(byte ^ (position in damaged) for position, byte in enumerate(data)))
    with CheckedFile(tmp_path, "file", entry) as file:
        for begin, end in wanted:
            hit = end > begin and any(number % 5 == 0 for number in range(begin // chunk, -(-end // chunk)))
            if hit:
                with pytest.raises(CheckpointError, match="is damaged"):
                    file.fill([(begin, memoryview(bytearray(end - begin)))])
            else:
                file.fill([(begin, memoryview(bytearray(end - begin)))])
        with pytest.raises(CheckpointError, match="is damaged: the checksum of bytes 0 to"):
            file.verify()


def test_verify_unread_skips_chunks_already_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(1).randbytes(10_000)
    entry = write_file(tmp_path / "file", [data], 100, XXH3)
    read: list[tuple[int, int]] = []
    exactly = CheckedFile._read_exactly

    def record_read(self: CheckedFile, part: Any, views: list[memoryview], offset: int) -> None:
        read.append((offset, sum(map(len, views))))
        exactly(self, part, views, offset)

    with CheckedFile(tmp_path, "file", entry) as file:
        file.fill([(250, memoryview(bytearray(300)))])
        monkeypatch.setattr(CheckedFile, "_read_exactly", record_read)
        file.verify(unread=True)
    assert sum(size for _, size in read) == 10_000 - 400
    assert not any(offset < 600 and offset + size > 200 for offset, size in read)


def test_a_file_truncated_while_open_raises(tmp_path: Path) -> None:
    entry = write_file(tmp_path / "file", [bytes(9000)], 100, XXH3)
    with CheckedFile(tmp_path, "file", entry) as file:
        os.truncate(tmp_path / "file", 5000)
        with pytest.raises(CheckpointError, match="cut short"):
            file.verify()


def test_reading_works_without_preadv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows lacks preadv."""
    data = random.Random(2).randbytes(9000)
    entry = write_file(tmp_path / "file", [data], 100, XXH3)
    monkeypatch.delattr(os, "preadv", raising=False)
    with CheckedFile(tmp_path, "file", entry) as file:
        assert file.read(10_000) == data


def test_tensors_that_need_a_copy_are_copied_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        "plain": torch.randn(20, 30),
        "transposed": torch.randn(40, 50).t(),
        "channels_last": torch.randn(3, 4, 10, 10).to(memory_format=torch.channels_last),
        "first_of_one": torch.randn(2, 1, 30, 40).transpose(0, 1),
        "repeated": torch.randn(50, 1).expand(50, 40),
        "every_second": torch.arange(4000)[::2],
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 7).t(),
    }
    copied: list[int] = []
    memory_of = safefile.memory_of

    def record_copy(tensor: torch.Tensor) -> memoryview:
        if not any(tensor.data_ptr() == original.data_ptr() for original in tensors.values()):
            copied.append(tensor.nbytes)
        return memory_of(tensor)

    monkeypatch.setattr(safefile, "memory_of", record_copy)
    entry = write_stream(
        tmp_path / "file.safetensors",
        {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()},
        tensors.__getitem__,
    )
    assert max(copied) <= 600 and len(copied) > 20
    back = load_file(tmp_path / "file.safetensors")
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)
    hasher = ChunkHasher(entry.chunk, XXH3)
    hasher.update((tmp_path / "file.safetensors").read_bytes())
    assert hasher.entry() == entry


def test_flush_flushes_every_file_and_names_the_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unflushed = Unflushed()
    entries = {name: write_file(tmp_path / name, [name.encode()], unflushed=unflushed) for name in ("a", "b", "c")}
    assert all(entry.size == 1 for entry in entries.values())
    fsync, flushed = os.fsync, list[str]()

    def failing(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append(name)
        if name == "b":
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="No space left") as caught:
        unflushed.flush()
    assert caught.value.filename == "b" and sorted(flushed) == ["a", "b", "c"]
    unflushed.flush()
    unflushed.close()
    assert len(flushed) == 3
