"""`leyden estimate --tp …`: the memory that each layout of a mesh takes on a rank, with a traced step's activations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from leyden.strategies.mesh.plan import Plan, PlanLike, plan_of
from leyden.strategies.precision import find_precision
from leyden.trainer.engine.schedulers import parse
from leyden.trainer.module import TrainModule
from leyden.trainer.trainer import Trainer

if TYPE_CHECKING:
    from leyden.strategies.mesh.simulated import SimulatedMesh
    from leyden.strategies.mesh.traced import TracedStep

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
    """

    layout: Layout
    precision: str
    memory: Memory
    step: TracedStep | None
    notes: tuple[str, ...] = ()

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
    """

    model: nn.Module
    plan: PlanLike | None
    batch: TracedBatch
    optimizer: str | None = None

    def on(self, layout: Layout, precision: str) -> Row:
        """Runs a step on a simulated rank 0, which has the largest shards.

        Raises:
            ConfigurationError: if a fit would raise it.
        """
        from leyden.strategies.mesh.simulated import simulated
        from leyden.strategies.mesh.traced import group_sizes, shapes_only

        model = deepcopy(self.model)
        experts = self._experts(model)
        with simulated(layout, self.plan, precision=find_precision(precision)) as strategy:
            strategy.setup_modules([model])
            root, groups = group_sizes(model)
            with shapes_only(model):
                parameters = list(model.parameters())
                optimizers, own = self._optimizers(model)
                strategy.setup_optimizers([model], optimizers)
                step, traced = self._step(strategy, model, parameters, experts)
                gradients = _size(p.grad for p in parameters if p.grad is not None)
                states, stepped = self._states(optimizers, parameters)
            held = _size([*parameters, *model.buffers()])
            # The group being computed, the prefetched group, and the gradients of one group before they are sharded.
            passing = root + sum(sorted(groups)[-2:]) + max([root, *groups])
            notes = tuple(note for note in (traced, own, stepped, EVEN if experts and step else "") if note)
            return Row(layout, precision, Memory(held, gradients, states, passing), step, notes)

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
    ) -> tuple[TracedStep | None, str]:
        """Returns what a step takes, or None and the reason. Either way, parameters have gradients."""
        from leyden.strategies.mesh.traced import traced_step

        why = self.batch.about
        if self.batch.value is not None:
            if isinstance(model, TrainModule):
                # For steps that ask it for the strategy, as balance_loss does.
                model.trainer = Trainer(strategy=strategy, logger=False, enable_checkpointing=False)
            try:
                return traced_step(strategy, step_of(model), self.batch.value, experts), ""
            except Exception as error:
                why = f"the step cannot be traced ({_said(error)})"
        # The parameters from before the step, since a failed step leaves some of them gathered in the module.
        for parameter in parameters:
            parameter.grad = parameter.detach() if parameter.requires_grad else None
        return None, f"no activations: {why}"

    def _states(self, optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter]) -> tuple[int, str]:
        """Returns the bytes of optimizer state after a step. If it is estimated from a stand-in, adds the reason."""
        from leyden.strategies.mesh.traced import state_size

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
    cp: str,
    ep: str,
    every: bool,
    plan: str | None,
    data: str | None,
    batch_size: int | None,
    seq_len: int | None,
    budget: int | None,
) -> tuple[str, str | None]:
    """Formats the batch, two rows for each layout and precision, and notes. The arguments are those of the command.

    Returns:
        The text, and what to do if no row fits into the budget.

    Raises:
        ConfigurationError: if a requested layout does not fit the model. With `every`, such layouts are left out.
    """
    given = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp, "cp": cp, "ep": ep}
    sizes = {name: _sizes(name, text, -1 if name == "dp_shard" else 1) for name, text in given.items()}
    if every and (not ranks or any(given.values())):
        raise ConfigurationError("--layouts tries all sizes for --ranks. Give --ranks and no other size.")
    if form := [precision for precision in precisions if precision in ("fp8", "transformer-engine")]:
        raise ConfigurationError(
            f"--precision {form[0]} replaces layers, which cannot be traced. Use bf16-mixed, which takes as much "
            "memory between operations, or remove the sizes of the mesh."
        )
    training = Training(model, load_plan(plan), find_batch(model, data, batch_size, seq_len), optimizer)
    left_out: list[tuple[str, str]] = []
    rows: list[Row] = []
    layouts = [fits for world in ranks for fits in layouts_of(world)] if every else _combined(sizes, ranks)
    for layout in layouts:
        try:
            rows += [training.on(layout, precision) for precision in precisions]
        except ConfigurationError as error:
            if not every:
                raise
            left_out.append(("left out", f"{layout}: {_first_line(error)}"))
    batch = [] if training.batch.value is None else [f"batch       {training.batch.about}; one for each data rank"]
    notes = aligned([*_notes(rows), *left_out])
    text = "\n".join([*batch, "", *table(rows, budget), *sent(rows), *([""] if notes else []), *notes])
    return text, shortfall(budget, {f"{row.layout}, {row.precision}": row.total for row in rows})


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


def table(rows: Sequence[Row], budget: int | None = None) -> list[str]:
    """Formats the memory of each row as a table."""
    cells: list[tuple[str, ...]] = [
        ("ranks", "layout", "precision", "weights", "gradients", "optimizer", "passing", "activations", "total")
    ]
    for row in rows:
        memory = row.memory
        parts = (memory.weights, memory.gradients, memory.optimizer, memory.passing)
        kept, more = ("-", " + activations") if row.step is None else (size_of(row.step.activations), "")
        cells.append((*_names(row), *map(size_of, parts), kept, size_of(row.total) + more))
    return aligned(with_budget(cells, [row.total for row in rows], budget, [row.step is None for row in rows]))


def sent(rows: Sequence[Row]) -> list[str]:
    """Formats the bytes that a rank sends in a step, with a column for each dimension over which it sends any."""
    steps = [(row, row.step.sent) for row in rows if row.step is not None]
    names = [name for name in (*ORDER, "ep") if any(counts.get(name) for _, counts in steps)]
    if not names:
        return []
    cells: list[tuple[str, ...]] = [("ranks", "layout", "precision", *(f"sent over {name}" for name in names))]
    cells += [(*_names(row), *(size_of(counts.get(name, 0)) for name in names)) for row, counts in steps]
    return ["", *aligned(cells)]


def _names(row: Row) -> tuple[str, str, str]:
    return str(row.layout.size), str(row.layout), row.precision
