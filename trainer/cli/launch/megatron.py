"""A launch of Megatron-LM's settings: the same layout of ranks, on a mesh of Leyden's own."""

from __future__ import annotations

from typing import Any

from leyden.strategies.errors import ConfigurationError
from leyden.trainer.cli.launch.zero import StrategyChoice
from leyden.trainer.cli.settings.settings import Settings

SECTION = "megatron_lm_config"
ABSENT = {"cp": "context", "ep": "expert"}


def mesh_of(settings: Settings, ranks: int) -> StrategyChoice:
    """The mesh that `megatron_lm_config` describes.

    tp_degree and pp_degree split layers and cut the model into stages. The other ranks see different samples: they
    shard the model where Megatron-LM would shard its optimizer's state (`use_distributed_optimizer`), else they hold
    copies.

    Args:
        settings: flags over the file.
        ranks: on all machines.

    Raises:
        ConfigurationError: for degrees that do not divide the ranks, or that this version does not have.
    """
    section = settings.section(SECTION)
    degrees = {name: int(section.get(f"megatron_lm_{name}_degree") or 1) for name in ("tp", "pp", *ABSENT)}
    for name, kind in ABSENT.items():
        if degrees[name] > 1:
            raise ConfigurationError(
                f"megatron_lm_{name}_degree: {degrees[name]}: {kind} parallelism is not part of this version. Leave it "
                "out."
            )
    model = degrees["tp"] * degrees["pp"]
    if ranks % model:
        raise ConfigurationError(
            f"megatron_lm_tp_degree: {degrees['tp']} and megatron_lm_pp_degree: {degrees['pp']} share a model among "
            f"{model} ranks, which do not divide {ranks}: change them, or num_processes."
        )
    shards = bool(section.get("megatron_lm_use_distributed_optimizer"))
    recomputes = bool(section.get("megatron_lm_recompute_activations"))
    norm = section.get("megatron_lm_gradient_clipping")
    if model == 1 and not (shards or recomputes):
        return StrategyChoice("ddp", norm=norm)
    sizes = {"tp": degrees["tp"], "pp": degrees["pp"], "dp_shard": 1, "dp_replicate": 1}
    sizes["dp_shard" if shards else "dp_replicate"] = ranks // model
    options: dict[str, Any] = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    if degrees["pp"] > 1 and section.get("megatron_lm_num_micro_batches"):
        options["microbatches"] = int(section["megatron_lm_num_micro_batches"])
    if recomputes:
        options["activation_checkpointing_policy"] = True
    return StrategyChoice("mesh", options, norm=norm)
