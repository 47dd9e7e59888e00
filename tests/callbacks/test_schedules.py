"""BatchSizeScheduler, GradientAccumulation by step and SequenceLengthWarmup: exact across resumes and ranks."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import QUIET, Line, Squares
from ranks.world import run_world
from same import whole
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from leyden import Callback, CombinedLoader, ConfigurationError, Trainer
from leyden.callbacks import (
    BatchSizeFinder,
    BatchSizeScheduler,
    GradientAccumulation,
    ModelCheckpoint,
    SequenceLengthWarmup,
)


class StepRecorder(Callback):
    """Records the number of batches, the total samples and the epoch of each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.window.closes:
            self.seen.append((trainer.window.length, trainer.progress.samples, trainer.current_epoch))


def fit(schedule: Any, samples: int = 40, size: int = 2, path: str | None = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    steps, module = StepRecorder(), Squares()
    extra = arguments.pop("extra", [])
    own = {**QUIET, "max_epochs": 2, "callbacks": [steps, schedule, *extra]}
    trainer = Trainer(**{**own, **arguments})
    data = torch.randn(samples, 2, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(data, size, shuffle=True), ckpt_path=path)
    return steps.seen, [weight.detach().clone() for weight in module.parameters()], trainer


def schedules() -> list[Any]:
    return [BatchSizeScheduler({0: 4, 2: 8, 5: 12}), GradientAccumulation({0: 2, 2: 4, 5: 6}, by="step")]


@pytest.mark.parametrize("index", [0, 1])
def test_batch_sizes_follow_the_schedule(index: int) -> None:
    seen, _, trainer = fit(schedules()[index])
    # The last step of an epoch takes the remaining 8 of 40 samples.
    assert [samples for _, samples, _ in seen] == [4, 8, 16, 24, 32, 40, 52, 64, 76, 80]
    assert trainer.estimated_stepping_batches == len(seen) == trainer.global_step
    assert trainer.accumulate_grad_batches == 6


def test_batch_sizes_can_be_scheduled_by_epoch() -> None:
    seen, _, trainer = fit(BatchSizeScheduler({0: 8, 1: 20}, by="epoch"))
    assert [(length, epoch) for length, _, epoch in seen] == [(4, 0)] * 5 + [(10, 1)] * 2
    assert trainer.estimated_stepping_batches == 7


def test_a_schedule_equals_resumed_runs_with_fixed_accumulation(tmp_path: Path) -> None:
    _, weights, _ = fit(schedules()[0], max_steps=7)
    path = None
    for batches, until in ((2, 2), (4, 5), (6, 7)):
        module = fit(GradientAccumulation(batches), path=path, max_steps=until)
        path = str(tmp_path / f"{until}")
        module[2].save_checkpoint(path)
    assert all(map(torch.equal, weights, module[1]))


@pytest.mark.parametrize("step", [1, 3, 7])
def test_a_resumed_run_continues_the_batch_size_schedule(tmp_path: Path, step: int) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    straight, weights, _ = fit(schedules()[0], extra=[keeper], enable_checkpointing=True)
    resumed, again, _ = fit(schedules()[0], path=str(tmp_path / f"step={step}"))
    assert resumed == straight[step:] and all(map(torch.equal, weights, again))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BatchSizeScheduler({1: 4}), "an entry for 0"),
        (lambda: BatchSizeScheduler(64), "an entry for 0"),  # type: ignore[arg-type]
        (lambda: BatchSizeScheduler({0: 4, -1: 8}), "-1 is not a step. Steps are whole numbers from 0"),
        (lambda: BatchSizeScheduler({0: 4}, by="batch"), "Known: epoch, step"),  # type: ignore[arg-type]
        (
            lambda: BatchSizeScheduler.rampup(32, 40, 960, 128),
            "size=128 is not start=32 plus a multiple of increment=40",
        ),
        (lambda: BatchSizeScheduler.rampup(32, 0, 960, 128), "increment=0"),
        (
            lambda: fit(BatchSizeScheduler({0: 2, 3: 7})),
            "7 is not a multiple of 2, the samples in one batch of all ranks",
        ),
    ],
)
def test_invalid_schedules_raise(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_loader_without_a_batch_size_raises() -> None:
    with pytest.raises(ConfigurationError, match=r"use a DataLoader with a batch_size"):
        Trainer(**QUIET, max_epochs=1, callbacks=BatchSizeScheduler({0: 4})).fit(Line(), [torch.ones(2, 2)] * 4)


def test_a_fit_without_training_batches_needs_no_batch_size() -> None:
    trainer = Trainer(**QUIET, max_epochs=1, limit_train_batches=0, callbacks=BatchSizeScheduler({0: 4}))
    assert trainer.accumulate_grad_batches == 1
    trainer.fit(Line(), [torch.ones(2, 2)] * 4)


# loaders --------------------------------------------------------------------------------------------------------------
class TupleBatches(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)


def test_a_sequential_combined_loader_needs_equal_batch_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    def run(second: int, mode: Any) -> int:
        parts = [DataLoader(torch.ones(16, 2), 4), DataLoader(torch.ones(16, 2), second)]
        trainer = Trainer(**QUIET, max_epochs=1, callbacks=BatchSizeScheduler({0: 8}))
        trainer.fit(TupleBatches(), CombinedLoader(parts, mode))
        return trainer.global_step

    assert run(4, "sequential") == 4
    assert "4 per rank × 1 × 2 accumulated = 8" in capsys.readouterr().out
    assert run(4, "max_size_cycle") == 4
    with pytest.raises(ConfigurationError, match="the same in all parts of a sequential CombinedLoader"):
        run(2, "sequential")


def test_single_batch_windows_work_with_lbfgs() -> None:
    """LBFGS evaluates each loss several times, so only windows of several batches are refused."""

    class Closure(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    def run(size: int) -> Any:
        trainer = Trainer(**QUIET, max_steps=2, callbacks=BatchSizeScheduler({0: size}))
        trainer.fit(Closure(), DataLoader(torch.ones(16, 2), 4))
        return trainer.global_step

    assert run(4) == 2
    with pytest.raises(ConfigurationError, match="accumulation over several batches"):
        run(8)


def test_configure_optimizers_sees_the_first_accumulation() -> None:
    class ReadsAccumulation(Line):
        def configure_optimizers(self) -> Any:
            self.window = self.trainer.accumulate_grad_batches
            return super().configure_optimizers()

    module = ReadsAccumulation()
    Trainer(**QUIET, max_epochs=1, callbacks=BatchSizeScheduler({0: 8})).fit(module, DataLoader(torch.ones(16, 2), 2))
    assert module.window == 4


@pytest.mark.parametrize("schedule", [BatchSizeScheduler({0: 4, 3: 8}), GradientAccumulation(2)])
def test_accumulation_windows_need_no_lookups_during_training(schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []

    class CountsLookups(Line):
        def on_train_start(self) -> None:
            # Lookups count from here on.
            monkeypatch.setattr("leyden.trainer.run.accumulation_of", searches.append)
            monkeypatch.setattr("leyden.trainer.starting.loaders.batch_sizes", searches.append)

    trainer = Trainer(**QUIET, max_epochs=1, callbacks=schedule)
    trainer.fit(CountsLookups(), DataLoader(torch.ones(40, 2), 2))
    assert trainer.global_step > 5 and not searches


def simulated_steps(epochs: int, num_batches: int, schedule: GradientAccumulation) -> int:
    steps = 0
    for _ in range(epochs):
        left = num_batches
        while left > 0:
            left -= schedule.batches(steps, None)
            steps += 1
    return steps


def test_estimated_steps_equal_a_simulation_with_few_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Trainer(**QUIET, max_epochs=90).fit_loop
    for schedule in ({0: 3}, {0: 1, 1: 2}, {0: 4, 5: 1, 6: 7, 10: 2}, {0: 2, 100: 3, 1000: 5}, {0: 1, 10_000: 2}):
        accumulation = GradientAccumulation(schedule, by="step")
        for num_batches in (0, 1, 5, 10, 37):
            assert limits.estimated_steps(num_batches, accumulation) == simulated_steps(90, num_batches, accumulation)
    lookups: list[int] = []
    long = GradientAccumulation({0: 1, 10: 2}, by="step")
    monkeypatch.setattr(long, "length", lambda at: lookups.append(at) or (1 if at < 10 else 2))
    assert limits.estimated_steps(40_000, long) == 10 + 19_995 + 89 * 20_000
    assert len(lookups) < 10


def test_batch_size_finder_with_a_batch_size_schedule_raises() -> None:
    module = Line()
    module.batch_size = 2
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[BatchSizeFinder(), BatchSizeScheduler({0: 8})])
    with pytest.raises(ConfigurationError, match="cannot be searched with BatchSizeScheduler"):
        trainer.fit(module)


# sequences ------------------------------------------------------------------------------------------------------------
class Tokens(Dataset[Any]):
    """Samples (tokens, class) in several batch formats. Each token is its sample's number."""

    def __init__(self, size: int = 16, length: int = 12) -> None:
        self.size, self.length = size, length

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        tokens = torch.full((self.length,), float(index))
        return {"input_ids": tokens, "embedded": tokens.unsqueeze(1).expand(-1, 2), "label": index, "other": tokens[:3]}


class LengthRecorder(Line):
    """Records the shapes and samples of its batches."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.seen: list[Any] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = batch["input_ids"]
        self.seen.append((tokens.shape[1], sorted(tokens[:, 0].int().tolist())))
        assert batch["embedded"].shape == (*tokens.shape, 2) and batch["other"].shape[1] == 3
        return self(tokens.unsqueeze(2)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch["input_ids"].shape[1])


def fit_warmup(path: str | None = None, warmup: SequenceLengthWarmup | None = None, **arguments: Any) -> LengthRecorder:
    torch.manual_seed(0)
    module = LengthRecorder()
    warmup = warmup or SequenceLengthWarmup(0.5, min_seq_length=2, max_seq_length=10, step_size=2)
    own = {**QUIET, "max_epochs": 2, "callbacks": [warmup, *arguments.pop("extra", [])]}
    trainer = Trainer(**{**own, **arguments})
    size = 4 // trainer.strategy.data_size if trainer.world_size > 1 else 4
    trainer.fit(module, DataLoader(Tokens(), size, shuffle=True), DataLoader(Tokens(4), 4), ckpt_path=path)
    return module


def test_sequence_lengths_grow_by_step_and_validation_is_not_truncated() -> None:
    module = fit_warmup()
    assert [length for length, _ in module.seen] == [2, 4, 6, 8, 10, 10, 10, 10]
    assert set(module.validated) == {12}
    windows = fit_warmup(accumulate_grad_batches=2)
    assert [length for length, _ in windows.seen] == [2, 2, 6, 6, 10, 10, 10, 10]


@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_resumed_run_continues_the_length_schedule(tmp_path: Path, step: int) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    straight = fit_warmup(extra=[keeper], enable_checkpointing=True)
    # This run is longer, so half of it would be a different number of steps.
    resumed = fit_warmup(str(tmp_path / f"step={step}"), max_epochs=3)
    assert resumed.seen[: 8 - step] == straight.seen[step:]
    again = fit_warmup(str(tmp_path / f"step={step}"))
    assert all(map(torch.equal, again.parameters(), straight.parameters()))


Pair = namedtuple("Pair", "tokens target")


@pytest.mark.parametrize(
    ("batch", "keys"),
    [
        (torch.ones(2, 8), None),
        ((torch.ones(2, 8), torch.ones(2)), None),
        ([torch.ones(2, 8), {"mask": torch.ones(2, 8)}], None),
        (Pair(torch.ones(2, 8), torch.ones(2, 3)), None),
        ({"a": torch.ones(2, 5), "b": torch.ones(2, 8)}, {"b"}),
    ],
    ids=str,
)
def test_batches_of_any_structure_are_truncated_without_changing_the_original(batch: Any, keys: Any) -> None:
    before = str(batch)
    warmup = SequenceLengthWarmup(10, min_seq_length=4, max_seq_length=8, keys=keys)
    cut: list[Any] = []

    class BatchRecorder(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            cut.append(batch)
            return self(torch.ones(1, 2)).sum()

    module = BatchRecorder()
    Trainer(**QUIET, max_steps=1, callbacks=warmup).fit(module, [batch])
    assert type(cut[0]) is type(batch) and str(batch) == before

    def shapes(part: Any) -> list[tuple[int, ...]]:
        if isinstance(part, Tensor):
            return [tuple(part.shape)]
        return [shape for inner in (part.values() if isinstance(part, dict) else part) for shape in shapes(inner)]

    expected = [(2, 4) if shape == (2, 8) else shape for shape in shapes(batch)]
    assert shapes(cut[0]) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"duration": 0}, "duration=0"),
        ({"duration": 1.5}, r"duration=1\.5"),
        ({"min_seq_length": 0}, "min_seq_length=0"),
        ({"max_seq_length": 4}, "a whole number from 8"),
        ({"step_size": 0}, "step_size=0"),
        ({"truncate": False}, "truncate=False"),
        ({"keys": "input_ids"}, "give names"),
        ({"keys": 5}, "give names"),
    ],
)
def test_invalid_arguments_raise(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        SequenceLengthWarmup(**arguments)


def test_batches_without_sequences_and_endless_runs_raise() -> None:
    with pytest.raises(ConfigurationError, match="found nothing to truncate in the batch .Tensor"):
        Trainer(**QUIET, max_steps=1, callbacks=SequenceLengthWarmup(5)).fit(Line(), [torch.ones(2)])
    with pytest.raises(ConfigurationError, match="the run has no end"):
        Trainer(**QUIET, max_epochs=-1, callbacks=SequenceLengthWarmup(0.5)).fit(Line(), [torch.ones(2, 2)])


def truncated(batch: Any, **arguments: Any) -> Any:
    place = SimpleNamespace(global_step=0)
    return SequenceLengthWarmup(10, 4, 8, 1, **arguments).transform_train_batch(place, None, batch)  # type: ignore


@dataclass
class Tokenized:
    tokens: Tensor
    labels: Tensor


def test_truncated_sequences_are_contiguous_and_keep_their_container() -> None:
    tokens = torch.ones(2, 8).long()
    cut = truncated(Tokenized(tokens, tokens[:, :8]))
    assert isinstance(cut, Tokenized) and cut.labels.view(-1).shape == (8,)
    grouped = defaultdict(list, tokens=tokens)
    assert truncated(grouped).default_factory is list
    named = truncated({"tokens": tokens, "labels": tokens, "other": tokens}, keys={"tokens", "labels"})
    assert [part.shape[1] for part in named.values()] == [4, 4, 8]
    assert truncated(Tokenized(tokens, tokens), keys={"labels"}).labels.is_contiguous()


def test_masks_are_truncated_in_both_dimensions_and_features_in_none() -> None:
    batch = {
        "features": torch.ones(2, 5),
        "tokens": torch.ones(2, 8).long(),
        "square": torch.ones(2, 8, 8).bool(),
        "mask": torch.ones(2, 1, 8, 8),
        "embedded": torch.ones(2, 8, 8),
    }
    shapes = {name: tuple(part.shape) for name, part in truncated(batch).items()}
    expected = {"features": (2, 5), "tokens": (2, 4), "square": (2, 4, 4), "mask": (2, 1, 4, 4), "embedded": (2, 4, 8)}
    assert shapes == expected
    assert truncated(batch, keys={"mask"})["mask"].shape == (2, 1, 4, 4)


@pytest.mark.parametrize(
    ("batch", "keys", "words"),
    [
        ((torch.ones(2, 8).long(), torch.ones(2, 6).long()), None, r"shapes \(2, 8\), \(2, 6\)\. Make it a dict"),
        ({"labels": torch.ones(2, 8)}, {"lables"}, "Did you mean 'labels'"),
        ({"labels": torch.ones(2)}, {"labels"}, r"a tensor of the shape \(2,\)"),
        (torch.ones(2, 8), {"labels"}, "leave keys out"),
    ],
    ids=str,
)
def test_ambiguous_batches_and_invalid_keys_raise(batch: Any, keys: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        truncated(batch, keys=keys)


def test_a_fractional_duration_is_recomputed_for_each_fit() -> None:
    warmup = SequenceLengthWarmup(0.5, min_seq_length=2, max_seq_length=10, step_size=2)
    assert fit_warmup(warmup=warmup).seen[4][0] == 10
    assert [length for length, _ in fit_warmup(warmup=warmup, max_epochs=4).seen][:8] == [2, 2, 4, 4, 6, 6, 8, 8]


# ranks ----------------------------------------------------------------------------------------------------------------
def on_ranks(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        keeper = ModelCheckpoint(f"{folder}/{strategy}", every_n_train_steps=3, save_top_k=1, filename="{step}")
        arguments = {"strategy": strategy, "extra": [keeper], "enable_checkpointing": True, "max_steps": 3, "size": 1}
        first = fit(schedules()[0], **arguments)[0]
        rest, weights, _ = fit(schedules()[0], path=f"{folder}/{strategy}/step=3", strategy=strategy, size=1)
        found[strategy] = [samples for _, samples, _ in (*first, *rest)], [whole(weight).tolist() for weight in weights]
        found[f"{strategy}, lengths"] = fit_warmup(strategy=strategy).seen
    return found


def test_ranks_take_the_same_steps_as_one_process(tmp_path: Path) -> None:
    straight, weights, _ = fit(schedules()[0])
    first, second = run_world(2, on_ranks, str(tmp_path))
    single = fit_warmup().seen
    for strategy in ("ddp", "fsdp"):
        assert first[strategy] == second[strategy]
        samples, found = first[strategy]
        assert samples == [samples for _, samples, _ in straight]
        for own, expected in zip(found, weights, strict=True):
            assert torch.tensor(own).flatten().tolist() == pytest.approx(expected.flatten().tolist(), abs=1e-5)
        lengths = first[f"{strategy}, lengths"], second[f"{strategy}, lengths"]
        together = [(one[0], sorted(one[1] + two[1])) for one, two in zip(*lengths, strict=True) if one[0] == two[0]]
        assert together == single
