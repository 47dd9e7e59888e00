"""Epoch values over the ranks: all that was logged in an epoch travels in one message."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from leyden.strategies.base import Strategy
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.outputs import SharedNumbers
from leyden.trainer.logging import metrics
from leyden.trainer.logging.entries import Reduced
from leyden.trainer.logging.values import Value, as_number, in_turns, read_back

if TYPE_CHECKING:
    from leyden.trainer.logging.entries import Entry

T = TypeVar("T")
HEADER = 4
"""Numbers before the values of a message: data rank, digest of the keys, length, bytes of metric states."""
FIRST_CAPACITY = 1024
"""Numbers that fit in the first message (8 KiB). Where they do not, a second one follows, and later ones are larger."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What identifies a logged value, the same on all ranks.

    Attributes:
        event: the hook that logs it.
        name: its name.
        epoch_name: the name of its epoch value.
        reduction: how it is reduced; of a metric, its class and states.
        logger: loggers are given it.
        prog_bar: the bar shows it.
        loader: index of its loader; -1 where there is one only.
        has_batch: it is logged with a batch, so not on ranks that had none.
    """

    event: str
    name: str
    epoch_name: str
    reduction: str
    logger: bool
    prog_bar: bool
    loader: int
    has_batch: bool

    @classmethod
    def of(cls, entry: Entry) -> Key:
        reduction = entry.reduce_fx if isinstance(entry.reduce_fx, str) else "a function"
        if entry.metric is not None:
            reduction = metrics.description(entry.metric)
        place = (entry.loader, entry.has_batch)
        return cls(entry.event, entry.name, entry.epoch_name, reduction, entry.logger, entry.prog_bar, *place)


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank sent.

    Attributes:
        index: the rank.
        data_rank: its number among those that see different samples.
        numbers: for each key what it logged: sum and weight, an extreme, or all values.
        states: of its metrics, by key.
    """

    index: int
    data_rank: int
    numbers: dict[Key, list[float]]
    states: dict[Key, list[metrics.PartState]]


class EpochValues:
    """Reduces the values of a group over the ranks.

    Ranks that logged the same names need one all_gather, and one more where torchmetrics objects are among them. Both
    go between the hosts: loggers and callbacks read the values anyway, and so they are read back once, all together.

    Args:
        strategy: whose ranks these are.

    Attributes:
        counts: steps reach their end on this rank, which has what they log.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._capacity = FIRST_CAPACITY
        self._output_ranks = strategy.outputs.on_ranks(strategy.ranks)
        self.counts = self._output_ranks[strategy.ranks.global_rank]

    @property
    def are_in_parts(self) -> bool:
        """True in a pipeline, where one rank has what all steps log."""
        return self._strategy.outputs.are_in_parts

    def of_outputs(self, values: T) -> T:
        """What the last stage of this rank's pipeline has; what is given, elsewhere."""
        return self._strategy.outputs.share(values)

    def begin_numbers(
        self, described: list[Any], numbers: Sequence[Tensor | float]
    ) -> Callable[[], SharedNumbers] | None:
        """Begins to share a step's numbers; see `StepOutputs.begin_numbers`."""
        return self._strategy.outputs.begin_numbers(described, numbers)

    def reduce(
        self, entries: Sequence[Entry], idle: frozenset[int]
    ) -> tuple[dict[int, Value | None], list[tuple[Key, Value]]]:
        """Reduces what was logged on all ranks, each by its own `reduce_fx`.

        Args:
            entries: this rank's, of one group, with something in them. Those with sync_dist=False stay as they are.
            idle: indices of the loaders of which this rank had no batch; -1 for the only one.

        Returns:
            The values by `id` of the entries, and those that only other ranks logged, since this one had no batch.

        Raises:
            ConfigurationError: on every rank, if one of them logged other names.
        """
        if not self.counts:
            # On the other stages of a pipeline the hooks of epochs log, too, but of what their steps have not seen.
            entries = ()
        shared = [entry for entry in entries if entry.sync_dist is not False]
        own = dict(sorted(((Key.of(entry), entry) for entry in shared), key=lambda pair: pair[0]))
        ranks, alike = self._exchange(own, idle)
        results = {key: self._reduced(key, entry, ranks) for key, entry in own.items()}
        foreign = [] if alike else self._foreign(results)
        values = {id(entry): value_of_this_rank(entry) for entry in entries if entry.sync_dist is False}
        return values | {id(entry): results[key] for key, entry in own.items()}, foreign

    def _exchange(self, own: Mapping[Key, Entry], idle: frozenset[int]) -> tuple[list[Rank], bool]:
        """What every rank logged, and whether all logged the same names."""
        strategy, keys = self._strategy, list(own)
        of_metrics = [key for key, entry in own.items() if entry.metric is not None]
        states = metrics.pack([own[key].metric for key in of_metrics])
        numbers, digest = _numbers(own), _digest(keys)
        rows = self._gather([float(strategy.data_rank), digest, 0.0, float(states.numel()), *numbers])
        names = [(keys, of_metrics)] * len(rows)
        alike = all(row[1] == digest for row in rows)
        if not alike:
            gathered = strategy.ranks.all_gather_object((keys, of_metrics, idle))
            counted = zip(gathered, self._output_ranks, strict=True)
            _check([(keys, idle) for (keys, _, idle), counts in counted if counts])
            names = [(keys, of_metrics) for keys, of_metrics, _ in gathered]
        messages = _gather_bytes(strategy, states, [int(row[3]) for row in rows])
        ranks: list[Rank] = []
        for index, (row, message, (keys, of_metrics)) in enumerate(zip(rows, messages, names, strict=True)):
            states_by_key = dict(zip(of_metrics, metrics.unpack(message), strict=True))
            if self._output_ranks[index]:
                ranks.append(Rank(index, int(row[0]), _by_key(keys, row[HEADER:]), states_by_key))
        return ranks, alike

    def _gather(self, message: list[float]) -> list[list[float]]:
        """The messages of all ranks, whose lengths may differ."""
        while True:
            message[2] = float(len(message))
            row = torch.zeros(self._capacity, dtype=torch.float64)
            row[: min(len(message), self._capacity)] = torch.tensor(message[: self._capacity], dtype=torch.float64)
            rows = self._strategy.ranks.all_gather(row, group=self._strategy.ranks.host_group).tolist()
            longest = int(max(row[2] for row in rows))
            if longest <= self._capacity:
                return [row[: int(row[2])] for row in rows]
            # All ranks see this, and have room for twice as much from now on.
            self._capacity = 2 * longest

    def _reduced(self, key: Key, entry: Entry, ranks: Sequence[Rank]) -> Value | None:
        members = self._members(entry)
        ranks = [rank for rank in ranks if members is None or rank.index in members]
        data_ranks = {rank.index: rank.data_rank for rank in ranks}
        if entry.metric is not None:
            states = {rank.index: rank.states[key] for rank in ranks if key in rank.states}
            return as_number(entry.name, metrics.compute(entry.metric, states, data_ranks))
        counted = metrics.once(data_ranks)
        return combined(entry, [rank.numbers[key] for rank in ranks if rank.index in counted and key in rank.numbers])

    def _members(self, entry: Entry) -> list[int] | None:
        """The ranks that an entry is reduced over; None for all of them."""
        if entry.ranks_in is None:
            return None
        from torch.distributed import GroupMember, get_process_group_ranks

        if entry.ranks_in is GroupMember.NON_GROUP_MEMBER:
            return [self._strategy.ranks.global_rank]
        return get_process_group_ranks(entry.ranks_in)

    def _foreign(self, results: Mapping[Key, Value | None]) -> list[tuple[Key, Value]]:
        """The values of loaders of which this rank had no batch, as the first rank that has them reports."""
        known: dict[Key, Value] = {}
        for reported in self._strategy.ranks.all_gather_object(dict(results)):
            known = {key: value for key, value in reported.items() if value is not None} | known
        return [(key, known[key]) for key in sorted(known) if key not in results]


def over_ranks(strategy: Strategy) -> EpochValues | None:
    """What reduces epoch values under a strategy; None where all data goes to one rank, to which all returns."""
    return EpochValues(strategy) if strategy.data_size > 1 or strategy.outputs.are_in_parts else None


def combined(entry: Entry, logged: Sequence[list[float]]) -> Value | None:
    """Combines what each rank logged for an entry into one value, by its `reduce_fx`."""
    reduction = entry.reduce_fx
    if isinstance(reduction, Reduced):
        warnings.warn(
            f"{entry.name!r} is reduced by a function, which a resumed run knows again when it is logged: the value of "
            "this epoch, of which nothing was left to do, is left out.",
            stacklevel=2,
        )
        return None
    if callable(reduction):
        # As one process would have them.
        values = torch.tensor(list(in_turns(logged)), dtype=torch.float64)
        return as_number(entry.name, reduction(values))
    totals = torch.tensor([numbers[0] for numbers in logged], dtype=torch.float64)
    if reduction == "mean":
        return totals.sum() / math.fsum(numbers[1] for numbers in logged)
    return totals.sum() if reduction == "sum" else totals.amax() if reduction == "max" else totals.amin()


def value_of_this_rank(entry: Entry) -> Value | None:
    """The value of an entry that ranks keep to themselves."""
    return entry.result() if entry.metric is None else as_number(entry.name, metrics.compute_alone(entry.metric))


def _numbers(own: Mapping[Key, Entry]) -> list[float]:
    """Flattens the entries into (length, numbers …), with one read-back from the device."""
    values: list[Value] = []
    lengths: list[int] = []
    for entry in own.values():
        found: list[Value] = []
        if entry.metric is None and isinstance(entry.reduce_fx, str):
            assert entry.total is not None
            found = [entry.total, entry.weight] if entry.reduce_fx == "mean" else [entry.total]
        elif entry.metric is None:
            found = entry.values
        values += found
        lengths.append(len(found))
    read = iter(read_back({str(number): value for number, value in enumerate(values)}).values())
    return [number for length in lengths for number in (float(length), *(next(read) for _ in range(length)))]


def _by_key(keys: Sequence[Key], numbers: Sequence[float]) -> dict[Key, list[float]]:
    found: dict[Key, list[float]] = {}
    start = 0
    for key in keys:
        end = start + 1 + int(numbers[start])
        found[key] = list(numbers[start + 1 : end])
        start = end
    return found


def _digest(keys: Sequence[Key]) -> float:
    """48 bits, which a float64 holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(repr(keys).encode(), digest_size=6).digest(), "little"))


def _gather_bytes(strategy: Strategy, message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The bytes of all ranks, whose sizes are known; nothing is sent where there are none."""
    longest = max(sizes)
    if longest == 0:
        return [message] * len(sizes)
    row = torch.zeros(longest, dtype=torch.uint8)
    row[: message.numel()] = message
    rows = strategy.ranks.all_gather(row, group=strategy.ranks.host_group)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def _check(ranks: Sequence[tuple[Sequence[Key], frozenset[int]]]) -> None:
    """Names the ranks that logged other names, unless they had no batch to log them with."""
    everything = sorted({key for keys, _ in ranks for key in keys})
    missing: dict[int, list[str]] = {}
    for rank, (keys, idle) in enumerate(ranks):
        known = set(keys)
        lacks = [key for key in everything if key not in known and not (key.has_batch and key.loader in idle)]
        if lacks:
            missing[rank] = [f"{key.name!r} ({key.reduction}, in {key.event})" for key in lacks]
    if missing:
        found = "; ".join(f"rank {rank} did not log {', '.join(names)}" for rank, names in missing.items())
        raise ConfigurationError(
            f"the ranks logged different values in this epoch: {found}, which another rank did. Log the same names, in "
            "the same way, on every rank, or give self.log(..., sync_dist=False) to what a rank keeps to itself."
        )
