"""Plans which rank writes which part of sharded tensors, in time that grows with the number of parts.

Each rank describes the rectangles that it holds. A rectangle that several ranks hold is written by the one of them that
has least to write. What is planned once serves the next saves, as long as every rank describes the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from leyden.trainer.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.trainer.format.errors import CheckpointError
from leyden.trainer.format.shard_table import Sizes, Table, file_name, overlap
from leyden.trainer.format.tensors import dtype_named

Box: TypeAlias = tuple[Sizes, Sizes]
"""Offsets in the whole tensor, and sizes."""
Held: TypeAlias = tuple[str, str, Sizes, tuple[Box, ...]]
"""A tensor as one rank describes it: key, dtype, shape of the whole, and what this rank holds of it."""


@dataclass(frozen=True)
class ShardPlan:
    """What one rank has to know.

    Attributes:
        described: the digest of what all ranks described.
        files: for each file that this rank writes, its tensors: name in the file, key, offsets.
        tables: of all tensors, by key; only on rank 0, which writes them down.
    """

    described: str
    files: dict[str, list[tuple[str, str, Sizes]]] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)


class ShardPlans:
    """The plans of a run's saves, of which each is made once."""

    def __init__(self) -> None:
        self._made: dict[str, ShardPlan] = {}

    def of(self, stem: str, held: Sequence[Held], ranks: CheckpointRanks) -> ShardPlan:
        """Returns the plan of all ranks' parts; every rank calls it.

        Args:
            stem: of the file names.
            held: what this rank holds.
            ranks: the ranks that write.

        Raises:
            CheckpointError: if the parts do not fill a tensor, or ranks do not hold the same tensors.
        """
        made = self._made.get(stem)
        own = hashlib.sha256(json.dumps(held).encode()).hexdigest()
        found = ranks.gather((own, None if made is None else made.described))
        described = hashlib.sha256("".join(digest for digest, _ in found).encode()).hexdigest()
        # A rank whose last save failed may have no plan.
        if made is not None and all(earlier == described for _, earlier in found):
            return made
        self._made[stem] = made = _planned(stem, ranks.gather(held), ranks, described)
        return made


def _planned(stem: str, held: Sequence[Sequence[Held]], ranks: CheckpointRanks, described: str) -> ShardPlan:
    forms: dict[str, tuple[str, Sizes]] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, tensors in enumerate(held):
        for key, dtype, shape, boxes in tensors:
            if forms.setdefault(key, (dtype, shape)) != (dtype, shape):
                reason = f"{key!r} is {dtype} {shape} on rank {rank}, and {forms[key][0]} {forms[key][1]} on another."
                raise CheckpointError(ranks.path, f"cannot be written: {reason}")
            own = holders.setdefault(key, {})
            for box in boxes:
                own.setdefault(box, []).append(rank)
    _check_whole(forms, holders, ranks)
    writers = _writers(forms, holders, len(held))
    writing = sorted({rank for own in writers.values() for rank in own.values()})
    names = {rank: file_name(stem, number, len(writing)) for number, rank in enumerate(writing)}
    plan = ShardPlan(described)
    for key, (dtype, shape) in forms.items():
        # A rank may have several rectangles of one tensor, and each needs its own name in the file.
        count: Counter[int] = Counter()
        shards = []
        for (offsets, sizes), rank in writers[key].items():
            named = f"{key}::{count[rank]}" if count[rank] else key
            count[rank] += 1
            if rank == ranks.rank:
                plan.files.setdefault(names[rank], []).append((named, key, offsets))
            if ranks.rank == 0:
                shards.append([names[rank], named, list(offsets), list(sizes)])
        if ranks.rank == 0:
            plan.tables[key] = {"dtype": dtype, "shape": list(shape), "shards": shards}
    return plan


def _writers(
    forms: dict[str, tuple[str, Sizes]], holders: dict[str, dict[Box, list[int]]], ranks: int
) -> dict[str, dict[Box, int]]:
    """Returns the rank that writes each part: first what only one rank has, then the rest where there is least."""
    load = [0] * ranks
    chosen: dict[str, dict[Box, int]] = {}
    shared: list[tuple[str, Box, int]] = []
    for key, own in holders.items():
        itemsize = dtype_named(forms[key][0]).itemsize
        chosen[key] = {box: found[0] for box, found in own.items()}
        for box, found in own.items():
            size = math.prod(box[1]) * itemsize
            if len(found) > 1:
                shared.append((key, box, size))
            else:
                load[found[0]] += size
    for key, box, size in shared:
        rank = min(holders[key][box], key=load.__getitem__)
        chosen[key][box] = rank
        load[rank] += size
    return chosen


def _check_whole(
    forms: dict[str, tuple[str, Sizes]], holders: dict[str, dict[Box, list[int]]], ranks: CheckpointRanks
) -> None:
    uneven = []
    for key, (_, shape) in forms.items():
        boxes = holders[key]
        held, size = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
        inside = all(
            start >= 0 and start + extent <= end
            for offsets, sizes in boxes
            for start, extent, end in zip(offsets, sizes, shape, strict=True)
        )
        if held != size or not inside or not (_is_grid(boxes, shape) or not overlap(_ends(boxes))):
            uneven.append(f"{held} elements for the {size} of {key}")
    if uneven:
        raise CheckpointError(
            ranks.path, f"cannot be written: the parts of the ranks do not make a whole tensor ({', '.join(uneven)})."
        )


def _is_grid(boxes: Iterable[Box], shape: Sizes) -> bool:
    """Returns True if the boxes are cells of a grid; different ones then have no element in common."""
    for dim in range(len(shape)):
        runs = sorted({(offsets[dim], offsets[dim] + sizes[dim]) for offsets, sizes in boxes})
        if any(second[0] < first[1] for first, second in itertools.pairwise(runs)):
            return False
    return True


def _ends(boxes: Iterable[Box]) -> list[Box]:
    """Returns each box by its begin and its end."""
    return [
        (offsets, tuple(start + size for start, size in zip(offsets, sizes, strict=True))) for offsets, sizes in boxes
    ]
