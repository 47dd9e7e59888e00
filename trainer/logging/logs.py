"""The values of `self.log`: kept on the device, reduced at the end of an epoch, and read back only when shown."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.saved_state import SavedState
from leyden.core.tree import batch_size_of
from leyden.strategies.outputs import SharedNumbers
from leyden.trainer.events.hooks import Hooks
from leyden.trainer.logging.entries import LOADER_SUFFIX, Entry, MicroValue, restored_entries
from leyden.trainer.logging.values import Nans, Value, as_tensor, extreme, readable_losses

if TYPE_CHECKING:
    from leyden.trainer.logging.epoch_values import EpochValues, Key


MAX_IN_FLIGHT = 3
"""In a pipeline, the number of steps whose values may be in flight from the last stage."""
Shown: TypeAlias = "tuple[Value, bool, bool]"
"""A value, and two flags: whether loggers receive it, and whether the progress bar shows it."""


class Logs:
    """All values logged in one run. Loops announce batches and epochs; `TrainModule.log` records values.

    The hooks of the run track which hook is running. The names of the module's attributes identify metrics in a
    checkpoint. `ranks` is None if one rank has all data.
    """

    def __init__(self, hooks: Hooks, module: nn.Module, ranks: EpochValues | None = None) -> None:
        self.hooks = hooks
        self._module = module
        self.batch: Any = None
        """The current batch. Its size is the weight of its values in means."""
        self.batch_idx = 0
        """Index of the current batch in its evaluation loader."""
        self.dataloader_idx: int | None = None
        """Index of the current loader; None if there is only one."""
        self.stepping: set[str] = set()
        """The groups for which loggers receive the values of single steps."""
        self._tick = 0
        """Number of the current batch, over all loaders and passes; below -1 between `begin_apart` and a batch."""
        self._idle: set[tuple[str, int]] = set()
        """Stage and loader index (-1 for an only loader) of loaders without a batch for this rank in this pass."""
        self._discards = False
        self._micro_values: list[tuple[Entry, MicroValue]] | None = None
        """Values that a batch's parts have logged; None if steps run on whole batches."""
        self._ranks = ranks
        self._apart_tick = -1
        """The `_tick` of the last `begin_apart`; negative, so that it never equals a batch number."""
        self.nans = Nans()
        self._entries: dict[tuple[str, str], Entry] = {}
        """All entries, by hook and name."""
        self._epoch_values: dict[str, Shown] = {}
        self._last_evaluated: dict[str, Shown] = {}
        """The last step's values of finished evaluations. Callbacks do not see step values of evaluations."""
        self._micro_batch = -1
        """The number of the micro-batch that logs; -1 before the first."""
        # The following three are for the other stages of a pipeline, whose values come from the last stage.
        self._last_stage_step: dict[str, Value] = {}
        """Values for loggers that the last stage logged in the current step."""
        self._last_stage_steps: dict[str, Shown] = {}
        """The latest step values of the last stage, since the epoch began."""
        self._in_flight: deque[Callable[[], SharedNumbers]] = deque()
        """Step values of the last stage that this rank has not read yet, oldest first."""

    # announcements of the loops ---------------------------------------------------------------------------------------
    def begin_loader(self, index: int | None) -> None:
        """Starts an evaluation loader. Its index becomes a suffix of logged names; None for an only loader."""
        self.dataloader_idx, self._tick = index, -1

    def end_loader(self, stage: str) -> None:
        if self._tick == -1:
            self.note_idle(stage)
        self.dataloader_idx = None

    def note_idle(self, stage: str) -> None:
        """Records that the current loader had no batch for this rank."""
        self._idle.add((stage, -1 if self.dataloader_idx is None else self.dataloader_idx))

    def begin_batch(self, batch: Any, number: int, batch_idx: int) -> None:
        """Assigns the values logged from now on to a batch, which has a number over all loaders and passes."""
        self.batch, self._tick, self.batch_idx = batch, number, batch_idx

    def end_batch(self) -> None:
        """Releases the reference to the batch, which would add to the peak memory of the next step."""
        self.batch = None

    def begin_apart(self) -> None:
        """Assigns the values logged from now on to no batch, so that `step_values` returns only these."""
        self._apart_tick -= 1
        self._tick = self._apart_tick

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Ignores values logged within the block, such as those of a rank that runs a batch without a sample."""
        previous, self._discards = self._discards, True
        try:
            yield
        finally:
            self._discards = previous

    @contextmanager
    def by_micro_batch(self) -> Iterator[None]:
        """Combines the values that the steps of a batch's parts log within the block into one per name."""
        whole, self._micro_values, self._micro_batch = self.batch, [], -1
        try:
            yield
            logged, self._micro_values = self._micro_values, None
            by_entry: dict[Entry, list[MicroValue]] = {}
            for entry, own in logged:
                by_entry.setdefault(entry, []).append(own)
            if self._ranks is not None and self._ranks.outputs.are_split:
                combined = self._ranks.of_all_parts(by_entry)
            else:
                pairs = [[(own.value, own.size) for own in values] for values in by_entry.values()]
                combined = [
                    own[0] if len(own) == 1 else entry.combine(own) for entry, own in zip(by_entry, pairs, strict=True)
                ]
            for entry, (value, size) in zip(by_entry, combined, strict=True):
                entry.record(value, self._tick)
                if entry.on_epoch and entry.metric is None:
                    entry.add(value, size)
        finally:
            self.batch, self._micro_values = whole, None

    def begin_part(self, batch: Any) -> None:
        """Assigns the values logged from now on to a micro-batch, within `by_micro_batch`; otherwise a no-op."""
        if self._micro_values is not None:
            self.batch = batch
            self._micro_batch += 1

    def share_step(self) -> None:
        """Starts to send the step's values from a pipeline's last stage to all its ranks; without one, a no-op."""
        if self._ranks is None:
            return
        entries = {
            entry.step_name: entry
            for entry in self._entries.values()
            if entry.tick == self._tick and entry.on_step and entry.value is not None
        }
        described = [[name, entry.name, entry.logger, entry.prog_bar] for name, entry in entries.items()]
        own = [entry.value for entry in entries.values() if entry.value is not None]
        receive = self._ranks.outputs.begin_numbers(described, own)
        if receive is None:
            return
        self._in_flight.append(receive)
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._receive(self._in_flight.popleft())

    def _receive_all(self) -> None:
        """Waits for all step values in flight from the last stage of a pipeline, and reads them."""
        while self._in_flight:
            self._receive(self._in_flight.popleft())

    def _receive(self, receive: Callable[[], SharedNumbers]) -> None:
        values: dict[str, Shown] = {}
        for (step_name, name, logger, prog_bar), number in zip(*receive(), strict=True):
            values[step_name] = (number, logger, prog_bar)
            values.setdefault(name, (number, False, False))
        self._last_stage_step = {name: value for name, (value, logger, _) in values.items() if logger}
        self._last_stage_steps.update(values)

    # recording --------------------------------------------------------------------------------------------------------
    def record(
        self,
        name: str,
        value: Any,
        options: tuple[Any, ...],
        enable_graph: bool,
        add_dataloader_idx: bool,
        batch_size: int | None,
        sync_dist_group: Any,
    ) -> None:
        """Records one value; see `TrainModule.log`."""
        if self._discards:
            return
        if add_dataloader_idx and self.dataloader_idx is not None:
            name = f"{name}{LOADER_SUFFIX}{self.dataloader_idx}"
        entry = self._entries.get((self.hooks.current, name))
        if entry is None:
            entry = self._open(name, options, batch_size)
        elif entry.options != options and not entry.accepts(options):
            raise ConfigurationError(entry.mismatch_message())
        if sync_dist_group is not None:
            entry.reduce_among(sync_dist_group)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ConfigurationError(
                    f"self.log({name!r}) was called with a tensor of shape {tuple(value.shape)}. Log one number, such "
                    "as value.mean()."
                )
            value = _copy(value, enable_graph)
        elif isinstance(value, (int, float)):
            value = float(value)
        else:
            value = self._metric_or_scalar(entry, value)
            if value is None:
                return
        if self._micro_values is not None:
            # A metric's step value is averaged over the micro-batches too, weighted by their samples.
            size = self._batch_size(entry) if batch_size is None else batch_size
            own = MicroValue(value, size, batch_size is not None, self._micro_batch)
            self._micro_values.append((entry, own))
            return
        entry.record(value, self._tick)
        if entry.on_epoch and entry.metric is None:
            if batch_size is None:
                batch_size = self._batch_size(entry)
            entry.add(value.detach() if enable_graph and isinstance(value, Tensor) else value, batch_size)

    def show(self, values: Mapping[str, Value], prog_bar: Collection[str] = ()) -> None:
        """Makes values that the module did not log visible to callbacks, and those in `prog_bar` to the progress bar.

        Loggers already have these values.
        """
        self._receive_all()
        self._epoch_values.update({name: (value, False, name in prog_bar) for name, value in values.items()})

    def _open(self, name: str, options: tuple[Any, ...], batch_size: Any) -> Entry:
        if not isinstance(name, str):
            raise ConfigurationError(
                f"the first argument of self.log must be a name, not {kind_of(name)}. Call self.log('loss', loss)."
            )
        if (isinstance(batch_size, (int, float)) and batch_size < 0) or isinstance(
            batch_size, (str, list, tuple, dict)
        ):
            raise ConfigurationError(
                f"self.log({name!r}, batch_size={batch_size!r}): use the number of samples, 0 or more."
            )
        entry = Entry(self.hooks.current, name, options, -1 if self.dataloader_idx is None else self.dataloader_idx)
        self._entries[entry.event, name] = entry
        if entry.on_step and entry.logger:
            self.stepping.add(entry.group)
        return entry

    def _metric_or_scalar(self, entry: Entry, value: Any) -> Value | None:
        """Records a torchmetrics object, or converts another library's scalar. Returns the step's value, if any."""
        torchmetrics = sys.modules.get("torchmetrics")
        if torchmetrics is not None and isinstance(value, torchmetrics.Metric):
            if entry.metric is not value and LOADER_SUFFIX in entry.name:
                self._check_one_loader(entry, value)
            entry.record_metric(value, self._tick)
            step_value = getattr(value, "_forward_cache", None) if entry.on_step else None
            if isinstance(step_value, Tensor) and step_value.numel() == 1:
                return step_value.detach().clone().reshape(())
            return None
        if hasattr(value, "item") and getattr(value, "size", 0) == 1:
            return float(value.item())
        raise ConfigurationError(
            f"self.log({entry.name!r}) was called with {kind_of(value)}. Log a number, a tensor with one element, or a "
            "torchmetrics.Metric. For a dict, call self.log_dict."
        )

    def _check_one_loader(self, entry: Entry, metric: Any) -> None:
        """Raises if several loaders share one metric object: each would report the value over all of them."""
        others = (other for other in self._entries.values() if other.metric is metric and other.group == entry.group)
        if any(other.loader != entry.loader and LOADER_SUFFIX in other.name for other in others):
            own = entry.name.partition(LOADER_SUFFIX)[0]
            raise ConfigurationError(
                f"self.log({own!r}) was called with one metric object for several loaders, which would mix their "
                "samples. Create one metric per loader (in an nn.ModuleList), or log it with add_dataloader_idx=False "
                "for a single value over all loaders."
            )

    def _batch_size(self, entry: Entry) -> int:
        """Returns the weight of a value in the mean of its epoch."""
        if self.batch is None or not entry.has_batch or entry.reduce_fx != "mean":
            return 1
        try:
            return batch_size_of(self.batch)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"self.log({entry.name!r}, on_epoch=True) weights values by batch size. {error}"
            ) from None

    # reading ----------------------------------------------------------------------------------------------------------
    def _visible(self, to_callbacks: bool = False) -> Iterator[tuple[str, Value, bool, bool]]:
        """Yields the values that a run shows: first those of finished epochs, then newer ones of single steps.

        Callbacks do not see the step values of evaluations.
        """
        self._receive_all()
        finished = (self._epoch_values, self._last_stage_steps)
        for values in finished if to_callbacks else (self._last_evaluated, *finished):
            for name, (value, logger, prog_bar) in values.items():
                yield name, value, logger, prog_bar
        for entry in self._entries.values():
            if to_callbacks and entry.group != "train":
                continue
            if entry.on_step and entry.fresh and entry.value is not None:
                yield entry.step_name, entry.value, entry.logger, entry.prog_bar
                if entry.step_name != entry.name:
                    yield entry.name, entry.value, False, False

    def callback_metrics(self) -> dict[str, Tensor]:
        """Returns all logged values, under each of their names, as 0-d tensors on their devices."""
        return {name: as_tensor(value) for name, value, _, _ in self._visible(to_callbacks=True)}

    def logged_metrics(self) -> dict[str, Tensor]:
        """Returns the values for loggers."""
        return {name: as_tensor(value) for name, value, logger, _ in self._visible() if logger}

    def progress_bar_metrics(self) -> dict[str, Value]:
        """Returns the values for the progress bar, without reading them back from the device."""
        return {name: value for name, value, _, prog_bar in self._visible() if prog_bar}

    def losses(self) -> dict[str, Value]:
        """Returns the latest values of all losses."""
        return readable_losses((name, value) for name, value, _, _ in self._visible())

    def step_values(self, group: str) -> dict[str, Value]:
        """Returns the values of the current batch for loggers."""
        self._receive_all()
        own = {
            entry.step_name: entry.value
            for entry in self._entries.values()
            if entry.tick == self._tick
            and entry.group == group
            and entry.on_step
            and entry.logger
            and entry.value is not None
        }
        last_stage, self._last_stage_step = self._last_stage_step, {}
        return {**last_stage, **own} if last_stage else own

    def names_since(self, group: str, tick: int) -> set[str]:
        """Returns the names of epoch values logged with a batch numbered above `tick`."""
        found = (entry for entry in self._entries.values() if entry.group == group and entry.has_batch)
        return {entry.epoch_name for entry in found if entry.on_epoch and entry.tick > tick}

    def reduce_epoch(self, group: str, keep: bool = False) -> tuple[dict[str, Value], dict[str, Value]]:
        """Ends the epoch of a group: its values become visible, and its sums start over unless they are to `keep`.

        Returns:
            All epoch values by name, and the subset for loggers.
        """
        self._receive_all()
        values: dict[str, Value] = {}
        logged: dict[str, Value] = {}
        entries = [entry for entry in self._entries.values() if entry.group == group]
        results, foreign = self._results(group, entries)
        for key, value in foreign:
            self._show(key, value, values, logged)
        steps: dict[str, Shown] = {}
        for entry in entries:
            result = results.get(id(entry))
            if result is not None:
                self._show(entry, result, values, logged)
            # The last step's value stays visible, unless the epoch value has the same name.
            is_free = result is None or entry.step_name != entry.epoch_name
            if entry.on_step and entry.fresh and entry.value is not None and is_free:
                steps[entry.step_name] = (entry.value, entry.logger, entry.prog_bar)
        (self._epoch_values if group == "train" else self._last_evaluated).update(steps)
        if not keep:
            self._follow_outputs(group, entries, steps)
            self.forget(group)
        return values, logged

    def _follow_outputs(self, group: str, entries: Sequence[Entry], steps: Mapping[str, Shown]) -> None:
        """Makes all stages of a pipeline follow the last one: they take its step values, and reset its metrics."""
        if self._ranks is None or not self._ranks.outputs.are_in_parts:
            return
        names = {id(part): name for name, part in self._module.named_modules()}
        own = (
            [names[id(entry.metric)] for entry in entries if id(entry.metric) in names],
            {name: (float(value), logger, prog_bar) for name, (value, logger, prog_bar) in steps.items()},
        )
        metrics, values = shared = self._ranks.outputs.share(own)
        if shared is not own:
            if group == "train":
                self._last_stage_steps.clear()
            (self._epoch_values if group == "train" else self._last_evaluated).update(values)
            for name in metrics:
                self._module.get_submodule(name).reset()  # type: ignore[operator]

    def _results(
        self, group: str, entries: Sequence[Entry]
    ) -> tuple[Mapping[int, Value | None], Iterable[tuple[Key, Value]]]:
        """Returns the epoch's values by `id` of their entries, and those that only other ranks logged."""
        logged = [entry for entry in entries if entry.on_epoch and not entry.is_empty]
        if self._ranks is None:
            return {id(entry): entry.result() for entry in logged}, ()
        return self._ranks.reduce(logged, frozenset(index for stage, index in self._idle if stage == group))

    def _show(self, entry: Entry | Key, value: Value, values: dict[str, Value], logged: dict[str, Value]) -> None:
        """Makes an epoch's value visible."""
        # No set: the order of the names, which a checkpoint records, would differ between processes.
        for name in dict.fromkeys((entry.epoch_name, entry.name)):
            shown = name == entry.epoch_name
            self._epoch_values[name] = (value, entry.logger and shown, entry.prog_bar and shown)
        values[entry.epoch_name] = value
        if entry.logger:
            logged[entry.epoch_name] = value

    def forget(self, group: str) -> None:
        """Drops the sums of a group, as if its epoch had not started."""
        for entry in self._entries.values():
            if entry.group == group:
                entry.reset()
        self._idle = {place for place in self._idle if place[0] != group}
        self.dataloader_idx = None

    def metrics_of(self, group: str) -> list[Any]:
        """Returns the torchmetrics objects that a group logs, each once."""
        found = {id(entry.metric): entry.metric for entry in self._entries.values() if entry.group == group}
        return [metric for metric in found.values() if metric is not None]

    @contextmanager
    def apart(self, group: str) -> Iterator[None]:
        """Shows the values that are logged within the block only there."""
        values, steps = dict(self._epoch_values), dict(self._last_stage_steps)
        try:
            yield
        finally:
            self._receive_all()
            self.forget(group)
            self._entries = {place: entry for place, entry in self._entries.items() if entry.group != group}
            self._epoch_values, self._last_stage_steps = values, steps

    def clear(self) -> None:
        self._receive_all()
        self._entries.clear()
        self._epoch_values.clear()
        self._last_evaluated.clear()
        self._last_stage_steps.clear()

    # resume -----------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of the training epoch, and all visible values. Metrics go by their names in the module."""
        self._receive_all()
        names = {id(part): name for name, part in self._module.named_modules()}
        entries = [entry for entry in self._entries.values() if entry.group == "train"]
        return {
            "entries": [{**entry.state(), "metric": names.get(id(entry.metric))} for entry in entries],
            "epoch_values": {
                name: list(value) for name, value in (*self._epoch_values.items(), *self._last_stage_steps.items())
            },
        }

    def check_state_dict(self, state: Any) -> None:
        restored_entries(SavedState(state, "logs"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores sums and values. A `reduce_fx` function is restored by the next call of `record` for its entry."""
        self._receive_all()
        parts = dict(self._module.named_modules())
        entries, self._epoch_values = restored_entries(SavedState(state, "logs"))
        self._entries.clear()
        for entry, metric in entries:
            if metric in parts:
                entry.attach(parts[metric])
            self._entries[entry.event, entry.name] = entry
        if self._ranks is not None and not self._ranks.counts:
            # Another stage of a pipeline: the sums belong to the last stage.
            self._epoch_values = {name: (value, logger, bar) for name, value, logger, bar in self._visible()}
            self._last_stage_steps.clear()
            self._entries.clear()

    def regroup(self, states: Sequence[Any], rank: int, seed: int) -> dict[str, Any] | None:
        """Merges the states for another number of ranks: rank 0 gets the sums of all ranks, the others neutral sums."""
        if states[0] is None:
            return None
        entries: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for state in states:
            for entry in state["entries"]:
                entries.setdefault((entry["event"], entry["name"]), []).append(entry)
        return {**states[0], "entries": [_merged(found, empty=rank > 0) for found in entries.values()]}


def _copy(value: Tensor, with_graph: bool) -> Tensor:
    """Returns a 0-d copy of a logged tensor, since the user may change the tensor in place afterwards."""
    if type(value) is not Tensor and hasattr(value, "full_tensor"):
        # On a mesh, the loss of sharded logits is a DTensor.
        value = value.full_tensor()
    value = value.clone() if with_graph else value.detach().clone()
    return value.reshape(()) if value.dim() else value


def _merged(found: list[dict[str, Any]], empty: bool) -> dict[str, Any]:
    """Merges the sums of all ranks for one entry; `empty` returns a neutral sum instead, for ranks other than 0."""
    first, reduction = found[0], found[0]["reduce_fx"]
    totals = [entry["total"] for entry in found if entry["total"] is not None]
    if reduction in ("max", "min"):
        # Repeating the extreme on every rank does not change the result.
        return {**first, "total": reduce(partial(extreme, which=reduction), totals) if totals else None}
    if empty:
        return {**first, "total": totals[0] * 0 if totals else None, "weight": 0.0, "values": [], "result": None}
    values = [value for entry in found for value in entry["values"]]
    weight = sum(entry["weight"] for entry in found)
    return {**first, "total": sum(totals[1:], totals[0]) if totals else None, "weight": weight, "values": values}


class TracedLogs:
    """Buffers the values that a compiled step logs, and records them once the step has ended.

    torch.compile traces `self.log` together with the step that calls it, and recompiles when a number that it has read
    changes. The counters of Logs change with every batch, so a step that traced them would recompile each time, and run
    uncompiled after `recompile_limit` (8) recompilations. The buffer is empty at the start of every step, so the trace
    stays valid and the step remains one graph.

    Args:
        logs: the Logs that record the values.
    """

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._buffer: list[tuple[Any, ...]] = []

    def record(self, name: str, value: Any, options: tuple[Any, ...], enable_graph: bool, *rest: Any) -> None:
        """Records one value: immediately, or after the step if it is compiled. See `Logs.record`."""
        if not torch.compiler.is_compiling():
            self._logs.record(name, value, options, enable_graph, *rest)
            return
        if isinstance(value, torch.Tensor):
            # Copy the value, since the step may change it in place.
            value = value.clone() if enable_graph else value.detach().clone()
        self._buffer.append((name, value, options, enable_graph, *rest))

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs the compiled step and then records the values that it logged."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            # A failed step may have left values behind.
            self._buffer.clear()
            output = step(*args, **kwargs)
            for values in self._buffer:
                self._logs.record(*values)
            self._buffer.clear()
            return output

        return recorded
