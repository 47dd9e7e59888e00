"""A run that was killed, signalled or broken off, and goes on, ends bit for bit as one that was not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from models import QUIET
from programs import start_program
from samples import labeled
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Dataset

from leyden import Trainer, TrainModule
from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.callbacks.checkpointing.on_exception_checkpoint import OnExceptionCheckpoint
from leyden.callbacks.loggers.csv_logger import CSVLogger
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.format.errors import CheckpointError

PROGRAM = Path(__file__).with_name("killed_runs.py")

# Ten batches an epoch in windows of 4, 4 and 2, mostly; validation after each epoch; a save after each step.
KILLS = (
    "KILL@training_step:1",  # before anything was saved
    "KILL@after_train_batch_end:4",  # right after the first save
    "KILL@training_step:7",  # in the middle of a window
    "KILL@getitem:50",  # while a batch is loaded
    "KILL@before_train_batch_end:10",  # the last step of an epoch, before its save
    "KILL@after_train_batch_end:10",  # and after it, before the validation
    "KILL@validation_step:6",
    "KILL@after_validation_end:2",
    "KILL@before_train_epoch_end:1",
    "KILL@train_epoch_end:2",
    "KILL@after_train_epoch_end:1",
    "KILL@before_train_epoch_start:2",  # between two epochs
    "KILL@after_after_backward:13",
    "KILL@before_optimizer_step:5",
    "KILL@save:6",  # while it is saved
    "KILL@after_train_batch_end:18",
    "KILL@after_train_end:1",
    "KILL@training_step:13>KILL@after_train_batch_end:3>KILL@validation_step:2",  # again and again
)
SCENARIOS = (
    *("shuffle", "seldom saved", "saved by epoch", "workers", "persistent workers", "seeded samples in workers"),
    *("sampler", "generator", "stateful loader", "stream", "limited stream", "limited", "16-mixed", "monitored"),
    *("plateau by epoch", "manual", "steps", "stream, steps", "combined", "reloaded", "growing windows"),
)
BESIDE = (
    "KILL@before_write:2",  # in the thread that saves
    "KILL@after_write:3",
    "KILL@after_commit:4",
    "KILL@training_step:9",  # in a step, beside the thread
    "KILL@before_optimizer_step:5",
    "KILL@before_commit:2>KILL@before_write:2>KILL@after_commit:1",
)
STOPS = (
    "TERM@training_step:14",
    "INT@training_step:1",
    "TERM@validation_step:7",
    "INT@after_train_batch_end:20",
    "INT@before_sanity_check_start:1",
    "TERM@before_train_epoch_end:2",
    "TERM@before_train_epoch_start:3",
    "INT@after_validation_end:3",
)


def run(scenario: str, folder: Path, *points: str) -> tuple[dict[str, list[int]], str]:
    """Runs the program; returns the exit codes of each point's runs, and all that was printed."""
    printed = folder / "printed.txt"
    process = start_program([PROGRAM, scenario, folder, "none", *points], folder, printed, printed)
    try:
        process.join(280)
    finally:
        # A worker whose parent is killed before it has learned of it waits for ever: torch asks who it is too late.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    text = printed.read_text()
    assert process.exitcode == 0, text
    codes: dict[str, list[int]] = json.loads((folder / "codes.json").read_text())
    assert all(of_point[-1] == 0 for of_point in codes.values()), text
    return codes, text


def result(folder: Path, point: str, number: int = 0) -> dict[str, Any]:
    name = point.translate(str.maketrans("@:+>", "----"))
    loaded: dict[str, Any] = torch.load(folder / name / f"{number}.pt", weights_only=True)
    return loaded


def differences(a: Any, b: Any, place: str = "") -> list[str]:
    """Where two nests differ in any bit, dtype or key."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(a.keys() | b.keys())
        return [found for key in keys for found in differences(a.get(key, "—"), b.get(key, "—"), f"{place}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [found for i, (x, y) in enumerate(zip(a, b)) for found in differences(x, y, f"{place}[{i}]")]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        return [] if same else [f"{place}: {a} and {b}"]
    return [] if a == b or (a != a and b != b) else [f"{place}: {a!r} and {b!r}"]


def compare(ours: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """All that a run ended with, except the record of how it got there."""
    about = {"events", "ended", "named"}
    return differences(*({key: value for key, value in run.items() if key not in about} for run in (ours, whole)))


def check_kills(scenario: str, folder: Path, points: tuple[str, ...]) -> None:
    codes, _ = run(scenario, folder, *points)
    whole = result(folder, "none")
    assert len(whole["order"]) == whole["progress"]["batches"] == whole["events"]["training_step"]
    killed = 0
    for point in points:
        event, _, count = point.split(">")[0].removeprefix("KILL@").partition(":")
        # Workers load samples elsewhere, and some scenarios are shorter than others.
        if whole["events"].get(event, 0) < int(count):
            continue
        assert codes[point][0] == -9
        killed += 1
        assert compare(result(folder, point, len(codes[point]) - 1), whole) == [], point
    assert killed >= 2


def diagonal(scenario: str) -> tuple[str, ...]:
    """Every fifth point, from another one on for each scenario."""
    return KILLS[SCENARIOS.index(scenario) % 5 :: 5]


def test_a_killed_run_resumes_exactly(tmp_path: Path) -> None:
    check_kills("shuffle", tmp_path, KILLS)
    # It went on, it did not begin anew.
    whole = result(tmp_path, "none")
    for point in KILLS[1:-1]:
        assert 0 < result(tmp_path, point, 1)["events"].get("getitem", 1) < whole["events"]["getitem"]
    assert result(tmp_path, "KILL@after_train_batch_end:18", 1)["events"]["training_step"] == 30 - 18
    # A kill inside a window repeats that window: batches 12 and 13.
    assert result(tmp_path, "KILL@after_after_backward:13", 1)["events"]["training_step"] == 30 - 10


@pytest.mark.parametrize("scenario", SCENARIOS[1:])
def test_a_killed_run_resumes_exactly_with(scenario: str, tmp_path: Path) -> None:
    check_kills(scenario, tmp_path, diagonal(scenario))


def test_a_run_whose_checkpoints_are_written_beside_it_resumes_exactly_after_a_kill(tmp_path: Path) -> None:
    check_kills("saved beside", tmp_path, BESIDE)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_it_resumes_exactly_after_a_kill_anywhere(seed: int, tmp_path: Path) -> None:
    """At places of the run and of the thread that are drawn at random, as its own progress is."""
    chosen = random.Random(seed)
    places = ("training_step", "getitem", "save", "after_train_batch_end", "before_optimizer_step", "validation_step")
    threads = ("before_write", "after_write", "before_commit", "after_commit")
    points = {f"KILL@{chosen.choice(places + threads)}:{chosen.randint(1, 30)}" for _ in range(12)}
    check_kills("saved beside, often", tmp_path, tuple(sorted(points)))


@pytest.mark.full
@pytest.mark.parametrize("scenario", SCENARIOS[1:])
def test_a_run_killed_anywhere_resumes_exactly_with(scenario: str, tmp_path: Path) -> None:
    check_kills(scenario, tmp_path, KILLS)


def test_the_program_would_notice_a_run_that_does_not_go_on_exactly(tmp_path: Path) -> None:
    """What makes the tests above able to fail: two runs of other scenarios differ in each kind of result."""
    for scenario in ("shuffle", "seldom saved"):
        (tmp_path / scenario).mkdir()
        run(scenario, tmp_path / scenario)
    one, other = (result(tmp_path / scenario, "none") for scenario in ("shuffle", "seldom saved"))
    different = {place.strip("/").replace("[", "/").replace(":", "/").split("/")[0] for place in compare(one, other)}
    assert {"weights", "optimizers", "schedulers", "metrics", "csv", "digests", "checkpoints"} <= different


# signals --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scenario, points", [("saved by epoch", STOPS), ("monitored", STOPS[:5:2])])
def test_a_signal_ends_the_run_in_order_and_it_resumes_exactly(
    scenario: str, points: tuple[str, ...], tmp_path: Path
) -> None:
    codes, printed = run(scenario, tmp_path, *points)
    whole = result(tmp_path, "none")
    for point in points:
        assert codes[point] == [0, 0]
        stopped, ended = result(tmp_path, point, 0), result(tmp_path, point, 1)
        assert stopped["ended"] == ("KeyboardInterrupt()" if "INT" in point else "SystemExit(143)")
        assert compare(ended, whole) == [], point
        # The window was finished and saved: nothing is done twice.
        steps = [run["events"].get("training_step", 0) for run in (stopped, ended, whole)]
        assert steps[0] + steps[1] == steps[2], point
        assert f"the last checkpoint is {tmp_path}" in printed
        assert stopped["named"]


def test_the_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    point = "INT@training_step:5+INT@training_step:6"
    codes, _ = run("saved by epoch", tmp_path, point)
    stopped, ended = result(tmp_path, point, 0), result(tmp_path, point, 1)
    assert codes[point] == [0, 0]
    assert stopped["ended"] == "KeyboardInterrupt()"
    # In the middle of a window, which is not finished.
    assert stopped["events"]["training_step"] == 6
    assert stopped["progress"]["global_step"] == 1
    assert compare(ended, result(tmp_path, "none")) == []


# in this process ------------------------------------------------------------------------------------------------------
class Classifier(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
        self.began_at: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_start(self) -> None:
        self.began_at.append(self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), 0.02)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"},
        }


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(labeled(38), 4, shuffle=True), DataLoader(labeled(9), 4)


def trainer_in(folder: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    settings = {"max_epochs": 3, "accumulate_grad_batches": 4, "enable_checkpointing": True, "default_root_dir": folder}
    saving = list(callbacks) or [ModelCheckpoint(save_top_k=-1)]
    return Trainer(callbacks=saving, **{**QUIET, **settings, **arguments})


def outcome(trainer: Trainer) -> dict[str, Any]:
    return {
        "weights": trainer.module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "metrics": dict(trainer.callback_metrics),
        "step": trainer.global_step,
        "random": torch.rand(3),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of three epochs ends with."""
    torch.manual_seed(3)
    trainer = trainer_in(tmp_path_factory.mktemp("whole"))
    trainer.fit(Classifier(), *loaders())
    return outcome(trainer)


def begun(folder: Path, **limits: Any) -> Trainer:
    """The first part of that run."""
    torch.manual_seed(3)
    trainer = trainer_in(folder, **limits)
    trainer.fit(Classifier(), *loaders())
    return trainer


@pytest.mark.parametrize("form", ["path", "str", "last", "auto", "best"])
def test_every_form_of_ckpt_path_resumes(form: str, tmp_path: Path, whole: dict[str, Any]) -> None:
    first = begun(tmp_path, max_epochs=2)
    assert first.last_checkpoint is not None
    path: Any = {"path": first.last_checkpoint, "str": str(first.last_checkpoint)}.get(form, form)
    # "best" is known to the Trainer that saved it; without a monitor it is the newest.
    trainer = first if form == "best" else trainer_in(tmp_path)
    torch.manual_seed(99)
    module = Classifier()
    trainer.fit(module, *loaders(), ckpt_path=path, max_epochs=3)
    assert module.began_at == [6]
    assert differences(outcome(trainer), whole) == []


def test_best_is_the_best_and_not_the_last(tmp_path: Path) -> None:
    class Worse(Classifier):
        def on_train_epoch_end(self) -> None:
            self.log("score", float(self.current_epoch))

    trainer = trainer_in(tmp_path, ModelCheckpoint(monitor="score", save_top_k=-1, save_on_train_epoch_end=True))
    trainer.fit(Worse(), *loaders())
    module = Worse()
    trainer.fit(module, *loaders(), ckpt_path="best", max_epochs=2)
    assert module.began_at == [3]


def test_last_needs_a_checkpoint_and_auto_does_not(tmp_path: Path) -> None:
    module = Classifier()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint.*Use 'auto'"):
        trainer_in(tmp_path).fit(module, *loaders(), ckpt_path="last")
    assert module.began_at == []
    trainer_in(tmp_path, max_epochs=1).fit(module, *loaders(), ckpt_path="auto")
    trainer_in(tmp_path, max_epochs=2).fit(module, *loaders(), ckpt_path="auto")
    assert module.began_at == [0, 3]


def test_best_needs_one_that_was_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no ModelCheckpoint of this Trainer has saved a best checkpoint yet"):
        trainer_in(tmp_path).fit(Classifier(), *loaders(), ckpt_path="best")


@pytest.mark.parametrize(
    "limits",
    [
        [{"max_epochs": 1}, {"max_epochs": 2}, {"max_epochs": 3}],
        [{"max_steps": 1, "max_epochs": -1}, {"max_steps": 5, "max_epochs": -1}, {"max_epochs": 3}],
        [{"max_steps": 3, "max_epochs": -1}, {"max_steps": 8, "max_epochs": -1}, {"max_steps": 9, "max_epochs": -1}],
        [{"max_epochs": 0}, {"max_epochs": 3}],
    ],
    ids=["epochs", "inside epochs", "steps", "from nothing"],
)
@pytest.mark.parametrize("between", [False, True], ids=["at once", "validated in between"])
def test_fits_that_go_on_equal_one_longer_fit(
    limits: list[dict[str, int]], between: bool, tmp_path: Path, whole: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    module = Classifier()
    trainer = trainer_in(tmp_path, max_epochs=None)
    for number, limit in enumerate(limits):
        trainer.fit(module, *loaders(), ckpt_path="current" if number else None, **limit)
        if between and number < len(limits) - 1:
            trainer.validate(module, loaders()[1], verbose=False)
            torch.rand(7)
    assert differences(outcome(trainer), whole) == []


def test_current_needs_a_fit_of_the_same_module(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, max_epochs=1)
    with pytest.raises(ConfigurationError, match="ckpt_path='current'.*fit the module first"):
        trainer.fit(Classifier(), *loaders(), ckpt_path="current")
    trainer.fit(Classifier(), *loaders())
    with pytest.raises(ConfigurationError, match="ckpt_path='current'.*fit the module first"):
        trainer.fit(Classifier(), *loaders(), ckpt_path="current")


def test_current_is_refused_after_a_fit_that_failed(tmp_path: Path) -> None:
    """Its weights are further than what was kept of the fit before."""

    class Failing(Classifier):
        fails = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.fails and batch_idx == 9:
                raise RuntimeError("at last")
            return super().training_step(batch, batch_idx)

    module, trainer = Failing(), trainer_in(tmp_path, max_epochs=1)
    trainer.fit(module, *loaders())
    module.fails = True
    with pytest.raises(RuntimeError, match="at last"):
        trainer.fit(module, *loaders(), ckpt_path="current", max_epochs=2)
    with pytest.raises(ConfigurationError, match="ckpt_path='current'.*fit the module first"):
        trainer.fit(module, *loaders(), ckpt_path="current", max_epochs=2)


def test_current_resumes_after_an_interrupt(tmp_path: Path, whole: dict[str, Any]) -> None:
    class Interrupting(Classifier):
        at = 6

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.trainer.progress.batches == self.at:
                signal.raise_signal(signal.SIGINT)
            return super().training_step(batch, batch_idx)

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    torch.manual_seed(3)
    module, trainer = Interrupting(), trainer_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(module, *loaders())
    assert trainer.global_step == 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    module.at = -1
    trainer.fit(module, *loaders(), ckpt_path="current")
    assert differences(outcome(trainer), whole) == []


@pytest.mark.parametrize("place", ["validation_step", "on_train_epoch_end"])
def test_a_run_that_failed_outside_of_a_window_resumes_exactly(
    place: str, tmp_path: Path, whole: dict[str, Any]
) -> None:
    class Failing(Classifier):
        fails = True

        def _fail(self, where: str) -> None:
            if self.fails and where == place and self.current_epoch == 1:
                raise RuntimeError("once")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if batch_idx == 1:
                self._fail("validation_step")

        def on_train_epoch_end(self) -> None:
            self._fail("on_train_epoch_end")

    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="once"):
        trainer_in(tmp_path, OnExceptionCheckpoint(tmp_path / "saved"), enable_checkpointing=False).fit(
            Failing(), *loaders()
        )
    module, trainer = Failing(), trainer_in(tmp_path)
    module.fails = False
    trainer.fit(module, *loaders(), ckpt_path=tmp_path / "saved" / "on_exception")
    assert module.began_at == [6]
    assert differences(outcome(trainer), whole) == []


class Measuring(Classifier):
    """Validates with a metric whose state a pass builds up, and with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.mean.update(torch.rand(len(batch[0])))
        self.log("mean", self.mean)


class SavesInside(Callback):
    """Saves at the first call of a hook, in the sanity check where there is one, else in the second validation."""

    def __init__(self, hook: str, path: Path) -> None:
        self.path = path
        setattr(self, hook, self.save)

    def save(self, trainer: Trainer, module: TrainModule, *_: Any) -> None:
        wanted = 0 if trainer.sanity_checking else 1
        if trainer.progress.validations == wanted and not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize(
    "hook", ["on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end"]
)
def test_what_is_saved_inside_a_validation_runs_it_again(hook: str, sanity: int, tmp_path: Path) -> None:
    def run(*callbacks: Callback, seed: int = 3, **arguments: Any) -> dict[str, Any]:
        torch.manual_seed(seed)
        trainer = trainer_in(tmp_path, *callbacks, enable_checkpointing=False, num_sanity_val_steps=sanity)
        trainer.fit(Measuring(), *loaders(), **arguments)
        return outcome(trainer)

    whole = run(SavesInside(hook, tmp_path / "inside"))
    assert differences(run(Counting(), seed=77, ckpt_path=tmp_path / "inside"), whole) == []


# parts ----------------------------------------------------------------------------------------------------------------
class Counting(Callback):
    """Has state of its own."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


class Looking(Callback):
    """Notes what a run has when its first batch comes, and ends it there."""

    order = 50

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> int:
        [optimizer] = trainer.optimizers
        counting = next(callback for callback in trainer.callbacks if isinstance(callback, Counting))
        state = optimizer.state
        self.seen = {
            "weights": module.net[0].weight[0, 0].item(),  # type: ignore[index, union-attr]
            "optimizers": next(iter(state.values()))["step"].item() if state else 0,
            "schedulers": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
            "progress": (trainer.current_epoch, trainer.global_step, batch_idx),
            "callbacks": counting.epochs,
            "rng": torch.get_rng_state(),
            "loaders": batch[0][0, 0].item(),
        }
        trainer.should_stop = True
        return -1


PARTS = ("weights", "optimizers", "progress", "rng", "callbacks", "loaders")


@pytest.mark.parametrize(
    "restore",
    [
        "all",
        "weights",
        ("weights", "optimizers"),
        ("weights", "optimizers", "callbacks"),
        ("progress", "loaders", "rng"),
        ("weights", "progress", "rng", "loaders"),
        ("callbacks",),
        ("weights", "progress"),
    ],
    ids=str,
)
def test_parts_are_restored_as_asked(restore: Any, tmp_path: Path) -> None:
    def look(**arguments: Any) -> dict[str, Any]:
        looking = Looking()
        torch.manual_seed(11)
        trainer = trainer_in(tmp_path, Counting(), looking, enable_checkpointing=False, num_sanity_val_steps=0)
        trainer.fit(Classifier(), *loaders(), **arguments)
        return looking.seen

    torch.manual_seed(3)
    saving = trainer_in(tmp_path, Counting(), ModelCheckpoint(every_n_train_steps=5, filename="five"), max_epochs=2)
    saving.fit(Classifier(), *loaders())
    path = tmp_path / "checkpoints" / "five"
    saved, fresh = look(ckpt_path=path), look()
    assert saved["progress"] == (1, 5, 8) and fresh["progress"] == (0, 0, 0)
    assert differences(saved["rng"], fresh["rng"]) and saved["weights"] != fresh["weights"]
    parts = PARTS if restore == "all" else (restore,) if isinstance(restore, str) else restore
    seen = look(ckpt_path=path, restore=restore if isinstance(restore, str) else set(restore))
    for part in ("weights", "optimizers", "callbacks"):
        assert seen[part] == (saved if part in parts else fresh)[part], part
    assert seen["schedulers"] == (saved if "optimizers" in parts else fresh)["schedulers"]
    if "progress" not in parts:
        assert seen["progress"] == (0, 0, 0)
    else:
        # Without its loaders' place, the epoch begins anew.
        assert seen["progress"] == ((1, 5, 8) if "loaders" in parts else (1, 5, 0))
    if {"progress", "loaders", "rng"} <= set(parts):
        assert differences(seen["rng"], saved["rng"]) == []
        assert seen["loaders"] == saved["loaders"]
    if "rng" not in parts and "loaders" not in parts:
        assert seen["loaders"] == fresh["loaders"]


@pytest.mark.parametrize(("step", "left"), [(4, 10), (5, 5), (6, 5)])
def test_an_epoch_that_was_read_needs_no_place_of_its_loader(step: int, left: int, tmp_path: Path) -> None:
    saving = trainer_in(
        tmp_path,
        ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, filename="{step}", auto_insert_metric_name=False),
        max_epochs=2,
        accumulate_grad_batches=2,
    )
    saving.fit(Classifier(), *loaders())
    trainer = trainer_in(tmp_path, Counting(), enable_checkpointing=False, max_epochs=2, accumulate_grad_batches=2)
    parts = {"weights", "optimizers", "progress", "rng"}
    trainer.fit(Classifier(), *loaders(), ckpt_path=tmp_path / "checkpoints" / str(step), restore=parts)
    # Each epoch has five steps: one that is not done begins anew, one that is done ends.
    assert (trainer.current_epoch, trainer.global_step) == (2, step + left)


def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    class Other(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), 0.1)
            return {"optimizer": optimizer, "lr_scheduler": ExponentialLR(optimizer, 0.9)}

    begun(tmp_path, max_epochs=1)
    with pytest.raises(ConfigurationError, match="of another class than SGD: it has no dampening, momentum"):
        trainer_in(tmp_path).fit(Other(), *loaders(), ckpt_path="last")
    parts = {"weights", "progress", "rng", "loaders"}
    trainer_in(tmp_path, max_epochs=2).fit(Other(), *loaders(), ckpt_path="last", restore=parts)


def test_weights_alone_are_no_resume(tmp_path: Path) -> None:
    first = begun(tmp_path, max_epochs=1)
    module = Classifier()
    trainer = trainer_in(tmp_path, max_epochs=0)
    trainer.fit(module, *loaders(), ckpt_path="last", restore="weights")
    assert differences(module.state_dict(), first.module.state_dict()) == []
    assert trainer.global_step == 0 and not trainer.optimizers[0].state


# where it runs --------------------------------------------------------------------------------------------------------
def test_fit_works_in_a_thread_that_is_not_the_main_one(tmp_path: Path, whole: dict[str, Any]) -> None:
    results: list[dict[str, Any]] = []

    def work() -> None:
        begun(tmp_path, max_epochs=2)
        trainer = trainer_in(tmp_path)
        trainer.fit(Classifier(), *loaders(), ckpt_path="auto")
        results.append(outcome(trainer))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results and differences(results[0], whole) == []


class Million(Dataset[Tensor]):
    """More samples than could be loaded in a test; counts those that are."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 2_000_010

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        return torch.tensor([float(index)])


class OneNumber(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.scale * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-9)


class Leap(Callback):
    """Saves as if a million batches had been done: the steps themselves are not what is looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.progress.batch = 1_000_000
        trainer.save_checkpoint(self.path)
        trainer.should_stop = True


def test_a_resume_at_batch_one_million_loads_nothing_before_it(tmp_path: Path) -> None:
    torch.manual_seed(5)
    data = Million()
    quiet = {"accumulate_grad_batches": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer_in(tmp_path, Leap(tmp_path / "far"), **quiet).fit(OneNumber(), DataLoader(data, 2, shuffle=True))
    first = data.loaded

    torch.manual_seed(5)
    order = torch.empty((), dtype=torch.int64).random_()  # the base seed of the iterator
    order = torch.randperm(
        len(data), generator=torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    )
    assert first == order[:2].tolist()
    data.loaded = []
    trainer = trainer_in(tmp_path, Counting(), max_steps=4, max_epochs=-1, **quiet)
    trainer.fit(OneNumber(), DataLoader(data, 2, shuffle=True), ckpt_path=tmp_path / "far")
    assert data.loaded == order[2_000_000:2_000_006].tolist()
    assert trainer.global_step == 4 and trainer.progress.batch == 1_000_003


def test_the_checkpoint_of_a_resumed_run_is_that_of_the_whole_one(tmp_path: Path) -> None:
    """Not only what the run ends with: also what the next resume would begin with."""
    torch.manual_seed(3)
    module = Classifier()
    trainer_in(tmp_path / "whole", logger=CSVLogger(tmp_path / "whole")).fit(module, *loaders())
    begun(tmp_path / "parts", max_epochs=2, logger=CSVLogger(tmp_path / "parts"))
    resumed = trainer_in(tmp_path / "parts", logger=CSVLogger(tmp_path / "parts"))
    resumed.fit(Classifier(), *loaders(), ckpt_path="last")
    one, other = (CheckpointReader(tmp_path / name / "checkpoints" / "epoch=2-step=9") for name in ("whole", "parts"))
    assert differences(one.model(), other.model()) == []
    assert differences(one.optimizers(), other.optimizers()) == []
    for name in ("rank-0", "schedulers", "user"):
        assert differences(one.state(name), other.state(name)) == []
