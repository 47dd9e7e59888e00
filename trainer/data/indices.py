"""Names the samples of batches that a training loader has given, by drawing the order of the epoch again."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from leyden.trainer.data.limits import apart
from leyden.trainer.data.rng import isolated_rng
from leyden.trainer.data.seek import can_slice
from leyden.trainer.data.sharded_source import ShardedSource
from leyden.trainer.data.sharding import DataRanks, Order, RankBatches, alike, shard_indices, stateful_of
from leyden.trainer.data.sources import Source, TorchSource

CONTAINERS = (list, dict, set, deque, bytearray)


@dataclass(frozen=True, slots=True)
class BatchIndices:
    """The indices of a batch's samples in the data set.

    Attributes:
        here: of this rank's samples, in the batch's order.
        everywhere: of all ranks' samples, in the epoch's order.
    """

    here: list[Any]
    everywhere: list[Any]


def indices_of(source: Source, start: int, stop: int) -> list[BatchIndices] | None:
    """Returns the indices of the batches from `start` to `stop` of the epoch that a source reads.

    The order is a function of the random state from before the epoch, so it is drawn again, and nothing is kept for it.
    The run's own samplers and random numbers stay as they are.

    Returns:
        A list with an entry for each batch. None where the order cannot be known: data without an index, a loader
        that is not torch's own, a sampler that is used up by one pass, that changes while it is drawn and has no
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
    """Draws the items of the order again that make up some batches; changes random numbers."""
    begun, before = source.origin, source.before
    assert before is not None
    if start < begun[0]:
        # The batches before a resume may have had another size.
        return None
    first = begun[1] + (start - begun[0]) * source.span
    count = (stop - start) * source.span
    if isinstance(source, ShardedSource):
        order = source.batches.order
        if order.state is None:
            return None
        spare = _spare(order.sampler)
        if spare is None:
            return None
        again = Order(spare, lambda state: state)
        again.begin(order.state, first)
        items = again.draw(count)
        return (source.batches, items) if _is_as_before(spare, order.sampler) else None
    sampler = source.index_sampler
    spare = _spare(sampler)
    if spare is None:
        return None
    own = ShardedSource(shard_indices(_over(source.loader, spare), DataRanks()))
    own.rewind({"before": before})
    order = own.batches.order
    order.begin(own.place_of_one_process(before), first if order.is_sliced else 0)
    if order.is_sliced:
        return own.batches, order.draw(count)
    items = order.draw(1)
    stream = order.stream
    items += order.draw(first + count - 1)
    # In one process such draws fell between those of the training.
    draws_along = not alike(stream, order.stream)
    return None if draws_along or not _is_as_before(spare, sampler) else (own.batches, items[first:])


def _over(loader: DataLoader[Any], index_sampler: Any) -> DataLoader[Any]:
    """Returns a copy of a loader with another index sampler, which makes batches even where the loader makes none."""
    result = apart(loader)
    batches = index_sampler if loader.batch_sampler is not None else BatchSampler(index_sampler, 1, False)
    vars(result).update(batch_sampler=batches, sampler=getattr(batches, "sampler", loader.sampler))
    return result  # type: ignore[no-any-return]


def _spare(sampler: Iterable[Any]) -> Any:
    """Returns a sampler that may be drawn from in place of the run's own; None if there can be none.

    Those that Leyden slices may be drawn from themselves. Others are copied, with what they keep in containers, since
    many shuffle a list of their own; their data set is not copied.
    """
    if can_slice(sampler):
        return sampler
    if not hasattr(sampler, "__dict__") or callable(getattr(sampler, "__next__", None)):
        return None
    try:
        spare = copy.copy(sampler)
        for name, value in vars(sampler).items():
            vars(spare)[name] = _copied(name, value)
    except Exception:
        return None
    return spare


def _copied(name: str, value: Any) -> Any:
    if name in ("sampler", "batch_sampler"):
        spare = _spare(value)
        if spare is None:
            raise TypeError(f"{name} cannot be drawn from again")
        return spare
    if isinstance(value, CONTAINERS):
        return copy.copy(value)
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if type(value).__module__ == "numpy" and hasattr(value, "dtype") else value


def _is_as_before(spare: Any, sampler: Any) -> bool:
    """True if drawing has left a copy as the original is; a sampler with a `state_dict` was rewound."""
    if spare is sampler or stateful_of(sampler) is not None:
        return True
    now, before = vars(spare), vars(sampler)
    return now.keys() == before.keys() and all(_is_same(name, now[name], before[name]) for name in now)


def _is_same(name: str, now: Any, before: Any) -> bool:
    if name in ("sampler", "batch_sampler"):
        return _is_as_before(now, before)
    if isinstance(now, Tensor) or (type(now).__module__ == "numpy" and hasattr(now, "dtype")):
        return type(before) is type(now) and now.shape == before.shape and bool((now == before).all())
    return now is before or bool(now == before)
