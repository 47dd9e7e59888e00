"""Reads a run's position and its optimizers' states, keyed by parameter name, from a Lightning `.ckpt`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leyden.checkpoint.format.tensors import is_sharded
from leyden.checkpoint.optimizers import flat_names
from leyden.core.errors import StateError
from leyden.core.saved_state import SavedState
from leyden.trainer.events.progress import Progress


@dataclass(frozen=True, slots=True)
class Position:
    """The position at which a Lightning run was saved.

    Attributes:
        progress: the position as Leyden counts it.
        window_start: the index in the epoch of the first batch of the last closed accumulation window, if the file does
            not record whether a validation should follow that window; otherwise None.
        owes_plateau: True if the file was saved at an epoch's end, before schedulers stepped on the epoch's metrics.
        is_known: False if the file does not record the position within its epoch.
        begun: the number of batches of an open accumulation window, which the resumed run repeats.
    """

    progress: Progress
    window_start: int | None = None
    owes_plateau: bool = False
    is_known: bool = True
    begun: int = 0


@dataclass(frozen=True, slots=True)
class _Counts:
    """One of Lightning's progress counters, for batches or epochs."""

    ready: int
    started: int
    processed: int
    completed: int

    @classmethod
    def read(cls, loop: SavedState, name: str, kind: str = "current") -> _Counts:
        counts = loop.nested(name, {}).nested(kind, {})
        return cls(*(counts.integer(field.name, 0, least=0, most=2**62) for field in dataclasses.fields(cls)))


def position_of(
    loaded: Mapping[str, Any], window: Callable[[Progress], int], steps: Callable[[int, int], int]
) -> Position:
    """Reads the position of a run.

    For a checkpoint inside an accumulation window, the position is the window's start, since Lightning saves no
    gradients.

    Args:
        loaded: the file's content.
        window: returns the number of batches in an accumulation window at a given position.
        steps: converts Lightning's `global_step` and the number of batches in all epochs to Leyden's `global_step`.

    Raises:
        StateError: if Lightning cannot have written an entry; names the entry.
    """
    saved = SavedState(loaded)
    step = saved.integer("global_step", 0, least=0, most=2**62)
    loop = SavedState(loaded.get("loops") or {}, "loops").nested("fit_loop", {})
    epochs, batches = _Counts.read(loop, "epoch_progress"), _Counts.read(loop, "epoch_loop.batch_progress")
    if not epochs.ready:
        # The file has no loops, so the position within the epoch is unknown.
        epoch = saved.integer("epoch", 0, least=0, most=2**62)
        return Position(Progress(epoch=epoch, global_step=step, stepped=step), is_known=not (epoch or step))
    total = _Counts.read(loop, "epoch_loop.batch_progress", "total").processed
    is_last = loop.nested("epoch_loop.batch_progress").flag("is_last_batch", False)
    step = steps(step, total)
    progress = Progress(epoch=epochs.ready - 1, global_step=step, stepped=step, batches=total)
    if epochs.started < epochs.ready:
        # The epoch has not started.
        return Position(progress)
    done, length = batches.processed, window(progress)
    progress = dataclasses.replace(progress, batch=done, phase="settled", ended=is_last)
    begun = 0 if is_last else done % length
    if begun:
        # Go back to the start of the open window.
        return Position(dataclasses.replace(progress, batch=done - begun, batches=total - begun), begun=begun)
    if epochs.processed == epochs.ready:
        owes = is_last and epochs.completed < epochs.processed
        return Position(dataclasses.replace(progress, phase="epoch_end" if is_last else "paused"), owes_plateau=owes)
    validated = _Counts.read(loop, "epoch_loop.val_loop.batch_progress")
    if done and (batches.completed < done or validated.completed < validated.ready):
        # The window's step is done, but perhaps not the validation after it.
        start = (done - 1) // length * length
        return Position(dataclasses.replace(progress, phase="stepped"), window_start=start)
    after_validation = done and batches.ready == done
    return Position(dataclasses.replace(progress, phase="validated" if after_validation else "settled"))


def named_optimizer(
    state: Any,
    optimizer: Any,
    names: Mapping[Tensor, str],
    weights: Mapping[str, Tensor],
    parts: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Converts the `state_dict` of one of torch's optimizers to the form of `to_named`, matching parameters by order.

    Args:
        state: the saved `state_dict`.
        optimizer: the optimizer that will load the state, with its parameters in the same order.
        names: the parameters' names.
        weights: the weights in the same file, for their dtypes.
        parts: the tensors that the state belongs to, by name. For a sharded tensor, only this rank's part of the state
            is kept.

    Raises:
        StateError: if the groups differ from the optimizer's, or this is not an optimizer's state.
    """
    saved = SavedState(state)
    groups = [SavedState(group, f"param_groups[{i}]") for i, group in enumerate(saved.items("param_groups"))]
    flat = flat_names(optimizer, names)
    _check_groups([len(group.items("params")) for group in groups], [len(own) for own in flat])
    name_by_index = {
        index: name
        for group, own in zip(groups, flat, strict=True)
        for index, name in zip(group.items("params"), own, strict=True)
    }
    states = saved.nested("state")
    entries = {
        name_by_index[index]: _own_parts(name_by_index[index], own, parts)
        for index, own in states.entries.items()
        if index in name_by_index
    }
    dtypes = {name: weights[name].dtype for name in name_by_index.values() if name in weights}
    return {
        "state": entries,
        "param_groups": [{**group.entries, "params": own} for group, own in zip(groups, flat, strict=True)],
        "other": {index: own for index, own in states.entries.items() if index not in name_by_index},
        "dtypes": {name: dtype for name, dtype in dtypes.items() if dtype != torch.float32},
        "extra": {key: value for key, value in saved.entries.items() if key not in ("state", "param_groups")},
    }


def _check_groups(saved: list[int], current: list[int]) -> None:
    """Raises if the saved groups and the optimizer's differ in their numbers of parameters."""
    if saved != current:
        raise StateError(
            "param_groups",
            f"has groups of {saved} parameters, and this optimizer has groups of {current}: build the same optimizer, "
            "with the groups that a finetuning callback had added, or leave 'optimizers' out of restore",
        )


def _own_parts(name: str, entries: Any, parts: Mapping[str, Tensor]) -> Any:
    """Returns a parameter's state; if the parameter is sharded, with only this rank's part of each tensor."""
    like = parts.get(name)
    if like is None or not is_sharded(like) or not isinstance(entries, Mapping):
        return entries
    from leyden.checkpoint.shards import part_like

    return {
        entry: part_like(name, str(entry), value, like)
        if isinstance(value, Tensor) and value.shape == like.shape and entry != "step"
        else value
        for entry, value in entries.items()
    }
