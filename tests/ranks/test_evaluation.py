"""Evaluation on ranks: validation, test and predict see each sample exactly once, whatever the batch size."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import QUIET
from ranks.world import run_world
from same import whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.strategies.ddp import DDPStrategy

SAMPLES = 103
SIZES = (7, 25, 103, 200)
SETTINGS: dict[str, Any] = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0}


class Counting(TrainModule):
    """Records the samples that hooks and steps see, in each stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Linear(1, 1)
        self.register_buffer("forwards", torch.zeros(()))
        self.seen: list[int] = []
        self.stepped: list[int] = []

    def _record(self, batch: list[Tensor]) -> Tensor:
        index = batch[0]
        self.forwards += 1
        self.stepped.append(len(index))
        return self.net(index[:, None] / 100).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.net(batch[0][:, None].float()).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("mean", self._record(batch).mean())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("mean", self._record(batch).mean())

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self._record(batch)
        return batch[0]

    def on_validation_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.seen += batch[0].tolist()

    def on_test_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.seen += batch[0].tolist()

    def on_predict_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen += batch[0].tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def numbers(size: int, samples: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(samples)), size, **options)


def in_group(function: Any) -> Any:
    dist.init_process_group("gloo")
    try:
        return function()
    finally:
        dist.destroy_process_group()


# each sample once -----------------------------------------------------------------------------------------------------
def evaluate_all() -> list[Any]:
    def run() -> list[Any]:
        found = []
        for size in SIZES:
            for stage in ("validate", "test", "predict"):
                module = Counting()
                result = getattr(Trainer(strategy="ddp", **SETTINGS), stage)(module, numbers(size))
                if stage == "predict":
                    result = [batch.tolist() for batch in result]
                found.append((size, stage, module.seen, result))
        return found

    return in_group(run)  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_evaluation_sees_each_sample_once(ranks: int) -> None:
    results = run_world(ranks, evaluate_all)
    alone = Trainer(**SETTINGS).test(Counting(), numbers(10), verbose=False)[0]["mean"]
    for case in zip(*results, strict=True):
        size, stage = case[0][:2]
        seen = [index for _, _, seen, _ in case for index in seen]
        assert sorted(seen) == list(range(SAMPLES)), (size, stage)
        assert max(len(seen) for _, _, seen, _ in case) <= -(-SAMPLES // (size * ranks)) * size
        for _, _, _, result in case:
            if stage == "predict":
                assert [index for batch in result for index in batch] == list(range(SAMPLES)), size
            else:
                assert result[0]["mean"] == pytest.approx(alone, abs=1e-6), (size, stage)


# predict --------------------------------------------------------------------------------------------------------------
def predict_variants() -> Any:
    def run() -> Any:
        trainer = Trainer(strategy="ddp", **SETTINGS)
        several = trainer.predict(Counting(), [numbers(4, 10), numbers(3, 2), numbers(5, 31)])
        assert several is not None
        main = trainer.predict(Counting(), numbers(8, 21), gather="main")
        dropped = trainer.predict(Counting(), numbers(8, 21), return_predictions=False)
        flat = [[index for batch in outputs for index in batch.tolist()] for outputs in several]
        return flat, main if main is None else [batch.tolist() for batch in main], dropped

    return in_group(run)


def test_predictions_are_gathered_by_loader_on_all_ranks_or_the_main_one() -> None:
    results = run_world(4, predict_variants)
    for rank, (several, main, dropped) in enumerate(results):
        assert several == [list(range(10)), list(range(2)), list(range(31))]
        assert dropped is None
        if rank:
            assert main is None
        else:
            assert [index for batch in main for index in batch] == list(range(21))


# strategies whose forward passes wait for each other ------------------------------------------------------------------
class Lockstep(DDPStrategy):
    """A strategy whose every forward pass in evaluation needs all ranks, as FSDP's does."""

    replicates = False

    def evaluate(self, step_fn: Any, batch: Any, extra: tuple[Any, ...]) -> Any:
        together = torch.ones(())
        dist.all_reduce(together)
        assert together == self.world_size
        return super().evaluate(step_fn, batch, extra)


def evaluate_in_lockstep() -> list[Any]:
    def run() -> list[Any]:
        found = []
        for size, samples in ((1, 103), (8, 35), (40, 103), (2, 3), (2, 1)):
            module = Counting()
            before = torch.get_rng_state()
            values = Trainer(strategy=Lockstep(), **SETTINGS).validate(module, numbers(size, samples), verbose=False)
            same_rng = bool((before == torch.get_rng_state()).all())
            calls = len(module.stepped)
            found.append((samples, module.seen, calls, float(module.forwards), values[0]["mean"], same_rng))
        return found

    return in_group(run)  # type: ignore[no-any-return]


def test_filler_batches_of_lockstep_strategies_leave_no_trace() -> None:
    results = run_world(4, evaluate_in_lockstep)
    fillers = 0
    for case in zip(*results, strict=True):
        samples = case[0][0]
        assert sorted(index for part in case for index in part[1]) == list(range(samples))
        # Every rank ran the same number of steps; fillers changed neither the buffer nor the epoch's value.
        assert len({calls for _, _, calls, _, _, _ in case}) == 1
        fillers += sum(calls - int(forwards) for _, _, calls, forwards, _, _ in case)
        alone = Trainer(**SETTINGS).validate(Counting(), numbers(samples, samples), verbose=False)[0]["mean"]
        assert [value for *_, value, _ in case] == pytest.approx([alone] * 4, abs=1e-6)
        assert len({same_rng for *_, same_rng in case}) == 1
    assert fillers == 1 + 1 + 1 + 3


# a signal -------------------------------------------------------------------------------------------------------------
class Interrupted(Counting):
    """Raises a signal on rank 1 at its third batch. test_decisions.py tests how soon the other ranks stop."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if batch_idx == 2 and dist.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)


def interrupted() -> Any:
    def run() -> Any:
        module = Interrupted()
        try:
            Trainer(strategy="ddp", **SETTINGS).validate(module, numbers(1, 400), verbose=False)
        except BaseException as error:
            return type(error).__name__, len(module.seen)
        return "no error", len(module.seen)

    return in_group(run)


def test_a_signal_on_one_rank_ends_evaluation_on_all_at_the_same_batch() -> None:
    results = run_world(2, interrupted)
    assert {error for error, _ in results} == {"SystemExit"}
    assert len({batches for _, batches in results}) == 1 and results[0][1] < 200


# before the first step ------------------------------------------------------------------------------------------------
class Started(Counting):
    """Trains, with dropout, and draws random numbers in validation."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return nn.functional.dropout(self.net(batch[0][:, None] / 100), 0.5).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("mean", self._record(batch).mean() + 0 * torch.rand(()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_from_start(strategy: str) -> list[Any]:
    def run() -> list[Any]:
        found = []
        for at_start in (False, True):
            torch.manual_seed(5)
            module = Started()
            trainer = Trainer(strategy=strategy, validate_at_start=at_start, **{**SETTINGS, "max_epochs": 2})
            trainer.fit(module, numbers(7, shuffle=True), numbers(7))
            weights = module.state_dict()
            found.append(([whole(value).tolist() for name, value in weights.items() if "net" in name], module.seen))
        return found

    return in_group(run)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_validation_before_the_first_step_sees_each_sample_and_changes_no_weights(strategy: str) -> None:
    ranks = run_world(2, fit_from_start, strategy)
    for (plain, seen), (validated, seen_with_start) in ranks:
        assert validated == plain and seen_with_start[: len(seen) // 2] + seen == seen_with_start
    assert sorted(sample for _, (_, seen) in ranks for sample in seen[: len(seen) // 3]) == list(range(SAMPLES))
