"""Chooses the strategy for a launch: FSDP, a mesh, DeepSpeed's ZeRO, or Megatron-LM's layout on a mesh."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

from leyden.cli.settings.settings import Settings
from leyden.core.errors import ConfigurationError
from leyden.strategies.deepspeed.config import ZeroConfig
from leyden.strategies.mesh.layout import Layout, check_rotation, sequence_ranks

MESH = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
"""The dimensions of a mesh that a launch supports."""
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


def chosen_strategy(settings: Settings, ranks: int) -> StrategyChoice:
    """Returns the strategy of a launch.

    Args:
        settings: flags over the file.
        ranks: on all machines.

    Raises:
        ConfigurationError: for settings that contradict each other, do not fit the ranks, or ask for what this version
            does not have.
    """
    if settings.kind == "DEEPSPEED":
        for name, divided in {"cp": "sequences", "sp": "sequences", "ep": "experts"}.items():
            size = settings.section("parallelism_config").get(f"parallelism_config_{name}_size", 1)
            if size > 1:
                raise ConfigurationError(
                    f"parallelism_config_{name}_size: {size} with distributed_type: DEEPSPEED: {divided} are divided "
                    "on a mesh, without DeepSpeed's engine. Use distributed_type: FSDP, or leave it out."
                )
        return _zero(settings)
    if settings.kind == "MEGATRON_LM":
        return _megatron(settings, ranks)
    if settings.kind == "XLA":
        # One rank drives all devices of its machine.
        return StrategyChoice("xla" if ranks == 1 else "xla_ddp")
    # The strategies read the file's own names.
    options = settings.effective("fsdp_config") if settings.kind == "FSDP" else {}
    is_whole = settings.kind != "FSDP" or options.get("fsdp_sharding_strategy") == "NO_SHARD"
    layout = _layout(settings, ranks, is_whole)
    if layout is not None and max(layout.tp, layout.pp, layout.cp, layout.dp_shard) > 1:
        sizes = {f"parallelism_config_{name}_size": size for name, size in layout.sizes.items()}
        if settings.section("parallelism_config").get("parallelism_config_sp_size", 1) > 1:
            sizes |= {"parallelism_config_sp_size": layout.cp, "parallelism_config_cp_size": 1}
        if layout.ep > 1:
            sizes["parallelism_config_ep_size"] = layout.ep
        return StrategyChoice("mesh", {**options, **sizes})
    if settings.kind == "FSDP":
        return StrategyChoice("ddp") if is_whole else StrategyChoice("fsdp", options)
    return StrategyChoice("ddp" if layout is not None else None)


def _layout(settings: Settings, ranks: int, is_whole: bool) -> Layout | None:
    """Returns the mesh with the file's sizes, or None if all sizes are 1.

    Ranks that no size mentions hold copies if `is_whole`, and else shard the model.

    Raises:
        ConfigurationError: for sizes that do not make up the ranks, and dimensions that this version does not have.
    """
    section = settings.section("parallelism_config")
    sizes = {name: section.get(f"parallelism_config_{name}_size") for name in (*MESH, "sp", "ep")}
    given = {name: size for name, size in sizes.items() if size is not None}
    if math.prod(given.values()) == 1:
        return None
    # Experts are divided over ranks that shard the model. NO_SHARD forbids it.
    shards = settings.kind != "FSDP" and given.get("ep", 1) > 1 and "dp_shard" not in given
    filled = "dp_replicate" if is_whole and not shards else "dp_shard"
    try:
        check_rotation(section.get("parallelism_config_cp_comm_strategy", "allgather"))
        given["cp"], _ = sequence_ranks(given.get("cp", 1), given.pop("sp", 1))
        return Layout(**{"dp_replicate": 1, "dp_shard": 1, filled: -1, **given}).filled(ranks)
    except ConfigurationError as error:
        raise ConfigurationError(f"parallelism_config: {error}") from None


def _zero(settings: Settings) -> StrategyChoice:
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
    """Reads a number; returns None for "auto", which leaves it open in DeepSpeed."""
    if value is None or str(value).lower() in ("auto", "none"):
        return None
    try:
        return kind(value)
    except ValueError:
        raise ConfigurationError(f"{name}: {value!r} is not a number: give one, or auto.") from None


def _megatron(settings: Settings, ranks: int) -> StrategyChoice:
    """Returns the mesh that `megatron_lm_config` describes.

    tp_degree and pp_degree split layers and cut the model into stages. The other ranks see different samples: they
    shard the model where Megatron-LM would shard its optimizer's state (`use_distributed_optimizer`), else they hold
    copies. With ep_degree, at least the ranks that divide experts shard the model too.

    Raises:
        ConfigurationError: for degrees that do not divide the ranks, or that this version does not have.
    """
    section = settings.section("megatron_lm_config")
    degrees = {name: int(section.get(f"megatron_lm_{name}_degree") or 1) for name in ("tp", "pp", "cp", "ep")}
    model = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if ranks % model:
        named = [f"megatron_lm_{name}_degree: {degrees[name]}" for name in ("tp", "pp", "cp")]
        raise ConfigurationError(
            f"{', '.join(named)} share a model among {model} ranks, which do not divide {ranks}: change them, or "
            "num_processes."
        )
    shards = bool(section.get("megatron_lm_use_distributed_optimizer"))
    recomputes = bool(section.get("megatron_lm_recompute_activations"))
    norm = section.get("megatron_lm_gradient_clipping")
    if model * degrees["ep"] == 1 and not (shards or recomputes):
        return StrategyChoice("ddp", norm=norm)
    data, least = ranks // model, degrees["ep"] // math.gcd(degrees["ep"], degrees["cp"])
    if data % least:
        raise ConfigurationError(
            f"megatron_lm_ep_degree: {degrees['ep']} does not divide the {data * degrees['cp']} ranks that see "
            "different tokens: change it, or num_processes."
        )
    sizes = {**degrees, "dp_shard": data if shards else least, "dp_replicate": 1 if shards else data // least}
    # Sizes that do not go together raise here, and not on the ranks.
    Layout(**sizes)
    options: dict[str, Any] = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    if degrees["pp"] > 1 and section.get("megatron_lm_num_micro_batches"):
        options["microbatches"] = int(section["megatron_lm_num_micro_batches"])
    if recomputes:
        options["activation_checkpointing_policy"] = True
    return StrategyChoice("mesh", options, norm=norm)
