"""torchmetrics objects over the ranks: all of their states travel in one message and are merged on every rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leyden.strategies.base import Strategy
from leyden.strategies.batch import map_tensors
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.readers import Readers
from leyden.trainer.format.codec import decode, encode
from leyden.trainer.logging.values import in_turns

if TYPE_CHECKING:
    from torchmetrics import Metric

PREFIX = 8
"""Bytes that hold the length of a message's description."""


@dataclass(slots=True)
class PartState:
    """The state of one metric on one rank. A wrapper, or a sum of metrics, has several parts.

    Attributes:
        count: how often it was updated.
        values: by name, a tensor, or a list of tensors (of other objects, where a metric keeps such).
    """

    count: int
    values: dict[str, Any]


def description(metric: Metric) -> str:
    """Class and states of a metric, which must be the same on all ranks."""
    parts = (f"{type(part).__name__}({', '.join(part._defaults)})" for part in _synced_parts(metric))
    return " ".join((type(metric).__name__, *parts))


def pack(found: Sequence[Metric]) -> Tensor:
    """The states of metrics as bytes on the CPU, read back all at once; empty if there are no metrics."""
    if not found:
        return torch.empty(0, dtype=torch.uint8)
    content = _Content()
    tree = [[[part._update_count, dict(part.metric_state)] for part in _synced_parts(metric)] for metric in found]
    text = json.dumps(encode(tree, content, where="metrics")).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(PREFIX, "little") + text), dtype=torch.uint8)
    return torch.cat([head, content.bytes()])


def unpack(message: Tensor) -> list[list[PartState]]:
    """What `pack` was given, on the CPU: for each metric its parts."""
    if not message.numel():
        return []
    start = PREFIX + int.from_bytes(bytes(message[:PREFIX].tolist()), "little")
    tree = decode(json.loads(bytes(message[PREFIX:start].tolist())), _Content(message[start:]), where="metrics")
    return [[PartState(count, values) for count, values in parts] for parts in tree]


class _Content:
    """The bytes of the tensors of a message, one after the other.

    Args:
        message: what to read from; empty for a message that is written.
    """

    def __init__(self, message: Tensor | None = None) -> None:
        self._pieces: list[Tensor] = []
        self._length = 0
        self._message = torch.empty(0, dtype=torch.uint8) if message is None else message

    def put(self, tensor: Tensor, where: str, key: str) -> dict[str, Any]:
        """Takes a tensor in; returns the key that it is found by."""
        spec = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "at": self._length}
        if tensor.numel():
            piece = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self._pieces.append(piece)
            self._length += piece.numel()
        return spec

    def bytes(self) -> Tensor:
        """All of it, on the CPU; from one device it is read back in one go."""
        if not self._pieces:
            return self._message
        if len({piece.device for piece in self._pieces}) > 1:
            self._pieces = [piece.cpu() for piece in self._pieces]
        return torch.cat(self._pieces).cpu()

    def get(self, spec: Mapping[str, Any]) -> Tensor:
        """The tensor that `put` took."""
        tensor = torch.empty(spec["shape"], dtype=getattr(torch, spec["dtype"]))
        if tensor.numel():
            raw = tensor.reshape(-1).view(torch.uint8)
            raw.copy_(self._message[spec["at"] : spec["at"] + raw.numel()])
        return tensor


def compute(
    metric: Metric, states: Mapping[int, Sequence[PartState]], data_ranks: Mapping[int, int] | None = None
) -> Any:
    """The metric's value over all ranks. Its own state is afterwards as it was.

    Args:
        metric: this rank's.
        states: by rank, the states of its parts.
        data_ranks: by rank, its number among those that see different samples; each its own if left out.
    """
    parts = _synced_parts(metric)
    before = [(part, dict(part.metric_state), part._update_count) for part in parts]
    try:
        with _alone(metric):
            for number, part in enumerate(parts):
                members = _members(part, states)
                ranks = members if data_ranks is None else once({rank: data_ranks[rank] for rank in members})
                _install(part, [states[rank][number] for rank in ranks])
            return metric.compute()
    finally:
        for part, values, count in before:
            for name, value in values.items():
                setattr(part, name, value)
            part._update_count = count


def compute_alone(metric: Metric) -> Any:
    """The metric's value on this rank alone, also where torchmetrics would synchronise."""
    with _alone(metric):
        return metric.compute()


@contextmanager
def _alone(metric: Metric) -> Iterator[None]:
    """In this context no part of the metric talks to other ranks by itself, and no cached result is used."""
    parts = list(_parts(metric))
    before = [part._to_sync for part in parts]
    for part in parts:
        part._to_sync, part._computed = False, None
    try:
        yield
    finally:
        for part, to_sync in zip(parts, before, strict=True):
            part._to_sync = to_sync


@dataclass(frozen=True)
class GatherReaders:
    """How torchmetrics gathers a state where ranks share their samples: from one rank of each data rank.

    As a metric's `dist_sync_fn` it makes a `compute` of the user's own count as `self.log` does. It holds no process
    group, so that metrics can be copied and saved.

    Attributes:
        ranks: the global ranks of one reader of each data rank.
    """

    ranks: tuple[int, ...]

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        from torchmetrics.utilities.distributed import gather_all_tensors

        found = gather_all_tensors(state, group)
        # A group of the user's own is theirs to choose.
        return found if group is not None else [found[rank] for rank in self.ranks]


def gather_readers(module: nn.Module, strategy: Strategy) -> None:
    """Lets a module's metrics count a tp group's samples once; one with a `dist_sync_fn` of the user's keeps it."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return
    ranks = tuple(Readers(strategy).ranks)
    gather = GatherReaders(ranks) if len(ranks) < strategy.ranks.world_size else None
    for part in module.modules():
        if isinstance(part, torchmetrics.Metric) and isinstance(part.dist_sync_fn, (GatherReaders, type(None))):
            part.dist_sync_fn = gather


def _parts(metric: Metric) -> Iterable[Metric]:
    """The metric and those inside it."""
    torchmetrics = sys.modules["torchmetrics"]
    return (part for part in metric.modules() if isinstance(part, torchmetrics.Metric))


def _synced_parts(metric: Metric) -> list[Metric]:
    """The parts that have a state and sync_on_compute=True."""
    return [part for part in _parts(metric) if part._defaults and part.sync_on_compute]


def _members(part: Metric, ranks: Mapping[int, Any]) -> list[int]:
    """The ranks over which a metric is merged: all, or those of its own process group."""
    if part.process_group is None:
        return list(ranks)
    from torch.distributed import get_process_group_ranks

    return [rank for rank in get_process_group_ranks(part.process_group) if rank in ranks]


def once(data_ranks: Mapping[int, int]) -> list[int]:
    """One rank of each data rank, by rank: what ranks share would count several times, so the first of them speaks."""
    seen: dict[int, int] = {}
    for rank, data_rank in data_ranks.items():
        seen.setdefault(data_rank, rank)
    return list(seen.values())


def _install(part: Metric, states: Sequence[PartState]) -> None:
    for name in part._reductions:
        home = getattr(part, name)
        merged = merged_value(part, name, states)
        device = "cpu" if part.compute_on_cpu and not isinstance(home, Tensor) else part.device
        setattr(part, name, map_tensors(merged, partial(Tensor.to, device=device)))
    part._update_count = sum(state.count for state in states)


def _updated(states: Sequence[PartState]) -> Sequence[PartState]:
    # A rank without a batch has only its default state, which must not weigh in a mean or be stacked with the others.
    return [state for state in states if state.count] or states


def merged_value(part: Metric, name: str, states: Sequence[PartState]) -> Any:
    """One state of all ranks, reduced by the function that the metric names for it."""
    from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

    states = _updated(states)
    values: list[Any] = [state.values[name] for state in states]
    reduction: Any = part._reductions[name]
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], list):
        items = list(in_turns(values))
        if reduction is dim_zero_cat:
            # An empty tensor may be of another dtype or shape than those with something in them.
            items = [item for item in items if not isinstance(item, Tensor) or item.numel()]
        return reduction(items) if reduction is not None and items else items
    if reduction is dim_zero_cat:
        return dim_zero_cat(values)
    if len({tuple(value.shape) for value in values}) > 1:
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        raise ConfigurationError(
            f"{type(part).__name__}'s state {name!r} has different shapes on the ranks ({shapes}): give it "
            "dist_reduce_fx='cat', or a default of a fixed shape."
        )
    stacked = torch.stack(values)
    if reduction is dim_zero_mean:
        weights = torch.tensor([state.count for state in states], dtype=torch.float64).reshape(
            -1, *[1] * (stacked.dim() - 1)
        )
        wide = torch.promote_types(stacked.dtype, torch.float64)
        mean = (stacked.to(wide) * weights).sum(dim=0) / weights.sum()
        is_whole = not (stacked.dtype.is_floating_point or stacked.dtype.is_complex)
        return mean.to(torch.get_default_dtype() if is_whole else stacked.dtype)
    return stacked if reduction is None else reduction(stacked)
