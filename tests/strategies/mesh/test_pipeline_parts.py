"""How a pipeline cuts models and batches, and what its stages exchange: everything that needs no ranks."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from leyden.core.errors import ConfigurationError
from leyden.strategies.mesh.pipeline.cut import Holdings, find_cut
from leyden.strategies.mesh.pipeline.payload import BOOK_SIZE, PayloadSpec, SpecBook, TensorSpec, enclosing, padded
from leyden.strategies.mesh.pipeline.schedule import Schedule
from leyden.strategies.micro_batches import cut, together


class Model(nn.Module):
    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embedding = nn.Embedding(4, 2)
        self.inner = nn.Module()
        self.inner.first = nn.Linear(2, 2)
        self.inner.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(depth))
        self.inner.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 4)


def test_blocks_are_cut_evenly_and_outer_layers_belong_to_the_end_stages() -> None:
    found = find_cut(Model(), 2)
    assert (found.container, found.starts) == ("inner.blocks", (0, 3))
    assert [list(found.blocks_of(stage)) for stage in range(2)] == [[0, 1, 2], [3, 4]]
    assert found.before == ("scale", "embedding", "inner.first") and found.after == ("head", "inner.norm")
    stages = {name: found.stage_of(name) for name, _ in Model().named_parameters()}
    assert stages["scale"] == stages["embedding.weight"] == stages["inner.blocks.2.weight"] == 0
    assert stages["inner.blocks.3.bias"] == stages["inner.norm.weight"] == stages["head.bias"] == 1


def test_a_parameter_of_the_block_list_belongs_to_the_first_stage() -> None:
    model = Model()
    model.inner.blocks.offset = nn.Parameter(torch.zeros(2))
    found = find_cut(model, 2)
    assert "inner.blocks.offset" in found.before and found.stage_of("inner.blocks.offset") == 0


def test_cuts_and_stages_of_outer_layers_can_be_given_by_name() -> None:
    found = find_cut(Model(), 3, "inner", ["inner.blocks.1", "inner.blocks.4"], ("head",), ("scale",))
    assert found.starts == (0, 1, 4)
    assert (found.stage_of("head.weight"), found.stage_of("scale"), found.stage_of("inner.blocks.3.weight")) == (
        0,
        2,
        1,
    )


def test_a_rank_keeps_its_stage_and_replaces_the_others_with_nan() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    absent: set[nn.Parameter] = set()
    holdings = Holdings(model, find_cut(model, 2), [1], absent)
    slots = [(module, name) for module in model.modules() for name in module._parameters]
    left = holdings.drop(slots, torch.device("cpu"))
    dropped = {name for name, p in model.named_parameters() if p in absent}
    assert dropped == {"scale", "inner.first.weight", "inner.first.bias"} | {
        f"inner.blocks.{block}.{name}" for block in range(3) for name in ("weight", "bias")
    }
    assert len(left) + len(dropped) == len(slots)
    first = model.inner.first.weight
    assert first.shape == (2, 2) and first.isnan().all() and first.untyped_storage().nbytes() == 4
    assert model.head.weight is model.embedding.weight, "the end stages no longer share their tied weight"
    assert [name for _, name in holdings.shared_slots()] == ["weight"]


SCHEDULES: list[tuple[dict[str, Any], str]] = [
    ({"name": "1F1C"}, "schedule='1F1C' is unknown. Did you mean '1F1B'?"),
    ({"micro_batches": 1}, "microbatches=1: the schedule 1F1B over 2 ranks needs at least 2"),
    ({"micro_batches": 0}, "microbatches=0: use a number from 1."),
    ({"stages_per_rank": 2}, "stages_per_rank=2: the schedule 1F1B needs 1."),
    ({"name": "DualPipeV", "stages_per_rank": 3}, "stages_per_rank=3: the schedule DualPipeV needs 2."),
    ({"name": "interleaved1f1b", "micro_batches": 5}, "microbatches=5: the schedule Interleaved1F1B runs them in 2"),
]


@pytest.mark.parametrize(("arguments", "message"), SCHEDULES)
def test_invalid_schedules_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Schedule(**{"name": "1F1B", "micro_batches": 4, "ranks": 2, **arguments})
    assert str(error.value).startswith(message)


def test_stages_are_assigned_round_robin_or_in_a_v() -> None:
    looped, folded = Schedule("LoopedBFS", 4, 3), Schedule("ZBVZeroBubble", 4, 3)
    assert [looped.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [folded.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_only_values_with_a_sample_dimension_are_cut() -> None:
    batch = {"x": torch.arange(6).view(3, 2), "names": ["a", "b", "c"], "scale": torch.tensor(2.0), "mode": "test"}
    parts = cut(batch, 2)
    assert [part.rows for part in parts] == [2, 1] and sum(part.share for part in parts) == 1
    assert [part.batch["names"] for part in parts] == [["a", "b"], ["c"]]
    assert [part.batch["x"].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5]]]
    assert all(part.batch["scale"] == 2 and part.batch["mode"] == "test" for part in parts)
    assert parts[0].signature != parts[1].signature


def test_a_batch_with_too_few_samples_is_filled_with_zero_weight_parts() -> None:
    parts = cut(torch.arange(2), 3)
    assert [(part.rows, part.share, len(part.batch)) for part in parts] == [(1, 0.5, 1), (1, 0.5, 1), (0, 0.0, 1)]


def test_outputs_of_micro_batches_are_merged_into_those_of_the_batch() -> None:
    parts = cut(torch.arange(3), 2)
    outputs = [
        {"loss": torch.tensor(1.0), "rows": part.batch * 2, "mean": float(place), "num_items": part.rows, "note": "n"}
        for place, part in enumerate(parts)
    ]
    found = together(outputs, parts, torch.tensor(5.0))
    assert found.pop("rows").tolist() == [0, 2, 4]
    assert found == {"loss": torch.tensor(5.0), "mean": pytest.approx(1 / 3), "num_items": 3, "note": ["n", "n"]}
    assert together([o["loss"] for o in outputs], parts, torch.tensor(5.0)) == 5.0


def test_smaller_micro_batches_are_padded_for_sending_and_trimmed_on_arrival() -> None:
    specs = [PayloadSpec((torch.zeros(2, 3), None)), PayloadSpec((torch.zeros(1, 3), None))]
    common = enclosing(specs)
    assert common == (TensorSpec(torch.Size([2, 3]), torch.float32),)
    sent = padded(torch.ones(1, 3), common[0].shape)
    assert sent.tolist() == [[1.0] * 3, [0.0] * 3]
    tensor, nothing = specs[1].rebuild([sent])
    assert tensor.tolist() == [[1.0] * 3] and nothing is None


def test_both_sides_of_a_spec_book_agree_on_places_whatever_is_sent() -> None:
    sender, receiver = SpecBook(), SpecBook()
    announced = 0
    for number in range(3 * BOOK_SIZE):
        # A shape that returns, and a number that never does.
        payload = torch.zeros(2, number % 3) if number % 2 else (torch.zeros(2), number)
        place = sender.place_of(payload)
        if place is None:
            announced += 1
            sender.add(PayloadSpec(payload))
            receiver.add(PayloadSpec(payload))
        else:
            assert receiver.at(place).matches(payload)
    assert announced < 1.6 * BOOK_SIZE


def test_a_torch_without_working_pipelines_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.strategies.mesh.pipeline.schedule.IS_SUPPORTED", False)
    with pytest.raises(ConfigurationError, match=r"a pipeline needs a newer torch than 2\."):
        Schedule("1F1B", 4, 2)
    assert Schedule("1F1B", 4, 1).micro_batches == 4


@dataclass
class Sample:
    x: Any


def test_signatures_include_the_shapes_in_any_container() -> None:
    def signatures(wrap: Any) -> set[Any]:
        return {cut(wrap(torch.zeros(4, width)), 2)[0].signature for width in (5, 7)}

    for wrap in (lambda x: {"x": x}, lambda x: UserDict(x=x), lambda x: [x, "name"], Sample):
        assert len(signatures(wrap)) == 2
