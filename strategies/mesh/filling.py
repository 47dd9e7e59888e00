"""Fills models that hand-written code has split on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from leyden.core.errors import kind_of
from leyden.core.rank_zero import warn


@torch.no_grad()
def fill(root: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Allocates the tensors of a model that are on the meta device, and fills them by `reset_parameters`.

    Each layer is drawn whole, one at a time, and each rank keeps its part. If ranks drew only their parts, all parts of
    a parameter would be identical. Every rank must call this.

    Args:
        root: the model.
        device: the device of this rank.
        group: the process group in which rank 0 broadcasts its values, on the CPU; None for a single rank.
    """
    unfilled = []
    for module in root.modules():
        if not any(tensor.is_meta for _, tensor in _own(module)):
            continue
        module.to_empty(device=device, recurse=False)
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is None:
            unfilled.append(kind_of(module))
        else:
            _draw(module, reset, group)
    if unfilled:
        warn(
            f"{', '.join(sorted(set(unfilled)))} was built on the meta device and has no reset_parameters(): its "
            "values are arbitrary until your code sets them, for example in on_train_start.",
        )


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _draw(module: nn.Module, reset: Any, group: dist.ProcessGroup | None) -> None:
    """Draws whole parameters by `reset`, and copies this rank's part of each into the module's parameter."""
    parts = dict(module._parameters)
    whole = {name: torch.empty(part.shape, dtype=part.dtype) for name, part in parts.items() if part is not None}
    module._parameters.update({name: nn.Parameter(tensor) for name, tensor in whole.items()})
    try:
        reset()
    finally:
        module._parameters.update(parts)
    for name, tensor in whole.items():
        if group is not None:
            dist.broadcast(tensor, src=0, group=group)
        part = parts[name]
        assert part is not None
        if isinstance(part, DTensor):
            sizes, offsets = compute_local_shape_and_global_offset(part.shape, part.device_mesh, part.placements)
            own = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            part.to_local().copy_(tensor[own])
        else:
            part.copy_(tensor)
