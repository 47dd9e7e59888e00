"""Entries: the names that hooks log, each with its options, its last value and its sum over the epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from leyden.strategies.errors import ConfigurationError, StateError, nearest
from leyden.strategies.saved_state import SavedState, brief
from leyden.trainer.logging.values import REDUCTIONS, Value, as_number, as_tensor, extreme, sum_dtype, together

STAGES = ("validation", "test")
STEP_EVENTS = (
    *("training_step", "on_train_batch_start", "on_train_batch_end", "on_before_backward", "backward"),
    *("on_after_backward", "configure_gradient_clipping", "on_before_optimizer_step", "optimizer_step"),
    *("on_before_zero_grad", "optimizer_zero_grad", "lr_scheduler_step"),
)
EPOCH_EVENTS = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")
LOADER_SUFFIX = "/dataloader_idx_"
STORED: Any = object()


@dataclass(frozen=True, slots=True)
class Rule:
    """What follows from the hook in which a value is logged: its group, and the defaults of on_step and on_epoch."""

    group: str
    on_step: bool
    on_epoch: bool
    has_batch: bool


def rule_of(event: str) -> Rule:
    """The rule of a hook.

    Raises:
        ConfigurationError: if there is no epoch or step at that moment that a value could belong to.
    """
    if event in EPOCH_EVENTS:
        return Rule("train", False, True, False)
    if event in STEP_EVENTS:
        return Rule("train", True, False, True)
    for stage in STAGES:
        if event == f"{stage}_step" or event.startswith(f"on_{stage}_batch_"):
            return Rule(stage, False, True, True)
        if event in (f"on_{stage}_epoch_start", f"on_{stage}_epoch_end", f"on_{stage}_start"):
            return Rule(stage, False, True, False)
    place = f"in {event}" if event else "outside of a hook"
    raise ConfigurationError(
        f"self.log cannot be called {place}: the value would belong to no step and no epoch. Log in a training, "
        "validation or test step, or in a hook of their batches and epochs."
    )


class Entry:
    """One name that one hook logs: its options, its last value, and its sum over the epoch."""

    __slots__ = (
        *("event", "group", "name", "options", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "has_batch"),
        *("value", "fresh", "tick", "total", "weight", "values", "metric", "step_name", "epoch_name"),
        *("loader", "sync_dist", "ranks_in", "is_restored"),
    )

    def __init__(self, event: str, name: str, options: tuple[Any, ...], loader: int = -1) -> None:
        prog_bar, logger, on_step, on_epoch, sync_dist, reduce_fx = options
        rule = rule_of(event)
        self.event, self.name, self.options = event, name, options
        self.group, self.has_batch = rule.group, rule.has_batch
        self.on_step = rule.on_step if on_step is None else on_step
        self.on_epoch = rule.on_epoch if on_epoch is None else on_epoch
        if self.on_step and not rule.has_batch:
            raise ConfigurationError(
                f"self.log({name!r}, on_step=True) in {event}: there is no step there, use on_epoch=True."
            )
        if not self.on_step and not self.on_epoch:
            raise ConfigurationError(
                f"self.log({name!r}, on_step=False, on_epoch=False) would log nothing: set one of them."
            )
        if isinstance(reduce_fx, str) and reduce_fx not in REDUCTIONS:
            raise ConfigurationError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}) is not known. {nearest(reduce_fx, REDUCTIONS)} "
                "A function of the stacked values works too."
            )
        self.prog_bar, self.logger, self.reduce_fx = bool(prog_bar), logger is None or bool(logger), reduce_fx
        self.sync_dist: bool | None = sync_dist
        self.ranks_in: Any = None
        self.is_restored = False
        self.loader = loader
        fork = self.on_step and self.on_epoch
        # "_step" goes to the name itself, not behind the loader's index.
        own, index, number = name.partition(LOADER_SUFFIX)
        self.step_name, self.epoch_name = (
            f"{own}{level}{index}{number}" if fork else name for level in ("_step", "_epoch")
        )
        self.value: Value | None = None
        self.metric: Any = None
        self.tick = -1
        self.reset()

    def reset(self) -> None:
        """Drops what it has summed up; a metric is reset too."""
        if self.metric is not None:
            self.metric.reset()
        self.fresh = False
        self.total: Value | None = None
        self.weight: float = 0.0
        self.values: list[Value] = []

    def record(self, value: Value, tick: int) -> None:
        """Takes the value of the batch with this number."""
        self.value, self.fresh, self.tick = value, True, tick

    def record_metric(self, metric: Any, tick: int) -> None:
        """Takes a torchmetrics object, which sums by itself."""
        self.metric, self.fresh, self.tick = metric, True, tick

    def attach(self, metric: Any) -> None:
        """Names the torchmetrics object of a restored entry."""
        self.metric = metric

    def reduce_among(self, group: Any) -> None:
        """Reduces over the ranks of a process group only."""
        self.ranks_in = group

    def add(self, value: Value, weight: float) -> None:
        """Takes a value into the epoch's sum; a mean weighs it by the number of samples."""
        reduction = self.reduce_fx
        if reduction == "mean":
            self.weight += weight
        elif reduction == "sum":
            weight = 1
        elif reduction in ("max", "min"):
            self.total = value if self.total is None else extreme(self.total, value, reduction)
            return
        else:
            self.values.append(value)
            return
        total = self.total
        if isinstance(total, Tensor) and isinstance(value, Tensor):
            total, value = together(total, value)
            self.total = total.add_(value, alpha=weight)
            return
        addend = value.to(sum_dtype(value)) * weight if isinstance(value, Tensor) else value * weight
        self.total = addend if total is None else total + addend

    def of_batch(self, parts: Sequence[tuple[Value, float]]) -> tuple[Value, float]:
        """The value of a batch whose micro-batches logged these, each with its weight; and the weight of all."""
        values, weights = [value for value, _ in parts], [weight for _, weight in parts]
        total = math.fsum(weights)
        if self.reduce_fx == "sum":
            return sum(values[1:], values[0]), total
        if self.reduce_fx in ("max", "min"):
            return reduce(partial(extreme, which=self.reduce_fx), values), total
        shares = [weight / total if total else 1 / len(parts) for weight in weights]
        return sum(value * share for value, share in zip(values, shares, strict=True)), total

    @property
    def is_empty(self) -> bool:
        """True if it has no value in this epoch."""
        if self.metric is not None:
            return not self.fresh
        return self.total is None and not self.values

    def result(self) -> Value | None:
        """The epoch's value on this rank, on the device; None if nothing was logged."""
        if self.metric is not None:
            return as_number(self.name, self.metric.compute())
        if callable(self.reduce_fx):
            if not self.values:
                return None
            return as_number(self.name, self.reduce_fx(torch.stack([as_tensor(value) for value in self.values])))
        if self.total is None or self.reduce_fx != "mean":
            return self.total
        # Batches without a sample have no mean.
        return self.total / self.weight if self.weight else math.nan

    def follows(self, options: tuple[Any, ...]) -> bool:
        """True if a call with these options, which are not equal to its own, belongs to this entry all the same."""
        if isinstance(self.reduce_fx, Reduced) and callable(options[-1]) and self.options[:-1] == options[:-1]:
            self.reduce_fx, self.options = options[-1], options
            return True
        return _same_options(self.options, options)

    def state(self) -> dict[str, Any]:
        return {
            "event": self.event,
            "name": self.name,
            "options": self.options[:-1],
            "loader": self.loader,
            "reduce_fx": self.reduce_fx if isinstance(self.reduce_fx, str) else None,
            "value": self.value,
            "fresh": self.fresh,
            "total": self.total,
            "weight": self.weight,
            "values": self.values,
            # A function cannot be saved. Where no further value comes, what it makes of these is the epoch's value.
            "result": self.result() if callable(self.reduce_fx) and self.metric is None else None,
        }

    def unlike(self) -> str:
        """What to do about a call with other options than these."""
        first = (
            f"self.log({self.name!r}) has other arguments than in the checkpoint that this run continues, whose "
            f"rank-….json has {self.options[:-1]} under logs.entries (in {self.event})"
            if self.is_restored
            else f"self.log({self.name!r}) was called with other arguments before, in the same hook"
        )
        return (
            f"{first}: give it the same prog_bar, logger, on_step, on_epoch, sync_dist and reduce_fx each time, or "
            "another name."
        )

    def restore(self, saved: SavedState) -> None:
        """Continues from what `state` returned."""
        self.is_restored = True
        self.value, self.total = _saved_value(saved, "value"), _saved_value(saved, "total")
        self.values = [_saved_value(saved, "values", value) for value in saved.items("values")]
        self.weight, self.fresh = saved.number("weight", least=0), saved.flag("fresh")
        self.loader = saved.integer("loader", least=-1)


@dataclass(frozen=True, slots=True)
class Reduced:
    """Stands in for a `reduce_fx` function after a resume until the user's is known again; returns its last value."""

    result: Value | None

    def __call__(self, values: Tensor) -> Value | None:
        return self.result


def restored_entries(
    saved: SavedState,
) -> tuple[list[tuple[Entry, str | None]], dict[str, tuple[Value, bool, bool]]]:
    """The entries of a saved state, each with the name of its metric; and the values that are shown."""
    found = []
    for number, state in enumerate(saved.items("entries")):
        entry = SavedState(state, saved.path(f"entries[{number}]"))
        reduction = Reduced(_saved_value(entry, "result"))
        chosen = reduction if entry.is_none("reduce_fx") else entry.text("reduce_fx", among=REDUCTIONS)
        options = entry.items("options")
        if len(options) != 5 or not all(option is None or isinstance(option, int) for option in options):
            raise StateError(entry.path("options"), "must be five of true, false and null")
        made = _restored_entry(entry, (*options, chosen))
        made.restore(entry)
        found.append((made, None if entry.is_none("metric") else entry.text("metric")))
    shown = {}
    values_shown = saved.nested("epoch_values")
    for name in values_shown.entries:
        triple = values_shown.items(name)
        if len(triple) != 3 or not all(isinstance(flag, bool) for flag in triple[1:]):
            raise StateError(values_shown.path(name), "must be a value and two flags")
        shown[name] = (_saved_value(values_shown, name, triple[0]), triple[1], triple[2])
    return found, shown


def _restored_entry(saved: SavedState, options: tuple[Any, ...]) -> Entry:
    event, name = saved.text("event"), saved.text("name")
    try:
        rule_of(event)
    except ConfigurationError as error:
        raise StateError(saved.path("event"), f"cannot be: {error}") from error
    try:
        return Entry(event, name, options)
    except ConfigurationError as error:
        raise StateError(saved.path("options"), f"cannot be: {error}") from error


def _saved_value(saved: SavedState, key: str, value: Any = STORED) -> Any:
    """A logged value: a number, a tensor with one element, or None."""
    value = saved.value(key) if value is STORED else value
    plain = value is None or type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
    if not plain:
        raise StateError(saved.path(key), f"is {brief(value)}, and must be a number")
    return value


def _same_options(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    """True also where `reduce_fx` was written in the call, which makes another function of the same code each time."""
    code = getattr(old[-1], "__code__", None)
    return old[:-1] == new[:-1] and code is not None and code is getattr(new[-1], "__code__", None)
