"""Simulated worlds with sequences and experts divided: groups, positions, experts and shards of 8 to 1,024 ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.mixture import WIDTH, Experts
from ranks.world import run_world
from torch import nn

from leyden.checkpoint.shards import held_parts
from leyden.strategies.mesh.context.sequence import SequenceShare
from leyden.strategies.mesh.layout import Layout
from leyden.strategies.mesh.simulated import simulated

PLAN = {"experts": "expert_parallel", "experts.up": "colwise", "experts.down": "rowwise"}
Part = tuple[tuple[int, int], ...]
"""The range of each dimension."""


@dataclass
class Held:
    """What one rank of a world has: groups by dimension, batch, positions, and its part of each parameter."""

    groups: dict[str, list[int]]
    data_rank: int
    positions: list[int]
    parts: dict[str, Part]


def length(layout: Layout) -> int:
    return 6 * layout.cp


def held(layout: Layout, experts: int, rank: int) -> Held:
    """Acts as a rank of a world."""
    module = nn.Module()
    with torch.device("meta"):
        module.experts, module.dense = Experts(experts, False, False), nn.Linear(WIDTH, 2 * layout.shards)
    with simulated(layout, PLAN, rank=rank) as strategy:
        strategy.setup_modules([module])
        groups = {
            name: dist.get_process_group_ranks(mesh.get_group(name))
            for mesh in strategy.meshes
            for name in mesh.mesh_dim_names or ()
        }
        place = dist.get_rank(strategy.context_mesh.get_group()) if strategy.context_mesh else 0
        positions = SequenceShare(place, layout.cp, length(layout)).positions().tolist()
        parts: dict[str, Part] = {}
        for name, parameter in module.named_parameters():
            [(offsets, part)] = held_parts(parameter).items()
            parts[name] = tuple((o, o + size) for o, size in zip(offsets, part.shape, strict=True))
        return Held(groups, strategy.data_rank, positions, parts)


def held_by(layout: Layout, experts: int, ranks: list[int]) -> list[dict[str, Any]]:
    return [asdict(held(layout, experts, rank)) for rank in ranks]


def expected(layout: Layout, experts: int, rank: int) -> Held:
    """What a rank has by its number alone: it counts fastest along tp, then cp, dp_shard and dp_replicate."""
    tp, shard = rank % layout.tp, rank // layout.tp % layout.shards
    cp, data = shard % layout.cp, shard // layout.cp
    replica = rank // (layout.tp * layout.shards)

    def number(replica: int, shard: int, tp: int) -> int:
        return (replica * layout.shards + shard) * layout.tp + tp

    copies = layout.shards // layout.ep
    ep, expert_shard = shard % layout.ep, shard // layout.ep
    groups = {
        "dp_replicate": [number(other, shard, tp) for other in range(layout.dp_replicate)],
        "dp_shard": [number(replica, other * layout.cp + cp, tp) for other in range(layout.dp_shard)],
        "dp_shard_cp": [number(replica, other, tp) for other in range(layout.shards)],
        "cp": [number(replica, data * layout.cp + other, tp) for other in range(layout.cp)],
        "tp": [number(replica, shard, other) for other in range(layout.tp)],
        "expert_shard": [number(replica, other * layout.ep + ep, tp) for other in range(copies)],
        "ep": [number(replica, expert_shard * layout.ep + other, tp) for other in range(layout.ep)],
    }
    chunk = length(layout) // (2 * layout.cp)
    starts = cp * chunk, (2 * layout.cp - 1 - cp) * chunk
    # A rank of ep has contiguous experts. Those are sharded as a whole if their number allows it.
    own = experts // layout.ep
    assert own % copies == 0
    first, inner = ep * own + expert_shard * (own // copies), 2 * WIDTH // layout.tp
    of_experts, split = (first, first + own // copies), (tp * inner, (tp + 1) * inner)
    parts: dict[str, Part] = {
        "experts.up": (of_experts, split, (0, WIDTH)),
        "experts.down": (of_experts, (0, WIDTH), split),
        "dense.weight": ((2 * shard, 2 * shard + 2), (0, WIDTH)),
        "dense.bias": ((2 * shard, 2 * shard + 2),),
    }
    return Held(groups, replica * layout.dp_shard + data, [p for s in starts for p in range(s, s + chunk)], parts)


def check(layout: Layout, experts: int, ranks: list[int]) -> list[Held]:
    found = [Held(**own) for own in run_world(1, held_by, layout, experts, ranks)[0]]
    for rank, own in zip(ranks, found, strict=True):
        wanted = expected(layout, experts, rank)
        assert own.groups == {name: wanted.groups[name] for name in own.groups}, rank
        assert (own.data_rank, own.positions, own.parts) == (wanted.data_rank, wanted.positions, wanted.parts), rank
    sizes = {**layout.dimensions, "ep": layout.ep, "expert_shard": layout.shards // layout.ep}
    assert found[0].groups.keys() >= {name for name, size in sizes.items() if size > 1}
    return found


WORLDS = {
    "8": (Layout(1, 2, 2, cp=2, ep=4), 8),
    "8 in two replicas": (Layout(2, 2, 1, cp=2, ep=2), 4),
    "16": (Layout(2, 2, 2, cp=2, ep=4), 4),
    "32 without cp": (Layout(2, 8, 2, ep=4), 16),
    "64": (Layout(2, 4, 2, cp=4, ep=8), 16),
}


@pytest.mark.parametrize("name", [*[*WORLDS][:3], *(pytest.param(n, marks=pytest.mark.full) for n in [*WORLDS][3:])])
def test_every_rank_of_a_world_has_its_own_part(name: str) -> None:
    layout, experts = WORLDS[name]
    found = check(layout, experts, list(range(layout.size)))
    for dimension in found[0].groups:
        groups = {tuple(own.groups[dimension]) for own in found}
        assert sorted(itertools.chain(*groups)) == list(range(layout.size)), f"{dimension} does not partition the world"
    for number, own in enumerate(found):
        group = [found[rank] for rank in own.groups.get("cp", [number])]
        assert sorted(position for rank in group for position in rank.positions) == list(range(length(layout)))
        assert {rank.data_rank for rank in group} == {own.data_rank}
    assert Counter(own.data_rank for own in found) == dict.fromkeys(range(layout.data_size), layout.cp * layout.tp)
    # One rank of each replica has an element; without tp's split, all ranks of a tp group.
    for parameter in found[0].parts:
        elements: Counter[Any] = Counter()
        for own in found:
            elements.update(itertools.product(*(range(*span) for span in own.parts[parameter])))
        copies = layout.dp_replicate * (1 if parameter.startswith("experts.") else layout.tp)
        assert set(elements.values()) == {copies}, parameter


LARGE = {
    "1,024": (Layout(4, 8, 8, cp=4, ep=16), 32),
    "1,024, an expert on each shard": (Layout(2, 32, 4, cp=4, ep=128), 128),
    "512": (Layout(2, 8, 8, cp=4, ep=16), 64),
}


@pytest.mark.parametrize("name", LARGE)
def test_ranks_of_a_large_world_have_their_own_parts(name: str) -> None:
    layout, experts = LARGE[name]
    # The corners, and ranks that share no coordinate.
    check(layout, experts, [0, layout.size // 3, layout.size - 1])


def numbers_in_meshes(layout: Layout) -> list[tuple[list[int], tuple[str, ...], list[int]]]:
    with simulated(layout) as strategy:
        return [(list(m.mesh.shape), m.mesh_dim_names or (), m.mesh.flatten().tolist()) for m in strategy.meshes]


def test_a_mesh_of_1024_ranks_has_each_of_them_once_in_every_division() -> None:
    layout = LARGE["1,024"][0]
    [meshes] = run_world(1, numbers_in_meshes, layout)
    assert {name for _, names, _ in meshes for name in names} >= {"dp_replicate", "dp_shard", "cp", "tp", "ep"}
    for shape, names, numbers in meshes:
        # Each rank knows all others by the same numbers, so these are the groups of all ranks.
        ranks = torch.tensor(numbers).view(shape)
        for dimension, name in enumerate(names):
            groups = ranks.movedim(dimension, -1).flatten(0, -2).tolist()
            assert sorted(itertools.chain(*groups)) == list(range(1024))
            for group in groups:
                assert group == expected(layout, 32, group[-1]).groups[name]
