"""What `leyden launch` passes to a script: environment variables, and how they fill the Trainer's arguments.

The ranks' own variables (RANK, WORLD_SIZE, MASTER_ADDR, …) are torch's. A process that `leyden launch` did not start
has none of these, and reads no file.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SOURCE = "LEYDEN_LAUNCHED_FROM"
"""Where the settings come from: the path of a file, or "flags". The other variables count only beside it."""
PRECISION = "LEYDEN_PRECISION"
DEBUG = "LEYDEN_DEBUG"
TEXTS = {
    "accelerator": "LEYDEN_ACCELERATOR",
    "strategy": "LEYDEN_STRATEGY",
    "precision": PRECISION,
    "resume": "LEYDEN_RESUME",
}
"""Setting → variable. It holds the text itself."""
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
"""Setting → variable. It holds the value as JSON."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Settings that a launch gives to the script; None where it leaves them open.

    Attributes:
        source: where they come from.
        accelerator: as of the Trainer.
        strategy: a strategy's name.
        options: its options, by the keys of the configuration file.
        precision: as of the Trainer.
        accumulate_grad_batches: as of the Trainer.
        gradient_clip_val: as of the Trainer.
        compile: arguments of torch.compile.
        fp8: the recipe of fp8, by the keys of the configuration file.
        debug: compare what ranks put into collectives.
        resume: as of the Trainer.
        hang_timeout: as of the Trainer; False for no watchdog.
        command: the command line of the launch; None where another one starts its ranks.
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
        self, values: Mapping[str, Any], owned: Collection[str], environ: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The arguments that the launch fills. Rank 0 prints which.

        Args:
            values: what the launch has for each argument; None where it leaves it open.
            owned: arguments that the script gives; they stand.
            environ: the environment variables; those of this process if left out.
        """
        wanted = {name: value for name, value in values.items() if value is not None}
        filled = {name: value for name, value in wanted.items() if name not in owned}
        if wanted and (os.environ if environ is None else environ).get("RANK", "0") == "0":
            kept = [name for name in wanted if name in owned]
            text = ", ".join(f"{name}={value!r}" for name, value in filled.items()) or "no argument"
            stand = f"; the script's own {', '.join(kept)} stand{'s' if len(kept) == 1 else ''}" if kept else ""
            print(f"leyden launch fills {text} (from {self.source}){stand}")
        if "strategy" in filled and self.options:
            filled["strategy"] = with_options(filled["strategy"], self.options)
        return filled

    def variables(self) -> dict[str, str]:
        """The environment variables that carry them.

        Example:
            >>> LaunchSettings("flags", precision="bf16-mixed").variables()
            {'LEYDEN_LAUNCHED_FROM': 'flags', 'LEYDEN_PRECISION': 'bf16-mixed'}
        """
        texts = {variable: getattr(self, name) for name, variable in TEXTS.items()}
        values = {variable: getattr(self, name) for name, variable in VALUES.items()}
        found = {SOURCE: self.source, **{name: text for name, text in texts.items() if text is not None}}
        found |= {name: json.dumps(value) for name, value in values.items() if value is not None and value != {}}
        return {**found, DEBUG: "1"} if self.debug else found


def read_launched(environ: Mapping[str, str] | None = None) -> LaunchSettings | None:
    """Reads what `variables` wrote; None in a process that `leyden launch` did not start."""
    environ = os.environ if environ is None else environ
    if SOURCE not in environ:
        return None
    found: dict[str, Any] = {name: environ[variable] for name, variable in TEXTS.items() if variable in environ}
    found |= {name: json.loads(environ[variable]) for name, variable in VALUES.items() if variable in environ}
    return LaunchSettings(environ[SOURCE], **found, debug=environ.get(DEBUG) == "1")


def filled_by_launch(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The Trainer's arguments that a launch fills, since the script left them at their defaults.

    Args:
        given: the arguments that the script gives; they stand.
        environ: the variables; those of this process if left out.
    """
    settings = read_launched(environ)
    if settings is None:
        return {}
    names = (
        *("accelerator", "strategy", "precision", "accumulate_grad_batches", "gradient_clip_val"),
        *("resume", "hang_timeout"),
    )
    return settings.fill({name: getattr(settings, name) for name in names}, _owned(given), environ)


def _owned(given: Mapping[str, Any]) -> set[str]:
    """The arguments that the script gives, by themselves or within others."""
    owned = set(given)
    if given.get("plugins") or not isinstance(given.get("strategy", ""), str):
        owned.add("precision")
    callbacks = given.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    if any(type(callback).__name__ == "GradientAccumulation" for callback in callbacks):
        owned.add("accumulate_grad_batches")
    return owned


def with_options(strategy: str, options: Mapping[str, Any]) -> Any:
    """The strategy of a name with the configuration file's options, which it reads under their own names.

    An unknown name is returned as it is; the Trainer refuses it.
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
    """The precision itself; where it is "fp8" by name, which leaves the recipe open, the one that the launch describes.

    Args:
        precision: a name or a Precision.
    """
    launched = read_launched()
    if launched is None or not launched.fp8 or precision != "fp8":
        return precision
    from leyden.strategies.precision.fp8_config import precision_of_config

    return precision_of_config(launched.fp8)


def as_launched(model: Any) -> Any:
    """The model, compiled where the launch asks for it and the script has not done so itself.

    Args:
        model: what a run is given.
    """
    launched = read_launched()
    if launched is None or not launched.compile or hasattr(model, "_orig_mod"):
        return model
    import torch

    return torch.compile(model, **launched.compile) if isinstance(model, torch.nn.Module) else model
