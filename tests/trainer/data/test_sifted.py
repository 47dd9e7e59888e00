"""on_bad_sample="skip" on one process: what is left trains as a loop over what is left; ranks: tests/ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from same import differences
from samples import Stream
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from leyden import Trainer, TrainModule
from leyden.callbacks import ModelCheckpoint
from leyden.strategies.errors import ConfigurationError, LeydenError


class Broken(Dataset[Any]):
    """Rows of random numbers; those with the given indices raise."""

    def __init__(self, bad: set[int], size: int = 26) -> None:
        self.rows = torch.randn(size, 3, generator=torch.Generator().manual_seed(1))
        self.bad = bad

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        if index in self.bad:
            raise OSError(f"cannot read {index}")
        return self.rows[index]


class BrokenTogether(Broken):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class Module(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.sizes: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch))
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def fit(data: Any, folder: Path, workers: int = 0, shuffle: bool = True, **arguments: Any) -> tuple[Module, Trainer]:
    module = Module()
    torch.manual_seed(9)
    ckpt_path = arguments.pop("ckpt_path", None)
    settings = {**QUIET, "max_epochs": 2, "default_root_dir": folder, "on_bad_sample": "skip", **arguments}
    trainer = Trainer(**settings)
    loader = data if isinstance(data, DataLoader) else DataLoader(data, 4, shuffle=shuffle, num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module, trainer


def by_hand(data: Broken, accumulation: int = 1, shuffle: bool = True, workers: int = 0) -> Module:
    """The plain loop, whose collate_fn leaves out what the data set marks."""
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
def test_training_equals_a_loop_over_the_good_samples(kind: Any, workers: int, tmp_path: Path) -> None:
    data = kind({3, 4, 17})
    module, trainer = fit(data, tmp_path, workers)
    plain = by_hand(data, workers=workers)
    assert module.sizes == plain.sizes and sum(module.sizes) == 2 * 23
    assert not differences(dict(module.state_dict()), dict(plain.state_dict()))
    assert trainer.progress.bad_samples == 6 and trainer.progress.samples == 46 and trainer.global_step == 14


def test_without_a_bad_sample_nothing_changes(tmp_path: Path) -> None:
    module, _ = fit(Broken(set()), tmp_path)
    plain, _ = fit(Broken(set()), tmp_path, on_bad_sample="raise")
    assert module.sizes == plain.sizes
    assert not differences(dict(module.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("first", [0, 4, 8, 24], ids=["window opens", "inside", "window closes", "last batch"])
def test_a_batch_without_a_good_sample_is_passed_over(accumulation: int, first: int, tmp_path: Path) -> None:
    data = Broken(set(range(first, first + 4)))
    module, trainer = fit(data, tmp_path, shuffle=False, accumulate_grad_batches=accumulation)
    plain = by_hand(data, accumulation, shuffle=False)
    assert module.sizes == plain.sizes
    assert not differences(dict(module.state_dict()), dict(plain.state_dict()))
    windows = 7 if accumulation == 1 else 3
    assert trainer.progress.batches == 14 and trainer.global_step == 2 * windows
    # A window of nothing but bad samples steps nothing.
    emptied = accumulation == 1 or first == 24
    assert trainer.progress.stepped == 2 * (windows - emptied)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_continues_behind_a_bad_sample_and_keeps_the_count(workers: int, tmp_path: Path) -> None:
    whole, _ = fit(Broken({3, 4, 17}), tmp_path / "whole", workers)
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=5, save_top_k=-1)
    _, first = fit(Broken({3, 4, 17}), tmp_path, workers, max_steps=5, callbacks=checkpoint, enable_checkpointing=True)
    module, second = fit(Broken({3, 4, 17}), tmp_path, workers, ckpt_path=first.last_checkpoint)
    assert not differences(dict(module.state_dict()), dict(whole.state_dict()))
    assert second.progress.bad_samples == 6


def test_the_first_bad_sample_is_warned_of_and_all_are_logged_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", "leyden")
    trainer = Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": tmp_path, "on_bad_sample": "skip"})
    with pytest.warns(UserWarning, match="sample 3 raised OSError: cannot read 3, and is left out") as caught:
        trainer.fit(Module(), DataLoader(Broken({3, 17}), 4))
    assert sum("left out" in str(warning.message) for warning in caught) == 1
    assert [record.args for record in caplog.records if record.name == "leyden"] == [
        (3, "OSError: cannot read 3"),
        (17, "OSError: cannot read 17"),
    ]
    assert "left out    2 samples that raised" in capsys.readouterr().out


def test_a_data_set_that_only_raises_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(LeydenError, match="of the last 10 batches every sample raised"):
        fit(Broken(set(range(80)), 80), tmp_path)


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (DataLoader(Stream([torch.ones(3)]), 4), "a DataLoader over a Stream"),
        (DataLoader(Broken(set()), batch_size=None), "a DataLoader over a Broken without batches"),
    ],
)
def test_what_has_no_index_is_refused(loader: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=named):
        fit(loader, tmp_path)
    with pytest.raises(ConfigurationError, match="this is a list"):
        Trainer(**QUIET, on_bad_sample="skip", max_epochs=1).fit(Module(), [torch.ones(2, 3)])


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="use 'raise' or 'skip'"):
        Trainer(on_bad_sample="ignore")
