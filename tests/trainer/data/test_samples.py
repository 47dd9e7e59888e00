"""A sample whose loading raises is named, and everything else about the data set stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from torch.utils.data import DataLoader, Dataset, get_worker_info

from leyden import Trainer


class Pictures(Dataset[Any]):
    """Sample 5 is broken."""

    folder: str | None = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("truncated picture")
        return torch.full((2,), float(index))


class Together(Pictures):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def notes_of(error: BaseException) -> str:
    """Where Python 3.10 has no notes, they are printed."""
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.mark.parametrize(
    ("dataset", "named"),
    [(Pictures(), "sample 5 of Pictures"), (Together(), "one of the samples 4, 5 of Together")],
    ids=["one by one", "together"],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_error_of_a_sample_is_kept_and_names_it(
    dataset: Dataset[Any], named: str, workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": tmp_path})
    with pytest.raises(OSError, match="truncated picture") as caught:
        trainer.fit(Line(), DataLoader(dataset, 2, num_workers=workers))
    text = f"{caught.value}{notes_of(caught.value)}{capfd.readouterr().err}"
    assert f"the error came from {named}" + (", in worker 0 of the loader." if workers else ".") in text
    # The line of the data set, and the place in the run.
    assert workers == 0 or 'raise OSError("truncated picture")' in text
    assert "epoch 0, batch 2" in text


def opens(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, Folder)
    info.dataset.folder = "opened"


class Folder(Pictures):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(2) if self.folder == "opened" else torch.zeros(2)


def test_a_worker_init_fn_finds_the_users_data_set(tmp_path: Path) -> None:
    seen: list[float] = []

    class Module(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(float(batch.mean()))
            return super().training_step(batch, batch_idx)

    loader = DataLoader(Folder(), 4, num_workers=1, worker_init_fn=opens)
    Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": tmp_path}).fit(Module(), loader)
    assert seen == [1.0, 1.0] and type(loader.dataset) is Folder
