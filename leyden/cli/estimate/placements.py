"""`leyden plan` prints where a mesh of ranks would place every parameter of a model. It needs no rank of that mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import click
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from leyden.cli.models import ARGS, DOWNLOAD, load_model, load_object
from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.text import aligned, size_of
from leyden.strategies.fsdp.sharding import local
from leyden.strategies.mesh.layout import Layout
from leyden.strategies.mesh.pipeline.absent import AbsentParameter
from leyden.strategies.mesh.plan import PlanLike
from leyden.strategies.mesh.simulated import simulated

SPLIT = (Shard, _StridedShard)
"""If both tp and FSDP split a dimension, FSDP's shards are strided."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A parameter on a mesh.

    Attributes:
        name: its full name.
        shape: shape of the full parameter.
        style: its style, or its module's, in the plan. Empty if the plan does not mention it.
        placement: how each dimension of the mesh splits it, or the name of the parameter that it is tied to.
        whole: bytes of the full parameter.
        held: bytes of each rank's part.
        stages: the ranks of a pipeline that hold it; only 0 without pp.
    """

    name: str
    shape: tuple[int, ...]
    style: str
    placement: str
    whole: int
    held: int
    stages: tuple[int, ...] = (0,)


def placed(model: nn.Module, layout: Layout, plan: PlanLike | None = None, schedule: str = "1F1B") -> list[Placed]:
    """Places a model on a mesh as a fit would, and returns its parameters. The model cannot be used afterwards.

    Args:
        model: the model, on any device, including meta.
        layout: the sizes of the mesh, all of them set.
        plan: the plan of split layers. Default: the model's own.
        schedule: the schedule of a pipeline, which decides how many stages a rank has.

    Raises:
        ConfigurationError: if a fit would raise it.
    """
    if layout.pp == 1:
        return _placed_on(0, model, layout, plan, schedule)
    found: dict[str, list[Placed]] = {name: [] for name, _ in model.named_parameters(remove_duplicate=False)}
    for stage in range(layout.pp):
        for row in _placed_on(stage, deepcopy(model), layout, plan, schedule):
            found[row.name].append(replace(row, stages=(stage,)))
    return [_joined(rows) for rows in found.values()]


def _joined(rows: Sequence[Placed]) -> Placed:
    """Joins the rows of a parameter on the ranks of a pipeline that hold it."""
    [row, *_], stages = rows, tuple(stage for row in rows for stage in row.stages)
    if not row.whole:
        return row
    where = f"pp {' and '.join(map(str, stages))}"
    return replace(row, placement=", ".join(part for part in (where, row.placement) if part), stages=stages)


def _placed_on(stage: int, model: nn.Module, layout: Layout, plan: PlanLike | None, schedule: str) -> list[Placed]:
    """Places a model, and returns the parameters that the first rank of a pipeline's stage holds."""
    with simulated(layout, plan, rank=stage * layout.size // layout.pp, schedule=schedule) as strategy:
        styles = strategy.plan_for(model).matched(model) if layout.tp > 1 or layout.ep > 1 else {}
        strategy.setup_modules([model])
        first: dict[int, str] = {}
        rows = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            style = styles.get(name, styles.get(name.rpartition(".")[0], ""))
            word = style if isinstance(style, str) else type(style).__name__
            if isinstance(parameter, AbsentParameter):
                continue
            if id(parameter) in first:
                rows.append(Placed(name, tuple(parameter.shape), word, f"is {first[id(parameter)]}", 0, 0))
                continue
            first[id(parameter)] = name
            whole, held = parameter.nbytes, local(parameter).nbytes
            rows.append(Placed(name, tuple(parameter.shape), word, _placement(parameter), whole, held))
        return rows


def _placement(parameter: nn.Parameter) -> str:
    """Formats how each dimension of a DTensor's mesh splits the parameter, in torch's notation."""
    if not isinstance(parameter, DTensor):
        return ""
    mesh = parameter.device_mesh
    pairs = zip(mesh.mesh_dim_names or (), parameter.placements, strict=True)
    return ", ".join(f"{name} {f'S({p.dim})' if isinstance(p, SPLIT) else 'R'}" for name, p in pairs)


# the command ----------------------------------------------------------------------------------------------------------
@click.command("plan")
@click.argument("model", metavar="SCRIPT")
@click.option("--dp_replicate", default=1, show_default=True, help="Copies of the model.")
@click.option("--dp_shard", default=-1, show_default=True, help="Ranks that shard each copy; -1 for all there are.")
@click.option("--tp", default=1, show_default=True, help="Ranks over which layers are split.")
@click.option(
    "--pp", default=1, show_default=True, help="Ranks over which blocks are divided, as stages of a pipeline."
)
@click.option("--schedule", default="1F1B", show_default=True, metavar="NAME", help="The schedule of a pipeline.")
@click.option("--cp", default=1, show_default=True, help="Ranks over which sequences are divided.")
@click.option(
    "--ep", default=1, show_default=True, help="Ranks over which experts are divided: a part of dp_shard × cp."
)
@click.option("--ranks", type=int, help="The number of ranks; by default the product of the sizes.")
@click.option(
    "--plan", "plan", metavar="NAME", help="A plan in a script or module (train.py:PLAN); by default the model's."
)
@ARGS
@click.option("--each", is_flag=True, help="One row for each parameter, where layers that repeat share one.")
@DOWNLOAD
def command(
    model: str,
    dp_replicate: int,
    dp_shard: int,
    tp: int,
    pp: int,
    schedule: str,
    cp: int,
    ep: int,
    ranks: int | None,
    plan: str | None,
    arguments: dict[str, Any],
    each: bool,
    download: bool,
) -> None:
    """Print where a mesh of ranks puts every parameter, and the bytes on each rank.

    SCRIPT is train.py (its only TrainModule), train.py:NAME (a class, or a function that builds the model), an import
    path (package.module:Class), a local Hugging Face folder, or a config.json. The model is built on the meta device,
    which takes no memory, and no rank is started. Layouts that fit refuses are refused here with the same error.
    """
    layout = filled(Layout(dp_replicate, dp_shard, tp, pp, cp, ep), ranks)
    entries = load_plan(plan)
    built, _ = load_model(model, arguments, download)
    rows = placed(built, layout, entries, schedule)
    click.echo(table(rows if each else list(collapsed(rows))))
    click.echo(f"\n{summary(rows, layout)}")


def load_plan(name: str | None) -> PlanLike | None:
    """Loads a plan from a script or module. Returns None without a name.

    Raises:
        ConfigurationError: if the name is not that of a plan.
    """
    found = None if name is None else load_object(name)
    if found is not None and not isinstance(found, Mapping):
        raise ConfigurationError(f"--plan {name} is {kind_of(found)}, not a dict of pattern: style.")
    return found


def filled(layout: Layout, ranks: int | None) -> Layout:
    """Fills the open sizes of a layout for a number of ranks. Without one they become 1, and dp_shard what ep needs."""
    if ranks is not None and ranks < 1:
        raise ConfigurationError(f"--ranks {ranks}: give a number of ranks from 1.")
    if ranks is None:
        least = {"dp_shard": layout.ep // math.gcd(layout.ep, layout.cp)}
        layout = replace(layout, **{name: least.get(name, 1) for name in layout.open})
    return layout.filled(layout.size if ranks is None else ranks)


def collapsed(rows: Iterable[Placed]) -> Iterable[Placed]:
    """Joins the rows of repeated layers: parameters with the same placement share one row, named by their pattern."""
    groups: dict[Placed, list[Placed]] = {}
    for row in rows:
        groups.setdefault(replace(row, name=_pattern(row.name), placement=_pattern(row.placement)), []).append(row)
    for pattern, members in groups.items():
        if len(members) == 1:
            yield members[0]
            continue
        count = len(members)
        yield replace(
            pattern, name=f"{pattern.name} (× {count})", whole=count * pattern.whole, held=count * pattern.held
        )


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def table(rows: Sequence[Placed]) -> str:
    """Formats a row for each parameter."""
    cells: list[tuple[str, ...]] = [("name", "shape", "style", "placement", "bytes per rank")]
    for row in rows:
        shape = " × ".join(map(str, row.shape)) or "1"
        cells.append((row.name, shape, row.style or "-", row.placement, f"{row.held:,}" if row.whole else "0"))
    return "\n".join(aligned(cells, right=[4]))


def summary(rows: Sequence[Placed], layout: Layout) -> str:
    """Summarizes a plan: the mesh, and how much of the model each rank holds."""
    whole = sum(row.whole for row in rows)
    lines = [
        ("mesh", f"{layout} of {layout.size} rank{'s'[: layout.size != 1]}"),
        ("parameters", f"{size_of(whole)} as built"),
    ]
    for stage in range(layout.pp):
        own = [row for row in rows if stage in row.stages]
        held, unsplit = sum(row.held for row in own), sum(row.held for row in own if "S(" not in row.placement)
        name, where = ("per rank", "everywhere") if layout.pp == 1 else (f"on pp {stage}", "on its ranks")
        lines.append(
            (name, f"{size_of(held)}, {held / max(whole, 1):.2%} of them; {size_of(unsplit)} are whole {where}")
        )
    lines.append(("placement", "S(n): split along dimension n; R: the same on each rank"))
    return "\n".join(aligned(lines))
