"""The DeepSpeed config of a run: built from a dict or file and plain arguments, then completed for DeepSpeed."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.core.errors import ConfigurationError, kind_of, nearest
from leyden.core.paths import local_path
from leyden.strategies.base import RunSettings

if TYPE_CHECKING:
    from torch.optim import Optimizer

SECTIONS = {
    "zero_optimization": """
        stage overlap_comm contiguous_gradients allgather_partitions reduce_scatter round_robin_gradients
        allgather_bucket_size reduce_bucket_size sub_group_size ignore_unused_parameters
        stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters
        stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save""",
    "fp16": "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale",
    "activation_checkpointing": """
        partition_activations cpu_checkpointing contiguous_memory_optimization synchronize_checkpoint_boundary""",
    "aio": "block_size queue_depth single_submit overlap_events thread_count",
}
SUPPORTED = ("32-true", "16-mixed", "16-true", "bf16-mixed", "bf16-true")
"""The precisions that an engine can compute in."""
ARGUMENTS = {
    **{name: f"{section}.{name}" for section, names in SECTIONS.items() for name in names.split()},
    **{name: name for name in ("zero_allow_untested_optimizer", "communication_data_type", "steps_per_print")},
}
"""Plain argument -> path in DeepSpeed's config."""

OFFLOADS = {"offload_optimizer": "optimizer", "offload_parameters": "param"}
"""Argument -> name of the offloaded part in DeepSpeed's config."""
DEFAULTS = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
"""Defaults unless the config sets these keys: by itself, DeepSpeed rejects most custom optimizers."""

OWN_RANKS = ("tensor_parallel", "sequence_parallel_size", "data_parallel_size", "expert_parallel", "pipeline")
"""Sections that would make ranks something other than data-parallel replicas."""

ADAM = ("adam", "adamw")
KEYS = (
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    | {"optimizer", "scheduler", "fp16", "bf16", "bfloat16", "torch_autocast", "data_types"}
    | {"communication_data_type", "zero_optimization", "aio", "checkpoint", "zero_allow_untested_optimizer"}
    | {"zero_force_ds_cpu_optimizer", "activation_checkpointing", "sparse_gradients", "steps_per_print"}
    | {"prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "managed_gradient_accumulation"}
    | {"disable_allgather", "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler"}
    | {"comms_logger", "tensorboard", "wandb", "csv_monitor", "data_efficiency", "curriculum_learning"}
    | {"dataloader_drop_last", "compile", "hybrid_engine", "autotuning", "elasticity"}
)
"""Top-level keys of DeepSpeed's config. DeepSpeed ignores other keys, which may belong to a later version. A key that
resembles one of these is treated as a typo.
"""

WHOLE_PARAMETERS = frozenset({"adafactor", "lamb", "lars", "muon", "shampoo", "soap"})
"""Lower-case names of optimizers whose step is not element-wise."""


class ZeroConfig:
    """DeepSpeed settings from a config dict or file and additional plain arguments.

    Finds every contradiction: within the settings in the constructor, with the run's settings in `check`, and with
    precision, device and optimizers in `build`. The run decides accumulation, batch size and precision; the config may
    say "auto", omit them, or agree. Clipping, optimizer and scheduler may come from either side, but not from both.

    Args:
        config: DeepSpeed's config, as a mapping or the path of a JSON file. "auto" is filled from the run.
        offload_optimizer: "cpu", "nvme", True for "cpu", or a mapping as under `zero_optimization.offload_optimizer`.
        offload_parameters: the same for parameters (stage 3).
        nvme_path: a folder on an NVMe disk to offload to.
        pin_memory: whether to offload to page-locked memory.
        **arguments: arguments by the names in `ARGUMENTS`. None means not set.

    Raises:
        ConfigurationError: for a setting that is unknown, invalid, or contradicts another. The message names the fix.

    Example:
        >>> ZeroConfig({"zero_optimization": {"stage": "auto"}}, stage=3, offload_parameters="cpu").stage
        3
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | Path | None = None,
        *,
        offload_optimizer: bool | str | Mapping[str, Any] = False,
        offload_parameters: bool | str | Mapping[str, Any] = False,
        nvme_path: str | Path | None = None,
        pin_memory: bool | None = None,
        **arguments: Any,
    ) -> None:
        self.values: dict[str, Any] = read_config(config)
        """The given config, with the arguments filled in."""
        for name, value in arguments.items():
            if name not in ARGUMENTS:
                raise ConfigurationError(f"ZeroConfig has no argument {name!r}. {nearest(name, sorted(ARGUMENTS))}")
            if value is not None:
                self._put(ARGUMENTS[name], value, name)
        self._fp16_arguments = [
            name for name, value in arguments.items() if value is not None and ARGUMENTS[name].startswith("fp16.")
        ]
        offloads = {"offload_optimizer": offload_optimizer, "offload_parameters": offload_parameters}
        for name, setting in offloads.items():
            if setting is not False and setting is not None:
                self._offload(name, setting)
        self._set_offload_options(nvme_path, pin_memory)
        if self.get("zero_optimization.stage", "auto") == "auto":
            self._put("zero_optimization.stage", 2, "stage")
        self._check_itself()

    # reading the settings ---------------------------------------------------------------------------------------------
    def get(self, path: str, default: Any = None) -> Any:
        """Returns the value at a path such as "zero_optimization.stage"."""
        value: Any = self.values
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return value

    def given(self, path: str) -> Any:
        """Returns the value at a path, or None for "auto"."""
        value = self.get(path)
        return None if value == "auto" else value

    @property
    def stage(self) -> int:
        """The ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
        return int(self.get("zero_optimization.stage"))

    @property
    def optimizer(self) -> Mapping[str, Any] | None:
        """The section of an optimizer that DeepSpeed creates."""
        return self.get("optimizer")  # type: ignore[no-any-return]

    @property
    def scheduler(self) -> Mapping[str, Any] | None:
        """The section of a scheduler."""
        return self.get("scheduler")  # type: ignore[no-any-return]

    def offloads(self, part: str) -> str | None:
        """Returns where "optimizer" or "param" is offloaded between uses: "cpu", "nvme", or None."""
        device = self.get(f"zero_optimization.offload_{part}.device", "none")
        return None if device == "none" else str(device)

    def fill(self, values: Mapping[str, Any]) -> None:
        """Sets values that are missing or "auto", by path: {"optimizer.params.lr": 1e-3}.

        Raises:
            ConfigurationError: if the config has a different value.
        """
        for path, value in values.items():
            self._put(path, value, path)

    # building the settings --------------------------------------------------------------------------------------------
    def _put(self, path: str, value: Any, name: str) -> None:
        """Sets a value that is missing or "auto". Errors call it `name`."""
        *sections, key = path.split(".")
        parent = self.values
        for section in sections:
            parent[section] = parent.get(section) or {}
            parent = parent[section]
        if parent.get(key, "auto") not in ("auto", value):
            raise ConfigurationError(
                f"{name}={value!r} was given, but the DeepSpeed config says {path}={parent[key]!r}. Set it only once, "
                "or to 'auto' in the config."
            )
        parent[key] = value

    def _offload(self, name: str, setting: Any) -> None:
        section = dict(setting) if isinstance(setting, Mapping) else {"device": "cpu" if setting is True else setting}
        if section.get("device") not in ("cpu", "nvme", "none"):
            raise ConfigurationError(
                f"{name}={setting!r} is not valid. Use 'cpu', 'nvme', or a mapping whose 'device' is one of these."
            )
        for key, value in section.items():
            self._put(f"zero_optimization.offload_{OFFLOADS[name]}.{key}", value, f"{name}.{key}")

    def _set_offload_options(self, nvme_path: str | Path | None, pin_memory: bool | None) -> None:
        """Sets the folder and the kind of memory of offloaded parts."""
        offloaded = [part for part in OFFLOADS.values() if self.offloads(part)]
        on_disk = [part for part in offloaded if self.offloads(part) == "nvme"]
        path = None if nvme_path is None else str(nvme_path)
        for name, value, parts, target in (
            ("nvme_path", path, on_disk, " to 'nvme'"),
            ("pin_memory", pin_memory, offloaded, ""),
        ):
            if value is not None and not parts:
                raise ConfigurationError(f"{name}={value!r} was given, but nothing is offloaded{target}. Leave it out.")
            for part in parts if value is not None else ():
                self._put(f"zero_optimization.offload_{part}.{name}", value, name)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Rejects optimizers that would silently misbehave on flat buffers.

        Raises:
            ConfigurationError: for optimizers whose step is not element-wise, and for groups of only frozen
                parameters.
        """
        name = type(optimizer).__name__
        if self.stage and name.lower() in WHOLE_PARAMETERS:
            raise ConfigurationError(
                f"{name} needs whole parameters, but ZeRO stage {self.stage} steps flat buffers that span several. Use "
                "an element-wise optimizer (Adam's, SGD), stage=0, or strategy='ddp'."
            )
        groups = [group["params"] for group in optimizer.param_groups]
        if self.stage in (1, 2) and any(group and not any(p.requires_grad for p in group) for group in groups):
            raise ConfigurationError(
                f"A parameter group of {name} has only frozen parameters, which ZeRO stages 1 and 2 do not support. "
                "Leave the group out, or use stage=3."
            )

    def _check_itself(self) -> None:
        stage = self.get("zero_optimization.stage")
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise ConfigurationError(f"zero_optimization.stage={stage!r} is not valid. Use 0, 1, 2 or 3.")
        for key in self.values:
            near = difflib.get_close_matches(str(key), KEYS, 1, 0.85)
            if key not in KEYS and near:
                raise ConfigurationError(
                    f"DeepSpeed ignores the unknown key {key!r} of its config. Did you mean {near[0]!r}?"
                )
        for section in OWN_RANKS:
            if self.get(section) not in (None, {}, 1):
                raise ConfigurationError(
                    f"The DeepSpeed config has {section!r}, but under DeepSpeedStrategy all ranks are data parallel. "
                    "Leave it out."
                )
        if self.get("gradient_allreduce_op", "mean") != "mean":
            raise ConfigurationError(
                "The DeepSpeed config's gradient_allreduce_op must be 'mean', since losses are averaged over the "
                "ranks. Leave it out."
            )
        if self.get("managed_gradient_accumulation", True) is not True:
            raise ConfigurationError(
                "The DeepSpeed config has managed_gradient_accumulation=false, but Leyden itself sets the end of a "
                "window. Leave it out."
            )
        if self.given("amp.enabled") is True:
            raise ConfigurationError(
                "The DeepSpeed config enables amp (NVIDIA Apex), which is not supported. Use precision='bf16-mixed'."
            )
        enabled = [name for name in ("fp16", "bf16", "torch_autocast") if self.given(f"{name}.enabled") is True]
        if len(enabled) > 1:
            raise ConfigurationError(f"The DeepSpeed config enables {' and '.join(enabled)}. Enable only one of them.")
        self._check_offloads()

    def _check_offloads(self) -> None:
        for argument, part in OFFLOADS.items():
            device, section = self.offloads(part), f"offload_{part}"
            least = 3 if part == "param" or device == "nvme" else 1
            if device and self.stage < least:
                raise ConfigurationError(
                    f"{argument}={device!r} needs stage {'3' if least == 3 else '1, 2 or 3'}, but the stage is "
                    f"{self.stage}. Use stage={least}, or leave {argument} ({section} in the config) out."
                )
            place = self.get(f"zero_optimization.{section}.nvme_path")
            if device == "nvme" and not place:
                raise ConfigurationError(f"{section} to 'nvme' needs an nvme_path. Pass nvme_path='/path/on/the/disk'.")
            if device == "nvme":
                local_path(place, f"{section}: nvme_path")

    # checks against a run ---------------------------------------------------------------------------------------------
    def check(self, settings: RunSettings, world_size: int = 1) -> None:
        """Checks the config against the settings of a run.

        Raises:
            ConfigurationError: for a contradiction. The message names both sides, and the fix.
        """
        steps = self.given("gradient_accumulation_steps")
        if steps is not None and settings.accumulation is not None and steps != settings.accumulation:
            raise ConfigurationError(
                f"The DeepSpeed config says gradient_accumulation_steps={steps}, but the run accumulates "
                f"{settings.accumulation} batch(es). Set accumulate_grad_batches={steps} (gradient_accumulation_steps "
                "of an Accelerator), and 'auto' or nothing in the config."
            )
        if settings.clip_value is not None:
            self._check_clipping(settings)
        if settings.batch_size is not None:
            self._check_batch(settings, world_size)
        if settings.optimizers is not None:
            self._check_optimizers(settings.optimizers, settings.schedulers or 0)
        if settings.manual:
            raise ConfigurationError(
                "DeepSpeed does not support manual optimization, since its engine reduces gradients in its own "
                "backward and runs the step itself. Use automatic_optimization = True, or strategy='fsdp'."
            )
        if settings.own_backward:
            raise ConfigurationError(
                "The module overrides backward, but DeepSpeed's engine runs its own. Remove the override, or use "
                "strategy='fsdp'."
            )

    def _check_clipping(self, settings: RunSettings) -> None:
        if settings.clip_algorithm == "value":
            raise ConfigurationError(
                "DeepSpeed clips gradients only by norm, not with gradient_clip_algorithm='value'. Use 'norm', or "
                "strategy='fsdp'."
            )
        if self.get("zero_optimization.compute_grad_norm", True) is False:
            raise ConfigurationError(
                f"The run clips to {settings.clip_value} (gradient_clip_val), but the DeepSpeed config has "
                "compute_grad_norm=false. Leave that out."
            )
        clip = self.given("gradient_clipping")
        if clip and clip != settings.clip_value:
            raise ConfigurationError(
                f"The DeepSpeed config says gradient_clipping={clip}, but the run clips to {settings.clip_value} "
                "(gradient_clip_val). Set only one of them, or 'auto' in the config."
            )

    def _check_batch(self, settings: RunSettings, world_size: int) -> None:
        micro = self.given("train_micro_batch_size_per_gpu")
        if micro is not None and micro != settings.batch_size:
            raise ConfigurationError(
                f"The DeepSpeed config says train_micro_batch_size_per_gpu={micro}, but the training loader has "
                f"batch_size={settings.batch_size} per rank. The loader decides: set 'auto' or nothing in the config."
            )
        total = self.given("train_batch_size")
        if total is None or settings.accumulation is None or settings.batch_size is None:
            return
        product = settings.batch_size * settings.accumulation * world_size
        if total != product:
            raise ConfigurationError(
                f"The DeepSpeed config says train_batch_size={total}, but the run's is {settings.batch_size} per rank "
                f"× {world_size} rank(s) × {settings.accumulation} accumulated = {product}. Set 'auto' or nothing in "
                "the config."
            )

    def _check_optimizers(self, count: int, schedulers: int) -> None:
        if count > 1:
            raise ConfigurationError(
                f"{count} optimizers were given, but DeepSpeed's engine drives only one. Use parameter groups of one "
                "optimizer, or strategy='fsdp'."
            )
        if count and self.optimizer is not None:
            raise ConfigurationError(
                f"The DeepSpeed config has an optimizer ({self.optimizer.get('type')}), and configure_optimizers "
                "returns one too. Remove the section from the config, or return None."
            )
        if not count and self.optimizer is None:
            raise ConfigurationError(
                "DeepSpeed's engine needs an optimizer, but neither configure_optimizers nor the config has one. "
                'Return one, or add {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}.'
            )
        if schedulers and self.scheduler is not None:
            raise ConfigurationError(
                f"The DeepSpeed config has a scheduler ({self.scheduler.get('type')}), and configure_optimizers "
                "returns one too. Remove the section from the config, or return none."
            )

    # the final config -------------------------------------------------------------------------------------------------
    def build(
        self,
        *,
        precision: str = "32-true",
        device: str = "cpu",
        micro_batch: int | None = None,
        complete: bool = True,
    ) -> dict[str, Any]:
        """Builds the config for DeepSpeed, with the run's settings filled in for every "auto".

        Args:
            precision: name of the run's precision.
            device: type of its device.
            micro_batch: samples per rank and batch, which DeepSpeed only reports.
            complete: whether a remaining "auto" is an error.

        Raises:
            ConfigurationError: if the precision contradicts the config or is not supported, or if an "auto" cannot be
                filled.
        """
        self._check_precision(precision, device)
        final = copy.deepcopy(self.values)
        # Leyden divides losses by the window's length, so that windows that close early are divided correctly.
        final["gradient_accumulation_steps"] = 1
        final.pop("train_batch_size", None)
        micro = self.given("train_micro_batch_size_per_gpu")
        final["train_micro_batch_size_per_gpu"] = micro or micro_batch or 1
        final["gradient_clipping"] = float(self.given("gradient_clipping") or 0.0)
        for key, value in DEFAULTS.items():
            final[key] = value if final.get(key, "auto") == "auto" else final[key]
        final.pop("scheduler", None)
        self._fill_precision(final, precision)
        zero = final["zero_optimization"]
        for key in [key for key, value in zero.items() if value == "auto"]:
            del zero[key]
        if self.optimizer is not None:
            _fill_optimizer(final["optimizer"], device)
        for path in _autos(final):
            if complete and not path.startswith("data_types."):
                raise ConfigurationError(
                    f"The DeepSpeed config has {path}='auto', but the run has no value to fill in. Set a value."
                )
        return final

    def _check_precision(self, precision: str, device: str) -> None:
        section = "fp16" if precision.startswith("16") else "bf16" if precision.startswith("bf16") else None
        if precision not in SUPPORTED:
            raise ConfigurationError(
                f"DeepSpeed does not support precision={precision!r}, only {', '.join(SUPPORTED)}. Use one of "
                "these, or strategy='fsdp'."
            )
        for name in ("fp16", "bf16"):
            enabled = self.given(f"{name}.enabled")
            if enabled is True and section != name:
                short = "16-true" if name == "fp16" else "bf16-true"
                raise ConfigurationError(
                    f"The DeepSpeed config enables {name}, but the run's precision is {precision!r}. Use "
                    f"precision={short!r}, or set {name}.enabled to 'auto' or false in the config."
                )
            if enabled is False and precision == f"{name.removeprefix('fp')}-true":
                raise ConfigurationError(
                    f"The DeepSpeed config says {name}.enabled=false, but the run's precision is {precision!r}. Set it "
                    "to 'auto' in the config, or use precision='32-true'."
                )
        if section == "fp16" and device == "cpu":
            raise ConfigurationError(
                f"DeepSpeed does not support precision={precision!r} on the CPU (Type fp16 is not supported on your "
                "device). Use 'bf16-mixed', 'bf16-true' or '32-true'."
            )
        self._check_autocast(precision)
        if self._fp16_arguments and self.lower_weights(precision) != "fp16":
            raise ConfigurationError(
                f"{' and '.join(f'{name}=' for name in self._fp16_arguments)} scales the loss for float16 weights, but "
                f"the run's precision is {precision!r}. Use precision='16-true', or leave it out."
            )
        if self.stage == 0 and self.lower_weights(precision) == "bf16":
            raise ConfigurationError(
                "bf16 weights do not work at ZeRO stage 0, where DeepSpeed steps the optimizer once before training. "
                "Use stage=1, or precision='bf16-mixed'."
            )

    def _check_autocast(self, precision: str) -> None:
        dtype = self.given("torch_autocast.dtype")
        if self.given("torch_autocast.enabled") is True and not precision.endswith("-mixed"):
            raise ConfigurationError(
                f"The DeepSpeed config enables torch_autocast ({dtype or 'bfloat16'}), but the run's precision is "
                f"{precision!r}. Use precision='bf16-mixed', or leave the section out."
            )
        run_dtype = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}.get(precision)
        config_dtype = str(dtype).removeprefix("torch.") if dtype else run_dtype
        config_dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(str(config_dtype), config_dtype)
        if self.given("torch_autocast.enabled") is True and run_dtype and config_dtype != run_dtype:
            raise ConfigurationError(
                f"The DeepSpeed config's torch_autocast has the dtype {config_dtype}, but the run's precision is "
                f"{precision!r}. Leave the section out."
            )
        if self.given("torch_autocast.enabled") is False and precision == "16-mixed":
            raise ConfigurationError(
                "The DeepSpeed config says torch_autocast.enabled=false, but precision='16-mixed' needs DeepSpeed's "
                "autocast. Leave the section out."
            )

    def lower_weights(self, precision: str) -> str | None:
        """Returns the half precision of weights that have float32 master weights ("bf16" or "fp16"), else None."""
        for name in ("fp16", "bf16"):
            if self.given(f"{name}.enabled") is True or precision == f"{name.removeprefix('fp')}-true":
                return name
        return None

    def scales_loss(self, precision: str) -> bool:
        """Returns True if a loss scaler may skip steps."""
        return precision == "16-mixed" or self.lower_weights(precision) == "fp16"

    def _fill_precision(self, final: dict[str, Any], precision: str) -> None:
        lower = self.lower_weights(precision)
        for name in ("fp16", "bf16"):
            if lower == name:
                final[name] = {**final.get(name, {}), "enabled": True}
            else:
                final.pop(name, None)
        if precision == "16-mixed" and lower is None:
            # Its gradient scaler is DeepSpeed's own.
            final["torch_autocast"] = {"enabled": True, "dtype": "float16", **final.get("torch_autocast", {})}


def read_config(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Returns a copy of a config from a mapping or a JSON file.

    Raises:
        ConfigurationError: if the file cannot be read, or does not contain a mapping.
    """
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        path = Path(local_path(config, "config"))
        if path.exists() and not path.is_file():
            raise ConfigurationError(
                f"The DeepSpeed config {path} is not a regular file. Pass the path of a JSON file."
            )
        try:
            config = json.loads(path.read_text())
        except OSError as error:
            raise ConfigurationError(f"The DeepSpeed config {path} cannot be read: {error}.") from error
        except RecursionError:
            raise ConfigurationError(f"The DeepSpeed config {path} is nested too deeply.") from None
        except ValueError as error:
            raise ConfigurationError(f"The DeepSpeed config {path} is not valid JSON: {error}.") from error
        if not isinstance(config, Mapping):
            raise ConfigurationError(f"The DeepSpeed config {path} contains {kind_of(config)}, not a mapping.")
    return copy.deepcopy(dict(config))


def _fill_optimizer(section: dict[str, Any], device: str) -> None:
    kind = section.get("type")
    if not isinstance(kind, str):
        raise ConfigurationError('The DeepSpeed config\'s optimizer needs a "type", such as "AdamW".')
    params = section.setdefault("params", {})
    if kind.lower() in ADAM and device == "cpu":
        # DeepSpeed's own Adam would be compiled first, which takes minutes.
        params.setdefault("torch_adam", True)


def _autos(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield f"{prefix}{key}"
