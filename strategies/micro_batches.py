"""Micro-batches: splits a batch by samples, and merges the step's outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.tree import PLAIN, batch_size_of, leaves, map_children


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        batch: some of the batch's samples, in the batch's structure.
        rows: number of samples. 0 marks padding: the batch's first sample again, which only fills the schedule.
        share: the part's fraction of the batch's samples.
    """

    batch: Any
    rows: int
    share: float

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """The shapes and dtypes in the batch, which determine the tensors sent between the stages of a pipeline."""
        signature: list[Any] = []

        def visit(item: Any) -> Any:
            if isinstance(item, Tensor):
                signature.append((item.shape, item.dtype))
                return item
            signature.append(type(item))
            return map_children(item, visit)

        visit(self.batch)
        return tuple(signature)


def cut(batch: Any, count: int) -> list[MicroBatch]:
    """Splits a batch into micro-batches whose sizes differ by at most one.

    Tensors and lists with one entry per sample are split along their first dimension. Everything else is the same in
    each part. If the batch has fewer samples than parts, the remaining parts are padding.

    Args:
        batch: any nested structure.
        count: number of micro-batches.

    Raises:
        ConfigurationError: for a list of tensors of different lengths, such as one tensor per sample, and for an
            object that may hold samples but cannot be split.

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
    """Returns a batch's number of samples: the length of its first tensor, or else the common length of its lists.

    Raises:
        ConfigurationError: if the number cannot be determined or is 0.

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
            f"A batch that is {kind_of(batch)} cannot be split into micro-batches, since nothing in it has the samples "
            "as its first dimension. Have the loader's collate_fn return tensors of shape (samples, …), or lists with "
            "one entry per sample."
        )
    return rows


def _check_lists(batch: Any) -> None:
    """Raises for a list with one tensor per sample: the first tensor would be split in place of the list."""
    for item in (batch, *batch.values()) if isinstance(batch, dict) else (batch,):
        if not isinstance(item, (list, tuple)):
            continue
        lengths = {len(tensor) for tensor in item if isinstance(tensor, Tensor) and tensor.ndim}
        if len(lengths) > 1:
            raise ConfigurationError(
                f"A batch has {kind_of(item)} of tensors of different lengths, {sorted(lengths)}, and cannot be split "
                "into micro-batches by sample. Have the loader's collate_fn pad samples into one tensor. Name values "
                "that all samples share in a dict."
            )


class _Rows:
    """Selects a range of samples from a nested structure. An object for the reason given in `leyden/core/tree.py`."""

    __slots__ = ("begin", "end", "rows")

    def __init__(self, rows: int, begin: int, end: int) -> None:
        self.rows, self.begin, self.end = rows, begin, end

    def visit(self, item: Any) -> Any:
        if isinstance(item, PackedSequence):
            raise ConfigurationError(
                "A batch has a PackedSequence, which cannot be split into micro-batches. Have the loader's collate_fn "
                "pad the samples, and pack them in training_step."
            )
        if isinstance(item, Tensor):
            return item[self.begin : self.end] if item.ndim and item.shape[0] == self.rows else item
        is_of_samples = isinstance(item, (list, tuple)) and len(item) == self.rows
        if is_of_samples and not any(isinstance(leaf, Tensor) for leaf in leaves(item)):
            return item[self.begin : self.end]
        if not isinstance(item, (*PLAIN, Mapping, list, tuple, set, frozenset)) and not dataclasses.is_dataclass(item):
            array = getattr(item, "shape", None)
            if isinstance(array, tuple) and array and array[0] == self.rows:
                return item[self.begin : self.end]
            if callable(getattr(item, "to", None)):
                raise ConfigurationError(
                    f"A batch has {kind_of(item)}, which may hold samples but cannot be split into micro-batches. Have "
                    "the loader's collate_fn return tensors, or lists, dicts or dataclasses of tensors."
                )
        return map_children(item, self.visit)


def together(outputs: Sequence[Any], parts: Sequence[MicroBatch], loss: Tensor) -> Any:
    """Merges the step's outputs for micro-batches into its output for the whole batch.

    Args:
        outputs: the step's output for each micro-batch.
        parts: the micro-batches.
        loss: the loss of the whole batch.

    Returns:
        The loss, or a dict if the step returns dicts. In the dict, tensors with one entry per sample are concatenated,
        numbers are averaged, `num_items` is summed, and any other value becomes a list with one entry per micro-batch.

    Raises:
        ConfigurationError: for a key that only some micro-batches have.
    """
    if not isinstance(outputs[0], dict):
        return loss
    filled = [(output, part) for output, part in zip(outputs, parts, strict=True) if part.rows]
    filled_parts = [part for _, part in filled]
    _check_keys([output for output, _ in filled])
    values = {key: [output[key] for output, _ in filled] for key in filled[0][0]}
    return {key: loss if key == "loss" else _merge(key, found, filled_parts) for key, found in values.items()}


def _check_keys(outputs: Sequence[Mapping[Any, Any]]) -> None:
    """Raises for a key that only some micro-batches have."""
    for key in dict.fromkeys(key for output in outputs for key in output):
        lacking = sum(key not in output for output in outputs)
        if lacking:
            raise ConfigurationError(
                f"training_step did not return {key!r} for {lacking} of the batch's {len(outputs)} micro-batches. "
                "Return the same keys each time."
            )


def _merge(key: Any, values: Sequence[Any], parts: Sequence[MicroBatch]) -> Any:
    """Merges the values of one key."""
    if key == "num_items":
        return sum(values[1:], values[0])
    if _have_rows(values, parts):
        return torch.cat(list(values))
    if all(_is_number(value) for value in values):
        return sum(value * part.share for value, part in zip(values, parts, strict=True))
    return list(values)


def _have_rows(values: Sequence[Any], parts: Sequence[MicroBatch]) -> bool:
    """Returns True if each value is a tensor with one entry per sample of its micro-batch."""
    return all(
        isinstance(value, Tensor) and value.ndim > 0 and len(value) == part.rows
        for value, part in zip(values, parts, strict=True)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.ndim)
