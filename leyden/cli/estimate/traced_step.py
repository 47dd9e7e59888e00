"""Finds the training step that `leyden estimate` traces, and its batch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leyden.cli.models import SCRIPT, load_object
from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.tree import map_tensors
from leyden.trainer.datamodule import DataModule
from leyden.trainer.module import TrainModule


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """The batch of a step.

    Attributes:
        value: any nested structure of tensors, or None if there is no batch.
        about: description of its tensors, or the reason why there is no batch.
    """

    value: Any
    about: str


def find_batch(model: nn.Module, data: str | None, batch_size: int | None, seq_len: int | None) -> TracedBatch:
    """Finds the batch of one data rank.

    Args:
        model: the model.
        data: the name of a loader, a DataModule, or a function that builds one (`train.py:NAME`). Default: the module's
            own `train_dataloader`, or the script's only DataModule.
        batch_size: samples in a batch of tokens, for a model of `transformers`.
        seq_len: tokens in each sample.

    Raises:
        ConfigurationError: if the name or the sizes do not fit the model.
    """
    sized = batch_size is not None or seq_len is not None
    if isinstance(model, TrainModule):
        if sized:
            raise ConfigurationError(
                f"--batch-size and --seq-len make a batch for a model of transformers, but {type(model).__name__} is a "
                "TrainModule. Its batch is the first of its train_dataloader, of the script's only DataModule, or of "
                "--data train.py:NAME."
            )
        return _drawn(model, data)
    if "input_ids" not in inspect.signature(model.forward).parameters:
        return TracedBatch(None, f"{type(model).__name__} is not a TrainModule and has no training_step")
    if batch_size is None or seq_len is None:
        return TracedBatch(None, "give --batch-size and --seq-len")
    if min(batch_size, seq_len) < 1:
        raise ConfigurationError(f"--batch-size {batch_size} --seq-len {seq_len}: give sizes from 1.")
    return _described({"input_ids": torch.zeros(batch_size, seq_len, dtype=torch.long)})


def step_of(model: nn.Module) -> Callable[[Any, int], Any]:
    """Returns the step of a model: its `training_step`, or a function with the loss of a `transformers` model."""
    if isinstance(model, TrainModule):
        return model.training_step
    takes_labels = "labels" in inspect.signature(model.forward).parameters

    def step(batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        outputs = model(**batch, labels=batch["input_ids"]) if takes_labels else model(**batch)
        loss = outputs.loss if takes_labels else outputs[0].float().sum()
        return {"loss": loss, "num_items": batch["input_ids"].numel()}

    return step


def _drawn(model: TrainModule, data: str | None) -> TracedBatch:
    """Draws the first batch of the loader."""
    try:
        loader = _loader(model, data)
        if loader is None:
            return TracedBatch(None, "neither the module nor the script has a loader: name one as --data train.py:NAME")
        for batch in loader:
            return _described(batch)
    except ConfigurationError:
        raise
    except Exception as error:
        return TracedBatch(None, f"its loader fails ({type(error).__name__}: {error})")
    return TracedBatch(None, "its loader has no batch")


def _loader(model: TrainModule, data: str | None) -> Any:
    if data is not None:
        found = load_object(data)
        found = found() if callable(found) else found
    elif type(model).train_dataloader is not TrainModule.train_dataloader:
        found = model.train_dataloader()
    else:
        script = vars(sys.modules.get(SCRIPT, object)).values()
        own = [kind for kind in script if isinstance(kind, type) and issubclass(kind, DataModule)]
        own = [kind for kind in own if kind.__module__ == SCRIPT]
        found = own[0]() if len(own) == 1 else None
    if isinstance(found, DataModule):
        found.prepare_data()
        found.setup("fit")
        found = found.train_dataloader()
    if found is not None and not hasattr(found, "__iter__"):
        raise ConfigurationError(f"--data {data} is {kind_of(found)}: give a loader, a DataModule, or a function.")
    return found


def _described(batch: Any) -> TracedBatch:
    shapes: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        shapes.append(f"{str(tensor.dtype).removeprefix('torch.')} {' × '.join(map(str, tensor.shape))}".strip())
        return tensor

    map_tensors(batch, note)
    return TracedBatch(batch, ", ".join(shapes) or "no tensors")
