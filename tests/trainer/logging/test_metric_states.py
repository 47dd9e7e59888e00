"""torchmetrics states saved by several ranks merge for another number of ranks, by the states' own reductions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from leyden.trainer.logging.metric_states import MetricStates


class EveryReduction(Metric):
    """One state for each reduction that torchmetrics defines."""

    total: Tensor
    mean: Tensor
    largest: Tensor
    seen: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("largest", torch.tensor(float("-inf")), dist_reduce_fx="max")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.total += len(values)
        self.mean += (values.mean() - self.mean) / (self._update_count or 1)
        self.largest = torch.maximum(self.largest, values.max())
        self.seen.append(values)

    def compute(self) -> Tensor:
        return torch.stack([self.total.float(), self.mean, self.largest, torch.cat(self.seen).sum()])


class CustomReduction(Metric):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx=lambda stacked: stacked.prod(0))

    def update(self, value: Tensor) -> None:
        self.total += value.sum()

    def compute(self) -> Tensor:
        return self.total


def states_of(**metrics: Metric) -> MetricStates:
    return MetricStates(nn.ModuleDict(metrics))


def saved(metric: Metric, *batches: list[float]) -> dict[str, Any]:
    for batch in batches:
        metric.update(torch.tensor(batch))
    return states_of(m=metric).state_dict()


def test_the_ranks_states_merge_into_the_state_of_one_process() -> None:
    one_process = EveryReduction()
    saved(one_process, [1.0, 5.0], [2.0, 6.0], [3.0, 3.0])
    ranks = [saved(EveryReduction(), [1.0, 5.0], [3.0, 3.0]), saved(EveryReduction(), [2.0, 6.0])]
    found = states_of(m=EveryReduction()).regroup(ranks, rank=0, seed=0)
    first = EveryReduction()
    states_of(m=first).load_state_dict(found)
    assert torch.equal(first.compute(), one_process.compute())
    assert first._update_count == 3
    assert torch.equal(torch.cat(first.seen), torch.cat(one_process.seen)), "not in the order of global batches"
    first.update(torch.tensor([9.0]))
    assert float(first.total) == 7 and len(first.seen) == 4


def test_a_rank_without_batches_contributes_nothing() -> None:
    found = states_of(m=EveryReduction()).regroup(
        [saved(EveryReduction(), [4.0, 6.0]), saved(EveryReduction())], rank=0, seed=0
    )
    assert float(found["m"]["state"]["mean"]) == 5.0 and found["m"]["update_count"] == 1


def test_all_ranks_but_the_first_continue_with_default_states() -> None:
    found = states_of(m=EveryReduction(), unsaved=EveryReduction()).regroup(
        [saved(EveryReduction(), [2.0])], rank=1, seed=0
    )
    assert list(found) == ["m"] and found["m"]["update_count"] == 0
    assert found["m"]["state"]["largest"] == float("-inf") and found["m"]["state"]["seen"] == []


def test_a_state_that_cannot_be_merged_restarts_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="the state 'total' of the metric 'm' cannot be merged over ranks"):
        found = states_of(m=CustomReduction()).regroup(
            [saved(CustomReduction(), [2.0]), saved(CustomReduction(), [3.0])], rank=0, seed=0
        )
    assert float(found["m"]["state"]["total"]) == 0.0 and found["m"]["update_count"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states_of(m=EveryReduction()).regroup(
            [saved(EveryReduction(), [2.0]), saved(EveryReduction(), [3.0])], rank=0, seed=0
        )
