"""Ranks decide alike: a stop request or a signal on one ends all of them at the same step."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from logged import scalars_in
from models import QUIET
from ranks.world import run_world
from same import same_weights
from torch import Tensor, nn

from leyden import Callback, Trainer, TrainModule
from leyden.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint, TensorBoardLogger, Timer

RANK = int(os.environ.get("RANK", "0"))
SETTINGS: dict[str, Any] = {
    **QUIET,
    "strategy": "ddp",
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "max_epochs": 2,
}


def batches(count: int) -> list[Tensor]:
    return [torch.full((2, 3), float(number)) for number in range(count)]


class Model(TrainModule):
    """A sum of inputs; its validation logs the given scores, one per epoch."""

    def __init__(self, scores: tuple[float, ...] = (1.0,)) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        nn.init.ones_(self.net.weight)
        self.scores = scores
        self.validated: list[int] = []
        self.trained = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trained += 1
        loss = self.net(batch).mean() / 100
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        score = self.scores[min(self.current_epoch, len(self.scores) - 1)]
        # The ranks' own values differ, and their mean is the score.
        self.log("score", score + (0.5 if self.global_rank else -0.5))

    def on_validation_end(self) -> None:
        self.validated.append(self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ActAt(Callback):
    """Runs an action on one rank at the n-th call of a hook."""

    def __init__(self, hook: str, rank: int, number: int, action: Any) -> None:
        self.left, self.action = number, action
        if rank in (RANK, -1):
            setattr(self, hook, self._count_call)

    def _count_call(self, trainer: Trainer, module: TrainModule, *_: Any) -> Any:
        self.left -= 1
        return self.action(trainer) if self.left == 0 else None


def stop(trainer: Trainer) -> None:
    trainer.should_stop = True


def terminate(trainer: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt(trainer: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def skip(trainer: Trainer) -> int:
    return -1


def fitted(at: tuple[Any, ...], train: int = 6, val: int = 0, **arguments: Any) -> dict[str, Any]:
    """Fits with a callback `ActAt`, and returns this rank's progress and how the fit ended."""
    trainer, module = Trainer(**SETTINGS | arguments, callbacks=[ActAt(*at)]), Model()
    ended = ""
    try:
        trainer.fit(module, batches(train), batches(val) if val else None)
    except (SystemExit, KeyboardInterrupt) as error:
        ended = repr(error)
    return {
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batch": trainer.progress.batch,
        "validated": module.validated,
        "stops": trainer.should_stop,
        "ended": ended,
    }


def agreed_results(function: Any, *cases: tuple[Any, ...]) -> Any:
    """Returns a function's result for each case, and asserts that both ranks agree on it."""
    first, second = run_world(2, run_cases, function.__name__, cases)
    assert first == second
    return first


def run_cases(name: str, cases: tuple[tuple[Any, ...], ...]) -> list[Any]:
    """Runs all cases in one process group, since starting ranks takes longer than most cases."""
    dist.init_process_group("gloo")
    found = [globals()[name](*case) for case in cases]
    dist.destroy_process_group()
    return found


def test_a_stop_request_on_one_rank_stops_all_one_window_later() -> None:
    for found in agreed_results(fitted, *[(("on_train_batch_end", rank, 3, stop),) for rank in (0, 1)]):
        assert (found["step"], found["stops"]) == (4, True)


def test_a_stop_request_in_the_last_window_or_at_epoch_end_takes_effect_at_once() -> None:
    for found in agreed_results(fitted, (("on_train_batch_end", 1, 6, stop),), (("on_train_epoch_end", 1, 1, stop),)):
        assert (found["step"], found["epoch"]) == (6, 1)


def test_a_stop_request_in_a_validation_stops_all_before_the_next_step() -> None:
    [found] = agreed_results(fitted_with_validation, (("on_validation_end", 1, 1, stop),))
    assert (found["step"], found["validated"]) == (3, [3])


def test_a_run_stopped_mid_epoch_validates_on_all_ranks() -> None:
    for found in agreed_results(fitted_with_a_last_validation, ("on_train_batch_end", 1, 3, stop)):
        assert (found["step"], found["validated"]) == (4, [4])


def fitted_with_a_last_validation(*at: Any) -> dict[str, Any]:
    return fitted(at, val=4)


def fitted_with_validation(at: tuple[Any, ...]) -> dict[str, Any]:
    return fitted(at, val=4, val_check_interval=3)


def test_a_signal_ends_all_ranks_at_the_same_step() -> None:
    """Whether sent to one rank or to all of them."""
    ends = {terminate: "SystemExit(143)", interrupt: "KeyboardInterrupt()"}
    cases = [(rank, action) for rank in (1, -1) for action in ends]
    found = agreed_results(fitted, *[(("on_train_batch_end", rank, 3, action),) for rank, action in cases])
    assert [(result["step"], result["ended"]) for result in found] == [(4, ends[action]) for _, action in cases]


def saved_when_stopped(rank: int, folder: str) -> dict[str, Any]:
    """Signals one rank; both save a checkpoint at the step that they agree on, from which the run resumes."""
    checkpoint = ModelCheckpoint(f"{folder}/{rank}", every_n_train_steps=100, save_on_exception=True)
    settings = SETTINGS | {"enable_checkpointing": True}
    trainer = Trainer(**settings, callbacks=[ActAt("on_train_batch_end", rank, 2, terminate), checkpoint])
    ended = ""
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(Model())
    stopped, resumed, straight = models
    try:
        trainer.fit(stopped, batches(6))
    except SystemExit as error:
        ended = repr(error)
    [saved] = os.listdir(f"{folder}/{rank}")
    again = Trainer(**SETTINGS)
    again.fit(resumed, batches(6), ckpt_path=f"{folder}/{rank}/{saved}")
    Trainer(**SETTINGS).fit(straight, batches(6))
    return {
        "ended": ended,
        "saved": saved,
        "stopped": (trainer.global_step, trainer.progress.batch),
        "resumed": again.global_step,
        "same": same_weights(resumed, straight),
    }


def test_a_signal_to_one_rank_saves_on_all_and_the_run_resumes_exactly(tmp_path: Path) -> None:
    for found in agreed_results(saved_when_stopped, (0, str(tmp_path)), (1, str(tmp_path))):
        # Signaled at step 2; all ranks stop at step 3.
        assert found == {
            "ended": "SystemExit(143)",
            "saved": "epoch=0-step=3",
            "stopped": (3, 3),
            "resumed": 12,
            "same": True,
        }


def test_a_signal_during_validation_ends_it_on_all_ranks() -> None:
    [found] = agreed_results(fitted_with_validation, (("on_validation_batch_start", 1, 2, terminate),))
    assert (found["step"], found["validated"], found["ended"]) == (3, [], "SystemExit(143)")


def validated_unevenly(signaled: int) -> tuple[str, int]:
    """Validates on 9 batches of rank 0 and 2 of rank 1; returns how the validation ended and the batches seen."""
    seen = []
    count = Count(seen)
    trainer = Trainer(**SETTINGS, callbacks=[count, ActAt("on_validation_batch_start", signaled, 2, terminate)])
    try:
        trainer.validate(Model(), batches(2 if RANK else 9), verbose=False)
    except SystemExit as error:
        return repr(error), len(seen)
    return "", len(seen)


class Count(Callback):
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.seen.append(batch_idx)


def test_a_signal_reaches_ranks_with_different_numbers_of_batches() -> None:
    """A signal to rank 7, which does not exist, shows that all batches are seen without a signal."""
    first, second = run_world(2, run_cases, "validated_unevenly", ((7,), (0,), (1,)))
    assert (first[0], second[0]) == (("", 9), ("", 2))
    for (end, of_first), (other, of_second) in zip(first[1:], second[1:], strict=True):
        assert end == other == "SystemExit(143)"
        assert of_first < 9 and of_second <= 2


def test_returning_minus_one_on_one_rank_ends_the_epoch_on_all() -> None:
    """Each epoch has 6 batches; the first ends with the window after the one in which -1 was returned."""
    for found in agreed_results(fitted, *[(("on_train_batch_start", rank, 2, skip),) for rank in (0, 1)]):
        assert (found["step"], found["epoch"]) == (3 + 6, 2)


def fitted_past_max_time(rank: int) -> dict[str, Any]:
    """Fits with a clock that exceeds the time limit on one rank from the third step on."""

    def expire(trainer: Trainer) -> None:
        assert trainer._fit is not None
        trainer._fit.clock.elapsed = lambda: 1e9  # type: ignore[method-assign]

    return fitted(("on_train_batch_end", rank, 3, expire), max_time={"hours": 9})


def test_rank_0s_clock_ends_a_run() -> None:
    assert [found["step"] for found in agreed_results(fitted_past_max_time, (0,), (1,))] == [4, 12]


def fitted_with_timer(rank: int) -> int:
    timer = Timer({"hours": 9}, verbose=False)

    def expire(trainer: Trainer) -> None:
        timer._deadline = 0.0

    trainer = Trainer(**SETTINGS, callbacks=[ActAt("on_train_batch_start", rank, 3, expire), timer])
    trainer.fit(Model(), batches(6))
    return trainer.global_step


def test_rank_0s_timer_ends_a_run() -> None:
    assert agreed_results(fitted_with_timer, (0,), (1,)) == [4, 12]


def validated_by_time(rank: int) -> list[int]:
    """Returns the steps validated by a fit that validates hourly, if one rank's clock jumps an hour at step 2."""
    module = Model()

    def jump(trainer: Trainer) -> None:
        assert trainer._fit is not None
        trainer._fit.clock._last_update -= 3600

    trainer = Trainer(
        **SETTINGS | {"max_epochs": 1, "val_check_interval": "00:01:00:00"},
        callbacks=[ActAt("on_train_batch_end", rank, 2, jump)],
    )
    trainer.fit(module, batches(6), batches(1))
    return module.validated


def test_rank_0s_clock_triggers_validation() -> None:
    assert agreed_results(validated_by_time, (0,), (1,)) == [[3], []]


def saved_by_time(rank: int, folder: str) -> list[int]:
    """Returns the steps saved by a fit that saves hourly, if one rank's clock jumps an hour at step 2."""
    saved: list[int] = []
    checkpoint = ModelCheckpoint(folder, train_time_interval="00:01:00:00", save_top_k=-1)

    def jump(trainer: Trainer) -> None:
        assert checkpoint._saved_at is not None
        checkpoint._saved_at -= 3600

    trainer = Trainer(
        **SETTINGS | {"max_epochs": 1, "enable_checkpointing": True},
        callbacks=[ActAt("on_train_batch_end", rank, 2, jump), checkpoint],
    )

    def save(path: str, weights_only: bool = False, **_: Any) -> str:
        saved.append(trainer.global_step)
        return path

    trainer.save_checkpoint = save  # type: ignore[method-assign, assignment]
    trainer.fit(Model(), batches(6))
    return saved


def test_rank_0s_clock_triggers_checkpoints(tmp_path: Path) -> None:
    assert agreed_results(saved_by_time, (0, str(tmp_path)), (1, str(tmp_path))) == [[3], []]


def signaled_after_the_last_exchange() -> str:
    """Signals rank 1 after the ranks' last exchange, when the handler from before the fit is back in place."""
    caught: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    found = fitted(("on_fit_end", 1, 1, terminate))
    return f"{found['ended']}{caught}"


def test_a_signal_after_the_last_exchange_reaches_the_previous_handler() -> None:
    assert run_world(2, signaled_after_the_last_exchange) == ["[]", "[15]"]


SCORES = (3.0, 2.0, 2.5, 2.5, 1.0)


def stopped_early(folder: str) -> dict[str, Any]:
    """Fits until early stopping ends the run in its fourth epoch."""
    stopping = EarlyStopping("score", patience=2)
    best = ModelCheckpoint(monitor="score", filename="{epoch}-{score:.1f}")
    arguments = {"max_epochs": 9, "default_root_dir": folder, "log_every_n_steps": 2, "num_sanity_val_steps": 1}
    trainer = Trainer(
        **SETTINGS | arguments | {"logger": [CSVLogger(), TensorBoardLogger()], "enable_checkpointing": True},
        callbacks=[stopping, best],
    )
    trainer.fit(Model(SCORES), batches(4), batches(2))
    return {
        "step": trainer.global_step,
        "reason": stopping.stopping_reason_message,
        "best": float(stopping.best_score),
        "log_dir": trainer.log_dir,
        "best path": best.best_model_path,
        "kept": sorted(best.best_k_models),
        "score": float(trainer.callback_metrics["score"]),
    }


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Returns the folder, and the results of two ranks."""
    folder = tmp_path_factory.mktemp("early")
    return folder, run_world(2, stopped_early, str(folder))


def test_early_stopping_ends_all_ranks_at_the_same_step(early: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, second) = early
    assert first == second
    assert (first["step"], first["best"], first["score"]) == (16, 2.0, 2.5)


def test_all_ranks_know_and_keep_the_same_best_checkpoint(early: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = early
    folder = Path(ranks[0]["log_dir"], "checkpoints")
    best = str(folder / "epoch=1-score=2.0")
    assert [str(path) for path in folder.iterdir()] == [best]
    for found in ranks:
        assert found["best path"] == best and found["kept"] == [best]


def test_loggers_write_once_on_two_ranks(early: tuple[Path, list[dict[str, Any]]]) -> None:
    folder = Path(early[1][0]["log_dir"])
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"]
    with (folder / "metrics.csv").open() as file:
        scores = [(int(row["step"]), float(row["score"])) for row in csv.DictReader(file) if row["score"]]
    assert scores == [(4, 3.0), (8, 2.0), (12, 2.5), (16, 2.5)]
    [start] = folder.glob("starts/*/run.json")
    assert json.loads(start.read_text())["world_size"] == 2
    [events] = folder.glob("events*")
    read = scalars_in(events)
    assert read["score"] == scores
    # Epoch means are over all ranks, step values rank 0's own.
    assert [step for step, _ in read["loss_step"]] == [*range(2, 17, 2)]
    assert [step for step, _ in read["loss_epoch"]] == [4, 8, 12, 16]
