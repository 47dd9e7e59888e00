"""EarlyStopping in short runs with scripted metrics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from leyden.core.errors import ConfigurationError
from leyden.trainer.trainer import Trainer

NAN, INF = math.nan, math.inf


class Scripted(Line):
    """Logs `val` from a list, one value per validation, and `train`, one value per epoch."""

    def __init__(self, values: Sequence[float] = ()) -> None:
        super().__init__()
        self.values = list(values)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.values:
            self.log("train", self.values[self.trainer.current_epoch % len(self.values)], on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.values:
            self.log("val", self.values[self.trainer.progress.validations % len(self.values)])


DATA = [torch.ones(2, 2)] * 2


def fit(
    root: Path,
    values: Sequence[float],
    *callbacks: Callback,
    val: Any = DATA,
    ckpt_path: str | None = None,
    **arguments: Any,
) -> Trainer:
    options = {
        "default_root_dir": root,
        "max_epochs": len(values),
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    }
    trainer = Trainer(callbacks=list(callbacks), **{**QUIET, **options, **arguments})
    trainer.fit(Scripted(values), DATA, val, ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "EarlyStopping monitors 'val', which is nan")
        yield


@pytest.mark.parametrize(
    ("arguments", "values", "epochs", "reason"),
    [
        ({"patience": 2}, [5, 4, 4, 4, 4, 4], 4, "patience_exhausted"),
        ({"patience": 2}, [5, 4, 5, 3, 5, 5, 5], 6, "patience_exhausted"),
        ({"patience": 1}, [5, 4, 3, 2], 4, "not_stopped"),
        ({"patience": 0}, [5, 5, 5], 2, "patience_exhausted"),
        ({"patience": 2, "mode": "max"}, [1, 2, 2, 1, 5], 4, "patience_exhausted"),
        # A change below min_delta is no improvement, in either mode.
        ({"patience": 2, "min_delta": 0.5}, [5, 4.75, 4.625, 1], 3, "patience_exhausted"),
        ({"patience": 2, "min_delta": 0.5}, [5, 4.75, 4.25, 3], 4, "not_stopped"),
        ({"patience": 2, "min_delta": 0.5, "mode": "max"}, [1, 1.25, 1.5, 9], 3, "patience_exhausted"),
        ({"patience": 2, "min_delta": 0.5, "mode": "max"}, [1, 1.25, 1.75, 9], 4, "not_stopped"),
        ({}, [5, NAN, 1], 2, "non_finite_metric"),
        ({}, [5, INF, 1], 2, "non_finite_metric"),
        ({"check_finite": False, "patience": 2}, [5, NAN, 1, 2], 4, "not_stopped"),
        ({"check_finite": False, "patience": 2}, [5, NAN, NAN, 1], 3, "patience_exhausted"),
        ({"stopping_threshold": 2.0}, [5, 2.0, 1.9, 1], 3, "stopping_threshold"),
        ({"stopping_threshold": 2.0, "mode": "max"}, [1, 2.0, 2.1, 3], 3, "stopping_threshold"),
        ({"divergence_threshold": 9.0}, [5, 9.0, 9.1, 1], 3, "divergence_threshold"),
        ({"divergence_threshold": 1.0, "mode": "max"}, [5, 1.0, 0.9, 9], 3, "divergence_threshold"),
    ],
)
def test_each_criterion_stops_training_with_its_reason(
    tmp_path: Path, arguments: dict[str, Any], values: list[float], epochs: int, reason: str
) -> None:
    stopping = EarlyStopping("val", **arguments)
    trainer = fit(tmp_path, values, stopping)
    assert trainer.progress.validations == epochs
    assert stopping.stopping_reason.value == reason
    stopped = reason != "not_stopped"
    assert stopping.stopped_epoch == (epochs - 1 if stopped else 0)
    assert (stopping.stopping_reason_message is not None) == stopped
    finite = [value for value in values[:epochs] if math.isfinite(value)]
    if not arguments and stopped:
        assert float(stopping.best_score) == min(finite)


def test_best_score_and_wait_count_follow_the_metric(tmp_path: Path) -> None:
    stopping = EarlyStopping("val", patience=5)
    fit(tmp_path, [3, 1, 2, 2], stopping)
    assert (float(stopping.best_score), stopping.wait_count) == (1.0, 2)


def test_checks_follow_the_validation_schedule(tmp_path: Path) -> None:
    """Checks once per epoch or once per validation, whenever the metric is new."""
    values = [5.0] * 8
    twice = EarlyStopping("val", patience=3)
    # The first of the four checks sets the best value and three fail: two epochs.
    assert fit(tmp_path, values, twice, val_check_interval=0.5).current_epoch == 2
    every_batch = EarlyStopping("val", patience=1)
    # The int 1 means every batch; the float 1.0 would mean an epoch.
    assert fit(tmp_path, values, every_batch, val_check_interval=1).global_step == 2
    without_validation = EarlyStopping("train", patience=2)
    assert fit(tmp_path, values, without_validation, val=None).current_epoch == 3
    every_second = EarlyStopping("val", patience=1)
    assert fit(tmp_path, values, every_second, check_val_every_n_epoch=2).current_epoch == 4
    at_epoch_ends = EarlyStopping("val", patience=3, check_on_train_epoch_end=True)
    assert fit(tmp_path, values, at_epoch_ends, val_check_interval=0.5).current_epoch == 4
    after_validation = EarlyStopping("val", patience=3, check_on_train_epoch_end=False)
    assert fit(tmp_path, values, after_validation).current_epoch == 4


def test_sanity_checks_and_fast_dev_run_do_not_count(tmp_path: Path) -> None:
    stopping = EarlyStopping("val", patience=0, check_on_train_epoch_end=False)
    fit(tmp_path, [5], stopping, num_sanity_val_steps=2)
    assert (stopping.wait_count, float(stopping.best_score)) == (0, 5.0)
    unlogged = EarlyStopping("never logged", patience=0)
    fit(tmp_path, [5], unlogged, fast_dev_run=True)
    assert float(unlogged.best_score) == INF


def test_validate_does_not_count_as_a_check(tmp_path: Path) -> None:
    stopping = EarlyStopping("val", check_on_train_epoch_end=False)
    trainer = Trainer(
        default_root_dir=tmp_path,
        callbacks=[stopping],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.validate(Scripted([5]), DATA, verbose=False)
    assert float(stopping.best_score) == INF


def test_an_unlogged_metric_raises_unless_strict_is_false(tmp_path: Path) -> None:
    late = r"monitors 'vall', which was not logged\. Did you mean 'val'\?.*strict=False"
    with (
        pytest.warns(UserWarning, match="validation did not log before training"),
        pytest.raises(ConfigurationError, match=late),
    ):
        fit(tmp_path, [5, 5], EarlyStopping("vall"))
    with pytest.warns(UserWarning, match="monitors 'vall'"):
        trainer = fit(tmp_path, [5, 5], EarlyStopping("vall", strict=False))
    assert trainer.current_epoch == 2
    with pytest.raises(ConfigurationError, match="No metric was logged"):
        fit(tmp_path, [], EarlyStopping("val"), max_epochs=1)


def test_min_epochs_delays_stopping(tmp_path: Path) -> None:
    stopping = EarlyStopping("val", patience=1)
    assert fit(tmp_path, [5.0] * 6, stopping, min_epochs=4).current_epoch == 4


def test_verbose_prints_each_decision_and_stopping_is_always_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, [5, 4, 4], EarlyStopping("val", patience=1, verbose=True))
    printed = capsys.readouterr().out
    assert "val improved: 5.000." in printed
    assert "val improved by 1.000: 4.000." in printed
    assert "val did not improve in the last 1 checks. The best value was 4.000." in printed
    fit(tmp_path, [5, 4, 4], EarlyStopping("val", patience=1))
    printed = capsys.readouterr().out
    assert "improved" not in printed
    assert "EarlyStopping stops the run in epoch 2: val did not improve in the last 1 checks." in printed


def test_a_resumed_run_stops_where_the_uninterrupted_run_does(tmp_path: Path) -> None:
    values = [5.0, 4.0, 4.5, 4.5, 4.5, 4.5, 4.5]

    def parts() -> list[Callback]:
        return [EarlyStopping("val", patience=3), ModelCheckpoint(save_top_k=-1)]

    whole = parts()
    assert fit(tmp_path / "whole", values, *whole).current_epoch == 5
    first = parts()
    fit(tmp_path / "cut", values, *first, max_epochs=3)
    second = parts()
    assert fit(tmp_path / "cut", values, *second, ckpt_path="last").current_epoch == 5
    assert whole[0].state_dict() == second[0].state_dict()


def test_resuming_a_stopped_run_stops_again_unless_patience_is_raised(tmp_path: Path) -> None:
    """A run may be killed after it has saved the decision to stop, and before it ends."""
    values = [5.0] * 6
    trainer = fit(tmp_path, values, EarlyStopping("val", patience=2), ModelCheckpoint())
    assert trainer.current_epoch == 3
    again = EarlyStopping("val", patience=2)
    with pytest.warns(UserWarning, match="stopped this run in epoch 2"):
        assert fit(tmp_path, values, again, ModelCheckpoint(), ckpt_path="last").current_epoch == 3
    assert again.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    patient = EarlyStopping("val", patience=4)
    assert fit(tmp_path, values, patient, ModelCheckpoint(), ckpt_path="last").current_epoch == 5


def test_a_second_fit_resets_the_state(tmp_path: Path) -> None:
    stopping = EarlyStopping("val", patience=2)
    trainer = fit(tmp_path, [5.0] * 6, stopping)
    assert trainer.current_epoch == 3
    trainer.fit(Scripted([5.0, 4.0, 3.0, 2.0, 1.0, 0.0]), DATA, DATA)
    assert trainer.current_epoch == 6
    assert stopping.stopping_reason is EarlyStoppingReason.NOT_STOPPED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "minimum"}, "Did you mean 'min'"),
        ({"mode": "auto"}, "Known: min, max"),
        ({"patience": -1}, "a whole number of checks from 0"),
        ({"patience": 1.5}, "a whole number of checks from 0"),
        ({"patience": True}, "a whole number of checks from 0"),
        ({"min_delta": -0.1}, "mode sets its direction"),
        ({"min_delta": "small"}, "give a number from 0"),
        ({"monitor": ""}, "give the name of a logged metric"),
        ({"monitor": None}, "give the name of a logged metric"),
    ],
)
def test_invalid_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EarlyStopping(**{"monitor": "val", **arguments})


def test_two_early_stoppings_save_and_restore_their_own_states(tmp_path: Path) -> None:
    first, second = EarlyStopping("val", patience=9), EarlyStopping("train", patience=9, mode="max")
    fit(tmp_path, [3, 2, 1], first, second, ModelCheckpoint())
    one, other = EarlyStopping("val", patience=9), EarlyStopping("train", patience=9, mode="max")
    fit(tmp_path, [3, 2, 1], one, other, ModelCheckpoint(), ckpt_path="last")
    assert (float(one.best_score), float(other.best_score)) == (1.0, 3.0)
    assert (one.wait_count, other.wait_count) == (0, 2)


def test_nan_warns_if_check_finite_is_false(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"monitors 'val', which is nan\. This counts as no improvement"):
        fit(tmp_path, [5, float("nan"), 4], EarlyStopping("val", check_finite=False))


def test_unknown_arguments_raise_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match="EarlyStopping has no argument 'pacience'. Did you mean 'patience'"):
        EarlyStopping("val", pacience=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="EarlyStopping has no argument 'metric': use monitor"):
        EarlyStopping(metric="val")  # type: ignore[call-arg]
