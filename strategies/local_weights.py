"""A rank's part of a module's parameters and buffers, as plain tensors that share the module's memory."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class LocalWeights:
    """This rank's part of a module's tensors: local shards of sharded tensors, and tied tensors only once.

    The tensors share the module's memory, so writing to them changes the module. `Strategy.local_weights` returns them
    between two steps.

    Args:
        module: the module.

    Attributes:
        parameters: parameters by name.
        buffers: buffers by name, including non-persistent ones.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = {name: local_part(parameter) for name, parameter in module.named_parameters()}
        self.buffers = {name: local_part(buffer) for name, buffer in module.named_buffers()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, parameters first."""
        return {**self.parameters, **self.buffers}

    def to_save(self, name: str, tensor: Tensor, local: Tensor) -> Tensor:
        """Returns what this rank passes to a checkpoint, if it saves other values in place of a tensor's.

        Args:
            name: the tensor's name.
            tensor: the tensor, as the module has it.
            local: this rank's part of the other values.
        """
        return sharded_like(local, tensor)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Returns a digest of the bytes of plain (strided, unsharded) tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def is_dtensor(tensor: Tensor) -> bool:
    """Returns True for a DTensor, without importing their module: if it is not imported, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> Tensor:
    """Returns this rank's shard of a DTensor, or any other tensor itself. Detached, sharing memory."""
    local: Tensor = tensor.detach()
    if not is_dtensor(local):
        return local
    local = local._local_tensor  # type: ignore[attr-defined]
    # A shard that is cast to fp8 before it is gathered wraps the plain tensor.
    inner: Tensor | None = getattr(local, "_tensor", None)
    return local if inner is None else inner


def sharded_like(local: Tensor, tensor: Any) -> Tensor:
    """Returns a DTensor with the shard `local`, sharded like `tensor`; `local` itself if `tensor` is not sharded."""
    if not is_dtensor(tensor):
        return local
    from torch.distributed.tensor import DTensor

    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
