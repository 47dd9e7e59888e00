"""Runs functions that use XLA in a new process, since a process can choose its number of devices only once."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from programs import PRELOAD, warm
from ranks.world import run_world

# Read when torch_xla is imported, which the fork server does.
os.environ.setdefault("PJRT_DEVICE", "CPU")
if importlib.util.find_spec("torch_xla") is not None:
    warm.set_forkserver_preload([*PRELOAD, "torch_xla", "torch_xla.distributed.spmd"])


def on_xla(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(*args)` of a test file in a new process, and returns its result."""
    [result] = run_world(1, function, *args, timeout=840)
    return result
