"""A rank's part of a module's parameters and buffers, as plain tensors in the memory in which the module has them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class LocalWeights:
    """This rank's part of a module's tensors: the shard of a sharded one, and one name for a tied one.

    What is written to them, the module has. `Strategy.local_weights` makes it, between two steps.

    Args:
        module: has the tensors.

    Attributes:
        parameters: by name.
        buffers: by name, those that no checkpoint holds too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = {name: local_part(parameter) for name, parameter in module.named_parameters()}
        self.buffers = {name: local_part(buffer) for name, buffer in module.named_buffers()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, parameters first."""
        return {**self.parameters, **self.buffers}


def digest_of(tensors: Iterable[Tensor]) -> str:
    """A digest of the bytes of some tensors that lie in plain memory."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def is_dtensor(tensor: Tensor) -> bool:
    """True for a DTensor; if nothing has imported them, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor, else the tensor itself; detached, in the same memory."""
    local: Tensor = tensor.detach()
    if not is_dtensor(local):
        return local
    local = local._local_tensor  # type: ignore[attr-defined]
    # A shard that is cast before it is gathered (fp8) wraps its memory.
    within: Tensor | None = getattr(local, "_tensor", None)
    return local if within is None else within


def sharded_like(local: Tensor, tensor: Any) -> Tensor:
    """The DTensor whose shard on this rank is `local`, sharded as `tensor` is; `local` itself if that is whole."""
    if not is_dtensor(tensor):
        return local
    from torch.distributed.tensor import DTensor

    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
