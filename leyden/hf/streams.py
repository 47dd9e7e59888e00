"""Streams for language models that resume exactly: shuffled samples, and rows packed from documents."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from leyden.core.checks import check_whole
from leyden.core.errors import ConfigurationError, StateError, kind_of
from leyden.core.saved_state import SavedState
from leyden.data.huggingface import begin_anew, why_inexact
from leyden.data.seekable_shuffle import Permutation
from leyden.data.sharding import has_state
from leyden.hf.data import PackedDataset


class _Blocks(IterableDataset[Any]):
    """A stream that reads blocks of another one, and yields what it makes of each in a shuffled order.

    The order is a function of (seed, epoch, block). The state is therefore the other stream's state at the start of the
    block, and how much of the block has been drawn; a resume reads that block again, and nothing before it.

    A block has `buffer_size` samples. A resume needs `settings`, too, unchanged.
    """

    def __init__(self, dataset: Iterable[Any], buffer_size: int, seed: int, **settings: int) -> None:
        name = type(self).__name__
        check_whole(name, 1, buffer_size=buffer_size)
        check_whole(name, 0, seed=seed)
        if not has_state(dataset):
            raise ConfigurationError(
                f"{name} takes a stream with state_dict and load_state_dict, such as an IterableDataset of `datasets`, "
                f"and not {kind_of(dataset)}. Define the two methods. A data set with an index needs no stream: "
                "DataLoader(shuffle=True) and PackedDataset resume exactly."
            )
        self.dataset: Any = dataset
        why = why_inexact(self)
        if why is not None:
            raise ConfigurationError(f"{name}: {why}.")
        self.buffer_size, self.seed = buffer_size, seed
        self._settings = {"buffer_size": buffer_size, "seed": seed, **settings}
        shards = getattr(dataset, "num_shards", None)
        if isinstance(shards, int):
            # A position within other shards would be that of other samples.
            self._settings["num_shards"] = shards
        # In shared memory, because persistent workers keep their copy of the stream.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._loaded: dict[str, Any] | None = None
        self._first: Any = None
        """The other stream's states before and after the first sample that was read from its start."""
        self._state = self._begun = self._at_start(0)

    @abstractmethod
    def _made_of(self, block: list[Any]) -> Sequence[Any]:
        """Returns what a block of samples becomes."""

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass, and that of the shards of a stream of `datasets`."""
        self._epoch.fill_(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def begin_anew(self) -> None:
        """Makes the next pass begin at the start, whatever position has been loaded."""
        self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the pass."""
        return self._saved(self._state)

    def _saved(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "first": self._first, "settings": self._settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position of the next pass, if that is of the same epoch.

        Raises:
            ConfigurationError: if the state is of a stream with other settings.
            StateError: if an entry is missing or damaged.
        """
        saved = SavedState(state)
        for name, value in self._settings.items():
            before = saved.nested("settings").integer(name)
            if before != value:
                raise ConfigurationError(
                    f"{type(self).__name__}({name}={value}): the checkpoint is from a run with {name}={before}, "
                    "whose order differs. Use that value, or start a new run."
                )
        self._loaded = self._state = {
            **{name: saved.integer(name, least=0) for name in ("epoch", "block", "drawn")},
            **{name: saved.value(name) for name in ("source", "read")},
            "ended": saved.flag("ended"),
        }
        self._first = saved.value("first")
        if self._state["read"] is not None:
            # A pass that begins now goes on where a stream that remembers its position has stopped.
            self.dataset.load_state_dict(self._state["read"])

    def __iter__(self) -> Iterator[Any]:
        epoch, iterator = int(self._epoch), None
        state, self._loaded = self._loaded, None
        if state is None or state["epoch"] != epoch:
            begin_anew(self.dataset)
            iterator = iter(self.dataset)
            state = self._at_start(epoch)
        self._state = state
        return self._samples(state, iterator)

    def _at_start(self, epoch: int) -> dict[str, Any]:
        # A stream of `datasets` is at the end of its last pass until it yields a sample, and needs no state to begin.
        source = None if hasattr(self.dataset, "_ex_iterable") else deepcopy(self.dataset.state_dict())
        return {"epoch": epoch, "block": 0, "drawn": 0, "source": source, "read": source, "ended": False}

    def _start_of(self, before: Any) -> Any:
        """Returns the state to load for a pass that has just yielded its first sample.

        That is the state from before the pass, unless the stream begins every pass at its start, and says so only with
        the first sample: then the state from before the pass is still that of the end of the last one.
        """
        if isinstance(self.dataset, _Blocks):
            return deepcopy(self.dataset._saved(self.dataset._begun))
        after = deepcopy(self.dataset.state_dict())
        if self._first is None:
            self._first = [before, after]
        return self._first[0] if repr(after) == repr(self._first[1]) else before

    def _samples(self, state: dict[str, Any], iterator: Iterator[Any] | None) -> Iterator[Any]:
        """Yields the samples from a position on; without an iterator of the other stream, sets that stream back."""
        is_anew = iterator is not None
        if iterator is None:
            begin_anew(self.dataset)
            if state["source"] is not None:
                self.dataset.load_state_dict(deepcopy(state["source"]))
            iterator = iter(self.dataset)
        while not state["ended"]:
            samples = list(itertools.islice(iterator, 1))
            if samples and is_anew and state["source"] is not None:
                state = {**state, "source": self._start_of(state["source"])}
            if is_anew:
                self._state, self._begun, is_anew = state, dict(state), False
            samples += itertools.islice(iterator, self.buffer_size - 1)
            if not samples and not state["block"] and get_worker_info() is None:
                raise ConfigurationError(f"{type(self).__name__}: the stream has no samples.")
            read = deepcopy(self.dataset.state_dict())
            state = self._state = {**state, "read": read}
            ended = len(samples) < self.buffer_size
            following = {**state, "block": state["block"] + 1, "drawn": 0, "source": read, "ended": ended}
            made = self._made_of(samples)
            order = Permutation(len(made), self.seed, state["epoch"] << 32 | state["block"])
            places = order(torch.arange(len(made))).tolist()
            if state["drawn"] and state["drawn"] >= len(places):
                raise StateError(
                    "drawn", f"is {state['drawn']}, but the block has {len(places)} rows: the data changed"
                )
            for place in places[state["drawn"] : -1]:
                state["drawn"] += 1
                yield made[place]
            last = made[places[-1]] if places else None
            # No second block is in memory while the next one is read.
            del samples, made
            self._state, state = following, following
            if places:
                yield last


class ShuffledStream(_Blocks):
    """Shuffles a stream with a buffer, and resumes exactly.

    Reads blocks of `buffer_size` samples and yields each in a random order, a function of (seed, epoch, block). Samples
    of different blocks do not mix, and one moves by a third of `buffer_size` on average. For more mixing, let the
    stream read several shards in turn: `stream.shuffle(seed, buffer_size=1)` of `datasets` reads up to ten, in a random
    order. A data set that fits into the buffer is shuffled as a whole.

    Its state holds the stream's position at the start of the block. A resume reads the samples of that block again, at
    most `buffer_size`, and goes on with the very next sample. `shuffle(buffer_size=…)` of `datasets` instead loses the
    samples in its buffer.

    `trainer.fit` calls `set_epoch`; in your own loop call it before each pass. Workers share the work as the stream
    does: a stream of `datasets` gives each its own shards.

    Args:
        dataset: a stream with `state_dict` and `load_state_dict`, such as an `IterableDataset` of `datasets`.
        buffer_size: the number of samples in memory, at least 1.
        seed: chooses the order together with the epoch. All ranks need the same one.

    Raises:
        ConfigurationError: if the stream has no state, or a shuffle buffer of its own; when it is read, if it is empty.

    Example:
        >>> from datasets import Dataset
        >>> stream = ShuffledStream(Dataset.from_dict({"x": range(6)}).to_iterable_dataset(), buffer_size=6)
        >>> samples = iter(stream)
        >>> first = [next(samples)["x"] for _ in range(2)]
        >>> resumed = ShuffledStream(Dataset.from_dict({"x": range(6)}).to_iterable_dataset(), buffer_size=6)
        >>> resumed.load_state_dict(stream.state_dict())
        >>> sorted(first + [sample["x"] for sample in resumed])
        [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, dataset: Iterable[Any], buffer_size: int = 1000, seed: int = 0) -> None:
        super().__init__(dataset, buffer_size, seed)

    def _made_of(self, block: list[Any]) -> Sequence[Any]:
        return block


class PackedStream(_Blocks):
    """Rows of one length, packed from the documents of a stream; resumes exactly.

    Reads blocks of `buffer_size` documents, packs each as `PackedDataset` does, and yields its rows in a random order.
    The last row of a block has padding, so a block should fill many rows. A resume reads the documents of one block
    again.

    Args:
        dataset: a stream of documents with `input_ids`, and `labels` if these are not the inputs themselves. It needs
            `state_dict` and `load_state_dict`.
        length: the number of tokens in a row.
        buffer_size: the number of documents in memory, at least 1.
        seed: chooses the order together with the epoch. All ranks need the same one.
        pad: the token at the end of rows.

    Raises:
        ConfigurationError: if `length` is below 2, or as for `ShuffledStream`.

    Example:
        >>> from datasets import Dataset
        >>> documents = Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]]}).to_iterable_dataset()
        >>> [row["input_ids"].tolist() for row in PackedStream(documents, length=6)]
        [[5, 6, 7, 8, 9, 0]]
    """

    def __init__(
        self, dataset: Iterable[Any], length: int, buffer_size: int = 1000, seed: int = 0, pad: int = 0
    ) -> None:
        check_whole("PackedStream", 2, length=length)
        super().__init__(dataset, buffer_size, seed, length=length)
        self.length, self.pad = length, pad

    def _made_of(self, block: list[Any]) -> Sequence[Any]:
        lengths = [len(document["input_ids"]) for document in block]
        # A block of empty documents has no row.
        rows: Any = PackedDataset(block, self.length, lengths, self.pad) if any(lengths) else []
        return rows  # type: ignore[no-any-return]
