"""Which rank this is, and code that runs on some ranks alone or on some first."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from leyden.strategies.base import Strategy
from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.trainer.data.sharding import block

if TYPE_CHECKING:
    from leyden.trainer.accelerator.deepspeed import DeepSpeedPlugin
    from leyden.trainer.accelerator.megatron import MegatronLMPlugin
    from leyden.trainer.accelerator.plugins import FullyShardedDataParallelPlugin

F = TypeVar("F", bound=Callable[..., Any])


class DistributedType(str, Enum):
    """How ranks work together; each is equal to its name as text."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    MEGATRON_LM = "MEGATRON_LM"
    XLA = "XLA"


class PartialState:
    """Which rank this is, and code that runs on some ranks alone or on some first: no precision, no model.

    An Accelerator has one; a script that only shares out work makes its own.

    Args:
        cpu: run on the CPU though there is a GPU.
        strategy: whose ranks they are; left out, those that the environment names.

    Example:
        >>> PartialState(cpu=True).num_processes
        1
    """

    def __init__(self, cpu: bool = False, *, strategy: Strategy | None = None) -> None:
        self.strategy = joined("cpu" if cpu else "auto") if strategy is None else strategy
        self._alone = ""
        """The function that only some ranks run now: a collective within it would wait for ever."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.distributed_type.value}, rank {self.process_index} of {self.num_processes}, "
            f"local {self.local_process_index}, {self.device})"
        )

    def destroy_process_group(self) -> None:
        """Ends this object's use of the ranks. The process group itself stays until the process ends."""
        self.strategy.teardown()

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.strategy.root_device

    @property
    def num_processes(self) -> int:
        """Ranks on all machines."""
        return self.strategy.ranks.world_size

    @property
    def process_index(self) -> int:
        """This rank, from 0."""
        return self.strategy.ranks.global_rank

    @property
    def local_process_index(self) -> int:
        """This rank on its machine, from 0."""
        return self.strategy.ranks.local_rank

    @property
    def is_main_process(self) -> bool:
        return self.strategy.ranks.global_rank == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.strategy.ranks.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        return self.strategy.ranks.global_rank == self.strategy.ranks.world_size - 1

    @property
    def use_distributed(self) -> bool:
        """True with several ranks."""
        return self.strategy.ranks.world_size > 1

    @property
    def distributed_type(self) -> DistributedType:
        """How this run's ranks work together."""
        name = {"hsdp": "fsdp", "xla_fsdp": "xla"}.get(self.strategy.name, self.strategy.name)
        if getattr(self.strategy, "shard_mesh", None) is not None:
            name = "fsdp"
        name = name.partition("_stage_")[0].upper()
        if name in DistributedType.__members__ and name != "NO":
            return DistributedType(name)
        if self.num_processes == 1:
            return DistributedType.NO
        return DistributedType.MULTI_CPU if self.device.type == "cpu" else DistributedType.MULTI_GPU

    # waiting ----------------------------------------------------------------------------------------------------------
    def wait_for_everyone(self) -> None:
        """Waits until every rank has called this."""
        self.refuse_alone("wait_for_everyone")
        self.strategy.ranks.barrier()

    def main_process_first(self) -> AbstractContextManager[None]:
        """The main rank runs the block before the other ranks do, so that they find what it cached."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """The main rank of each machine runs the block before its other ranks do."""
        return self._first(self.is_local_main_process)

    @contextmanager
    def _first(self, mine: bool) -> Iterator[None]:
        if not mine:
            self.strategy.ranks.barrier()
        try:
            yield
        finally:
            # After an error too, or the others would wait for ever.
            if mine:
                self.strategy.ranks.barrier()

    def refuse_alone(self, name: str) -> None:
        """Raises if a collective is called inside a function that other ranks do not run."""
        if self._alone and self.num_processes > 1:
            raise ConfigurationError(
                f"{name} was called on one rank only, in {self._alone}: every rank must call it, so call it outside, "
                "and use its result there."
            )

    # some ranks alone -------------------------------------------------------------------------------------------------
    def on_main_process(self, function: F) -> F:
        """Decorator: only the main rank runs the function; elsewhere it returns None."""
        return self._only(function, lambda: self.is_main_process, "on_main_process")

    def on_local_main_process(self, function: F) -> F:
        """Decorator: only the main rank of each machine runs the function."""
        return self._only(function, lambda: self.is_local_main_process, "on_local_main_process")

    def on_last_process(self, function: F) -> F:
        """Decorator: only the last rank runs the function."""
        return self._only(function, lambda: self.is_last_process, "on_last_process")

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Decorator: only the rank of that number runs the function."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        self._check_index("on_process", "process_index", process_index, self.num_processes)
        return self._only(function, lambda: self.process_index == process_index, "on_process")

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: only the rank of that number on each machine runs the function."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        self._check_index("on_local_process", "local_process_index", local_process_index, self.num_processes)
        return self._only(function, lambda: self.local_process_index == local_process_index, "on_local_process")

    @staticmethod
    def _check_index(method: str, name: str, index: int | None, size: int) -> None:
        if index is None or not 0 <= index < size:
            raise ConfigurationError(f"{method}({name}={index!r}): give a rank from 0 to {size - 1}.")

    def _only(self, function: F, mine: Callable[[], bool], name: str) -> F:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not mine():
                return None
            before, self._alone = self._alone, f"{getattr(function, '__name__', 'a function')} under @{name}"
            try:
                return function(*args, **kwargs)
            finally:
                self._alone = before

        return run  # type: ignore[return-value]

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints once per machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Gives each rank its part of a list, tuple, tensor, data set, or of each value of a dict of these.

        Ranks of a tp group run their model together, and get the same part.

        Args:
            inputs: what to split; what does not divide goes to the first ranks.
            apply_padding: repeat the last entry on ranks that would have fewer, so that results can be gathered.
        """
        yield split(inputs, self.strategy.data_rank, self.strategy.data_size, apply_padding)


class AcceleratorState(PartialState):
    """Ranks and precision of an Accelerator, as `accelerator.state`; without one those that the environment names.

    Attributes:
        mixed_precision: "no", "fp16", "bf16", or the full name of another precision.
        deepspeed_plugin: the Accelerator's; None without DeepSpeed.
        fsdp_plugin: the Accelerator's, or what its strategy comes to; None where nothing is sharded by FSDP.
        megatron_lm_plugin: the Accelerator's; None without one.
    """

    def __init__(
        self,
        strategy: Strategy | str | None = None,
        mixed_precision: str | None = None,
        deepspeed_plugin: DeepSpeedPlugin | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
    ) -> None:
        if isinstance(strategy, str):
            # Accelerate's first argument is the precision.
            strategy, mixed_precision = None, strategy
        super().__init__(strategy=joined() if strategy is None else strategy)
        self.mixed_precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
        self.deepspeed_plugin = deepspeed_plugin
        self.fsdp_plugin = fsdp_plugin
        self.megatron_lm_plugin = megatron_lm_plugin

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin | None:
        """The plugin: there is one at most."""
        return self.deepspeed_plugin


def split(inputs: Any, rank: int, ranks: int, padded: bool = False) -> Any:
    """Returns one rank's part of a list, tensor, data set, or dict of these.

    Example:
        >>> split(["a", "b", "c"], 1, 2), split(["a", "b", "c"], 1, 2, padded=True)
        (['c'], ['c', 'c'])
    """
    if isinstance(inputs, Mapping):
        lengths = {len(value) for value in inputs.values()}
        if len(lengths) > 1:
            raise ConfigurationError(f"split_between_processes: the values of the dict have lengths {sorted(lengths)}.")
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
    raise ConfigurationError(f"split_between_processes cannot split {kind_of(inputs)}: give a list or tensor.")


def joined(accelerator: str | None = None) -> Strategy:
    """A strategy on the ranks that were launched, or on one device, ready for use.

    Args:
        accelerator: "cpu" or "auto"; None takes a strategy that has joined the ranks in this process, if there is one.

    Raises:
        ConfigurationError: if several ranks are planned that nobody has started.
    """
    from leyden.strategies import find_strategy
    from leyden.strategies.launch.environment import rank_environment
    from leyden.strategies.process_group import current

    running = current() if accelerator is None else None
    if running is not None:
        return running
    alone = rank_environment() is None
    found = find_strategy("auto", accelerator or "auto", 1 if alone else "auto")
    check_started(found)
    found.setup_environment()
    return found


def check_started(strategy: Strategy) -> None:
    """Raises ConfigurationError where ranks are planned that nobody has started."""
    if strategy.ranks.are_planned:
        raise ConfigurationError(
            f"strategy={strategy.name!r} plans {strategy.ranks.world_size} ranks, and your own training loop runs on "
            "ranks that are there already: start the script with `leyden launch --num_processes "
            f"{strategy.ranks.world_size} …` or torchrun, or call its function through notebook_launcher."
        )
