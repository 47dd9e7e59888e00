"""What a `.ckpt` of Lightning says of a run: where it stood, and the states of its optimizers by parameter names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leyden.strategies.errors import StateError
from leyden.strategies.saved_state import SavedState
from leyden.trainer.checkpoint.optimizers import flat_names
from leyden.trainer.events.progress import Progress
from leyden.trainer.format.tensors import is_sharded


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run of Lightning stood.

    Attributes:
        progress: as Leyden counts it.
        window_start: index in the epoch of the first batch of the window that was closed last, where the file does not
            say whether a validation was to follow it; else None.
        owes_plateau: the file is from an epoch's end, before schedulers stepped on the epoch's values.
        is_known: False for a file without loops, which says neither.
        begun: batches of an open accumulation window, which are before it.
    """

    progress: Progress
    window_start: int | None = None
    owes_plateau: bool = False
    is_known: bool = True
    begun: int = 0


@dataclass(frozen=True, slots=True)
class _Counts:
    """One of Lightning's counters, of batches or epochs."""

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
    """Reads where a run stood.

    A checkpoint inside an accumulation window stands at the window's start: Lightning saves no gradients.

    Args:
        loaded: the file.
        window: the batches of an accumulation window, by where the run stands.
        steps: `global_step` as Leyden counts it, from Lightning's and the number of batches in all epochs.

    Raises:
        StateError: if Lightning cannot have written an entry; names it.
    """
    saved = SavedState(loaded)
    step = saved.integer("global_step", 0, least=0, most=2**62)
    loop = SavedState(loaded.get("loops") or {}, "loops").nested("fit_loop", {})
    epochs, batches = _Counts.read(loop, "epoch_progress"), _Counts.read(loop, "epoch_loop.batch_progress")
    if not epochs.ready:
        epoch = saved.integer("epoch", 0, least=0, most=2**62)
        return Position(Progress(epoch=epoch, global_step=step, stepped=step), is_known=not (epoch or step))
    total = _Counts.read(loop, "epoch_loop.batch_progress", "total").processed
    is_last = loop.nested("epoch_loop.batch_progress").flag("is_last_batch", False)
    step = steps(step, total)
    progress = Progress(epoch=epochs.ready - 1, global_step=step, stepped=step, batches=total)
    if epochs.started < epochs.ready:
        return Position(progress)
    done, length = batches.processed, window(progress)
    progress = dataclasses.replace(progress, batch=done, phase="settled", ended=is_last)
    begun = 0 if is_last else done % length
    if begun:
        return Position(dataclasses.replace(progress, batch=done - begun, batches=total - begun), begun=begun)
    if epochs.processed == epochs.ready:
        owes = is_last and epochs.completed < epochs.processed
        return Position(dataclasses.replace(progress, phase="epoch_end" if is_last else "paused"), owes_plateau=owes)
    validated = _Counts.read(loop, "epoch_loop.val_loop.batch_progress")
    if done and (batches.completed < done or validated.completed < validated.ready):
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
    group_names: list[list[str]] | None = None,
) -> dict[str, Any]:
    """Returns the state of one of torch's optimizers as `to_named` does, by the order of its parameters.

    Args:
        state: what its `state_dict` returned.
        optimizer: that is to take it, with its parameters in the same order.
        names: of the parameters.
        weights: that were saved with it, for their dtypes.
        parts: the tensors by name that state belongs to; of one that is sharded, only this rank's part is kept.
        group_names: of the parameters in each of the saved groups, where they are known.

    Raises:
        StateError: if it has other groups than the optimizer, or is no optimizer's state.
    """
    saved = SavedState(state)
    groups = [SavedState(group, f"param_groups[{i}]") for i, group in enumerate(saved.items("param_groups"))]
    flat = group_names or flat_names(optimizer, names)
    _check_groups([len(group.items("params")) for group in groups], [len(own) for own in flat])
    by_place = {
        place: name
        for group, own in zip(groups, flat, strict=True)
        for place, name in zip(group.items("params"), own, strict=True)
    }
    states = saved.nested("state")
    entries = {
        by_place[place]: _parts_of(by_place[place], own, parts)
        for place, own in states.entries.items()
        if place in by_place
    }
    dtypes = {name: weights[name].dtype for name in by_place.values() if name in weights}
    return {
        "state": entries,
        "param_groups": [{**group.entries, "params": own} for group, own in zip(groups, flat, strict=True)],
        "other": {place: own for place, own in states.entries.items() if place not in by_place},
        "dtypes": {name: dtype for name, dtype in dtypes.items() if dtype != torch.float32},
        "extra": {key: value for key, value in saved.entries.items() if key not in ("state", "param_groups")},
    }


def _check_groups(there: list[int], here: list[int]) -> None:
    """Refuses groups of other numbers of parameters than the optimizer has."""
    if there != here:
        raise StateError(
            "param_groups",
            f"has groups of {there} parameters, and the optimizer here of {here}: build the same optimizer, or leave "
            "'optimizers' out of restore",
        )


def _parts_of(name: str, entries: Any, parts: Mapping[str, Tensor]) -> Any:
    like = parts.get(name)
    if like is None or not is_sharded(like) or not isinstance(entries, Mapping):
        return entries
    from leyden.trainer.checkpoint.shards import part_like

    return {
        entry: part_like(name, str(entry), value, like)
        if isinstance(value, Tensor) and value.shape == like.shape and entry != "step"
        else value
        for entry, value in entries.items()
    }
