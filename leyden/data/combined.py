"""CombinedLoader, which reads several loaders in parallel or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from leyden.core.errors import ConfigurationError, nearest
from leyden.data.limits import length_of
from leyden.data.sources import Composite, Source, State, source_of

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
END = object()


class CombinedLoader(Composite):
    """Reads several loaders. Each batch has the structure of `iterables`, with a batch in place of each loader.

    Args:
        iterables: the loaders in a dict, list or tuple, which may be nested.
        mode: "min_size" stops with the shortest loader. "max_size_cycle" stops with the longest, and restarts shorter
            ones. "max_size" stops with the longest, and yields None for exhausted ones. "sequential" reads one after
            the other, and yields (batch, batch_idx, dataloader_idx).
        limits: the maximum number of batches of each loader, in the order of `flattened`; None for no limit. A single
            number applies to all loaders.

    Raises:
        ConfigurationError: if the mode is unknown, there is no loader, or the number of limits is wrong.

    Example:
        >>> list(CombinedLoader({"a": [1, 2, 3], "b": [4, 5]}, "max_size_cycle"))
        [{'a': 1, 'b': 4}, {'a': 2, 'b': 5}, {'a': 3, 'b': 4}]
    """

    def __init__(
        self, iterables: Any, mode: Mode = "min_size", limits: int | Sequence[int | None] | None = None
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigurationError(f"CombinedLoader has no mode {mode!r}. {nearest(str(mode), get_args(Mode))}")
        self.iterables = iterables
        self.mode: Mode = mode
        self._flattened: list[Any] = _flatten(iterables)
        if not self._flattened:
            raise ConfigurationError("CombinedLoader holds no loader: pass at least one.")
        count = len(self._flattened)
        self.limits: list[int | None] = list(limits) if isinstance(limits, Sequence) else [limits] * count
        if len(self.limits) != count:
            raise ConfigurationError(
                f"CombinedLoader has {count} loaders but {len(self.limits)} limits: pass one limit per loader."
            )

    @property
    def flattened(self) -> list[Any]:
        """The loaders in a flat list. Another list of as many loaders may be set, which also changes `iterables`.

        Raises:
            ConfigurationError: when set, if the number of loaders differs.
        """
        return self._flattened

    @flattened.setter
    def flattened(self, flattened: Sequence[Any]) -> None:
        if len(flattened) != len(self._flattened):
            raise ConfigurationError(
                f"CombinedLoader.flattened was set to {len(flattened)} loaders, but it has {len(self._flattened)}: set "
                "as many, or build a new CombinedLoader."
            )
        self.iterables = _unflatten(self.iterables, iter(flattened))
        self._flattened = list(flattened)

    def __len__(self) -> int:
        lengths = [_limited(length_of(part), limit) for part, limit in zip(self.flattened, self.limits, strict=True)]
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            raise TypeError("a loader of this CombinedLoader has no length, so it has none either")
        if self.mode == "sequential":
            return sum(known)
        return min(known) if self.mode == "min_size" else max(known)

    def source(self, allow_replay: bool) -> Source:
        return CombinedSource(self, allow_replay)

    def mapped(self, function: Callable[[Any], Any]) -> CombinedLoader:
        parts = [function(part) for part in self.flattened]
        return CombinedLoader(_unflatten(self.iterables, iter(parts)), self.mode, self.limits)


class CombinedSource(Source):
    """The source of a CombinedLoader. It saves position and random state of each loader, through a source for each."""

    def __init__(self, loader: CombinedLoader, allow_replay: bool) -> None:
        super().__init__(loader, allow_replay)
        self.sources = [source_of(part, allow_replay) for part in loader.flattened]
        self._iterator: _Sequential | _Parallel | None = None

    def start(self, epoch: int | None) -> Iterator[Any]:
        self._iterator = self._make(epoch)
        self._iterator.begin()
        return self._iterator

    def position(self, batches: int) -> State:
        assert self._iterator is not None
        return {"batches": batches, **self._iterator.state()}

    def resume(self, epoch: int | None, state: State) -> Iterator[Any]:
        self._iterator = self._make(epoch)
        self._iterator.load(state)
        return self._iterator

    def rest(self, ended: bool = True) -> State:
        return {"parts": [source.rest(ended) for source in self.sources]}

    def restore_rest(self, state: State) -> None:
        for source, part in zip(self.sources, state["parts"], strict=True):
            source.restore_rest(part)

    def _make(self, epoch: int | None) -> _Sequential | _Parallel:
        kind = _Sequential if self.loader.mode == "sequential" else _Parallel
        return kind(self.loader, self.sources, epoch)


class _Parts(Iterator[Any]):
    """Iterates over several loaders, and counts the batches drawn from each in its current pass."""

    def __init__(self, loader: CombinedLoader, sources: list[Source], epoch: int | None) -> None:
        self.loader = loader
        self.sources = sources
        self.epoch = epoch
        self.iterators: list[Iterator[Any] | None] = [None] * len(sources)
        self.drawn = [0] * len(sources)
        self.ended = [False] * len(sources)
        self.at = 0

    def begin_part(self, index: int) -> None:
        self.sources[index].drop_first()
        self.iterators[index] = self.sources[index].start(self.epoch)
        self.drawn[index] = 0

    def draw(self, index: int) -> Any:
        limit, iterator = self.loader.limits[index], self.iterators[index]
        if iterator is None or (limit is not None and self.drawn[index] >= limit):
            return END
        if self.drawn[index] == 0:
            self.sources[index].capture_first()
        batch = next(iterator, END)
        if batch is not END:
            self.drawn[index] += 1
        return batch

    def state(self) -> State:
        parts = [
            source.rest() if iterator is None else source.position(drawn)
            for source, iterator, drawn in zip(self.sources, self.iterators, self.drawn, strict=True)
        ]
        begun = [iterator is not None for iterator in self.iterators]
        return {"parts": parts, "begun": begun, "drawn": list(self.drawn), "ended": list(self.ended), "at": self.at}

    def load(self, state: State) -> None:
        if len(state["parts"]) != len(self.sources):
            raise ConfigurationError(
                f"the checkpoint has the positions of {len(state['parts'])} loaders, but this CombinedLoader has "
                f"{len(self.sources)}: use the loaders of the saved run."
            )
        for index, (source, part, begun) in enumerate(zip(self.sources, state["parts"], state["begun"], strict=True)):
            if begun:
                self.iterators[index] = source.resume(self.epoch, part)
            else:
                source.restore_rest(part)
        self.drawn, self.ended, self.at = list(state["drawn"]), list(state["ended"]), state["at"]


class _Parallel(_Parts):
    """Reads all loaders in parallel: each item has one batch of every loader."""

    def begin(self) -> None:
        for index in range(len(self.sources)):
            self.begin_part(index)

    def __next__(self) -> Any:
        return _unflatten(self.loader.iterables, iter([self._part(index) for index in range(len(self.sources))]))

    def _part(self, index: int) -> Any:
        mode = self.loader.mode
        if mode == "max_size" and self.ended[index]:
            return None
        batch = self.draw(index)
        if batch is not END:
            return batch
        self.ended[index] = True
        if mode == "min_size" or all(self.ended):
            raise StopIteration
        if mode == "max_size":
            self.iterators[index] = None
            return None
        self.begin_part(index)
        batch = self.draw(index)
        if batch is END:
            raise ConfigurationError(
                f"loader {index} of the CombinedLoader yielded no batch when it was restarted: pass a loader that can "
                "be read more than once, or use mode='min_size' or 'max_size'."
            )
        return batch


class _Sequential(_Parts):
    """Reads one loader after the other, and starts each when its turn comes."""

    def begin(self) -> None:
        self.begin_part(0)

    def __next__(self) -> tuple[Any, int, int]:
        while self.at < len(self.sources):
            batch = self.draw(self.at)
            if batch is not END:
                return batch, self.drawn[self.at] - 1, self.at
            self.ended[self.at] = True
            self.iterators[self.at] = None
            self.at += 1
            if self.at < len(self.sources):
                self.begin_part(self.at)
        raise StopIteration


# structure ------------------------------------------------------------------------------------------------------------
def holds_loaders(value: Any) -> bool:
    """Returns True for a dict, list or tuple of loaders; False for a list of batches, which is itself a loader.

    An element is a batch if it is a tensor, or directly holds tensors, numbers or strings.
    """
    if not isinstance(value, (dict, list, tuple)) or not value:
        return False
    parts = list(value.values()) if isinstance(value, dict) else list(value)
    return all(_may_be_loader(part) for part in parts)


def loaders_in_turn(loaders: Any) -> list[tuple[Any, int | None]]:
    """Returns the loaders of an evaluation, which run one after the other, each with its own limit (None for no limit).

    A CombinedLoader in any mode but "sequential" counts as one loader.
    """
    if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
        return list(zip(loaders.flattened, loaders.limits, strict=True))
    if isinstance(loaders, Mapping) or holds_loaders(loaders):
        parts = loaders.values() if isinstance(loaders, Mapping) else loaders
        return [part for value in parts for part in loaders_in_turn(value)]
    return [(loaders, None)]


def _may_be_loader(item: Any) -> bool:
    if isinstance(item, (dict, list, tuple)):
        children = list(item.values()) if isinstance(item, Mapping) else list(item)
        return bool(children) and not any(_is_data(child) for child in children)
    return isinstance(item, Iterable) and not _is_data(item)


def _is_data(item: Any) -> bool:
    return isinstance(item, (int, float, str, bytes)) or isinstance(getattr(item, "shape", None), tuple)


def _is_nest(item: Any, outer: bool) -> bool:
    return isinstance(item, (dict, list, tuple)) and (outer or holds_loaders(item))


def _flatten(item: Any, outer: bool = True) -> list[Any]:
    if not _is_nest(item, outer):
        return [item]
    children = item.values() if isinstance(item, dict) else item
    return [leaf for child in children for leaf in _flatten(child, False)]


def _unflatten(item: Any, leaves: Iterator[Any], outer: bool = True) -> Any:
    if not _is_nest(item, outer):
        return next(leaves)
    if isinstance(item, dict):
        return {key: _unflatten(child, leaves, False) for key, child in item.items()}
    values = [_unflatten(child, leaves, False) for child in item]
    if isinstance(item, list):
        return values
    return type(item)._make(values) if hasattr(item, "_make") else tuple(values)


def _limited(length: int | None, limit: int | None) -> int | None:
    return length if limit is None or length is None else min(length, limit)
