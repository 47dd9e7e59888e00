"""Detects whether machines share a folder. If not, sends each machine the files that the others wrote."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import FileEntry
from leyden.checkpoint.format.safefile import write_file

_PIECE = 16 * 1024 * 1024


def is_shared(folder: str | os.PathLike[str], ranks: CheckpointRanks) -> bool:
    """Returns True on every rank if all ranks see the same folder.

    Rank 0 writes a token file there, and the other ranks look for it.

    Raises:
        CheckpointError: if rank 0 cannot write to the folder.
    """
    folder = Path(folder)
    name = ranks.first(lambda: _write_token(folder))
    seen = ranks.gather((folder / name).is_file())
    if ranks.rank == 0:
        (folder / name).unlink(missing_ok=True)
    return all(seen)


def _write_token(folder: Path) -> str:
    name = f".leyden-token-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    except OSError as error:
        raise CheckpointError(
            folder, f"cannot be written: {error.strerror or error}. Choose another dirpath."
        ) from error
    return name


def ship(files: list[Mapping[str, FileEntry]], folder: Path, ranks: CheckpointRanks) -> None:
    """Sends the files that each rank wrote to the keepers of all other folders. All ranks call it.

    Raises:
        CheckpointError: on all ranks, if one cannot read or write a file, or receives wrong bytes.
    """
    problems: list[str] = []
    for source, written in enumerate(files):
        for name in sorted(written):
            pieces = _pieces(folder / name, source, ranks, problems)
            # The machine that wrote the file already has it.
            if ranks.is_keeper and ranks.rank != source - source % ranks.share[1]:
                try:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    wanted = written[name]
                    if write_file(folder / name, pieces, wanted.chunk, wanted.algorithm) != wanted:
                        problems.append(f"{name} was not received as rank {source} wrote it")
                except OSError as error:
                    problems.append(f"{name} cannot be written: {error.strerror or error}")
            # Every rank consumes all pieces, since each piece is a broadcast.
            for _ in pieces:
                pass
    for rank, reported in enumerate(ranks.gather(problems)):
        if reported:
            raise CheckpointError(folder, f"is incomplete on the machine of rank {rank}: {reported[0]}.")


def _pieces(path: Path, source: int, ranks: CheckpointRanks, problems: list[str]) -> Iterator[bytes]:
    """Yields the bytes of a file of rank `source` on every rank. Ends early if that rank cannot read the file."""
    with ExitStack() as stack:
        file: BinaryIO | None = None
        if ranks.rank == source:
            try:
                file = stack.enter_context(open(path, "rb"))
            except OSError as error:
                problems.append(f"{path.name} cannot be read: {error.strerror or error}")
        while True:
            piece = ranks.send(_read_piece(file, problems), source)
            if not piece:
                return
            yield piece


def _read_piece(file: BinaryIO | None, problems: list[str]) -> bytes:
    try:
        return b"" if file is None else file.read(_PIECE)
    except OSError as error:
        problems.append(f"cannot be read: {error.strerror or error}")
        return b""
