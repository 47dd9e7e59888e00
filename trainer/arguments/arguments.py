"""The Trainer's arguments: their defaults and allowed values, all checked before anything runs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from leyden.callbacks.base import Callback
from leyden.callbacks.gradient_accumulation import GradientAccumulation
from leyden.callbacks.loggers.logger import Logger
from leyden.checkpoint.format.bucket import BucketPath, expanded, place_of
from leyden.core.devices import parse_devices
from leyden.core.errors import ConfigurationError, nearest
from leyden.core.given import UNSET
from leyden.launch.heartbeat import hang_limit
from leyden.strategies.base import Strategy
from leyden.trainer.arguments.replay import replay_of
from leyden.trainer.launched import filled_by_launch

NONE_MEANS_SOMETHING = ("check_val_every_n_epoch", "hang_timeout")
"""Arguments for which None is a value of its own, although the default is not None."""
AT_LEAST = {
    -1: ("max_epochs", "max_steps", "num_sanity_val_steps"),
    0: ("min_epochs", "min_steps", "log_every_n_steps", "reload_dataloaders_every_n_epochs"),
    1: (
        *("check_val_every_n_epoch", "accumulate_grad_batches", "num_nodes", "global_batch_size"),
        "digest_every_n_steps",
    ),
}
"""Integer arguments, by their smallest allowed value."""
AUTO = ("accumulate_grad_batches", "auto")
"""The one integer argument that may also be a string."""
LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches")
CHOICES = {
    "deterministic": ((None, True, False, "warn"), "True, False or 'warn'"),
    "benchmark": ((None, True, False), "True or False"),
    "on_bad_sample": (("raise", "skip"), "'raise' or 'skip'"),
    "record_run": ((True, False, "diff", "no_diff"), "True, False, 'diff', or 'no_diff' to omit changes to the code"),
    "verbose": ((True, False), "True or False"),
    "report": ((True, False), "True or False"),
    "resume": ((None, "auto"), "'auto', or None to start from scratch; fit(ckpt_path=…) accepts paths and more names"),
}
"""Arguments with a fixed set of values: the values, and the text that lists them in an error."""
BAREBONES = (
    *("enable_checkpointing", "logger", "enable_progress_bar", "enable_model_summary", "fast_dev_run", "profiler"),
    *("num_sanity_val_steps", "log_every_n_steps", "detect_anomaly", "digest_every_n_steps", "validate_at_start"),
)


@dataclass(frozen=True, slots=True)
class Arguments:
    """The Trainer's arguments after defaults and checks.

    The Trainer's signature repeats the defaults for editors and type checkers; a test compares the two.
    """

    accelerator: str = "auto"
    strategy: Any = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: Any = None
    logger: Any = True
    callbacks: Any = None
    plugins: Any = None
    fast_dev_run: bool | int = False
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: Any = None
    limit_train_batches: float | int = 1.0
    limit_val_batches: float | int = 1.0
    limit_test_batches: float | int = 1.0
    limit_predict_batches: float | int = 1.0
    overfit_batches: float | int = 0.0
    val_check_interval: Any = 1.0
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 2
    log_every_n_steps: int = 50
    enable_checkpointing: bool = True
    enable_progress_bar: bool = True
    enable_model_summary: bool = False
    accumulate_grad_batches: int | str = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    deterministic: bool | str | None = None
    benchmark: bool | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    profiler: Any = None
    detect_anomaly: bool = False
    barebones: bool = False
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    default_root_dir: str = "."
    even_batches: bool = False
    global_batch_size: int | None = None
    sample_rng: bool = False
    allow_replay: bool = False
    resume: str | None = None
    preemption: Any = None
    hang_timeout: Any = "auto"
    on_bad_sample: str = "raise"
    digest_every_n_steps: int | None = None
    record_run: bool | str = True
    validate_at_start: bool = False
    verbose: bool = True
    report: bool = False
    compile: Any = None

    @property
    def local_root(self) -> str:
        """The folder of all runs on this machine: the current folder if `default_root_dir` is in a bucket."""
        return "." if self.bucket is not None else self.default_root_dir

    @property
    def bucket(self) -> BucketPath | None:
        """`default_root_dir` if it is in a bucket; else None."""
        place = place_of(self.default_root_dir, "default_root_dir")
        return place if isinstance(place, BucketPath) else None


def resolve(given: dict[str, Any]) -> tuple[Arguments, frozenset[str]]:
    """Fills in defaults and checks every value.

    Args:
        given: all arguments by name; omitted ones are UNSET. None also means the default.

    Returns:
        The arguments, including those set by `leyden launch`, and the names of the arguments given by the user.

    Raises:
        ConfigurationError: for the first invalid value; the message names the fix.
    """
    defaults = Arguments()
    values = {
        name: value
        for name, value in given.items()
        # If None is the default, an explicit None prevents the launch from setting the argument.
        if value is not UNSET and (value is not None or name in NONE_MEANS_SOMETHING or getattr(defaults, name) is None)
    }
    named = frozenset(name for name, value in values.items() if value is not None or name in NONE_MEANS_SOMETHING)
    values = {**filled_by_launch(values), **values}
    if values.get("barebones"):
        _apply_barebones(values)
    if values.get("verbose") is False:
        values.setdefault("enable_progress_bar", False)
    arguments = dataclasses.replace(defaults, **values)
    _check(arguments)
    arguments = dataclasses.replace(arguments, **_implied(arguments))
    replay = replay_of(arguments)
    return arguments if replay is None else dataclasses.replace(arguments, **replay.arguments()), named


def for_trial(
    arguments: Arguments, callbacks: Sequence[Callback], within_run: bool, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a Trainer for short silent runs on the same devices.

    Args:
        arguments: the arguments of the user's Trainer.
        callbacks: that Trainer's callbacks. The trial gets copies of `GradientAccumulation` and
            `ActivationCheckpointing`, and a silent logger for each logger.
        within_run: True while the user's Trainer is running.
        given: arguments of the trial itself. If they set an accumulation, the callback is not copied.

    Raises:
        ConfigurationError: within a run, if the strategy is an object, which serves only one run at a time.
    """
    from leyden.callbacks.loggers.silent import DummyLogger

    if within_run and isinstance(arguments.strategy, Strategy):
        raise ConfigurationError(
            "a trial within a run needs its own strategy, but the Trainer's strategy is an object. Pass strategy by "
            "name, or search before the run with Tuner(trainer)."
        )
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    none = (
        *("resume", "preemption", "profiler", "max_time", "min_epochs", "min_steps", "hang_timeout"),
        "digest_every_n_steps",
    )
    off: dict[str, Any] = dict.fromkeys(("num_sanity_val_steps", "log_every_n_steps"), 0)
    off |= dict.fromkeys((name for name in BAREBONES if name not in (*off, *none)), False)
    # Imported here because few runs have trials.
    from leyden.callbacks.activation_checkpointing import ActivationCheckpointing

    # `accumulate_grad_batches` creates its own GradientAccumulation.
    is_set = arguments.accumulate_grad_batches != 1 or "accumulate_grad_batches" in given
    accumulation = () if is_set else (GradientAccumulation,)
    kinds: tuple[type[Callback], ...] = (ActivationCheckpointing, *accumulation)
    own: list[Callback] = [copy.deepcopy(callback) for callback in callbacks if isinstance(callback, kinds)]
    own += [DummyLogger() for callback in callbacks if isinstance(callback, Logger)]
    off |= {"barebones": True, "val_check_interval": 1.0, "check_val_every_n_epoch": 1, "callbacks": own}
    return {**values, **dict.fromkeys(none), **off}


def _apply_barebones(values: dict[str, Any]) -> None:
    """Disables everything that a benchmark of the bare loop should not measure."""
    for name in BAREBONES:
        if values.get(name):
            raise ConfigurationError(
                f"barebones=True disables {name}, but {name}={values[name]!r} was given: choose one."
            )
    off: dict[str, Any] = dict.fromkeys(BAREBONES, False)
    off.update(profiler=None, num_sanity_val_steps=0, log_every_n_steps=0, digest_every_n_steps=None)
    values.update(off)


def _implied(arguments: Arguments) -> dict[str, Any]:
    """Returns the arguments that follow from others, or need conversion."""
    implied: dict[str, Any] = {"default_root_dir": expanded(arguments.default_root_dir, "default_root_dir")}
    if arguments.gradient_clip_val == 0:
        implied["gradient_clip_val"] = None
    if arguments.fast_dev_run:
        # A quick run through every hook: n batches of each loader, one epoch, nothing written.
        limits = [name for name in LIMITS if name.startswith("limit_")]
        implied |= dict.fromkeys(("max_steps", *limits), int(arguments.fast_dev_run))
        implied |= {"max_epochs": 1, "max_time": None, "num_sanity_val_steps": 0, "enable_checkpointing": False}
        implied |= {"val_check_interval": 1.0, "check_val_every_n_epoch": 1, "resume": None}
    if arguments.overfit_batches:
        implied |= dict.fromkeys(("limit_train_batches", "limit_val_batches"), arguments.overfit_batches)
    if arguments.compile == "step":
        implied["compile"] = {}
    implied["hang_timeout"] = hang_limit(arguments.hang_timeout)
    resumes = implied.get("resume", arguments.resume) == "auto"
    if resumes or arguments.preemption is not None:
        from leyden.trainer.events.preemption import preemption_from

        implied["preemption"] = preemption_from(arguments.preemption, resumes)
    return implied


def _check(arguments: Arguments) -> None:
    for least, names in AT_LEAST.items():
        for name in names:
            if getattr(arguments, name) is not None and (name, getattr(arguments, name)) != AUTO:
                _check_integer(name, getattr(arguments, name), least)
    for name in LIMITS:
        _check_limit(name, getattr(arguments, name))
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if field.type == "bool" and not isinstance(value, bool):
            raise ConfigurationError(f"{field.name}={value!r}: use True or False.")
    if not isinstance(arguments.fast_dev_run, bool):
        _check_integer("fast_dev_run", arguments.fast_dev_run, 0)
    _check_validation(arguments)
    _check_clipping(arguments)
    _check_choices(arguments)
    _check_compile(arguments)


def _check_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        extra = ", or -1 for no limit" if least == -1 and name.startswith("max") else ""
        extra = f", or {AUTO[1]!r}" if name == AUTO[0] else extra
        raise ConfigurationError(f"{name}={value!r}: use a whole number from {least}{extra}.")


def _check_limit(name: str, value: Any) -> None:
    """Checks a limit: a float is a fraction, an int a number of batches."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f"{name}={value!r}: use a fraction between 0.0 and 1.0, or a whole number of batches.")
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        raise ConfigurationError(
            f"{name}={value!r} is not a fraction between 0.0 and 1.0: use {name}={int(value) if value == value else 1} "
            "for a number of batches."
        )
    if value < 0:
        raise ConfigurationError(f"{name}={value!r}: use a whole number of batches from 0.")


def _check_validation(arguments: Arguments) -> None:
    value = arguments.val_check_interval
    if isinstance(value, (str, timedelta, dict)):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(
            f"val_check_interval={value!r}: use a fraction of an epoch, a number of batches, or a time such as "
            "'00:00:30:00'."
        )
    if isinstance(value, float) and not 0.0 < value <= 1.0:
        raise ConfigurationError(
            f"val_check_interval={value!r}: a float is a fraction of an epoch, above 0.0 and up to 1.0."
        )
    if isinstance(value, int) and value < 1:
        raise ConfigurationError(f"val_check_interval={value!r}: use a whole number of batches from 1.")
    if arguments.check_val_every_n_epoch is None and isinstance(value, float):
        raise ConfigurationError(
            "check_val_every_n_epoch=None counts batches across epochs: set val_check_interval to a whole number, not "
            f"{value!r}."
        )


def _check_clipping(arguments: Arguments) -> None:
    value = arguments.gradient_clip_val
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
        raise ConfigurationError(f"gradient_clip_val={value!r}: use a number from 0, or None for no clipping.")
    if arguments.gradient_clip_algorithm not in ("norm", "value"):
        raise ConfigurationError(
            f"gradient_clip_algorithm={arguments.gradient_clip_algorithm!r} is not known. "
            f"{nearest(arguments.gradient_clip_algorithm, ('norm', 'value'))}"
        )


def _check_compile(arguments: Arguments) -> None:
    given = arguments.compile
    if given is None:
        return
    if given != "step" and not isinstance(given, dict):
        raise ConfigurationError(
            f"compile={given!r}: use 'step', or a dict of torch.compile's arguments for the step. To compile the "
            "module's steps alone, pass torch.compile(module) to fit."
        )
    for name in () if given == "step" else given:
        if name not in ("backend", "dynamic", "mode", "options"):
            fix = nearest(name, ("backend", "dynamic", "mode", "options"))
            raise ConfigurationError(f"compile={{{name!r}: …}}: the step is one graph (fullgraph). {fix}")
    for name, value in (("detect_anomaly", False), ("accumulate_grad_batches", 1)):
        if getattr(arguments, name) != value:
            raise ConfigurationError(
                "compile='step' makes one graph of the step on one batch, which does not work with "
                f"{name}={getattr(arguments, name)!r}: leave one of them out."
            )


def _check_choices(arguments: Arguments) -> None:
    for name, (choices, fix) in CHOICES.items():
        value = getattr(arguments, name)
        if value not in choices:
            raise ConfigurationError(f"{name}={value!r}: use {fix}.")
    parse_devices(arguments.devices)
    # Imported here because few runs set a time.
    from leyden.callbacks.timer import parse_duration

    for name in ("max_time", "val_check_interval"):
        value = getattr(arguments, name)
        if isinstance(value, (str, timedelta, dict)) or (name == "max_time" and value is not None):
            try:
                parse_duration(value)
            except ValueError as error:
                raise ConfigurationError(f"{name}={value!r}: {error}") from None
