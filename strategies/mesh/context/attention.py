"""Attention over a sequence that is divided over ranks, in place of torch's `scaled_dot_product_attention`.

Two methods compute the same numbers:

- "gather" collects the keys and values of all ranks for the queries of this rank. They are collected again in backward,
  so that no rank keeps those of the whole sequence.
- "ulysses" exchanges positions for heads (Jacobs et al., https://arxiv.org/abs/2309.14509): each rank attends over the
  whole sequence with a part of the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from leyden.core.errors import ConfigurationError
from leyden.strategies.mesh.context.sequence import SequencePart, SequenceShare

Method: TypeAlias = Literal["gather", "ulysses"]
METHODS = ("gather", "ulysses")
# torch 2.13 renamed these two.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_reduce_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
_wait: Callable[[Tensor], Tensor] = collectives.wait_tensor
ROWS = 256
"""Queries per call. Each call takes a mask of this many rows, and all of them share one."""
_sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention
_current: SequenceAttention | None = None
"""The attention of the step that runs. Process-wide, since backward may recompute a forward in another thread."""


def sequence_positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """Returns the positions of a sequence that the current step holds, for embeddings of positions and the like.

    Args:
        length: length of the sequence as the step sees it.
        device: device of the result.

    Returns:
        A one-dimensional tensor of integers, 0, 1, …, or under context parallelism this rank's positions in the whole
        sequence.

    Example:
        >>> sequence_positions(4)
        tensor([0, 1, 2, 3])
    """
    if _current is not None and _current.share.own_length == length:
        return _current.share.positions(torch.device(device) if device is not None else None)
    return torch.arange(length, device=device)


class SequenceAttention:
    """Attends from this rank's part of a sequence to the whole of it.

    Args:
        part: this rank's part of the batch.
        method: how keys and values reach the queries.
        group: the ranks among which the sequence is divided.
        masks: the masks that earlier steps have made. Added to.
        others: takes the lengths of keys that are not the sequence's; None if nobody asks.
    """

    def __init__(
        self,
        part: SequencePart,
        method: Method,
        group: dist.ProcessGroup,
        masks: dict[tuple[Any, ...], Tensor],
        others: set[int] | None = None,
    ) -> None:
        self.part, self.share, self._group, self._masks, self._others = part, part.share, group, masks, others
        self._attend = self._gathered if method == "gather" else self._by_heads
        self.has_divided = False
        """True once a layer has attended over the whole sequence."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replaces `scaled_dot_product_attention` in the block."""
        global _current
        before, own = _current, F.scaled_dot_product_attention
        # In evaluation, torch's nn.MultiheadAttention and its encoder layers would not call it.
        has_fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        _current, F.scaled_dot_product_attention = self, self.attend  # type: ignore[assignment]
        try:
            yield
        finally:
            _current, F.scaled_dot_product_attention = before, own
            torch.backends.mha.set_fastpath_enabled(has_fast_path)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Has the arguments of `scaled_dot_product_attention`. Attention to anything but the sequence is left to it."""
        options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        own = self.share.own_length
        if query.shape[-2] != own or key.shape[-2] != own:
            if self._others is not None:
                self._others.add(key.shape[-2])
            return _sdpa(query, key, value, attn_mask, is_causal=is_causal, **options)
        self.has_divided = True
        hidden = self._hidden(attn_mask, is_causal, query.dtype)
        return self._attend(query, key, value, hidden, is_causal, options)

    def _hidden(self, mask: Tensor | None, is_causal: bool, dtype: torch.dtype) -> Tensor | None:
        """Returns what is added to the scores of each key of the whole sequence, (B, 1, 1, T); None if nothing is."""
        if mask is not None:
            if mask.ndim < 2 or mask.shape[-2] != 1 or mask.shape[-1] != self.share.own_length:
                raise ConfigurationError(
                    f"a mask of shape {tuple(mask.shape)} was passed to attention, and under context parallelism a "
                    "rank cannot make the mask of the whole sequence. Pass is_causal=True, or a mask of keys alone, "
                    "(B, 1, 1, T)."
                )
            bias = _as_bias(gather(self.share, self._group, mask, -1), dtype)
            is_seen = is_causal or not self.share.filled
            return bias if is_seen else bias.masked_fill(self._added(bias.device), -torch.inf)
        keys = self.part.keys if self.part.uses_masks else None
        if keys is not None and not (is_causal and self.part.pads_at_end):
            return _as_bias(keys[:, None, None, :], dtype)
        if self.share.filled and not is_causal:
            return _as_bias(~self._added(None if keys is None else keys.device)[None, None, None, :], dtype)
        return None

    def _added(self, device: torch.device | None) -> Tensor:
        """Returns True for the positions that were added to fill up the sequence, (T,)."""
        return torch.arange(self.share.length, device=device) >= self.share.length - self.share.filled

    # the two methods --------------------------------------------------------------------------------------------------
    def _gathered(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, is_causal: bool, options: dict[str, Any]
    ) -> Tensor:
        gathered = _Gathered(self.share, self._group, key, value)
        with gathered.collected_again_in_backward():
            keys, values = gathered.collect()
            if not is_causal:
                self._check_whole()
                return _sdpa(query, keys, values, _on(hidden, query), **options)
            parts = query.chunk(2, -2)
            outputs = [
                self._causal(part, keys, values, start, hidden, options)
                for part, start in zip(parts, self.share.starts, strict=True)
            ]
        return torch.cat(outputs, -2)

    def _by_heads(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, is_causal: bool, options: dict[str, Any]
    ) -> Tensor:
        size = self.share.size
        if query.ndim != 4 or query.shape[-3] % size:
            heads = query.shape[-3] if query.ndim == 4 else 1
            raise ConfigurationError(
                f"cp_method='ulysses' divides the heads of attention, and cp={size} does not divide {heads}: use "
                "cp_method='gather', or another cp."
            )
        if key.shape[-3] % size:
            # Fewer heads of keys than ranks: each is copied for its queries.
            times = query.shape[-3] // key.shape[-3]
            key, value = (tensor.repeat_interleave(times, -3) for tensor in (key, value))
            options = {**options, "enable_gqa": False}
        if hidden is not None and hidden.ndim > 2 and hidden.shape[-3] > 1:
            hidden = hidden.chunk(size, -3)[self.share.rank]
        exchange: Callable[..., Any] = _Exchange.apply
        query, key, value = exchange(self.share, self._group, True, query, key, value)
        if is_causal:
            output = self._causal(query, key, value, 0, hidden, options)
        else:
            self._check_whole()
            output = _sdpa(query, key, value, _on(hidden, query), **options)
        back: Tensor
        [back] = exchange(self.share, self._group, False, output)
        return back

    def _check_whole(self) -> None:
        if self.part.documents is not None and self.part.uses_masks:
            raise ConfigurationError(
                "several documents are packed into one sequence, and attention is not causal: context parallelism "
                "keeps documents apart under causal attention only. Use one document per sequence, with an "
                "attention_mask."
            )

    # causal attention -------------------------------------------------------------------------------------------------
    def _causal(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, hidden: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Attends from queries at the positions from `start` on to all keys up to each of them."""
        documents = self.part.documents if self.part.uses_masks else None
        if documents is None:
            return self._rows(query, key, value, start, 0, hidden, options)
        outputs = []
        for index, begins in enumerate(documents):
            one = slice(index, index + 1)
            found = [
                self._rows(
                    query[one, :, first - start : last - start], key[one], value[one], first, begin, None, options
                )
                for begin, first, last in _pieces(begins, start, start + query.shape[-2])
            ]
            outputs.append(torch.cat(found, -2))
        return torch.cat(outputs)

    def _rows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        start: int,
        begin: int,
        hidden: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Attends from queries at the positions from `start` on to the keys from `begin` on, up to each of them."""
        end = start + query.shape[-2]
        if start == begin and hidden is None:
            return _sdpa(query, key[..., begin:end, :], value[..., begin:end, :], is_causal=True, **options)
        length = self.share.length
        triangle = self._triangle(query.dtype, query.device)
        outputs = []
        for first in range(start, end, ROWS):
            last = min(first + ROWS, end)
            mask = triangle[: last - first, length - first + begin : length - first + last]
            if hidden is not None:
                mask = mask + _on(hidden, query)[..., begin:last]  # type: ignore[index]
            rows = query[..., first - start : last - start, :]
            keys, values = key[..., begin:last, :], value[..., begin:last, :]
            outputs.append(_sdpa(rows, keys, values, mask, **options))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -2)

    def _triangle(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the mask of `ROWS` queries, (ROWS, T + ROWS): row i sees the columns up to T + i.

        Every mask of fewer keys is a part of its columns, and takes no memory of its own.
        """
        length = self.share.length
        if (length, dtype, device) not in self._masks:
            self._masks.clear()
            rows = torch.arange(ROWS, device=device)[:, None]
            columns = torch.arange(length + ROWS, device=device)[None, :]
            mask = torch.zeros(ROWS, length + ROWS, dtype=dtype, device=device)
            self._masks[length, dtype, device] = mask.masked_fill_(columns > length + rows, -torch.inf)
        return self._masks[length, dtype, device]


def _pieces(begins: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields the documents between two positions: where each begins, and its first and last position between them."""
    for begin, following in zip(begins, (*begins[1:], end), strict=True):
        first, last = max(begin, start), min(following, end)
        if first < last:
            yield begin, first, last


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask that is added to scores. A boolean one is True for the keys that count."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _on(hidden: Tensor | None, query: Tensor) -> Tensor | None:
    return None if hidden is None else hidden.to(query.device)


# communication ------------------------------------------------------------------------------------------------------
class _Collect(torch.autograd.Function):
    """Collects the keys and values of all ranks. Backward sums the gradients of each part over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, share: SequenceShare, group: dist.ProcessGroup, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.share, ctx.group = share, group
        return collect(share, group, key, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor, Tensor]:
        share: SequenceShare = ctx.share
        parts = [share.split(gradient, -2) for gradient in gradients]
        packed = torch.cat([part.reshape(share.size, -1) for part in parts], 1)
        own = _wait(_reduce_scatter(packed.reshape(-1), "sum", 0, ctx.group))
        key, value = torch.split(own, [part[0].numel() for part in parts])
        return None, None, key.view(parts[0].shape[1:]), value.view(parts[1].shape[1:])


def gather(share: SequenceShare, group: dist.ProcessGroup, part: Tensor, dim: int) -> Tensor:
    """Returns the whole sequence of a tensor of which each rank has a part. Every rank of the group calls it."""
    parts = _wait(_all_gather(part.contiguous().view(-1), 0, group))
    return share.join(parts.view(share.size, *part.shape), dim)


def collect(share: SequenceShare, group: dist.ProcessGroup, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of all ranks, in the order of the sequence. One all-gather carries both."""
    own = torch.cat([key.reshape(-1), value.reshape(-1)])
    packed = _wait(_all_gather(own, 0, group))
    keys, values = torch.split(packed.view(share.size, -1), [key.numel(), value.numel()], 1)
    keys, values = keys.view(share.size, *key.shape), values.view(share.size, *value.shape)
    return share.join(keys, -2), share.join(values, -2)


class _View(NamedTuple):
    """Keys (0) or values (1) of the whole sequence that autograd has saved, or a part of them."""

    which: int
    shape: Any
    stride: Any
    offset: Any


class _Gathered:
    """Keys and values of the whole sequence, which backward collects again in place of keeping them.

    Args:
        share: the positions of this rank.
        group: the ranks of the sequence.
        key: keys of this rank, (…, T / size, D).
        value: values of this rank, (…, T / size, E).
    """

    def __init__(self, share: SequenceShare, group: dist.ProcessGroup, key: Tensor, value: Tensor) -> None:
        self._share, self._group, self._own = share, group, (key, value)
        self._whole: tuple[Tensor, Tensor] | None = None
        self._kept, self._used = 0, 0
        self._others: Any = None
        """The functions that save tensors outside of the block, and return them; None for autograd's own."""

    def collect(self) -> tuple[Tensor, Tensor]:
        self._whole = _Collect.apply(self._share, self._group, *self._own)  # type: ignore[no-untyped-call]
        return self._whole

    @contextmanager
    def collected_again_in_backward(self) -> Iterator[None]:
        """Within the block, what autograd saves of the keys and values becomes a reference to this object."""
        if torch.compiler.is_compiling():
            yield
            return
        # Others may keep tensors elsewhere, such as on the CPU. Activation checkpointing keeps none, and repeats the
        # whole block in backward.
        self._others = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if self._others is not None and self._others[0].__module__ == "torch.utils.checkpoint":
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._whole, self._own = None, tuple(tensor.detach() for tensor in self._own)  # type: ignore[assignment]

    def _pack(self, tensor: Tensor) -> Any:
        for index, whole in enumerate(self._whole or ()):
            if tensor.untyped_storage()._cdata == whole.untyped_storage()._cdata:
                self._kept += 1
                return _View(index, tensor.shape, tensor.stride(), tensor.storage_offset())
        return tensor if self._others is None else self._others[0](tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _View):
            return packed if self._others is None else self._others[1](packed)  # type: ignore[no-any-return]
        if self._whole is None:
            with torch.no_grad():
                self._whole = collect(self._share, self._group, *self._own)
        tensor = self._whole[packed.which].as_strided(packed.shape, packed.stride, packed.offset)
        self._used += 1
        if self._used % self._kept == 0:
            # Every part has been read. A second backward collects once more.
            self._whole = None
        return tensor


class _Exchange(torch.autograd.Function):
    """Exchanges positions for heads, or heads for positions. Backward does the reverse.

    (B, H, T / size, D) becomes (B, H / size, T, D), in the order of the sequence, if `to_heads`.
    """

    @staticmethod
    def forward(ctx: Any, share: SequenceShare, group: dist.ProcessGroup, to_heads: bool, *tensors: Tensor) -> Any:
        ctx.share, ctx.group, ctx.to_heads = share, group, to_heads
        return _exchange(share, group, to_heads, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *_exchange(ctx.share, ctx.group, not ctx.to_heads, gradients)


def _exchange(
    share: SequenceShare, group: dist.ProcessGroup, to_heads: bool, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Exchanges several tensors in one all-to-all."""
    if to_heads:
        sent = [torch.stack(tensor.chunk(share.size, -3)) for tensor in tensors]
    else:
        sent = [share.split(tensor, -2) for tensor in tensors]
    packed = torch.cat([part.reshape(share.size, -1) for part in sent], 1).view(-1)
    received = _wait(collectives.all_to_all_single(packed, None, None, group))
    parts = torch.split(received.view(share.size, -1), [part[0].numel() for part in sent], 1)
    shaped = [part.view(like.shape) for part, like in zip(parts, sent, strict=True)]
    if to_heads:
        return tuple(share.join(part, -2) for part in shaped)
    return tuple(torch.cat(part.unbind(0), -3) for part in shaped)
