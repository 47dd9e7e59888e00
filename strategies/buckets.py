"""Collectives on many tensors at once: tensors of a dtype travel together in flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 25 * 2**20
"""Size of a buffer in bytes, as in torch's DDP."""


def broadcast_all(tensors: Iterable[Tensor]) -> None:
    """Copies rank 0's values to every rank, in place."""
    for bucket in buckets_of(tensors):
        # As bytes, since backends do not support every dtype.
        _through_buffer(bucket, lambda buffer: dist.broadcast(buffer.view(torch.uint8), 0))


def sum_all(tensors: Iterable[Tensor]) -> None:
    """Sums tensors over the ranks, in place."""
    dense = []
    for tensor in tensors:
        if tensor.is_sparse:
            dist.all_reduce(tensor)
        else:
            dense.append(tensor)
    for bucket in buckets_of(dense):
        _through_buffer(bucket, dist.all_reduce)


def buckets_of(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Divides tensors by dtype and device into buckets that fit a buffer. A larger tensor gets a bucket of its own."""
    found: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        if key not in found or sizes[key] + tensor.nbytes > BUCKET:
            found.setdefault(key, []).append([])
            sizes[key] = 0
        found[key][-1].append(tensor)
        sizes[key] += tensor.nbytes
    return [bucket for buckets in found.values() for bucket in buckets]


def _through_buffer(tensors: Sequence[Tensor], communicate: Callable[[Tensor], Any]) -> None:
    """Copies tensors to a flat buffer, communicates it, and copies the result back."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    communicate(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])
