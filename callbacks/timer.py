"""Timer, a callback that measures the stages of a run and limits the training time."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from leyden.callbacks.base import Callback
from leyden.core.checks import check_choice
from leyden.core.errors import ConfigurationError, StateError, kind_of, nearest
from leyden.core.rank_zero import inform
from leyden.core.saved_state import SavedState

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

Duration: TypeAlias = "str | timedelta | Mapping[str, float]"
Stage: TypeAlias = Literal["train", "sanity_check", "validate", "test", "predict"]
STAGES: tuple[str, ...] = get_args(Stage)
UNITS = ("weeks", "days", "hours", "minutes", "seconds", "milliseconds", "microseconds")


class Timer(Callback):
    """Measures the duration of each stage of a run, and stops training at a time limit.

    Time before a resume counts. Training time includes the validations during fit.

    Args:
        duration: the limit on training time: "DD:HH:MM:SS", a timedelta, or a dict such as {"hours": 8}; None for no
            limit.
        interval: how often to check the limit: at the end of each "step" or "epoch". A limit that has passed before the
            first step ends the fit there.
        verbose: print a message when the limit is reached.

    Raises:
        ConfigurationError: if `duration` or `interval` is invalid.

    Example:
        >>> timer = Timer(duration="00:12:00:00")
        >>> # Trainer(callbacks=[timer]).fit(module, loader)
        >>> timer.time_elapsed("train"), timer.time_remaining("train")
        (0.0, 43200.0)
    """

    state_per_rank = False

    def __init__(
        self, duration: Duration | None = None, interval: Literal["step", "epoch"] = "step", verbose: bool = True
    ) -> None:
        check_choice("Timer", ("step", "epoch"), interval=interval)
        self._duration = None if duration is None else parse_duration(duration).total_seconds()
        self._interval = interval
        self._verbose = verbose
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._earlier: dict[str, float] = {}
        """Seconds of each stage before the last resume."""
        self._deadline = float("inf")

    @property
    def state_key(self) -> str:
        return self._generate_state_key(duration=self._duration, interval=self._interval)

    @property
    def _former_state_key(self) -> str:
        return f"{type(self).__qualname__}(duration={self._duration}, interval={self._interval!r})"

    def start_time(self, stage: str = "train") -> float | None:
        """Returns the `time.monotonic()` at which the stage started; None if it has not.

        Args:
            stage: "train", "sanity_check", "validate", "test" or "predict".
        """
        return self._start.get(_stage(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Returns the `time.monotonic()` at which the stage ended; None if it has not."""
        return self._end.get(_stage(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Returns the seconds spent in the stage, across resumes; for an evaluation, in its last pass."""
        name = _stage(stage)
        earlier, start = self._earlier.get(name, 0.0), self._start.get(name)
        return earlier if start is None else earlier + self._end.get(name, time.monotonic()) - start

    def time_remaining(self, stage: str = "train") -> float | None:
        """Returns the remaining seconds of `duration`; None without a limit."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        elapsed = SavedState(state).nested("time_elapsed")
        for stage in elapsed.entries:
            if stage not in STAGES:
                raise StateError(elapsed.path(stage), "is not a stage")
            elapsed.number(stage, least=0.0, most=1e12)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start.clear()
        self._end.clear()
        self._earlier = {_stage(stage): float(seconds) for stage, seconds in state["time_elapsed"].items()}

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Keeps all times: a rollback does not undo elapsed time."""

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        # A fit that continues the previous one adds to its time; a fresh fit starts from an empty state.
        self._earlier["train"] = self.time_elapsed("train")
        self._begin("train")
        if self._duration is not None:
            self._deadline = self._start["train"] + self._duration - self._earlier["train"]
        # Compared with the start, not with the clock now, so that any duration above 0 trains one step.
        if self._start["train"] >= self._deadline:
            self._stop(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish("train")

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.monotonic() >= self._deadline and self._interval == "step" and trainer.window.closes:
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if time.monotonic() >= self._deadline:
            self._stop(trainer)

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("sanity_check")

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish("sanity_check")

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self._begin("validate", resets=True)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self._finish("validate")

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("test", resets=True)

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish("test")

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("predict", resets=True)

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish("predict")

    def _begin(self, stage: str, resets: bool = False) -> None:
        self._start[stage] = time.monotonic()
        self._end.pop(stage, None)
        if resets:
            self._earlier.pop(stage, None)

    def _finish(self, stage: str) -> None:
        self._end[stage] = time.monotonic()

    def _stop(self, trainer: Trainer) -> None:
        # The ranks' clocks differ, so rank 0 decides. The Trainer stops all ranks at the same step.
        if not trainer.is_global_zero or trainer.should_stop:
            return
        trainer.should_stop = True
        if self._verbose and trainer.arguments.verbose:
            elapsed = timedelta(seconds=int(self.time_elapsed("train")))
            text = f"Time limit reached after {elapsed}. Training stops at step {trainer.global_step}."
            inform(text, trainer.print)


def parse_duration(value: Duration, name: str = "duration") -> timedelta:
    """Parses a duration.

    Args:
        value: "DD:HH:MM:SS", a timedelta, or a dict of timedelta's arguments.
        name: the argument's name in error messages.

    Raises:
        ConfigurationError: if the value has another form or is negative.

    Example:
        >>> parse_duration("00:12:30:00") == parse_duration({"hours": 12, "minutes": 30})
        True
    """
    if isinstance(value, timedelta):
        duration = value
    elif isinstance(value, str):
        match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", value.strip(), flags=re.ASCII)
        if match is None:
            raise ConfigurationError(
                f"{name}={value!r} does not have the form 'DD:HH:MM:SS' (days, hours, minutes, seconds). Twelve hours "
                "are '00:12:00:00'."
            )
        days, hours, minutes, seconds = (int(part) for part in match.groups())
        duration = _timedelta(name, value, days=days, hours=hours, minutes=minutes, seconds=seconds)
    elif isinstance(value, Mapping):
        for unit, amount in value.items():
            if unit not in UNITS:
                raise ConfigurationError(f"{name} has no unit {unit!r}. {nearest(str(unit), UNITS)}")
            if isinstance(amount, bool) or not isinstance(amount, int | float):
                raise ConfigurationError(f"{name}[{unit!r}]={amount!r} is not a number: write {{{unit!r}: 8}}.")
        if not value:
            raise ConfigurationError(f"{name} is an empty dict: use {{'hours': 8}}, for example, or None for no limit.")
        duration = _timedelta(name, value, **value)
    else:
        raise ConfigurationError(
            f"{name}={value!r} is {kind_of(value)}: give 'DD:HH:MM:SS', a datetime.timedelta, or a dict such "
            "as {'hours': 8}."
        )
    if duration < timedelta(0):
        raise ConfigurationError(f"{name}={value!r} is negative: give a positive duration, or None for no limit.")
    return duration


def _timedelta(name: str, value: object, **parts: float) -> timedelta:
    try:
        return timedelta(**parts)
    except (OverflowError, ValueError) as error:
        raise ConfigurationError(f"{name}={value!r} is too long ({error}): give None for no limit.") from None


def _stage(stage: str) -> str:
    name = str(getattr(stage, "value", stage))
    if name not in STAGES:
        raise ConfigurationError(f"Timer has no stage {name!r}. {nearest(name, STAGES)}")
    return name
