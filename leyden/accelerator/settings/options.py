"""Checks of an Accelerator's arguments: each has an effect, or raises an error that names the alternative."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from leyden.accelerator.ranks import AcceleratorState, check_started, chosen_devices, is_true
from leyden.accelerator.settings.deepspeed import DeepSpeedPlugin, accumulation_of, given_plugin, plugin_describing
from leyden.accelerator.settings.fp8_recipes import (
    RECIPES,
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    recipe_of,
)
from leyden.accelerator.settings.megatron import MegatronLMPlugin
from leyden.accelerator.settings.parallel import ParallelismConfig, TorchTensorParallelPlugin
from leyden.accelerator.settings.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    handlers_by_class,
)
from leyden.checkpoint.format.bucket import place_of
from leyden.core.devices import runtime_of
from leyden.core.environment import rank_environment
from leyden.core.errors import ConfigurationError, kind_of, nearest
from leyden.launch.heartbeat import hang_limit
from leyden.strategies.base import Strategy
from leyden.strategies.precision import MixedPrecision, Precision, find_precision
from leyden.trainer.events.preemption import preemption_from
from leyden.trainer.launched import read_launched, with_recipe

RNG_TYPES = ("torch", "cuda", "mps", "xpu", "numpy", "python", "generator")
LOADER_FLAGS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
PLUGINS = {
    "dynamo_plugin": TorchDynamoPlugin,
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "megatron_lm_plugin": MegatronLMPlugin,
    "parallelism_config": ParallelismConfig,
    "torch_tp_plugin": TorchTensorParallelPlugin,
}
RIVALS = (
    ("deepspeed_plugin", "deepspeed_plugins"),
    ("dynamo_backend", "dynamo_plugin"),
    ("megatron_lm_plugin", "parallelism_config"),
    ("megatron_lm_plugin", "torch_tp_plugin"),
    ("torch_tp_plugin", "parallelism_config"),
)
"""Arguments that set the same thing."""
HANDLERS: dict[str, type[KwargsHandler]] = {
    "ddp_handler": DistributedDataParallelKwargs,
    "scaler_handler": GradScalerKwargs,
    "init_handler": InitProcessGroupKwargs,
    "autocast_handler": AutocastKwargs,
    "profile_handler": ProfileKwargs,
    "fp8_recipe_handler": FP8RecipeKwargs,
    "ao_recipe_handler": AORecipeKwargs,
    "te_recipe_handler": TERecipeKwargs,
    "msamp_recipe_handler": MSAMPRecipeKwargs,
}
READ_ELSEWHERE: dict[str, Callable[[Any], Any]] = {
    "has_fp8_handler": lambda own: any(own.options.handlers.get(kind) is not None for kind in RECIPES),
    "fp8_enabled": lambda own: own.precision.name in ("fp8", "transformer-engine"),
    "native_amp": lambda own: isinstance(own.precision, MixedPrecision),
    "data_parallel_rank": lambda own: own.options.rank_along("dp_replicate", "replicate"),
    "data_parallel_shard_rank": lambda own: own.options.rank_along("dp_shard", "shard"),
    "pipeline_parallel_rank": lambda own: own.options.rank_along("pp"),
    "context_parallel_rank": lambda own: own.options.rank_along("cp"),
    "_models": lambda own: own.prepared_models,
    "_optimizers": lambda own: list(own.prepared_optimizers),
    "_schedulers": lambda own: own.prepared_schedulers,
    "_dataloaders": lambda own: own.prepared_loaders,
}
"""Attributes of Accelerate's Accelerator that libraries and older scripts read, and no loop needs."""


def further(accelerator: Any, name: str) -> Any:
    """Returns an attribute of `HANDLERS` or `READ_ELSEWHERE`; raises AttributeError for any other name."""
    if name in HANDLERS:
        return accelerator.options.handlers.get(HANDLERS[name])
    if name in READ_ELSEWHERE:
        return READ_ELSEWHERE[name](accelerator)
    raise AttributeError(f"{type(accelerator).__name__!r} object has no attribute {name!r}")


class Options:
    """The arguments of an Accelerator, checked and combined with its plugins, the launch and the environment."""

    def __init__(self, **given: Any) -> None:
        _apply_plugins(given)
        _fill_from_launch(given)
        _fill_compilation(given)
        self.device_placement: bool = given["device_placement"]
        self.cpu: bool = given["cpu"]
        self.step_scheduler_with_optimizer: bool = given["step_scheduler_with_optimizer"]
        self._converts_outputs: bool = given["convert_outputs"]
        self.handlers = handlers_by_class(given["kwargs_handlers"])
        self.data = _data(given)
        self.accumulation = _accumulation(given)
        self.project = _project(given)
        self.resumes = _resumes(given["resume"], self.project)
        """True if the loop resumes automatically, in a folder that it locks."""
        if self.resumes and self.project.project_dir is not None:
            # After an `os.chdir`, the checkpoints must not go to another folder than the locked one.
            folder = self.project.project_dir
            is_local = isinstance(place_of(folder, "project_dir"), Path)
            self.project.set_directories(Path(folder).absolute() if is_local else folder)
        self.preemption = preemption_from(given["preemption"], resumes=False)
        self.rng_types = _rng_types(given["rng_types"])
        self.backend = _backend(given["dynamo_backend"])
        self.compile_options: dict[str, Any] = given.get("compile_options", {})
        """Further arguments of torch.compile, from a plugin or a launch."""
        self.megatron: MegatronLMPlugin | None = given["megatron_lm_plugin"]
        self.clips_to: float | None = given.get("clips_to") or None
        """Gradient norm to clip to in each step, from a launch or a plugin; 0 disables it, as in Megatron-LM."""
        self.deepspeed = given_plugin(given["deepspeed_plugin"], given["deepspeed_plugins"])
        self.fsdp: FullyShardedDataParallelPlugin | None = given["fsdp_plugin"]
        self.strategy: str | Strategy = _strategy(given, self.deepspeed)
        self.mesh: ParallelismConfig | None = given["parallelism_config"] or given.get("launched_mesh")
        self.train_batch_is_min = self.deepspeed is None or self.deepspeed.is_train_batch_min
        steps = accumulation_of(self.strategy, self.accumulation.num_steps)
        self.accumulation = replace(self.accumulation, num_steps=steps)
        self.precision = self._precision(given["mixed_precision"])
        limit = given.get("hang_timeout")
        self.hang_timeout = "deadlocks" if limit is None else hang_limit(limit)
        """Time limit of the hang watchdog, from `leyden launch` alone: an Accelerator has no such argument."""

    def _precision(self, wanted: Any) -> Precision | None:
        scaler = self.handlers.get(GradScalerKwargs)
        if wanted is None and self.deepspeed is not None:
            # The config decides if neither the script nor the environment does.
            wanted = os.environ.get("ACCELERATE_MIXED_PRECISION") or self.deepspeed.precision
        if wanted is None and isinstance(self.strategy, Strategy):
            precision = recipe_of(self.handlers, self.strategy.precision.name)
        else:
            name = wanted if wanted is not None else os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
            name = getattr(name, "value", name)
            precision = recipe_of(self.handlers, name) or find_precision(with_recipe(name))
        if scaler is not None and isinstance(precision, MixedPrecision) and precision.may_skip:
            precision = MixedPrecision(
                "16",
                init_scale=scaler.init_scale,
                growth_factor=scaler.growth_factor,
                backoff_factor=scaler.backoff_factor,
                growth_interval=scaler.growth_interval,
            )
            # Without a scaler, losses are not scaled and no step is skipped.
            precision.may_skip = scaler.enabled
        return precision

    def name_of(self, precision: Precision) -> str:
        """Returns Accelerate's name of the precision, or Leyden's if Accelerate has none."""
        names = {"32-true": "no", "16-mixed": "fp16", "bf16-mixed": "bf16"}
        if self.deepspeed is not None:
            # Half-precision weights with float32 master weights, which scripts know by the short names.
            names |= {"16-true": "fp16", "bf16-true": "bf16"}
        return names.get(precision.name, precision.name)

    def state(self, strategy: Strategy) -> AcceleratorState:
        """Returns the run's ranks, precision and plugins, for libraries that read them."""
        name = self.name_of(strategy.precision)
        backend = (self.backend or "no").upper()
        compiled = TorchDynamoPlugin(DynamoBackend.__members__.get(backend, backend), **self.compile_options)
        fsdp = self.fsdp_in_use(strategy)
        return AcceleratorState(strategy, name, self.deepspeed, fsdp, self.megatron, self.mesh, compiled)

    def rank_along(self, *names: str) -> int:
        """Returns this rank's index along the dimension of the mesh that has one of these names; 0 without one."""
        mesh = None if self.mesh is None else self.mesh.device_mesh
        own = [name for name in names if mesh is not None and name in (mesh.mesh_dim_names or ())]
        return mesh.get_local_rank(own[0]) if mesh is not None and own else 0

    def fsdp_in_use(self, strategy: Strategy) -> FullyShardedDataParallelPlugin | None:
        """Returns a plugin that describes the run's sharding, for libraries that read it; None without FSDP."""
        settings = getattr(strategy, "settings", None)
        if not isinstance(settings, Mapping) or "reshard_after_forward" not in settings:
            return None
        plugin = self.fsdp or FullyShardedDataParallelPlugin()
        # A library that reads "SHARDED_STATE_DICT" writes Accelerate's own files, but get_state_dict returns full
        # tensors.
        return replace(
            plugin,
            fsdp_version=2,
            state_dict_type=plugin.state_dict_type or "FULL_STATE_DICT",
            activation_checkpointing=settings["activation_checkpointing_policy"] is not None,
        )

    def autocast(self, precision: Precision, device: torch.device, handler: AutocastKwargs) -> torch.autocast:
        """Returns torch.autocast with a handler's settings in place of the run's."""
        dtype = precision.dtype if isinstance(precision, MixedPrecision) else None
        return torch.autocast(
            device.type, dtype, enabled=handler.enabled and dtype is not None, cache_enabled=handler.cache_enabled
        )

    def converts_outputs(self, strategy: Strategy) -> bool:
        """Returns True if outputs are converted to float32; as in Accelerate, those of DeepSpeed's engine are not."""
        return self._converts_outputs and isinstance(strategy.precision, MixedPrecision) and not strategy.drives_one

    def engine_arguments(self) -> dict[str, Any]:
        """Returns the arguments of `Engine`."""
        # A script that was not launched on several ranks is one process, on one device.
        alone = self.strategy == "auto" and rank_environment() is None
        accelerator, devices = chosen_devices(self.cpu, alone)
        return {
            "strategy": self.strategy,
            "accelerator": accelerator,
            "precision": self.precision,
            "devices": devices,
        }

    def apply(self, strategy: Strategy) -> None:
        """Applies plugins and handlers to the strategy, and lets it join the process group."""
        check_started(strategy)
        if self.mesh is not None:
            self.mesh.check(strategy.ranks.world_size)
        if self.clips_to is not None:
            strategy.own_loop.clip_each_step(self.clips_to)
        if self.deepspeed is None:
            self.deepspeed = plugin_describing(strategy)
        if self.accumulation.sync_each_batch and strategy.drives_one:
            raise ConfigurationError(
                f"sync_each_batch=True cannot be combined with {strategy.name}, whose engine decides when to "
                "synchronize gradients. Leave it out."
            )
        if self.accumulation.sync_each_batch and strategy.outputs.are_in_parts:
            raise ConfigurationError(
                "sync_each_batch=True cannot be combined with a pipeline, which synchronizes gradients when its window "
                "closes. Leave it out."
            )
        autocast, precision = self.handlers.get(AutocastKwargs), strategy.precision
        if autocast is not None and isinstance(precision, MixedPrecision):
            precision.use_autocast(functools.partial(self.autocast, precision, strategy.root_device, autocast))
        group = self.handlers.get(InitProcessGroupKwargs)
        if group is not None and strategy.ranks.world_size > 1:
            strategy.ranks.configure_group(group.backend, group.timeout)
        strategy.setup_environment()
        if self.mesh is not None:
            self.mesh.adopt(getattr(strategy, "device_mesh", None))
        ddp = self.handlers.get(DistributedDataParallelKwargs)
        if ddp is not None and hasattr(strategy, "configure_ddp"):
            strategy.configure_ddp(ddp.arguments(), ddp.hook())


def _apply_plugins(given: dict[str, Any]) -> None:
    """Checks the plugins, and sets the arguments that some of them stand for."""
    for name, kind in PLUGINS.items():
        if given[name] is not None and not isinstance(given[name], kind):
            raise ConfigurationError(f"Accelerator({name}=…) got {kind_of(given[name])}. Pass a {kind.__name__}.")
    for one, other in RIVALS:
        if given[one] is not None and given[other] is not None:
            raise ConfigurationError(f"{one} and {other} were both given. Pass one of them.")
    compiled, tensor, megatron = given["dynamo_plugin"], given["torch_tp_plugin"], given["megatron_lm_plugin"]
    if compiled is not None:
        given["dynamo_backend"], given["compile_options"] = compiled.backend, compiled.arguments()
    if tensor is not None:
        given["parallelism_config"] = ParallelismConfig(tp_size=tensor.tp_size)
    if megatron is not None:
        given["clips_to"] = megatron.gradient_clipping


def _fill_from_launch(given: dict[str, Any]) -> None:
    """Fills arguments that the script leaves at their defaults with the values of `leyden launch`."""
    launched = read_launched()
    if launched is None:
        return
    plugins = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "parallelism_config")
    accumulates = given["gradient_accumulation_steps"] != 1 or given["gradient_accumulation_plugin"] is not None
    # The launch's value, and True if the script sets its own.
    offers: dict[str, tuple[Any, bool]] = {
        "strategy": (launched.strategy, given["strategy"] != "auto" or any(given[name] for name in plugins)),
        "mixed_precision": (launched.precision, given["mixed_precision"] is not None),
        "gradient_accumulation_steps": (launched.accumulate_grad_batches, accumulates),
        "cpu": (launched.accelerator == "cpu" or None, given["cpu"]),
        "hang_timeout": (launched.hang_timeout, False),
        "dynamo_backend": (
            launched.compile.get("backend", "inductor") if launched.compile else None,
            given["dynamo_backend"] is not None,
        ),
    }
    values = {name: value for name, (value, _) in offers.items()}
    filled = launched.fill(values, {name for name, (_, is_own) in offers.items() if is_own})
    if "dynamo_backend" in filled:
        given["compile_options"] = {name: value for name, value in launched.compile.items() if name != "backend"}
    if "strategy" in filled:
        given["clips_to"] = launched.gradient_clip_val
    if "strategy" in filled and launched.strategy == "mesh":
        # ParallelismConfig reads its sizes from the launcher's variables.
        given["launched_mesh"] = ParallelismConfig()
    given.update(filled)


def _fill_compilation(given: dict[str, Any]) -> None:
    """Fills what the script and the launch leave open of torch.compile with Accelerate's environment variables."""
    options, prefix = given.setdefault("compile_options", {}), "ACCELERATE_DYNAMO_"
    if given["dynamo_backend"] is None:
        given["dynamo_backend"] = os.environ.get(prefix + "BACKEND")
    mode = os.environ.get(prefix + "MODE", "default")
    if mode != "default" and "options" not in options:
        options.setdefault("mode", mode)
    for name in ("fullgraph", "dynamic"):
        if is_true(f"{prefix}USE_{name.upper()}"):
            options.setdefault(name, True)
    # Refused, as in the script.
    TorchDynamoPlugin(use_regional_compilation=is_true(prefix + "USE_REGIONAL_COMPILATION"))


def _data(given: dict[str, Any]) -> DataLoaderConfiguration:
    found = given["dataloader_config"] or DataLoaderConfiguration()
    own = {name: given[name] for name in LOADER_FLAGS if given[name] is not None}
    if own and given["dataloader_config"] is not None:
        raise ConfigurationError(f"{', '.join(own)} and dataloader_config were both given. Pass one of them.")
    return replace(found, **own)


def _accumulation(given: dict[str, Any]) -> GradientAccumulationPlugin:
    steps = given["gradient_accumulation_steps"]
    plugin: GradientAccumulationPlugin | None = given["gradient_accumulation_plugin"]
    if plugin is not None:
        if steps not in (1, plugin.num_steps):
            raise ConfigurationError(
                f"gradient_accumulation_steps={steps} contradicts GradientAccumulationPlugin(num_steps="
                f"{plugin.num_steps}). Pass one of them."
            )
        return replace(plugin)
    variable = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    if steps == 1 and variable.isdigit():
        steps = int(variable)
    return GradientAccumulationPlugin(steps)


def _project(given: dict[str, Any]) -> ProjectConfiguration:
    found = given["project_config"] or ProjectConfiguration()
    if given["project_dir"] is not None and found.project_dir is None:
        found.set_directories(given["project_dir"])
    if found.automatic_checkpoint_naming and found.project_dir is None:
        raise ConfigurationError("automatic_checkpoint_naming needs a folder. Pass Accelerator(project_dir=…).")
    return found


def _resumes(given: str | None, project: ProjectConfiguration) -> bool:
    if given not in (None, "auto"):
        raise ConfigurationError(
            f"Accelerator(resume={given!r}): use 'auto' or None. load_state('path') loads a checkpoint of your choice."
        )
    if given == "auto" and project.project_dir is None:
        raise ConfigurationError("resume='auto' needs a folder of checkpoints. Pass Accelerator(project_dir=…).")
    return given is not None


def _rng_types(given: Any) -> list[str]:
    names = [str(getattr(entry, "value", entry)) for entry in given or ()]
    for name in names:
        if name not in RNG_TYPES and runtime_of(name) is None:
            raise ConfigurationError(f"rng_types has an unknown type {name!r}. {nearest(name, RNG_TYPES)}")
    return names


def _backend(given: Any) -> str | None:
    name = str(getattr(given, "value", given) or "no").lower()
    if name == "no":
        return None
    known = [*torch.compiler.list_backends(exclude_tags=()), "inductor"]
    if name not in known:
        raise ConfigurationError(f"dynamo_backend={given!r} is unknown. {nearest(name, ('no', *sorted(known)))}")
    return name


def _strategy(given: dict[str, Any], deepspeed: DeepSpeedPlugin | None) -> str | Strategy:
    """Returns the `strategy` argument, or the strategy that a plugin builds."""
    mesh: ParallelismConfig | None = given["parallelism_config"]
    choices = {
        "parallelism_config": mesh,
        # Beside a mesh, it says how the mesh shards.
        "fsdp_plugin": given["fsdp_plugin"] if mesh is None else None,
        "deepspeed_plugin": deepspeed,
        "megatron_lm_plugin": given["megatron_lm_plugin"],
        "strategy": given["strategy"] if given["strategy"] != "auto" else None,
    }
    chosen = [name for name, value in choices.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigurationError(f"{' and '.join(chosen)} were both given. Pass one of them.")
    if mesh is not None:
        return mesh.build(given["fsdp_plugin"])
    plugin = given["fsdp_plugin"] or deepspeed or given["megatron_lm_plugin"]
    return given["strategy"] if plugin is None else plugin.build()  # type: ignore[no-any-return]
