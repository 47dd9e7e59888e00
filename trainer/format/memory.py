"""Memory for large tensors that are about to be filled from a file."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_HUGE = 2 * 1024 * 1024


def room(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """Returns a tensor as `torch.empty` does, on the CPU in pages of 2 MiB where the system grants them.

    The first write to new memory maps and clears it page by page: 134 MB in pages of 4 KiB take 30 ms, which is as much
    as it takes to read them from the page cache.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.nbytes >= 2 * _HUGE:
        advise = _madvise()
        # Whole pages alone: what is before and behind them may be another's.
        begin, end = -(-tensor.data_ptr() // _HUGE) * _HUGE, (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE
        if advise is not None and end > begin:
            # A refusal changes nothing.
            advise(begin, end - begin, mmap.MADV_HUGEPAGE)
    return tensor


@functools.cache
def _madvise() -> Callable[..., Any] | None:
    """Returns the system's madvise; None where there are no such pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise  # type: ignore[no-any-return]
