"""Buffers that differ between ranks, such as batch norm's running statistics, which each rank updates on its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.format.safefile import memory_of
from leyden.checkpoint.format.tensors import is_sharded
from leyden.core.errors import StateError
from leyden.core.saved_state import SavedState, brief


class Buffers:
    """This rank's buffers that differ from those of the first rank that uses them, which are saved with the weights.

    Every rank must call `state_dict`, which compares them. `is_used` returns True for a buffer that this rank's part of
    the module uses, by name: a rank of a pipeline has old copies of other stages' buffers.
    """

    def __init__(self, module: nn.Module, ranks: CheckpointRanks, is_used: Callable[[str], bool]) -> None:
        self._module, self._ranks, self._is_used = module, ranks, is_used

    def state_dict(self) -> dict[str, Tensor]:
        if self._ranks.size == 1:
            return {}
        parameters = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        buffers = {
            name: value
            for name, value in self._module.state_dict().items()
            if name not in parameters
            and self._is_used(name)
            and isinstance(value, Tensor)
            and value.layout is torch.strided
            and not is_sharded(value)
        }
        digests = {name: _digest(value) for name, value in buffers.items()}
        first = {name: digest for rank in reversed(self._ranks.gather(digests)) for name, digest in rank.items()}
        return {name: value for name, value in buffers.items() if digests[name] != first[name]}

    def check_state_dict(self, state: Any) -> None:
        saved = SavedState(state, "buffers")
        current = self._module.state_dict() if saved.entries else {}
        for name, value in saved.entries.items():
            if name in current and (not isinstance(value, Tensor) or value.shape != current[name].shape):
                wanted = tuple(current[name].shape)
                raise StateError(saved.path(name), f"is {brief(value)}, and must be a tensor of {wanted}")

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        current = self._module.state_dict() if state else {}
        for name, value in state.items():
            if name in current:
                current[name].copy_(value)

    def regroup(self, states: Sequence[Any], rank: int, seed: int) -> dict[str, Tensor]:
        """Returns no buffers: ranks of another layout see other samples, so all continue with rank 0's buffers."""
        return {}


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(memory_of(tensor.detach().cpu().contiguous())).digest()
