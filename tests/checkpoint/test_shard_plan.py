"""Which rank writes which shard: each part once, a balanced load, no holes or overlaps, and plans that are reused."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.shard_plan import Held, ShardPlan, ShardPlans


class ThreadRanks(CheckpointRanks):
    """One of several ranks in this process, each in its own thread."""

    def __init__(self, rank: int, everyone: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size = rank, len(everyone)
        self.gathered = 0
        self._everyone, self._barrier = everyone, barrier

    def gather(self, value: Any) -> list[Any]:
        self.gathered += 1
        self._everyone[self.rank] = value
        self._barrier.wait(30)
        found = list(self._everyone)
        self._barrier.wait(30)
        return found


def plan_on_all_ranks(plans: list[ShardPlans], held: list[list[Held]]) -> tuple[list[ShardPlan], int]:
    """Plans on all ranks; returns the plan of each, and the number of their exchanges."""
    everyone: list[Any] = [None] * len(held)
    barrier = threading.Barrier(len(held))
    ranks = [ThreadRanks(rank, everyone, barrier) for rank in range(len(held))]
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
        assert len(errors) == 1 and all(isinstance(found, CheckpointError) for found in made), (
            "not all ranks raised the same error"
        )
        raise next(found for found in made if isinstance(found, CheckpointError))
    return made, ranks[0].gathered


def rows(rank: int, ranks: int = 4, count: int = 10) -> list[Held]:
    """Returns a rank's rows of a matrix, vectors that all ranks have, and on rank 0 a scalar."""
    begin, end = count * rank // ranks, count * (rank + 1) // ranks
    held: list[Held] = [
        ("matrix", "float32", (count, 3), (((begin, 0), (end - begin, 3)),)),
        ("vector", "float32", (100,), (((0,), (100,)),)),
        ("other", "float64", (100,), (((0,), (100,)),)),
    ]
    return [*held, ("scalar", "int64", (), (((), ()),))] if rank == 0 else held


def test_each_part_is_written_once_and_replicas_balance_the_load() -> None:
    made, _ = plan_on_all_ranks([ShardPlans() for _ in range(4)], [rows(rank) for rank in range(4)])
    tables = made[0].tables
    assert all(not plan.tables for plan in made[1:]), "a rank other than 0 has tables"
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


def test_several_rectangles_of_one_rank_get_distinct_names() -> None:
    first: Held = ("packed", "float32", (4, 2), (((0, 0), (1, 2)), ((2, 0), (1, 2))))
    second: Held = ("packed", "float32", (4, 2), (((1, 0), (1, 2)), ((3, 0), (1, 2))))
    made, _ = plan_on_all_ranks([ShardPlans(), ShardPlans()], [[first], [second]])
    assert made[0].files == {
        "model-00001-of-00002.safetensors": [("packed", "packed", (0, 0)), ("packed::1", "packed", (2, 0))]
    }


def test_parts_need_not_form_a_grid() -> None:
    """Ranges of flat memory, for example, begin within a row."""
    first: Held = ("w", "float32", (3, 4), (((0, 0), (1, 4)), ((1, 0), (1, 1))))
    second: Held = ("w", "float32", (3, 4), (((1, 1), (1, 3)), ((2, 0), (1, 4))))
    made, _ = plan_on_all_ranks([ShardPlans(), ShardPlans()], [[first], [second]])
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
def test_holes_and_overlaps_raise_on_all_ranks(boxes: list[Any], elements: int) -> None:
    held: list[list[Held]] = [[("w", "float32", (3, 4), (box,))] for box in boxes]
    with pytest.raises(CheckpointError, match=f"{elements} elements for the 12 of w"):
        plan_on_all_ranks([ShardPlans() for _ in held], held)


def test_a_tensor_that_differs_between_ranks_raises() -> None:
    held: list[list[Held]] = [[("w", dtype, (1,), (((0,), (1,)),))] for dtype in ("float32", "float64")]
    with pytest.raises(CheckpointError, match="'w' is float64"):
        plan_on_all_ranks([ShardPlans(), ShardPlans()], held)


def test_later_saves_exchange_only_digests_until_something_changes() -> None:
    plans = [ShardPlans() for _ in range(4)]
    held = [rows(rank) for rank in range(4)]
    first, exchanges = plan_on_all_ranks(plans, held)
    assert exchanges == 2
    again, exchanges = plan_on_all_ranks(plans, held)
    assert exchanges == 1 and all(one is other for one, other in zip(first, again, strict=True))
    # After a failed save on one rank, or with other tensors, all ranks plan again.
    plans[2] = ShardPlans()
    assert plan_on_all_ranks(plans, held)[1] == 2
    other, exchanges = plan_on_all_ranks(plans, [rows(rank, count=12) for rank in range(4)])
    assert exchanges == 2 and other[0].tables["matrix"]["shape"] == [12, 3]
