"""Finds the sample indices of batches that a training loader has yielded, by drawing the order of the epoch again."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from leyden.data.limits import apart
from leyden.data.rng import isolated_rng
from leyden.data.seek import can_slice
from leyden.data.sharded_source import ShardedSource
from leyden.data.sharding import DataRanks, Order, RankBatches, equal_states, shard_indices, stateful_of
from leyden.data.sources import Source, TorchSource

CONTAINERS = (list, dict, set, deque, bytearray)


@dataclass(frozen=True, slots=True)
class BatchIndices:
    """The dataset indices of a batch's samples.

    Attributes:
        here: the indices of this rank's samples, in the order of the batch.
        everywhere: the indices of all ranks' samples, in the order of the epoch.
    """

    here: list[Any]
    everywhere: list[Any]


def indices_of(source: Source, start: int, stop: int) -> list[BatchIndices] | None:
    """Returns the sample indices of the batches from `start` to `stop` in the epoch that a source reads.

    The order only depends on the random state from before the epoch, so it is drawn again, and nothing is stored for
    it during the epoch. The run's own samplers and random state do not change.

    Returns:
        One entry per batch. None if the order cannot be reproduced: for data without an index, a loader that is not
        torch's own, or a sampler that is exhausted after one pass, that changes while it is drawn and has no
        `state_dict`, or that draws from the global generators during the epoch.
    """
    if not isinstance(source, TorchSource) or source.is_iterable or source.before is None or start >= stop:
        return None
    with isolated_rng([source.loader]):
        drawn = _drawn(source, start, stop)
    if drawn is None:
        return None
    batches, items = drawn
    parts: Iterator[list[Any]] = (items[at : at + batches.span] for at in range(0, len(items), batches.span))
    return [_named(batches, part) for part in parts]


def _named(batches: RankBatches, drawn: list[Any]) -> BatchIndices:
    everywhere = list(itertools.chain(*drawn)) if batches.of_batches else drawn
    return BatchIndices(list(batches.part(drawn)), everywhere)


def _drawn(source: TorchSource, start: int, stop: int) -> tuple[RankBatches, list[Any]] | None:
    """Draws again the items of the order that make up some batches. Changes the random state."""
    (origin_batches, origin_items), before = source.origin, source.before
    assert before is not None
    if start < origin_batches:
        # Batches from before a resume may have had another size.
        return None
    first = origin_items + (start - origin_batches) * source.span
    count = (stop - start) * source.span
    if isinstance(source, ShardedSource):
        order = source.batches.order
        if order.state is None:
            return None
        copied = _copy_of(order.sampler)
        if copied is None:
            return None
        again = Order(copied, lambda state: state)
        again.restart(order.state, first)
        items = again.draw(count)
        return (source.batches, items) if _is_unchanged(copied, order.sampler) else None
    sampler = source.index_sampler
    copied = _copy_of(sampler)
    if copied is None:
        return None
    own = ShardedSource(shard_indices(_over(source.loader, copied), DataRanks()))
    own.rewind({"before": before})
    order = own.batches.order
    order.restart(own.single_process_state(before), first if order.is_sliced else 0)
    if order.is_sliced:
        return own.batches, order.draw(count)
    items = order.draw(1)
    stream = order.stream
    items += order.draw(first + count - 1)
    # If the sampler draws after its first item, a single process interleaved these draws with those of the training.
    draws_during_epoch = not equal_states(stream, order.stream)
    if draws_during_epoch or not _is_unchanged(copied, sampler):
        return None
    return own.batches, items[first:]


def _over(loader: DataLoader[Any], index_sampler: Any) -> DataLoader[Any]:
    """Returns a copy of a loader with another sampler or batch sampler, which batches even if the loader does not."""
    result = apart(loader)
    batches = index_sampler if loader.batch_sampler is not None else BatchSampler(index_sampler, 1, False)
    vars(result).update(batch_sampler=batches, sampler=getattr(batches, "sampler", loader.sampler))
    return result  # type: ignore[no-any-return]


def _copy_of(sampler: Iterable[Any]) -> Any:
    """Returns a sampler to draw from in place of the run's own; None if it cannot be copied.

    Samplers that can be sliced are returned as they are. Others are copied together with their containers, because many
    shuffle a list of their own. Their dataset is not copied.
    """
    if can_slice(sampler):
        return sampler
    if not hasattr(sampler, "__dict__") or callable(getattr(sampler, "__next__", None)):
        return None
    try:
        copied = copy.copy(sampler)
        for name, value in vars(sampler).items():
            vars(copied)[name] = _copied_attribute(name, value)
    except Exception:
        return None
    return copied


def _copied_attribute(name: str, value: Any) -> Any:
    if name in ("sampler", "batch_sampler"):
        inner = _copy_of(value)
        if inner is None:
            raise TypeError(f"{name} cannot be drawn from again")
        return inner
    if isinstance(value, CONTAINERS):
        return copy.copy(value)
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if type(value).__module__ == "numpy" and hasattr(value, "dtype") else value


def _is_unchanged(copied: Any, sampler: Any) -> bool:
    """Returns True if drawing has not changed a copy, or if the sampler has a `state_dict` and was rewound."""
    if copied is sampler or stateful_of(sampler) is not None:
        return True
    now, before = vars(copied), vars(sampler)
    return now.keys() == before.keys() and all(_is_same(name, now[name], before[name]) for name in now)


def _is_same(name: str, now: Any, before: Any) -> bool:
    if name in ("sampler", "batch_sampler"):
        return _is_unchanged(now, before)
    if isinstance(now, Tensor) or (type(now).__module__ == "numpy" and hasattr(now, "dtype")):
        return type(before) is type(now) and now.shape == before.shape and bool((now == before).all())
    return now is before or bool(now == before)
