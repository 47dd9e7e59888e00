"""Digests of a module's weights: of the parts that each rank holds, and merged over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from leyden.checkpoint.copies import HostMemory
from leyden.checkpoint.format.digests import Digest
from leyden.checkpoint.format.manifest import XXH3, digest_of
from leyden.checkpoint.format.safefile import memory_of
from leyden.checkpoint.format.shard_table import Sizes
from leyden.checkpoint.format.tensors import check_tensor, is_sharded, split
from leyden.core.devices import copies_aside, mark
from leyden.strategies.base import Strategy

Box: TypeAlias = tuple[Sizes, Sizes]
"""A rectangle of a tensor: its offsets in the whole tensor, and its sizes."""
Held: TypeAlias = tuple[str, dict[Box, str]]
"""One rank's parts of a tensor: dtype and shape of the whole as a string, and the digest of each part."""


class DigestReader:
    """Computes digests of the tensors that a checkpoint of a module would hold, under any strategy.

    CPU tensors are read in place. Other tensors are copied to host buffers, which are reused between calls and are as
    large as this rank's part of the model. The host waits once for all copies.
    """

    def __init__(self) -> None:
        self._memory = HostMemory()

    def held(self, strategy: Strategy, module: nn.Module, wanted: Callable[[str, Tensor], bool]) -> dict[str, Held]:
        """Returns the digests of this rank's parts, in the module's order. All ranks call it between two steps.

        `wanted` is called with a tensor's name and the tensor, and returns True if this rank should read it.
        """
        tensors: dict[str, tuple[str, dict[Box, list[Tensor]]]] = {}
        for name, tensor in saved_tensors(strategy, module).items():
            if wanted(name, tensor):
                check_tensor(tensor, name, sharded=True)
                tensors[name] = (_form(tensor), _parts(tensor))
        pieces = [piece for _, parts in tensors.values() for part in parts.values() for piece in part]
        on_host = iter(self._on_host(pieces))
        known: dict[tuple[Any, ...], str] = {}
        return {
            name: (form, {box: _digest([next(on_host) for _ in part], known) for box, part in parts.items()})
            for name, (form, parts) in tensors.items()
        }

    def _on_host(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        self._memory.begin()
        on_host, devices = [], set[torch.device]()
        for number, piece in enumerate(pieces):
            if piece.device.type != "cpu":
                buffer = self._memory.room(("", str(number)), piece)
                on_host.append(buffer.copy_(piece, non_blocking=copies_aside(piece.device)))
                devices |= {piece.device} if copies_aside(piece.device) else set()
            else:
                on_host.append(piece)
        for device in devices:
            mark(device).synchronize()
        return on_host


def saved_tensors(strategy: Strategy, module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a module that a strategy saves, by name. All ranks call it."""
    collector = _TensorCollector()
    strategy.save(collector, module, None)
    return collector.tensors


class _TensorCollector:
    """Stands in for a checkpoint's writer, and keeps the tensors that a strategy passes to it."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def model(self, state_dict: Mapping[str, Any], replicated: Collection[str] = ()) -> None:
        self.tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}

    def optimizers(self, states: list[dict[str, Any]]) -> None:
        """Ignores the optimizers' states."""


def merged(found: Iterable[Mapping[str, Held]]) -> dict[str, Digest]:
    """Merges the results of `DigestReader.held` on all ranks, in rank order, into one digest for each tensor.

    A tensor that is not sharded gets the digest of its bytes. A sharded tensor gets the digest of its shards' digests,
    whichever ranks hold them. If several ranks hold the same shard, the first rank's digest counts.
    """
    forms: dict[str, str] = {}
    parts: dict[str, dict[Box, str]] = {}
    for held in found:
        for name, (form, own) in held.items():
            forms.setdefault(name, form)
            known = parts.setdefault(name, {})
            for box, digest in own.items():
                known.setdefault(box, digest)
    return {name: _merged(form, parts[name]) for name, form in forms.items()}


def combined(digests: Iterable[str]) -> str:
    """Returns a digest of digests."""
    digest = digest_of(XXH3)()
    digest.update(memoryview("".join(digests).encode()))
    return digest.hexdigest()


def _merged(form: str, parts: Mapping[Box, str]) -> Digest:
    if len(parts) == 1:
        return Digest(form, next(iter(parts.values())))
    boxes = sorted(parts)
    # The form includes how the tensor is sharded, because the combined digest depends on it, too.
    sharding = combined(map(repr, boxes))[:8]
    return Digest(f"{form} in {len(boxes)} shards ({sharding})", combined(parts[box] for box in boxes))


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _parts(tensor: Tensor) -> dict[Box, list[Tensor]]:
    """Returns this rank's parts of a tensor. A part is several dense tensors if, for instance, the tensor is sparse."""
    if not is_sharded(tensor):
        return {((0,) * tensor.dim(), tuple(tensor.shape)): list(split(tensor)[1].values())}
    from leyden.checkpoint.shards import held_parts

    return {(offsets, tuple(part.shape)): [part.detach()] for offsets, part in held_parts(tensor).items()}


def _digest(pieces: Sequence[Tensor], known: dict[tuple[Any, ...], str]) -> str:
    """Returns the digest of dense CPU tensors. `known` has digests by memory, so that tied tensors are read once."""
    memory = tuple((piece.data_ptr(), piece.dtype, piece.shape, piece.stride()) for piece in pieces if piece.numel())
    if memory not in known or not memory:
        digest = digest_of(XXH3)()
        for piece in pieces:
            # A local variable, because the tensor must outlive the view of its memory.
            dense = piece.contiguous()
            digest.update(memory_of(dense))
        known[memory] = digest.hexdigest()
    return known[memory]
