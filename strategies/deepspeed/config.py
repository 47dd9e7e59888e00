"""The DeepSpeed config of a run: made from a dict or file and plain arguments, and completed for DeepSpeed."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.strategies.errors import ConfigurationError, kind_of, nearest
from leyden.strategies.settings import RunSettings

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
ARGUMENTS = {
    **{name: f"{section}.{name}" for section, names in SECTIONS.items() for name in names.split()},
    **{name: name for name in ("zero_allow_untested_optimizer", "communication_data_type", "steps_per_print")},
}
"""Plain arguments, and the places in DeepSpeed's config that they stand for."""

OFFLOADS = {"offload_optimizer": "optimizer", "offload_parameters": "param"}
"""Arguments, and what DeepSpeed's config calls the part that they offload."""
DEFAULTS = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
"""Set where the config says nothing: DeepSpeed would refuse most optimizers of one's own."""

OWN_RANKS = ("tensor_parallel", "sequence_parallel_size", "data_parallel_size", "expert_parallel", "pipeline")
"""Sections that give the ranks another meaning than one share of each batch."""

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
"""Top-level keys of DeepSpeed's config. It ignores others, which may belong to a later version; a key that resembles
one of these is a typo.
"""

WHOLE_PARAMETERS = frozenset({"adafactor", "lamb", "lars", "muon", "shampoo", "soap"})
"""Optimizers, in small letters, whose step is not that of single elements."""


class ZeroConfig:
    """The settings that a config dict or file, and plain arguments beside it, give DeepSpeed.

    It finds every contradiction: within itself when it is made, with a run's settings in `check`, with precision,
    device and optimizers in `build`. Of what has two owners elsewhere, accumulation, batch size and precision belong to
    the run (the config may say "auto", nothing, or the same), clipping to whichever sets it, optimizer and scheduler to
    whichever makes one.

    Args:
        config: DeepSpeed's config, as a mapping or a path of a JSON file. "auto" is filled from the run.
        offload_optimizer: "cpu", "nvme", True for "cpu", or a mapping as under `zero_optimization.offload_optimizer`.
        offload_parameters: the same for parameters (stage 3).
        nvme_path: a folder on an NVMe disk to offload to.
        pin_memory: offload to page-locked memory.
        **arguments: names of `ARGUMENTS`; None for those that are left out.

    Raises:
        ConfigurationError: for a setting that is unknown, contradicts another or cannot work; names the fix.

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
        """The config as it was given, with the arguments in their places."""
        for name, value in arguments.items():
            if name not in ARGUMENTS:
                raise ConfigurationError(f"DeepSpeed has no argument {name!r} here. {nearest(name, sorted(ARGUMENTS))}")
            if value is not None:
                self._put(ARGUMENTS[name], value, name)
        self._of_fp16 = [
            name for name, value in arguments.items() if value is not None and ARGUMENTS[name].startswith("fp16.")
        ]
        offloads = {"offload_optimizer": offload_optimizer, "offload_parameters": offload_parameters}
        for name, wanted in offloads.items():
            if wanted is not False and wanted is not None:
                self._offload(name, wanted)
        self._place_offloads(nvme_path, pin_memory)
        if self.get("zero_optimization.stage", "auto") == "auto":
            self._put("zero_optimization.stage", 2, "stage")
        self._check_itself()

    # what it says -----------------------------------------------------------------------------------------------------
    def get(self, path: str, default: Any = None) -> Any:
        """The value at a place such as "zero_optimization.stage"."""
        found: Any = self.values
        for part in path.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    def given(self, path: str) -> Any:
        """The value at a place; None for "auto"."""
        value = self.get(path)
        return None if value == "auto" else value

    @property
    def stage(self) -> int:
        """0 to 3: what is sharded (nothing, optimizer state, gradients too, parameters too)."""
        return int(self.get("zero_optimization.stage"))

    @property
    def optimizer(self) -> Mapping[str, Any] | None:
        """The section of an optimizer that DeepSpeed makes."""
        return self.get("optimizer")  # type: ignore[no-any-return]

    @property
    def scheduler(self) -> Mapping[str, Any] | None:
        """The section of a scheduler."""
        return self.get("scheduler")  # type: ignore[no-any-return]

    def offloads(self, part: str) -> str | None:
        """Where "optimizer" or "param" is offloaded between uses: "cpu" or "nvme"; None if it is not."""
        device = self.get(f"zero_optimization.offload_{part}.device", "none")
        return None if device == "none" else str(device)

    def fill(self, values: Mapping[str, Any]) -> None:
        """Gives "auto" values, and places that say nothing, a value: {"optimizer.params.lr": 1e-3}.

        Raises:
            ConfigurationError: if the config has another value.
        """
        for path, value in values.items():
            self._put(path, value, path)

    # how it came about ------------------------------------------------------------------------------------------------
    def _put(self, path: str, value: Any, name: str) -> None:
        """Sets a value that is missing or "auto"."""
        *sections, key = path.split(".")
        place = self.values
        for section in sections:
            place[section] = place.get(section) or {}
            place = place[section]
        if place.get(key, "auto") not in ("auto", value):
            raise ConfigurationError(
                f"{name}={value!r} was given, and the DeepSpeed config says {path}={place[key]!r}: give it once, or "
                "'auto' in the config."
            )
        place[key] = value

    def _offload(self, name: str, wanted: Any) -> None:
        section = dict(wanted) if isinstance(wanted, Mapping) else {"device": "cpu" if wanted is True else wanted}
        if section.get("device") not in ("cpu", "nvme", "none"):
            raise ConfigurationError(f"{name}={wanted!r}: use 'cpu', 'nvme', or a mapping with a 'device' of these.")
        for key, value in section.items():
            self._put(f"zero_optimization.offload_{OFFLOADS[name]}.{key}", value, f"{name}.{key}")

    def _place_offloads(self, nvme_path: str | Path | None, pin_memory: bool | None) -> None:
        """Sets where and how offloaded parts wait, by an argument or by the config."""
        offloaded = [part for part in OFFLOADS.values() if self.offloads(part)]
        on_disk = [part for part in offloaded if self.offloads(part) == "nvme"]
        path = None if nvme_path is None else str(nvme_path)
        for name, value, parts, what in (
            ("nvme_path", path, on_disk, "to 'nvme'"),
            ("pin_memory", pin_memory, offloaded, "at all"),
        ):
            if value is not None and not parts:
                raise ConfigurationError(f"{name}={value!r} was given, and nothing is offloaded {what}: leave it out.")
            for part in parts if value is not None else ():
                self._put(f"zero_optimization.offload_{part}.{name}", value, name)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuses what would go wrong on flat stretches of parameters without a word.

        Raises:
            ConfigurationError: for optimizers that look at a parameter as a whole, and groups of frozen parameters.
        """
        name = type(optimizer).__name__
        if self.stage and name.lower() in WHOLE_PARAMETERS:
            raise ConfigurationError(
                f"{name} looks at each parameter as a whole, and ZeRO stage {self.stage} gives it flat stretches of "
                "several: use an optimizer of single elements (Adam's, SGD), stage=0, or strategy='ddp'."
            )
        groups = [group["params"] for group in optimizer.param_groups]
        if self.stage in (1, 2) and any(group and not any(p.requires_grad for p in group) for group in groups):
            raise ConfigurationError(
                f"a parameter group of {name} holds frozen parameters alone, which ZeRO stages 1 and 2 cannot take: "
                "leave it out, or use stage=3."
            )

    def _check_itself(self) -> None:
        stage = self.get("zero_optimization.stage")
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise ConfigurationError(f"zero_optimization.stage={stage!r}: use 0, 1, 2 or 3.")
        for key in self.values:
            near = difflib.get_close_matches(str(key), KEYS, 1, 0.85)
            if key not in KEYS and near:
                raise ConfigurationError(
                    f"the DeepSpeed config has a key {key!r}, which DeepSpeed passes over. Did you mean {near[0]!r}?"
                )
        for section in OWN_RANKS:
            if self.get(section) not in (None, {}, 1):
                raise ConfigurationError(
                    f"the DeepSpeed config's {section!r} would divide the ranks otherwise than into shares of each "
                    "batch, which DeepSpeedStrategy does not do: leave it out."
                )
        if self.get("gradient_allreduce_op", "mean") != "mean":
            raise ConfigurationError(
                "the DeepSpeed config's gradient_allreduce_op must be 'mean', which is what a loss means on several "
                "ranks: leave it out."
            )
        if self.get("managed_gradient_accumulation", True) is not True:
            raise ConfigurationError(
                "the DeepSpeed config has managed_gradient_accumulation=false, and Leyden itself sets the end of a "
                "window: leave it out."
            )
        if self.given("amp.enabled") is True:
            raise ConfigurationError(
                "the DeepSpeed config enables amp, which is NVIDIA Apex's: use precision='bf16-mixed'."
            )
        forms = [name for name in ("fp16", "bf16", "torch_autocast") if self.given(f"{name}.enabled") is True]
        if len(forms) > 1:
            raise ConfigurationError(f"the DeepSpeed config enables {' and '.join(forms)}: enable one of them.")
        self._check_offloads()

    def _check_offloads(self) -> None:
        for argument, part in OFFLOADS.items():
            device, section = self.offloads(part), f"offload_{part}"
            least = 3 if part == "param" or device == "nvme" else 1
            if device and self.stage < least:
                raise ConfigurationError(
                    f"{argument}={device!r} needs stage {'3' if least == 3 else '1, 2 or 3'}, and the stage is "
                    f"{self.stage}: use stage={least}, or leave {argument} ({section} in the config) out."
                )
            if device == "nvme" and not self.get(f"zero_optimization.{section}.nvme_path"):
                raise ConfigurationError(
                    f"{section} goes to 'nvme' and has no nvme_path: give nvme_path='/path/on/the/disk'."
                )

    # with a run -------------------------------------------------------------------------------------------------------
    def check(self, settings: RunSettings, world_size: int = 1) -> None:
        """Finds what contradicts the settings of a run.

        Raises:
            ConfigurationError: names both sides, and the fix.
        """
        steps = self.given("gradient_accumulation_steps")
        if steps is not None and settings.accumulation is not None and steps != settings.accumulation:
            raise ConfigurationError(
                f"the DeepSpeed config says gradient_accumulation_steps={steps}, and the run accumulates "
                f"{settings.accumulation} batch(es): set accumulate_grad_batches={steps} (gradient_accumulation_steps "
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
                "manual optimisation cannot go with DeepSpeed, whose engine reduces gradients in the backward that "
                "follows its own forward and steps by itself: use automatic_optimization = True, or strategy='fsdp'."
            )
        if settings.own_backward:
            raise ConfigurationError(
                "the module overrides backward, and DeepSpeed's engine runs its own: leave it out, or use "
                "strategy='fsdp'."
            )

    def _check_clipping(self, settings: RunSettings) -> None:
        if settings.clip_algorithm == "value":
            raise ConfigurationError(
                "DeepSpeed clips gradients by their norm alone, and gradient_clip_algorithm='value' was asked for: use "
                "'norm', or strategy='fsdp'."
            )
        if self.get("zero_optimization.compute_grad_norm", True) is False:
            raise ConfigurationError(
                f"the run clips to {settings.clip_value} (gradient_clip_val), and the DeepSpeed config has "
                "compute_grad_norm=false: leave that out."
            )
        clip = self.given("gradient_clipping")
        if clip and clip != settings.clip_value:
            raise ConfigurationError(
                f"the DeepSpeed config says gradient_clipping={clip}, and the run clips to {settings.clip_value} "
                "(gradient_clip_val): set one of them, or 'auto' in the config."
            )

    def _check_batch(self, settings: RunSettings, world_size: int) -> None:
        micro = self.given("train_micro_batch_size_per_gpu")
        if micro is not None and micro != settings.batch_size:
            raise ConfigurationError(
                f"the DeepSpeed config says train_micro_batch_size_per_gpu={micro}, and the training loader has "
                f"batch_size={settings.batch_size} per rank: the loader decides; set 'auto' or nothing in the config."
            )
        total = self.given("train_batch_size")
        if total is None or settings.accumulation is None or settings.batch_size is None:
            return
        product = settings.batch_size * settings.accumulation * world_size
        if total != product:
            raise ConfigurationError(
                f"the DeepSpeed config says train_batch_size={total}, and the run's is {settings.batch_size} per rank "
                f"× {world_size} rank(s) × {settings.accumulation} accumulated = {product}: set 'auto' or nothing in "
                "the config."
            )

    def _check_optimizers(self, count: int, schedulers: int) -> None:
        if count > 1:
            raise ConfigurationError(
                f"{count} optimizers were given, and DeepSpeed's engine drives one: use parameter groups of one "
                "optimizer, or strategy='fsdp'."
            )
        if count and self.optimizer is not None:
            raise ConfigurationError(
                f"the DeepSpeed config has an optimizer ({self.optimizer.get('type')}), and configure_optimizers "
                "returns one too: take the section out of the config, or return None."
            )
        if not count and self.optimizer is None:
            raise ConfigurationError(
                "neither configure_optimizers nor the DeepSpeed config has an optimizer, and its engine needs one: "
                "return one, or "
                'add {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}.'
            )
        if schedulers and self.scheduler is not None:
            raise ConfigurationError(
                f"the DeepSpeed config has a scheduler ({self.scheduler.get('type')}), and configure_optimizers "
                "returns one too: take the section out of the config, or return none."
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
        """The config that DeepSpeed gets: nothing is "auto" any more, and the run's settings are filled in.

        Args:
            precision: name of the run's precision.
            device: type of its device.
            micro_batch: samples per rank and batch, which DeepSpeed only reports.
            complete: nothing may be "auto" any more.

        Raises:
            ConfigurationError: if the precision contradicts the config or cannot run, or an "auto" cannot be filled.
        """
        self._check_precision(precision, device)
        final = copy.deepcopy(self.values)
        # The end of a window sets its length, so that one that closes early is divided by its true length.
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
                    f"the DeepSpeed config leaves {path} at 'auto', which nothing in the run can fill: give a value."
                )
        return final

    def _check_precision(self, precision: str, device: str) -> None:
        section = "fp16" if precision.startswith("16") else "bf16" if precision.startswith("bf16") else None
        if precision in ("64-true", "fp8", "transformer-engine"):
            raise ConfigurationError(
                f"DeepSpeed does not train in {precision!r}: use precision='32-true' or 'bf16-true', or "
                "strategy='fsdp'."
            )
        for name in ("fp16", "bf16"):
            enabled = self.given(f"{name}.enabled")
            if enabled is True and section != name:
                short = "16-true" if name == "fp16" else "bf16-true"
                raise ConfigurationError(
                    f"the DeepSpeed config enables {name}, and the run's precision is {precision!r}: use "
                    f"precision={short!r}, or set {name}.enabled to 'auto' or false in the config."
                )
            if enabled is False and precision == f"{name.removeprefix('fp')}-true":
                raise ConfigurationError(
                    f"the DeepSpeed config says {name}.enabled=false, and the run's precision is {precision!r}: set it "
                    "to 'auto' in the config, or use precision='32-true'."
                )
        if section == "fp16" and device == "cpu":
            raise ConfigurationError(
                f"precision={precision!r} cannot be used with DeepSpeed on the CPU (Type fp16 is not supported on your "
                "device): use 'bf16-mixed', 'bf16-true' or '32-true'."
            )
        self._check_autocast(precision)
        if self._of_fp16 and self.lower_weights(precision) != "fp16":
            raise ConfigurationError(
                f"{' and '.join(f'{name}=' for name in self._of_fp16)} scales the loss for weights in float16, and the "
                f"run's precision is {precision!r}: use precision='16-true', or leave it out."
            )
        if self.stage == 0 and self.lower_weights(precision) == "bf16":
            raise ConfigurationError(
                "bf16 weights at ZeRO stage 0 go wrong: DeepSpeed steps the optimizer once before training. Use "
                "stage=1, or precision='bf16-mixed'."
            )

    def _check_autocast(self, precision: str) -> None:
        dtype = self.given("torch_autocast.dtype")
        if self.given("torch_autocast.enabled") is True and not precision.endswith("-mixed"):
            raise ConfigurationError(
                f"the DeepSpeed config enables torch_autocast ({dtype or 'bfloat16'}), and the run's precision is "
                f"{precision!r}: use precision='bf16-mixed', or leave the section out."
            )
        wanted = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}.get(precision)
        said = str(dtype).removeprefix("torch.") if dtype else wanted
        said = {"bf16": "bfloat16", "fp16": "float16"}.get(str(said), said)
        if self.given("torch_autocast.enabled") is True and wanted and said != wanted:
            raise ConfigurationError(
                f"the DeepSpeed config's torch_autocast has the dtype {said}, and the run's precision is "
                f"{precision!r}: leave the section out."
            )
        if self.given("torch_autocast.enabled") is False and precision == "16-mixed":
            raise ConfigurationError(
                "the DeepSpeed config says torch_autocast.enabled=false, and precision='16-mixed' is DeepSpeed's "
                "autocast: leave the section out."
            )

    def lower_weights(self, precision: str) -> str | None:
        """Returns "bf16" or "fp16" if that is the dtype of the weights beside float32 master weights, else None."""
        for name in ("fp16", "bf16"):
            if self.given(f"{name}.enabled") is True or precision == f"{name.removeprefix('fp')}-true":
                return name
        return None

    def scales_loss(self, precision: str) -> bool:
        """True where a scaler looks for steps to skip."""
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
    """A copy of a config, from a mapping or a JSON file.

    Raises:
        ConfigurationError: if the file cannot be read, or does not hold a mapping.
    """
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        path = Path(config)
        if path.exists() and not path.is_file():
            raise ConfigurationError(f"the DeepSpeed config {path} is no plain file: give the path of a JSON file.")
        try:
            config = json.loads(path.read_text())
        except OSError as error:
            raise ConfigurationError(f"the DeepSpeed config {path} cannot be read: {error}.") from error
        except RecursionError:
            raise ConfigurationError(f"the DeepSpeed config {path} is nested too deeply.") from None
        except ValueError as error:
            raise ConfigurationError(f"the DeepSpeed config {path} is no JSON: {error}.") from error
        if not isinstance(config, Mapping):
            raise ConfigurationError(f"the DeepSpeed config {path} holds {kind_of(config)}, not a mapping.")
    return copy.deepcopy(dict(config))


def _fill_optimizer(section: dict[str, Any], device: str) -> None:
    kind = section.get("type")
    if not isinstance(kind, str):
        raise ConfigurationError('the DeepSpeed config\'s optimizer has no "type", such as "AdamW".')
    params = section.setdefault("params", {})
    if kind.lower() in ADAM and device == "cpu":
        # Otherwise DeepSpeed compiles its own Adam, which takes minutes.
        params.setdefault("torch_adam", True)


def _autos(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield f"{prefix}{key}"
