"""torchmetrics states are merged for another number of ranks by the same reductions as over ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from leyden.trainer.logging.metric_states import MetricStates


class Mixed(Metric):
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


class Custom(Metric):
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


def test_states_of_ranks_merge_into_those_of_one_process() -> None:
    alone = Mixed()
    saved(alone, [1.0, 5.0], [2.0, 6.0], [3.0, 3.0])
    ranks = [saved(Mixed(), [1.0, 5.0], [3.0, 3.0]), saved(Mixed(), [2.0, 6.0])]
    found = states_of(m=Mixed()).regroup(ranks, rank=0, seed=0)
    first = Mixed()
    states_of(m=first).load_state_dict(found)
    assert torch.equal(first.compute(), alone.compute())
    assert first._update_count == 3
    assert torch.equal(torch.cat(first.seen), torch.cat(alone.seen)), "in the order of global batches"
    first.update(torch.tensor([9.0]))
    assert float(first.total) == 7 and len(first.seen) == 4


def test_a_rank_without_batches_adds_nothing() -> None:
    found = states_of(m=Mixed()).regroup([saved(Mixed(), [4.0, 6.0]), saved(Mixed())], rank=0, seed=0)
    assert float(found["m"]["state"]["mean"]) == 5.0 and found["m"]["update_count"] == 1


def test_the_other_ranks_continue_with_the_defaults() -> None:
    found = states_of(m=Mixed(), unsaved=Mixed()).regroup([saved(Mixed(), [2.0])], rank=1, seed=0)
    assert list(found) == ["m"] and found["m"]["update_count"] == 0
    assert found["m"]["state"]["largest"] == float("-inf") and found["m"]["state"]["seen"] == []


def test_a_state_that_cannot_be_merged_starts_over_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="the state 'total' of the metric 'm' cannot be merged over ranks"):
        found = states_of(m=Custom()).regroup([saved(Custom(), [2.0]), saved(Custom(), [3.0])], rank=0, seed=0)
    assert float(found["m"]["state"]["total"]) == 0.0 and found["m"]["update_count"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states_of(m=Mixed()).regroup([saved(Mixed(), [2.0]), saved(Mixed(), [3.0])], rank=0, seed=0)
