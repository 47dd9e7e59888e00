"""Plans which rank writes which part of sharded tensors, in time linear in the number of parts.

Each rank describes the rectangles that it holds. If several ranks hold a rectangle, the least loaded of them writes it.
A plan is reused by later saves as long as all ranks' descriptions stay the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from leyden.checkpoint.format.errors import CheckpointError

if TYPE_CHECKING:
    from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
    from leyden.checkpoint.format.shard_table import Sizes, Table


Box: TypeAlias = "tuple[Sizes, Sizes]"
"""A rectangle of a tensor: its offsets in the whole tensor, and its sizes."""
Held: TypeAlias = "tuple[str, str, Sizes, tuple[Box, ...]]"
"""One rank's description of a tensor: key, dtype, shape of the whole, and the rectangles that this rank holds."""


@dataclass(frozen=True)
class ShardPlan:
    """One rank's plan for writing a group of tensors.

    Attributes:
        described: the digest of all ranks' descriptions.
        files: the files that this rank writes, with the rectangles in each: name in the file, key, offsets.
        tables: the tables of all tensors by key. Only rank 0 has them, because it writes them.
    """

    described: str
    files: dict[str, list[tuple[str, str, Sizes]]] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)


class ShardPlans:
    """A cache of the shard plans of a run's saves."""

    def __init__(self) -> None:
        self._plans: dict[str, ShardPlan] = {}

    def of(self, stem: str, held: Sequence[Held], ranks: CheckpointRanks) -> ShardPlan:
        """Returns the plan for the tensors that each rank holds in whole or in part. Every rank calls it.

        The plan may be one of an earlier save.

        Raises:
            CheckpointError: if the parts do not cover a tensor, or ranks do not hold the same tensors.
        """
        cached = self._plans.get(stem)
        own = hashlib.sha256(json.dumps(held).encode()).hexdigest()
        gathered = ranks.gather((own, None if cached is None else cached.described))
        described = hashlib.sha256("".join(digest for digest, _ in gathered).encode()).hexdigest()
        # All ranks must reuse the plan, or none. A rank whose last save failed may have no plan.
        if cached is not None and all(earlier == described for _, earlier in gathered):
            return cached
        self._plans[stem] = plan = _plan(stem, ranks.gather(held), ranks, described)
        return plan


def _plan(stem: str, held: Sequence[Sequence[Held]], ranks: CheckpointRanks, described: str) -> ShardPlan:
    """Plans the parts of all ranks; `held` has one list of descriptions for each rank."""
    forms: dict[str, tuple[str, Sizes]] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, tensors in enumerate(held):
        for key, dtype, shape, boxes in tensors:
            if forms.setdefault(key, (dtype, shape)) != (dtype, shape):
                reason = f"{key!r} is {dtype} {shape} on rank {rank}, but {forms[key][0]} {forms[key][1]} on another."
                raise CheckpointError(ranks.path, f"cannot be written: {reason}")
            own = holders.setdefault(key, {})
            for box in boxes:
                own.setdefault(box, []).append(rank)
    _check_coverage(forms, holders, ranks)
    from leyden.checkpoint.format.shard_table import file_name

    writers = _choose_writers(forms, holders, len(held))
    writing_ranks = sorted({rank for own in writers.values() for rank in own.values()})
    names = {rank: file_name(stem, number, len(writing_ranks)) for number, rank in enumerate(writing_ranks)}
    plan = ShardPlan(described)
    for key, (dtype, shape) in forms.items():
        # A rank may write several rectangles of one tensor, and each needs its own name in the file.
        count: Counter[int] = Counter()
        shards = []
        for (offsets, sizes), rank in writers[key].items():
            part_name = f"{key}::{count[rank]}" if count[rank] else key
            count[rank] += 1
            if rank == ranks.rank:
                plan.files.setdefault(names[rank], []).append((part_name, key, offsets))
            if ranks.rank == 0:
                shards.append([names[rank], part_name, list(offsets), list(sizes)])
        if ranks.rank == 0:
            plan.tables[key] = {"dtype": dtype, "shape": list(shape), "shards": shards}
    return plan


def _choose_writers(
    forms: dict[str, tuple[str, Sizes]], holders: dict[str, dict[Box, list[int]]], ranks: int
) -> dict[str, dict[Box, int]]:
    """Returns the rank that writes each part. A part held by several ranks goes to the least loaded of them."""
    from leyden.checkpoint.format.tensors import dtype_named

    load = [0] * ranks
    chosen: dict[str, dict[Box, int]] = {}
    shared: list[tuple[str, Box, int]] = []
    for key, own in holders.items():
        itemsize = dtype_named(forms[key][0]).itemsize
        chosen[key] = {box: holding[0] for box, holding in own.items()}
        for box, holding in own.items():
            size = math.prod(box[1]) * itemsize
            if len(holding) > 1:
                shared.append((key, box, size))
            else:
                load[holding[0]] += size
    for key, box, size in shared:
        rank = min(holders[key][box], key=load.__getitem__)
        chosen[key][box] = rank
        load[rank] += size
    return chosen


def _check_coverage(
    forms: dict[str, tuple[str, Sizes]], holders: dict[str, dict[Box, list[int]]], ranks: CheckpointRanks
) -> None:
    """Raises if the parts of a tensor do not cover each of its elements exactly once."""
    from leyden.checkpoint.format.shard_table import overlap

    faults = []
    for key, (_, shape) in forms.items():
        boxes = holders[key]
        held, size = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
        inside = all(
            start >= 0 and start + extent <= end
            for offsets, sizes in boxes
            for start, extent, end in zip(offsets, sizes, shape, strict=True)
        )
        if held != size or not inside or not (_is_grid(boxes, shape) or not overlap(_ends(boxes))):
            faults.append(f"{held} elements for the {size} of {key}")
    if faults:
        raise CheckpointError(
            ranks.path, f"cannot be written: the ranks' parts do not make a whole tensor ({', '.join(faults)})."
        )


def _is_grid(boxes: Iterable[Box], shape: Sizes) -> bool:
    """Returns True if the boxes are cells of a grid, so that no two of them overlap."""
    for dim in range(len(shape)):
        runs = sorted({(offsets[dim], offsets[dim] + sizes[dim]) for offsets, sizes in boxes})
        if any(second[0] < first[1] for first, second in itertools.pairwise(runs)):
            return False
    return True


def _ends(boxes: Iterable[Box]) -> list[Box]:
    """Returns each box as its start and end offsets."""
    return [
        (offsets, tuple(start + size for start, size in zip(offsets, sizes, strict=True))) for offsets, sizes in boxes
    ]
