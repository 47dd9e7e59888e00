"""PartialState and AcceleratorState: this process's rank, and code that runs on some ranks only or on some first."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from leyden.core.devices import find_device
from leyden.core.environment import rank_environment
from leyden.core.errors import ConfigurationError, kind_of
from leyden.data.sharding import block
from leyden.strategies.base import Strategy
from leyden.trainer.engine.debugging import is_debugging

if TYPE_CHECKING:
    from leyden.accelerator.settings.deepspeed import DeepSpeedPlugin
    from leyden.accelerator.settings.megatron import MegatronLMPlugin
    from leyden.accelerator.settings.parallel import ParallelismConfig
    from leyden.accelerator.settings.plugins import FullyShardedDataParallelPlugin, TorchDynamoPlugin

F = TypeVar("F", bound=Callable[..., Any])


class DistributedType(str, Enum):
    """The kind of parallelism in use; each member equals its name as a string."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    MEGATRON_LM = "MEGATRON_LM"
    XLA = "XLA"


class Alone:
    """Knows the function that only some ranks are running now; a collective inside it would hang."""

    def __init__(self) -> None:
        self._running = ""

    def only(self, function: F, is_chosen: bool, name: str) -> F:
        """Wraps a function so that only chosen ranks run it. `name` is that of the decorator, for errors."""
        label = f"{getattr(function, '__name__', 'a function')} under @{name}"

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not is_chosen:
                return None
            before, self._running = self._running, label
            try:
                return function(*args, **kwargs)
            finally:
                self._running = before

        return run  # type: ignore[return-value]

    def refuse(self, name: str) -> None:
        """Raises ConfigurationError if a collective is called inside such a function."""
        if self._running:
            raise ConfigurationError(
                f"{name} was called in {self._running}, which other ranks skip, but every rank must call it. "
                "Call it outside, and use its result inside."
            )


class RankControl:
    """The rank and device of this process, and code that runs on some ranks only or on some first."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._alone = Alone()

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.strategy.root_device

    @property
    def num_processes(self) -> int:
        """Number of ranks on all machines."""
        return self.strategy.ranks.world_size

    @property
    def process_index(self) -> int:
        """Global rank, from 0."""
        return self.strategy.ranks.global_rank

    @property
    def local_process_index(self) -> int:
        """Local rank on this machine, from 0."""
        return self.strategy.ranks.local_rank

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return self.strategy.ranks.global_rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on the first rank of each machine."""
        return self.strategy.ranks.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """True on the last rank."""
        return self.strategy.ranks.global_rank == self.strategy.ranks.world_size - 1

    @property
    def use_distributed(self) -> bool:
        """True if there are several ranks."""
        return self.strategy.ranks.world_size > 1

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of parallelism in use."""
        name = {"hsdp": "fsdp", "xla_fsdp": "xla"}.get(self.strategy.name, self.strategy.name)
        if getattr(self.strategy, "shard_mesh", None) is not None:
            name = "fsdp"
        name = name.partition("_stage_")[0].upper()
        if name in DistributedType.__members__ and name != "NO":
            return DistributedType(name)
        if self.num_processes == 1:
            return DistributedType.NO
        return DistributedType.__members__.get(f"MULTI_{self.device.type.upper()}", DistributedType.MULTI_GPU)

    # waiting ----------------------------------------------------------------------------------------------------------
    def main_process_first(self) -> AbstractContextManager[None]:
        """Runs the block on the main rank first, so that the other ranks find what it cached."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Runs the block on the main rank of each machine before its other ranks."""
        return self._first(self.is_local_main_process)

    @contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.strategy.ranks.barrier()
        try:
            yield
        finally:
            # After an error too, or the other ranks would wait forever.
            if is_first:
                self.strategy.ranks.barrier()

    def refuse_alone(self, name: str) -> None:
        """Raises ConfigurationError if a collective is called inside a function that other ranks skip."""
        if self.num_processes > 1:
            self._alone.refuse(name)

    # functions that run on some ranks only ----------------------------------------------------------------------------
    def on_main_process(self, function: F) -> F:
        """Decorator that runs the function on the main rank only; it returns None on the others."""
        return self._alone.only(function, self.is_main_process, "on_main_process")

    def on_local_main_process(self, function: F) -> F:
        """Decorator that runs the function on the main rank of each machine only."""
        return self._alone.only(function, self.is_local_main_process, "on_local_main_process")

    def on_last_process(self, function: F) -> F:
        """Decorator that runs the function on the last rank only."""
        return self._alone.only(function, self.is_last_process, "on_last_process")

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Decorator that runs the function on global rank `process_index` only."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        self._check_index("on_process", "process_index", process_index, self.num_processes)
        return self._alone.only(function, self.process_index == process_index, "on_process")

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator that runs the function on local rank `local_process_index` of each machine only."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        self._check_index("on_local_process", "local_process_index", local_process_index, self.num_processes)
        return self._alone.only(function, self.local_process_index == local_process_index, "on_local_process")

    @staticmethod
    def _check_index(method: str, name: str, index: int | None, size: int) -> None:
        if index is None or not 0 <= index < size:
            raise ConfigurationError(f"{method}({name}={index!r}): use a rank from 0 to {size - 1}.")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints once per machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yields this rank's part of a list, tuple, tensor, dataset, or of each value of a dict of these.

        The ranks of a tp group run their model together and get the same part.

        Args:
            inputs: the entries to split; the first ranks take one more each if the split is uneven.
            apply_padding: repeat the last entry on ranks with fewer entries, so that results can be gathered.
        """
        yield split(inputs, self.strategy.data_rank, self.strategy.data_size, apply_padding)


class PartialState(RankControl):
    """This process's rank and device, and code that runs on some ranks only or on some first; no precision, no model.

    For a script that only distributes work; an Accelerator has the same methods.

    Args:
        cpu: run on the CPU even if a GPU is available.
        strategy: the strategy that has the ranks; by default one on the launched ranks.

    Example:
        >>> PartialState(cpu=True).num_processes
        1
    """

    def __init__(self, cpu: bool = False, *, strategy: Strategy | None = None) -> None:
        super().__init__(joined_strategy("cpu" if cpu else "auto") if strategy is None else strategy)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.distributed_type.value}, rank {self.process_index} of {self.num_processes}, "
            f"local {self.local_process_index}, {self.device})"
        )

    def __reduce__(self) -> Any:
        """Pickles as a state of the process that unpickles: a loader's worker has the rank of its parent."""
        return _here, (self.device.type, vars(self).get("mixed_precision"))

    def destroy_process_group(self) -> None:
        """Leaves the strategy. The process group itself stays until the process ends."""
        self.strategy.teardown()

    @property
    def default_device(self) -> torch.device:
        """The device that "auto" chooses on this machine."""
        return torch.device(find_device("auto").type)

    @property
    def backend(self) -> str | None:
        """Backend of the process group, such as "gloo"; None on one process."""
        return torch.distributed.get_backend() if self.use_distributed else None

    @property
    def debug(self) -> bool:
        """True in debug mode: ranks compare their operands before each collective."""
        return is_debugging()

    initialized = True
    fork_launched = False
    """True in Accelerate on XLA ranks that were forked; Leyden's XLA ranks are launched."""

    def set_device(self) -> None:
        """Does nothing: a state has its device from the start."""

    @staticmethod
    def _reset_state(*args: Any, **kwargs: Any) -> None:
        """Does nothing: no state is shared. Scripts and tests written for Accelerate call it between two runs."""

    def wait_for_everyone(self) -> None:
        """Blocks until every rank has called this method."""
        self.refuse_alone("wait_for_everyone")
        self.strategy.ranks.barrier()


class AcceleratorState(PartialState):
    """Ranks and precision of an Accelerator, as `accelerator.state`; without one, those of the environment.

    Attributes:
        mixed_precision: "no", "fp16", "bf16", or the full name of another precision.
        deepspeed_plugin: the Accelerator's plugin; None without DeepSpeed.
        fsdp_plugin: the Accelerator's plugin, or one that describes its strategy; None without FSDP.
        megatron_lm_plugin: the Accelerator's plugin; None without one.
        parallelism_config: the Accelerator's ParallelismConfig; None without one.
        dynamo_plugin: a plugin with the backend and arguments of torch.compile; None without an Accelerator.
    """

    def __init__(
        self,
        strategy: Strategy | str | None = None,
        mixed_precision: str | None = None,
        deepspeed_plugin: DeepSpeedPlugin | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        parallelism_config: ParallelismConfig | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
    ) -> None:
        if isinstance(strategy, str):
            # Accelerate's first argument is the precision.
            strategy, mixed_precision = None, strategy
        super().__init__(strategy=joined_strategy() if strategy is None else strategy)
        self.mixed_precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
        self.deepspeed_plugin = deepspeed_plugin
        self.fsdp_plugin = fsdp_plugin
        self.megatron_lm_plugin = megatron_lm_plugin
        self.parallelism_config = parallelism_config
        self.dynamo_plugin = dynamo_plugin

    @property
    def device_mesh(self) -> Any:
        """The mesh of `parallelism_config`; None without one."""
        return None if self.parallelism_config is None else self.parallelism_config.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """True if FSDP shards the models; Leyden has only FSDP2."""
        return self.distributed_type is DistributedType.FSDP

    @property
    def deepspeed_plugins(self) -> dict[str, DeepSpeedPlugin] | None:
        """The only plugin, as a dict; None without DeepSpeed."""
        return None if self.deepspeed_plugin is None else {"default": self.deepspeed_plugin}

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin | None:
        """Returns the only plugin, whatever the name; None without DeepSpeed."""
        return self.deepspeed_plugin


def split(inputs: Any, rank: int, ranks: int, padded: bool = False) -> Any:
    """Returns one rank's part of a list, tensor, dataset, or dict of these.

    Example:
        >>> split(["a", "b", "c"], 1, 2), split(["a", "b", "c"], 1, 2, padded=True)
        (['c'], ['c', 'c'])
    """
    if isinstance(inputs, Mapping):
        lengths = {len(value) for value in inputs.values()}
        if len(lengths) > 1:
            raise ConfigurationError(
                f"split_between_processes: the dict's values have different lengths {sorted(lengths)}. Make them equal."
            )
        return {key: split(value, rank, ranks, padded) for key, value in inputs.items()}
    count = len(inputs)
    own = block(count, rank, ranks)
    longest = -(-count // ranks)
    short = longest - (own.stop - own.start) if padded and count else 0
    if isinstance(inputs, Tensor):
        return torch.cat([inputs[own], inputs[-1:].expand(short, *inputs.shape[1:])]) if short else inputs[own]
    if isinstance(inputs, (list, tuple)):
        kind: Any = type(inputs)
        return inputs[own] + kind(inputs[-1:] * short)
    if isinstance(inputs, (str, range)):
        return inputs[own]
    numbers = [*range(count)[own], *[count - 1] * short]
    if hasattr(inputs, "select"):
        return inputs.select(numbers)
    if hasattr(inputs, "__getitem__"):
        from torch.utils.data import Subset

        return Subset(inputs, numbers)
    raise ConfigurationError(f"split_between_processes cannot split {kind_of(inputs)}. Pass a list or tensor.")


def _here(device: str, precision: str | None) -> PartialState:
    """Returns the state of this process, which does not join the ranks: they wait for no loader's worker."""
    from leyden.strategies import find_strategy
    from leyden.strategies.process_group import current

    alone = rank_environment() is None
    found = current() or find_strategy("auto", device, 1 if alone else "auto")
    return PartialState(strategy=found) if precision is None else AcceleratorState(found, precision)


def joined_strategy(accelerator: str | None = None) -> Strategy:
    """Returns a strategy on the launched ranks, or on one device, that has joined its process group.

    Args:
        accelerator: "cpu" or "auto"; None reuses a strategy that has already joined in this process, if there is one.

    Raises:
        ConfigurationError: if several ranks are planned but not launched.
    """
    from leyden.strategies import find_strategy
    from leyden.strategies.process_group import current

    running = current() if accelerator is None else None
    if running is not None:
        return running
    found = find_strategy("auto", *chosen_devices(accelerator == "cpu", rank_environment() is None))
    check_started(found)
    found.setup_environment()
    return found


def is_true(variable: str) -> bool:
    """Returns True if an environment variable is set to "1", "true", "yes" or "on"."""
    return os.environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on")


def chosen_devices(cpu: bool, alone: bool) -> tuple[str, Any]:
    """Returns the `accelerator` and `devices` that a script or Accelerate's environment variables choose.

    A process that is `alone` takes one device. Launched ranks take one each, whatever the index in
    ACCELERATE_TORCH_DEVICE.
    """
    if cpu or is_true("ACCELERATE_USE_CPU"):
        return "cpu", 1 if alone else "auto"
    kind, _, index = os.environ.get("ACCELERATE_TORCH_DEVICE", "").partition(":")
    return kind or "auto", ([int(index)] if index.isdigit() else 1) if alone else "auto"


def check_started(strategy: Strategy) -> None:
    """Raises ConfigurationError if the strategy plans ranks that were not launched."""
    if strategy.ranks.are_planned:
        raise ConfigurationError(
            f"strategy={strategy.name!r} plans {strategy.ranks.world_size} ranks, but a custom training loop cannot "
            f"start them. Start the script with `leyden launch --num_processes {strategy.ranks.world_size} …` or "
            "torchrun, or call its function through notebook_launcher."
        )
