"""Settings objects of an Accelerator, under Hugging Face Accelerate's names."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

from leyden.checkpoint.folder import is_taken
from leyden.checkpoint.format.bucket import BucketPath, Place, place_of
from leyden.core.errors import ConfigurationError, nearest
from leyden.core.paths import local_path

HOOKS = ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")
WRAPPERS = ("no", "fp16", "bf16")
AUTOMATIC = re.compile(r"checkpoint_(\d+)")
"""Names of checkpoints under `automatic_checkpoint_naming`."""


@dataclass
class DataLoaderConfiguration:
    """How loaders are split across ranks.

    Attributes:
        split_batches: treat a loader's batch_size as the global batch size, to be divided among the ranks.
        dispatch_batches: read the data on rank 0 only, which sends the other ranks their batches. With None or False,
            every rank reads its own part, also of iterable data.
        even_batches: fill the last batches with samples from the start of the epoch, so that every rank has the same
            number of batches of the same size; `gather_for_metrics` drops the duplicates.
        use_seedable_sampler: derive the shuffle from `data_seed` and the epoch alone, so that other random draws do not
            change it.
        data_seed: seed of that shuffle; None means torch's initial seed.
        non_blocking: accepted for Accelerate's scripts; copies to cuda and xpu are asynchronous in any case.
        use_stateful_dataloader: accepted for Accelerate's scripts; every loader's position is saved in any case.

    Example:
        >>> DataLoaderConfiguration(even_batches=False).dispatch_batches is None
        True
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class GradientAccumulationPlugin:
    """How batches accumulate into one optimizer step.

    Attributes:
        num_steps: batches per step, 1 or more. The last step of an epoch takes the remaining batches, and its loss is
            divided by their number.
        adjust_scheduler: count a scheduler's calls inside a window, so that torch's check of the call order passes.
        sync_with_dataloader: step at the end of a loader, even if the window is not full; False continues the window in
            the next epoch.
        sync_each_batch: synchronize gradients in every batch, so that FSDP never holds unsharded gradients.

    Raises:
        ConfigurationError: if `num_steps` is not an integer of at least 1.

    Example:
        >>> GradientAccumulationPlugin(num_steps=4).sync_with_dataloader
        True
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise ConfigurationError(f"gradient_accumulation_steps={self.num_steps!r}: use an integer of at least 1.")


@dataclass
class ProjectConfiguration:
    """Where a run's files go.

    Attributes:
        project_dir: folder of the run.
        logging_dir: folder of the trackers; `project_dir` by default.
        automatic_checkpoint_naming: make `save_state()` write to `<project_dir>/checkpoints/checkpoint_<n>`.
        total_limit: number of such checkpoints to keep; older ones are removed after the new one is committed.
        iteration: number of the next checkpoint.
        save_on_each_node: write the files of `save_model` on every machine.

    Raises:
        ConfigurationError: if `total_limit` is below 1.

    Example:
        >>> ProjectConfiguration("runs", automatic_checkpoint_naming=True, total_limit=2).logging_dir
        'runs'
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigurationError(f"ProjectConfiguration(total_limit={self.total_limit}): use 1 or more, or None.")
        if self.logging_dir is not None:
            local_path(self.logging_dir, "logging_dir")
        self.set_directories(self.project_dir)

    @property
    def checkpoint_folder(self) -> Place:
        """Folder of the automatically named checkpoints."""
        assert self.project_dir is not None, "the Accelerator checks this"
        return place_of(self.project_dir, "project_dir") / "checkpoints"

    @property
    def local_folder(self) -> str:
        """The run's folder; the working directory if it has none on this machine."""
        if self.project_dir is None or isinstance(self.checkpoint_folder, BucketPath):
            return "."
        return os.fspath(self.project_dir)

    def next_name(self) -> str:
        """Returns the next automatic name, skipping names that an earlier run has used in the same folder."""
        names = (f"checkpoint_{number}" for number in itertools.count(self.iteration))
        return next(name for name in names if not is_taken(self.checkpoint_folder / name))

    def continue_after(self, path: Place) -> None:
        """Continues the numbering after a checkpoint, if it was named automatically."""
        named = AUTOMATIC.fullmatch(path.name)
        if named is not None:
            self.iteration = int(named[1]) + 1

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Sets the run's folder, and the trackers' folder if it is not set."""
        is_local = project_dir is None or not isinstance(place_of(project_dir, "project_dir"), BucketPath)
        self.project_dir = project_dir
        if self.logging_dir is None and is_local:
            self.logging_dir = project_dir


class KwargsHandler:
    """Base class of the objects in `kwargs_handlers`."""

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the settings that differ from their defaults.

        Example:
            >>> AutocastKwargs(enabled=False).to_kwargs()
            {'enabled': False}
        """
        plain = vars(type(self)())
        return {name: value for name, value in vars(self).items() if value != plain.get(name, value)}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Settings of `torch.autocast`.

    Attributes:
        enabled: False runs the block of `accelerator.autocast(AutocastKwargs(enabled=False))` in full precision.
        cache_enabled: keep the half-precision copies of weights within a forward pass.

    Example:
        >>> import torch
        >>> from leyden import Accelerator
        >>> accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        >>> with accelerator.autocast(AutocastKwargs(enabled=False)):
        ...     torch.is_autocast_enabled("cpu")
        False
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of torch's DistributedDataParallel.

    Attributes:
        comm_hook: gradient compression: "no", "fp16", "bf16", "power_sgd" or "batched_power_sgd".
        comm_wrapper: further compression of a power_sgd hook's messages: "no", "fp16" or "bf16".
        comm_state_option: arguments of PowerSGDState.

    The other attributes are DDP's arguments of the same names.

    Example:
        >>> DistributedDataParallelKwargs(find_unused_parameters=True).arguments()
        {'find_unused_parameters': True}
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: str = "no"
    comm_wrapper: str = "no"
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of DDP that differ from torch's defaults."""
        return {name: value for name, value in self.to_kwargs().items() if not name.startswith("comm_")}

    def hook(self) -> Any:
        """Returns state and hook for `register_comm_hook`; None without a hook. Needs an initialized process group.

        Raises:
            ConfigurationError: if a name is unknown, or a wrapper has no power_sgd hook.
        """
        from leyden.strategies.comm_hooks import find_comm_hook

        name, around = (str(getattr(value, "value", value)).lower() for value in (self.comm_hook, self.comm_wrapper))
        for value, known, argument in ((name, HOOKS, "comm_hook"), (around, WRAPPERS, "comm_wrapper")):
            if value not in known:
                raise ConfigurationError(
                    f"DistributedDataParallelKwargs({argument}={value!r}) is unknown. {nearest(value, known)}"
                )
        if around != "no" and "power_sgd" not in name:
            raise ConfigurationError(
                f"comm_wrapper={around!r} needs a power_sgd hook to wrap. Set comm_hook='power_sgd' too."
            )
        if "power_sgd" not in name:
            return find_comm_hook(None if name == "no" else name)
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hook: Any = powerSGD_hook.powerSGD_hook if name == "power_sgd" else powerSGD_hook.batched_powerSGD_hook
        wrappers = {
            "no": None,
            "fp16": default_hooks.fp16_compress_wrapper,
            "bf16": default_hooks.bf16_compress_wrapper,
        }
        return find_comm_hook(hook, powerSGD_hook.PowerSGDState(None, **self.comm_state_option), wrappers[around])


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of fp16's gradient scaler.

    Attributes:
        init_scale: the initial scale.
        growth_factor: factor applied to the scale after `growth_interval` steps without inf or nan.
        backoff_factor: factor applied to the scale after a step with inf or nan, which is skipped.
        growth_interval: steps between growths.
        enabled: False trains without a scaler: losses are not scaled, and no step is skipped.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`.

    Attributes:
        backend: "gloo", "nccl", …; by default the one for the device.
        init_method: refused: the launcher of the ranks sets the address of their rendezvous.
        timeout: time limit of a collective; 30 minutes by default.

    Raises:
        ConfigurationError: if `init_method` is given.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.init_method is not None:
            raise ConfigurationError(
                "InitProcessGroupKwargs(init_method=…) is not supported: ranks meet at MASTER_ADDR and MASTER_PORT, "
                "which torchrun, srun or leyden launch set. Leave it out."
            )


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`, for `accelerator.profile()`.

    Attributes:
        activities: "cpu", "cuda", …; all available ones by default.
        schedule_option: arguments of `torch.profiler.schedule`.
        on_trace_ready: function called with the profiler.
        output_trace_dir: folder in which each rank writes its trace, `profile_<rank>.json`.

    The other attributes are the profiler's arguments of the same names.

    Example:
        >>> type(ProfileKwargs(activities=["cpu"]).build()).__name__
        'profile'
    """

    activities: Sequence[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.output_trace_dir is not None:
            local_path(self.output_trace_dir, "output_trace_dir")

    def build(self) -> Any:
        """Creates torch's profiler with these arguments."""
        from torch import profiler

        chosen = None
        if self.activities is not None:
            known = {name.lower(): value for name, value in profiler.ProfilerActivity.__members__.items()}
            unknown = [name for name in self.activities if name.lower() not in known]
            if unknown:
                raise ConfigurationError(f"ProfileKwargs(activities=[{unknown[0]!r}]): use {', '.join(known)}.")
            chosen = [known[name.lower()] for name in self.activities]
        return profiler.profile(
            activities=chosen,
            schedule=None if self.schedule_option is None else profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    @contextmanager
    def around(self, name: str) -> Iterator[Any]:
        """Profiles a block; with `output_trace_dir`, writes its trace there as a file `name`."""
        with self.build() as profiler:
            yield profiler
        if self.output_trace_dir is not None:
            os.makedirs(self.output_trace_dir, exist_ok=True)
            profiler.export_chrome_trace(os.path.join(self.output_trace_dir, name))


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of `torch.compile`, for `Accelerator(dynamo_plugin=…)`.

    Attributes:
        backend: as `dynamo_backend`; the launcher's by default, or none.
        use_regional_compilation: refused: `FSDPStrategy(compile=True)` compiles block by block.

    The other attributes are torch.compile's arguments of the same names.

    Raises:
        ConfigurationError: for `use_regional_compilation`.
    """

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        if self.use_regional_compilation:
            raise ConfigurationError(
                "TorchDynamoPlugin(use_regional_compilation=True) is not supported. FSDPStrategy(compile=True) "
                "compiles block by block; or call block.compile() on each block before prepare."
            )

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of torch.compile other than the backend."""
        return {
            name: value
            for name, value in self.to_kwargs().items()
            if name not in ("backend", "use_regional_compilation")
        }


@dataclass
class FullyShardedDataParallelPlugin:
    """FSDP settings under the names of Accelerate and FSDP1; `FSDPStrategy` has its own names.

    None keeps the strategy's default. `build` refuses values that FSDP2 does not support, with the reason.

    Attributes:
        sharding_strategy: "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", …, Accelerate's number, or torch's
            ShardingStrategy.
        reshard_after_forward: free gathered parameters after forward.
        backward_prefetch: "BACKWARD_PRE", as FSDP2 always does; other values warn.
        mixed_precision_policy: torch's policy, in place of the one derived from the precision.
        auto_wrap_policy: modules that are gathered as one unit, as for `FSDPStrategy`; or Accelerate's policy names.
        transformer_cls_names_to_wrap: class names of the modules to wrap as units.
        min_num_params: smallest number of parameters in a unit, for wrapping by size.
        cpu_offload: keep parameters, gradients and optimizer state on the CPU.
        ignored_modules: modules that are not sharded, or a regular expression that matches their whole names.
        state_dict_type: "SHARDED_STATE_DICT", the format of checkpoints; others warn or are refused.
        sync_module_states: start every rank with rank 0's parameters and buffers.
        forward_prefetch: prefetch the next unit's parameters before each unit's forward.
        limit_all_gathers: True, as FSDP2 always does.
        use_orig_params: True, as FSDP2 always does.
        activation_checkpointing: recompute activations in backward.
        cpu_ram_efficient_loading: True, as always.
        fsdp_version: 1 or 2; FSDP2 is used in any case.

    Example:
        >>> FullyShardedDataParallelPlugin(min_num_params=1000).min_num_params
        1000
    """

    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    transformer_cls_names_to_wrap: Sequence[str] | None = None
    min_num_params: int | None = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    limit_all_gathers: bool | None = None
    use_orig_params: bool | None = None
    activation_checkpointing: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    fsdp_version: int | None = None

    def build(self, device_mesh: tuple[int, int] | None = None) -> Any:
        """Builds the strategy.

        Args:
            device_mesh: (replicate, shard) sizes of the mesh.
        """
        from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy

        given = self.arguments()
        if device_mesh is not None:
            given["device_mesh"] = device_mesh
        return FSDPStrategy(**given)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments for `FSDPStrategy` or `MeshStrategy`."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if "transformer_cls_names_to_wrap" in given:
            given["auto_wrap_policy"] = set(given.pop("transformer_cls_names_to_wrap"))
        if "mixed_precision_policy" in given:
            given["mp_policy"] = given.pop("mixed_precision_policy")
        if given.pop("fsdp_version", 2) == 1 and "use_orig_params" not in given:
            # FSDP1's flat parameters no longer exist; original parameters give the same numbers.
            given["use_orig_params"] = True
        return given


def handlers_by_class(handlers: Sequence[KwargsHandler] | None) -> dict[type, Any]:
    """Returns the handlers of an Accelerator by their class, of which none may appear twice."""
    found: dict[type, Any] = {}
    for handler in handlers or ():
        if not isinstance(handler, KwargsHandler):
            raise ConfigurationError(
                f"kwargs_handlers holds {handler!r}. Pass objects such as GradScalerKwargs(init_scale=1024.0)."
            )
        if type(handler) in found:
            raise ConfigurationError(f"kwargs_handlers holds {type(handler).__name__} twice. Pass it once.")
        found[type(handler)] = handler
    return found


# enums of argument values ---------------------------------------------------------------------------------------------
class Word(str, Enum):
    """Base class of enums whose members are strings."""

    def __str__(self) -> str:
        return str(self.value)


class DDPCommunicationHookType(Word):
    """DDP communication hooks: values of `DistributedDataParallelKwargs(comm_hook=…)`."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DynamoBackend(Word):
    """torch.compile backends: values of `Accelerator(dynamo_backend=…)`."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"


class LoggerType(Word):
    """Tracker names: values of `Accelerator(log_with=…)`."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    AIM = "aim"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    TRACKIO = "trackio"


class PrecisionType(Word):
    """Values of `Accelerator(mixed_precision=…)`."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(Word):
    """Values of `Accelerator(rng_types=…)`."""

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"
