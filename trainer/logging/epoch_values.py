"""Reduces epoch values over the ranks: all values of an epoch travel in one message."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.core.tree import widest_float
from leyden.strategies.base import Strategy
from leyden.trainer.logging import metrics
from leyden.trainer.logging.entries import Reduced
from leyden.trainer.logging.values import Value, as_number, in_turns, read_back

if TYPE_CHECKING:
    from leyden.trainer.logging.entries import Entry, MicroValue

T = TypeVar("T")
HEADER = 4
"""Length of a message's header, in numbers: data rank, digest of the keys, message length, bytes of metric states."""
COLUMNS = 64
"""Values per message of a step on parts of sequences. If they do not fit, all ranks agree on a multiple first."""
FIRST_CAPACITY = 1024
"""Initial capacity of a message, in numbers (8 KiB). If a message does not fit, it is sent again with more capacity."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Identifies a logged value across ranks. The fields are those of its entry."""

    event: str
    name: str
    epoch_name: str
    reduction: str
    """The reduction, or the class and states of a metric."""
    logger: bool
    prog_bar: bool
    loader: int
    has_batch: bool
    """Whether the value is logged with a batch, and therefore missing on ranks without one."""

    @classmethod
    def of(cls, entry: Entry) -> Key:
        reduction = entry.reduce_fx if isinstance(entry.reduce_fx, str) else "a function"
        if entry.metric is not None:
            reduction = metrics.description(entry.metric)
        source = (entry.loader, entry.has_batch)
        return cls(entry.event, entry.name, entry.epoch_name, reduction, entry.logger, entry.prog_bar, *source)


@dataclass(frozen=True, slots=True)
class Rank:
    """The message of one rank."""

    index: int
    data_rank: int
    """Ranks with the same data rank see the same samples."""
    numbers: dict[Key, list[float]]
    """The logged numbers by key: sum and weight, an extreme, or all values."""
    states: dict[Key, list[metrics.PartState]]


class EpochValues:
    """Reduces the epoch values of a group over the ranks.

    If all ranks logged the same names, this takes one all-gather, plus one if torchmetrics objects are among the
    values. Both run on the host: loggers and callbacks need the values there anyway, so all values are read back from
    the device in one transfer.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.outputs = strategy.outputs
        self._capacity = FIRST_CAPACITY
        self._columns = COLUMNS
        self._headed: dict[tuple[str, ...], Tensor] = {}
        """Messages of a step without its values: zeros, and a digest of the names. By the names."""
        self._differ: Tensor | None = None
        """On the device, whether ranks with parts of the same sequences have logged other names."""
        self._output_ranks = strategy.outputs.on_ranks(strategy.ranks)
        self.counts = self._output_ranks[strategy.ranks.global_rank]
        """True if steps end on this rank, and so log their values here: not on the earlier stages of a pipeline."""

    def of_all_parts(self, logged: Mapping[Entry, Sequence[MicroValue]]) -> list[tuple[Value, Value]]:
        """Returns the values of a batch whose sequences are divided over ranks, and their weights."""
        device = self._strategy.root_device
        own = [(entry, value) for entry, values in logged.items() for value in values]
        names = tuple(f"{entry.event} {entry.name}" for entry, _ in own)
        if len(names) > self._columns:
            # Ranks that log less send the usual message now, and all others read back that there are none of these.
            self._gather_parts(self._begun(names, device), logged)
            self._check_names([entry.name for entry in logged])
            self._columns = COLUMNS * math.ceil(len(names) / COLUMNS)
            self._headed.clear()
        numbers = self._begun(names, device)
        for i, (_, one) in enumerate(own):
            numbers[0, i].add_(one.value)
            numbers[1, i].add_(one.size if one.is_given else self.outputs.weight_of(one.micro_batch))
        parts = self._gather_parts(numbers, logged)
        columns = torch.split(parts[:, :2, : len(own)], [len(values) for values in logged.values()], 2)
        found: list[tuple[Value, Value]] = []
        for (entry, micro_values), column in zip(logged.items(), columns, strict=True):
            values, weights = column.unbind(1)
            total = weights.sum()
            # A part without a label has a mean of nan and a weight of 0. If none has a label, all count alike.
            weighted = torch.where(weights > 0, values * weights, 0.0).sum() / total
            mean = torch.where(total > 0, weighted, values.mean())
            counted = torch.where((weights > 0) | ~values.isnan(), values, mean)
            reduced = {"sum": values.sum(), "max": counted.amax(), "min": counted.amin()}
            value = reduced.get(entry.reduce_fx, mean)
            first = micro_values[0]
            size = total if first.is_given else sum(own.size for own in micro_values)
            # The mean of whole numbers is none.
            if isinstance(first.value, Tensor) and first.value.is_floating_point():
                value = value.to(first.value.dtype)
            found.append((value, size))
        return found

    def _gather_parts(self, numbers: Tensor, logged: Mapping[Entry, Any]) -> Tensor:
        """Returns the messages of all ranks with parts of the same sequences, (ranks, 3, columns)."""
        parts = self.outputs.of_all_parts(numbers)
        differ = (parts[:, 2] != parts[0, 2]).any()
        self._differ = differ if self._differ is None else self._differ | differ
        if differ.is_cpu:
            self._check_names([entry.name for entry in logged])
        return parts

    def _begun(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """Returns a message for the values of these names: rows of zeros for values and weights, and of a digest."""
        if names not in self._headed:
            message = torch.zeros(3, self._columns, dtype=widest_float(device), device=device)
            # 24 bits, which float32 holds too.
            message[2] = zlib.crc32(repr(names).encode()) % 2**24
            self._headed[names] = message
        return self._headed[names].clone()

    def _check_names(self, names: Sequence[str]) -> None:
        """Reads back whether the names have differed. In steps, only a CPU does: elsewhere it would wait.

        Raises:
            ConfigurationError: on every rank of the group.
        """
        differ, self._differ = self._differ, None
        if differ is not None and bool(differ):
            raise ConfigurationError(
                "the ranks of a cp group called self.log with different names, or in another order, in one step (this "
                f"rank: {', '.join(map(repr, names)) or 'none'}): each has a part of the same sequences, and a value "
                "is computed from all parts. Call self.log on every rank, whatever its part contains, without "
                "rank_zero_only."
            )

    def reduce(
        self, entries: Sequence[Entry], idle: frozenset[int]
    ) -> tuple[dict[int, Value | None], list[tuple[Key, Value]]]:
        """Reduces each value over the ranks by its own `reduce_fx`.

        Args:
            entries: this rank's non-empty entries of one group. Entries with sync_dist=False are not reduced over the
                ranks.
            idle: indices of the loaders without a batch for this rank; -1 for an only loader.

        Returns:
            The values by `id` of their entries, and the values that only other ranks logged, because this rank had no
            batch.

        Raises:
            ConfigurationError: on every rank, if the ranks logged different names.
        """
        self._check_names([entry.name for entry in entries])
        if not self.counts:
            # Epoch hooks log on every stage of a pipeline, but only the last stage has seen the outputs of steps.
            entries = ()
        shared = [entry for entry in entries if entry.sync_dist is not False]
        own = dict(sorted(((Key.of(entry), entry) for entry in shared), key=lambda pair: pair[0]))
        ranks, same_keys = self._exchange(own, idle)
        results = {key: self._reduced(key, entry, ranks) for key, entry in own.items()}
        foreign = [] if same_keys else self._foreign(results)
        values = {id(entry): _value_of_this_rank(entry) for entry in entries if entry.sync_dist is False}
        return values | {id(entry): results[key] for key, entry in own.items()}, foreign

    def _exchange(self, own: Mapping[Key, Entry], idle: frozenset[int]) -> tuple[list[Rank], bool]:
        """Returns the messages of all ranks on which steps end, and whether all ranks logged the same names."""
        strategy, keys = self._strategy, list(own)
        metric_keys = [key for key, entry in own.items() if entry.metric is not None]
        states = metrics.pack([own[key].metric for key in metric_keys])
        numbers, digest = _numbers(own), _digest(keys)
        rows = self._gather([float(strategy.data_rank), digest, 0.0, float(states.numel()), *numbers])
        keys_by_rank = [(keys, metric_keys)] * len(rows)
        same_keys = all(row[1] == digest for row in rows)
        if not same_keys:
            gathered = strategy.ranks.all_gather_object((keys, metric_keys, idle))
            with_counts = zip(gathered, self._output_ranks, strict=True)
            _check([(keys, idle) for (keys, _, idle), counts in with_counts if counts])
            keys_by_rank = [(keys, metric_keys) for keys, metric_keys, _ in gathered]
        messages = _gather_bytes(strategy, states, [int(row[3]) for row in rows])
        ranks: list[Rank] = []
        for index, (row, message, (keys, metric_keys)) in enumerate(zip(rows, messages, keys_by_rank, strict=True)):
            states_by_key = dict(zip(metric_keys, metrics.unpack(message), strict=True))
            if self._output_ranks[index]:
                ranks.append(Rank(index, int(row[0]), _by_key(keys, row[HEADER:]), states_by_key))
        return ranks, same_keys

    def _gather(self, message: list[float]) -> list[list[float]]:
        """Returns the messages of all ranks, which may differ in length."""
        while True:
            message[2] = float(len(message))
            row = torch.zeros(self._capacity, dtype=torch.float64)
            row[: min(len(message), self._capacity)] = torch.tensor(message[: self._capacity], dtype=torch.float64)
            rows = self._strategy.ranks.all_gather(row, group=self._strategy.ranks.host_group).tolist()
            longest = int(max(row[2] for row in rows))
            if longest <= self._capacity:
                return [row[: int(row[2])] for row in rows]
            # Every rank sees the same lengths, so all of them grow and retry together.
            self._capacity = 2 * longest

    def _reduced(self, key: Key, entry: Entry, ranks: Sequence[Rank]) -> Value | None:
        members = self._members(entry)
        ranks = [rank for rank in ranks if members is None or rank.index in members]
        data_ranks = {rank.index: rank.data_rank for rank in ranks}
        if entry.metric is not None:
            states = {rank.index: rank.states[key] for rank in ranks if key in rank.states}
            # Ranks with parts of the same sequences have counted different tokens.
            parts = self._strategy.part_ranks
            return as_number(entry.name, metrics.compute(entry.metric, states, {rank: parts[rank] for rank in states}))
        if self.outputs.are_split:
            _check_parts(entry, [(rank.data_rank, rank.numbers[key]) for rank in ranks if key in rank.numbers])
        counted = metrics.once(data_ranks)
        numbers = [rank.numbers[key] for rank in ranks if rank.index in counted and key in rank.numbers]
        return entry.as_logged(combined(entry, numbers))

    def _members(self, entry: Entry) -> list[int] | None:
        """Returns the ranks that an entry is reduced over; None for all of them."""
        if entry.process_group is None:
            return None
        from torch.distributed import GroupMember, get_process_group_ranks

        if entry.process_group is GroupMember.NON_GROUP_MEMBER:
            return [self._strategy.ranks.global_rank]
        return get_process_group_ranks(entry.process_group)

    def _foreign(self, results: Mapping[Key, Value | None]) -> list[tuple[Key, Value]]:
        """Returns the values of loaders without a batch for this rank, as reported by the first rank that has them."""
        known: dict[Key, Value] = {}
        for reported in self._strategy.ranks.all_gather_object(dict(results)):
            known = {key: value for key, value in reported.items() if value is not None} | known
        return [(key, known[key]) for key in sorted(known) if key not in results]


def _check_parts(entry: Entry, numbers: Sequence[tuple[int, list[float]]]) -> None:
    """Checks a value that an evaluation logs outside of its step: the ranks of a data rank must agree on it.

    Raises:
        ConfigurationError: on every rank, if they differ, because each has counted its own part of the sequences.
    """
    # As text, in which nan equals nan.
    found = {(data_rank, str(own)) for data_rank, own in numbers}
    if entry.event.startswith(("on_validation", "on_test")) and len(found) > len({data_rank for data_rank, _ in found}):
        raise ConfigurationError(
            f"self.log({entry.name!r}) in {entry.event} got different values on ranks that hold parts of the same "
            "sequences: each has counted its own part. Log it in the step, which makes one value of the parts, use a "
            "torchmetrics object, or pass sync_dist=False for this rank's value."
        )


def over_ranks(strategy: Strategy) -> EpochValues | None:
    """Returns the reducer of epoch values under a strategy; None if one rank has all data and all outputs."""
    outputs = strategy.outputs
    return EpochValues(strategy) if strategy.data_size > 1 or outputs.are_in_parts or outputs.are_split else None


def combined(entry: Entry, logged: Sequence[list[float]]) -> Value | None:
    """Combines the numbers that each rank logged for an entry into one value, by the entry's `reduce_fx`."""
    reduction = entry.reduce_fx
    if isinstance(reduction, Reduced):
        warn(
            f"the epoch value of {entry.name!r} is left out: its reduce_fx is a function, which a resumed run gets "
            "from the next self.log call, and this epoch made none."
        )
        return None
    if callable(reduction):
        # In the order in which a single process would have logged the values.
        values = torch.tensor(list(in_turns(logged)), dtype=torch.float64)
        return as_number(entry.name, reduction(values))
    totals = torch.tensor([numbers[0] for numbers in logged], dtype=torch.float64)
    if reduction == "mean":
        return totals.sum() / math.fsum(numbers[1] for numbers in logged)
    return totals.sum() if reduction == "sum" else totals.amax() if reduction == "max" else totals.amin()


def _value_of_this_rank(entry: Entry) -> Value | None:
    """Returns the epoch value of an entry on this rank alone."""
    return entry.result() if entry.metric is None else as_number(entry.name, metrics.compute_alone(entry.metric))


def _numbers(own: Mapping[Key, Entry]) -> list[float]:
    """Flattens the entries into (length, numbers …) each, with one read-back from the device."""
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
    """Inverts `_numbers`: splits the flat numbers by key."""
    found: dict[Key, list[float]] = {}
    start = 0
    for key in keys:
        end = start + 1 + int(numbers[start])
        found[key] = list(numbers[start + 1 : end])
        start = end
    return found


def _digest(keys: Sequence[Key]) -> float:
    """Returns a digest of 48 bits, which a float64 holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(repr(keys).encode(), digest_size=6).digest(), "little"))


def _gather_bytes(strategy: Strategy, message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Gathers the bytes of all ranks, given their sizes. If all sizes are 0, nothing is sent."""
    longest = max(sizes)
    if longest == 0:
        return [message] * len(sizes)
    row = torch.zeros(longest, dtype=torch.uint8)
    row[: message.numel()] = message
    rows = strategy.ranks.all_gather(row, group=strategy.ranks.host_group)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def _check(ranks: Sequence[tuple[Sequence[Key], frozenset[int]]]) -> None:
    """Raises if ranks logged different names. A rank without a batch may lack the names logged with a batch."""
    all_keys = sorted({key for keys, _ in ranks for key in keys})
    missing: dict[int, list[str]] = {}
    for rank, (keys, idle) in enumerate(ranks):
        logged = set(keys)
        lacks = [key for key in all_keys if key not in logged and not (key.has_batch and key.loader in idle)]
        if lacks:
            missing[rank] = [f"{key.name!r} ({key.reduction}, in {key.event})" for key in lacks]
    if missing:
        differences = "; ".join(f"rank {rank} did not log {', '.join(names)}" for rank, names in missing.items())
        raise ConfigurationError(
            f"the ranks logged different values in this epoch: {differences}, which another rank did. Log the same "
            "names in the same way on every rank, or call self.log(..., sync_dist=False) for values of a single rank."
        )
