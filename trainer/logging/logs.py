"""What `self.log` records: kept on the device, reduced at the end of an epoch, read back only when a logger or a bar shows it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from leyden.strategies.batch import batch_size_of
from leyden.strategies.errors import ConfigurationError, StateError, kind_of, nearest
from leyden.strategies.saved_state import SavedState, brief
from leyden.trainer.events.hooks import Hooks
from leyden.trainer.logging.nans import Nans

if TYPE_CHECKING:
    from leyden.trainer.logging.epoch_values import EpochValues, Key

K = TypeVar("K")
Value: TypeAlias = "Tensor | float"
Reduction: TypeAlias = "str | Callable[[Tensor], Tensor]"
REDUCTIONS = ("mean", "sum", "max", "min")
STAGES = ("validation", "test")
STORED: Any = object()
LOADER_SUFFIX = "/dataloader_idx_"
STEP_EVENTS = (
    *("training_step", "on_train_batch_", "on_before_", "on_after_backward", "backward", "configure_gradient_clipping"),
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
)
EPOCH_EVENTS = ("on_train_epoch_", "on_train_start")


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
    if event.startswith(EPOCH_EVENTS):
        return Rule("train", False, True, False)
    if event.startswith(STEP_EVENTS):
        return Rule("train", True, False, True)
    for stage in STAGES:
        if event == f"{stage}_step" or event.startswith(f"on_{stage}_batch_"):
            return Rule(stage, False, True, True)
        if event in (f"on_{stage}_epoch_start", f"on_{stage}_epoch_end", f"on_{stage}_start"):
            return Rule(stage, False, True, False)
    place = f"in {event}" if event else "outside of a hook"
    raise ConfigurationError(
        f"self.log cannot be called {place}: the value would belong to no step and no epoch. Log in a training, validation or "
        "test step, or in a hook of their batches and epochs."
    )


class Entry:
    """One name that one hook logs: its options, its last value, and its sum over the epoch."""

    __slots__ = (
        *("event", "group", "name", "options", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "has_batch"),
        *("value", "fresh", "tick", "total", "weight", "values", "metric", "step_name", "epoch_name"),
        *("loader", "sync_dist", "ranks_in"),
    )

    def __init__(self, event: str, name: str, options: tuple[Any, ...]) -> None:
        prog_bar, logger, on_step, on_epoch, sync_dist, reduce_fx = options
        rule = rule_of(event)
        self.event, self.name, self.options, self.group, self.has_batch = (
            event,
            name,
            options,
            rule.group,
            rule.has_batch,
        )
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
        self.loader = -1
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
        self.fresh = False
        self.total: Value | None = None
        self.weight: float = 0.0
        self.values: list[Value] = []

    def add(self, value: Value, weight: float) -> None:
        """Takes a value into the epoch's sum; a mean weighs it by the number of samples."""
        reduction = self.reduce_fx
        if reduction == "mean":
            self.weight += weight
        elif reduction == "sum":
            weight = 1
        elif reduction in ("max", "min"):
            self.total = value if self.total is None else _extreme(self.total, value, reduction)
            return
        else:
            self.values.append(value)
            return
        total = self.total
        if isinstance(total, Tensor) and isinstance(value, Tensor):
            total, value = _together(total, value)
            self.total = total.add_(value, alpha=weight)
            return
        addend = value.to(_sum_dtype(value)) * weight if isinstance(value, Tensor) else value * weight
        self.total = addend if total is None else total + addend

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
            return as_number(self.name, self.reduce_fx(torch.stack([_as_tensor(value) for value in self.values])))
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

    def take(self, state: Mapping[str, Any]) -> None:
        self.value, self.fresh, self.total = state["value"], state["fresh"], state["total"]
        self.weight, self.values = state["weight"], list(state["values"])
        self.loader = state["loader"]


@dataclass(frozen=True, slots=True)
class Reduced:
    """Replaces a `reduce_fx` function after a resume, until the user's function is known again: returns the value it had given."""

    result: Value | None

    def __call__(self, values: Tensor) -> Value | None:
        return self.result


class Logs:
    """Everything a run has logged. One object per run; loops tell it of batches and epochs, users call `record`.

    Args:
        hooks: tells which hook is running.
        ranks: reduces epoch values over the ranks; None where there is one.
    """

    def __init__(self, hooks: Hooks, ranks: EpochValues | None = None) -> None:
        self.hooks = hooks
        self.batch: Any = None
        """The batch that is being worked on; its size weighs means."""
        self.batch_idx = 0
        """Its index in the loader that is evaluated."""
        self.dataloader_idx: int | None = None
        """Index of the loader, where there are several."""
        self.stepping: set[str] = set()
        """The groups in which loggers are given values of single steps."""
        self._tick = 0
        """Number of the batch that is being worked on, over all loaders and passes."""
        self._idle: set[tuple[str, int]] = set()
        """Stage and index of loaders (-1 for an only one) of which this rank had no batch in the pass that runs."""
        self._discards = False
        self._ranks = ranks
        self._apart = -1
        self.nans = Nans()
        self._entries: dict[tuple[str, str], Entry] = {}
        self._epoch_values: dict[str, tuple[Value, bool, bool]] = {}

    # where the run stands ---------------------------------------------------------------------------------------------
    def begin_loader(self, index: int | None) -> None:
        """An evaluation reads a loader, whose index is added to the names; None where it is the only one."""
        self.dataloader_idx, self._tick = index, -1

    def end_loader(self, stage: str) -> None:
        """It has been read to its end."""
        if self._tick == -1:
            self.note_idle(stage)
        self.dataloader_idx = None

    def note_idle(self, stage: str) -> None:
        """This rank had no batch of the loader that is read."""
        self._idle.add((stage, -1 if self.dataloader_idx is None else self.dataloader_idx))

    def begin_batch(self, batch: Any, number: int, batch_idx: int) -> None:
        """What is logged from here on belongs to a batch.

        Args:
            batch: its size weighs means.
            number: over all loaders and passes.
            batch_idx: its index in its loader.
        """
        self.batch, self._tick, self.batch_idx = batch, number, batch_idx

    def end_batch(self) -> None:
        """Lets go of the batch, which would add to the peak of memory in the next step."""
        self.batch = None

    def begin_apart(self) -> None:
        """What is logged from here on belongs to no batch: `step_values` returns it by itself."""
        self._apart -= 1
        self._tick = self._apart

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Within the block logged values are ignored: a rank without a sample runs a batch for the others."""
        before, self._discards = self._discards, True
        try:
            yield
        finally:
            self._discards = before

    # recording --------------------------------------------------------------------------------------------------------
    def record(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction = "mean",
        enable_graph: bool = False,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        sync_dist: bool | None = None,
        sync_dist_group: Any = None,
    ) -> None:
        """Records one value; see `TrainModule.log`."""
        if self._discards:
            return
        if add_dataloader_idx and self.dataloader_idx is not None:
            name = f"{name}{LOADER_SUFFIX}{self.dataloader_idx}"
        options = (prog_bar, logger, on_step, on_epoch, sync_dist, reduce_fx)
        entry = self._entries.get((self.hooks.current, name))
        if entry is None:
            entry = self._open(name, options, batch_size)
        elif entry.options != options and not entry.follows(options):
            raise ConfigurationError(
                f"self.log({name!r}) was called with other arguments before, in the same hook: give it the same prog_bar, "
                "logger, on_step, on_epoch, sync_dist and reduce_fx each time, or another name."
            )
        if sync_dist_group is not None:
            entry.ranks_in = sync_dist_group
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ConfigurationError(
                    f"self.log({name!r}) was given a tensor of shape {tuple(value.shape)}: log one number, as value.mean()."
                )
            # A copy, since the user may change the tensor in place afterwards.
            value = value.clone() if enable_graph else value.detach().clone()
            if value.dim():
                value = value.reshape(())
        elif isinstance(value, (int, float)):
            value = float(value)
        else:
            value = self._unusual(entry, value)
            if value is None:
                return
        entry.value, entry.fresh, entry.tick = value, True, self._tick
        if entry.on_epoch and entry.metric is None:
            if batch_size is None:
                batch_size = self._batch_size(name) if entry.has_batch and entry.reduce_fx == "mean" else 1
            entry.add(value.detach() if enable_graph and isinstance(value, Tensor) else value, batch_size)

    def show(self, values: Mapping[str, Value]) -> None:
        """Makes values visible to callbacks that were not logged by the module and that loggers have already."""
        self._epoch_values.update({name: (value, False, False) for name, value in values.items()})

    def _open(self, name: str, options: tuple[Any, ...], batch_size: Any) -> Entry:
        if not isinstance(name, str):
            raise ConfigurationError(f"self.log needs a name, and got {kind_of(name)}: self.log('loss', loss).")
        if (isinstance(batch_size, (int, float)) and batch_size < 0) or isinstance(
            batch_size, (str, list, tuple, dict)
        ):
            raise ConfigurationError(
                f"self.log({name!r}, batch_size={batch_size!r}): give the number of samples, from 0."
            )
        entry = Entry(self.hooks.current, name, options)
        entry.loader = -1 if self.dataloader_idx is None else self.dataloader_idx
        self._entries[entry.event, name] = entry
        if entry.on_step and entry.logger:
            self.stepping.add(entry.group)
        return entry

    def _unusual(self, entry: Entry, value: Any) -> Value | None:
        """A torchmetrics object, or a number of another library; None if there is no value of this step."""
        torchmetrics = sys.modules.get("torchmetrics")
        if torchmetrics is not None and isinstance(value, torchmetrics.Metric):
            if entry.metric is not value and LOADER_SUFFIX in entry.name:
                self._check_one_loader(entry, value)
            entry.metric, entry.fresh, entry.tick = value, True, self._tick
            step_value = getattr(value, "_forward_cache", None) if entry.on_step else None
            if isinstance(step_value, Tensor) and step_value.numel() == 1:
                return step_value.detach().clone().reshape(())
            return None
        if hasattr(value, "item") and getattr(value, "size", 0) == 1:
            return float(value.item())
        raise ConfigurationError(
            f"self.log({entry.name!r}) was given {kind_of(value)}: log a number, a tensor of one number or a "
            "torchmetrics.Metric; a dict goes to self.log_dict."
        )

    def _check_one_loader(self, entry: Entry, metric: Any) -> None:
        """Each loader's value would be that of all of them."""
        others = (other for other in self._entries.values() if other.metric is metric and other.group == entry.group)
        if any(other.loader != entry.loader and LOADER_SUFFIX in other.name for other in others):
            own = entry.name.partition(LOADER_SUFFIX)[0]
            raise ConfigurationError(
                f"self.log({own!r}) was given one metric object for several loaders, whose samples it would mix: make a metric for "
                "each loader (in an nn.ModuleList), or log it with add_dataloader_idx=False for one value over all of them."
            )

    def _batch_size(self, name: str) -> int:
        if self.batch is None:
            return 1
        try:
            return batch_size_of(self.batch)
        except ConfigurationError as error:
            raise ConfigurationError(f"self.log({name!r}, on_epoch=True) weighs by batch size. {error}") from None

    # reading ----------------------------------------------------------------------------------------------------------
    def _current(self) -> Iterator[tuple[str, Value, bool, bool]]:
        """Every name with its newest value: those of ended epochs, then the steps since."""
        for name, (value, logger, prog_bar) in self._epoch_values.items():
            yield name, value, logger, prog_bar
        for entry in self._entries.values():
            if entry.on_step and entry.fresh and entry.value is not None:
                yield entry.step_name, entry.value, entry.logger, entry.prog_bar
                if entry.step_name != entry.name:
                    yield entry.name, entry.value, False, False

    def callback_metrics(self) -> dict[str, Tensor]:
        """Everything that was logged, under every name it goes by, as 0-d tensors on their devices."""
        return {name: _as_tensor(value) for name, value, _, _ in self._current()}

    def logged_metrics(self) -> dict[str, Tensor]:
        """What loggers are sent."""
        return {name: _as_tensor(value) for name, value, logger, _ in self._current() if logger}

    def progress_bar_metrics(self) -> dict[str, Value]:
        """What the bar shows; not read back from the device yet."""
        return {name: value for name, value, _, prog_bar in self._current() if prog_bar}

    def step_values(self, group: str) -> dict[str, Value]:
        """What loggers are given for the current batch."""
        return {
            entry.step_name: entry.value
            for entry in self._entries.values()
            if entry.tick == self._tick
            and entry.group == group
            and entry.on_step
            and entry.logger
            and entry.value is not None
        }

    def names_since(self, group: str, tick: int) -> set[str]:
        """The names of epoch values that were logged with a batch after that number."""
        found = (entry for entry in self._entries.values() if entry.group == group and entry.has_batch)
        return {entry.epoch_name for entry in found if entry.on_epoch and entry.tick > tick}

    def reduce_epoch(self, group: str, keep: bool = False) -> tuple[dict[str, Value], dict[str, Value]]:
        """Ends the epoch of a group: its values become visible, and its sums start over.

        Args:
            group: "train", "validation" or "test".
            keep: the epoch is not over: its sums stay.

        Returns:
            The values by the names that they were logged by, and those of them that loggers are given.
        """
        values: dict[str, Value] = {}
        logged: dict[str, Value] = {}
        entries = [entry for entry in self._entries.values() if entry.group == group]
        results, foreign = self._results(group, entries)
        for key, value in foreign:
            self._show(key, value, values, logged)
        for entry in entries:
            result = results.get(id(entry))
            if result is not None:
                self._show(entry, result, values, logged)
            forks = entry.step_name != entry.epoch_name
            if entry.on_step and entry.fresh and entry.value is not None and (forks or result is None):
                self._epoch_values[entry.step_name] = (entry.value, entry.logger, entry.prog_bar)
        if not keep:
            self.forget(group)
        return values, logged

    def _results(
        self, group: str, entries: Sequence[Entry]
    ) -> tuple[Mapping[int, Value | None], Iterable[tuple[Key, Value]]]:
        """The epoch's values by `id` of their entries, and those that only other ranks logged."""
        found = [entry for entry in entries if entry.on_epoch and not entry.is_empty]
        if self._ranks is None:
            return {id(entry): entry.result() for entry in found}, ()
        return self._ranks.reduce(found, frozenset(index for stage, index in self._idle if stage == group))

    def _show(self, entry: Entry | Key, value: Value, values: dict[str, Value], logged: dict[str, Value]) -> None:
        """Makes an epoch's value visible."""
        for name in {entry.epoch_name, entry.name}:
            shown = name == entry.epoch_name
            self._epoch_values[name] = (value, entry.logger and shown, entry.prog_bar and shown)
        values[entry.epoch_name] = value
        if entry.logger:
            logged[entry.epoch_name] = value

    def forget(self, group: str) -> None:
        """Drops what a group has summed up, as if the epoch had not begun."""
        for entry in self._entries.values():
            if entry.group == group:
                entry.reset()
                if entry.metric is not None:
                    entry.metric.reset()
        self._idle = {place for place in self._idle if place[0] != group}
        self.dataloader_idx = None

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self._epoch_values.clear()

    # resume -----------------------------------------------------------------------------------------------------------
    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Sums of the training epoch, and every value that is shown; metrics by their names in the module."""
        names = {id(part): name for name, part in module.named_modules()}
        entries = [entry for entry in self._entries.values() if entry.group == "train"]
        return {
            "entries": [{**entry.state(), "metric": names.get(id(entry.metric))} for entry in entries],
            "epoch_values": {name: list(value) for name, value in self._epoch_values.items()},
        }

    def check_state(self, state: Any) -> None:
        """Raises StateError for what `state_dict` cannot have returned; changes nothing."""
        _restored_entries(SavedState(state, "logs"))

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Takes back sums and values. A function is known again at the next call of `record`."""
        parts = dict(module.named_modules())
        entries, self._epoch_values = _restored_entries(SavedState(state, "logs"))
        self._entries.clear()
        for entry, metric in entries:
            entry.metric = parts.get(metric) if metric is not None else None
            self._entries[entry.event, entry.name] = entry


def _restored_entries(
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
        try:
            made = Entry(entry.text("event"), entry.text("name"), (*options, chosen))
        except ConfigurationError as error:
            raise StateError(entry.path("event"), f"cannot be: {error}") from error
        values = [_saved_value(entry, "values", value) for value in entry.items("values")]
        made.take(
            {
                "value": _saved_value(entry, "value"),
                "fresh": entry.flag("fresh"),
                "total": _saved_value(entry, "total"),
                "weight": entry.number("weight", least=0),
                "values": values,
                "loader": entry.integer("loader", least=-1),
            }
        )
        found.append((made, None if entry.is_none("metric") else entry.text("metric")))
    shown = {}
    values_shown = saved.nested("epoch_values")
    for name in values_shown.entries:
        triple = values_shown.items(name)
        if len(triple) != 3 or not all(isinstance(flag, bool) for flag in triple[1:]):
            raise StateError(values_shown.path(name), "must be a value and two flags")
        shown[name] = (_saved_value(values_shown, name, triple[0]), triple[1], triple[2])
    return found, shown


def _saved_value(saved: SavedState, key: str, value: Any = STORED) -> Any:
    """A logged value: a number, a tensor with one element, or None."""
    value = saved.value(key) if value is STORED else value
    plain = value is None or type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
    if not plain:
        raise StateError(saved.path(key), f"is {brief(value)}, and must be a number")
    return value


def read_back(values: Mapping[K, Value]) -> dict[K, float]:
    """Turns values into Python floats, with one transfer for each device they lie on."""
    result: dict[K, float] = {}
    by_device: dict[torch.device, list[K]] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(name)
        else:
            result[name] = float(value)
    for names in by_device.values():
        tensors = [values[name] for name in names]
        stacked = torch.stack([t.detach().to(_sum_dtype(t)).reshape(()) for t in tensors if isinstance(t, Tensor)])
        result.update(zip(names, _to_host(stacked), strict=True))
    return {name: result[name] for name in values}


def _to_host(values: Tensor) -> list[float]:
    if values.device.type != "cuda":
        return values.tolist()  # type: ignore[no-any-return]
    # By pinned memory and an event: this one wait is meant, and torch.cuda.set_sync_debug_mode is left to find the others.
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(values.device))
    copied.synchronize()
    return host.tolist()  # type: ignore[no-any-return]


def _same_options(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    """True also where `reduce_fx` was written in the call, which makes another function of the same code each time."""
    code = getattr(old[-1], "__code__", None)
    return old[:-1] == new[:-1] and code is not None and code is getattr(new[-1], "__code__", None)


def as_number(name: str, value: Any) -> Value:
    """Reduces the values of an epoch to one number."""
    if not isinstance(value, Tensor) and isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Tensor) or value.numel() != 1:
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
        raise ConfigurationError(
            f"{name!r} was reduced over the epoch to {kind}, which is not one number: compute the metric yourself in the "
            "epoch's last hook, and log each of its values by a name of its own."
        )
    return value.reshape(())


def _extreme(total: Value, value: Value, which: str) -> Value:
    if isinstance(total, Tensor) or isinstance(value, Tensor):
        function = torch.maximum if which == "max" else torch.minimum
        return function(*_together(_as_tensor(total), _as_tensor(value)))
    if total != total or value != value:
        # As torch's functions have it, and not by the order in which the two come.
        return math.nan
    return max(total, value) if which == "max" else min(total, value)


def _together(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Brings two values to one device: that of the accelerator, since the other way round would be a read-back."""
    if a.device == b.device:
        return a, b
    if a.device.type == "cpu":
        return a.to(b.device, non_blocking=True), b
    return a, b.to(a.device, non_blocking=True)


def _as_tensor(value: Value) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """float64, which an epoch of float32 values does not wear out; Apple's GPUs have none."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
