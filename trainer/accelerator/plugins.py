"""The settings of an Accelerator, under the names of Hugging Face Accelerate."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from leyden.strategies.errors import ConfigurationError, nearest

H = TypeVar("H")
HOOKS = ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")
WRAPPERS = ("no", "fp16", "bf16")
AUTOMATIC = re.compile(r"checkpoint_(\d+)")
"""Names of checkpoints under `automatic_checkpoint_naming`."""


@dataclass
class DataLoaderConfiguration:
    """How loaders are split over the ranks.

    Attributes:
        split_batches: a loader's batch_size counts the samples of all ranks together.
        dispatch_batches: only rank 0 reads the data, and sends the others their batches; with None and False every rank
            reads its own part, of iterable data too.
        even_batches: fill the last batches with samples from the start of the epoch, so that every rank has as many
            batches of the same size; `gather_for_metrics` drops the repeats.
        use_seedable_sampler: shuffle by `data_seed` and epoch alone, whatever else draws random numbers.
        data_seed: seed of that order; torch's initial seed if left out.
        non_blocking: accepted for scripts: copies to cuda and xpu run asynchronously in any case.
        use_stateful_dataloader: accepted for scripts: every loader's place is saved and restored in any case.

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
    """How batches make one optimizer step.

    Attributes:
        num_steps: batches of a step, 1 or more; the last step of an epoch has those that are left, and is divided by
            their number.
        adjust_scheduler: let torch's check of the order of steps count the batches of a window too.
        sync_with_dataloader: a step is made at the end of a loader, however many batches it has; False keeps counting
            in the next epoch.
        sync_each_batch: send gradients to the other ranks with every batch (FSDP then never holds whole ones).

    Raises:
        ConfigurationError: if `num_steps` is not a whole number from 1.

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
            raise ConfigurationError(f"gradient_accumulation_steps={self.num_steps!r}: give a whole number from 1.")


@dataclass
class ProjectConfiguration:
    """Where a run's files go.

    Attributes:
        project_dir: folder of the run.
        logging_dir: folder of the trackers; `project_dir` if left out.
        automatic_checkpoint_naming: `save_state()` writes to `<project_dir>/checkpoints/checkpoint_<n>`.
        total_limit: keep so many of these; older ones are removed after the new one is committed.
        iteration: number of the next one.
        save_on_each_node: every machine keeps its own files.

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
            raise ConfigurationError(f"ProjectConfiguration(total_limit={self.total_limit}): give 1 or more, or None.")
        self.set_directories(self.project_dir)

    @property
    def checkpoint_folder(self) -> Path:
        """Folder of the checkpoints that are named automatically."""
        assert self.project_dir is not None, "the Accelerator checks this"
        return Path(self.project_dir) / "checkpoints"

    def next_name(self) -> str:
        """Returns the next automatic name; numbers of an earlier run in the same folder are not used twice."""
        names = (f"checkpoint_{number}" for number in itertools.count(self.iteration))
        return next(name for name in names if not os.path.lexists(self.checkpoint_folder / name))

    def continue_after(self, path: Path) -> None:
        """Counts on from a checkpoint, if it was named automatically."""
        named = AUTOMATIC.fullmatch(path.name)
        if named is not None:
            self.iteration = int(named[1]) + 1

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Sets the folder of the run, and that of the trackers where it has none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


class KwargsHandler:
    """Base class of what `kwargs_handlers` takes."""

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the settings that are not at their defaults.

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
        enabled: False runs a block of `accelerator.autocast(AutocastKwargs(enabled=False))` in full precision.
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
        comm_hook: how gradients are sent: "no", "fp16", "bf16", "power_sgd" or "batched_power_sgd".
        comm_wrapper: "no", "fp16" or "bf16": compress what a power_sgd hook sends.
        comm_state_option: arguments of PowerSGDState.

    The others are DDP's own, of the same names.

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
        """Returns state and hook for `register_comm_hook`; None without a hook. Call it once the ranks have met.

        Raises:
            ConfigurationError: if a name is unknown, or a wrapper goes with no power_sgd.
        """
        from leyden.strategies.comm_hooks import find_comm_hook

        name, around = (str(getattr(value, "value", value)).lower() for value in (self.comm_hook, self.comm_wrapper))
        for value, known, argument in ((name, HOOKS, "comm_hook"), (around, WRAPPERS, "comm_wrapper")):
            if value not in known:
                raise ConfigurationError(
                    f"DistributedDataParallelKwargs({argument}={value!r}) is not known. {nearest(value, known)}"
                )
        if around != "no" and "power_sgd" not in name:
            raise ConfigurationError(
                f"comm_wrapper={around!r} goes around a power_sgd hook: give comm_hook='power_sgd' too."
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
    """Arguments of the gradient scaler of fp16.

    Attributes:
        init_scale: the first scale.
        growth_factor: what the scale grows by after `growth_interval` steps without inf or nan.
        backoff_factor: what it shrinks by after a step with one, which is skipped.
        growth_interval: steps between two growths.
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
        backend: "gloo", "nccl", …; what suits the device if left out.
        init_method: refused: the starter of the ranks says where they meet.
        timeout: how long a collective waits for the others; 30 minutes if left out.

    Raises:
        ConfigurationError: if `init_method` is given.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.init_method is not None:
            raise ConfigurationError(
                "InitProcessGroupKwargs(init_method=…): ranks meet where torchrun, srun or leyden launch say, by "
                "MASTER_ADDR and MASTER_PORT. Leave it out."
            )


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`, for `accelerator.profile()`.

    Attributes:
        activities: "cpu", "cuda", …; all there are if left out.
        schedule_option: arguments of `torch.profiler.schedule`.
        on_trace_ready: called with the profile.
        output_trace_dir: each rank writes its trace there, as `profile_<rank>.json`.

    The others are the profiler's own, of the same names.

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

    def build(self) -> Any:
        """Makes torch's profiler with these arguments."""
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
        """Profiles a block; with `output_trace_dir`, writes the trace there under this name."""
        with self.build() as profiler:
            yield profiler
        if self.output_trace_dir is not None:
            os.makedirs(self.output_trace_dir, exist_ok=True)
            profiler.export_chrome_trace(os.path.join(self.output_trace_dir, name))


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of `torch.compile`, for `Accelerator(dynamo_plugin=…)`.

    Attributes:
        backend: as `dynamo_backend`; what the launcher says, or none, if left out.
        use_regional_compilation: refused: `FSDPStrategy(compile=True)` compiles block by block.

    The others are torch.compile's own, of the same names.

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
                "TorchDynamoPlugin(use_regional_compilation=True): FSDPStrategy(compile=True) compiles block by "
                "block; or call block.compile() on each before prepare."
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
    """FSDP with the option names of Accelerate and FSDP1; `FSDPStrategy` has its own.

    What is left at None keeps the strategy's default. `build` refuses a value that FSDP2 cannot have, with the reason.

    Attributes:
        sharding_strategy: "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", …, Accelerate's number, or torch's
            ShardingStrategy.
        reshard_after_forward: free gathered parameters after forward.
        backward_prefetch: "BACKWARD_PRE" is what FSDP2 does; others warn.
        mixed_precision_policy: torch's policy, in place of the one that follows from the precision.
        auto_wrap_policy: which modules are gathered as a group, as of `FSDPStrategy`; or Accelerate's names.
        transformer_cls_names_to_wrap: class names of the modules that are groups.
        min_num_params: the least number of parameters of a group, where groups are made by size.
        cpu_offload: parameters, gradients and optimizer state wait on the CPU.
        ignored_modules: modules that stay whole on every rank.
        state_dict_type: "SHARDED_STATE_DICT" is what checkpoints have; others warn or are refused.
        sync_module_states: every rank starts with rank 0's parameters and buffers.
        forward_prefetch: each group asks for the next one's parameters before its own forward.
        limit_all_gathers: True is what FSDP2 does.
        use_orig_params: True is what FSDP2 does.
        activation_checkpointing: compute activations again in backward.
        cpu_ram_efficient_loading: True is what always happens.
        fsdp_version: 1 is accepted; it is FSDP2 in any case.

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
        """Makes the strategy.

        Args:
            device_mesh: (replicate, shard) sizes.
        """
        from leyden.strategies.fsdp.strategy import FSDPStrategy

        given = self.arguments()
        if device_mesh is not None:
            given["device_mesh"] = device_mesh
        return FSDPStrategy(**given)

    def arguments(self) -> dict[str, Any]:
        """The arguments of `FSDPStrategy`, or of a `MeshStrategy`."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if "transformer_cls_names_to_wrap" in given:
            given["auto_wrap_policy"] = set(given.pop("transformer_cls_names_to_wrap"))
        if "mixed_precision_policy" in given:
            given["mp_policy"] = given.pop("mixed_precision_policy")
        if given.pop("fsdp_version", 2) == 1 and "use_orig_params" not in given:
            # FSDP1's layout of parameters no longer exists; everything else has the same numbers.
            given["use_orig_params"] = True
        return given


class Handlers:
    """The handlers of an Accelerator, at most one of each kind.

    Raises:
        ConfigurationError: if one is no handler, or of a kind that was given already.
    """

    def __init__(self, handlers: Sequence[KwargsHandler] | None) -> None:
        self._found: dict[type, Any] = {}
        for handler in handlers or ():
            if not isinstance(handler, KwargsHandler):
                raise ConfigurationError(
                    f"kwargs_handlers holds {handler!r}: give objects such as GradScalerKwargs(init_scale=1024.0)."
                )
            if type(handler) in self._found:
                raise ConfigurationError(f"kwargs_handlers holds {type(handler).__name__} twice: give it once.")
            self._found[type(handler)] = handler

    def get(self, kind: type[H]) -> H | None:
        """Returns the handler of a kind; None if there is none."""
        return self._found.get(kind)


# the words that arguments are made of ---------------------------------------------------------------------------------
class Word(str, Enum):
    """Base class of enums whose members are text."""

    def __str__(self) -> str:
        return str(self.value)


class DDPCommunicationHookType(Word):
    """How DDP sends gradients: `DistributedDataParallelKwargs(comm_hook=…)`."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DynamoBackend(Word):
    """What compiles a model: `Accelerator(dynamo_backend=…)`."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"


class LoggerType(Word):
    """Trackers by name: `Accelerator(log_with=…)`."""

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
    """`Accelerator(mixed_precision=…)`."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(Word):
    """`Accelerator(rng_types=…)`."""

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"
