"""Digests of a module's weights: what each rank holds of them, and those of all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from leyden.strategies.base import Strategy
from leyden.trainer.checkpoint.copies import HostMemory
from leyden.trainer.format.digests import Digest
from leyden.trainer.format.manifest import XXH3, digest_of
from leyden.trainer.format.safefile import memory_of
from leyden.trainer.format.shard_table import Sizes
from leyden.trainer.format.tensors import check_tensor, is_sharded, split

Box: TypeAlias = tuple[Sizes, Sizes]
"""Offsets in the whole tensor, and sizes."""
Held: TypeAlias = tuple[str, dict[Box, str]]
"""What a rank holds of a tensor: dtype and shape of the whole, and the digest of each of the rank's parts."""


class DigestReader:
    """Reads digests of the tensors that a checkpoint of a module holds, under any strategy.

    Tensors on the CPU are read where they are. Those of a GPU are copied to memory that is kept, as large as this
    rank's part of the model, and the host waits once for all of them.
    """

    def __init__(self) -> None:
        self._memory = HostMemory()

    def held(self, strategy: Strategy, module: nn.Module, wanted: Callable[[str, Tensor], bool]) -> dict[str, Held]:
        """Returns the digests of what this rank holds, in the module's order; all ranks call it.

        Args:
            strategy: under which the module trains.
            module: between two steps.
            wanted: by a tensor's name, and the tensor, whether this rank reads it.
        """
        taken = _Taken()
        strategy.save(taken, module, None)
        found: dict[str, tuple[str, dict[Box, list[Tensor]]]] = {}
        for name, tensor in taken.tensors.items():
            if wanted(name, tensor):
                check_tensor(tensor, name, sharded=True)
                found[name] = (_form(tensor), _parts(tensor))
        pieces = [piece for _, parts in found.values() for part in parts.values() for piece in part]
        here = iter(self._on_host(pieces))
        known: dict[tuple[Any, ...], str] = {}
        return {
            name: (form, {box: _digest([next(here) for _ in part], known) for box, part in parts.items()})
            for name, (form, parts) in found.items()
        }

    def _on_host(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        self._memory.begin()
        here, devices = [], set[torch.device]()
        for number, piece in enumerate(pieces):
            if piece.device.type != "cpu":
                room = self._memory.room(("", str(number)), piece)
                here.append(room.copy_(piece, non_blocking=piece.is_cuda))
                devices |= {piece.device} if piece.is_cuda else set()
            else:
                here.append(piece)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return here


class _Taken:
    """Stands in for a checkpoint's writer, and keeps what it is given."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def model(self, state_dict: Mapping[str, Any], replicated: Collection[str] = ()) -> None:
        self.tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}

    def optimizers(self, states: list[dict[str, Any]]) -> None:
        """Nothing of them."""


def merged(found: Iterable[Mapping[str, Held]]) -> dict[str, Digest]:
    """Merges what ranks hold into a digest for each tensor.

    That of a tensor that one rank holds whole is the digest of its bytes. That of a sharded one is the digest of its
    shards' digests, whichever ranks hold them; of replicas the first rank's counts.

    Args:
        found: of each rank, in their order.
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
    """Returns the digest of digests."""
    digest = digest_of(XXH3)()
    digest.update(memoryview("".join(digests).encode()))
    return digest.hexdigest()


def _merged(form: str, parts: Mapping[Box, str]) -> Digest:
    if len(parts) == 1:
        return Digest(form, next(iter(parts.values())))
    boxes = sorted(parts)
    # The cut is a part of the form: digests of other shards are others, whatever the weights.
    cut = combined(map(repr, boxes))[:8]
    return Digest(f"{form} in {len(boxes)} shards ({cut})", combined(parts[box] for box in boxes))


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _parts(tensor: Tensor) -> dict[Box, list[Tensor]]:
    """Returns the dense tensors of each part that this rank holds of a tensor."""
    if not is_sharded(tensor):
        return {((0,) * tensor.dim(), tuple(tensor.shape)): list(split(tensor)[1].values())}
    from leyden.trainer.checkpoint.shards import held_parts

    return {(offsets, tuple(part.shape)): [part.detach()] for offsets, part in held_parts(tensor).items()}


def _digest(pieces: Sequence[Tensor], known: dict[tuple[Any, ...], str]) -> str:
    """Returns the digest of dense tensors on the CPU, in the order of their elements.

    Args:
        pieces: the tensors.
        known: the digests of tensors that have been read; tied ones are read once.
    """
    place = tuple((piece.data_ptr(), piece.dtype, piece.shape, piece.stride()) for piece in pieces if piece.numel())
    if place not in known or not place:
        digest = digest_of(XXH3)()
        for piece in pieces:
            # Named, since it must outlive the view of its memory.
            dense = piece.contiguous()
            digest.update(memory_of(dense))
        known[place] = digest.hexdigest()
    return known[place]
