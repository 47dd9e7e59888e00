"""A slow training loader warns, measured by a clock that only samples and steps advance."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from leyden import Trainer
from leyden.data.combined import CombinedLoader
from leyden.trainer.loops import loader_timer


class Clock:
    """A clock that tests advance."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowDataset(Dataset[Any]):
    def __init__(self, time: Clock, seconds: float) -> None:
        self.time, self.seconds = time, seconds

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.time.now += self.seconds
        return torch.ones(2)


class Module(Line):
    def __init__(self, time: Clock, seconds: float) -> None:
        super().__init__()
        self.time, self.seconds = time, seconds

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.time.now += self.seconds
        return super().training_step(batch, batch_idx)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    time = Clock()
    monkeypatch.setattr(loader_timer, "perf_counter", time)
    return time


def warnings_of_fit(
    time: Clock, load: float, step: float, folder: Path, epochs: int = 3, **arguments: Any
) -> list[str]:
    loader = arguments.pop("loader", None) or DataLoader(SlowDataset(time, load), 1)
    trainer = Trainer(**{**QUIET, "max_epochs": epochs, "default_root_dir": folder, **arguments})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Module(time, step), loader)
    assert trainer.global_step == 100 * epochs
    return [str(warning.message) for warning in caught if "data took" in str(warning.message)]


def test_a_slow_loader_warns_once(time: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_timer.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    [message] = warnings_of_fit(time, 0.4, 0.6, tmp_path)
    assert message == (
        "data took 40% of the training time over 50 batches (0.4 of 1 s each): raise num_workers (now 0, with "
        "8 cores) in the training loader."
    )


def test_the_advice_divides_the_cores_among_the_machines_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_timer.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), num_workers=2)
    assert loader_timer._fix(loader, 2) == "raise num_workers (now 2, with 8 cores for 2 ranks) in the training loader"
    advice = loader_timer._fix(loader, 4)
    assert advice.startswith("num_workers=2 is this rank's share of 8 cores for 4 ranks, so make samples")
    both = CombinedLoader([DataLoader(TensorDataset(torch.ones(4, 2)), num_workers=3), loader])
    assert loader_timer._fix(both, 1) == "raise num_workers (now 2, with 8 cores) in the training loader"


class Stream(IterableDataset[Any]):
    """A hundred samples that a function generates."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.ones(2)] * 100)


def test_streams_from_the_module_in_training_are_not_told_to_use_workers(time: Clock, tmp_path: Path) -> None:
    class OnPolicy(Module):
        def generate(self) -> Any:
            self.time.now += 0.4
            return self.layer(torch.ones(2))

    module = OnPolicy(time, 0.6)
    for held in [
        {"policy": module},
        {"agent": {"policy": module.layer}},
        {"generate": module.generate},
        {"generate": functools.partial(module.generate)},
        {"generate": lambda: module.generate()},
    ]:
        advice = loader_timer._fix(DataLoader(Stream(**held)), 1, module)
        assert "come from the module in training" in advice and "num_workers" not in advice
        inner = CombinedLoader([DataLoader(Stream(**held)), DataLoader(Stream())])
        assert "come from the module in training" in loader_timer._fix(inner, 1, module)
    others = Stream(time=time, tokenizer=object(), net=nn.Linear(2, 2), size=4, kind=Module, names=["a"])
    assert "num_workers" in loader_timer._fix(DataLoader(others), 1, module)


def test_an_on_policy_run_warns_without_naming_workers(time: Clock, tmp_path: Path) -> None:
    class Rollouts(Stream):
        def __iter__(self) -> Iterator[Any]:
            for sample in super().__iter__():
                time.now += 0.4
                yield sample

    module = Module(time, 0.6)
    with pytest.warns(UserWarning, match=r"data took 40% .*module in training") as found:
        Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": tmp_path}).fit(
            module, DataLoader(Rollouts(policy=module), 1)
        )
    assert not any("num_workers" in str(warning.message) for warning in found)


class Validated(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.time.now += 100


def test_a_validation_inside_an_epoch_does_not_count_as_step_time(time: Clock, tmp_path: Path) -> None:
    settings = {**QUIET, "max_epochs": 1, "default_root_dir": tmp_path, "val_check_interval": 10}
    with pytest.warns(UserWarning, match=r"data took 40% .* over 50 batches \(0\.4 of 1 s each\)"):
        Trainer(**settings).fit(Validated(time, 0.6), DataLoader(SlowDataset(time, 0.4), 1), [torch.ones(1, 2)])


@pytest.mark.parametrize(
    ("load", "step", "epochs"),
    [(0.2, 0.8, 3), (0.02, 0.02, 2), (0.0009, 0.0001, 3)],
    ids=["small share of the time", "short run", "batches too quick for workers to help"],
)
def test_fast_loaders_and_short_runs_do_not_warn(
    load: float, step: float, epochs: int, time: Clock, tmp_path: Path
) -> None:
    assert warnings_of_fit(time, load, step, tmp_path, epochs) == []


def test_short_epochs_are_measured_together_and_barebones_measures_nothing(time: Clock, tmp_path: Path) -> None:
    # 95 of 100 batches are timed, with 94 steps between them: 3.76 seconds of an epoch.
    assert len(warnings_of_fit(time, 0.02, 0.02, tmp_path, epochs=3)) == 1
    assert warnings_of_fit(time, 1.0, 1.0, tmp_path, barebones=True) == []


@pytest.mark.parametrize("length", [3, 5, 20])
def test_an_exhausted_loader_is_not_read_again(length: int, tmp_path: Path) -> None:
    class OneBatchShort:
        """Yields one batch fewer than its length."""

        def __len__(self) -> int:
            return length + 1

        def __iter__(self) -> Any:
            yield from [torch.ones(1, 2)] * length
            exhausted.append(1)

    exhausted: list[int] = []
    trainer = Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": tmp_path})
    with pytest.warns(UserWarning, match=f"reports {length + 1} batches but ended after {length}"):
        trainer.fit(Line(), OneBatchShort())
    assert trainer.progress.batches == length and exhausted == [1]
