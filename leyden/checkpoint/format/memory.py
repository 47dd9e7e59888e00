"""Allocates memory for large tensors that are about to be read from a file."""

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
    """Returns an uninitialized tensor like `torch.empty`, but on the CPU in 2 MiB pages if the system grants them.

    The first write to new memory maps and clears it page by page. For 134 MB in 4 KiB pages that takes 30 ms, as long
    as reading the bytes from the page cache.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.nbytes >= 2 * _HUGE:
        advise = _madvise()
        # Only whole pages: the memory before and after them may belong to other objects.
        begin, end = -(-tensor.data_ptr() // _HUGE) * _HUGE, (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE
        if advise is not None and end > begin:
            # If the system refuses, nothing changes.
            advise(begin, end - begin, mmap.MADV_HUGEPAGE)
    return tensor


@functools.cache
def _madvise() -> Callable[..., Any] | None:
    """Returns the system's madvise, or None if the system has no huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise  # type: ignore[no-any-return]
