"""Functions that free memory, and find a batch size that fits into memory on all ranks."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leyden.core.devices import free_cached_memory
from leyden.core.environment import rank_environment
from leyden.core.errors import ConfigurationError, UnknownArgumentError, is_out_of_memory
from leyden.core.rank_zero import inform, to_stderr
from leyden.launch.tries import give_up, given_up, numbered, starts_again

if TYPE_CHECKING:
    from leyden.accelerator.accelerator import Accelerator

NO_WORKSPACE = "CUDNN_STATUS_NOT_SUPPORTED"
"""cuDNN's error if no algorithm fits into the remaining memory; it has other causes too."""


def release_memory(*objects: Any) -> list[None]:
    """Collects garbage and empties the device's cache.

    Args:
        *objects: objects to free; overwrite your own references to them with the returned values.

    Returns:
        One None per object.

    Example:
        >>> model, optimizer = object(), object()
        >>> model, optimizer = release_memory(model, optimizer)
        >>> model is None
        True
    """
    count = len(objects)
    del objects
    gc.collect()
    free_cached_memory()
    return [None] * count


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    accelerator: Accelerator | None = None,
) -> Any:
    """Decorator that calls a function with a batch size, and retries with nine tenths of it whenever memory runs out.

    A rank that runs out of memory would leave the others waiting in a collective. So all ranks restart, run the script
    again, and reach the function with the smaller size. That needs a launcher that restarts ranks on one machine:
    `leyden launch`, a Trainer whose script starts its ranks, `notebook_launcher`, or a strategy that forks or spawns
    ranks.

    Args:
        function: the function, whose first argument is the batch size.
        starting_batch_size: batch size of the first attempt.
        reduce_batch_size_fn: function that returns the next size; by default nine tenths of the last one, rounded down.
            After a restart it is called once for each rejected size, so it must not depend on anything else.
        accelerator: an Accelerator whose `gradient_accumulation_steps` grow as the batch shrinks, so that a step keeps
            its number of samples. The next size is then half of the last one by default. Not in Accelerate.

    Raises:
        ConfigurationError: if the function takes no batch size, or was called with one (also a TypeError); on several
            ranks that no launcher restarts (those of torchrun, srun, or several machines).
        RuntimeError: if not even a batch of 1 fits.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=8)
        ... def train(batch_size):
        ...     if batch_size > 3:
        ...         raise MemoryError("out of memory")
        ...     return batch_size
        >>> train()  # after 8, 7, 6, 5, 4
        3
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            accelerator=accelerator,
        )
    chosen = function
    # Half of a batch in twice as many batches is the same step; nine tenths of it is not.
    factor = 0.9 if accelerator is None else 0.5
    sizes = _Sizes(chosen, starting_batch_size, reduce_batch_size_fn, factor)
    steps = 1 if accelerator is None else accelerator.gradient_accumulation_steps

    @functools.wraps(chosen)
    def run(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(chosen, args)
        sizes.begin()
        failed = "before"
        while sizes.size > 0:
            if accelerator is not None:
                accelerator.gradient_accumulation_steps = steps * max(1, starting_batch_size // sizes.size)
            release_memory()
            try:
                return chosen(sizes.size, *args, **kwargs)
            except Exception as error:
                if not (is_out_of_memory(error) or NO_WORKSPACE in str(error)):
                    raise
                # Keep only the text: the traceback would keep alive the frames and their tensors.
                failed = f"{type(error).__name__}: {error}"
            sizes.give_up(failed)
        raise RuntimeError(
            f"No executable batch size found, reached zero: {chosen.__name__} does not fit into memory with any batch "
            f"size down to 1 ({failed})."
        )

    return run


class _Sizes:
    """The batch sizes to try for one function: the next is what `smaller` returns, or the last one times `factor`."""

    def __init__(
        self, function: Callable[..., Any], first: int, smaller: Callable[[], int] | None, factor: float
    ) -> None:
        self.size = first
        self._function, self._smaller, self._factor = function, smaller, factor
        self._name = numbered(f"{function.__module__}.{function.__qualname__}")
        self._given_up = 0

    def begin(self) -> None:
        """Continues with the first size that earlier attempts have not rejected."""
        place = rank_environment()
        if place is not None and place.world_size > 1 and not starts_again():
            raise ConfigurationError(
                f"find_executable_batch_size cannot restart the {place.world_size} ranks that {place.starter} started, "
                "and all must restart if one runs out of memory. Start one machine's ranks with `leyden launch "
                f"--num_processes {place.world_size} script.py`; for more, find the size that way first, then call "
                f"{self._function.__name__} with it, without the decorator."
            )
        while self._given_up < given_up(self._name):
            self._next()

    def give_up(self, failed: str) -> None:
        """Moves to the next size; on several ranks, all ranks restart with it, and this call does not return."""
        place, last = rank_environment(), self.size
        self._next()
        if place is None or place.world_size == 1 or self.size <= 0:
            return
        inform(
            f"leyden: {self._function.__name__} does not fit into the memory of rank {place.rank} with batch size "
            f"{last} ({failed}). All ranks restart with batch size {self.size}.",
            to_stderr,
            every_rank=True,
        )
        leaving = give_up(self._name, self._given_up)
        from leyden.strategies.process_group import end_all_ranks

        end_all_ranks(leaving, f"in {self._function.__name__}")
        raise leaving

    def _next(self) -> None:
        self.size = int(self.size * self._factor) if self._smaller is None else self._smaller()
        self._given_up += 1


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    names = list(inspect.signature(function).parameters)
    if not names:
        raise ConfigurationError(f"{function.__name__} takes no batch size. Make batch_size its first argument.")
    if len(args) >= len(names):
        raise UnknownArgumentError(
            f"{function.__name__} was called with a batch size, but find_executable_batch_size passes it. Leave it out."
        )
