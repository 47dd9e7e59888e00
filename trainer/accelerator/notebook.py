"""notebook_launcher: your own training loop on several ranks, from a notebook or an interactive session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from leyden.strategies.devices import find_devices
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.launch.environment import rank_environment, with_variables
from leyden.trainer.launched import PRECISION, SOURCE

ACCELERATES = "ACCELERATE_MIXED_PRECISION"


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    start_method: str = "fork",
    **refused: Any,
) -> Any:
    """Calls a function on several ranks of this machine.

    Args:
        function: makes its Accelerator itself.
        args: its arguments.
        num_processes: ranks; one for each GPU, or one, if left out.
        mixed_precision: of an Accelerator without a `mixed_precision` of its own.
        start_method: "fork", which imports nothing again; or "spawn", for functions of importable files.
        **refused: arguments of Accelerate's that name several machines, for which a script is needed.

    Returns:
        What the function returned on rank 0.

    Raises:
        ConfigurationError: inside of a run on ranks, or where CUDA is in use already and would have to be forked.

    Example:
        >>> notebook_launcher(max, ([1, 3, 2],), num_processes=1)
        3
    """
    plain = {"use_port": None, "master_addr": None, "node_rank": 0, "num_nodes": 1, "log_line_prefix_template": None}
    for name, value in refused.items():
        if name not in plain:
            raise ConfigurationError(f"notebook_launcher has no argument {name!r}.")
        if name in ("node_rank", "num_nodes") and value != plain[name]:
            raise ConfigurationError(
                f"notebook_launcher({name}={value}): several machines need a script, and `leyden launch`."
            )
    if rank_environment() is not None:
        raise ConfigurationError(
            "notebook_launcher was called on a rank, which is started already: call the function itself."
        )
    count = len(find_devices("auto", "auto")) if num_processes is None else num_processes
    call = functools.partial(_with_precision, function, mixed_precision)
    if count == 1:
        return call(*args)
    from leyden.strategies.launch.functions import run_function

    return run_function(start_method, count, call, *args)


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    """Calls a function on several ranks on the CPU, to try a script without GPUs.

    Args:
        function: makes its Accelerator itself.
        args: its arguments.
        num_processes: ranks.

    Returns:
        What the function returned on rank 0.
    """
    with with_variables({"ACCELERATE_USE_CPU": "true"}):
        return notebook_launcher(function, args, num_processes)


def _with_precision(function: Callable[..., Any], precision: str, *args: Any) -> Any:
    # The second is read by code that runs on Accelerate itself, as transformers' Trainer does.
    variables = {PRECISION: precision, ACCELERATES: precision, SOURCE: "notebook_launcher"} if precision != "no" else {}
    with with_variables(variables):
        result = function(*args)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # Only ranks that succeed come here: the others would wait for one that failed.
            torch.distributed.barrier()
        return result
