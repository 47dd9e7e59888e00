"""Who writes which shard: each part once, the load balanced, holes and overlaps refused, and planned only once."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from leyden.trainer.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.trainer.checkpoint.shard_plan import Held, ShardPlan, ShardPlans
from leyden.trainer.format.errors import CheckpointError


class Threads(CheckpointRanks):
    """One of several ranks of this process, each in a thread of its own."""

    def __init__(self, rank: int, everyone: list[Any], meet: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size = rank, len(everyone)
        self.gathered = 0
        self._everyone, self._meet = everyone, meet

    def gather(self, value: Any) -> list[Any]:
        self.gathered += 1
        self._everyone[self.rank] = value
        self._meet.wait(30)
        found = list(self._everyone)
        self._meet.wait(30)
        return found


def together(plans: list[ShardPlans], held: list[list[Held]]) -> tuple[list[ShardPlan], int]:
    """Plans on as many ranks as there are; returns each one's plan, and how often they exchanged something."""
    everyone: list[Any] = [None] * len(held)
    meet = threading.Barrier(len(held))
    ranks = [Threads(rank, everyone, meet) for rank in range(len(held))]
    made: list[Any] = [None] * len(held)

    def work(rank: int) -> None:
        try:
            made[rank] = plans[rank].of("model", held[rank], ranks[rank])
        except CheckpointError as error:
            made[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(held))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = {str(found) for found in made if isinstance(found, CheckpointError)}
    if errors:
        assert len(errors) == 1 and all(isinstance(found, CheckpointError) for found in made), "all raise the same"
        raise next(found for found in made if isinstance(found, CheckpointError))
    return made, ranks[0].gathered


def rows(rank: int, ranks: int = 4, count: int = 10) -> list[Held]:
    """A matrix by rows, a vector that all ranks have, and on rank 0 a scalar."""
    begin, end = count * rank // ranks, count * (rank + 1) // ranks
    held: list[Held] = [
        ("matrix", "float32", (count, 3), (((begin, 0), (end - begin, 3)),)),
        ("vector", "float32", (100,), (((0,), (100,)),)),
        ("other", "float64", (100,), (((0,), (100,)),)),
    ]
    return [*held, ("scalar", "int64", (), (((), ()),))] if rank == 0 else held


def test_each_part_is_written_once_and_replicas_where_there_is_least() -> None:
    made, _ = together([ShardPlans() for _ in range(4)], [rows(rank) for rank in range(4)])
    tables = made[0].tables
    assert all(not plan.tables for plan in made[1:]), "only rank 0 writes them down"
    assert [shard[2:] for shard in tables["matrix"]["shards"]] == [
        [[0, 0], [2, 3]],
        [[2, 0], [3, 3]],
        [[5, 0], [2, 3]],
        [[7, 0], [3, 3]],
    ]
    assert tables["scalar"] == {
        "dtype": "int64",
        "shape": [],
        "shards": [[tables["matrix"]["shards"][0][0], "scalar", [], []]],
    }
    written = Counter(key for plan in made for named in plan.files.values() for _, key, _ in named)
    assert written == {"matrix": 4, "vector": 1, "other": 1, "scalar": 1}
    # Ranks 0 and 2 have fewer rows, and rank 0 has the scalar.
    assert [shard[0] for key in ("vector", "other") for shard in tables[key]["shards"]] == [
        "model-00003-of-00004.safetensors",
        "model-00001-of-00004.safetensors",
    ]
    for rank, plan in enumerate(made):
        assert list(plan.files) == [f"model-0000{rank + 1}-of-00004.safetensors"]


def test_several_rectangles_of_one_rank_have_names_of_their_own() -> None:
    mine: Held = ("packed", "float32", (4, 2), (((0, 0), (1, 2)), ((2, 0), (1, 2))))
    its: Held = ("packed", "float32", (4, 2), (((1, 0), (1, 2)), ((3, 0), (1, 2))))
    made, _ = together([ShardPlans(), ShardPlans()], [[mine], [its]])
    assert made[0].files == {
        "model-00001-of-00002.safetensors": [("packed", "packed", (0, 0)), ("packed::1", "packed", (2, 0))]
    }


def test_parts_that_are_no_grid_may_fill_a_tensor() -> None:
    """As the stretches of flat memory do, which begin within a row."""
    first: Held = ("w", "float32", (3, 4), (((0, 0), (1, 4)), ((1, 0), (1, 1))))
    second: Held = ("w", "float32", (3, 4), (((1, 1), (1, 3)), ((2, 0), (1, 4))))
    made, _ = together([ShardPlans(), ShardPlans()], [[first], [second]])
    assert len(made[0].tables["w"]["shards"]) == 4


@pytest.mark.parametrize(
    ("boxes", "elements"),
    [
        ([((0, 0), (1, 4)), ((2, 0), (1, 4))], 8),
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], 16),
        # As many elements as the tensor has, with a hole and an overlap.
        ([((0, 0), (2, 3)), ((1, 2), (2, 2)), ((2, 0), (1, 2))], 12),
    ],
)
def test_parts_that_leave_a_hole_or_overlap_are_refused_on_all_ranks(boxes: list[Any], elements: int) -> None:
    held: list[list[Held]] = [[("w", "float32", (3, 4), (box,))] for box in boxes]
    with pytest.raises(CheckpointError, match=f"{elements} elements for the 12 of w"):
        together([ShardPlans() for _ in held], held)


def test_a_tensor_that_differs_between_ranks_is_refused() -> None:
    held: list[list[Held]] = [[("w", dtype, (1,), (((0,), (1,)),))] for dtype in ("float32", "float64")]
    with pytest.raises(CheckpointError, match="'w' is float64"):
        together([ShardPlans(), ShardPlans()], held)


def test_the_next_save_exchanges_digests_alone_until_something_differs() -> None:
    plans = [ShardPlans() for _ in range(4)]
    held = [rows(rank) for rank in range(4)]
    first, exchanges = together(plans, held)
    assert exchanges == 2
    again, exchanges = together(plans, held)
    assert exchanges == 1 and all(one is other for one, other in zip(first, again, strict=True))
    # One rank's save failed in between, or it holds something else: all plan anew.
    plans[2] = ShardPlans()
    assert together(plans, held)[1] == 2
    other, exchanges = together(plans, [rows(rank, count=12) for rank in range(4)])
    assert exchanges == 2 and other[0].tables["matrix"]["shape"] == [12, 3]
