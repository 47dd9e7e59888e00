"""Frees memory, and finds a batch size that fits into it, on all ranks together."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from leyden.strategies.errors import ConfigurationError, is_out_of_memory
from leyden.strategies.launch.environment import rank_environment
from leyden.strategies.launch.tries import give_up, given_up, numbered, starts_again

if TYPE_CHECKING:
    from leyden.trainer.accelerator.accelerator import Accelerator

NO_WORKSPACE = "CUDNN_STATUS_NOT_SUPPORTED"
"""cuDNN's error where no algorithm fits into the memory that is left; it has other causes too."""


def release_memory(*objects: Any) -> list[None]:
    """Frees what is no longer referenced, and empties the device's cache.

    Args:
        *objects: to be freed; the caller must overwrite its own references with the returned values.

    Returns:
        As many None as there are objects.

    Example:
        >>> model, optimizer = object(), object()
        >>> model, optimizer = release_memory(model, optimizer)
        >>> model is None
        True
    """
    count = len(objects)
    del objects
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    return [None] * count


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    accelerator: Accelerator | None = None,
) -> Any:
    """Decorator: calls a function with a batch size, and with half of it each time memory runs out.

    On several ranks, one that runs out leaves the others waiting for it in a collective. So all ranks restart, run what
    stands before the function again, and reach it with the smaller size. That needs a launcher that restarts ranks, on
    one machine: `leyden launch`, a Trainer in a script that starts its ranks, `notebook_launcher`, or a strategy that
    forks or spawns them.

    Args:
        function: its first argument is the batch size.
        starting_batch_size: of the first attempt.
        reduce_batch_size_fn: returns the next size; half of the last one if left out. After a restart it is called once
            for each size that was given up, so it must not depend on anything else.
        accelerator: its `gradient_accumulation_steps` grow as the batch shrinks, so that a step keeps its number of
            samples. Ours.

    Raises:
        ConfigurationError: if the function takes no batch size, or was called with one; on several ranks that nobody
            would restart (those of torchrun, srun, or several machines).
        RuntimeError: if not even a batch of 1 fits.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=8)
        ... def train(batch_size):
        ...     if batch_size > 3:
        ...         raise MemoryError("out of memory")
        ...     return batch_size
        >>> train()
        2
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            accelerator=accelerator,
        )
    chosen = function
    sizes = _Sizes(chosen, starting_batch_size, reduce_batch_size_fn)
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
                # Its traceback holds the frames, and they hold the tensors that did not fit.
                failed = f"{type(error).__name__}: {error}"
            sizes.give_up(failed)
        raise RuntimeError(f"{chosen.__name__} does not fit into memory with any batch size down to 1 ({failed}).")

    return run


class _Sizes:
    """The batch sizes of one function, from the first one down.

    Args:
        function: whose they are.
        first: the first one.
        smaller: returns the next one; None for half of the last.
    """

    def __init__(self, function: Callable[..., Any], first: int, smaller: Callable[[], int] | None) -> None:
        self.size = first
        self._function, self._smaller = function, smaller
        self._name = numbered(f"{function.__module__}.{function.__qualname__}")
        self._given_up = 0

    def begin(self) -> None:
        """Continues with the first size that earlier attempts have not given up."""
        place = rank_environment()
        if place is not None and place.world_size > 1 and not starts_again():
            raise ConfigurationError(
                f"find_executable_batch_size on {place.world_size} ranks of {place.starter}: if one of them runs out "
                "of memory, all must restart, which only `leyden launch` (on one machine), notebook_launcher "
                "and a Trainer that starts its ranks itself do. Start with `leyden launch --num_processes "
                f"{place.world_size} script.py`, or find the size there, and call {self._function.__name__} with it "
                "here, without the decorator."
            )
        while self._given_up < given_up(self._name):
            self._next()

    def give_up(self, failed: str) -> None:
        """Takes the next size; on several ranks, all restart with it, and this call does not return."""
        place, last = rank_environment(), self.size
        self._next()
        if place is None or place.world_size == 1 or self.size <= 0:
            return
        print(
            f"leyden: {self._function.__name__} does not fit into the memory of rank {place.rank} with batch size "
            f"{last} ({failed}). All ranks restart with {self.size}.",
            file=sys.stderr,
            flush=True,
        )
        leaving = give_up(self._name, self._given_up)
        from leyden.strategies.process_group import end_all_ranks

        end_all_ranks(leaving, f"in {self._function.__name__}")
        raise leaving

    def _next(self) -> None:
        self.size = self.size // 2 if self._smaller is None else self._smaller()
        self._given_up += 1


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    names = list(inspect.signature(function).parameters)
    if not names:
        raise ConfigurationError(f"{function.__name__} takes no batch size: give it one as its first argument.")
    if len(args) >= len(names):
        raise ConfigurationError(
            f"{function.__name__} was called with a batch size, which find_executable_batch_size passes: leave it out."
        )
