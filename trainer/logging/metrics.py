"""Reduces torchmetrics objects over the ranks: all states travel in one message and are merged on every rank."""

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

from leyden.core.errors import ConfigurationError
from leyden.core.tree import map_tensors
from leyden.strategies.base import Strategy
from leyden.strategies.readers import Readers
from leyden.trainer.logging.values import in_turns

if TYPE_CHECKING:
    from torchmetrics import Metric

PREFIX = 8
"""Number of bytes in front of a message that hold the length of its JSON header."""


@dataclass(slots=True)
class PartState:
    """The state of one part of a metric on one rank. A wrapper or a composition of metrics has several parts."""

    count: int
    """Number of updates."""
    values: dict[str, Any]
    """The state by name: a tensor, or a list of tensors or of other objects."""


def description(metric: Metric) -> str:
    """Returns the class and state names of a metric, which must match on all ranks."""
    parts = (f"{type(part).__name__}({', '.join(part._defaults)})" for part in _synced_parts(metric))
    return " ".join((type(metric).__name__, *parts))


def pack(found: Sequence[Metric]) -> Tensor:
    """Packs the states of metrics into bytes on the CPU, with one read-back; empty without metrics."""
    from leyden.checkpoint.format.codec import encode

    if not found:
        return torch.empty(0, dtype=torch.uint8)
    content = _Content()
    tree = [[[part._update_count, dict(part.metric_state)] for part in _synced_parts(metric)] for metric in found]
    text = json.dumps(encode(tree, content, where="metrics")).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(PREFIX, "little") + text), dtype=torch.uint8)
    return torch.cat([head, content.bytes()])


def unpack(message: Tensor) -> list[list[PartState]]:
    """Inverts `pack`: returns the parts of each metric, on the CPU."""
    from leyden.checkpoint.format.codec import decode

    if not message.numel():
        return []
    start = PREFIX + int.from_bytes(bytes(message[:PREFIX].tolist()), "little")
    tree = decode(json.loads(bytes(message[PREFIX:start].tolist())), _Content(message[start:]), where="metrics")
    return [[PartState(count, values) for count, values in parts] for parts in tree]


class _Content:
    """The concatenated bytes of a message's tensors. Without a message to read from, it is written."""

    def __init__(self, message: Tensor | None = None) -> None:
        self._pieces: list[Tensor] = []
        self._length = 0
        self._message = torch.empty(0, dtype=torch.uint8) if message is None else message

    def put(self, tensor: Tensor, where: str, key: str) -> dict[str, Any]:
        """Appends a tensor, and returns the spec by which `get` finds it."""
        spec = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "at": self._length}
        if tensor.numel():
            piece = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self._pieces.append(piece)
            self._length += piece.numel()
        return spec

    def bytes(self) -> Tensor:
        """Returns all bytes, on the CPU. If all tensors are on one device, this takes a single read-back."""
        if not self._pieces:
            return self._message
        if len({piece.device for piece in self._pieces}) > 1:
            self._pieces = [piece.cpu() for piece in self._pieces]
        return torch.cat(self._pieces).cpu()

    def get(self, spec: Mapping[str, Any]) -> Tensor:
        """Returns the tensor that `put` appended."""
        tensor = torch.empty(spec["shape"], dtype=getattr(torch, spec["dtype"]))
        if tensor.numel():
            raw = tensor.reshape(-1).view(torch.uint8)
            raw.copy_(self._message[spec["at"] : spec["at"] + raw.numel()])
        return tensor


def compute(
    metric: Metric, states: Mapping[int, Sequence[PartState]], data_ranks: Mapping[int, int] | None = None
) -> Any:
    """Returns the metric's value over all ranks, from the states of its parts. Its own state is restored afterwards.

    Ranks with the same data rank see the same samples, and count once. None: every rank sees different samples.
    """
    parts = _synced_parts(metric)
    with _keeping_states(parts), _alone(metric):
        for number, part in enumerate(parts):
            members = _members(part, states)
            ranks = members if data_ranks is None else once({rank: data_ranks[rank] for rank in members})
            _install(part, [states[rank][number] for rank in ranks])
        return metric.compute()


@contextmanager
def set_aside(found: Sequence[Metric]) -> Iterator[None]:
    """Resets metrics for the block, and restores their states afterwards."""
    with _keeping_states([part for metric in found for part in _parts(metric)]):
        for metric in found:
            metric.reset()
        yield


@contextmanager
def _keeping_states(parts: Sequence[Metric]) -> Iterator[None]:
    """Restores the states of metrics after the block."""
    before = [(part, _state(part), part._update_count) for part in parts]
    try:
        yield
    finally:
        for part, values, count in before:
            for name, value in values.items():
                setattr(part, name, value)
            part._update_count, part._computed = count, None


def _state(part: Metric) -> dict[str, Any]:
    """Returns the state by name. A reset replaces the tensors, but clears the lists, so these are copied."""
    return {name: value if isinstance(value, Tensor) else list(value) for name, value in part.metric_state.items()}


def compute_alone(metric: Metric) -> Any:
    """Returns the metric's value on this rank alone, even if torchmetrics would synchronize."""
    with _alone(metric):
        return metric.compute()


@contextmanager
def _alone(metric: Metric) -> Iterator[None]:
    """Keeps all parts of the metric from synchronizing with other ranks and from using cached results."""
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
    """A `dist_sync_fn` for metrics under tensor parallelism: gathers a state from one rank per data rank.

    It makes the user's own calls of `compute` count samples as `self.log` does. It holds no process group, so that
    metrics can be copied and saved.
    """

    ranks: tuple[int, ...]
    """The global ranks to gather from, one per data rank."""

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        from torchmetrics.utilities.distributed import gather_all_tensors

        gathered = gather_all_tensors(state, group)
        # If the user chose a group, all of its ranks count.
        return gathered if group is not None else [gathered[rank] for rank in self.ranks]


def gather_readers(module: nn.Module, strategy: Strategy) -> None:
    """Makes a module's metrics count the samples of a tp group once. A metric keeps the user's `dist_sync_fn`."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return
    ranks = tuple(Readers(strategy, strategy.part_ranks).ranks)
    gather = GatherReaders(ranks) if len(ranks) < strategy.ranks.world_size else None
    for part in module.modules():
        if isinstance(part, torchmetrics.Metric) and isinstance(part.dist_sync_fn, (GatherReaders, type(None))):
            part.dist_sync_fn = gather


def _parts(metric: Metric) -> Iterable[Metric]:
    """Returns the metric and all metrics inside it."""
    torchmetrics = sys.modules["torchmetrics"]
    return (part for part in metric.modules() if isinstance(part, torchmetrics.Metric))


def _synced_parts(metric: Metric) -> list[Metric]:
    """Returns the parts that have a state and sync_on_compute=True."""
    return [part for part in _parts(metric) if part._defaults and part.sync_on_compute]


def _members(part: Metric, ranks: Mapping[int, Any]) -> list[int]:
    """Returns the ranks over which a metric is merged: those of its process group if it has one, or all."""
    if part.process_group is None:
        return list(ranks)
    from torch.distributed import get_process_group_ranks

    return [rank for rank in get_process_group_ranks(part.process_group) if rank in ranks]


def once(data_ranks: Mapping[int, int]) -> list[int]:
    """Returns the first rank of each data rank, so that samples shared by several ranks count once."""
    first: dict[int, int] = {}
    for rank, data_rank in data_ranks.items():
        first.setdefault(data_rank, rank)
    return list(first.values())


def _install(part: Metric, states: Sequence[PartState]) -> None:
    """Replaces the state of a part by the merged states."""
    for name in part._reductions:
        merged = merged_value(part, name, states)
        is_list = not isinstance(getattr(part, name), Tensor)
        device = "cpu" if part.compute_on_cpu and is_list else part.device
        setattr(part, name, map_tensors(merged, partial(Tensor.to, device=device)))
    part._update_count = sum(state.count for state in states)


def merged_value(part: Metric, name: str, states: Sequence[PartState]) -> Any:
    """Returns one state merged over all ranks, by the metric's own reduction for that state."""
    from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

    # A rank without a batch has the default state, which must not count in a mean or be stacked with the others.
    states = [state for state in states if state.count] or states
    values: list[Any] = [state.values[name] for state in states]
    reduction: Any = part._reductions[name]
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], list):
        items = list(in_turns(values))
        if reduction is dim_zero_cat:
            # Drop empty tensors: their dtype or shape may differ from that of the others.
            items = [item for item in items if not isinstance(item, Tensor) or item.numel()]
        return reduction(items) if reduction is not None and items else items
    if reduction is dim_zero_cat:
        return dim_zero_cat(values)
    if len({tuple(value.shape) for value in values}) > 1:
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        raise ConfigurationError(
            f"the state {name!r} of {type(part).__name__} has different shapes on the ranks ({shapes}). Use "
            "dist_reduce_fx='cat' for it, or a default of fixed shape."
        )
    stacked = torch.stack(values)
    if reduction is dim_zero_mean:
        weights = torch.tensor([state.count for state in states], dtype=torch.float64).reshape(
            -1, *[1] * (stacked.dim() - 1)
        )
        wide = torch.promote_types(stacked.dtype, torch.float64)
        mean = (stacked.to(wide) * weights).sum(dim=0) / weights.sum()
        is_integer = not (stacked.dtype.is_floating_point or stacked.dtype.is_complex)
        return mean.to(torch.get_default_dtype() if is_integer else stacked.dtype)
    return stacked if reduction is None else reduction(stacked)
