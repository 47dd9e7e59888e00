"""Merging values and metric states of several ranks, tested in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MinMaxMetric, MinMetric, SumMetric

from leyden import ConfigurationError
from leyden.trainer.logging import metrics
from leyden.trainer.logging.entries import Entry, Reduced
from leyden.trainer.logging.epoch_values import combined


def entry(reduce_fx: Any) -> Entry:
    return Entry("validation_step", "x", (False, True, False, True, None, reduce_fx))


@pytest.mark.parametrize(
    ("reduce_fx", "values_of_ranks", "expected"),
    [
        ("mean", [[6.0, 3.0], [10.0, 1.0]], 4.0),
        ("mean", [[6.0, 3.0], [0.0, 0.0]], 2.0),
        ("mean", [[0.0, 0.0], [0.0, 0.0]], math.nan),
        ("sum", [[6.0], [10.0]], 16.0),
        ("max", [[6.0], [10.0]], 10.0),
        ("min", [[6.0], [10.0]], 6.0),
        ("max", [[6.0], [math.nan]], math.nan),
        ("min", [[math.nan], [6.0]], math.nan),
        (lambda values: values[1], [[1.0, 3.0], [2.0]], 2.0),
        (lambda values: values.numel(), [[1.0, 3.0], [2.0]], 3.0),
        (torch.median, [[1.0, 3.0], [2.0]], 2.0),
    ],
)
def test_values_of_all_ranks_are_reduced_by_reduce_fx(reduce_fx: Any, values_of_ranks: Any, expected: float) -> None:
    value = combined(entry(reduce_fx), values_of_ranks)
    assert value is not None and float(value) == pytest.approx(expected, nan_ok=True)


def test_a_reduce_fx_function_that_is_not_restored_yet_yields_no_value() -> None:
    with pytest.warns(UserWarning, match="the epoch value of 'x' is left out: its reduce_fx is a function"):
        assert combined(entry(Reduced(1.0)), [[1.0], [2.0]]) is None


class EveryState(Metric):
    """A metric with every kind of state in torchmetrics."""

    def __init__(self, custom: Any = None) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), "mean")
        self.add_state("whole", torch.tensor(0), "sum")
        self.add_state("half", torch.zeros(2, dtype=torch.bfloat16), "max")
        self.add_state("flag", torch.tensor(False), torch.any)
        self.add_state("stacked", torch.zeros(2), None)
        self.add_state("pieces", [], "cat")
        self.add_state("parts", [], None)
        self.add_state("grown", torch.empty(0, dtype=torch.complex64), "cat")

    def update(self, values: Tensor) -> None:
        self.mean += (values.mean() - self.mean) / self._update_count
        self.whole += values.numel()
        self.half = torch.maximum(self.half, values.max().to(torch.bfloat16).expand(2))
        self.flag = self.flag | (values > 5).any()
        self.stacked = self.stacked + values.sum()
        self.pieces.append(values)
        self.parts.append(("text", values.long()))
        self.grown = torch.cat([self.grown, values.to(torch.complex64)])

    def compute(self) -> dict[str, Any]:
        return dict(self.metric_state)


def states_of(found: list[Metric]) -> dict[int, list[metrics.PartState]]:
    """Returns the states that each rank's metric sends, by rank."""
    return {rank: metrics.unpack(metrics.pack([metric]))[0] for rank, metric in enumerate(found)}


def test_metric_states_of_every_kind_are_sent_and_merged() -> None:
    first, second, idle = EveryState(), EveryState(), EveryState()
    first.update(torch.tensor([1.0, 3.0]))
    first.update(torch.tensor([5.0]))
    second.update(torch.tensor([2.0]))
    before = {name: str(value) for name, value in first.metric_state.items()}
    merged = metrics.compute(first, states_of([first, second, idle]))
    # Means are weighted by updates: (3.5 * 2 + 2) / 3.
    assert float(merged["mean"]) == pytest.approx(3.0)
    assert int(merged["whole"]) == 4 and merged["whole"].dtype == torch.int64
    assert merged["half"].tolist() == [5.0, 5.0] and merged["half"].dtype == torch.bfloat16
    assert not merged["flag"]
    assert merged["stacked"].tolist() == [[9.0, 9.0], [2.0, 2.0]]
    # In the order of global batches: each rank's first update, then each rank's second.
    assert merged["pieces"].tolist() == [1.0, 3.0, 2.0, 5.0]
    assert [(text, values.reshape(-1).tolist()) for text, values in merged["parts"]] == [
        ("text", [1, 3]),
        ("text", [2]),
        ("text", [5]),
    ]
    assert merged["grown"].tolist() == [1, 3, 5, 2]
    assert {name: str(value) for name, value in first.metric_state.items()} == before
    assert first._update_count == 2 and not first._is_synced and first._to_sync


def test_a_single_rank_with_updates_determines_the_state() -> None:
    first, idle = EveryState(), EveryState()
    first.update(torch.tensor([6.0, 1.0]))
    for metric in (first, idle):
        merged = metrics.compute(metric, states_of([idle, first]))
        assert merged["stacked"].tolist() == [7.0, 7.0]
        assert [piece.tolist() for piece in merged["pieces"]] == [[6.0, 1.0]]
        assert merged["flag"]
    assert idle._update_count == 0 and idle.pieces == []


@pytest.mark.parametrize("make", [MeanMetric, SumMetric, MaxMetric, MinMetric, CatMetric])
def test_aggregations_of_torchmetrics_merge_over_ranks(make: Any) -> None:
    whole, ranks = make(), [make(), make(), make()]
    for number, value in enumerate([3.0, 1.0, 2.0, 5.0]):
        whole.update(value)
        ranks[number % 2].update(value)
    merged = metrics.compute(ranks[0], states_of(ranks))
    torch.testing.assert_close(merged, whole.compute())


def test_nested_metrics_are_merged() -> None:
    """Wrappers and compositions of metrics hold nested states."""
    ranks = [MinMaxMetric(MeanMetric()) for _ in range(2)]
    sums = [MeanMetric() + SumMetric() for _ in range(2)]
    for rank in range(2):
        for value in (1.0, 4.0 * rank):
            ranks[rank].update(value)
            sums[rank].update(value)
    assert float(metrics.compute(ranks[0], states_of(ranks))["raw"]) == 1.5  # type: ignore[arg-type]
    assert float(metrics.compute(sums[1], states_of(sums))) == 1.5 + 6.0


def test_states_of_different_shapes_are_refused_by_name() -> None:
    class Uneven(EveryState):
        def update(self, values: Tensor) -> None:
            self.stacked = values

    ranks = [Uneven(), Uneven()]
    ranks[0].update(torch.zeros(3))
    ranks[1].update(torch.zeros(4))
    with pytest.raises(ConfigurationError, match=r"the state 'stacked' of Uneven has different shapes on the ranks"):
        metrics.compute(ranks[0], states_of(list(ranks)))
    assert ranks[0].stacked.shape == (3,)


def test_without_metrics_no_bytes_are_packed() -> None:
    assert metrics.pack([]).numel() == 0
    assert metrics.unpack(metrics.pack([])) == []
