"""self.log and torchmetrics on ranks: the values of one process, in as few messages as possible."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import QUIET
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import ConfigurationError, Trainer, TrainModule
from leyden.trainer.logging.entries import Entry
from leyden.trainer.logging.epoch_values import EpochValues

SAMPLES, BATCH = 24, 3
SETTINGS: dict[str, Any] = {**QUIET, "num_sanity_val_steps": 0, "max_epochs": 2}
COLLECTIVES = (
    *("all_gather", "all_reduce", "broadcast", "all_gather_object", "broadcast_object_list", "barrier"),
    *("all_gather_into_tensor", "reduce", "gather", "scatter", "gather_object", "all_to_all"),
)


def data() -> tuple[Tensor, Tensor]:
    """Returns inputs (SAMPLES, 4) and classes (SAMPLES,)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 4, generator=generator)
    return x, (x.sum(dim=1) + 0.5 * torch.randn(SAMPLES, generator=generator) > 0).long()


def loader(size: int, samples: int = SAMPLES) -> DataLoader[Any]:
    """Returns a loader of the first samples, which the Trainer divides among the ranks."""
    x, y = data()
    return DataLoader(TensorDataset(x[:samples], y[:samples]), batch_size=size)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts calls of torch.distributed within the block, without those nested in another call."""
    counts: Counter[str] = Counter()
    before = {name: getattr(dist, name) for name in COLLECTIVES}
    depth = 0

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            counts[name] += depth == 0
            depth += 1
            try:
                return before[name](*args, **kwargs)
            finally:
                depth -= 1

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


class Logging(TrainModule):
    """Logs with every reduction, in training and validation; optionally logs torchmetrics."""

    def __init__(self, with_metrics: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 2).double()
        self.with_metrics = with_metrics
        self.epochs: list[dict[str, float]] = []
        if with_metrics:
            from torchmetrics import MeanMetric, MetricCollection, PearsonCorrCoef
            from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

            self.accuracy = MulticlassAccuracy(2, average="micro")
            self.both = MetricCollection([MulticlassF1Score(2), MulticlassAUROC(2)], prefix="val_")
            self.twice = MulticlassAccuracy(2, average="micro") + 1.0
            self.mean = MeanMetric()
            self.pearson = PearsonCorrCoef()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = nn.functional.cross_entropy(self.net(x.double()), y, reduction="none")
        self.log("loss", losses.mean(), on_epoch=True)
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x.double())
        losses = nn.functional.cross_entropy(logits, y, reduction="none")
        self.log("val_loss", losses.mean())
        self.log("val_seen", float(len(y)), reduce_fx="sum")
        self.log("val_worst", losses.max(), reduce_fx="max")
        self.log("val_best", losses.min(), reduce_fx="min")
        self.log("val_middle", losses.sum(), reduce_fx=lambda sums: sums.sum())
        if self.with_metrics:
            self._measure(logits, y, losses)

    def _measure(self, logits: Tensor, y: Tensor, losses: Tensor) -> None:
        self.accuracy.update(logits, y)
        self.both.update(logits, y)
        self.twice.update(logits, y)
        self.mean.update(losses)
        self.pearson.update(logits[:, 0], y.double())
        self.log("val_accuracy", self.accuracy)
        self.log_dict(self.both)
        self.log("val_twice", self.twice)
        self.log("val_mean", self.mean)
        self.log("val_pearson", self.pearson)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_number", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        self.epochs.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


def trainer_of(**arguments: Any) -> Trainer:
    """Returns a Trainer that has joined the world if this process is a rank, or one for a single process."""
    ranks = {"strategy": "ddp"} if "RANK" in os.environ else {}
    trainer = Trainer(**SETTINGS | ranks | arguments)
    trainer.strategy.setup_environment()
    return trainer


def fit_cases(size: int, cases: list[tuple[bool, int]]) -> list[dict[str, float]]:
    """Returns the metrics of each case (with torchmetrics, validation samples), all in one process group."""
    found = []
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for with_metrics, samples in cases:
        module, trainer = Logging(with_metrics), trainer_of()
        trainer.fit(module, loader(size), loader(size, samples))
        found.append(module.epochs[-1])
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        # Two ranks have 3 and 2 of 5 samples; of 7 samples, the second has none in the last batch.
        pytest.param(
            2, [(False, SAMPLES), (False, 5), (False, 1), (True, SAMPLES), (True, 23), (True, 7), (True, 1)], id="2"
        ),
        pytest.param(4, [(False, SAMPLES), (True, SAMPLES), (True, 13)], id="4", marks=pytest.mark.full),
    ],
)
def test_epoch_values_match_one_process(ranks: int, cases: list[tuple[bool, int]]) -> None:
    alone = fit_cases(BATCH * ranks, cases)
    for found in run_world(ranks, fit_cases, BATCH, cases):
        for ours, one in zip(found, alone, strict=True):
            assert ours.keys() == one.keys()
            for name in ours.keys() - {"loss_step", "loss"}:
                # The bare name of a forked value is its step value, which is each rank's own.
                assert ours[name] == pytest.approx(one[name], abs=1e-6, nan_ok=True), name


@contextmanager
def counted_reductions() -> Iterator[list[Counter[str]]]:
    """Counts the messages of each reduction of epoch values, and torchmetrics' own messages."""
    from torchmetrics import Metric

    found: list[Counter[str]] = []
    reduce, sync = EpochValues.reduce, Metric._sync_dist

    def counting(self: EpochValues, *args: Any) -> Any:
        with counted() as inside:
            result = reduce(self, *args)
        found.append(inside)
        return result

    def own(self: Metric, *args: Any, **kwargs: Any) -> Any:
        found.append(Counter({"torchmetrics": 1}))
        return sync(self, *args, **kwargs)

    EpochValues.reduce, Metric._sync_dist = counting, own  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        EpochValues.reduce, Metric._sync_dist = reduce, sync  # type: ignore[method-assign]


def fit_counted(with_metrics: bool) -> list[dict[str, int]]:
    trainer = trainer_of()
    with counted_reductions() as counts:
        trainer.fit(Logging(with_metrics), loader(BATCH), loader(BATCH))
    return [dict(count) for count in counts]


@pytest.mark.parametrize(("with_metrics", "messages"), [(False, 1), (True, 2)], ids=["plain", "torchmetrics"])
def test_an_epoch_sends_one_message_and_one_more_for_torchmetrics(with_metrics: bool, messages: int) -> None:
    """Two epochs, each with a validation, which logs the torchmetrics, and the training epoch itself."""
    for counts in run_world(2, fit_counted, with_metrics):
        assert counts == [{"all_gather": messages}, {"all_gather": 1}] * 2


class ExtraName(Logging):
    """Logs a name on rank 1 that rank 0 does not log."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.global_rank))
        if self.global_rank == 1:
            self.log("val_odd", 7.0, **self.options)


def validate_extra_name(options: dict[str, Any]) -> Any:
    trainer = trainer_of()
    try:
        return trainer.validate(ExtraName(**options), loader(BATCH), verbose=False)
    except ConfigurationError as error:
        return str(error)


def test_the_error_names_a_value_that_a_rank_did_not_log() -> None:
    """Every rank finds the difference; the first one to report it ends the others."""
    messages = [text for text in run_world(2, validate_extra_name, {}, may_fail=True) if isinstance(text, str)]
    assert messages
    for message in messages:
        assert "rank 0 did not log 'val_odd' (mean, in validation_step)" in message
        assert "sync_dist=False" in message


def test_values_without_sync_dist_stay_on_their_rank() -> None:
    first, second = run_world(2, validate_extra_name, {"sync_dist": False})
    assert first == [{"val_loss": 0.5}]
    assert second == [{"val_loss": 0.5, "val_odd": 7.0}]


class LocalValues(TrainModule):
    """Logs shared values, and values that stay on their rank, in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import MeanMetric

        self.shared, self.local, self.unsynced = MeanMetric(), MeanMetric(), MeanMetric(sync_on_compute=False)
        self.after: dict[str, Any] = {}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rank = float(self.global_rank)
        self.log("both", rank, sync_dist=None)
        self.log("explicit", rank, sync_dist=True)
        self.log("own", rank, sync_dist=False)
        self.log("first", rank + 5, rank_zero_only=True)
        for name in ("shared", "local", "unsynced"):
            metric = getattr(self, name)
            metric.update(rank)
            self.log(name, metric, sync_dist=False if name == "local" else None)

    def on_validation_epoch_end(self) -> None:
        self.log("end", float(self.global_rank), reduce_fx="max")

    def on_validation_end(self) -> None:
        self.after = {name: metric._is_synced for name, metric in self.named_children()}


def validate_local_values() -> tuple[dict[str, float], dict[str, Any]]:
    module = LocalValues()
    trainer = trainer_of()
    with counted_reductions() as counts:
        [values] = trainer.validate(module, loader(BATCH), verbose=False)
    assert counts == [{"all_gather": 2}]
    return values, module.after


def test_shared_values_are_reduced_and_local_values_stay_on_their_rank() -> None:
    (first, synced), (second, _) = run_world(2, validate_local_values)
    reduced = {"both": 0.5, "explicit": 0.5, "shared": 0.5, "end": 1.0}
    assert first == {**reduced, "own": 0.0, "local": 0.0, "unsynced": 0.0, "first": 5.0}
    assert second == {**reduced, "own": 1.0, "local": 1.0, "unsynced": 1.0}
    assert synced == {"shared": False, "local": False, "unsynced": False}


class Grouped(TrainModule):
    """Reduces in pairs of ranks."""

    def setup(self, stage: str) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.pair = pairs[dist.get_rank() // 2]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("pair", float(self.global_rank), sync_dist_group=self.pair)
        self.log("all", float(self.global_rank))


def validate_grouped() -> list[dict[str, float]]:
    trainer = trainer_of()
    return trainer.validate(Grouped(), loader(BATCH), verbose=False)


def test_sync_dist_group_reduces_over_its_ranks() -> None:
    found = run_world(4, validate_grouped)
    assert found == [[{"pair": pair, "all": 1.5}] for pair in (0.5, 0.5, 2.5, 2.5)]


class TwoLoaders(TrainModule):
    """Logs one name for each of two loaders, of which the second is empty on rank 1."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("seen", float(len(batch[0])), reduce_fx="sum")


def validate_two() -> list[dict[str, float]]:
    trainer = trainer_of()
    return trainer.validate(TwoLoaders(), [loader(BATCH), loader(BATCH, 1)], verbose=False)


def test_a_rank_without_batches_of_one_loader_gets_its_values() -> None:
    for found in run_world(2, validate_two):
        assert found == [{"seen/dataloader_idx_0": 24.0}, {"seen/dataloader_idx_1": 1.0}]


def log_many(count: int) -> tuple[list[float], list[int]]:
    """Reduces more values than fit into the first message, twice; returns values and numbers of messages."""
    trainer = trainer_of()
    values = EpochValues(trainer.strategy)
    found, messages = [], []
    for _ in range(2):
        entry = Entry("validation_step", "x", (False, True, False, True, None, lambda every: every.sum()))
        for number in range(count):
            entry.add(float(number), 1)
        with counted() as counts:
            [value] = values.reduce([entry], frozenset())[0].values()
        found.append(float(value or 0))
        messages.append(sum(counts.values()))
    trainer.strategy.teardown()
    return found, messages


def test_a_message_longer_than_its_buffer_is_resent_only_once() -> None:
    for found, messages in run_world(2, log_many, 5000):
        assert found == [5000 * 4999.0] * 2
        assert messages == [2, 1]
