"""Batch samplers for custom loops: padded to the same number of batches on every rank, or without padding."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from leyden.data.seek import as_list
from leyden.data.sharding import RankBatches, Share, block


class EvenBatches(RankBatches):
    """A `RankBatches` whose last global batch is padded with samples from the start of the epoch.

    Attributes:
        counts: one entry for each global batch whose indices have been drawn, but whose batch has not been read yet. It
            lists for each rank its number of samples, and how many of them are not repeats.
    """

    counts: deque[list[tuple[int, int]]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counts = deque()
        self._full = [(self.batch_size, self.batch_size)] * self.ranks if self.batch_size is not None else []

    def __iter__(self) -> Iterator[list[Any]]:
        self.counts.clear()
        return self._groups()

    def _split(self, drawn: Any) -> tuple[list[Any], Share]:
        size = self.batch_size
        if size is not None and len(drawn) == self.span:
            self.counts.append(self._full)
            return as_list(drawn[self.rank * size : (self.rank + 1) * size]), Share(size, self.span)
        padded = drawn = as_list(drawn)
        if len(drawn) < self.span:
            padded = list(itertools.islice(itertools.cycle([*drawn, *self.order.head(self.span)]), self.span))
        if size is None:
            parts = padded
            unique = [len(part) if rank < len(drawn) else 0 for rank, part in enumerate(parts)]
        else:
            parts = [padded[start : start + size] for start in range(0, self.span, size)]
            unique = [max(0, min(len(drawn) - start, size)) for start in range(0, self.span, size)]
        self.counts.append([(len(part), count) for part, count in zip(parts, unique, strict=True)])
        here = parts[self.rank]
        # All ranks have the same number of samples, so all have the same weight.
        return here, Share(len(here), len(here) * self.ranks)


class OwnBatches(RankBatches):
    """A `RankBatches` for a custom loop, which cannot take an empty batch. A rank without samples stops early."""

    def __len__(self) -> int:
        count = len(self.sampler)  # type: ignore[arg-type]
        rest = count % self.span
        if self.drop_last or not rest:
            return count // self.span
        here = self.rank < rest if self.batch_size is None else bool(range(rest)[block(rest, self.rank, self.ranks)])
        return count // self.span + here

    def __iter__(self) -> Iterator[list[Any]]:
        yield from super().__iter__()
        if self.shares and not self.shares[-1].here:
            self.shares.pop()
