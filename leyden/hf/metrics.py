"""Predictions of a whole validation, gathered from all ranks in the order of the data, for `compute_metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.tree import map_tensors
from leyden.hf.loss import IGNORED
from leyden.strategies.readers import Readers

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy


class Predictions:
    """The predictions and labels of one validation loader on this rank, on the host.

    What `preprocess` makes of a batch's logits and labels is kept instead of the logits.
    """

    def __init__(self, preprocess: Callable[[Any, Any], Any] | None, label_names: Sequence[str]) -> None:
        self._preprocess, self._label_names = preprocess, label_names
        self._batches: list[tuple[Any, Any]] = []

    def add(self, outputs: Any, batch: Mapping[str, Any], ignored: Iterable[str]) -> None:
        """Keeps the predictions of a batch: all of the model's outputs but the loss and those to ignore."""
        if outputs is None:
            raise ConfigurationError(
                "compute_metrics needs the model's outputs, which the evaluation step did not return. Return them from "
                "a step of your own; the stages of a pipeline have none."
            )
        if isinstance(outputs, Mapping):
            kept = [value for name, value in outputs.items() if name not in {"loss", *ignored}]
        else:
            kept = list(outputs[1:])
        predictions: Any = kept[0] if len(kept) == 1 else tuple(kept)
        there = [batch[name] for name in self._label_names if batch.get(name) is not None]
        labels: Any = there[0] if len(there) == 1 else tuple(there) or None
        if self._preprocess is not None:
            predictions = self._preprocess(predictions, labels)
        self._batches.append(map_tensors((predictions, labels), _on_host))

    def compute(self, compute_metrics: Callable[[Any], Mapping[str, float]], strategy: Strategy) -> dict[str, float]:
        """Returns the metrics of all ranks' predictions. All ranks call it; rank 0 calls `compute_metrics`."""
        from transformers import EvalPrediction

        readers = Readers(strategy)
        gathered = readers.gather_object(self._batches if readers.is_first else [])
        metrics: dict[str, float] = {}
        if gathered is not None and any(gathered):
            in_order = [batch for turn in zip_longest(*gathered) for batch in turn if batch is not None]
            predictions, labels = zip(*in_order, strict=True)
            found = compute_metrics(EvalPrediction(_joined(predictions), _joined(labels)))
            metrics = {name: _number(name, value) for name, value in found.items()}
        return strategy.broadcast(metrics)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"compute_metrics returned {kind_of(value)} for {name!r}. Return one number."
        ) from None


def _on_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    # NumPy has no bfloat16.
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _joined(batches: Sequence[Any]) -> Any:
    """Concatenates the tensors of several batches, or tuples and mappings of them, as arrays.

    Shorter sequences, (B, T, …), are padded with -100, as in transformers.
    """
    first = batches[0]
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {name: _joined([batch[name] for batch in batches]) for name in first}
    if isinstance(first, (tuple, list)):
        return tuple(_joined(part) for part in zip(*batches, strict=True))
    if not isinstance(first, Tensor):
        raise ConfigurationError(
            f"compute_metrics: predictions and labels must be tensors, not {kind_of(first)}. Convert them in "
            "preprocess_logits_for_metrics."
        )
    if first.ndim > 1:
        width = max(tensor.shape[1] for tensor in batches)
        batches = [F.pad(t, [0, 0] * (t.ndim - 2) + [0, width - t.shape[1]], value=IGNORED) for t in batches]
    return torch.cat([tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in batches]).numpy()
