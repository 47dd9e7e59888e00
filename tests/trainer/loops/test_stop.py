"""`should_stop` inside an epoch: the run ends with a validation, and a resume equals an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares, Tiny
from samples import numbered
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from leyden import Callback, Trainer

MOMENTS = ("on_validation_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_end")


class RandomSteps(Squares):
    """Draws random numbers in every step; its learning rate follows the loss."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 1)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("noise", torch.rand(()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.7, patience=1)
        return [optimizer], [{"scheduler": scheduler, "monitor": "loss", "interval": "step"}]


class StopAndSave(Callback):
    """Sets `should_stop` at the third step, and from then on saves once in each of the MOMENTS."""

    order = 200

    def __init__(self, folder: Path) -> None:
        self.folder, self.validated = folder, list[int]()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 3

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.validated.append(trainer.global_step)
        self.save(trainer, "on_validation_end")

    def save(self, trainer: Any, moment: str) -> None:
        if trainer.should_stop and not (self.folder / moment).exists():
            trainer.save_checkpoint(self.folder / moment)

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.save(trainer, "on_validation_batch_end")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.save(trainer, "on_train_epoch_end")

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.save(trainer, "on_train_end")


def run(folder: Path, *callbacks: Callback, **options: Any) -> tuple[Trainer, RandomSteps]:
    trainer = Trainer(**QUIET, max_epochs=2, num_sanity_val_steps=0, default_root_dir=folder, callbacks=list(callbacks))
    module, data = RandomSteps(), torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    val_loader = DataLoader(data, 5, shuffle=True, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    torch.manual_seed(4)
    trainer.fit(module, DataLoader(data, 2, shuffle=True), val_loader, **options)  # type: ignore[arg-type]
    return trainer, module


@pytest.mark.filterwarnings("ignore:.*validation loader shuffles")
def test_a_run_stopped_inside_an_epoch_validates_and_resumes_exactly(tmp_path: Path) -> None:
    stopping = StopAndSave(tmp_path)
    trainer, _ = run(tmp_path, stopping)
    assert (trainer.global_step, trainer.current_epoch, stopping.validated) == (3, 0, [3])
    assert "noise" in trainer.callback_metrics
    whole, expected = run(tmp_path)
    assert whole.current_epoch == 2
    for moment in MOMENTS:
        resumed, module = run(tmp_path, ckpt_path=tmp_path / moment)
        assert resumed.progress.validations == 2 + (moment != "on_validation_batch_end")
        assert (
            resumed.lr_scheduler_configs[0].scheduler.state_dict()
            == whole.lr_scheduler_configs[0].scheduler.state_dict()
        )
        assert torch.equal(resumed.callback_metrics["noise"], whole.callback_metrics["noise"]), moment
        for found, wanted in zip(module.parameters(), expected.parameters(), strict=True):
            assert torch.equal(found, wanted), moment


@pytest.mark.parametrize(
    ("arguments", "validated"),
    [
        ({"val_check_interval": 3}, [3]),
        ({"check_val_every_n_epoch": 2}, []),
        ({"max_steps": 3}, [3]),
        ({"min_steps": 4}, [4]),
        ({"limit_val_batches": 0}, []),
    ],
)
def test_a_stopped_run_validates_at_most_once(fit: Any, arguments: Any, validated: list[int]) -> None:
    class Stop(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = trainer.global_step >= 2

    module = Tiny()
    fit(module, numbered(8), numbered(1), callbacks=Stop(), max_epochs=3, **arguments)
    assert module.validated_at == validated


def test_a_run_that_reaches_a_limit_does_not_validate(fit: Any) -> None:
    module = Tiny()
    fit(module, numbered(8), numbered(1), max_steps=3)
    fit(module, numbered(8), numbered(1), max_time={"microseconds": 0})
    assert module.validated_at == []


def test_current_epoch_increments_after_the_last_epoch_end_hook(fit: Any) -> None:
    class RecordsEpochs(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, int]] = []

        def on_train_epoch_end(self) -> None:
            self.seen.append(("module", self.current_epoch))

        def on_train_end(self) -> None:
            self.seen.append(("end", self.current_epoch))

    class RecordsClosingEpoch(Callback):
        order = 200

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            module.seen.append(("closing", trainer.current_epoch))

    module = RecordsEpochs()
    trainer = fit(module, numbered(2), callbacks=RecordsClosingEpoch(), max_epochs=2)
    assert module.seen == [("module", 0), ("closing", 0), ("module", 1), ("closing", 1), ("end", 2)]
    assert module.current_epoch == trainer.current_epoch == 2
    trainer.fit(module, numbered(2), ckpt_path="current", max_epochs=3)
    assert module.seen[5:] == [("module", 2), ("closing", 2), ("end", 3)]


def test_an_epoch_interrupted_by_a_second_limit_ends_at_that_limit(
    fit: Any, quiet: dict[str, Any], tmp_path: Path
) -> None:
    """A checkpoint of the resumed epoch records that its windows are settled, so a resume from it ends the epoch."""

    class RecordsEpochEnds(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.ended: list[int] = []

        def on_train_epoch_end(self) -> None:
            self.ended.append(self.trainer.global_step)

    class SaveAt5(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "five")

    first = fit(RecordsEpochEnds(), numbered(8), max_steps=3)
    first.save_checkpoint(tmp_path / "three")
    Trainer(**quiet, max_steps=7, callbacks=SaveAt5()).fit(
        RecordsEpochEnds(), numbered(8), ckpt_path=tmp_path / "three"
    )
    module = RecordsEpochEnds()
    Trainer(**quiet, max_steps=5).fit(module, numbered(8), ckpt_path=tmp_path / "five")
    assert module.ended == [5]
