"""Runs a function on ranks that torch_xla starts, one for each device of this machine."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from leyden.core.environment import STARTER, RankEnvironment
from leyden.core.errors import ConfigurationError
from leyden.launch.meeting import LOOPBACK, listen
from leyden.launch.processes import temporary


def run_on_devices(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(*args)` on one rank per device of this machine, through `torch_xla.launch`.

    Args:
        function: function that each rank calls, with the rank's environment variables set.
        *args: the function's arguments. Their classes must be importable.

    Returns:
        The value that rank 0 returned, with tensors copied to the CPU.

    Raises:
        ConfigurationError: if the arguments cannot be pickled, or this process already uses XLA.
        BaseException: the error of a rank that failed.
    """
    import torch_xla

    from leyden.launch.functions import packed_for, unpacked

    if torch_xla._XLAC._xla_runtime_is_initialized():
        raise ConfigurationError(
            "start_method='xla' starts processes, but this process already holds the XLA devices. Restart, and touch "
            "no XLA device before fit."
        )
    drawn = torch.initial_seed(), torch.get_rng_state(), random.getstate()
    handed = packed_for("xla", (function, args, drawn), "start_method='script'")
    with listen() as free:
        port = int(free.getsockname()[1])
    with temporary("xla") as folder:
        answer = folder / "answer"
        torch_xla.launch(_rank, args=(handed, str(answer), port))
        return unpacked(answer.read_bytes())


def _rank(index: int, handed: bytes, answer: str, port: int) -> None:
    from torch_xla import runtime

    from leyden.launch.functions import packed, unpacked

    if runtime.addressable_device_count() > 1:
        raise ConfigurationError(
            "this TPU has two devices per process, which torch_xla runs as threads. Use strategy='xla', which drives "
            "all devices from one process."
        )
    sizes = runtime.world_size(), runtime.local_device_count()
    place = RankEnvironment(index, runtime.local_ordinal(), *sizes, runtime.host_index(), "xla", (LOOPBACK, port))
    os.environ.update({**place.variables(), STARTER: "xla"})
    function, args, (seed, torch_state, python_state) = unpacked(handed)
    # Each rank draws the same order of samples as this process would have.
    torch.manual_seed(seed)
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    value = function(*args)
    if index == 0:
        Path(answer).write_bytes(packed(value))
