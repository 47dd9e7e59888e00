"""An error in loading a sample names the sample; everything else about the dataset stays unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from samples import Broken, BrokenTogether
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from leyden import Trainer
from leyden.core.errors import ConfigurationError
from leyden.data.sample_rng import SampleRNG


def notes_of(error: BaseException) -> str:
    """Returns the notes of an error, which Python 3.10 lacks: there they are printed."""
    return "\n".join(getattr(error, "__notes__", ()))


def fit(dataset: Any, folder: Path, workers: int = 0, **arguments: Any) -> None:
    loader = dataset if isinstance(dataset, DataLoader) else DataLoader(dataset, 2, num_workers=workers)
    Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": folder, **arguments}).fit(Line(), loader)


ALONE, TOGETHER = Broken({5}, 8, width=2), BrokenTogether({5}, 8, width=2)
# Sample 5 of the outer Subset is sample 9 of the dataset.
PART = Subset(Subset(Broken({9}, 12, width=2), range(2, 12)), range(2, 10))
PART_TOGETHER = Subset(BrokenTogether({9}, 12, width=2), range(4, 12))


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        (ALONE, "sample 5 of Broken"),
        (TOGETHER, "one of the samples 4, 5 of BrokenTogether"),
        (PART, "sample 5 of Subset (sample 9 of Broken)"),
        (PART_TOGETHER, "one of the samples 4, 5 of Subset (samples 8, 9 of BrokenTogether)"),
        (SampleRNG(ALONE), "sample 5 of Broken"),
    ],
    ids=["one by one", "together", "Subset of a Subset", "Subset, together", "SampleRNG"],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_samples_error_is_kept_and_names_the_sample(
    dataset: Dataset[Any], named: str, workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError, match="cannot read") as caught:
        fit(dataset, tmp_path, workers)
    text = f"{caught.value}{notes_of(caught.value)}{capfd.readouterr().err}"
    assert f"the error came from {named}" + (", in worker 0 of the loader." if workers else ".") in text
    # The dataset's line that raised, and the position in the run.
    assert workers == 0 or "raise self.error(" in text
    assert "epoch 0, batch 2" in text


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Broken, BrokenTogether])
def test_a_sample_that_raises_stop_iteration_does_not_end_the_epoch(kind: Any, workers: int, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"samples? (4, )?5 of {kind.__name__}.* raised StopIteration"):
        fit(kind({5}, 8, StopIteration, width=2), tmp_path, workers)


class DatasetAsProperty(DataLoader[Any]):
    """Overrides the dataset attribute with a property."""

    @property
    def dataset(self) -> Any:
        return self._own

    @dataset.setter
    def dataset(self, value: Any) -> None:
        # A DataLoader refuses plain assignment after its constructor.
        vars(self)["_own"] = value


def test_a_loader_whose_dataset_is_a_property_is_left_alone(tmp_path: Path) -> None:
    fit(DatasetAsProperty(Broken(set(), 8, width=2), 2), tmp_path)
    with pytest.raises(OSError, match="cannot read 5") as caught:
        fit(DatasetAsProperty(ALONE, 2), tmp_path)
    assert "the error came from" not in notes_of(caught.value)
    with pytest.raises(ConfigurationError, match="not a DatasetAsProperty over a Broken with `dataset` as a property"):
        fit(DatasetAsProperty(ALONE, 2), tmp_path, on_bad_sample="skip")
    with pytest.raises(ConfigurationError, match="that of a DatasetAsProperty is a property"):
        fit(DatasetAsProperty(ALONE, 2), tmp_path, sample_rng=True)
    fit(DatasetAsProperty(SampleRNG(Broken(set(), 8, width=2)), 2), tmp_path, sample_rng=True)


def open_folder(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, Folder)
    info.dataset.folder = "opened"


class Folder(Broken):
    folder: str | None = None

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2) if self.folder == "opened" else torch.zeros(2)


def test_a_worker_init_fn_gets_the_users_dataset(tmp_path: Path) -> None:
    seen: list[float] = []

    class Module(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(float(batch.mean()))
            return super().training_step(batch, batch_idx)

    loader = DataLoader(Folder(set(), 8), 4, num_workers=1, worker_init_fn=open_folder)
    Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": tmp_path}).fit(Module(), loader)
    assert seen == [1.0, 1.0] and type(loader.dataset) is Folder
