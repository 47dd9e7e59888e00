"""The names of `accelerate.utils.operations`, for scripts that import from there."""

from __future__ import annotations

from typing import Any

from leyden.trainer.accelerator.absent import attribute
from leyden.utils import (
    broadcast,
    broadcast_object_list,
    convert_to_fp32,
    find_batch_size,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    send_to_device,
)

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "convert_to_fp32",
    "find_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "send_to_device",
]


def __getattr__(name: str) -> Any:
    return attribute(__name__, name)
