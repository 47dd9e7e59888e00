"""Reads the `deepspeed_config` section of a configuration file: a strategy, its options, and settings of the run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from leyden.strategies.deepspeed.config import ZeroConfig
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.cli.settings.settings import Settings

STAGES = (1, 2, 3)
"""ZeRO stages that have a strategy name of their own."""


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """The strategy of a launch, and what its section of the file sets for the run.

    Attributes:
        strategy: the strategy's name; None for the default of one rank or of several.
        options: the section's other keys, as the file has them.
        steps: batches per optimizer step; None if not set.
        norm: the largest norm of the gradients; None if not set.
        precision: the precision in DeepSpeed's own file; None if not set.
    """

    strategy: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    norm: float | None = None
    precision: str | None = None


def zero_of(settings: Settings) -> StrategyChoice:
    """Reads the section `deepspeed_config`, and DeepSpeed's own file if the section names one.

    Raises:
        ConfigurationError: if a value is invalid, or the section and the file contradict each other.
    """
    options = settings.effective("deepspeed_config")
    kinds = {"gradient_accumulation_steps": int, "gradient_clipping": float}
    given = {name: _number(name, options.pop(name, None), kind) for name, kind in kinds.items()}
    file = options.get("deepspeed_config_file")
    config = ZeroConfig(None if file is None else os.path.expanduser(file), stage=options.get("zero_stage"))
    if file is not None:
        options["deepspeed_config_file"] = os.path.abspath(os.path.expanduser(file))
    config.fill({name: value for name, value in given.items() if value is not None})
    stage, name = options.get("zero_stage"), "deepspeed"
    if stage in STAGES:
        name = f"deepspeed_stage_{options.pop('zero_stage')}"
    lower = [precision for precision in ("bf16", "fp16") if config.given(f"{precision}.enabled") is True]
    return StrategyChoice(
        name,
        options,
        config.given("gradient_accumulation_steps"),
        # DeepSpeed writes 0 for no clipping.
        _number("gradient_clipping", config.given("gradient_clipping") or None, float),
        lower[0] if lower else None,
    )


def _number(name: str, value: Any, kind: type) -> Any:
    """Reads a number; returns None for "auto", by which DeepSpeed's users leave it open."""
    if value is None or str(value).lower() in ("auto", "none"):
        return None
    try:
        return kind(value)
    except ValueError:
        raise ConfigurationError(f"{name}: {value!r} is not a number: give one, or auto.") from None
