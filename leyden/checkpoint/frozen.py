"""The frozen part of a module, of which a checkpoint with `trainable_only` holds digests instead of tensors.

The digests do not depend on how tensors are sharded, so a checkpoint can be resumed under another strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.digests import combined, saved_tensors
from leyden.checkpoint.format.errors import CheckpointError, blame
from leyden.checkpoint.format.tensors import dtype_named, is_sharded, split
from leyden.checkpoint.reader import CheckpointReader
from leyden.core.errors import ConfigurationError
from leyden.core.saved_state import SavedState
from leyden.core.text import listed
from leyden.strategies.base import Strategy

FILE = "frozen"
_SHOWN = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_UNUSED = ".original_module."
"""Where peft keeps the layer of which it trains a copy. Nothing computes with it, and a new head there is random."""


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """The tensors that a checkpoint leaves out because training does not change them.

    Attributes:
        digests: the digest of each tensor, by name; "" for a tensor that is not compared.
        source: the name of the pretrained model that the tensors are from; None if there is no such name.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None

    @classmethod
    def read(cls, reader: CheckpointReader) -> FrozenPart | None:
        """Returns the frozen part that a checkpoint leaves out; None if it holds the whole module.

        Raises:
            CheckpointError: if the file is not valid.
        """
        if not reader.has(FILE):
            return None
        with blame(reader.path / f"{FILE}.json"):
            saved = SavedState(reader.json(FILE))
            digests = saved.nested("tensors")
            found = {name: digests.text(name) for name in digests.entries}
            source = None if saved.is_none("source") else saved.text("source")
        return cls(found, source)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor that is compared, by name."""
        return {name: dtype_named(digest.partition(" ")[0]) for name, digest in self.digests.items() if digest}

    def to_dict(self) -> dict[str, Any]:
        """Returns the frozen part in the form that checkpoints store."""
        digest = combined(f"{name} {digest}" for name, digest in sorted(self.digests.items()))
        return {"source": self.source, "digest": digest, "tensors": dict(self.digests)}

    def check(self, reader: CheckpointReader, module: nn.Module, now: Mapping[str, str], strict: bool) -> None:
        """Checks that a module holds the tensors that a checkpoint leaves out, before its weights are loaded.

        `now` are the digests of the module's tensors. If `strict`, names must match exactly.

        Raises:
            CheckpointError: if the module's frozen tensors have other values or names; names them.
            ConfigurationError: if `strict` and the checkpoint and the module have different weights.
        """
        of = "" if self.source is None else f" of {self.source}"
        differing = [name for name, digest in self.digests.items() if digest and now.get(name, digest) != digest]
        if differing:
            raise CheckpointError(
                reader.path,
                f"holds only the weights that were trained, and the others{of} are not those of this module: "
                f"{listed(differing, _SHOWN)} {'has' if len(differing) == 1 else 'have'} other values, dtypes or "
                "shapes, or were trained since. Build the module with the same pretrained weights.",
            )
        saved, present = set(reader.names()), set(module.state_dict())
        missing, unexpected = present - saved - self.digests.keys(), (saved | self.digests.keys()) - present
        if strict and (missing or unexpected):
            parts = [f"Missing: {listed(sorted(missing), _SHOWN)}."] if missing else []
            parts += [f"Unexpected: {listed(sorted(unexpected), _SHOWN)}."] if unexpected else []
            raise ConfigurationError(
                f"The checkpoint's weights do not fit {type(module).__name__}: {' '.join(parts)} Build the module as "
                "it was saved."
            )


def source_of(module: nn.Module) -> str | None:
    """Returns the name or folder of the pretrained model in a module, as transformers records it; None without one."""
    names = (getattr(part, "name_or_path", None) for part in module.modules())
    return next((str(name) for name in names if isinstance(name, str) and name), None)


def frozen_part(
    module: nn.Module, strategy: Strategy, base: Mapping[str, str], substitutes: Mapping[str, Tensor]
) -> FrozenPart:
    """Returns the tensors of a module that do not train, and are as before training. All ranks call it.

    `base` are the digests of its tensors before training. Substitutes are saved in place of the module's tensors of the
    same name.
    """
    trainable = trainable_names(module, CheckpointRanks(strategy))
    now = digests_of(module, strategy, substitutes)
    same = {name: now[name] for name in sorted(base.keys() - trainable) if base[name] == now.get(name)}
    return FrozenPart({name: "" if _UNUSED in name else digest for name, digest in same.items()}, source_of(module))


def trainable_names(module: nn.Module, ranks: CheckpointRanks) -> set[str]:
    """Returns the names of all parameters that some rank trains, tied names included. All ranks call it."""
    own = [name for name, one in module.named_parameters(remove_duplicate=False) if one.requires_grad]
    return {name for names in ranks.gather(own) for name in names}


def digests_of(
    module: nn.Module,
    strategy: Strategy | None = None,
    substitutes: Mapping[str, Tensor] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, str]:
    """Returns a digest of each parameter and persistent buffer, by name. All ranks call it.

    The digest of a tensor is the sum of its elements' bits times pseudo-random odd factors, modulo 2**64. A factor is a
    product of one factor for each index, so the shards of a tensor can be summed where they are. Any change of a single
    element changes the sum.

    Substitutes take the place of the module's tensors of the same name. Tensors are converted to their entry in
    `dtypes` first.
    """
    ranks = CheckpointRanks(strategy)
    tensors = module.state_dict() if strategy is None else saved_tensors(strategy, module)
    own: dict[str, tuple[str, dict[tuple[int, ...], Tensor]]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            tensor = (substitutes or {}).get(name, tensor)
            tensor = tensor.to((dtypes or {}).get(name, tensor.dtype))
            own[name] = (_form(tensor), _sums(tensor, counts=ranks.rank == 0))
    numbers = iter(_on_host([total for _, sums in own.values() for total in sums.values()]))
    held = {name: (form, {place: next(numbers) for place in sums}) for name, (form, sums) in own.items()}
    totals: dict[str, tuple[str, dict[tuple[int, ...], int]]] = {}
    for found in ranks.gather(held):
        for name, (form, sums) in found.items():
            # Replicas hold equal shards, so the first one counts.
            known = totals.setdefault(name, (form, {}))[1]
            known |= {place: number for place, number in sums.items() if place not in known}
    return {name: f"{form} {sum(sums.values()) % 2**64:016x}" for name, (form, sums) in totals.items()}


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _sums(tensor: Tensor, counts: bool) -> dict[tuple[int, ...], Tensor]:
    """Returns the sums of this rank's parts of a tensor, by place. One rank's copy of an unsharded one `counts`."""
    if is_sharded(tensor):
        from leyden.checkpoint.shards import held_parts

        return {offsets: _sum(part.detach(), offsets) for offsets, part in held_parts(tensor).items()}
    if not counts:
        return {}
    # A sparse tensor consists of several dense ones.
    parts = split(tensor)[1].values()
    return {(number,): _sum(part, (0,) * part.dim()) for number, part in enumerate(parts)}


def _sum(part: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """Returns the sum of a rectangle's elements times their factors: an int64, which wraps around."""
    factors = [_factors(start, size, part.device) for start, size in zip(offsets, part.shape, strict=True)]
    if part.element_size() in _BITS:
        return _weighted(part.view(_BITS[part.element_size()]), factors)
    # A sum of whole 64-bit words would not tell apart changes of their highest bits.
    words = part.unsqueeze(-1).view(torch.int32)
    return _weighted(words, [*factors, _factors(0, words.shape[-1], part.device)])


def _weighted(bits: Tensor, factors: list[Tensor]) -> Tensor:
    # Small pieces stay in the cache of a CPU; a GPU launches fewer kernels for large ones.
    limit = 2**18 if bits.device.type == "cpu" else 2**24
    if bits.numel() <= limit or not bits.dim():
        total = bits if factors else bits.long()
        for factor in reversed(factors):
            total = (total * factor).sum(-1)
        return total
    rows = limit * len(bits) // bits.numel()
    if rows or bits.dim() == 1:
        pieces = zip(torch.split(bits, max(1, rows)), torch.split(factors[0], max(1, rows)), strict=True)
        return torch.stack([_weighted(piece, [first, *factors[1:]]) for piece, first in pieces]).sum()
    return (torch.stack([_weighted(row, factors[1:]) for row in bits]) * factors[0]).sum()


def _factors(start: int, size: int, device: torch.device) -> Tensor:
    """Returns an odd factor for each index of a dimension: splitmix64's function of the index."""
    mixed = torch.arange(start + 1, start + size + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> shift & (1 << (64 - shift)) - 1)) * _signed(multiplier)
    return mixed | 1


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _on_host(sums: list[Tensor]) -> list[int]:
    """Reads scalars back from their devices, with one transfer for each device."""
    numbers = [0] * len(sums)
    for device in {total.device for total in sums}:
        places = [place for place, total in enumerate(sums) if total.device == device]
        for place, number in zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True):
            numbers[place] = number
    return numbers
