"""Values of models that hand-written code has split on the meta device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from leyden.strategies.errors import kind_of


@torch.no_grad()
def fill(root: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Gives the tensors of a model that are on the meta device their memory, and their values by `reset_parameters`.

    One layer after the other is drawn whole, of which each rank keeps its part: drawn by themselves, all parts of a
    parameter would be the same. Every rank must call this.

    Args:
        root: the model.
        device: of this rank.
        group: in which rank 0's values are given to all, on the CPU; None for one rank.
    """
    left = []
    for module in root.modules():
        if not any(tensor.is_meta for _, tensor in _own(module)):
            continue
        module.to_empty(device=device, recurse=False)
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is None:
            left.append(kind_of(module))
        else:
            _draw(module, reset, group)
    if left:
        warnings.warn(
            f"{', '.join(sorted(set(left)))} was built on the meta device, and has no reset_parameters() for its "
            "values: they are arbitrary until your own code sets them, such as on_train_start.",
            stacklevel=2,
        )


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _draw(module: nn.Module, reset: Any, group: dist.ProcessGroup | None) -> None:
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
            cut = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            part.to_local().copy_(tensor[cut])
        else:
            part.copy_(tensor)
