"""Locates the shards of stored tensors in a checkpoint, and reads only the parts that are wanted.

A checkpoint has a *table* for every stored tensor: `{"dtype": …, "shape": […], "shards": [[file, key, offsets, sizes],
…]}`. The offsets are those of the shard in the whole tensor. Sizes are left out if the shard is the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.safefile import CheckedFile, memory_of, read_header, room
from leyden.checkpoint.format.tensors import DTYPES, dtype_named
from leyden.core.errors import StateError
from leyden.core.saved_state import SavedState, brief

Table: TypeAlias = dict[str, Any]
Sizes: TypeAlias = tuple[int, ...]
# Tensors of fewer bytes in total go into one file, which rank 0 writes.
SPREAD_FROM = 64 * 1024 * 1024
# Bytes to read into temporary memory at a time.
_BATCH = 64 * 1024 * 1024


def whole_table(dtype: torch.dtype, shape: Sizes, file: str, key: str) -> Table:
    """Returns the table of a tensor that is a single shard."""
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(shape), "shards": [[file, key, [0] * len(shape)]]}


def file_name(stem: str, number: int, count: int) -> str:
    """Returns the name of file `number` of `count`, as transformers names it. A single file has no number."""
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"


def spread(tensors: Mapping[str, Tensor], movable: Collection[str], ranks: int) -> dict[str, int]:
    """Decides which rank writes each tensor, so that all ranks write about the same number of bytes.

    Every rank has all tensors. If they have few bytes in total, rank 0 writes them. Otherwise it writes those that are
    not movable, and any rank may write the movable ones, which are identical on all ranks.

    Example:
        >>> spread({"a": torch.zeros(9), "b": torch.zeros(5), "c": torch.zeros(4)}, "abc", 2)
        {'a': 0, 'b': 0, 'c': 0}
    """
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in tensors.items()}
    if sum(sizes.values()) < SPREAD_FROM:
        return dict.fromkeys(tensors, 0)
    chosen = {key: 0 for key in tensors if key not in movable}
    load = [0] * ranks
    load[0] = sum(sizes[key] for key in chosen)
    for key in sorted((key for key in tensors if key in movable), key=lambda key: (-sizes[key], key)):
        rank = load.index(min(load))
        chosen[key] = rank
        load[rank] += sizes[key]
    return chosen


def check_spec(spec: SavedState, others: Mapping[str, SavedState]) -> None:
    """Raises if a tensor's entry in `layout.json` is invalid. `others` are all entries, by name.

    Raises:
        StateError: names the entry.
    """
    if "alias_of" in spec:
        if "alias_of" in others.get(spec.text("alias_of"), spec):
            raise StateError(spec.path("alias_of"), "names a tensor that is not stored")
        return
    _check_form(spec)
    parts = spec.nested("parts")
    if not parts.entries:
        raise StateError(spec.path("parts"), "is empty")
    for part in parts.entries:
        table = parts.nested(part)
        _check_form(table)
        for number, shard in enumerate(table.items("shards")):
            where = table.path(f"shards[{number}]")
            if not isinstance(shard, list) or len(shard) not in (3, 4) or not all(type(n) is str for n in shard[:2]):
                raise StateError(where, "must be a file, a key, offsets and sizes")
            for sizes in shard[2:]:
                _check_sizes(where, sizes)


def _check_form(spec: SavedState) -> None:
    if spec.text("dtype") not in DTYPES:
        raise StateError(
            spec.path("dtype"), f"is {brief(spec.value('dtype'))}, which is not a dtype that this Leyden knows"
        )
    _check_sizes(spec.path("shape"), spec.value("shape"))


def _check_sizes(where: str, sizes: Any) -> None:
    if not isinstance(sizes, list) or not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise StateError(where, f"is {brief(sizes)}, and must be a list of sizes")


# reading --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """A part of a stored tensor to read, at these offsets, into a target of its shape on any device."""

    table: Table
    offsets: Sizes
    target: Tensor

    @classmethod
    def whole(cls, table: Table) -> Want:
        """Returns the whole of a stored tensor, with new memory for it."""
        shape = table["shape"]
        return cls(table, (0,) * len(shape), room(shape, dtype_named(table["dtype"])))


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """The intersection of a wanted part with one shard.

    Attributes:
        key: the shard's name in its file.
        want: the wanted part.
        begin: the piece's offsets in the shard.
        sizes: the piece's sizes.
        target: the view of the part's target that the piece fills.
    """

    key: str
    want: Want
    begin: Sizes
    sizes: Sizes
    target: Tensor


def fill(open_file: Callable[[str], CheckedFile], wants: Iterable[Want]) -> None:
    """Reads parts of tensors into their targets. Reads only the necessary rows of the necessary shards.

    `open_file` opens a file of the checkpoint by name.

    Raises:
        CheckpointError: if a file is damaged or lacks a tensor.
        ValueError: if a table is invalid. KeyError and TypeError are raised too.
    """
    by_file: dict[str, list[_Piece]] = {}
    for want in wants:
        for name, piece in _pieces(want):
            by_file.setdefault(name, []).append(piece)
    for name in sorted(by_file):
        with open_file(name) as file:
            try:
                _read_pieces(file, by_file[name])
            except (ValueError, RuntimeError, TypeError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(file.path, f"contradicts the rest of the checkpoint ({error}).") from error


def _pieces(want: Want) -> list[tuple[str, _Piece]]:
    """Returns the pieces of a wanted part, each with the file that has it."""
    shape, sizes = tuple(want.table["shape"]), tuple(want.target.shape)
    if len(shape) != len(want.offsets) or any(
        start < 0 or start + size > end for start, size, end in zip(want.offsets, sizes, shape, strict=True)
    ):
        raise ValueError(f"a tensor of shape {shape} has no part of {sizes} at {want.offsets}")
    pieces = []
    boxes = []
    for name, key, offsets, *rest in want.table["shards"]:
        extent = tuple(rest[0]) if rest else shape
        if not all(type(number) is int and number >= 0 for number in (*offsets, *extent)):
            raise ValueError(f"a shard has the sizes {extent} and the offsets {offsets}")
        begin = tuple(max(a, b) for a, b in zip(offsets, want.offsets, strict=True))
        end = tuple(min(a + n, b + m) for a, n, b, m in zip(offsets, extent, want.offsets, sizes, strict=True))
        if any(stop <= start for start, stop in zip(begin, end, strict=True)):
            continue
        piece_sizes = tuple(stop - start for start, stop in zip(begin, end, strict=True))
        target = want.target
        for dim, (start, base, size) in enumerate(zip(begin, want.offsets, piece_sizes, strict=True)):
            target = target.narrow(dim, start - base, size)
        in_shard = tuple(start - base for start, base in zip(begin, offsets, strict=True))
        boxes.append((begin, end))
        pieces.append((name, _Piece(key, want, in_shard, piece_sizes, target)))
    if sum(math.prod(piece.sizes) for _, piece in pieces) != want.target.numel() or overlap(boxes):
        # If shards overlapped, the count could be right and still leave elements unread, with arbitrary values.
        raise ValueError(f"the shards of a tensor of shape {shape} do not fill a part of {sizes} at {want.offsets}")
    return pieces


def overlap(boxes: list[tuple[Sizes, Sizes]]) -> bool:
    """Returns True if two of the boxes overlap. A box is given by its begin and its end, exclusive."""
    candidates: list[tuple[Sizes, Sizes]] = []
    for begin, end in sorted(boxes):
        # Keep only boxes that reach the row where this one begins. They are few, since most tensors are split by rows.
        candidates = [box for box in candidates if not begin or box[1][0] > begin[0]]
        for other_begin, other_end in candidates:
            if all(max(a, b) < min(c, d) for a, b, c, d in zip(begin, other_begin, end, other_end, strict=True)):
                return True
        candidates.append((begin, end))
    return False


def _read_pieces(file: CheckedFile, pieces: list[_Piece]) -> None:
    """Reads the pieces of one file: directly into their targets if possible, otherwise through temporary memory."""
    header = read_header(file)
    for piece in pieces:
        if piece.key not in header:
            raise ValueError(f"it has no tensor {piece.key!r}, which the checkpoint lists")
    targets: list[tuple[int, memoryview]] = []
    temporaries: list[tuple[Tensor, _Piece]] = []
    size = 0
    for piece in sorted(pieces, key=lambda piece: header[piece.key][2]):
        dtype, shape, offset = header[piece.key]
        # A shard may have fewer dimensions: in a folder of transformers, it is one matrix of the stacked tensor.
        shape = (1,) * (len(piece.sizes) - len(shape)) + shape
        if dtype != dtype_named(piece.want.table["dtype"]) or len(shape) != len(piece.sizes):
            raise ValueError(f"{piece.key!r} is stored as {dtype} {shape}")
        if any(start + n > end for start, n, end in zip(piece.begin, piece.sizes, shape, strict=True)):
            raise ValueError(f"{piece.key!r} of shape {shape} has no part of {piece.sizes} at {piece.begin}")
        dim, first = _rows(shape, piece)
        target = piece.target.detach()
        # Whole rows have the same layout in the file and in memory.
        whole_rows = tuple(shape[dim + 1 :]) == piece.sizes[dim + 1 :]
        if not (whole_rows and target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()):
            target = torch.empty((*piece.sizes[: dim + 1], *shape[dim + 1 :]), dtype=dtype)
            temporaries.append((target, piece))
            size += target.numel() * target.element_size()
        targets.append((offset + first * dtype.itemsize, memory_of(target)))
        if size >= _BATCH:
            _read_batch(file, targets, temporaries)
            size = 0
    _read_batch(file, targets, temporaries)


def _rows(shape: Sizes, piece: _Piece) -> tuple[int, int]:
    """Returns the first dimension in which a piece has several rows, and the index of its first element."""
    dim = next((dim for dim, size in enumerate(piece.sizes) if size != 1), max(len(shape) - 1, 0))
    first = sum(start * math.prod(shape[at + 1 :]) for at, start in enumerate(piece.begin[: dim + 1]))
    return dim, first


def _read_batch(
    file: CheckedFile, targets: list[tuple[int, memoryview]], temporaries: list[tuple[Tensor, _Piece]]
) -> None:
    """Reads into the targets, copies from temporary memory to the pieces' targets, and clears both lists."""
    file.fill(targets)
    for rows, piece in temporaries:
        part = rows
        for dim, size in enumerate(piece.sizes):
            if part.shape[dim] != size:
                part = part.narrow(dim, piece.begin[dim], size)
        piece.target.detach().copy_(part)
    targets.clear()
    temporaries.clear()
