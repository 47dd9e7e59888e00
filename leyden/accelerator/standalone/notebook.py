"""notebook_launcher: a custom training loop on several ranks, from a notebook or an interactive session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from leyden.core.devices import find_devices
from leyden.core.environment import rank_environment, with_variables
from leyden.core.errors import ConfigurationError
from leyden.trainer.launched import PRECISION, SOURCE

ACCELERATE_PRECISION = "ACCELERATE_MIXED_PRECISION"
ONLY = {"node_rank": 0, "num_nodes": 1, "max_restarts": 0}
"""Accelerate's arguments that accept only its default here."""
WITHOUT_EFFECT = {
    "use_port",
    "master_addr",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_conf",
    "rdzv_id",
    "monitor_interval",
    "log_line_prefix_template",
}
"""Accelerate's arguments of its launcher, which Leyden's does not need."""


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
        function: the function, which creates its own Accelerator.
        args: its arguments.
        num_processes: number of ranks; by default one per GPU, or one.
        mixed_precision: precision of an Accelerator without its own `mixed_precision`.
        start_method: "fork", which imports nothing again; or "spawn", for functions of importable files.
        **refused: Accelerate's arguments for its own launcher; several machines and restarts need a script.

    Returns:
        The return value of rank 0.

    Raises:
        ConfigurationError: inside a run on ranks, or if a process that already uses CUDA would have to fork.

    Example:
        >>> notebook_launcher(max, ([1, 3, 2],), num_processes=1)
        3
    """
    for name, value in refused.items():
        if name not in WITHOUT_EFFECT and name not in ONLY:
            raise ConfigurationError(f"notebook_launcher has no argument {name!r}.")
        if value != ONLY.get(name, value):
            raise ConfigurationError(
                f"notebook_launcher({name}={value}): it runs on one machine only, and once. Use a script and "
                "`leyden launch`."
            )
    if rank_environment() is not None:
        raise ConfigurationError(
            "notebook_launcher was called on a rank that is already running. Call the function itself."
        )
    count = len(find_devices("auto", "auto")) if num_processes is None else num_processes
    call = functools.partial(_with_precision, function, mixed_precision)
    if count == 1:
        return call(*args)
    from leyden.launch.functions import run_function

    return run_function(start_method, count, call, *args)


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    """Calls a function on several CPU ranks, to try a script without GPUs.

    Args:
        function: the function, which creates its own Accelerator.
        args: its arguments.
        num_processes: number of ranks.

    Returns:
        The return value of rank 0.
    """
    with with_variables({"ACCELERATE_USE_CPU": "true"}):
        return notebook_launcher(function, args, num_processes)


def _with_precision(function: Callable[..., Any], precision: str, *args: Any) -> Any:
    variables = {}
    if precision != "no":
        # The second variable is for code that uses Accelerate itself, such as transformers' Trainer.
        variables = {PRECISION: precision, ACCELERATE_PRECISION: precision, SOURCE: "notebook_launcher"}
    with with_variables(variables):
        result = function(*args)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # A rank that fails never gets here; the launcher then ends the ranks that wait.
            torch.distributed.barrier()
        return result
