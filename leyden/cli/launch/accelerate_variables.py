"""Sets Accelerate's variables in addition to Leyden's, so that code built on Accelerate, such as transformers' Trainer,
follows the configuration file too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leyden.cli.settings.keys import DEEPSPEED, FSDP, PRECISIONS
from leyden.cli.settings.settings import Settings
from leyden.trainer.launched import LaunchSettings

FSDP_DEFAULTS = {
    "FSDP_VERSION": 1,
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": True,
    "FSDP_OFFLOAD_PARAMS": False,
    "FSDP_MIN_NUM_PARAMS": 100_000_000,
    "FSDP_FORWARD_PREFETCH": False,
    "FSDP_USE_ORIG_PARAMS": True,
    "FSDP_SYNC_MODULE_STATES": True,
    "FSDP_ACTIVATION_CHECKPOINTING": False,
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": False,
}
"""The defaults of Accelerate's launcher; its library has other ones for unset variables."""
FSDP_NAMES = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
"""Variables whose name is not the key in capitals."""
DEEPSPEED_NAMES = {
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
}
MEGATRON_NAMES = {
    "megatron_lm_cp_degree": "MEGATRON_LM_CONTEXT_PARALLEL_SIZE",
    "megatron_lm_ep_degree": "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE",
}
LINEAR_PRECISION = ("ACCELERATE_FP8_OVERRIDE_FPROP", "ACCELERATE_FP8_OVERRIDE_DGRAD", "ACCELERATE_FP8_OVERRIDE_WGRAD")


def accelerate_variables(settings: Settings, launched: LaunchSettings, accelerator: str) -> dict[str, str]:
    """Returns the variables that Accelerate's launcher would set for the same file and flags.

    Keys that have no effect in Leyden, such as `fsdp_state_dict_type`, are set too, since Accelerate reads them.

    Args:
        settings: flags over the file.
        launched: the settings that scripts on Leyden receive.
        accelerator: cpu, cuda or xla.

    Example:
        >>> accelerate_variables(Settings(), LaunchSettings("flags", precision="bf16-mixed"), "cpu")
        {'ACCELERATE_USE_CPU': 'true', 'ACCELERATE_MIXED_PRECISION': 'bf16'}
    """
    found: dict[str, Any] = {}
    # Without it each rank on a CPU would train alone. DeepSpeed asks its own accelerator.
    if accelerator == "cpu" and settings.kind != "DEEPSPEED":
        found["ACCELERATE_USE_CPU"] = True
    if launched.precision is not None or settings.get("mixed_precision") is not None:
        words = {precision: word for word, precision in PRECISIONS.items()}
        found["ACCELERATE_MIXED_PRECISION"] = words.get(launched.precision or "", "no")
    if launched.debug:
        found["ACCELERATE_DEBUG_MODE"] = True
    if launched.precision == "fp8":
        found |= _fp8(settings.section("fp8_config"))
    found |= _compile(settings.section("dynamo_config"))
    if settings.kind == "FSDP":
        # Accelerate shards on GPUs only: on CPUs it ignores FSDP2 and raises for FSDP1.
        found |= _fsdp(settings.section("fsdp_config")) if accelerator != "cpu" else {"ACCELERATE_USE_FSDP": False}
        # If set, from_pretrained loads weights on rank 0 only, and `prepare` must send them to the others. A launch
        # cannot know that every model is prepared: a teacher that only evaluates is not, and would have no weights.
        found["FSDP_CPU_RAM_EFFICIENT_LOADING"] = False
    if settings.kind == "DEEPSPEED":
        found |= _deepspeed(settings.section("deepspeed_config"), launched)
    if settings.kind == "MEGATRON_LM":
        found |= _megatron(settings.section("megatron_lm_config"))
    elif launched.strategy == "mesh":
        found["ACCELERATE_USE_PARALLELISM_CONFIG"] = True
        axes = {**settings.section("parallelism_config"), **launched.options}
        found |= {name.upper(): value for name, value in axes.items() if name.startswith("parallelism_config_")}
    return {name: _text(value) for name, value in found.items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fsdp(section: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"ACCELERATE_USE_FSDP": True, **FSDP_DEFAULTS}
    for key in FSDP:
        if key.name in section:
            name = key.name.upper()
            found[FSDP_NAMES.get(name, name)] = section[key.name]
    return found


def _deepspeed(section: Mapping[str, Any], launched: LaunchSettings) -> dict[str, Any]:
    found: dict[str, Any] = {"ACCELERATE_USE_DEEPSPEED": True}
    for key in DEEPSPEED:
        if key.name in section and not key.without:
            found[DEEPSPEED_NAMES.get(key.name, f"ACCELERATE_DEEPSPEED_{key.name.upper()}")] = section[key.name]
    # These are resolved: an absolute path, and the numbers in DeepSpeed's own file.
    taken = {
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": launched.options.get("deepspeed_config_file"),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": launched.accumulate_grad_batches,
        "ACCELERATE_GRADIENT_CLIPPING": launched.gradient_clip_val,
    }
    return found | {name: value for name, value in taken.items() if value is not None}


def _megatron(section: Mapping[str, Any]) -> dict[str, Any]:
    named = {MEGATRON_NAMES.get(name, name.upper()): value for name, value in section.items()}
    return {"ACCELERATE_USE_MEGATRON_LM": True, **named}


def _fp8(section: Mapping[str, Any]) -> dict[str, Any]:
    found = {f"ACCELERATE_{name.upper()}": value for name, value in section.items()}
    kept = found.pop("ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION", None)
    return found | (dict(zip(LINEAR_PRECISION, kept, strict=True)) if kept else {})


def _compile(section: Mapping[str, Any]) -> dict[str, Any]:
    if section.get("dynamo_backend", "no") == "no":
        return {}
    return {f"ACCELERATE_{name.upper()}": value for name, value in section.items()} | {
        "ACCELERATE_DYNAMO_BACKEND": str(section["dynamo_backend"]).upper()
    }
