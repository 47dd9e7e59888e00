"""Micro-batches: cuts a batch into parts of its samples, and joins what a step returned for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from leyden.strategies.batch import PLAIN, batch_size_of, map_children
from leyden.strategies.errors import ConfigurationError, kind_of


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        batch: the samples, as the batch has them.
        rows: how many there are; 0 for one that only fills the schedule, with the batch's first sample.
        share: of the batch's samples.
    """

    batch: Any
    rows: int
    share: float

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """The shapes and dtypes in the batch, which decide what passes between the stages of a pipeline."""
        found: list[Any] = []

        def visit(item: Any) -> Any:
            if isinstance(item, Tensor):
                found.append((item.shape, item.dtype))
                return item
            found.append(type(item))
            return map_children(item, visit)

        visit(self.batch)
        return tuple(found)


def cut(batch: Any, count: int) -> list[MicroBatch]:
    """Cuts a batch into micro-batches whose sizes differ by one at most.

    Tensors and lists of as many entries as the batch has samples are cut along their first dimension; everything else
    is the same in each part. A batch with fewer samples than parts is filled up with parts that do not count.

    Args:
        batch: any nested structure.
        count: of the micro-batches.

    Raises:
        ConfigurationError: for a list of tensors of several lengths, as of a sample each; for an object that may hold
            samples and cannot be cut.

    Example:
        >>> [(part.batch.tolist(), part.rows) for part in cut(torch.arange(5), 3)]
        [([0, 1], 2), ([2, 3], 2), ([4], 1)]
    """
    rows = rows_of(batch)
    _check_lists(batch)
    sizes = [rows // count + (place < rows % count) for place in range(count)]
    parts, start = [], 0
    for size in sizes:
        begin, end = (start, start + size) if size else (0, 1)
        parts.append(MicroBatch(_Rows(rows, begin, end).visit(batch), size, size / rows))
        start += size
    return parts


def rows_of(batch: Any) -> int:
    """The number of samples by which a batch is cut: that of its first tensor, or else the length of its lists.

    Raises:
        ConfigurationError: if nothing in the batch says it, or it has no sample.

    Example:
        >>> rows_of({"text": ["a", "b", "c"]}), rows_of(["a", "b"])
        (3, 2)
    """
    try:
        rows = batch_size_of(batch)
    except ConfigurationError:
        fields = batch.values() if isinstance(batch, Mapping) else (batch,)
        lengths = {len(field) for field in fields if isinstance(field, (list, tuple))}
        rows = lengths.pop() if len(lengths) == 1 else 0
    if rows < 1:
        raise ConfigurationError(
            f"{kind_of(batch)} cannot be cut into micro-batches, since nothing in it has its samples in front: let the "
            "loader's collate_fn return tensors (samples, …), or lists with an entry for each sample."
        )
    return rows


def _check_lists(batch: Any) -> None:
    """Refuses a list of samples of several lengths, of which the first would be cut instead of the list."""
    for item in (batch, *batch.values()) if isinstance(batch, dict) else (batch,):
        if not isinstance(item, (list, tuple)):
            continue
        lengths = {len(tensor) for tensor in item if isinstance(tensor, Tensor) and tensor.ndim}
        if len(lengths) > 1:
            raise ConfigurationError(
                f"a batch has {kind_of(item)} of tensors of the lengths {sorted(lengths)}, and micro-batches are cut "
                "by samples: have the loader's collate_fn put samples of several lengths into one padded tensor, and "
                "give what all samples share a name in a dict."
            )


class _Rows:
    """Takes some samples out of a nested structure; a visitor is an object for the reason in `strategies/batch.py`."""

    __slots__ = ("begin", "end", "rows")

    def __init__(self, rows: int, begin: int, end: int) -> None:
        self.rows, self.begin, self.end = rows, begin, end

    def visit(self, item: Any) -> Any:
        if isinstance(item, PackedSequence):
            raise ConfigurationError(
                "a batch has a PackedSequence, whose samples cannot be cut into micro-batches: let the loader's "
                "collate_fn pad them, and pack them in training_step."
            )
        if isinstance(item, Tensor):
            return item[self.begin : self.end] if item.ndim and item.shape[0] == self.rows else item
        if isinstance(item, (list, tuple)) and len(item) == self.rows and not any(_tensors(item)):
            return item[self.begin : self.end]
        if not isinstance(item, (*PLAIN, Mapping, list, tuple, set, frozenset)) and not dataclasses.is_dataclass(item):
            array = getattr(item, "shape", None)
            if isinstance(array, tuple) and array and array[0] == self.rows:
                return item[self.begin : self.end]
            if callable(getattr(item, "to", None)):
                raise ConfigurationError(
                    f"a batch has {kind_of(item)}, which may hold samples and cannot be cut into micro-batches: let "
                    "the loader's collate_fn return tensors, lists, dicts or dataclasses of them."
                )
        return map_children(item, self.visit)


def _tensors(item: Any) -> Iterator[bool]:
    """True for each tensor in a nested structure."""
    if isinstance(item, Tensor):
        yield True
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _tensors(value)
    elif isinstance(item, (list, tuple, set, frozenset)):
        for value in item:
            yield from _tensors(value)


def together(outputs: Sequence[Any], parts: Sequence[MicroBatch], loss: Tensor) -> Any:
    """What the step would have returned for the whole batch.

    Args:
        outputs: of the micro-batches.
        parts: the micro-batches.
        loss: of the whole batch.

    Returns:
        The loss; or a dict with it, in which tensors with an entry for each sample are put together, numbers are means,
        `num_items` is a sum, and of anything else there is a list with an entry for each micro-batch.

    Raises:
        ConfigurationError: for a key that only some micro-batches have.
    """
    if not isinstance(outputs[0], dict):
        return loss
    counted = [(output, part) for output, part in zip(outputs, parts, strict=True) if part.rows]
    _check_keys([output for output, _ in counted])
    values = {key: [output[key] for output, _ in counted] for key in counted[0][0]}
    trained = [part for _, part in counted]
    return {key: loss if key == "loss" else _joined(key, found, trained) for key, found in values.items()}


def _check_keys(outputs: Sequence[Mapping[Any, Any]]) -> None:
    """Refuses a key that only some micro-batches have."""
    for key in dict.fromkeys(key for output in outputs for key in output):
        lacking = sum(key not in output for output in outputs)
        if lacking:
            raise ConfigurationError(
                f"training_step returned {key!r} for a micro-batch, and not for {lacking} of the {len(outputs)} "
                "micro-batches of the batch: return the same keys each time."
            )


def _joined(key: Any, values: Sequence[Any], parts: Sequence[MicroBatch]) -> Any:
    """Joins what the micro-batches returned under a key."""
    if key == "num_items":
        return sum(values[1:], values[0])
    if _have_rows(values, parts):
        return torch.cat(list(values))
    if all(_is_number(value) for value in values):
        return sum(value * part.share for value, part in zip(values, parts, strict=True))
    return list(values)


def _have_rows(values: Sequence[Any], parts: Sequence[MicroBatch]) -> bool:
    """True for tensors with an entry for each sample of their micro-batch."""
    return all(
        isinstance(value, Tensor) and value.ndim > 0 and len(value) == part.rows
        for value, part in zip(values, parts, strict=True)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.ndim)
