"""What `self.log` records: kept on the device, reduced at the end of an epoch, read back only when it is shown."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from leyden.strategies.batch import batch_size_of
from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.strategies.outputs import SharedNumbers
from leyden.strategies.saved_state import SavedState
from leyden.trainer.events.hooks import Hooks
from leyden.trainer.logging.entries import LOADER_SUFFIX, Entry, restored_entries
from leyden.trainer.logging.values import Nans, Value, as_tensor, extreme

if TYPE_CHECKING:
    from leyden.trainer.logging.epoch_values import EpochValues, Key


UNREAD = 3
"""So many steps' values of another stage may wait to be read."""
Shown: TypeAlias = "tuple[Value, bool, bool]"
"""A value, and whether loggers and the progress bar are given it."""


class Logs:
    """Everything a run has logged. There is one per run: loops announce batches and epochs, `TrainModule.log` records.

    Args:
        hooks: know which hook is running.
        module: by whose names metrics are saved.
        ranks: reduces epoch values over the ranks; None where there is one.
    """

    def __init__(self, hooks: Hooks, module: nn.Module, ranks: EpochValues | None = None) -> None:
        self.hooks = hooks
        self._module = module
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
        self._parts: list[tuple[Entry, Value, float]] | None = None
        """What the micro-batches of a batch have logged; None where steps run for whole batches."""
        self._ranks = ranks
        self._apart = -1
        self.nans = Nans()
        self._entries: dict[tuple[str, str], Entry] = {}
        self._epoch_values: dict[str, Shown] = {}
        self._of_others: dict[str, Value] = {}
        """What the current step has logged on the last stage of a pipeline, of which this rank has another."""
        self._steps_of_others: dict[str, Shown] = {}
        """What steps have logged there since the epoch began."""
        self._arriving: deque[Callable[[], SharedNumbers]] = deque()
        """What steps have logged there and this rank has not read yet, the oldest first."""

    # where the run stands ---------------------------------------------------------------------------------------------
    def begin_loader(self, index: int | None) -> None:
        """Begins an evaluation loader. Names get its index as a suffix; None for the only loader."""
        self.dataloader_idx, self._tick = index, -1

    def end_loader(self, stage: str) -> None:
        """Ends the evaluation loader."""
        if self._tick == -1:
            self.note_idle(stage)
        self.dataloader_idx = None

    def note_idle(self, stage: str) -> None:
        """Notes that this rank got no batch from the current loader."""
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

    @contextmanager
    def by_micro_batch(self) -> Iterator[None]:
        """Within the block a step runs for each of a batch's micro-batches, whose values are one value together."""
        whole, self._parts = self.batch, []
        try:
            yield
            parts, self._parts = self._parts, None
            for entry in dict.fromkeys(entry for entry, _, _ in parts):
                own = [(value, size) for other, value, size in parts if other is entry]
                value, size = entry.of_batch(own)
                entry.record(value, self._tick)
                if entry.on_epoch and entry.metric is None:
                    entry.add(value, size)
        finally:
            self.batch, self._parts = whole, None

    def begin_part(self, batch: Any) -> None:
        """What is logged from here on belongs to a micro-batch, if steps run for those."""
        if self._parts is not None:
            self.batch = batch

    def share_step(self) -> None:
        """Begins to give every rank of a pipeline what the step has logged where it reached its end."""
        if self._ranks is None:
            return
        entries = {
            entry.step_name: entry
            for entry in self._entries.values()
            if entry.tick == self._tick and entry.on_step and entry.value is not None
        }
        described = [[name, entry.name, entry.logger, entry.prog_bar] for name, entry in entries.items()]
        own = [entry.value for entry in entries.values() if entry.value is not None]
        arriving = self._ranks.begin_numbers(described, own)
        if arriving is None:
            return
        self._arriving.append(arriving)
        if len(self._arriving) > UNREAD:
            self._receive(self._arriving.popleft())

    def _settle(self) -> None:
        """Reads what the last stage of a pipeline has sent of its steps. Before that nothing waits for it."""
        while self._arriving:
            self._receive(self._arriving.popleft())

    def _receive(self, arriving: Callable[[], SharedNumbers]) -> None:
        values: dict[str, Shown] = {}
        for (step_name, name, logger, prog_bar), number in zip(*arriving(), strict=True):
            values[step_name] = (number, logger, prog_bar)
            values.setdefault(name, (number, False, False))
        self._of_others = {name: value for name, (value, logger, _) in values.items() if logger}
        self._steps_of_others.update(values)

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
        elif entry.options != options and not entry.follows(options):
            raise ConfigurationError(entry.unlike())
        if sync_dist_group is not None:
            entry.reduce_among(sync_dist_group)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ConfigurationError(
                    f"self.log({name!r}) was given a tensor of shape {tuple(value.shape)}: log one number, as "
                    "value.mean()."
                )
            value = _kept(value, enable_graph)
        elif isinstance(value, (int, float)):
            value = float(value)
        else:
            value = self._unusual(entry, value)
            if value is None:
                return
        if self._parts is not None:
            # Of a metric this is the value of the step: the mean over micro-batches, weighted by their samples.
            size = self._batch_size(entry) if batch_size is None else batch_size
            self._parts.append((entry, value, size))
            return
        entry.record(value, self._tick)
        if entry.on_epoch and entry.metric is None:
            if batch_size is None:
                batch_size = self._batch_size(entry)
            entry.add(value.detach() if enable_graph and isinstance(value, Tensor) else value, batch_size)

    def show(self, values: Mapping[str, Value]) -> None:
        """Shows callbacks values that the module did not log and that loggers already have."""
        self._settle()
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
        entry = Entry(self.hooks.current, name, options, -1 if self.dataloader_idx is None else self.dataloader_idx)
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
            entry.record_metric(value, self._tick)
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
        """Refuses one metric shared by several loaders: each would report the value over all of them."""
        others = (other for other in self._entries.values() if other.metric is metric and other.group == entry.group)
        if any(other.loader != entry.loader and LOADER_SUFFIX in other.name for other in others):
            own = entry.name.partition(LOADER_SUFFIX)[0]
            raise ConfigurationError(
                f"self.log({own!r}) was given one metric object for several loaders, whose samples it would mix: make "
                "a metric for each loader (in an nn.ModuleList), or log it with add_dataloader_idx=False for one value "
                "over all of them."
            )

    def _batch_size(self, entry: Entry) -> int:
        """What a value weighs in the mean of its epoch."""
        if self.batch is None or not entry.has_batch or entry.reduce_fx != "mean":
            return 1
        try:
            return batch_size_of(self.batch)
        except ConfigurationError as error:
            raise ConfigurationError(f"self.log({entry.name!r}, on_epoch=True) weighs by batch size. {error}") from None

    # reading ----------------------------------------------------------------------------------------------------------
    def _current(self) -> Iterator[tuple[str, Value, bool, bool]]:
        """Every name with its newest value: those of ended epochs, then the steps since."""
        self._settle()
        for values in (self._epoch_values, self._steps_of_others):
            for name, (value, logger, prog_bar) in values.items():
                yield name, value, logger, prog_bar
        for entry in self._entries.values():
            if entry.on_step and entry.fresh and entry.value is not None:
                yield entry.step_name, entry.value, entry.logger, entry.prog_bar
                if entry.step_name != entry.name:
                    yield entry.name, entry.value, False, False

    def callback_metrics(self) -> dict[str, Tensor]:
        """Everything that was logged, under every name it goes by, as 0-d tensors on their devices."""
        return {name: as_tensor(value) for name, value, _, _ in self._current()}

    def logged_metrics(self) -> dict[str, Tensor]:
        """What loggers are sent."""
        return {name: as_tensor(value) for name, value, logger, _ in self._current() if logger}

    def progress_bar_metrics(self) -> dict[str, Value]:
        """What the bar shows; not read back from the device yet."""
        return {name: value for name, value, _, prog_bar in self._current() if prog_bar}

    def step_values(self, group: str) -> dict[str, Value]:
        """What loggers are given for the current batch."""
        self._settle()
        own = {
            entry.step_name: entry.value
            for entry in self._entries.values()
            if entry.tick == self._tick
            and entry.group == group
            and entry.on_step
            and entry.logger
            and entry.value is not None
        }
        others, self._of_others = self._of_others, {}
        return {**others, **own} if others else own

    def names_since(self, group: str, tick: int) -> set[str]:
        """The names of epoch values logged with a batch numbered above `tick`."""
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
        self._settle()
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
            forks = entry.step_name != entry.epoch_name
            if entry.on_step and entry.fresh and entry.value is not None and (forks or result is None):
                steps[entry.step_name] = (entry.value, entry.logger, entry.prog_bar)
        self._epoch_values.update(steps)
        if not keep:
            self._follow_outputs(group, entries, steps)
            self.forget(group)
        return values, logged

    def _follow_outputs(self, group: str, entries: Sequence[Entry], steps: Mapping[str, Shown]) -> None:
        """Has other ranks of a pipeline follow its last stage: a last step's values, and metrics that are reset."""
        if self._ranks is None or not self._ranks.are_in_parts:
            return
        names = {id(part): name for name, part in self._module.named_modules()}
        own = (
            [names[id(entry.metric)] for entry in entries if id(entry.metric) in names],
            {name: (float(value), logger, prog_bar) for name, (value, logger, prog_bar) in steps.items()},
        )
        metrics, values = shared = self._ranks.of_outputs(own)
        if shared is not own:
            if group == "train":
                self._steps_of_others.clear()
            self._epoch_values.update(values)
            for name in metrics:
                self._module.get_submodule(name).reset()  # type: ignore[operator]

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
        self._idle = {place for place in self._idle if place[0] != group}
        self.dataloader_idx = None

    def clear(self) -> None:
        """Forgets everything."""
        self._settle()
        self._entries.clear()
        self._epoch_values.clear()
        self._steps_of_others.clear()

    # resume -----------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Sums of the training epoch, and every value that is shown; metrics by their names in the module."""
        self._settle()
        names = {id(part): name for name, part in self._module.named_modules()}
        entries = [entry for entry in self._entries.values() if entry.group == "train"]
        return {
            "entries": [{**entry.state(), "metric": names.get(id(entry.metric))} for entry in entries],
            "epoch_values": {
                name: list(value) for name, value in (*self._epoch_values.items(), *self._steps_of_others.items())
            },
        }

    def check_state_dict(self, state: Any) -> None:
        restored_entries(SavedState(state, "logs"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores sums and values. A function is known again at the next call of `record`."""
        self._settle()
        parts = dict(self._module.named_modules())
        entries, self._epoch_values = restored_entries(SavedState(state, "logs"))
        self._entries.clear()
        for entry, metric in entries:
            if metric in parts:
                entry.attach(parts[metric])
            self._entries[entry.event, entry.name] = entry
        if self._ranks is not None and not self._ranks.counts:
            # The sums are for the rank on which steps reach their end.
            self._epoch_values = {name: (value, logger, bar) for name, value, logger, bar in self._current()}
            self._steps_of_others.clear()
            self._entries.clear()

    def regroup(self, states: Sequence[Any], rank: int, seed: int) -> dict[str, Any] | None:
        """Rank 0 continues with the sums of all ranks; the others begin with sums that add nothing."""
        if states[0] is None:
            return None
        entries: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for state in states:
            for entry in state["entries"]:
                entries.setdefault((entry["event"], entry["name"]), []).append(entry)
        return {**states[0], "entries": [_merged(found, empty=rank > 0) for found in entries.values()]}


def _kept(value: Tensor, with_graph: bool) -> Tensor:
    """A 0-d copy of a logged tensor, which the user may change in place afterwards."""
    if type(value) is not Tensor and hasattr(value, "full_tensor"):
        # On a mesh, a loss is a DTensor where its logits are split.
        value = value.full_tensor()
    value = value.clone() if with_graph else value.detach().clone()
    return value.reshape(()) if value.dim() else value


def _merged(found: list[dict[str, Any]], empty: bool) -> dict[str, Any]:
    """Adds the sums that all ranks have for one entry; `empty` gives a neutral sum, for ranks other than 0."""
    first, reduction = found[0], found[0]["reduce_fx"]
    totals = [entry["total"] for entry in found if entry["total"] is not None]
    if reduction in ("max", "min"):
        # The same value again changes neither.
        return {**first, "total": reduce(partial(extreme, which=reduction), totals) if totals else None}
    if empty:
        return {**first, "total": totals[0] * 0 if totals else None, "weight": 0.0, "values": [], "result": None}
    values = [value for entry in found for value in entry["values"]]
    weight = sum(entry["weight"] for entry in found)
    return {**first, "total": sum(totals[1:], totals[0]) if totals else None, "weight": weight, "values": values}
