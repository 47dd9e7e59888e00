"""`trainer.history`: the table of a fit's epoch values, through resumes and rollbacks, and on two ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import forge, forge_json
from models import QUIET, Squares
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, CheckpointError, Trainer
from leyden.callbacks import ModelCheckpoint, NonFiniteGuard
from leyden.core.errors import MissingExtraError
from leyden.trainer.logging.history import MOST_UNREAD, EpochRows, History

DATA = [torch.ones(1, 2)] * 4
SAVING: dict[str, Any] = {"enable_checkpointing": True}


class Net(Squares):
    """Logs the number of optimizer steps done as a training loss (its epoch value is the mean) and in validation.

    Args:
        bad: the batch in which the loss is nan, over all epochs.
    """

    def __init__(self, bad: int = -1) -> None:
        super().__init__(nn.Linear(2, 1))
        self.bad = bad

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        steps = float(self.trainer.global_step)
        self.log("loss", torch.tensor(steps), on_step=False, on_epoch=True)
        self.log("each", steps, on_epoch=True)
        self.log("only_step", steps)
        return self.loss(batch) * (math.nan if self.trainer.progress.batches == self.bad else 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.trainer.global_step), logger=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", 1.0)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that save write to the current folder."""
    monkeypatch.chdir(tmp_path)


def fitted(*callbacks: Callback, module: Net | None = None, validates: bool = True, **arguments: Any) -> Trainer:
    fit = {name: arguments.pop(name) for name in ("ckpt_path",) if name in arguments}
    trainer = Trainer(**{**QUIET, "max_epochs": 2, **arguments}, callbacks=list(callbacks))
    trainer.fit(module or Net(), DATA, DATA[:2] if validates else None, **fit)
    return trainer


def rows(trainer: Trainer, *names: str) -> list[list[Any]]:
    return [[row.get(name) for name in ("epoch", "step", *names)] for row in trainer.history]


# rows -----------------------------------------------------------------------------------------------------------------
def test_an_epoch_is_a_row_with_its_values_and_those_of_its_validation() -> None:
    trainer = fitted()
    first = {"epoch": 0, "step": 4, "loss": 1.5, "each_epoch": 1.5, "val": 4.0}
    assert trainer.history == [first, {"epoch": 1, "step": 8, "loss": 5.5, "each_epoch": 5.5, "val": 8.0}]
    assert [*trainer.history[0]] == [*first]
    assert [type(value) for value in trainer.history[0].values()] == [int, int, float, float, float]


def test_a_validation_within_an_epoch_has_a_row_of_its_own() -> None:
    assert rows(fitted(val_check_interval=2, max_epochs=1), "loss", "val") == [[0, 2, None, 2.0], [0, 4, 1.5, 4.0]]


def test_an_epoch_without_validation_has_no_older_value() -> None:
    found = rows(fitted(check_val_every_n_epoch=2), "loss", "val")
    assert found == [[0, 4, 1.5, None], [1, 8, 5.5, 8.0]]


def test_the_validation_at_the_start_is_the_first_row_and_the_sanity_check_none() -> None:
    assert rows(fitted(max_epochs=1, validate_at_start=True), "val") == [[0, 0, 0.0], [0, 4, 4.0]]
    assert rows(fitted(max_epochs=1, num_sanity_val_steps=1), "val") == [[0, 4, 4.0]]


def test_other_stages_add_nothing_and_a_new_fit_starts_anew() -> None:
    trainer = fitted()
    before = trainer.history
    trainer.validate(trainer.module, DATA, verbose=False)
    trainer.test(trainer.module, DATA, verbose=False)
    assert trainer.history == before and len(before) == 2
    trainer.fit(trainer.module, DATA, max_epochs=1)
    assert rows(trainer) == [[0, 4]]


def test_a_change_of_the_table_does_not_change_the_run() -> None:
    trainer = fitted()
    trainer.history[0]["loss"] = -1.0
    assert trainer.history[0]["loss"] == 1.5


def test_epoch_and_step_are_those_of_the_run_whatever_is_logged_under_their_names() -> None:
    class Named(Net):
        def on_train_epoch_end(self) -> None:
            self.log("step", 100.0)
            self.log("epoch", 7.0)

    assert rows(fitted(module=Named(), max_epochs=1)) == [[0, 4]]


def test_a_closing_callback_finds_the_epochs_row_in_the_table() -> None:
    class Watch(Callback):
        closing_hooks = frozenset({"on_train_epoch_end"})

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
            self.seen.append(trainer.history[-1]["loss"])

    watch = Watch()
    fitted(watch)
    assert watch.seen == [1.5, 5.5]


# showing --------------------------------------------------------------------------------------------------------------
def test_it_prints_aligned_and_is_a_table_in_a_notebook() -> None:
    history = fitted(val_check_interval=2, max_epochs=1).history
    assert str(history).splitlines() == [
        "epoch  step  val  loss  each_epoch",
        "    0     2    2",
        "    0     4    4   1.5         1.5",
    ]
    assert "<tr><td>0</td><td>2</td><td>2</td><td></td><td></td></tr>" in history._repr_html_()
    assert repr(Trainer(**QUIET).history) == "[]"


def test_the_frame_has_nan_where_a_row_lacks_a_value() -> None:
    pandas = pytest.importorskip("pandas")
    frame = fitted(val_check_interval=2, max_epochs=1).history.frame()
    assert frame.columns.tolist() == ["epoch", "step", "val", "loss", "each_epoch"]
    assert frame["step"].tolist() == [2, 4] and pandas.isna(frame["loss"][0]) and frame["loss"][1] == 1.5
    assert History().frame().columns.tolist() == ["epoch", "step"]


def test_without_pandas_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="pip install pandas"):
        History().frame()


# cost -----------------------------------------------------------------------------------------------------------------
def test_values_are_read_back_in_blocks_or_when_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    from leyden.trainer.logging import history

    sizes: list[int] = []
    read_back = history.read_back

    def counted(values: Any) -> Any:
        sizes.append(len(values))
        return read_back(values)

    monkeypatch.setattr(history, "read_back", counted)
    table = EpochRows()
    for epoch in range(MOST_UNREAD + 5):
        table.add(epoch, epoch, {"loss": torch.tensor(float(epoch)), "number": 1.0})
    assert sizes == [MOST_UNREAD]
    last = MOST_UNREAD + 4
    assert table.table()[-1] == {"epoch": last, "step": last, "loss": float(last), "number": 1.0}
    assert sizes == [MOST_UNREAD, 5]


# resume ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stop", range(1, 12))
def test_a_resume_continues_the_table(stop: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {**SAVING, "max_epochs": 3, "val_check_interval": 2}
    whole = fitted(ModelCheckpoint(tmp_path / "whole"), **options).history
    fitted(ModelCheckpoint(tmp_path, save_last=True), **options, max_steps=stop)
    assert fitted(ModelCheckpoint(tmp_path), **options, ckpt_path=tmp_path / "last").history == whole


def test_a_finished_run_shows_its_table_again(tmp_path: Path) -> None:
    """Also the row of the epoch that the limit cut, which a longer run would not have."""
    first = fitted(ModelCheckpoint(tmp_path, save_last=True), **SAVING, max_steps=6).history
    again = fitted(ModelCheckpoint(tmp_path), **SAVING, max_steps=6, ckpt_path=tmp_path / "last")
    assert again.history == first
    assert rows(again, "loss") == [[0, 4, 1.5], [1, 6, 4.5]]


def test_a_fit_that_goes_on_from_memory_has_the_table_of_one_longer_fit() -> None:
    trainer = fitted(max_steps=3)
    assert rows(trainer, "loss", "val") == [[0, 3, 1.0, None]]
    trainer.fit(trainer.module, DATA, DATA[:2], ckpt_path="current", max_steps=-1)
    assert trainer.history == fitted().history


def test_a_checkpoint_without_it_starts_the_table_at_the_resume(tmp_path: Path) -> None:
    """As those of earlier versions."""
    fitted(ModelCheckpoint(tmp_path, save_last=True), **SAVING, max_epochs=1)
    forge(tmp_path / "last", "history.json", None)
    assert rows(fitted(**SAVING, ckpt_path=tmp_path / "last"), "loss") == [[1, 8, 5.5]]


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree["tree"]["rows"].append({"epoch": 1}),
        lambda tree: tree["tree"]["rows"].append({"epoch": 1, "step": -1}),
        lambda tree: tree["tree"]["rows"].append({"epoch": 1, "step": 5, "loss": "high"}),
        lambda tree: tree["tree"].update(rows=3),
        lambda tree: tree.update(tree=[]),
    ],
)
def test_a_forged_table_is_refused_before_training(change: Callable[[Any], Any], tmp_path: Path) -> None:
    fitted(ModelCheckpoint(tmp_path, save_last=True), **SAVING, max_epochs=1)
    forge_json(tmp_path / "last", "history.json", change)
    with pytest.raises(CheckpointError, match=r"history\.json"):
        fitted(**SAVING, ckpt_path=tmp_path / "last")


def test_nan_and_infinity_survive_a_resume(tmp_path: Path) -> None:
    class Extreme(Net):
        def on_train_epoch_end(self) -> None:
            self.log("nan", math.nan)
            self.log("inf", math.inf)

    fitted(ModelCheckpoint(tmp_path, save_last=True), **SAVING, max_epochs=1, module=Extreme())
    row = fitted(**SAVING, module=Extreme(), ckpt_path=tmp_path / "last").history[0]
    assert math.isnan(row["nan"]) and row["inf"] == math.inf


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_rollback_drops_the_rows_after_its_step(tmp_path: Path) -> None:
    """Saved at step 4; batch 6, of the second epoch, is bad; steps 5 and 6, and the validation between, are undone."""
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    module = Net(bad=6)
    trainer = fitted(NonFiniteGuard("rollback"), checkpoint, **SAVING, module=module, val_check_interval=1)
    assert trainer.global_step == 5
    # The first row of the second epoch is the validation of the restored weights.
    assert rows(trainer) == [[0, 1], [0, 2], [0, 3], [0, 4], [1, 4], [1, 5]]


# ranks ----------------------------------------------------------------------------------------------------------------
def history_of_rank(folder: str, ckpt_path: str | None) -> Any:
    class Ranked(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("rank", float(self.trainer.global_rank), on_step=False, on_epoch=True)
            return super().training_step(batch[0], batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch[0], batch_idx)

    arguments = {**QUIET, **SAVING, "strategy": "ddp", "devices": 2, "max_epochs": 1 if ckpt_path is None else 2}
    trainer = Trainer(**arguments, callbacks=[ModelCheckpoint(folder, save_last=True)])
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(TensorDataset(torch.ones(8, 2)), 1)
    trainer.fit(Ranked(), loader, loader, ckpt_path=ckpt_path)
    return list(trainer.history)


def test_every_rank_has_the_same_table(tmp_path: Path) -> None:
    first, second = run_world(2, history_of_rank, str(tmp_path), None)
    assert first == second == [{"epoch": 0, "step": 4, "rank": 0.5, "loss": 1.5, "each_epoch": 1.5, "val": 4.0}]
    resumed = run_world(2, history_of_rank, str(tmp_path), str(tmp_path / "last"))
    assert resumed[0] == resumed[1] and resumed[0][:1] == first and len(resumed[0]) == 2


def test_forked_ranks_send_the_table_back() -> None:
    trainer = Trainer(**QUIET, strategy="ddp_fork", devices=2, max_epochs=1)
    trainer.fit(Net(), DataLoader(torch.ones(8, 2), 1))
    assert rows(trainer, "loss") == [[0, 4, 1.5]]
