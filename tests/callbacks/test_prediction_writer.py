"""BasePredictionWriter: each prediction is written once, with the indices of its samples, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line, input_of
from ranks.world import run_world
from samples import Stream
from torch.utils.data import DataLoader, RandomSampler

from leyden import CombinedLoader, ConfigurationError, Trainer
from leyden.callbacks import BasePredictionWriter


class Doubles(Line):
    """Predicts twice each input."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"twice": 2 * input_of(batch)}


class FileWriter(BasePredictionWriter):
    """Writes one file per batch, and one for all predictions."""

    def __init__(self, folder: Path, interval: Any = "batch_and_epoch") -> None:
        super().__init__(interval)
        self.folder = folder

    def write_on_batch_end(
        self,
        trainer: Any,
        module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert torch.equal(prediction["twice"], 2 * batch)
        path = self.folder / f"{dataloader_idx}-{batch_idx}-{trainer.global_rank}.json"
        path.write_text(json.dumps([batch_indices, prediction["twice"].flatten().tolist()]))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save([predictions, batch_indices], self.folder / f"all-{trainer.global_rank}.pt")


def numbers(count: int, start: float = 0.0) -> torch.Tensor:
    return torch.arange(start, start + count)[:, None].expand(-1, 2).contiguous()


def loader(count: int = 7, start: float = 0.0, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(numbers(count, start), 3, **arguments)  # type: ignore[arg-type]


def batches(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def predict(writer: BasePredictionWriter, data: Any, keeps: bool = False, **arguments: Any) -> Any:
    trainer = Trainer(callbacks=writer, **{**QUIET, **arguments})
    return trainer.predict(Doubles(), data, return_predictions=keeps)


def test_each_batch_is_written_with_its_indices(tmp_path: Path) -> None:
    assert predict(FileWriter(tmp_path, "batch"), loader()) is None
    found = batches(tmp_path)
    assert [found[f"0-{number}-0"][0] for number in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert found["0-2-0"][1] == [12.0, 12.0] and not list(tmp_path.glob("all*"))


def test_interval_epoch_writes_once_and_keeps_no_predictions(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path, "epoch")
    kept = predict(writer, loader(num_workers=2), keeps=True)
    predictions, indices = torch.load(tmp_path / "all-0.pt")
    assert indices == [[[0, 1, 2], [3, 4, 5], [6]]] and not batches(tmp_path)
    assert all(torch.equal(one["twice"], other["twice"]) for one, other in zip(predictions, kept, strict=True))
    assert not writer._predictions


def test_predictions_of_several_loaders_are_separate(tmp_path: Path) -> None:
    data = [loader(4), CombinedLoader([loader(3, 10.0), loader(2, 20.0)], "sequential")]
    predict(FileWriter(tmp_path), data)
    predictions, indices = torch.load(tmp_path / "all-0.pt")
    assert indices == [[[0, 1, 2], [3]], [[0, 1, 2]], [[0, 1]]]
    assert [len(part) for part in predictions] == [2, 1, 1]
    assert batches(tmp_path)["2-0-0"] == [[0, 1], [40.0, 40.0, 42.0, 42.0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: loader(sampler=RandomSampler(range(7))),
        lambda: DataLoader(Stream(list(numbers(7))), 3),
        lambda: numbers(6).reshape(2, 3, 2),
    ],
)
def test_batches_of_unknown_order_have_no_indices(tmp_path: Path, make: Any) -> None:
    predict(FileWriter(tmp_path), make())
    assert all(indices is None for indices, _ in batches(tmp_path).values())


def test_fit_writes_nothing(tmp_path: Path) -> None:
    trainer = Trainer(callbacks=FileWriter(tmp_path), max_steps=1, **QUIET)
    trainer.fit(Doubles(), loader())
    assert not list(tmp_path.iterdir())


def test_invalid_writers_raise_before_the_first_batch(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="write_interval='step'"):
        BasePredictionWriter("step")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="needs write_on_epoch_end: override it"):
        predict(BasePredictionWriter("epoch"), loader())


def on_ranks(folder: str) -> list[Any]:
    for name in ("ddp", "fsdp"):
        place = Path(folder) / name
        place.mkdir(exist_ok=True)
        assert predict(FileWriter(place), loader(13), strategy=name, devices=2) is None
    return []


def test_ranks_write_each_sample_once(tmp_path: Path) -> None:
    run_world(2, on_ranks, str(tmp_path))
    for name in ("ddp", "fsdp"):
        found = batches(tmp_path / name).values()
        pairs = [(index, value) for indices, values in found for index, value in zip(indices, values[::2], strict=True)]
        assert sorted(pairs) == [(index, 2.0 * index) for index in range(13)]
        indices = [torch.load(tmp_path / name / f"all-{rank}.pt")[1] for rank in range(2)]
        assert indices == [[[[0, 1, 2], [6, 7, 8], [12]]], [[[3, 4, 5], [9, 10, 11]]]]
