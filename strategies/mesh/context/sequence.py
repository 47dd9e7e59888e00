"""Sequences divided over the ranks of a cp group: the positions that a rank holds, and how a batch is cut."""

from __future__ import annotations

from collections import UserList
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from leyden.core.errors import ConfigurationError, kind_of

Key: TypeAlias = "str | int"
IGNORED = -100
"""The label of a position that counts for nothing."""
DIMENSIONS: dict[Key, int | None] = dict.fromkeys(
    ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask", "token_type_ids", "inputs_embeds"), 1
)
"""The sequence dimension of each tensor of a batch, under the names that models of `transformers` use."""
PADDING: dict[Key, float] = {
    **dict.fromkeys(("labels", "shift_labels"), IGNORED),
    **dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "inputs_embeds"), 0),
}
"""What fills the positions that are added to a sequence, by the same names. Positions are counted on."""


@dataclass(frozen=True)
class SequenceShare:
    """The positions of a sequence that one rank of a group holds.

    A sequence is cut into 2 · size chunks, and rank r holds chunk r and chunk 2 · size - 1 - r. Under causal attention
    later positions see more keys, and so every rank has the same work (as in Llama 3, https://arxiv.org/abs/2407.21783,
    section 3.3.2).

    Attributes:
        rank: this rank's number in its group.
        size: number of ranks in the group.
        length: length of the whole sequence, a multiple of 2 · size.
        filled: number of positions at its end that were added to reach that multiple.

    Example:
        >>> SequenceShare(rank=0, size=2, length=8).positions().tolist()
        [0, 1, 6, 7]
    """

    rank: int
    size: int
    length: int
    filled: int = 0

    @property
    def chunk(self) -> int:
        """The length of a chunk."""
        return self.length // (2 * self.size)

    @property
    def own_length(self) -> int:
        """The number of positions on this rank."""
        return 2 * self.chunk

    @property
    def starts(self) -> tuple[int, int]:
        """The first position of each of this rank's two chunks."""
        return self.rank * self.chunk, (2 * self.size - 1 - self.rank) * self.chunk

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Returns the positions of this rank in the whole sequence, (own_length,)."""
        return torch.cat([torch.arange(start, start + self.chunk, device=device) for start in self.starts])

    def count(self) -> int:
        """Returns the number of this rank's positions that the batch had before it was filled up."""
        end = self.length - self.filled
        return sum(max(0, min(start + self.chunk, end) - start) for start in self.starts)

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """Returns this rank's part of a tensor of the whole sequence."""
        return torch.cat([whole.narrow(dim, start, self.chunk) for start in self.starts], dim)

    def split(self, whole: Tensor, dim: int) -> Tensor:
        """Returns the parts of all ranks, stacked: (size, *part)."""
        chunks = whole.chunk(2 * self.size, dim)
        return torch.stack([torch.cat([chunks[r], chunks[-1 - r]], dim) for r in range(self.size)])

    def join(self, parts: Tensor, dim: int) -> Tensor:
        """Inverts `split`. `dim` is the dimension of the sequence in one part."""
        dim = dim if dim < 0 else dim + 1
        heads, tails = parts.chunk(2, dim)
        return torch.cat([*heads.unbind(0), *reversed(tails.unbind(0))], dim if dim < 0 else dim - 1)


class Documents(UserList[list[int]]):
    """For each sample the first position of each document. Micro-batches split it by sample, as an array."""

    @property
    def shape(self) -> tuple[int]:
        """The number of samples."""
        return (len(self),)


@dataclass
class SequencePart:
    """This rank's part of a batch.

    Attributes:
        batch: the batch, cut.
        share: the positions that it holds.
        keys: True for each position of the whole sequence that attention may see, (B, T); None for all of them.
        pads_at_end: True if all others stand at the end of their sequence, where causal attention does not see them.
        documents: where each document begins, if several were packed into one sequence.
        uses_masks: True once a model of `transformers` has asked for its mask: attention then keeps to `keys` and
            `documents`. A module that passes masks of its own is left to them.
    """

    batch: Any
    share: SequenceShare
    keys: Tensor | None = None
    pads_at_end: bool = False
    documents: Documents | None = None
    uses_masks: bool = False


class SequenceCut:
    """Cuts the sequences of a batch into the parts of the ranks of a group, and joins the parts of outputs.

    Args:
        group: the ranks of the group.
        dimensions: the sequence dimension of each tensor of a batch, by its key or index; None for a tensor that every
            rank keeps whole.
        padding: what fills positions that are added, by the same keys.
        multiple: each rank's part is a multiple of it, in addition to 2.
        is_transformer: whether a model of `transformers` takes the batch, which needs positions and shifted labels.
        shifts: whether that model predicts each label from the position before it.
        needs_positions: whether it counts positions from padding, as RoBERTa does, so that batches must have them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        dimensions: Mapping[Key, int | None],
        padding: Mapping[Key, float],
        multiple: int = 1,
        is_transformer: bool = False,
        shifts: bool = False,
        needs_positions: bool = False,
    ) -> None:
        self._needs_positions, self._multiple = needs_positions, multiple
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._dimensions, self._padding = {**DIMENSIONS, **dimensions}, {**PADDING, **padding}
        self._is_transformer, self._shifts = is_transformer, shifts

    def cut(self, batch: Any, limit: int | None = None) -> SequencePart:
        """Returns this rank's part of a batch.

        Args:
            batch: the whole batch: a dict, or a tuple or list of tensors.
            limit: the number of positions to keep before cutting; None for all of them.

        Raises:
            ConfigurationError: if the batch has no known sequence, or its sequences differ in length.
        """
        given = dict(_entries(batch))
        length = self._length(given)
        if limit is not None and limit < length:
            given, length = self._map(given, lambda key, whole, dim: whole.narrow(dim, 0, limit)), limit
        entries = self._completed(given)
        step = 2 * self._size * self._multiple
        filled = -length % step
        if filled:
            entries = self._map(entries, lambda key, whole, dim: self._fill(key, whole, dim, filled))
        share = SequenceShare(self._rank, self._size, length + filled, filled)
        keys = self._keys(entries)
        pads_at_end = keys is not None and bool((keys[:, 1:] <= keys[:, :-1]).all())
        parts = self._map(entries, lambda key, whole, dim: share.cut(whole, dim))
        documents = self._documents(entries) if "position_ids" in given else None
        return SequencePart(_rebuilt(batch, parts), share, keys, pads_at_end, documents)

    def narrowed(self, batch: Any, limit: int) -> Any:
        """Returns the whole batch with the first positions only, as one process would train on it."""
        entries = dict(_entries(batch))
        return _rebuilt(batch, self._map(entries, lambda key, whole, dim: whole.narrow(dim, 0, limit).contiguous()))

    def _completed(self, entries: Mapping[Key, Any]) -> dict[Key, Any]:
        """Adds the positions and the shifted labels that a model could not make from a part of the sequence."""
        entries = dict(entries)
        if not self._is_transformer:
            return entries
        tokens = entries.get("input_ids", entries.get("inputs_embeds"))
        if isinstance(tokens, Tensor) and "position_ids" not in entries:
            if self._needs_positions:
                raise ConfigurationError(
                    "the model counts positions by itself, from its padding token, and sees a part of the sequence "
                    "only: add 'position_ids' to the batch in the collate function, as the model makes them in "
                    "create_position_ids_from_input_ids."
                )
            rows, length = tokens.shape[:2]
            entries["position_ids"] = torch.arange(length, device=tokens.device).expand(rows, length)
        labels = entries.get("labels")
        if self._shifts and isinstance(labels, Tensor) and "shift_labels" not in entries:
            entries["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return entries

    def _length(self, entries: Mapping[Key, Any]) -> int:
        """Returns the length of the sequences in a batch."""
        lengths: dict[Key, int] = {}
        for key, dim, whole in self._sequences(entries):
            if not 0 <= dim < whole.ndim:
                raise ConfigurationError(
                    f"sequence_dims has {key!r}: {self._dimensions[key]}, and that tensor of the batch has the shape "
                    f"{tuple(whole.shape)}. Name its sequence dimension, or None to keep it whole on each rank."
                )
            lengths[key] = whole.shape[dim]
        if not lengths:
            raise ConfigurationError(
                "context parallelism cuts the sequences of a batch, and does not know which of its tensors are "
                f"sequences: it has {', '.join(map(repr, entries)) or 'none'}. Name the sequence dimension of each: "
                "MeshStrategy(cp=…, sequence_dims={0: 1, 1: 1}) for a tuple of two tensors (B, T), or by the keys of a "
                "dict."
            )
        if len(set(lengths.values())) > 1:
            raise ConfigurationError(
                f"the sequences of a batch differ in length: {lengths}. Pad them to one length, or set the dimension "
                "to None in sequence_dims to keep a tensor whole on each rank."
            )
        length = next(iter(lengths.values()))
        for key, value in entries.items():
            if key not in self._dimensions and isinstance(value, Tensor) and value.ndim > 1 and length in value.shape:
                raise ConfigurationError(
                    f"the batch's tensor {key!r} has the shape {tuple(value.shape)}, and its sequence of length "
                    f"{length} is not cut: name its dimension in MeshStrategy(sequence_dims={{{key!r}: …}}), or None "
                    "to keep it whole on each rank."
                )
        return length

    def _sequences(self, entries: Mapping[Key, Any]) -> Iterator[tuple[Key, int, Tensor]]:
        for key, value in entries.items():
            dim = self._dimensions.get(key)
            if dim is not None and isinstance(value, Tensor):
                yield key, dim + value.ndim if dim < 0 else dim, value

    def _map(self, entries: Mapping[Key, Any], function: Any) -> dict[Key, Any]:
        return {**entries, **{key: function(key, whole, dim) for key, dim, whole in self._sequences(entries)}}

    def _fill(self, key: Key, whole: Tensor, dim: int, count: int) -> Tensor:
        """Adds positions at the end of a sequence."""
        if key == "position_ids":
            added = whole.narrow(dim, whole.shape[dim] - 1, 1) + torch.arange(1, count + 1, device=whole.device)
            return torch.cat([whole, added], dim)
        if key not in self._padding:
            raise ConfigurationError(
                f"the sequences of a batch have length {whole.shape[dim]}, which {2 * self._size * self._multiple} "
                f"(2 · cp{' · tp' if self._multiple > 1 else ''}) does not divide. Pad them in the collate function, "
                f"or name what fills {key!r}: MeshStrategy(sequence_padding={{{key!r}: …}}), -100 for labels."
            )
        shape = [*whole.shape[:dim], count, *whole.shape[dim + 1 :]]
        return torch.cat([whole, whole.new_full(shape, self._padding[key])], dim)

    def _keys(self, entries: Mapping[Key, Any]) -> Tensor | None:
        """Returns the positions that attention may see, from the mask of a `transformers` model."""
        mask = entries.get("attention_mask")
        if not self._is_transformer or not isinstance(mask, Tensor):
            return None
        if mask.ndim != 2:
            raise ConfigurationError(
                f"attention_mask has the shape {tuple(mask.shape)}, which each rank would need a part of. Pass one of "
                "shape (B, T), or leave it out for causal attention."
            )
        return mask.bool()

    def _documents(self, entries: Mapping[Key, Any]) -> Documents | None:
        """Returns where documents begin, if positions begin anew within a sequence and no mask is given."""
        positions = entries.get("position_ids")
        if not self._is_transformer or not isinstance(positions, Tensor) or "attention_mask" in entries:
            return None
        begins = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=True)
        found = Documents(row.nonzero().flatten().tolist() for row in begins.cpu())
        return found if any(len(row) > 1 for row in found) else None


def _entries(batch: Any) -> Iterator[tuple[Key, Any]]:
    """Yields the entries of a batch with their keys, or their indices in a tuple."""
    if isinstance(batch, Mapping):
        return iter(batch.items())
    if isinstance(batch, (tuple, list)):
        return iter(enumerate(batch))
    if isinstance(batch, Tensor):
        return iter([(0, batch)])
    raise ConfigurationError(
        f"context parallelism cuts batches that are dicts, tuples, lists or tensors, and this one is {kind_of(batch)}: "
        "return one of these from the collate function."
    )


def _rebuilt(batch: Any, entries: dict[Key, Any]) -> Any:
    """Returns a batch of the same kind with other entries."""
    if isinstance(batch, Mapping):
        return entries
    if isinstance(batch, Tensor):
        return entries[0]
    values = [entries[index] for index in range(len(batch))]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def find_transformer(module: nn.Module) -> Any:
    """Returns the model of `transformers` in a module; None if it has none."""
    for part in module.modules():
        if any(kind.__module__ == "transformers.modeling_utils" for kind in type(part).__mro__):
            return part
    return None
