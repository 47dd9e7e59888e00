"""Translates arguments of FSDP1, Accelerate's YAML and Lightning's FSDPStrategy into Leyden's.

Each argument is either translated or refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.fsdp import MixedPrecisionPolicy

from leyden.core.errors import ConfigurationError, nearest

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""In the order of Accelerate's numbers for them, which start at 1."""
SIZE_BASED = 100_000_000
"""Default minimum number of parameters per group under Accelerate's and FSDP1's size-based policy."""
REFUSED = {
    "process_group": "lay out the ranks by device_mesh=(replicate, shard)",
    "param_init_fn": "build the module in configure_model or trainer.init_module(), which keep its initial values",
    "device_id": "set the Trainer's accelerator and devices",
    "ignored_states": "use ignored_modules",
    "ignored_parameters": "use ignored_modules",
    "mixed_precision_policy": "use the Trainer's precision, or mp_policy=MixedPrecisionPolicy(…)",
}
"""Arguments without a counterpart → what to do instead."""
Settings = dict[str, Any]


class Translation:
    """Translates old names and values into FSDPStrategy's arguments.

    Args:
        settings: FSDPStrategy's arguments, updated in place. Some of their values may be in an old form.
        old: arguments under old names, with or without Accelerate's prefix `fsdp_`.

    Raises:
        ConfigurationError: for an unknown or unsupported name or value; gives the reason and a replacement.
    """

    def __init__(self, settings: Settings, old: Mapping[str, Any]) -> None:
        self.settings = settings
        self.notes: list[str] = []
        """Warnings about what FSDP2 does differently. None of it changes the training's numbers."""
        self.old = {name.removeprefix("fsdp_"): value for name, value in old.items()}
        for name in list(self.old):
            if name in settings:
                settings[name] = self.old.pop(name)
        for name in self.old:
            if name in REFUSED:
                raise ConfigurationError(f"{name}= has no counterpart in FSDP2: {REFUSED[name]}.")
            if name not in HANDLERS and name not in TAKEN:
                known = (*settings, *HANDLERS, *TAKEN, "devices", "num_nodes", "timeout", "process_group_backend")
                raise ConfigurationError(f"FSDPStrategy has no argument {name!r}. {nearest(name, known)}")
        self._wrapping()
        for name, value in self.old.items():
            if name in HANDLERS:
                HANDLERS[name](self, value)
        self._plain_values()

    def _wrapping(self) -> None:
        policy = self.settings["auto_wrap_policy"]
        classes, least = self.old.get("transformer_layer_cls_to_wrap"), self.old.get("min_num_params")
        if isinstance(classes, str):
            classes = {name.strip() for name in classes.split(",") if name.strip()}
        kind = policy.upper() if isinstance(policy, str) else ""
        if kind == "NO_WRAP":
            self.settings["auto_wrap_policy"] = None
        elif kind == "SIZE_BASED_WRAP":
            self.settings["auto_wrap_policy"] = int(least) if least else SIZE_BASED
        elif kind == "TRANSFORMER_BASED_WRAP" or (kind == "AUTO" and classes):
            self.settings["auto_wrap_policy"] = classes or "auto"
        elif kind == "AUTO" and least:
            self.settings["auto_wrap_policy"] = int(least)

    def _plain_values(self) -> None:
        """Converts YAML strings and FSDP1 objects given under names that FSDPStrategy uses too."""
        settings = self.settings
        reshard, offload = settings["reshard_after_forward"], settings["cpu_offload"]
        if isinstance(reshard, str) and reshard.upper() in STRATEGIES:
            settings["reshard_after_forward"] = None
            self.strategy(reshard)
        elif isinstance(reshard, str):
            settings["reshard_after_forward"] = _flag("reshard_after_forward", reshard)
        if isinstance(offload, str) or hasattr(offload, "offload_params"):
            settings["cpu_offload"] = _flag("cpu_offload", getattr(offload, "offload_params", offload))
        for name in ("sync_module_states", "forward_prefetch"):
            settings[name] = _flag(name, settings[name])

    def strategy(self, value: Any) -> None:
        """Handles `sharding_strategy`: a name such as FULL_SHARD, a number from 1, or torch's ShardingStrategy."""
        name = str(getattr(value, "name", value)).upper().removeprefix("_")
        if name.isdigit() and 1 <= int(name) <= len(STRATEGIES):
            name = STRATEGIES[int(name) - 1]
        if name not in STRATEGIES:
            raise ConfigurationError(f"sharding_strategy={value!r} is not known. {nearest(name, STRATEGIES)}")
        if name == "NO_SHARD":
            raise ConfigurationError(
                "sharding_strategy='NO_SHARD' shards nothing, and FSDP2 has no such mode: use strategy='ddp'."
            )
        if name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
            self._set("reshard_after_forward", False, f"sharding_strategy={name!r}")
        if name.startswith("HYBRID") and self.settings["device_mesh"] is None:
            self.settings["device_mesh"] = "auto"

    def _set(self, name: str, value: Any, by: str) -> None:
        if self.settings[name] not in (None, value):
            raise ConfigurationError(f"{by} and {name}={self.settings[name]!r} contradict each other: use one of them.")
        self.settings[name] = value

    def backward_prefetch(self, value: Any) -> None:
        name = str(getattr(value, "name", value)).upper()
        if name not in ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "NONE"):
            raise ConfigurationError(
                f"backward_prefetch={value!r} is not known. "
                f"{nearest(name, ('BACKWARD_PRE', 'BACKWARD_POST', 'NO_PREFETCH'))}"
            )
        if name in ("BACKWARD_POST", "NO_PREFETCH"):
            self.notes.append(
                f"{name}: FSDP2 gathers the next group before it computes the current one's gradients, as under "
                "BACKWARD_PRE"
            )

    def state_dict_type(self, value: Any) -> None:
        name = str(getattr(value, "name", value)).upper().removesuffix("_STATE_DICT")
        if name == "LOCAL":
            raise ConfigurationError(
                "state_dict_type='LOCAL_STATE_DICT' saves FSDP1's flat shards, which FSDP2 does not have: use "
                "'sharded', whose checkpoints load on any number of ranks."
            )
        if name not in ("FULL", "SHARDED"):
            raise ConfigurationError(
                f"state_dict_type={value!r} is not known. {nearest(str(value).lower(), ('full', 'sharded'))}"
            )
        if name == "FULL":
            self.notes.append(
                "FULL_STATE_DICT: checkpoints are sharded and load on any layout. strategy.full_state_dict(module) "
                "returns unsharded tensors"
            )

    def use_orig_params(self, value: Any) -> None:
        if not _flag("use_orig_params", value):
            self.notes.append("use_orig_params=False: FSDP2 has no flat parameters. Each keeps its name and shape")

    def limit_all_gathers(self, value: Any) -> None:
        if not _flag("limit_all_gathers", value):
            self.notes.append("limit_all_gathers=False has no effect: FSDP2 bounds its memory without such a limit")

    def offload_params(self, value: Any) -> None:
        self.settings["cpu_offload"] = _flag("offload_params", value)

    def efficient_loading(self, value: Any) -> None:
        syncs = _flag("sync_module_states", self.settings["sync_module_states"])
        if _flag("cpu_ram_efficient_loading", value) and not syncs:
            raise ConfigurationError(
                "cpu_ram_efficient_loading=True loads the weights on rank 0 only, and sync_module_states=False keeps "
                "them from the other ranks: set sync_module_states=True."
            )

    def activation_checkpointing(self, value: Any) -> None:
        wanted = _flag("activation_checkpointing", value) if isinstance(value, (str, bool)) else value
        self._set("activation_checkpointing_policy", wanted or None, "activation_checkpointing")

    def version(self, value: Any) -> None:
        if str(value) not in ("1", "2"):
            raise ConfigurationError(f"fsdp_version={value!r}: use 1 or 2. Both run FSDP2.")
        if str(value) == "1":
            self.notes.append("fsdp_version=1: FSDP2 runs instead, with the same numbers")

    def mixed_precision(self, value: Any) -> None:
        buffers = getattr(value, "buffer_dtype", None)
        if buffers is not None and buffers != getattr(value, "param_dtype", None):
            raise ConfigurationError(
                f"mixed_precision with buffer_dtype={buffers}: FSDP2 does not convert buffers. Convert them in the "
                "module."
            )
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(value, "param_dtype", None), reduce_dtype=getattr(value, "reduce_dtype", None)
        )
        self._set("mp_policy", value if isinstance(value, MixedPrecisionPolicy) else policy, "mixed_precision")


TAKEN = ("transformer_layer_cls_to_wrap", "min_num_params")
HANDLERS: dict[str, Callable[[Translation, Any], None]] = {
    "sharding_strategy": Translation.strategy,
    "backward_prefetch": Translation.backward_prefetch,
    "backward_prefetch_policy": Translation.backward_prefetch,
    "state_dict_type": Translation.state_dict_type,
    "use_orig_params": Translation.use_orig_params,
    "limit_all_gathers": Translation.limit_all_gathers,
    "offload_params": Translation.offload_params,
    "cpu_ram_efficient_loading": Translation.efficient_loading,
    "activation_checkpointing": Translation.activation_checkpointing,
    "version": Translation.version,
    "mixed_precision": Translation.mixed_precision,
}


def _flag(name: str, value: Any) -> bool:
    """Returns the boolean that a YAML file or the command line spells."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("true", "yes", "1"):
        return True
    if word in ("false", "no", "0", "none", ""):
        return False
    raise ConfigurationError(f"{name}={value!r}: use true or false.")
