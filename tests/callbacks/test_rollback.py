"""NonFiniteGuard("rollback"): the model returns to its checkpoint, the data continues, and a resume is exact."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import math
import multiprocessing
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, SAVED, Squares
from same import differences
from samples import Stream
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from leyden import Callback, ConfigurationError, LeydenError, Trainer, TrainModule, seed_everything
from leyden.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    CSVLogger,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    NonFiniteError,
    NonFiniteGuard,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from leyden.checkpoint.format.digests import read_digests
from leyden.checkpoint.reader import CheckpointReader
from leyden.cli.checkpoint.replay import _report, passed_over_after
from leyden.trainer.arguments.replay import Replay

SIZE = 40
"""The number of samples: 20 batches of two per epoch."""


class Data(Dataset[Tensor]):
    def __init__(self, bad: tuple[int, ...] = (), size: int = SIZE) -> None:
        self.bad, self.size = bad, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), math.inf) if index in self.bad else torch.sin(torch.arange(2.0) + index)


class Net(Squares):
    """Has dropout, schedulers by step and by epoch, and logs each epoch's mean loss."""

    def __init__(self, bad: tuple[int, ...] = (), dropout: float = 0.2) -> None:
        super().__init__(nn.Sequential(nn.Linear(2, 4), nn.Dropout(dropout), nn.Linear(4, 1)))
        self.bad = bad
        """The batches with a loss of nan, counted across epochs."""
        self.used: list[tuple[int, int, int]] = []
        self.firsts: list[float] = []
        self.epoch_losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.used.append((self.trainer.global_step, self.current_epoch, batch_idx))
        self.firsts.append(float(batch[0, 0]))
        loss = super().training_step(batch, batch_idx)
        if self.trainer.progress.batches in self.bad:
            loss = loss * math.nan
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_end(self) -> None:
        self.epoch_losses.append(float(self.trainer.callback_metrics.get("mean", math.nan)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        by_step = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9), "interval": "step"}
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), by_step]


class AfterBatch(Callback):
    """Calls a function after one batch, counted across epochs, before the guard checks."""

    def __init__(self, at: int, action: Any) -> None:
        self.at, self.action = at, action

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.batches == self.at:
            self.action(trainer)


def interrupt(trainer: Trainer) -> None:
    raise RuntimeError("interrupted")


def run(
    folder: Path,
    module: Any,
    *callbacks: Callback,
    data: Dataset[Tensor] | None = None,
    every: int = 5,
    path: Any = None,
    guard: NonFiniteGuard | None = None,
    saves: ModelCheckpoint | None = None,
    val: Any = None,
    **arguments: Any,
) -> tuple[Trainer, NonFiniteGuard]:
    """Fits with a guard that rolls back, and a checkpoint every few steps."""
    guard = NonFiniteGuard("rollback") if guard is None else guard
    saves = ModelCheckpoint(every_n_train_steps=every, save_top_k=-1) if saves is None else saves
    settings = {**QUIET, "max_epochs": 2, **arguments, "default_root_dir": folder, "enable_checkpointing": True}
    trainer = Trainer(**settings, callbacks=[guard, saves, *callbacks])
    loader = DataLoader(Data() if data is None else data, 2, shuffle=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "step \\d+ .* had gradients that were not finite", UserWarning)
        trainer.fit(module, loader, val, ckpt_path=path)
    return trainer, guard


def seeded(bad: tuple[int, ...] = (), dropout: float = 0.2) -> Net:
    seed_everything(3)
    return Net(bad, dropout)


def state_of(module: Any, trainer: Trainer) -> dict[str, Any]:
    return {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict()["state"],
        "rates": [scheduler.state_dict() for scheduler in trainer.lr_schedulers],
        "progress": {**trainer.progress.to_dict(), "seconds": 0.0, "seconds_at_validation": 0.0},
        "loss": module.epoch_losses,
        "next": torch.rand(()),
    }


# bit-for-bit equality -------------------------------------------------------------------------------------------------
def plain_loop(bad: tuple[int, ...], every: int, accumulate: int, further: int, epochs: int) -> dict[str, Any]:
    """Runs the same training as a plain loop, with deep copies as checkpoints."""
    module = seeded()
    [optimizer], [by_epoch, other] = module.configure_optimizers()
    by_step, parts = other["scheduler"], (module, optimizer, by_epoch, other["scheduler"])
    step = batches = 0
    saved: Any = None
    for epoch in range(epochs):
        loader = iter(DataLoader(Data(), 2, shuffle=True))
        left = 20
        while left:
            optimizer.zero_grad()
            length = min(accumulate, left)
            for _ in range(length):
                loss = module.net(next(loader)).square().mean() * (math.nan if batches in bad else 1.0)
                (loss / length).backward()
                batches, left = batches + 1, left - 1
            is_bad = not all(bool(p.grad.isfinite().all()) for p in module.parameters() if p.grad is not None)
            if is_bad:
                states, step, before = copy.deepcopy(saved)
                for part, state in zip(parts, states, strict=True):
                    part.load_state_dict(state)
                for _ in range(before, epoch + (left == 0)):
                    by_epoch.step()
                for _ in itertools.islice(loader, further):
                    batches, left = batches + 1, left - 1
                if left == 0 and further:
                    by_epoch.step()
                continue
            optimizer.step()
            by_step.step()
            step += 1
            if left == 0:
                by_epoch.step()
            if step % every == 0:
                saved = copy.deepcopy(([part.state_dict() for part in parts], step, epoch + (left == 0)))
        next(loader, None)
    return {"weights": module.state_dict(), "optimizer": optimizer.state_dict()["state"], "next": torch.rand(())}


@pytest.mark.parametrize(
    ("bad", "every", "accumulate", "further", "steps"),
    [
        ((7, 8, 31, 39), 5, 1, 0, [(8, 5), (6, 5), (28, 25), (33, 30)]),
        # Rolls back across the end of an epoch; skips the rest of one.
        ((24, 44), 20, 1, 0, [(25, 20), (40, 20)]),
        ((12, 35), 5, 1, 9, [(13, 10), (26, 25)]),
        ((9, 30), 2, 3, 2, [(4, 2), (8, 6)]),
    ],
)
def test_a_run_with_rollbacks_equals_a_plain_loop_bit_for_bit(
    bad: tuple[int, ...], every: int, accumulate: int, further: int, steps: list[tuple[int, int]], tmp_path: Path
) -> None:
    module = seeded(bad)
    guard = NonFiniteGuard("rollback", further_batches=further)
    trainer, _ = run(tmp_path, module, guard=guard, every=every, max_epochs=3, accumulate_grad_batches=accumulate)
    found = state_of(module, trainer)
    assert guard.rolled_back == steps
    wanted = plain_loop(bad, every, accumulate, further, 3)
    assert differences({name: found[name] for name in wanted}, wanted) == []
    # Every batch is counted, including those whose steps are undone.
    progress = trainer.progress
    assert progress.batches == 60 and progress.samples == 120 and math.isfinite(module.epoch_losses[0])
    assert accumulate > 1 or progress.batches - progress.passed_over == trainer.global_step


def test_a_rollback_rewinds_the_step_and_not_the_data(tmp_path: Path) -> None:
    module = seeded()
    trainer, guard = run(tmp_path, module, data=Data((7,)), max_epochs=1)
    [(bad, place)] = guard.rolled_back
    assert place == (bad - 1) // 5 * 5
    assert [batch for _, _, batch in module.used] == list(range(20))
    assert [step for step, _, _ in module.used] == [*range(bad), *range(place, 20 - bad + place)]
    assert trainer.global_step == 20 - (bad - place) and trainer.progress.passed_over == bad - place


def test_a_rollback_does_not_repeat_a_shuffle(tmp_path: Path) -> None:
    """Without dropout only the loader draws: restoring the checkpoint's random state would repeat a shuffle."""
    orders = []
    for bad in ((), (24,)):
        module = seeded(bad, dropout=0.0)
        _, guard = run(tmp_path / str(len(bad)), module, every=20, max_epochs=3)
        orders.append(module.firsts)
        assert len(guard.rolled_back) == len(bad) and len(module.used) == 60
    assert orders[0] == orders[1] and orders[1][20:40] != orders[1][40:]


@pytest.mark.parametrize(
    ("every", "further", "bad", "places", "stops"),
    # The second case rolls back into an earlier epoch, the third skips the rest of an epoch. Each is interrupted
    # once while its last checkpoint precedes the rollback, and once after a later checkpoint.
    [
        (5, 0, (13, 34, 36), [(14, 10), (31, 30), (32, 30)], (36, 50)),
        (30, 0, (33, 44), [(34, 30), (41, 30)], (45, 58)),
        (5, 30, (33,), [(34, 30)], (41, 50)),
    ],
)
def test_an_interrupted_run_with_rollbacks_resumes_exactly(
    every: int,
    further: int,
    bad: tuple[int, ...],
    places: list[tuple[int, int]],
    stops: tuple[int, int],
    tmp_path: Path,
) -> None:
    def fitted(folder: Path, *callbacks: Callback, path: str | None = None) -> tuple[Net, Trainer]:
        module, guard = seeded(bad), NonFiniteGuard("rollback", further_batches=further)
        trainer, _ = run(folder, module, *callbacks, every=every, max_epochs=3, path=path, guard=guard)
        assert guard.rolled_back == places
        return module, trainer

    module, trainer = fitted(tmp_path / "whole")
    wanted = state_of(module, trainer)
    for stop in stops:
        folder = tmp_path / str(stop)
        with pytest.raises(RuntimeError, match="interrupted"):
            fitted(folder, AfterBatch(stop, interrupt))
        assert differences(state_of(*fitted(folder, path="last")), wanted) == []


class IteratorNet(Net):
    """Takes its batches from the dataloader_iter."""

    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        self.used.append((self.trainer.global_step, self.current_epoch, batch_idx))
        return self.loss(batch) * (math.nan if self.trainer.progress.batches in self.bad else 1.0)


@pytest.mark.parametrize(("kind", "bad"), [(IteratorNet, 13), (Net, 12)])
def test_further_batches_are_skipped_for_dataloader_iter_and_streams(kind: Any, bad: int, tmp_path: Path) -> None:
    module = kind((bad,))
    guard, saves = NonFiniteGuard("rollback", further_batches=3), ModelCheckpoint(every_n_train_steps=5)
    data = (
        DataLoader(Data(), 2)
        if kind is IteratorNet
        else DataLoader(Stream([Data()[index] for index in range(SIZE)]), 2)
    )
    settings = {**QUIET, "enable_checkpointing": True, "max_epochs": 2, "default_root_dir": tmp_path}
    trainer = Trainer(**settings, callbacks=[guard, saves])
    with pytest.warns(UserWarning, match="step 13 .* had gradients that were not finite"):
        trainer.fit(module, data)
    assert guard.rolled_back == [(13, 10)]
    own = [batch for _, epoch, batch in module.used if epoch == 0]
    assert own == [*range(13), *range(16, 20)] and len(module.used) == 37
    assert trainer.progress.batches == 40 and trainer.global_step == 34


# choice of the checkpoint ---------------------------------------------------------------------------------------------
def test_the_error_names_the_samples_if_no_rollback_is_possible(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"step \d+ .*epoch 0, batch .*net\.0\.weight.*samples are .*7.*not saved"):
        run(tmp_path / "none", seeded(), data=Data((7,)), every=39)
    bad = tuple(range(22, SIZE))
    guard = NonFiniteGuard("rollback", patience=2)
    with pytest.raises(NonFiniteError, match=r"samples are .*has been rolled back to step 22 2 times in a row"):
        run(tmp_path / "often", seeded(bad), every=1, guard=guard)
    assert guard.rolled_back == [(23, 22)] * 3


def test_a_rollback_ignores_checkpoints_of_other_runs(tmp_path: Path) -> None:
    run(tmp_path / "other", seeded(), max_epochs=1)
    other = tmp_path / "other" / SAVED / "epoch=0-step=15"
    with pytest.raises(NonFiniteError, match="has not saved a checkpoint yet"):
        run(tmp_path / "own", seeded((17,)), every=9, path=other)
    # A resumed run counts as the same run.
    trainer, guard = run(tmp_path / "other", seeded((17,)), every=9, path=other)
    assert guard.rolled_back == [(18, 15)] and trainer.progress.batches == 40
    # A run that only starts from the weights does not.
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True},
        default_root_dir=tmp_path / "other",
        callbacks=[NonFiniteGuard("rollback"), ModelCheckpoint(every_n_train_steps=9)],
    )
    with pytest.raises(NonFiniteError, match="has not saved a checkpoint yet"):
        trainer.fit(seeded((2,)), DataLoader(Data(), 2), ckpt_path=other, restore="weights")


def test_a_rollback_skips_damaged_checkpoints_and_raises_if_all_are(tmp_path: Path) -> None:
    folder = tmp_path / SAVED

    def damage(*names: str) -> Any:
        return lambda trainer: [(folder / name / "model.safetensors").write_bytes(b"damaged") for name in names]

    with pytest.warns(UserWarning, match="skips a damaged checkpoint: .*epoch=0-step=15"):
        trainer, guard = run(tmp_path, seeded((17,)), AfterBatch(17, damage("epoch=0-step=15")))
    assert guard.rolled_back == [(18, 10)] and trainer.progress.passed_over == 8
    shutil.rmtree(tmp_path / "version_0")
    every = damage("epoch=0-step=5", "epoch=0-step=10")
    with (
        pytest.warns(UserWarning, match="skips a damaged"),
        pytest.raises(NonFiniteError, match="all 2 .* are damaged"),
    ):
        run(tmp_path, seeded((12,)), AfterBatch(12, every))


def test_a_rollback_ignores_deleted_and_weights_only_checkpoints(tmp_path: Path) -> None:
    newest = ModelCheckpoint(every_n_train_steps=5, save_top_k=1)
    weights = ModelCheckpoint(every_n_train_steps=1, save_weights_only=True, filename="weights-{step}", save_top_k=-1)
    _, guard = run(tmp_path, seeded((17, 33)), weights, saves=newest)
    assert guard.rolled_back == [(18, 15), (31, 30)]
    # Repeated steps have the same numbers, and existing checkpoints are not replaced.
    names = {path.name for path in (tmp_path / SAVED).glob("weights-*")}
    assert {"weights-step=16", "weights-step=16-v1", "weights-step=35"} <= names


def test_a_rollback_waits_for_an_asynchronous_save(tmp_path: Path) -> None:
    saves = ModelCheckpoint(every_n_train_steps=5, save_top_k=-1, asynchronous=True)
    module = seeded((15,))
    trainer, guard = run(tmp_path / "asynchronous", module, saves=saves)
    # The rollback comes one step after the start of this save.
    assert guard.rolled_back == [(16, 15)]
    found = state_of(module, trainer)
    again = seeded((15,))
    trainer, _ = run(tmp_path / "synchronous", again)
    assert differences(found, state_of(again, trainer)) == []


def test_a_fit_that_saves_no_checkpoint_before_its_end_raises(tmp_path: Path) -> None:
    for saves, settings in (
        (ModelCheckpoint(), {"max_epochs": 1}),
        (ModelCheckpoint(save_weights_only=True, every_n_train_steps=2), {}),
        (ModelCheckpoint(save_top_k=0), {}),
        (ModelCheckpoint(every_n_train_steps=50), {"max_steps": 50}),
    ):
        module = seeded()
        with pytest.raises(ConfigurationError, match="no ModelCheckpoint saves one before the end of training"):
            run(tmp_path, module, saves=saves, **settings)
        assert module.used == []
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[NonFiniteGuard("rollback")])
    with pytest.raises(ConfigurationError, match="no ModelCheckpoint saves"):
        trainer.fit(seeded(), DataLoader(Data(), 2))
    # A save per epoch suffices for two epochs, and one per validation for a single epoch.
    run(tmp_path / "two", seeded((25,)), saves=ModelCheckpoint())
    val = DataLoader(Data(size=4), 2)
    run(tmp_path / "one", seeded((15,)), saves=ModelCheckpoint(), max_epochs=1, val_check_interval=10, val=val)
    trainer = Trainer(**QUIET, fast_dev_run=2, callbacks=[NonFiniteGuard("rollback")])
    trainer.fit(seeded(), DataLoader(Data(), 2))


def test_unsupported_rollbacks_and_arguments_raise(tmp_path: Path) -> None:
    average = StochasticWeightAveraging(swa_lrs=0.1)
    with pytest.raises(
        ConfigurationError, match="StochasticWeightAveraging replaces the learning rate schedule at some epoch"
    ):
        run(tmp_path, Squares(), average)
    with pytest.raises(LeydenError, match="call it in on_train_batch_end"):
        Trainer(**QUIET).roll_back()
    with pytest.raises(ConfigurationError, match="give a number from 0, and only with 'rollback'"):
        NonFiniteGuard("skip", further_batches=1)
    for wrong in (-1, 1.0, True):
        with pytest.raises(ConfigurationError, match="further_batches="):
            NonFiniteGuard("rollback", further_batches=wrong)

    class RollsBackTooEarly(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            trainer.roll_back()

    with pytest.raises(LeydenError, match="call it in on_train_batch_end"):
        run(tmp_path, seeded(), RollsBackTooEarly())
    with pytest.raises(LeydenError, match="further_batches=-1"):
        run(tmp_path, seeded(), AfterBatch(7, lambda trainer: trainer.roll_back(-1)))


def test_user_callbacks_can_roll_back(tmp_path: Path) -> None:
    class BatchCounter(Callback):
        """Counts the batches that the weights include."""

        seen = 0

        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen += 1
            if trainer.progress.batches == 13:
                assert trainer.roll_back(further_batches=2).name == "epoch=0-step=10"
                assert (self.seen, trainer.global_step, trainer.progress.batches) == (10, 10, 15)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    counts = BatchCounter()
    trainer, guard = run(tmp_path, seeded(), counts, max_epochs=1)
    assert counts.seen == trainer.global_step == 15 and guard.rolled_back == []


def test_a_second_fit_drops_a_pending_rollback(tmp_path: Path) -> None:
    guard = NonFiniteGuard("rollback")
    module = seeded((7,))
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True},
        max_epochs=1,
        default_root_dir=tmp_path,
        callbacks=[AfterBatch(8, interrupt), guard, ModelCheckpoint(every_n_train_steps=5)],
    )
    with pytest.raises(RuntimeError, match="interrupted"):
        trainer.fit(module, DataLoader(Data(), 2))
    module.bad = ()
    trainer.callbacks.pop(0)
    trainer.fit(module, DataLoader(Data(), 2))
    assert guard.rolled_back == [] and trainer.global_step == 20


# other callbacks ------------------------------------------------------------------------------------------------------
def test_a_rollback_restores_weight_averages(tmp_path: Path) -> None:
    """Rolls back to a checkpoint with averages, and to one from before the first of them."""
    found = []
    for first in (0, 12):
        module = seeded((18,))
        ema = EMAWeightAveraging(decay=0.9, update_starting_at_step=first)
        _, guard = run(tmp_path / str(first), module, ema, every=9, max_epochs=1)
        assert guard.rolled_back == [(19, 18)]
        module, ema = seeded((13,)), EMAWeightAveraging(decay=0.9, update_starting_at_step=first)
        trainer, guard = run(tmp_path / f"{first} back", module, ema, every=10, max_epochs=1)
        assert guard.rolled_back == [(14, 10)]
        found.append((module.state_dict(), ema))
        # The expected averages are computed from the weights after each step that was not undone.
        assert trainer.global_step == 16
    for first, (averages, _) in zip((0, 12), found, strict=True):
        weights = weights_after_steps((13,), 10)
        wanted: dict[str, Tensor] = {}
        for step, own in enumerate(weights):
            if step >= first:
                wanted = {
                    name: value.clone() if name not in wanted else wanted[name].lerp(value, 1 - 0.9)
                    for name, value in own.items()
                }
        for name, value in wanted.items():
            torch.testing.assert_close(averages[name], value, rtol=1e-6, atol=1e-7)


def weights_after_steps(bad: tuple[int, ...], every: int) -> list[dict[str, Tensor]]:
    """Returns the weights after each step that was not undone, from a plain loop over one epoch."""
    module = seeded()
    [optimizer], [_, other] = module.configure_optimizers()
    parts, found, saved = (module, optimizer, other["scheduler"]), [], None
    for number, batch in enumerate(DataLoader(Data(), 2, shuffle=True)):
        optimizer.zero_grad()
        module.net(batch).square().mean().backward()
        if number in bad:
            assert saved is not None
            states, count = copy.deepcopy(saved)
            for part, state in zip(parts, states, strict=True):
                part.load_state_dict(state)
            del found[count:]
            continue
        optimizer.step()
        other["scheduler"].step()
        found.append({name: value.clone() for name, value in module.state_dict().items()})
        if len(found) % every == 0:
            saved = copy.deepcopy(([part.state_dict() for part in parts], len(found)))
    return found


def test_a_rollback_removes_the_digests_of_undone_steps(tmp_path: Path) -> None:
    run(tmp_path, seeded((13,)), max_epochs=1, digest_every_n_steps=1)
    [file] = tmp_path.rglob("digests.jsonl")
    records = list(read_digests(file))
    assert [record.step for record in records] == list(range(17))
    # Up to the rollback, the records equal those of a run without one. A resume writes the same records.
    run(tmp_path / "good", seeded(), max_epochs=1, digest_every_n_steps=1)
    [other] = (tmp_path / "good").rglob("digests.jsonl")
    good = list(read_digests(other))
    assert records[:11] == good[:11] and records[11].digests != good[11].digests
    run(tmp_path, seeded((13,)), max_epochs=1, digest_every_n_steps=1, path="last")
    assert list(read_digests(file)) == records and len(list(file.parent.glob("digests*"))) == 1


def test_a_rollback_keeps_timers_totals_and_logged_rows(tmp_path: Path) -> None:
    timer, monitor = Timer(), ThroughputMonitor(len, window_size=2)
    began: list[float | None] = []
    notes = AfterBatch(9, lambda trainer: began.append(timer.start_time()))
    logger = CSVLogger(tmp_path)
    module = seeded((7,))
    run(tmp_path, module, timer, monitor, notes, max_epochs=1, logger=logger, log_every_n_steps=1)
    assert began == [timer.start_time()] and began[0] is not None
    assert monitor.state_dict()["batches"] == 20
    rows = [line.split(",")[0] for line in Path(logger.metrics_file_path).read_text().splitlines()[1:]]
    # Step 8 is the bad one, so 6 to 8 are repeated.
    assert [step for step, _ in itertools.groupby(rows)][:12] == [*"12345678", *"6789"]
    with open(logger.metrics_file_path, newline="") as file:
        measured = [row["step"] for row in csv.DictReader(file) if row["train/device/batches_per_sec"]]
    assert measured[:10] == [*"2345678", *"678"]


def test_a_rollback_keeps_the_checkpoint_ranking_and_restores_early_stopping(tmp_path: Path) -> None:
    class ScoreNet(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            # The best score belongs to a step that is undone.
            self.log("score", 0.0 if self.trainer.progress.batches == 8 else 1.0)

    seed_everything(3)
    best = ModelCheckpoint(monitor="score", save_weights_only=True, filename="best-{step}", save_top_k=1)
    stopping = EarlyStopping("score", patience=100)
    val = DataLoader(Data(size=2), 2)
    settings = {"val_check_interval": 2, "max_epochs": 1, "num_sanity_val_steps": 0, "val": val}
    _, guard = run(tmp_path, ScoreNet((9,)), best, stopping, **settings)
    assert guard.rolled_back == [(10, 5)]
    assert Path(best.best_model_path).name == "best-step=8" and float(best.best_model_score or 0) == 0.0
    # Only the best of all ranked checkpoints is kept.
    assert [path.name for path in (tmp_path / SAVED).glob("best-*")] == ["best-step=8"]
    # EarlyStopping has discarded the score of the undone weights.
    assert float(stopping.best_score) == 1.0


class FrozenBackbone(TrainModule):
    """Has a backbone that is unfrozen in the second epoch."""

    def __init__(self, bad: tuple[int, ...]) -> None:
        super().__init__()
        self.backbone, self.head, self.bad = nn.Linear(2, 3), nn.Linear(3, 1), bad

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.head(self.backbone(batch)).square().mean()
        return loss * math.nan if self.trainer.progress.batches in self.bad else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


def test_backbone_finetuning_survives_a_rollback(tmp_path: Path) -> None:
    """Rolls back to a checkpoint from before the backbone is unfrozen, and to one from after it."""
    found = []
    for bad in ((), (23,), (43,)):
        seed_everything(3)
        module, rates = FrozenBackbone(bad), []  # type: ignore[var-annotated]
        tuning = BackboneFinetuning(1, lambda epoch: 2.0, backbone_initial_ratio_lr=0.1, should_align=False)
        recorder = AfterBatch(
            50, lambda trainer, to=rates: to.append([own["lr"] for own in trainer.optimizers[0].param_groups])
        )
        trainer, guard = run(tmp_path / str(bad), module, tuning, recorder, every=20, max_epochs=3)
        assert guard.rolled_back == [(number + 1, 20 * (number // 20)) for number in bad]
        assert all(parameter.requires_grad for parameter in module.parameters())
        found.append((rates, len(trainer.optimizers[0].param_groups), tuning.state_dict()))
    assert found[0] == found[1] == found[2] and found[0][0] == [[0.05, pytest.approx(0.01)]]


def test_a_rollback_that_would_lose_a_parameter_group_raises(tmp_path: Path) -> None:
    class AddsGroupMidEpoch(BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.backbone)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None: ...

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 7 and len(trainer.optimizers[0].param_groups) == 1:
                self.unfreeze_and_add_param_group(module.backbone, trainer.optimizers[0])

    seed_everything(3)
    with pytest.raises(NonFiniteError, match="group of backbone.weight, backbone.bias was added"):
        run(tmp_path, FrozenBackbone((9,)), AddsGroupMidEpoch(), max_epochs=1)


def test_steps_skipped_by_a_gradient_scaler_cause_a_rollback_after_patience(tmp_path: Path) -> None:
    scales: list[float] = []
    for patience, places in ((None, []), (5, []), (3, [(9, 5)])):
        module = seeded((5, 6, 7, 8))
        guard = NonFiniteGuard("rollback", patience=patience)
        folder = tmp_path / str(patience)
        trainer, _ = run(folder, module, guard=guard, precision="16-mixed", max_epochs=1)
        assert guard.rolled_back == places and guard.skipped == []
        assert all(bool(tensor.isfinite().all()) for tensor in module.state_dict().values())
        scales.append(trainer.strategy.precision.state_dict()["scaler"]["scale"])
        assert trainer.global_step == (16 if places else 20)
    # A rollback restores the checkpoint's scale; without one, four skipped steps have halved it.
    assert scales[0] == scales[1] == scales[2] / 16


class AfterValidation(Callback):
    """Calls a function after each validation."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self.action(trainer)


@pytest.mark.parametrize("ends", ["limit", "error"])
def test_a_rollback_ignores_checkpoints_saved_at_an_interruption(ends: str, tmp_path: Path) -> None:
    """An uninterrupted run would not have saved these checkpoints."""

    def fitted(folder: Path, *callbacks: Callback, **arguments: Any) -> tuple[list[tuple[int, int]], dict[str, Any]]:
        module = seeded((8,))
        saves = ModelCheckpoint(every_n_train_steps=5, save_top_k=-1, save_last=True, save_on_exception=True)
        trainer, guard = run(folder, module, *callbacks, saves=saves, **{"max_epochs": 1, **arguments})
        return guard.rolled_back, state_of(module, trainer)

    places, wanted = fitted(tmp_path / "whole")
    assert places == [(9, 5)]
    # The run ends twice before the bad step; the second end also saves a checkpoint.
    for stop in (6, 7):
        path = "last" if stop == 7 else None
        if ends == "limit":
            fitted(tmp_path / ends, max_steps=stop, path=path)
        else:
            with pytest.raises(RuntimeError, match="interrupted"):
                fitted(tmp_path / ends, AfterBatch(stop, interrupt), path=path)
    assert (tmp_path / ends / SAVED / "epoch=0-step=7").exists()
    places, found = fitted(tmp_path / ends, path="last")
    assert places == [(9, 5)] and differences(found, wanted) == []


def test_skipped_batches_keep_the_validation_at_the_epochs_end(tmp_path: Path) -> None:
    # The 8th of 20 batches is bad, and 17 more would be skipped.
    for interval, further, places in (
        (20, 17, [(0, 20)]),
        (5, 17, [(0, 5), (0, 20)]),
        (10, 17, [(0, 20)]),
        (4, 2, [(0, 4), (0, 10), (0, 12), (0, 16), (0, 20)]),
        (8, 17, [(0, 20)]),
        (1.0, 17, [(0, 20)]),
        (0.5, 1, [(0, 10), (0, 20)]),
    ):
        module = seeded((7,))
        seen: list[tuple[int, int]] = []
        recorder = AfterValidation(lambda trainer, to=seen: to.append((trainer.current_epoch, trainer.progress.batch)))
        guard = NonFiniteGuard("rollback", further_batches=further)
        val = DataLoader(Data(size=2), 2)
        folder = tmp_path / f"{interval} {further}"
        settings = {"val_check_interval": interval, "max_epochs": 1, "num_sanity_val_steps": 0, "val": val}
        run(folder, module, recorder, guard=guard, **settings)
        assert (interval, seen) == (interval, places)


class ManualWindows(TrainModule):
    """Steps manually after every fourth batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.net(batch).square().mean())
        if (batch_idx + 1) % 4 == 0:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_rollback_clears_manually_accumulated_gradients(tmp_path: Path) -> None:
    found: list[list[bool]] = []

    def roll_back_and_record(trainer: Trainer) -> None:
        parameters = list(trainer.lightning_module.parameters())
        before = [parameter.grad is not None for parameter in parameters]
        trainer.roll_back()
        found.extend([before, [parameter.grad is not None for parameter in parameters]])

    seed_everything(3)
    run(tmp_path, ManualWindows(), AfterBatch(10, roll_back_and_record), every=1, max_epochs=1)
    assert found == [[True, True], [False, False]]


def test_patience_counts_a_step_of_two_optimizers_once(tmp_path: Path) -> None:
    class TwoNets(TrainModule):
        def __init__(self, bad: int) -> None:
            super().__init__()
            self.automatic_optimization, self.bad = False, bad
            self.nets = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizers: Any = self.optimizers()
            for number, (optimizer, net) in enumerate(zip(optimizers, self.nets, strict=True)):
                optimizer.zero_grad()
                self.manual_backward(net(batch).square().mean() * (math.nan if number == self.bad else 1.0))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(net.parameters(), 0.1) for net in self.nets]

    for bad in (0, 1):
        guard = NonFiniteGuard("skip", patience=2)
        with pytest.raises(NonFiniteError, match="step 3 .* for 3 steps in a row"), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            run(tmp_path / str(bad), TwoNets(bad), guard=guard, max_epochs=1)
        assert guard.skipped == [1, 2]


def test_workers_exit_when_an_epoch_is_cut_short() -> None:
    class EndsEpochEarly(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    before = set(multiprocessing.active_children())
    trainer = Trainer(**{**QUIET, "max_epochs": 1}, callbacks=[EndsEpochEarly()])
    trainer.fit(Squares(), DataLoader(Data(), 2, num_workers=1))
    assert set(multiprocessing.active_children()) == before and trainer.global_step == 2


def test_states_without_rollbacks_load() -> None:
    guard = NonFiniteGuard("rollback")
    guard.load_state_dict({"skipped": [3], "in_a_row": 1})
    assert guard.rolled_back == [] and guard.skipped == [3]
    guard.rolled_back.append((7, 5))
    again = NonFiniteGuard()
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert again.rolled_back == [(7, 5)]


# leyden replay --------------------------------------------------------------------------------------------------------
def test_replay_reports_steps_around_a_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / SAVED
    run(tmp_path, seeded((12,)), max_epochs=1)
    passed = [passed_over_after(tmp_path, CheckpointReader(folder / f"epoch=0-step={step}")) for step in (5, 10, 15)]
    assert passed == [0, 3, 0]

    def replayed(step: int, start: int, name: str) -> dict[str, Any]:
        report = tmp_path / name
        report.mkdir()
        replay = Replay(str(folder / f"epoch=0-step={start}"), step, str(report))
        monkeypatch.setenv("LEYDEN_REPLAY", replay.variables()["LEYDEN_REPLAY"])
        with pytest.raises((SystemExit, NonFiniteError)):
            run(tmp_path, seeded((12,)), max_epochs=1)
        found: dict[str, Any] = json.loads(replay.report.read_text())
        return found

    # The bad step, and an earlier one, which was repeated.
    found = replayed(13, 10, "bad")
    assert found["step"] == 13 and found["batch"] == 12 and found["gradients"]["net.0.weight"]["nan"]
    found = replayed(12, 10, "before")
    lines = _report(found, folder, {"net.0.weight": ["float32 (4, 2)", "of the second time"]}, 3)
    assert found["batch"] == 11 and any("skipped 3 batches, so it may have repeated the step" in x for x in lines)
    assert not any("recorded" in line for line in lines)
    # A step taken only after the rollback, and one after a later checkpoint.
    assert "the run rolled back here: replay a later step" in replayed(14, 10, "after")["error"]
    assert replayed(16, 15, "since")["batch"] == 18
