"""Adapters by peft: added to a model, and merged into a copy of it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leyden.core.errors import ConfigurationError, kind_of, needs
from leyden.strategies.base import Strategy


def plain_config(config: Any) -> dict[str, Any]:
    """Returns a configuration of peft as plain values, which a checkpoint can hold."""
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping) or "peft_type" not in values:
        raise ConfigurationError(
            f"peft_config is {kind_of(config)}: pass a configuration of peft, such as LoraConfig(r=8), or its "
            "to_dict()."
        )
    return {str(name): _plain(value) for name, value in values.items() if not name.startswith("_")}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def check_base(model: nn.Module) -> None:
    """Raises ConfigurationError for a quantized model."""
    if getattr(model, "is_quantized", False):
        raise ConfigurationError(
            "the model's weights are quantized: QLoRA is not supported. Load the model without quantization_config, "
            "for example with dtype=torch.bfloat16, and pass peft_config."
        )


def with_adapters(model: Any, config: Mapping[str, Any], is_read: bool) -> Any:
    """Returns a model with adapters, of which only these train.

    `is_read` is False if the model's weights are read later, as under a sharding strategy.

    Raises:
        ConfigurationError: if the model has adapters already; if the adapters are computed from weights that are not
            read yet.
    """
    with needs("peft", "hf", "HFModule(peft_config=…)"):
        from peft import PeftConfig, get_peft_model
    if hasattr(model, "get_base_model"):
        raise ConfigurationError("the model has adapters already: leave peft_config out.")
    if not is_read and not _is_independent(config):
        raise ConfigurationError(
            "these adapters start from the model's weights, which a sharding strategy reads after they are added. Pass "
            "the model itself: HFModule(AutoModelForCausalLM.from_pretrained(folder), peft_config=…)."
        )
    make: Any = PeftConfig.from_peft_type
    return get_peft_model(model, make(**config))


def _is_independent(config: Mapping[str, Any]) -> bool:
    """Returns True if the adapters' first values do not depend on the model's weights."""
    return (
        config["peft_type"] == "LORA"
        and config.get("init_lora_weights", True) in (True, False, "gaussian")
        and not config.get("use_dora")
        and not config.get("trainable_token_indices")
    )


def is_prompt(model: Any) -> bool:
    """Returns True for adapters that are prompts, which peft saves from the live model and not from a state dict."""
    return hasattr(model, "get_base_model") and bool(model.peft_config[model.active_adapter].is_prompt_learning)


def check_prompt(model: Any, strategy: Strategy) -> None:
    """Raises ConfigurationError if a strategy splits what learned prompts belong to."""
    kind = str(model.peft_config[model.active_adapter].peft_type.value)
    is_pipeline = strategy.outputs.are_in_parts
    # Prefix tuning learns keys and values of all heads; prompt tuning learns inputs.
    splits_heads = strategy.data_size < strategy.world_size and kind != "PROMPT_TUNING"
    if is_pipeline or splits_heads:
        raise ConfigurationError(
            f"{kind} does not work with {'a pipeline' if is_pipeline else 'tensor parallel'}, which splits the layers "
            "that the prompt belongs to. Use LoraConfig, or strategy='fsdp'."
        )


def whole_copy(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """Returns a copy of a model with adapters on the CPU, with its whole weights: the model's own may be shards."""
    from peft import get_peft_model

    base, active = model.get_base_model(), model.active_adapter
    (first, config), *others = model.peft_config.items()
    with torch.device("meta"):
        copy = get_peft_model(type(base)(base.config), config, adapter_name=first, autocast_adapter_dtype=False)
        for name, other in others:
            copy.add_adapter(name, other)
    copy.set_adapter(active)
    copy.load_state_dict({key: value.cpu() for key, value in weights.items()}, assign=True)
    _tie_alike(copy, model)
    if is_prompt(model):
        # A state dict does not hold the places of a prompt's tokens.
        copy.prompt_tokens[active] = model.prompt_tokens[active].cpu()
    if base.can_generate():
        copy.get_base_model().generation_config = base.generation_config
    return copy


def _tie_alike(copy: nn.Module, model: nn.Module) -> None:
    """Ties those parameters of a copy that are tied in the model."""
    first_names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name:
            owner, _, last = name.rpartition(".")
            setattr(copy.get_submodule(owner), last, copy.get_parameter(first))


def merged_model(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """Returns a new model on the CPU, with the adapters merged into its whole weights.

    A copy, because taking adapters out of weights again would not restore their bits.

    Raises:
        ConfigurationError: if these adapters cannot be merged, such as prompts.
    """
    if is_prompt(model) or not hasattr(model.base_model, "merge_and_unload"):
        kind = model.peft_config[model.active_adapter].peft_type.value
        raise ConfigurationError(
            f"save_pretrained(merged=True): adapters of type {kind} are no part of the weights. Save them alone, "
            "without merged."
        )
    return whole_copy(model, weights).merge_and_unload(safe_merge=True)
