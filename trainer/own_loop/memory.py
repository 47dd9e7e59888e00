"""Memory: freeing objects, and trying smaller batches until one fits, on all ranks together."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from leyden.strategies.errors import ConfigurationError, is_out_of_memory
from leyden.strategies.launch.failure import is_lost

if TYPE_CHECKING:
    from leyden.strategies.regroup import Attempt
    from leyden.trainer.accelerator import Accelerator

NO_WORKSPACE = "CUDNN_STATUS_NOT_SUPPORTED"
"""cuDNN's error where no algorithm fits into the memory that is left; it has other causes too."""


def release_memory(*objects: Any) -> list[None]:
    """Frees what is no longer referenced, and empties the device's cache.

    Args:
        *objects: what is to be freed; the caller must overwrite its own references with what is returned.

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
    """Decorator: calls a function with a batch size, and again with half of it each time memory runs out.

    If one rank runs out, all try the next size together: ranks that wait for it in a collective are woken, and each says how its
    attempt ended before anybody continues. The function prepares its model anew each time: what was wrapped for the process group of
    an attempt that was given up is of no use in the next.

    Args:
        function: its first argument is the batch size.
        starting_batch_size: of the first attempt.
        reduce_batch_size_fn: gives the next size; half of the last one if left out.
        accelerator: its `gradient_accumulation_steps` grow as the batch shrinks, so that a step keeps its number of samples.
            Ours.

    Raises:
        ConfigurationError: if the function takes no batch size, or was called with one.
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
    size = starting_batch_size
    steps = 1 if accelerator is None else accelerator.gradient_accumulation_steps

    @functools.wraps(chosen)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _check_arguments(chosen, args)
        failed: str | None = None
        while size > 0:
            if accelerator is not None:
                accelerator.gradient_accumulation_steps = steps * max(1, starting_batch_size // size)
            release_memory()
            result, fits, failed = _attempt(chosen, size, args, kwargs)
            if fits:
                return result
            size = size // 2 if reduce_batch_size_fn is None else reduce_batch_size_fn()
        failed = failed or "on another rank"
        raise RuntimeError(f"{chosen.__name__} does not fit into memory with any batch size down to 1 ({failed}).")

    return run


def _attempt(
    function: Callable[..., Any], size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, bool, str | None]:
    """Calls the function once, on all ranks together.

    Returns:
        Its result; whether the size fits, on every rank; and the error if memory ran out on this rank.
    """
    attempt = _begin_attempt()
    result, failed = None, None
    try:
        result = function(size, *args, **kwargs)
    except Exception as error:
        if is_out_of_memory(error) or NO_WORKSPACE in str(error):
            # Its traceback holds the frames, and they hold the tensors that did not fit.
            failed = f"{type(error).__name__}: {error}"
        elif not isinstance(error, RuntimeError) or attempt is None:
            raise
        elif not attempt.was_given_up(10.0 if is_lost(error) else 0.1):
            # Else the error only follows from that of a rank which ran out of memory.
            raise
    if attempt is None:
        return result, failed is None, failed
    if failed is not None:
        attempt.give_up()
    if attempt.end():
        return result, True, None
    del result
    _meet_again()
    return None, False, failed


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    names = list(inspect.signature(function).parameters)
    if not names:
        raise ConfigurationError(f"{function.__name__} takes no batch size: give it one as its first argument.")
    if len(args) >= len(names):
        raise ConfigurationError(
            f"{function.__name__} was called with a batch size, which find_executable_batch_size gives it: leave it out."
        )


def _begin_attempt() -> Attempt | None:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from leyden.strategies.process_group import begin_attempt

    return begin_attempt()


def _meet_again() -> None:
    from leyden.strategies.process_group import meet_again

    meet_again()
