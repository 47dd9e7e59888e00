"""A run that is killed, signaled or interrupted, and then resumed, ends bit for bit like an uninterrupted one."""

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
from models import QUIET, SAVED
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
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.reader import CheckpointReader
from leyden.core.errors import ConfigurationError

PROGRAM = Path(__file__).with_name("killed_runs.py")

# Most scenarios have ten batches an epoch in accumulation windows of 4, 4 and 2, validate after each epoch and save
# after each step.
KILLS = (
    "KILL@training_step:1",  # before anything was saved
    "KILL@after_train_batch_end:4",  # right after the first save
    "KILL@training_step:7",  # in the middle of a window
    "KILL@getitem:50",  # while a batch is loaded
    "KILL@before_train_batch_end:10",  # the last step of an epoch, before its save
    "KILL@after_train_batch_end:10",  # after that save, before the validation
    "KILL@validation_step:6",
    "KILL@after_validation_end:2",
    "KILL@before_train_epoch_end:1",
    "KILL@train_epoch_end:2",
    "KILL@after_train_epoch_end:1",
    "KILL@before_train_epoch_start:2",  # between two epochs
    "KILL@after_after_backward:13",
    "KILL@before_optimizer_step:5",
    "KILL@save:6",  # during a save
    "KILL@after_train_batch_end:18",
    "KILL@after_train_end:1",
    "KILL@training_step:13>KILL@after_train_batch_end:3>KILL@validation_step:2",  # three kills in a row
)
SCENARIOS = (
    *("shuffle", "infrequent saves", "saved every epoch", "workers", "persistent workers", "seeded samples in workers"),
    *("sampler", "generator", "stateful loader", "stream", "limited stream", "limited", "16-mixed", "monitored"),
    *("plateau by epoch", "manual", "steps", "stream, steps", "combined", "reloaded", "growing windows"),
    "compiled step",
)
ASYNCHRONOUS_KILLS = (
    "KILL@before_write:2",  # in the thread that writes
    "KILL@after_write:3",
    "KILL@after_commit:4",
    "KILL@training_step:9",  # in a step, while the thread writes
    "KILL@before_optimizer_step:5",
    "KILL@before_commit:2>KILL@before_write:2>KILL@after_commit:1",
)
IN_THE_THREAD = {"before_write", "after_write", "before_commit", "after_commit"}
SIGNALS = (
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
    """Runs the program; returns the exit codes of each point's runs, and everything that was printed."""
    printed = folder / "printed.txt"
    process = start_program([PROGRAM, scenario, folder, "none", *points], folder, printed, printed)
    try:
        process.join(280)
    finally:
        # A loader worker whose parent is killed before the worker has looked up the parent's id waits forever.
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
    """Returns the places where two nested results differ in any bit, dtype or key."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(a.keys() | b.keys())
        return [found for key in keys for found in differences(a.get(key, "—"), b.get(key, "—"), f"{place}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [found for i, (x, y) in enumerate(zip(a, b)) for found in differences(x, y, f"{place}[{i}]")]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        return [] if same else [f"{place}: {a} and {b}"]
    return [] if a == b or (a != a and b != b) else [f"{place}: {a!r} and {b!r}"]


def compare(ours: dict[str, Any], uninterrupted: dict[str, Any]) -> list[str]:
    """Returns the differences between two results, except in how the runs got there."""
    ignored = {"events", "ended", "last_checkpoint_exists"}
    return differences(
        *({key: value for key, value in run.items() if key not in ignored} for run in (ours, uninterrupted))
    )


def check_kills(scenario: str, folder: Path, points: tuple[str, ...]) -> None:
    codes, _ = run(scenario, folder, *points)
    uninterrupted = result(folder, "none")
    assert (
        len(uninterrupted["order"]) == uninterrupted["progress"]["batches"] == uninterrupted["events"]["training_step"]
    )
    killed = 0
    for point in points:
        event, _, count = point.split(">")[0].removeprefix("KILL@").partition(":")
        # Workers load samples elsewhere, and some scenarios are shorter than others.
        if uninterrupted["events"].get(event, 0) < int(count):
            continue
        assert codes[point][0] == -9
        killed += 1
        assert compare(result(folder, point, len(codes[point]) - 1), uninterrupted) == [], point
    assert killed >= 2


def every_fifth_kill(scenario: str) -> tuple[str, ...]:
    """Returns every fifth point, starting at a different one for each scenario."""
    return KILLS[SCENARIOS.index(scenario) % 5 :: 5]


def test_a_killed_run_resumes_exactly(tmp_path: Path) -> None:
    check_kills("shuffle", tmp_path, KILLS)
    # The runs resumed, they did not start over.
    uninterrupted = result(tmp_path, "none")
    for point in KILLS[1:-1]:
        assert 0 < result(tmp_path, point, 1)["events"].get("getitem", 1) < uninterrupted["events"]["getitem"]
    assert result(tmp_path, "KILL@after_train_batch_end:18", 1)["events"]["training_step"] == 30 - 18
    # A kill inside a window repeats that window: batches 12 and 13.
    assert result(tmp_path, "KILL@after_after_backward:13", 1)["events"]["training_step"] == 30 - 10


@pytest.mark.parametrize("scenario", SCENARIOS[1:])
def test_killed_runs_of_other_scenarios_resume_exactly(scenario: str, tmp_path: Path) -> None:
    check_kills(scenario, tmp_path, every_fifth_kill(scenario))


def test_a_killed_run_with_asynchronous_checkpoints_resumes_exactly(tmp_path: Path) -> None:
    check_kills("asynchronous", tmp_path, ASYNCHRONOUS_KILLS)
    # None was passed over: the thread reports where it is.
    assert result(tmp_path, "none")["events"].keys() >= IN_THE_THREAD


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_at_random_points_resumes_exactly(seed: int, tmp_path: Path) -> None:
    """The points lie in the run, and in the thread that writes its checkpoints."""
    chosen = random.Random(seed)
    places = ("training_step", "getitem", "save", "after_train_batch_end", "before_optimizer_step", "validation_step")
    points = {f"KILL@{chosen.choice((*places, *sorted(IN_THE_THREAD)))}:{chosen.randint(1, 30)}" for _ in range(12)}
    check_kills("asynchronous, every batch", tmp_path, tuple(sorted(points)))


@pytest.mark.full
@pytest.mark.parametrize("scenario", SCENARIOS[1:])
def test_other_scenarios_resume_exactly_after_every_kill(scenario: str, tmp_path: Path) -> None:
    check_kills(scenario, tmp_path, KILLS)


def test_the_comparison_detects_different_runs(tmp_path: Path) -> None:
    """The tests above can fail: runs of two scenarios differ in every kind of result."""
    for scenario in ("shuffle", "infrequent saves"):
        (tmp_path / scenario).mkdir()
        run(scenario, tmp_path / scenario)
    one, other = (result(tmp_path / scenario, "none") for scenario in ("shuffle", "infrequent saves"))
    different = {place.strip("/").replace("[", "/").replace(":", "/").split("/")[0] for place in compare(one, other)}
    assert {"weights", "optimizers", "schedulers", "metrics", "csv", "digests", "checkpoints"} <= different


# signals --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scenario, points", [("saved every epoch", SIGNALS), ("monitored", SIGNALS[:5:2])])
def test_a_signaled_run_saves_a_checkpoint_and_resumes_exactly(
    scenario: str, points: tuple[str, ...], tmp_path: Path
) -> None:
    codes, printed = run(scenario, tmp_path, *points)
    uninterrupted = result(tmp_path, "none")
    for point in points:
        assert codes[point] == [0, 0]
        stopped, ended = result(tmp_path, point, 0), result(tmp_path, point, 1)
        assert stopped["ended"] == ("KeyboardInterrupt()" if "INT" in point else "SystemExit(143)")
        assert compare(ended, uninterrupted) == [], point
        # The window was finished and saved, so no step is repeated.
        steps = [run["events"].get("training_step", 0) for run in (stopped, ended, uninterrupted)]
        assert steps[0] + steps[1] == steps[2], point
        assert f"the last checkpoint is {tmp_path}" in printed
        assert stopped["last_checkpoint_exists"]


def test_a_second_interrupt_ends_the_run_immediately(tmp_path: Path) -> None:
    point = "INT@training_step:5+INT@training_step:6"
    codes, _ = run("saved every epoch", tmp_path, point)
    stopped, ended = result(tmp_path, point, 0), result(tmp_path, point, 1)
    assert codes[point] == [0, 0]
    assert stopped["ended"] == "KeyboardInterrupt()"
    # The window it interrupts is not finished.
    assert stopped["events"]["training_step"] == 6
    assert stopped["progress"]["global_step"] == 1
    assert compare(ended, result(tmp_path, "none")) == []


# in this process ------------------------------------------------------------------------------------------------------
class Classifier(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
        self.start_steps: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_start(self) -> None:
        self.start_steps.append(self.global_step)

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
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of an uninterrupted run of three epochs."""
    torch.manual_seed(3)
    trainer = trainer_in(tmp_path_factory.mktemp("uninterrupted"))
    trainer.fit(Classifier(), *loaders())
    return outcome(trainer)


def first_part(folder: Path, **limits: Any) -> Trainer:
    """Trains the first part of that run."""
    torch.manual_seed(3)
    trainer = trainer_in(folder, **limits)
    trainer.fit(Classifier(), *loaders())
    return trainer


@pytest.mark.parametrize("form", ["path", "str", "last", "auto", "best"])
def test_every_form_of_ckpt_path_resumes(form: str, tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    first = first_part(tmp_path, max_epochs=2)
    assert first.last_checkpoint is not None
    path: Any = {"path": first.last_checkpoint, "str": str(first.last_checkpoint)}.get(form, form)
    # "best" needs the Trainer that saved it; without a monitor it is the newest checkpoint.
    trainer = first if form == "best" else trainer_in(tmp_path)
    torch.manual_seed(99)
    module = Classifier()
    trainer.fit(module, *loaders(), ckpt_path=path, max_epochs=3)
    assert module.start_steps == [6]
    assert differences(outcome(trainer), uninterrupted) == []


def test_ckpt_path_best_resumes_the_best_checkpoint_not_the_last(tmp_path: Path) -> None:
    class Worse(Classifier):
        def on_train_epoch_end(self) -> None:
            self.log("score", float(self.current_epoch))

    trainer = trainer_in(tmp_path, ModelCheckpoint(monitor="score", save_top_k=-1, save_on_train_epoch_end=True))
    trainer.fit(Worse(), *loaders())
    module = Worse()
    trainer.fit(module, *loaders(), ckpt_path="best", max_epochs=2)
    assert module.start_steps == [3]


def test_ckpt_path_last_needs_a_checkpoint_and_auto_does_not(tmp_path: Path) -> None:
    module = Classifier()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint.*Use 'auto'"):
        trainer_in(tmp_path).fit(module, *loaders(), ckpt_path="last")
    assert module.start_steps == []
    trainer_in(tmp_path, max_epochs=1).fit(module, *loaders(), ckpt_path="auto")
    trainer_in(tmp_path, max_epochs=2).fit(module, *loaders(), ckpt_path="auto")
    assert module.start_steps == [0, 3]


def test_ckpt_path_best_needs_a_saved_checkpoint(tmp_path: Path) -> None:
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
    ids=["epochs", "within epochs", "steps", "after zero epochs"],
)
@pytest.mark.parametrize("between", [False, True], ids=["consecutive", "validation in between"])
def test_fits_with_ckpt_path_current_equal_one_longer_fit(
    limits: list[dict[str, int]], between: bool, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    module = Classifier()
    trainer = trainer_in(tmp_path, max_epochs=None)
    for number, limit in enumerate(limits):
        trainer.fit(module, *loaders(), ckpt_path="current" if number else None, **limit)
        if between and number < len(limits) - 1:
            trainer.validate(module, loaders()[1], verbose=False)
            torch.rand(7)
    assert differences(outcome(trainer), uninterrupted) == []


def test_ckpt_path_current_needs_an_earlier_fit_of_the_same_module(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, max_epochs=1)
    with pytest.raises(ConfigurationError, match="ckpt_path='current'.*fit the module first"):
        trainer.fit(Classifier(), *loaders(), ckpt_path="current")
    trainer.fit(Classifier(), *loaders())
    with pytest.raises(ConfigurationError, match="ckpt_path='current'.*fit the module first"):
        trainer.fit(Classifier(), *loaders(), ckpt_path="current")


def test_ckpt_path_current_raises_after_a_failed_fit(tmp_path: Path) -> None:
    """The weights are ahead of the state that was kept from the fit before."""

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


def test_ckpt_path_current_resumes_after_an_interrupt(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
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
    assert differences(outcome(trainer), uninterrupted) == []


@pytest.mark.parametrize("place", ["validation_step", "on_train_epoch_end"])
def test_a_run_that_fails_between_windows_resumes_exactly(
    place: str, tmp_path: Path, uninterrupted: dict[str, Any]
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
    assert module.start_steps == [6]
    assert differences(outcome(trainer), uninterrupted) == []


class RandomValidation(Classifier):
    """A classifier that validates with random numbers and a metric that accumulates over the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.mean.update(torch.rand(len(batch[0])))
        self.log("mean", self.mean)


class SaveInValidation(Callback):
    """Saves at the first call of a hook: in the sanity check if there is one, else in the second validation."""

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
def test_resuming_from_within_a_validation_repeats_that_validation(hook: str, sanity: int, tmp_path: Path) -> None:
    def run(*callbacks: Callback, seed: int = 3, **arguments: Any) -> dict[str, Any]:
        torch.manual_seed(seed)
        trainer = trainer_in(tmp_path, *callbacks, enable_checkpointing=False, num_sanity_val_steps=sanity)
        trainer.fit(RandomValidation(), *loaders(), **arguments)
        return outcome(trainer)

    uninterrupted = run(SaveInValidation(hook, tmp_path / "inside"))
    assert differences(run(EpochCounter(), seed=77, ckpt_path=tmp_path / "inside"), uninterrupted) == []


# parts ----------------------------------------------------------------------------------------------------------------
class EpochCounter(Callback):
    """Counts epochs, and saves the count."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


class StateProbe(Callback):
    """Records a run's state at its first batch, and stops the run."""

    order = 50

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> int:
        [optimizer] = trainer.optimizers
        counter = next(callback for callback in trainer.callbacks if isinstance(callback, EpochCounter))
        state = optimizer.state
        self.seen = {
            "weights": module.net[0].weight[0, 0].item(),  # type: ignore[index, union-attr]
            "optimizers": next(iter(state.values()))["step"].item() if state else 0,
            "schedulers": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
            "progress": (trainer.current_epoch, trainer.global_step, batch_idx),
            "callbacks": counter.epochs,
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
def test_only_the_requested_parts_are_restored(restore: Any, tmp_path: Path) -> None:
    def probed(**arguments: Any) -> dict[str, Any]:
        probe = StateProbe()
        torch.manual_seed(11)
        trainer = trainer_in(tmp_path, EpochCounter(), probe, enable_checkpointing=False, num_sanity_val_steps=0)
        trainer.fit(Classifier(), *loaders(), **arguments)
        return probe.seen

    torch.manual_seed(3)
    saving = trainer_in(tmp_path, EpochCounter(), ModelCheckpoint(every_n_train_steps=5, filename="five"), max_epochs=2)
    saving.fit(Classifier(), *loaders())
    path = tmp_path / SAVED / "five"
    saved, fresh = probed(ckpt_path=path), probed()
    assert saved["progress"] == (1, 5, 8) and fresh["progress"] == (0, 0, 0)
    assert differences(saved["rng"], fresh["rng"]) and saved["weights"] != fresh["weights"]
    parts = PARTS if restore == "all" else (restore,) if isinstance(restore, str) else restore
    seen = probed(ckpt_path=path, restore=restore if isinstance(restore, str) else set(restore))
    for part in ("weights", "optimizers", "callbacks"):
        assert seen[part] == (saved if part in parts else fresh)[part], part
    assert seen["schedulers"] == (saved if "optimizers" in parts else fresh)["schedulers"]
    if "progress" not in parts:
        assert seen["progress"] == (0, 0, 0)
    else:
        # Without the loaders' position, the epoch starts over.
        assert seen["progress"] == ((1, 5, 8) if "loaders" in parts else (1, 5, 0))
    if {"progress", "loaders", "rng"} <= set(parts):
        assert differences(seen["rng"], saved["rng"]) == []
        assert seen["loaders"] == saved["loaders"]
    if "rng" not in parts and "loaders" not in parts:
        assert seen["loaders"] == fresh["loaders"]


@pytest.mark.parametrize(("step", "left"), [(4, 10), (5, 5), (6, 5)])
def test_without_loader_positions_only_an_unfinished_epoch_starts_over(step: int, left: int, tmp_path: Path) -> None:
    saving = trainer_in(
        tmp_path,
        ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, filename="{step}", auto_insert_metric_name=False),
        max_epochs=2,
        accumulate_grad_batches=2,
    )
    saving.fit(Classifier(), *loaders())
    trainer = trainer_in(tmp_path, EpochCounter(), enable_checkpointing=False, max_epochs=2, accumulate_grad_batches=2)
    parts = {"weights", "optimizers", "progress", "rng"}
    trainer.fit(Classifier(), *loaders(), ckpt_path=tmp_path / SAVED / str(step), restore=parts)
    # Each epoch has five steps: an unfinished one starts over, a finished one is not repeated.
    assert (trainer.current_epoch, trainer.global_step) == (2, step + left)


def test_the_state_of_another_optimizer_class_is_refused(tmp_path: Path) -> None:
    class Other(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), 0.1)
            return {"optimizer": optimizer, "lr_scheduler": ExponentialLR(optimizer, 0.9)}

    first_part(tmp_path, max_epochs=1)
    with pytest.raises(ConfigurationError, match="of another class than SGD: it has no dampening, momentum"):
        trainer_in(tmp_path).fit(Other(), *loaders(), ckpt_path="last")
    parts = {"weights", "progress", "rng", "loaders"}
    trainer_in(tmp_path, max_epochs=2).fit(Other(), *loaders(), ckpt_path="last", restore=parts)


def test_restoring_only_weights_starts_a_new_run(tmp_path: Path) -> None:
    first = first_part(tmp_path, max_epochs=1)
    module = Classifier()
    trainer = trainer_in(tmp_path, max_epochs=0)
    trainer.fit(module, *loaders(), ckpt_path="last", restore="weights")
    assert differences(module.state_dict(), first.module.state_dict()) == []
    assert trainer.global_step == 0 and not trainer.optimizers[0].state


# threads, long epochs and checkpoints ---------------------------------------------------------------------------------
def test_fit_works_outside_the_main_thread(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    results: list[dict[str, Any]] = []

    def work() -> None:
        first_part(tmp_path, max_epochs=2)
        trainer = trainer_in(tmp_path)
        trainer.fit(Classifier(), *loaders(), ckpt_path="auto")
        results.append(outcome(trainer))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results and differences(results[0], uninterrupted) == []


class HugeDataset(Dataset[Tensor]):
    """More samples than a test could load; records the indices that are loaded."""

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


class SaveAtBatchMillion(Callback):
    """Saves a checkpoint that counts a million batches as done, and stops the run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.progress.batch = 1_000_000
        trainer.save_checkpoint(self.path)
        trainer.should_stop = True


def test_resuming_at_batch_one_million_loads_no_earlier_samples(tmp_path: Path) -> None:
    torch.manual_seed(5)
    data = HugeDataset()
    quiet = {"accumulate_grad_batches": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer_in(tmp_path, SaveAtBatchMillion(tmp_path / "far"), **quiet).fit(
        OneNumber(), DataLoader(data, 2, shuffle=True)
    )
    first = data.loaded

    torch.manual_seed(5)
    order = torch.empty((), dtype=torch.int64).random_()  # the base seed of the iterator
    order = torch.randperm(
        len(data), generator=torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    )
    assert first == order[:2].tolist()
    data.loaded = []
    trainer = trainer_in(tmp_path, EpochCounter(), max_steps=4, max_epochs=-1, **quiet)
    trainer.fit(OneNumber(), DataLoader(data, 2, shuffle=True), ckpt_path=tmp_path / "far")
    assert data.loaded == order[2_000_000:2_000_006].tolist()
    assert trainer.global_step == 4 and trainer.progress.batch == 1_000_003


def test_a_resumed_run_saves_the_same_checkpoint_as_an_uninterrupted_one(tmp_path: Path) -> None:
    """So the next resume, too, starts from the same state."""
    torch.manual_seed(3)
    module = Classifier()
    trainer_in(tmp_path / "uninterrupted", logger=CSVLogger(tmp_path / "uninterrupted")).fit(module, *loaders())
    first_part(tmp_path / "parts", max_epochs=2, logger=CSVLogger(tmp_path / "parts"))
    resumed = trainer_in(tmp_path / "parts", logger=CSVLogger(tmp_path / "parts"))
    resumed.fit(Classifier(), *loaders(), ckpt_path="last")
    one, other = (
        CheckpointReader(tmp_path / name / "logs" / SAVED / "epoch=2-step=9") for name in ("uninterrupted", "parts")
    )
    assert differences(one.model(), other.model()) == []
    assert differences(one.optimizers(), other.optimizers()) == []
    for name in ("rank-0", "schedulers", "user"):
        assert differences(one.state(name), other.state(name)) == []
