"""`leyden estimate --tp …`: the memory that each layout of a mesh takes on a rank, with a traced step's activations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.cli.estimate.estimate import OPTIMIZERS, Memory, shortfall, with_budget
from leyden.cli.estimate.placements import filled, load_plan
from leyden.cli.estimate.traced_step import TracedBatch, find_batch, step_of
from leyden.core.errors import ConfigurationError
from leyden.core.text import aligned, size_of
from leyden.strategies.fsdp.sharding import local
from leyden.strategies.mesh.expert_parallel import WORD
from leyden.strategies.mesh.layout import ORDER, Layout, layouts_of
from leyden.strategies.mesh.pipeline.cut import Cut, find_cut
from leyden.strategies.mesh.pipeline.refusals import refuse_arguments
from leyden.strategies.mesh.pipeline.schedule import Schedule
from leyden.strategies.mesh.pipeline.steps import Rehearsal
from leyden.strategies.mesh.plan import Plan, PlanLike, plan_of
from leyden.strategies.mesh.simulated import SimulatedMesh, simulated
from leyden.strategies.mesh.traced import TracedStep, group_sizes, rehearsed, shapes_only, state_size, traced_step
from leyden.strategies.precision import find_precision
from leyden.trainer.engine.schedulers import parse
from leyden.trainer.module import TrainModule
from leyden.trainer.trainer import Trainer

EVEN = "tokens are spread evenly over the experts; if a router prefers some, their ranks receive and keep more"


@dataclass(frozen=True, slots=True)
class Row:
    """The memory of one rank in a layout.

    Attributes:
        layout: the sizes of the mesh.
        precision: the precision's full name.
        memory: memory without activations. `passing` is what FSDP gathers.
        step: the activations of a step and the bytes that it sends, or None if the step could not be traced.
        notes: reasons for an empty column, or for one that does not come from the model itself.
        rank: the rank. With a pipeline, it is the first of those that hold the same stages.
    """

    layout: Layout
    precision: str
    memory: Memory
    step: TracedStep | None
    notes: tuple[str, ...] = ()
    rank: int = 0

    @property
    def total(self) -> int:
        return self.memory.total + (0 if self.step is None else self.step.activations)


@dataclass(frozen=True, slots=True)
class Training:
    """A model, its batch and its optimizer, to be tried in each layout.

    Attributes:
        model: the model, on any device. It is copied.
        plan: the plan of split layers. None for the model's own.
        batch: the batch of one data rank.
        optimizer: one of `OPTIMIZERS`. None for the module's own.
        pipeline: the arguments of MeshStrategy for a pipeline: schedule and microbatches.
    """

    model: nn.Module
    plan: PlanLike | None
    batch: TracedBatch
    optimizer: str | None = None
    pipeline: Mapping[str, Any] = field(default_factory=dict)

    def cut(self, layout: Layout) -> tuple[Schedule, Cut]:
        """Returns the schedule of a layout with a pipeline, and how it divides the model.

        Raises:
            ConfigurationError: if a fit would raise it.
        """
        schedule = SimulatedMesh(layout, None, None, **self.pipeline).schedule
        return schedule, find_cut(self.model, schedule.stages)

    def on(self, layout: Layout, precision: str) -> list[Row]:
        """Runs a step on a simulated rank 0, which has the largest shards; with a pipeline, on the first of each stage.

        Raises:
            ConfigurationError: if a fit would raise it.
        """
        if layout.pp == 1:
            return [self._on_rank(0, layout, precision, None, self.batch.about)]
        rehearsal, why = self._rehearse(layout, precision)
        ranks = range(0, layout.size, layout.size // layout.pp)
        return [self._on_rank(rank, layout, precision, rehearsal, why) for rank in ranks]

    def _rehearse(self, layout: Layout, precision: str) -> tuple[Rehearsal | None, str]:
        """Returns what the stages of a pipeline receive, or None and the reason."""
        if self.batch.value is None:
            return None, self.batch.about
        model = deepcopy(self.model)
        experts = self._experts(model)
        options = {"holds_all": True, **self.pipeline}
        with simulated(layout, self.plan, find_precision(precision), **options) as strategy:
            strategy.setup_modules([model])
            with shapes_only(strategy):
                try:
                    return rehearsed(strategy, self._step_fn(strategy, model), self.batch.value, experts), ""
                except Exception as error:
                    return None, f"the step cannot be traced ({_said(error)})"

    def _on_rank(self, rank: int, layout: Layout, precision: str, rehearsal: Rehearsal | None, why: str) -> Row:
        model = deepcopy(self.model)
        experts = self._experts(model)
        options = self.pipeline if layout.pp > 1 else {}
        with simulated(layout, self.plan, find_precision(precision), rank, **options) as strategy:
            strategy.setup_modules([model])
            root, groups = group_sizes(model)
            with shapes_only(strategy) as parameters:
                optimizers, own = self._optimizers(model)
                strategy.setup_optimizers([model], optimizers)
                step, traced = self._step(strategy, model, parameters, experts, rehearsal, why)
                gradients = _size(p.grad for p in parameters if p.grad is not None)
                states, stepped = self._states(optimizers, parameters)
            held = _size([*parameters, *model.buffers()])
            if layout.pp == 1:
                # The computed and the prefetched group, and the gradients of one group before they are sharded.
                passing = root + sum(sorted(groups)[-2:]) + max([root, *groups])
            else:
                # Stages keep their groups gathered, and sum gradients before they are sharded.
                passing = 2 * (root + sum(groups)) if step is None else step.passing
            notes = tuple(note for note in (traced, own, stepped, EVEN if experts and step else "") if note)
            memory = Memory(held, gradients, states, passing)
            return Row(layout, precision, memory, step, notes, rank)

    def _experts(self, model: nn.Module) -> dict[str, int]:
        """Returns the number of experts in each module of experts that the plan names."""
        plan = plan_of(model, divides_experts=True) if self.plan is None else Plan(self.plan)
        matched = {} if plan is None else plan.matched(model)
        modules = {name: model.get_submodule(name) for name, style in matched.items() if style in ("experts", WORD)}
        return {name: len(next(module.parameters())) for name, module in modules.items()}

    def _step(
        self,
        strategy: SimulatedMesh,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        experts: Mapping[str, int],
        rehearsal: Rehearsal | None,
        why: str,
    ) -> tuple[TracedStep | None, str]:
        """Returns what a step takes, or None and the reason. Either way, parameters have gradients.

        Without a batch, or without the rehearsal of a pipeline, the reason is `why`.
        """
        if self.batch.value is not None and (rehearsal is not None or strategy.layout.pp == 1):
            step_fn = self._step_fn(strategy, model)
            try:
                return traced_step(strategy, step_fn, self.batch.value, experts, rehearsal), ""
            except Exception as error:
                why = f"the step cannot be traced ({_said(error)})"
        # The parameters from before the step, since a failed step leaves some of them gathered in the module.
        for parameter in parameters:
            parameter.grad = parameter.detach() if parameter.requires_grad else None
        return None, f"no activations: {why}"

    def _step_fn(self, strategy: SimulatedMesh, model: nn.Module) -> Callable[[Any, int], Any]:
        if isinstance(model, TrainModule):
            # For steps that ask it for the strategy, as balance_loss does.
            model.trainer = Trainer(strategy=strategy, logger=False, enable_checkpointing=False)
        return step_of(model)

    def _states(self, optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter]) -> tuple[int, str]:
        """Returns the bytes of optimizer state after a step. If it is estimated from a stand-in, adds the reason."""
        why = ""
        if optimizers:
            try:
                return state_size(optimizers), ""
            except Exception as error:
                why = self._stands_in(f"its own cannot be traced ({_said(error)})")
        return OPTIMIZERS[self.optimizer or "adamw"] * _size(p for p in parameters if p.requires_grad), why

    def _optimizers(self, model: nn.Module) -> tuple[list[Optimizer], str]:
        """Returns the module's own optimizers, or none and the reason."""
        if self.optimizer is not None:
            return [], ""
        if not isinstance(model, TrainModule):
            return [], self._stands_in(f"{type(self.model).__name__} is not a TrainModule")
        try:
            found, _ = parse(model.configure_optimizers(), model.automatic_optimization)
        except Exception as error:
            return [], self._stands_in(f"configure_optimizers cannot be traced ({_said(error)})")
        return found, "" if found else self._stands_in("configure_optimizers returns none")

    def _stands_in(self, why: str) -> str:
        return f"optimizer is {self.optimizer or 'adamw'}: {why}"


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


# the table ------------------------------------------------------------------------------------------------------------
def report(
    model: nn.Module,
    ranks: Sequence[int],
    precisions: Sequence[str],
    optimizer: str | None,
    *,
    dp_replicate: str,
    dp_shard: str,
    tp: str,
    pp: str,
    cp: str,
    ep: str,
    schedule: str | None,
    microbatches: int | None,
    every: bool,
    plan: str | None,
    data: str | None,
    batch_size: int | None,
    seq_len: int | None,
    budget: int | None,
) -> tuple[str, str | None]:
    """Formats the batch, rows for each layout and precision, and notes. The arguments are those of the command.

    Returns:
        The text, and what to do if no layout fits into the budget.

    Raises:
        ConfigurationError: if a requested layout does not fit the model. With `every`, such layouts are left out.
    """
    given = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp, "pp": pp, "cp": cp, "ep": ep}
    sizes = {name: _sizes(name, text, -1 if name == "dp_shard" else 1) for name, text in given.items()}
    if every and (not ranks or any(given.values())):
        raise ConfigurationError("--layouts tries all sizes for --ranks. Give --ranks and no other size.")
    if form := [precision for precision in precisions if precision in ("fp8", "transformer-engine")]:
        raise ConfigurationError(
            f"--precision {form[0]} replaces layers, which cannot be traced. Use bf16-mixed, which takes as much "
            "memory between operations, or remove the sizes of the mesh."
        )
    pipeline = {"schedule": schedule, "microbatches": microbatches}
    pipeline = {name: value for name, value in pipeline.items() if value is not None}
    entries, layouts = load_plan(plan), [] if every else _combined(sizes, ranks)
    if (every and budget is None) or (layouts and all(layout.pp == 1 for layout in layouts)):
        refuse_arguments("pp", **pipeline)
    batch = find_batch(model, data, batch_size, seq_len)
    training = Training(model, entries, batch, optimizer, pipeline)
    for layout in layouts:
        if layout.pp > 1:
            training.cut(layout)
    if every:
        rows, notes = _search(training, ranks, precisions, budget)
    else:
        rows, notes = [row for layout in layouts for own in precisions for row in training.on(layout, own)], []
    remarks = aligned([*_notes(rows), *notes])
    about = [] if batch.value is None else [f"batch       {batch.about}; one for each data rank"]
    tables = *table(rows, training, budget), *sent(rows), *pipelines(rows, training)
    text = "\n".join([*about, "", *tables, *([""] if remarks else []), *remarks])
    return text, shortfall(budget, {name: max(row.total for row in own) for name, own in _by_layout(rows).items()})


def _search(
    training: Training, ranks: Sequence[int], precisions: Sequence[str], budget: int | None
) -> tuple[list[Row], list[tuple[str, str]]]:
    """Tries every layout without a pipeline. If none fits into the budget, tries pipelines, the shortest first.

    Returns:
        The rows; and what was left out, and what is proposed.
    """
    rows: list[Row] = []
    notes: list[tuple[str, str]] = []
    for world in ranks:
        for pp in [size for size in range(1, world + 1) if world % size == 0]:
            found: list[Row] = []
            for layout in layouts_of(world, pp):
                try:
                    if pp > 1:
                        training.cut(layout)
                    found += [row for precision in precisions for row in training.on(layout, precision)]
                except ConfigurationError as error:
                    notes.append(("left out", f"{layout}: {_first_line(error)}"))
            rows += found
            if budget is None:
                break
            fitting = {name: own for name, own in _by_layout(found).items() if max(r.total for r in own) <= budget}
            if fitting:
                break
        if pp > 1 and fitting and all(row.step is not None for own in fitting.values() for row in own):
            best = min(fitting, key=lambda name: max(sum(_sent_by(row).values()) for row in fitting[name]))
            why = "of the layouts with the shortest pipeline that fits, its ranks send the least"
            notes.append(("proposed", f"{best}: nothing on {world} ranks fits without a pipeline, and {why}"))
    return rows, notes


def _by_layout(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row.layout}, {row.precision}", []).append(row)
    return found


def _sizes(name: str, text: str, default: int) -> list[int]:
    try:
        return [int(size) for size in text.split(",")] if text else [default]
    except ValueError as error:
        raise ConfigurationError(f"--{name} {text}: give sizes, such as 1,2,4.") from error


def _combined(sizes: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> list[Layout]:
    """Returns every combination of sizes for each number of ranks, or for the product of the sizes if there is none."""
    worlds: Sequence[int | None] = ranks or [None]
    chosen = [dict(zip(sizes, values, strict=True)) for values in itertools.product(*sizes.values())]
    return list(dict.fromkeys(filled(Layout(**own), world) for world in worlds for own in chosen))


def _notes(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns each note of the rows once. Notes that do not apply to all rows are prefixed with their layouts."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        for note in row.notes:
            found.setdefault(note, []).append(row)
    return [
        (
            "note",
            note if len(about) == len(rows) else f"{', '.join(dict.fromkeys(str(r.layout) for r in about))}: {note}",
        )
        for note, about in found.items()
    ]


def table(rows: Sequence[Row], training: Training, budget: int | None = None) -> list[str]:
    """Formats the memory of each row as a table."""
    names = _names(rows, training)
    cells = [(*next(names), "weights", "gradients", "optimizer", "passing", "activations", "total")]
    for row, own in zip(rows, names, strict=True):
        memory = row.memory
        parts = (memory.weights, memory.gradients, memory.optimizer, memory.passing)
        kept, more = ("-", " + activations") if row.step is None else (size_of(row.step.activations), "")
        cells.append((*own, *map(size_of, parts), kept, size_of(row.total) + more))
    return aligned(with_budget(cells, [row.total for row in rows], budget, [row.step is None for row in rows]))


def sent(rows: Sequence[Row]) -> list[str]:
    """Formats the bytes that a rank sends in a step, with a column for each dimension over which it sends any."""
    rows = [row for row in rows if row.step is not None]
    dimensions = [name for name in (*ORDER, "ep") if any(_sent_by(row).get(name) for row in rows)]
    if not dimensions:
        return []
    names = _names(rows)
    cells = [(*next(names), *(f"sent over {name}" for name in dimensions))]
    for row, own in zip(rows, names, strict=True):
        cells.append((*own, *(size_of(_sent_by(row).get(name, 0)) for name in dimensions)))
    return ["", *aligned(cells)]


def pipelines(rows: Sequence[Row], training: Training) -> list[str]:
    """Formats the schedule, the bubble and the fullest rank of each layout with a pipeline."""
    cells = [("layout", "precision", "schedule", "bubble", "fullest rank")]
    for own in _by_layout([row for row in rows if row.layout.pp > 1]).values():
        fullest = max(own, key=lambda row: row.total)
        schedule, _ = training.cut(fullest.layout)
        bubble = "-" if schedule.bubble is None else f"{schedule.bubble:.1%}"
        cells.append((str(fullest.layout), fullest.precision, str(schedule), bubble, str(fullest.rank)))
    return ["", *aligned(cells)] if len(cells) > 1 else []


def _sent_by(row: Row) -> Mapping[str, int]:
    return {} if row.step is None else row.step.sent


def _names(rows: Sequence[Row], training: Training | None = None) -> Iterator[tuple[str, ...]]:
    """Yields the header of the columns that name a row, then their cells for each row.

    The blocks that a rank holds are added if `training` is given, and a layout has a pipeline.
    """
    has_pipeline = any(row.layout.pp > 1 for row in rows)
    yield (
        *("ranks", "layout", "precision"),
        *(("rank",) if has_pipeline else ()),
        *(("blocks",) if has_pipeline and training else ()),
    )
    for row in rows:
        layout = row.layout
        names = [str(layout.size), str(layout), row.precision]
        if has_pipeline:
            names.append(str(row.rank))
        if has_pipeline and training:
            blocks = "all"
            if layout.pp > 1:
                schedule, cut = training.cut(layout)
                stages = schedule.stages_of(row.rank * layout.pp // layout.size)
                blocks = ", ".join(map(cut.described, stages))
            names.append(blocks)
        yield tuple(names)
