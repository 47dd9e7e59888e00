"""Entries: the names that hooks log, each with its options, its latest value and its sum over the epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leyden.core.errors import ConfigurationError, StateError, nearest
from leyden.core.saved_state import SavedState, brief
from leyden.core.tree import widest_float
from leyden.trainer.logging.values import REDUCTIONS, Value, as_number, as_tensor, extreme, reduction_of, together

STAGES = ("validation", "test")
STEP_EVENTS = (
    *("training_step", "on_train_batch_start", "on_train_batch_end", "on_before_backward", "backward"),
    *("on_after_backward", "configure_gradient_clipping", "on_before_optimizer_step", "optimizer_step"),
    *("on_before_zero_grad", "optimizer_zero_grad", "lr_scheduler_step"),
)
EPOCH_EVENTS = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")
LOADER_SUFFIX = "/dataloader_idx_"
_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Rule:
    """How values of a hook are logged: the defaults of `on_step` and `on_epoch`, and whether it runs for a batch."""

    group: str
    """One of "train", "validation" and "test"."""
    on_step: bool
    on_epoch: bool
    has_batch: bool


def rule_of(event: str) -> Rule:
    """Returns the rule of a hook.

    Raises:
        ConfigurationError: if the hook runs outside of any step and epoch.
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
        f"self.log cannot be called {place}: the value would belong to no step and no epoch. Call it in a training, "
        "validation or test step, or in a hook of their batches and epochs."
    )


class MicroValue(NamedTuple):
    """A value that the step of one micro-batch has logged."""

    value: Value
    size: float
    """Its weight in means."""
    is_given: bool
    """Whether the user gave the weight; otherwise it is the number of samples."""
    micro_batch: int
    """The micro-batch's number in the batch, of those that log."""


class Entry:
    """A name that a hook logs, with its options, its latest value and its sum over the epoch."""

    __slots__ = (
        *("event", "group", "name", "options", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "has_batch"),
        *("value", "fresh", "tick", "total", "weight", "values", "metric", "step_name", "epoch_name"),
        *("loader", "sync_dist", "process_group", "is_restored"),
    )

    def __init__(self, event: str, name: str, options: tuple[Any, ...], loader: int = -1) -> None:
        prog_bar, logger, on_step, on_epoch, sync_dist, given_fx = options
        reduce_fx = reduction_of(given_fx)
        rule = rule_of(event)
        self.event, self.name, self.options = event, name, options
        self.group, self.has_batch = rule.group, rule.has_batch
        self.on_step = rule.on_step if on_step is None else on_step
        self.on_epoch = rule.on_epoch if on_epoch is None else on_epoch
        if self.on_step and not rule.has_batch:
            raise ConfigurationError(
                f"self.log({name!r}, on_step=True) in {event}: this hook runs outside of steps. Use on_epoch=True."
            )
        if not self.on_step and not self.on_epoch:
            raise ConfigurationError(
                f"self.log({name!r}, on_step=False, on_epoch=False) would log nothing. Set one of them to True."
            )
        if isinstance(reduce_fx, str) and reduce_fx not in REDUCTIONS:
            raise ConfigurationError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): unknown reduction. {nearest(reduce_fx, REDUCTIONS)} "
                "A function of the stacked values works too."
            )
        self.prog_bar, self.logger, self.reduce_fx = bool(prog_bar), logger is None or bool(logger), reduce_fx
        self.sync_dist: bool | None = sync_dist
        self.process_group: Any = None
        self.is_restored = False
        self.loader = loader
        has_both = self.on_step and self.on_epoch
        # "_step" is appended to the name itself, before the loader's index.
        own, index, number = name.partition(LOADER_SUFFIX)
        self.step_name, self.epoch_name = (
            f"{own}{level}{index}{number}" if has_both else name for level in ("_step", "_epoch")
        )
        self.value: Value | None = None
        self.metric: Any = None
        self.tick = -1
        self.reset()

    def reset(self) -> None:
        """Drops the sum over the epoch, and resets a metric."""
        if self.metric is not None:
            self.metric.reset()
        self.fresh = False
        self.total: Value | None = None
        self.weight: Value = 0.0
        self.values: list[Value] = []

    def record(self, value: Value, tick: int) -> None:
        """Records the value of the batch with the number `tick`."""
        self.value, self.fresh, self.tick = value, True, tick

    def record_metric(self, metric: Any, tick: int) -> None:
        """Records a torchmetrics object, which accumulates its own state."""
        self.metric, self.fresh, self.tick = metric, True, tick

    def attach(self, metric: Any) -> None:
        """Sets the torchmetrics object of a restored entry."""
        self.metric = metric

    def reduce_among(self, group: Any) -> None:
        """Restricts the reduction to the ranks of a process group."""
        self.process_group = group

    def add(self, value: Value, weight: Value) -> None:
        """Adds a value to the epoch's sum. `weight` is its number of samples, for a mean."""
        reduction = self.reduce_fx
        if reduction == "mean":
            if isinstance(weight, Tensor):
                # float32 counts to 16 million.
                weight = weight.detach().to(widest_float(weight.device)).reshape(())
            self.weight = self.weight + weight
        elif reduction == "sum":
            weight = 1
        elif reduction in ("max", "min"):
            self.total = value if self.total is None else extreme(self.total, value, reduction)
            return
        else:
            self.values.append(value)
            return
        total = self.total
        # A tensor as `alpha` would be read from the device.
        if isinstance(total, Tensor) and isinstance(value, Tensor) and not isinstance(weight, Tensor):
            total, value = together(total, value)
            self.total = total.add_(value, alpha=weight)
            return
        # Long sums of float32 values would lose precision.
        addend = value.to(widest_float(value.device)) * weight if isinstance(value, Tensor) else value * weight
        self.total = addend if total is None else total + addend

    def combine(self, parts: Sequence[tuple[Value, float]]) -> tuple[Value, float]:
        """Combines the values and weights of a batch's micro-batches into the value and weight of the batch."""
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
        """True if the entry has no value in this epoch."""
        if self.metric is not None:
            return not self.fresh
        return self.total is None and not self.values

    def result(self) -> Value | None:
        """Returns the epoch's value on this rank, on the device; None if nothing was logged."""
        if self.metric is not None:
            return as_number(self.name, self.metric.compute())
        if callable(self.reduce_fx):
            if not self.values:
                return None
            return as_number(self.name, self.reduce_fx(torch.stack([as_tensor(value) for value in self.values])))
        if self.total is None or self.reduce_fx != "mean":
            return self.as_logged(self.total)
        # The total weight is 0 if no batch had a sample. On a device, 0 / 0 is nan without asking.
        has_weight = isinstance(self.weight, Tensor) or self.weight
        return self.as_logged(self.total / self.weight) if has_weight else math.nan

    def as_logged(self, result: Value | None) -> Value | None:
        """Returns the epoch's value as the values were logged: a number for numbers; float64 only for float64."""
        if not isinstance(result, Tensor):
            return result
        if not isinstance(self.value, Tensor):
            return float(result) if result.device.type == "cpu" else result.to(torch.float32)
        return result if self.value.dtype == torch.float64 else result.to(torch.float32)

    def accepts(self, options: tuple[Any, ...]) -> bool:
        """Returns True if a call with these options still matches this entry, although the options are not equal.

        Functions passed as `reduce_fx` may differ in identity only, and names in case. After a resume, the first one
        is adopted.
        """
        if isinstance(self.reduce_fx, Reduced) and callable(options[-1]) and self.options[:-1] == options[:-1]:
            self.reduce_fx, self.options = options[-1], options
            return True
        if isinstance(self.reduce_fx, str) and self.options[:-1] == options[:-1]:
            return bool(self.reduce_fx == reduction_of(options[-1]))
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
            # A function cannot be saved. Its result so far is the epoch's value if no further value is logged.
            "result": self.result() if callable(self.reduce_fx) and self.metric is None else None,
        }

    def mismatch_message(self) -> str:
        """Returns the error message for a call with different options."""
        problem = (
            f"self.log({self.name!r}) was called with different arguments in the run of this checkpoint, whose "
            f"rank-….json has {self.options[:-1]} under logs.entries (in {self.event})"
            if self.is_restored
            else f"self.log({self.name!r}) was called with different arguments before, in the same hook"
        )
        return (
            f"{problem}. Use the same prog_bar, logger, on_step, on_epoch, sync_dist and reduce_fx each time, or "
            "another name."
        )

    def restore(self, saved: SavedState) -> None:
        """Restores the values that `state` returned."""
        self.is_restored = True
        self.value, self.total = _saved_value(saved, "value"), _saved_value(saved, "total")
        self.values = [_saved_value(saved, "values", value) for value in saved.items("values")]
        is_tensor = isinstance(saved.value("weight"), Tensor)
        self.weight = _saved_value(saved, "weight") if is_tensor else saved.number("weight", least=0)
        self.fresh = saved.flag("fresh")
        self.loader = saved.integer("loader", least=-1)


@dataclass(frozen=True, slots=True)
class Reduced:
    """Stands in for a `reduce_fx` function after a resume, until a call of `self.log` supplies the function again."""

    result: Value | None
    """The function's result when the checkpoint was saved."""

    def __call__(self, values: Tensor) -> Value | None:
        return self.result


def restored_entries(
    saved: SavedState,
) -> tuple[list[tuple[Entry, str | None]], dict[str, tuple[Value, bool, bool]]]:
    """Returns the entries of a saved state, each with the name of its metric, and the visible epoch values.

    Raises:
        StateError: if a part of the state is invalid.
    """
    entries = []
    for number, state in enumerate(saved.items("entries")):
        saved_entry = SavedState(state, saved.path(f"entries[{number}]"))
        entry = _restored_entry(saved_entry)
        entries.append((entry, None if saved_entry.is_none("metric") else saved_entry.text("metric")))
    return entries, _restored_epoch_values(saved.nested("epoch_values"))


def _restored_entry(saved: SavedState) -> Entry:
    stand_in = Reduced(_saved_value(saved, "result"))
    reduce_fx = stand_in if saved.is_none("reduce_fx") else saved.text("reduce_fx", among=REDUCTIONS)
    options = saved.items("options")
    if len(options) != 5 or not all(option is None or isinstance(option, int) for option in options):
        raise StateError(saved.path("options"), "must be five of true, false and null")
    event, name = saved.text("event"), saved.text("name")
    try:
        rule_of(event)
    except ConfigurationError as error:
        raise StateError(saved.path("event"), f"is invalid: {error}") from error
    try:
        entry = Entry(event, name, (*options, reduce_fx))
    except ConfigurationError as error:
        raise StateError(saved.path("options"), f"is invalid: {error}") from error
    entry.restore(saved)
    return entry


def _restored_epoch_values(saved: SavedState) -> dict[str, tuple[Value, bool, bool]]:
    shown = {}
    for name in saved.entries:
        triple = saved.items(name)
        if len(triple) != 3 or not all(isinstance(flag, bool) for flag in triple[1:]):
            raise StateError(saved.path(name), "must be a value and two flags")
        shown[name] = (_saved_value(saved, name, triple[0]), triple[1], triple[2])
    return shown


def _saved_value(saved: SavedState, key: str, value: Any = _MISSING) -> Any:
    """Checks and returns a logged value, stored under `key` or given: a number, a tensor with one element, or None."""
    value = saved.value(key) if value is _MISSING else value
    plain = value is None or type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
    if not plain:
        raise StateError(saved.path(key), f"is {brief(value)}, and must be a number")
    return value


def _same_options(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    """Compares options whose `reduce_fx` is a lambda in the call: a new function object each time, of the same code."""
    code = getattr(old[-1], "__code__", None)
    return old[:-1] == new[:-1] and code is not None and code is getattr(new[-1], "__code__", None)
