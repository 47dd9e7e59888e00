"""on_bad_sample="skip" in one process (ranks: tests/ranks): training equals a plain loop over the good samples."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares, sgd_with_momentum
from same import differences
from samples import Broken, BrokenTogether, Stream
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from leyden import Trainer
from leyden.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from leyden.checkpoint.reader import CheckpointReader
from leyden.core.errors import ConfigurationError, LeydenError


class Module(Squares):
    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1)), sgd_with_momentum)
        self.sizes: list[int] = []

    def loss(self, batch: Tensor) -> Any:
        self.sizes.append(len(batch))
        return super().loss(batch)


def fit(data: Any, folder: Path, workers: int = 0, shuffle: bool = True, **arguments: Any) -> tuple[Module, Trainer]:
    module = arguments.pop("module", None) or Module()
    torch.manual_seed(9)
    ckpt_path = arguments.pop("ckpt_path", None)
    settings = {**QUIET, "max_epochs": 2, "default_root_dir": folder, "on_bad_sample": "skip", **arguments}
    trainer = Trainer(**settings)
    loader = data if isinstance(data, DataLoader) else DataLoader(data, 4, shuffle=shuffle, num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module, trainer


def plain_loop(data: Broken, accumulation: int = 1, shuffle: bool = True, workers: int = 0) -> Module:
    """Trains in a plain loop without the samples that the dataset marks as bad."""
    module = Module()
    optimizer: Any = module.configure_optimizers()
    torch.manual_seed(9)
    numbered = TensorDataset(torch.arange(len(data)), data.rows)
    loader = DataLoader(numbered, 4, shuffle=shuffle, num_workers=workers)
    for _ in range(2):
        batches = list(range(0, len(loader), accumulation))
        iterator = iter(loader)
        for first in batches:
            window = [next(iterator) for _ in range(min(accumulation, len(loader) - first))]
            kept = [rows[[int(n) not in data.bad for n in numbers]] for numbers, rows in window]
            kept = [rows for rows in kept if len(rows)]
            optimizer.zero_grad()
            for rows in kept:
                (module.training_step(rows, 0) / len(window)).backward()
            if len(kept) != len(window):
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.grad *= len(window) / len(kept)
            if kept:
                optimizer.step()
        next(iterator, None)
    return module


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Broken, BrokenTogether], ids=["one by one", "together"])
def test_training_equals_a_plain_loop_over_the_good_samples(kind: Any, workers: int, tmp_path: Path) -> None:
    data = kind({3, 4, 17})
    module, trainer = fit(data, tmp_path, workers)
    plain = plain_loop(data, workers=workers)
    assert module.sizes == plain.sizes and sum(module.sizes) == 2 * 23
    assert not differences(dict(module.state_dict()), dict(plain.state_dict()))
    assert trainer.progress.bad_samples == 6 and trainer.progress.samples == 46 and trainer.global_step == 14


@pytest.mark.parametrize("kind", [Broken, BrokenTogether], ids=["one by one", "together"])
def test_a_subset_skips_single_samples_and_logs_both_indices(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "leyden")
    data = kind({3, 4, 17})
    module, _ = fit(Subset(Subset(data, range(25, -1, -1)), range(25, -1, -1)), tmp_path)
    plain = plain_loop(data)
    assert module.sizes == plain.sizes
    assert not differences(dict(module.state_dict()), dict(plain.state_dict()))
    name = f"sample 17 of Subset (sample 17 of {kind.__name__}) is left out"
    assert sum(name in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize("error", [MemoryError, torch.cuda.OutOfMemoryError])
@pytest.mark.parametrize(("kind", "workers"), [(Broken, 0), (Broken, 1), (BrokenTogether, 0)])
def test_running_out_of_memory_does_not_make_a_bad_sample(error: Any, kind: Any, workers: int, tmp_path: Path) -> None:
    with pytest.raises(error, match="cannot read 5"):
        fit(kind({5}, error=error), tmp_path, workers)


def test_a_sample_that_raises_stop_iteration_is_skipped(tmp_path: Path) -> None:
    _, trainer = fit(Broken({5}, error=StopIteration), tmp_path, max_epochs=1)
    assert (trainer.progress.samples, trainer.progress.bad_samples, trainer.global_step) == (25, 1, 7)


class AsTensor(Broken):
    def __getitems__(self, indices: list[int]) -> Any:
        return self.rows[indices]


class TooFew(Broken):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self.rows[index] for index in indices if index not in self.bad]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (AsTensor(set()), "AsTensor.__getitems__ returned a Tensor for 4 indices"),
        (TooFew({2}), "TooFew.__getitems__ returned a list of 3 for 4 indices"),
        (Subset(TooFew({2}), range(26)), "TooFew.__getitems__ returned a list of 3 for 4 indices"),
    ],
    ids=["a tensor", "too few samples", "too few samples of a Subset"],
)
def test_a_getitems_without_one_sample_per_index_is_refused(data: Any, found: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=found):
        fit(data, tmp_path, shuffle=False)


def test_skipping_changes_nothing_without_bad_samples(tmp_path: Path) -> None:
    module, _ = fit(Broken(set()), tmp_path)
    plain, _ = fit(Broken(set()), tmp_path, on_bad_sample="raise")
    assert module.sizes == plain.sizes
    assert not differences(dict(module.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "first", [0, 4, 8, 24], ids=["first of a window", "inside a window", "last of a window", "last batch"]
)
def test_a_batch_without_a_good_sample_is_skipped(accumulation: int, first: int, tmp_path: Path) -> None:
    data = Broken(set(range(first, first + 4)))
    module, trainer = fit(data, tmp_path, shuffle=False, accumulate_grad_batches=accumulation)
    plain = plain_loop(data, accumulation, shuffle=False)
    assert module.sizes == plain.sizes
    assert not differences(dict(module.state_dict()), dict(plain.state_dict()))
    windows = 7 if accumulation == 1 else 3
    assert trainer.progress.batches == 14 and trainer.global_step == 2 * windows
    # A window of only bad samples steps no optimizer.
    emptied = accumulation == 1 or first == 24
    assert trainer.progress.stepped == 2 * (windows - emptied)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_continues_after_a_bad_sample_and_keeps_the_count(workers: int, tmp_path: Path) -> None:
    whole, _ = fit(Broken({3, 4, 17}), tmp_path / "whole", workers)
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=5, save_top_k=-1)
    _, first = fit(Broken({3, 4, 17}), tmp_path, workers, max_steps=5, callbacks=checkpoint, enable_checkpointing=True)
    module, second = fit(Broken({3, 4, 17}), tmp_path, workers, ckpt_path=first.last_checkpoint)
    assert not differences(dict(module.state_dict()), dict(whole.state_dict()))
    assert second.progress.bad_samples == 6


class WithoutDropout(Module):
    """Has no dropout, since random numbers that an interrupted window drew are not restored."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.net[1] = nn.Identity()
        self.fails = fails

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.fails and len(self.sizes) == 5:
            raise ArithmeticError("the user's own error")
        return super().training_step(batch, batch_idx)


def test_a_window_repeated_after_an_error_counts_its_bad_samples_once(tmp_path: Path) -> None:
    """Sample 2 is in the first window; 13 and 14 are in the window that the resume repeats."""
    data, settings = Broken({2, 13, 14}), {"shuffle": False, "accumulate_grad_batches": 3, "max_epochs": 1}
    whole, whole_trainer = fit(data, tmp_path / "whole", module=WithoutDropout(), **settings)
    with pytest.raises(ArithmeticError):
        fit(data, tmp_path, module=WithoutDropout(fails=True), callbacks=OnExceptionCheckpoint(tmp_path), **settings)
    saved = CheckpointReader(tmp_path / "on_exception").progress()
    assert (saved["batch"], saved["samples"], saved["bad_samples"]) == (3, 11, 1)
    module, trainer = fit(data, tmp_path, module=WithoutDropout(), ckpt_path=tmp_path / "on_exception", **settings)
    assert trainer.progress.bad_samples == whole_trainer.progress.bad_samples == 3
    assert trainer.progress.samples == whole_trainer.progress.samples == 23
    assert not differences(dict(module.state_dict()), dict(whole.state_dict()))


def test_skipping_and_resuming_work_without_the_distributed_sampler(tmp_path: Path) -> None:
    data, settings = Broken({3, 4, 17}), {"use_distributed_sampler": False}
    whole, _ = fit(data, tmp_path / "whole", **settings)
    plain = plain_loop(data)
    assert not differences(dict(whole.state_dict()), dict(plain.state_dict()))
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=5, save_top_k=-1)
    _, first = fit(data, tmp_path, max_steps=5, callbacks=checkpoint, enable_checkpointing=True, **settings)
    module, _ = fit(data, tmp_path, ckpt_path=first.last_checkpoint, **settings)
    assert not differences(dict(module.state_dict()), dict(whole.state_dict()))


def test_the_first_bad_sample_warns_and_all_are_logged_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", "leyden")
    trainer = Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": tmp_path, "on_bad_sample": "skip"})
    with pytest.warns(UserWarning, match="sample 3 of Broken raised OSError: cannot read 3, and is left") as caught:
        trainer.fit(Module(), DataLoader(Broken({3, 17}), 4))
    assert sum("left out" in str(warning.message) for warning in caught) == 1
    first, trace, second = [record for record in caplog.records if record.filename == "sifted.py"]
    assert first.getMessage() == "sample 3 of Broken is left out, since it raised OSError: cannot read 3"
    assert second.getMessage() == "sample 17 of Broken is left out, since it raised OSError: cannot read 17"
    assert trace.levelname == "WARNING" and "raise self.error(" in trace.getMessage()
    assert "left out    2 samples that raised" in capsys.readouterr().out
    with pytest.warns(UserWarning):
        trainer.fit(Module(), DataLoader(Broken({3}), 4))
    assert "left out    1 sample that raised" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (range(0, 110, 11), None),
        (range(0, 120, 9), ["11 of the first 92 samples raised"]),
        (range(1, 12), ["11 of the first 12 samples raised"]),
        (range(104, 124), None),
    ],
    ids=["a tenth", "more than a tenth", "all at the start", "only later"],
)
def test_many_bad_samples_early_in_a_run_warn_once(bad: range, found: list[str] | None, tmp_path: Path) -> None:
    trainer = Trainer(**{**QUIET, "max_epochs": 2, "default_root_dir": tmp_path, "on_bad_sample": "skip"})
    with pytest.warns(UserWarning) as caught:
        trainer.fit(Module(), DataLoader(Broken(set(bad), 200), 4))
    messages = [str(warning.message) for warning in caught if "of the first" in str(warning.message)]
    assert [message.partition(" and")[0] for message in messages] == (found or [])


def test_a_dataset_whose_every_sample_raises_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(LeydenError, match="every sample of the last 10 batches raised"):
        fit(Broken(set(range(80)), 80), tmp_path)


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (DataLoader(Stream([torch.ones(3)]), 4), "a DataLoader over a Stream"),
        (DataLoader(Broken(set()), batch_size=None), "a DataLoader over a Broken without batches"),
    ],
)
def test_loaders_without_sample_indices_are_refused(loader: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=named):
        fit(loader, tmp_path)
    with pytest.raises(ConfigurationError, match="not a list"):
        Trainer(**QUIET, on_bad_sample="skip", max_epochs=1).fit(Module(), [torch.ones(2, 3)])


def test_an_unknown_value_of_on_bad_sample_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="use 'raise' or 'skip'"):
        Trainer(on_bad_sample="ignore")
