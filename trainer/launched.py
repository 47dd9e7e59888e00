"""Settings that `leyden launch` passes to a script in environment variables, and how they set Trainer arguments.

Ranks also have torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, …). A process that `leyden launch` did not start has
none of the variables below, and reads no file.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden.core.rank_zero import inform

SOURCE = "LEYDEN_LAUNCHED_FROM"
"""The source of the settings: the path of a file, or "flags". Without it the other variables are ignored."""
PRECISION = "LEYDEN_PRECISION"
DEBUG = "LEYDEN_DEBUG"
TEXTS = {
    "accelerator": "LEYDEN_ACCELERATOR",
    "strategy": "LEYDEN_STRATEGY",
    "precision": PRECISION,
    "resume": "LEYDEN_RESUME",
}
"""Setting → variable with its text."""
COMMAND = "LEYDEN_COMMAND"
VALUES = {
    "command": COMMAND,
    "options": "LEYDEN_STRATEGY_OPTIONS",
    "accumulate_grad_batches": "LEYDEN_ACCUMULATE_GRAD_BATCHES",
    "gradient_clip_val": "LEYDEN_GRADIENT_CLIP_VAL",
    "compile": "LEYDEN_COMPILE",
    "fp8": "LEYDEN_FP8",
    "hang_timeout": "LEYDEN_HANG_TIMEOUT",
}
"""Setting → variable with its value as JSON."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Settings that a launch passes to the script; None for settings that it leaves open.

    Attributes:
        source: the path of a configuration file, or "flags".
        accelerator: see Trainer.
        strategy: the strategy's name.
        options: the strategy's options, by their keys in the configuration file.
        precision: see Trainer.
        accumulate_grad_batches: see Trainer.
        gradient_clip_val: see Trainer.
        compile: arguments of torch.compile.
        fp8: the fp8 recipe, by its keys in the configuration file.
        debug: check that ranks pass matching inputs to collectives.
        resume: see Trainer.
        hang_timeout: see Trainer; False for no watchdog.
        command: the command line of the launch; None if another launcher starts the ranks.
    """

    source: str
    accelerator: str | None = None
    strategy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str | None = None
    accumulate_grad_batches: int | None = None
    gradient_clip_val: float | None = None
    compile: Mapping[str, Any] = field(default_factory=dict)
    fp8: Mapping[str, Any] = field(default_factory=dict)
    debug: bool = False
    resume: str | None = None
    hang_timeout: float | str | bool | None = None
    command: Sequence[str] | None = None

    def fill(
        self,
        values: Mapping[str, Any],
        owned: Collection[str],
        environ: Mapping[str, str] | None = None,
        verbose: bool = True,
    ) -> dict[str, Any]:
        """Returns the arguments that the launch sets. Rank 0 prints them if `verbose`.

        Args:
            values: the launch's value of each argument; None for arguments that it leaves open.
            owned: arguments set by the script, which take precedence.
            environ: the environment variables; by default those of this process.
            verbose: True to print on rank 0.
        """
        wanted = {name: value for name, value in values.items() if value is not None}
        filled = {name: value for name, value in wanted.items() if name not in owned}
        if verbose and wanted and (os.environ if environ is None else environ).get("RANK", "0") == "0":
            own = [name for name in wanted if name in owned]
            text = ", ".join(f"{name}={value!r}" for name, value in filled.items()) or "no argument"
            ignored = f"; the script sets {', '.join(own)} itself" if own else ""
            inform(f"leyden launch sets {text} (from {self.source}){ignored}")
        if "strategy" in filled and self.options:
            filled["strategy"] = with_options(filled["strategy"], self.options)
        return filled

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that transport the settings.

        Example:
            >>> LaunchSettings("flags", precision="bf16-mixed").variables()
            {'LEYDEN_LAUNCHED_FROM': 'flags', 'LEYDEN_PRECISION': 'bf16-mixed'}
        """
        texts = {variable: getattr(self, name) for name, variable in TEXTS.items()}
        values = {variable: getattr(self, name) for name, variable in VALUES.items()}
        variables = {SOURCE: self.source, **{name: text for name, text in texts.items() if text is not None}}
        variables |= {name: json.dumps(value) for name, value in values.items() if value is not None and value != {}}
        return {**variables, DEBUG: "1"} if self.debug else variables


def read_launched(environ: Mapping[str, str] | None = None) -> LaunchSettings | None:
    """Reads the settings from the environment; None in a process that `leyden launch` did not start."""
    environ = os.environ if environ is None else environ
    if SOURCE not in environ:
        return None
    settings: dict[str, Any] = {name: environ[variable] for name, variable in TEXTS.items() if variable in environ}
    settings |= {name: json.loads(environ[variable]) for name, variable in VALUES.items() if variable in environ}
    return LaunchSettings(environ[SOURCE], **settings, debug=environ.get(DEBUG) == "1")


def filled_by_launch(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns the Trainer arguments that a launch sets because the script omits them.

    Args:
        given: arguments set by the script, which take precedence.
        environ: the environment variables; by default those of this process.
    """
    settings = read_launched(environ)
    if settings is None:
        return {}
    names = (
        *("accelerator", "strategy", "precision", "accumulate_grad_batches", "gradient_clip_val"),
        *("resume", "hang_timeout"),
    )
    values = {name: getattr(settings, name) for name in names}
    return settings.fill(values, _owned(given), environ, given.get("verbose") is not False)


def _owned(given: Mapping[str, Any]) -> set[str]:
    """Returns the arguments set by the script, directly or through other arguments."""
    owned = set(given)
    if given.get("plugins") or not isinstance(given.get("strategy", ""), str):
        owned.add("precision")
    callbacks = given.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    if any(type(callback).__name__ == "GradientAccumulation" for callback in callbacks):
        owned.add("accumulate_grad_batches")
    return owned


def with_options(strategy: str, options: Mapping[str, Any]) -> Any:
    """Returns the named strategy with the options of the configuration file, under the names used there.

    An unknown name is returned unchanged, for the Trainer to reject.
    """
    from leyden.strategies import SEVERAL

    if strategy not in SEVERAL:
        return strategy
    module, name, arguments = SEVERAL[strategy]
    kind = getattr(importlib.import_module(module), name)
    return (
        kind.from_accelerate(options, **arguments) if hasattr(kind, "from_accelerate") else kind(**arguments, **options)
    )


def with_recipe(precision: Any) -> Any:
    """Returns the precision; for the name "fp8", which leaves the recipe open, the launch's precision with its recipe.

    Args:
        precision: a name or a Precision.
    """
    launched = read_launched()
    if launched is None or not launched.fp8 or precision != "fp8":
        return precision
    from leyden.strategies.precision.fp8_config import precision_of_config

    return precision_of_config(launched.fp8)


def as_launched(model: Any) -> Any:
    """Returns the model, compiled if the launch requests it and the script has not compiled it.

    Args:
        model: the model passed to a run.
    """
    launched = read_launched()
    if launched is None or not launched.compile or hasattr(model, "_orig_mod"):
        return model
    import torch

    return torch.compile(model, **launched.compile) if isinstance(model, torch.nn.Module) else model
