"""The keys of a configuration file, named as in Accelerate, with their accepted values and their effect in Leyden."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leyden.core.errors import ConfigurationError, nearest

YES, NO = ("true", "yes", "y", "on", "1"), ("false", "no", "n", "off", "0")
FSDP_SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
NVME = ("none", "cpu", "nvme")
DYNAMO = (
    *("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt"),
    *("onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "ipex", "tvm", "hpu_backend"),
)
PRECISIONS = {"fp16": "16-mixed", "bf16": "bf16-mixed", "fp8": "fp8"}
"""Maps the values of `mixed_precision`, except "no", to precisions."""


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key of the configuration file, which is also a flag of `leyden launch`.

    Attributes:
        name: its name in the file.
        kind: `bool`, `int`, `float`, `str`, `list`, `dict`, `tuple` for three booleans, or a tuple of choices.
        help: what it does.
        without: why it has no effect here; empty if it has one.
        flag: the name of its flag if that differs; "" if it has no flag.
        older: names in older files.
        least: the smallest number allowed.
        most: the largest number allowed; only with `least`.
    """

    name: str
    kind: type | tuple[str, ...]
    help: str = ""
    without: str = ""
    flag: str | None = None
    older: tuple[str, ...] = ()
    least: float | None = None
    most: float = math.inf

    def read(self, value: Any) -> Any:
        """Converts a value to the type of the key; None stays None, which leaves the key open.

        Raises:
            ConfigurationError: if the value is invalid; says what is valid.

        Example:
            >>> ConfigKey("num_processes", int, least=1).read("2"), ConfigKey("debug", bool).read("False")
            (2, False)
            >>> ConfigKey("mixed_precision", ("no", "bf16")).read(False)  # YAML reads a bare no as false
            'no'
        """
        if value is None:
            return None
        if isinstance(value, (dict, list, set)) and self.kind not in (list, dict, tuple):
            raise self._wrong(value, "one value")
        if isinstance(self.kind, tuple):
            return self._choice(value, self.kind)
        if self.kind is bool:
            return self._truth(value)
        if self.kind is tuple:
            return self._truths(value)
        if self.kind in (int, float):
            return self._number(value)
        if self.kind is str:
            return str(value)
        if not isinstance(value, self.kind):
            raise self._wrong(value, "a list" if self.kind is list else "a section of keys")
        return value

    def _choice(self, value: Any, choices: tuple[str, ...]) -> str:
        text = "no" if value is False else str(value)
        for choice in choices:
            if choice.lower() == text.lower():
                return choice
        raise ConfigurationError(f"{self.name}: {shown(value)} is not known. {nearest(text[:99], choices)}")

    def _truth(self, value: Any) -> bool:
        text = str(value).lower()
        if text not in YES + NO:
            raise self._wrong(value, "true or false")
        return text in YES

    def _truths(self, value: Any) -> list[bool]:
        """Reads three booleans: a list, a text with commas (with or without brackets), or one value for all three."""
        parts = str(value).strip().strip("()[]").split(",") if not isinstance(value, (list, tuple)) else list(value)
        parts = [str(part).strip().lower() for part in parts]
        parts = parts * 3 if len(parts) == 1 else parts
        if len(parts) != 3 or not set(parts) <= set(YES + NO):
            raise self._wrong(value, "three booleans, such as (false, true, false)")
        return [part in YES for part in parts]

    def _number(self, value: Any) -> float | int:
        whole = self.kind is int
        try:
            if isinstance(value, bool):
                raise ValueError
            number = int(str(value)) if whole else float(value)
        except (ValueError, TypeError):
            raise self._wrong(value, "a whole number" if whole else "a number") from None
        if self.least is not None and not self.least <= number <= self.most:
            limit = f" to {self.most:.0f}" if self.most < math.inf else ""
            raise self._wrong(value, f"a {'whole ' if whole else ''}number from {self.least}{limit}")
        return number

    def _wrong(self, value: Any, wanted: str) -> ConfigurationError:
        return ConfigurationError(f"{self.name}: {shown(value)} is not {wanted}: give {wanted}.")


TYPES = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU"),
    *("MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON"),
)
_POD = "Google's own tools start pods; start `leyden launch` on each host."
_MPI = "torch's elastic agent starts the ranks, not mpirun."
_FSDP2 = "FSDP2, which is used here, "
_HOSTS = "every machine starts its own `leyden launch`."

TOP: tuple[ConfigKey, ...] = (
    ConfigKey(
        "compute_environment", ("LOCAL_MACHINE", "SLURM"), "SLURM: machines, ranks and addresses are srun's", flag=""
    ),
    ConfigKey(
        "distributed_type", (*TYPES, "TPU"), "the kind of machine, and how the model is distributed over it", flag=""
    ),
    ConfigKey("mixed_precision", ("no", *PRECISIONS), "the precision of the forward pass"),
    ConfigKey("use_cpu", bool, "run on CPUs even if there are GPUs", flag="cpu"),
    ConfigKey("debug", bool, "compare the operands of collectives over the ranks, and report a mismatch"),
    ConfigKey("num_processes", int, "ranks over all machines; one per GPU if left out", least=-1, most=1_000_000),
    ConfigKey("num_machines", int, "machines", least=1, most=1_000_000),
    ConfigKey("machine_rank", int, "the number of this machine, from 0", least=0),
    ConfigKey("main_process_ip", str, "address of machine 0"),
    ConfigKey("main_process_port", int, "port of machine 0; 0 takes a free one", least=0, most=65535),
    ConfigKey("rdzv_backend", str, "rendezvous backend: static or c10d"),
    ConfigKey("gpu_ids", str, "GPUs of this machine: all, or their numbers, such as 0,1"),
    ConfigKey("enable_cpu_affinity", bool, "bind each rank to the CPUs beside its GPU (NUMA)"),
    ConfigKey("max_restarts", int, "how many times to restart all ranks when one fails; Leyden's own key", least=0),
    ConfigKey("resume", ("auto", "no"), "auto: a Trainer continues its run, or begins it; Leyden's own key"),
    ConfigKey(
        "hang_timeout",
        str,
        "seconds that a training batch may take before the watchdog ends the job: a number, auto "
        "(10 times the slowest recent batch, at least 60) or no; Leyden's own key",
    ),
    ConfigKey("num_cpu_threads_per_process", int, "OMP_NUM_THREADS of each rank; Leyden's own key", least=1),
    ConfigKey("same_network", bool, without="the main address is used as given."),
    ConfigKey("main_training_function", str, without="the script is run as it is."),
    ConfigKey("downcast_bf16", str, without="torch_xla has dropped it: use mixed_precision: bf16."),
    ConfigKey("tpu_name", str, "the pod, in the command that tpu_use_cluster prints"),
    ConfigKey("tpu_zone", str, "the pod's zone, in that command"),
    ConfigKey("tpu_use_cluster", bool, "print the command that starts a whole pod, and start nothing"),
    ConfigKey("tpu_use_sudo", bool, "use sudo in that command"),
    ConfigKey("tpu_vm", list, without=_POD, flag=""),
    ConfigKey("tpu_env", list, "environment variables of the ranks on TPUs, each as NAME=value", flag=""),
    ConfigKey("command_file", str, without=_POD, flag=""),
    ConfigKey("tpu_config_file", str, without=_POD, flag=""),
    ConfigKey("commands", list, without=_POD, flag=""),
    ConfigKey("mpirun_config", dict, without=_MPI, flag=""),
    ConfigKey("ipex_config", dict, without="torch itself now has what Intel's extension did.", flag=""),
)

FSDP: tuple[ConfigKey, ...] = (
    ConfigKey(
        "fsdp_sharding_strategy", FSDP_SHARDINGS, "what is sharded, and over which ranks", older=("sharding_strategy",)
    ),
    ConfigKey(
        "fsdp_auto_wrap_policy",
        ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        "how modules are grouped for sharding",
    ),
    ConfigKey(
        "fsdp_transformer_layer_cls_to_wrap",
        str,
        "classes of the modules to group, separated by commas",
        older=("transformer_layer_cls_to_wrap",),
    ),
    ConfigKey(
        "fsdp_min_num_params", int, "parameters per group, for SIZE_BASED_WRAP", older=("min_num_params",), least=0
    ),
    ConfigKey("fsdp_offload_params", bool, "keep parameters on the CPU between uses", older=("offload_params",)),
    ConfigKey("fsdp_activation_checkpointing", bool, "recompute activations in backward"),
    ConfigKey("fsdp_activation_checkpointing_offload", bool, without="saved activations stay on the device."),
    ConfigKey("fsdp_ignored_modules", str, without="pass the modules themselves to FSDPStrategy(ignored_modules=…)."),
    ConfigKey("fsdp_reshard_after_forward", str, "free gathered parameters after forward (true, false, FULL_SHARD, …)"),
    ConfigKey("fsdp_sync_module_states", bool, "start every rank with rank 0's weights"),
    ConfigKey(
        "fsdp_cpu_ram_efficient_loading", bool, without="every rank reads the weights itself in from_pretrained."
    ),
    ConfigKey(
        "fsdp_state_dict_type",
        ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
        without="checkpoints are sharded and load on any number of ranks; `leyden merge` writes one file.",
    ),
    ConfigKey(
        "fsdp_backward_prefetch",
        ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        without=f"{_FSDP2}prefetches automatically.",
        older=("fsdp_backward_prefetch_policy", "backward_prefetch_policy", "backward_prefetch"),
    ),
    ConfigKey("fsdp_forward_prefetch", bool, "prefetch the next group in forward too"),
    ConfigKey("fsdp_use_orig_params", bool, without=f"{_FSDP2}always keeps the original parameters."),
    ConfigKey("fsdp_version", int, without="this is always FSDP2.", least=1),
)
DEEPSPEED: tuple[ConfigKey, ...] = (
    ConfigKey(
        "zero_stage", int, "what is sharded: 1 optimizer state, 2 also gradients, 3 also parameters", least=0, most=3
    ),
    ConfigKey("gradient_accumulation_steps", str, "batches per optimizer step"),
    ConfigKey("gradient_clipping", str, "largest norm of the gradients"),
    ConfigKey("offload_optimizer_device", NVME, "where optimizer state is offloaded to"),
    ConfigKey("offload_param_device", NVME, "where parameters are offloaded to"),
    ConfigKey("offload_optimizer_nvme_path", str, "folder on the NVMe disk for optimizer state"),
    ConfigKey("offload_param_nvme_path", str, "folder on the NVMe disk for parameters"),
    ConfigKey("zero3_init_flag", bool, "build the model sharded"),
    ConfigKey("zero3_save_16bit_model", bool, "save 16-bit weights too"),
    ConfigKey("deepspeed_config_file", str, "DeepSpeed's own JSON file"),
    ConfigKey("deepspeed_moe_layer_cls_names", str, "classes of mixture-of-experts layers, separated by commas"),
    ConfigKey("deepspeed_hostfile", str, without=_HOSTS),
    ConfigKey("deepspeed_exclusion_filter", str, without=_HOSTS),
    ConfigKey("deepspeed_inclusion_filter", str, without=_HOSTS),
    ConfigKey("deepspeed_multinode_launcher", str, without=_HOSTS),
)
_NO_SP = "sequences are divided without DeepSpeed, in torch's attention."
_LENGTHS = "sequences may have any length that 2 · sp_size · tp_size divides."
_SIZES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "sp", "ep")
PARALLELISM: tuple[ConfigKey, ...] = (
    *(ConfigKey(f"parallelism_config_{name}_size", int, f"ranks of the {name} axis", least=1) for name in _SIZES),
    ConfigKey(
        "parallelism_config_cp_comm_strategy", ("allgather", "alltoall"), "how keys and values reach other ranks"
    ),
    ConfigKey("parallelism_config_cp_backend", str, without="there is one, torch."),
    ConfigKey("parallelism_config_sp_backend", str, without=_NO_SP),
    ConfigKey("parallelism_config_sp_seq_length", int, without=_LENGTHS, least=1),
    ConfigKey("parallelism_config_sp_seq_length_is_variable", bool, without=_LENGTHS),
    ConfigKey("parallelism_config_sp_attn_implementation", str, without=_NO_SP),
)
_DEGREES: dict[str, tuple[str, ...]] = {
    "tp": (),
    "pp": (),
    "cp": ("megatron_lm_context_parallel_size",),
    "ep": ("megatron_lm_expert_model_parallel_size",),
}
MEGATRON: tuple[ConfigKey, ...] = (
    *(
        ConfigKey(f"megatron_lm_{name}_degree", int, f"ranks of the {name} axis", older=older, least=1)
        for name, older in _DEGREES.items()
    ),
    ConfigKey("megatron_lm_num_micro_batches", int, "micro-batches per batch of a pipeline", least=1),
    ConfigKey(
        "megatron_lm_sequence_parallelism",
        bool,
        without="the model's plan says what is split along the sequence, by the style 'sequence'.",
    ),
    ConfigKey("megatron_lm_recompute_activations", bool, "recompute activations in backward"),
    ConfigKey("megatron_lm_use_distributed_optimizer", bool, "shard optimizer state"),
    ConfigKey("megatron_lm_gradient_clipping", float, "largest norm of the gradients", least=0),
)
FP8: tuple[ConfigKey, ...] = (
    ConfigKey("fp8_backend", ("TE", "MSAMP", "AO"), "the library that computes in fp8", older=("backend",)),
    ConfigKey("fp8_use_autocast_during_eval", bool, "use fp8 in evaluation too", older=("use_autocast_during_eval",)),
    ConfigKey("fp8_margin", int, "margin of the scaling factor", older=("margin",)),
    ConfigKey("fp8_interval", int, "steps between updates of the scaling factor", older=("interval",)),
    ConfigKey("fp8_format", ("HYBRID", "E4M3", "E5M2"), "number format in forward and backward"),
    ConfigKey(
        "fp8_amax_history_len",
        int,
        "length of the history of maxima, in steps",
        older=("amax_history_len", "amax_history_length"),
    ),
    ConfigKey(
        "fp8_amax_compute_algo",
        ("max", "most_recent"),
        "how the maximum is chosen from the history",
        older=("amax_compute_algo", "amax_compute_algorithm"),
    ),
    ConfigKey(
        "fp8_override_linear_precision",
        tuple,
        without="set the recipe in the script.",
        older=("override_linear_precision",),
    ),
    ConfigKey(
        "fp8_opt_level",
        ("O1", "O2"),
        without="MS-AMP is no longer maintained.",
        older=("optimization_level", "opt_level"),
    ),
    ConfigKey(
        "fp8_enable_fsdp_float8_all_gather", bool, "gather parameters in fp8", older=("enable_fsdp_float8_all_gather",)
    ),
    ConfigKey(
        "fp8_pad_inner_dim", bool, "pad the inner dimension to the hardware's multiple", older=("pad_inner_dim",)
    ),
)
COMPILE: tuple[ConfigKey, ...] = (
    ConfigKey("dynamo_backend", DYNAMO, "compile the model with torch.compile and this backend"),
    ConfigKey("dynamo_mode", ("default", "reduce-overhead", "max-autotune"), "torch.compile's mode"),
    ConfigKey("dynamo_use_dynamic", bool, "compile for any shape"),
    ConfigKey("dynamo_use_fullgraph", bool, "raise on a graph break"),
    ConfigKey(
        "dynamo_use_regional_compilation",
        bool,
        without="use FSDPStrategy(compile=True), which compiles block by block.",
    ),
)
FAMILIES: dict[str, tuple[ConfigKey, ...]] = {
    "fsdp_config": FSDP,
    "deepspeed_config": DEEPSPEED,
    "parallelism_config": PARALLELISM,
    "megatron_lm_config": MEGATRON,
    "fp8_config": FP8,
    "dynamo_config": COMPILE,
}
KEYS = {key.name: key for keys in (TOP, *FAMILIES.values()) for key in keys}
SECTIONS = {key.name: section for section, keys in FAMILIES.items() for key in keys}
"""Maps each key in a section to the name of the section."""
OLDER_TYPES = {
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "use_ddp": "",
    "use_parallelism_config": "",
    "use_tp": "",
}
"""Switches of older files, with the distributed_type that they stand for. Empty if the hardware decides the type."""


def shown(value: Any) -> str:
    """Formats any value for a message, even a list that contains itself or a number with thousands of digits.

    Example:
        >>> shown("bf61"), shown([1, [2, [3]]])
        ("'bf61'", '[1, [2, [3]]]')
    """
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number with thousands of digits"


def read_section(keys: tuple[ConfigKey, ...], found: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Reads the values of one level of the file. Older names of keys become current ones.

    Args:
        keys: the keys allowed there.
        found: the entries of the file.
        section: the section's name, for errors.

    Raises:
        ConfigurationError: for an unknown key or an invalid value; suggests the nearest.
    """
    names = {name: key for key in keys for name in (key.name, *key.older)}
    values: dict[str, Any] = {}
    for name, value in found.items():
        key = names.get(name) if isinstance(name, str) else None
        if key is None:
            raise _unknown(name, [key.name for key in keys], section)
        if key.name == "fsdp_sharding_strategy":
            # Older files number these, from 1.
            numbered = {str(number): sharding for number, sharding in enumerate(FSDP_SHARDINGS, 1)}
            value = numbered.get(shown(value).strip("'"), value)
        values[key.name] = key.read(value)
    return values


def _unknown(name: Any, known: list[str], section: str) -> ConfigurationError:
    """Builds the error for an unknown key in a section, or at the top level (""), where it may belong to a section."""
    if section:
        return ConfigurationError(f"{section}: the key {shown(name)} is not known. {nearest(shown(name), known)}")
    for family, keys in FAMILIES.items():
        if any(name in (key.name, *key.older) for key in keys):
            return ConfigurationError(f"the key {name!r} belongs in the section {family}: indent it there.")
    text = name[:99] if isinstance(name, str) else shown(name)
    return ConfigurationError(f"the key {shown(name)} is not known. {nearest(text, [*known, *FAMILIES, *OLDER_TYPES])}")
