"""Arguments of FSDP1, Lightning and Accelerate: each is mapped to FSDP2's or refused with the reason."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, StateDictType

from leyden.core.errors import ConfigurationError
from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy


def settings(**given: Any) -> dict[str, Any]:
    """Returns the settings that differ from the defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = FSDPStrategy(**given).settings
    plain = FSDPStrategy().settings
    return {name: value for name, value in found.items() if value != plain[name]}


def test_every_argument_is_a_setting() -> None:
    assert set(FSDPStrategy().settings) == set(inspect.signature(FSDPStrategy).parameters) - {"kwargs"}


HYBRID_2 = ShardingStrategy._HYBRID_SHARD_ZERO2
MAPPED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"sharding_strategy": "FULL_SHARD"}, {}),
    ({"sharding_strategy": 1}, {}),
    ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, {"reshard_after_forward": False}),
    ({"sharding_strategy": "2"}, {"reshard_after_forward": False}),
    ({"sharding_strategy": "HYBRID_SHARD"}, {"device_mesh": "auto"}),
    ({"sharding_strategy": HYBRID_2}, {"device_mesh": "auto", "reshard_after_forward": False}),
    ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 4)}, {"device_mesh": (2, 4)}),
    ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}),
    ({"fsdp_reshard_after_forward": "true"}, {"reshard_after_forward": True}),
    ({"fsdp_offload_params": "true"}, {"cpu_offload": True}),
    ({"fsdp_offload_params": False}, {}),
    ({"cpu_offload": CPUOffload(offload_params=True)}, {"cpu_offload": True}),
    ({"fsdp_auto_wrap_policy": "NO_WRAP"}, {"auto_wrap_policy": None}),
    ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, {"auto_wrap_policy": 100_000_000}),
    ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000}, {"auto_wrap_policy": 2000}),
    ({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, {}),
    (
        {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "Block, Other"},
        {"auto_wrap_policy": {"Block", "Other"}},
    ),
    ({"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}, {}),
    ({"fsdp_backward_prefetch_policy": "BACKWARD_PRE"}, {}),
    ({"state_dict_type": "sharded"}, {}),
    ({"fsdp_state_dict_type": StateDictType.SHARDED_STATE_DICT}, {}),
    ({"fsdp_forward_prefetch": "true"}, {"forward_prefetch": True}),
    ({"fsdp_use_orig_params": "true", "limit_all_gathers": True, "fsdp_version": 2}, {}),
    ({"fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": "true"}, {}),
    ({"fsdp_activation_checkpointing": True}, {"activation_checkpointing_policy": True}),
    ({"activation_checkpointing": [nn.Linear]}, {"activation_checkpointing_policy": [nn.Linear]}),
]


@pytest.mark.parametrize(("given", "expected"), MAPPED, ids=range(len(MAPPED)))
def test_fsdp1_arguments_map_to_fsdp2_settings(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert settings(**given) == expected


def test_fsdp1_mixed_precision_maps_to_a_policy() -> None:
    policy = settings(mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))["mp_policy"]
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(ConfigurationError, match="FSDP2 does not convert buffers"):
        FSDPStrategy(mixed_precision=MixedPrecision(torch.bfloat16, buffer_dtype=torch.float16))


@pytest.mark.parametrize(
    ("given", "note"),
    [
        ({"fsdp_backward_prefetch": "NO_PREFETCH"}, "as under BACKWARD_PRE"),
        ({"fsdp_state_dict_type": "FULL_STATE_DICT"}, r"strategy.full_state_dict\(module\) returns unsharded tensors"),
        ({"fsdp_use_orig_params": False}, "no flat parameters"),
        ({"limit_all_gathers": "false"}, "without such a limit"),
        ({"fsdp_version": 1}, "FSDP2 runs instead"),
    ],
)
def test_fsdp1_arguments_without_effect_warn(given: dict[str, Any], note: str) -> None:
    with pytest.warns(UserWarning, match=note):
        FSDPStrategy(**given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"sharding_strategy": "NO_SHARD"}, "use strategy='ddp'"),
        ({"sharding_strategy": "FULL_SHRAD"}, "Did you mean 'FULL_SHARD'"),
        ({"sharding_strategy": 6}, "sharding_strategy=6 is not known"),
        ({"sharding_strategy": 2, "reshard_after_forward": True}, "contradict each other"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "flat shards, which FSDP2 does not have"),
        ({"state_dict_type": "whole"}, "state_dict_type='whole' is not known"),
        ({"backward_prefetch": "BACKWARD_PER"}, "Did you mean 'BACKWARD_PRE'"),
        ({"fsdp_cpu_ram_efficient_loading": True, "sync_module_states": "false"}, "set sync_module_states=True"),
        ({"param_init_fn": print}, "has no counterpart in FSDP2: build the module in configure_model"),
        ({"process_group": 1}, r"device_mesh=\(replicate, shard\)"),
        ({"device_id": 0}, "accelerator and devices"),
        ({"fsdp_version": 3}, "use 1 or 2"),
        ({"fsdp_offload_params": "perhaps"}, "use true or false"),
        ({"fsdp_shading_strategy": 1}, "has no argument 'shading_strategy'. Did you mean 'sharding_strategy'"),
        ({"auto_wrap_policies": 1}, "Did you mean 'auto_wrap_policy'"),
    ],
)
def test_fsdp1_arguments_without_a_counterpart_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        FSDPStrategy(**given)


def test_from_accelerate_reads_an_accelerate_config() -> None:
    """The keys that `accelerate config` writes."""
    config = {
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_forward_prefetch": False,
        "fsdp_offload_params": False,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_use_orig_params": True,
    }
    strategy = FSDPStrategy.from_accelerate(config, devices=["cpu"])
    assert strategy.settings["auto_wrap_policy"] == {"Block"} and strategy.settings["reshard_after_forward"] is False
    assert strategy.name == "fsdp"
