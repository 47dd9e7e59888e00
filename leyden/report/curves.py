"""Curves: every value of a metric, in a number of bins that a page can hold."""

from __future__ import annotations

import bisect
import csv
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

MAX_BINS = 2_000
"""Bins of a curve. A page is 1,400 pixels wide, and a zoom shows more of each."""
MAX_STEP = 1e15


class Bins:
    """Points in the order of their x, in at most `limit` bins of as many points each.

    A bin keeps its smallest and largest value, so a spike of a single step stays visible among millions. When all bins
    are full, each two neighbors become one.

    Args:
        limit: the number of bins, an even number.

    Example:
        >>> bins = Bins(4)
        >>> for x in range(8):
        ...     bins.add(x, 100.0 if x == 5 else 1.0)
        >>> bins.x, bins.low, bins.high
        ([0.0, 2.0, 4.0, 6.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 100.0, 1.0])
    """

    def __init__(self, limit: int = MAX_BINS) -> None:
        self.limit, self.width = limit, 1
        self.x: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.mean: list[float] = []
        self._in_last = 0

    def add(self, x: float, y: float) -> None:
        """Adds a point to the right of all others."""
        if self.x and self._in_last < self.width:
            count = self._in_last
            self.low[-1], self.high[-1] = min(self.low[-1], y), max(self.high[-1], y)
            self.mean[-1] = (self.mean[-1] * count + y) / (count + 1)
            self._in_last += 1
            return
        if len(self.x) == self.limit:
            self._halve()
        self.x.append(float(x))
        self.low.append(y)
        self.high.append(y)
        self.mean.append(y)
        self._in_last = 1

    def _halve(self) -> None:
        pairs = [slice(at, at + 2) for at in range(0, len(self.x), 2)]
        self.x = self.x[::2]
        self.low, self.high = [min(self.low[pair]) for pair in pairs], [max(self.high[pair]) for pair in pairs]
        # Halves first: a sum of the largest numbers would be infinite.
        self.mean = [sum(mean / len(means) for mean in means) for means in (self.mean[pair] for pair in pairs)]
        self.width *= 2

    def merged(self, limit: int) -> Bins:
        """Returns the same curve in at most `limit` bins."""
        found = Bins(limit)
        found.width = self.width
        for column in ("x", "low", "high", "mean"):
            setattr(found, column, [*getattr(self, column)])
        while len(found.x) > limit:
            found._halve()
        return found

    def cut(self, x: float) -> list[tuple[float, float]]:
        """Removes the bins that begin at `x` or after it, and returns the points of their curve."""
        at = bisect.bisect_left(self.x, x)
        points = list(zip(self.x[at:], self.mean[at:], strict=True))
        for column in (self.x, self.low, self.high, self.mean):
            del column[at:]
        self._in_last = self.width
        return points


class Curve:
    """The values of one metric of one run.

    Args:
        name: the metric.

    Attributes:
        bins: the values that count.
        undone: pieces of the curve over steps that a rollback undid, or that were logged again: points (x, y).
        count: the number of values, those that are nan or infinite among them.
        odd: the number of values that are nan or infinite, and the x of the first.
        first, last: the first and the last finite value.
        least, most: the smallest and the largest finite value, each with the x at which it came first.
    """

    def __init__(self, name: str) -> None:
        self.name, self.bins = name, Bins()
        self.undone: list[list[tuple[float, float]]] = []
        self.count = 0
        self.odd: tuple[int, float] | None = None
        self.first = self.last = math.nan
        self.least = (math.inf, math.nan)
        self.most = (-math.inf, math.nan)
        self._x = -math.inf

    def add(self, x: float, y: float) -> None:
        """Adds the next value. A smaller `x` than that of the last one means that the run went back to it.

        A value whose `x` is no step of a run is left out.
        """
        if not abs(x) < MAX_STEP:
            return
        if x < self._x:
            self.undone.append(self.bins.cut(x))
        self._x = x
        self.count += 1
        if not math.isfinite(y):
            self.odd = (1, x) if self.odd is None else (self.odd[0] + 1, self.odd[1])
            return
        if math.isnan(self.first):
            self.first = y
        self.last = y
        if y < self.least[0]:
            self.least = (y, x)
        if y > self.most[0]:
            self.most = (y, x)
        self.bins.add(x, y)


class Curves:
    """The curves of a run by name, with the times and epochs of its steps."""

    def __init__(self) -> None:
        self.by_name: dict[str, Curve] = {}
        self.epochs = Bins()
        self.times = Bins()
        """Seconds of work done since the run began, by step."""

    def add(self, name: str, step: float, value: float) -> None:
        if name == "epoch":
            if abs(step) < MAX_STEP and math.isfinite(value) and (not self.epochs.x or step > self.epochs.x[-1]):
                self.epochs.add(step, value)
            return
        if name not in self.by_name:
            self.by_name[name] = Curve(name)
        self.by_name[name].add(step, value)

    def add_time(self, step: float, seconds: float) -> None:
        if abs(step) < MAX_STEP and (not self.times.x or step > self.times.x[-1]):
            self.times.add(step, seconds)


def read_csv(path: Path, curves: Curves) -> None:
    """Reads the file of a CSVLogger, row by row."""
    # csv.Error: a field that is too long, as behind a quote that nothing closes.
    with suppress(csv.Error), path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.reader(file)
        names = next(rows, [])
        if "step" not in names:
            return
        at = names.index("step")
        columns = [(index, name) for index, name in enumerate(names) if index != at]
        for row in rows:
            # A run that was killed leaves its last row incomplete.
            step = _number(row[at]) if len(row) == len(names) else math.nan
            if math.isnan(step):
                continue
            for index, name in columns:
                if row[index]:
                    curves.add(name, step, _number(row[index]))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def read_events(
    paths: Sequence[Path], curves: Curves | None, known: frozenset[str]
) -> Iterator[tuple[str, int, object]]:
    """Reads TensorBoard's event files, event by event, and yields what is no scalar: tag, step and value.

    Every scalar is read: TensorBoard itself shows a sample of them.

    Args:
        paths: the files, the oldest first.
        curves: gets the scalars; None to leave them out.
        known: scalars that are left out, as a better source has them.
    """
    if not paths:
        return
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    begin: float | None = None
    for path in paths:
        try:
            for event in LegacyEventFileLoader(str(path)).Load():
                begin = event.wall_time if begin is None else begin
                for value in event.summary.value:
                    kind = value.WhichOneof("value")
                    scalar: float | None = value.simple_value if kind == "simple_value" else None
                    if kind == "tensor":
                        array = make_ndarray(value.tensor)
                        plugin = value.metadata.plugin_data.plugin_name
                        if array.dtype.kind == "f" and array.size == 1 and plugin in ("", "scalars"):
                            scalar = float(array.reshape(-1)[0])
                    if scalar is None:
                        yield value.tag, event.step, value
                    elif curves is not None and value.tag not in known:
                        curves.add(value.tag, event.step, scalar)
                        curves.add_time(event.step, event.wall_time - begin)
        except Exception:
            # A damaged or incomplete file: what comes before is kept.
            continue
