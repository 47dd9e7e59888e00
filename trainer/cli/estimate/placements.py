"""`leyden plan` prints where a mesh of ranks would put every parameter of a model, on a machine without any of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import click
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.strategies.mesh.layout import Layout
from leyden.strategies.mesh.plan import PlanLike
from leyden.trainer.cli.models import ARGS, DOWNLOAD, load_model, load_object, parse_arguments
from leyden.trainer.format.text import aligned, size_of

SPLIT = (Shard, _StridedShard)
"""Where both tp and FSDP split a dimension, FSDP's shards are strided."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A parameter on a mesh.

    Attributes:
        name: its full name.
        shape: of the whole.
        style: what the plan says of it, or of its module; empty for nothing.
        placement: how each dimension of the mesh splits it; or the parameter that it is, if it is tied to one.
        whole: bytes of all of it.
        held: bytes that each rank has of it.
    """

    name: str
    shape: tuple[int, ...]
    style: str
    placement: str
    whole: int
    held: int


def placed(model: nn.Module, layout: Layout, plan: PlanLike | None = None) -> list[Placed]:
    """Places a model on a mesh, as a fit would, and returns its parameters. The model is of no use afterwards.

    Args:
        model: on any device, meta too.
        layout: without an open size.
        plan: which layers are split; by default the model's own.

    Raises:
        ConfigurationError: where a fit would raise it.
    """
    from leyden.strategies.mesh.simulated import simulated

    with simulated(layout, plan) as strategy:
        styles = strategy.plan_for(model).matched(model) if layout.tp > 1 else {}
        strategy.setup_modules([model])
        first: dict[int, str] = {}
        rows = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            style = styles.get(name, styles.get(name.rpartition(".")[0], ""))
            word = style if isinstance(style, str) else type(style).__name__
            if id(parameter) in first:
                rows.append(Placed(name, tuple(parameter.shape), word, f"is {first[id(parameter)]}", 0, 0))
                continue
            first[id(parameter)] = name
            assert isinstance(parameter, DTensor)
            whole, held = parameter.nbytes, parameter.to_local().nbytes
            rows.append(Placed(name, tuple(parameter.shape), word, _placement(parameter), whole, held))
        return rows


def _placement(parameter: DTensor) -> str:
    """The dimensions of a DTensor's mesh, each with how it splits the parameter, in torch's letters."""
    mesh = parameter.device_mesh
    pairs = zip(mesh.mesh_dim_names or (), parameter.placements, strict=True)
    return ", ".join(f"{name} {f'S({p.dim})' if isinstance(p, SPLIT) else 'R'}" for name, p in pairs)


# the command ----------------------------------------------------------------------------------------------------------
@click.command("plan")
@click.argument("model", metavar="SCRIPT")
@click.option("--dp_replicate", default=1, show_default=True, help="Copies of the model.")
@click.option("--dp_shard", default=-1, show_default=True, help="Ranks that shard each copy; -1 for all there are.")
@click.option("--tp", default=1, show_default=True, help="Ranks over which layers are split.")
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
    ranks: int | None,
    plan: str | None,
    arguments: str,
    each: bool,
    download: bool,
) -> None:
    """Print where a mesh of ranks puts every parameter, and the bytes on each rank.

    SCRIPT is train.py (its only TrainModule), train.py:NAME (a class, or a function that builds the model), an import
    path (package.module:Class), a local Hugging Face folder, or a config.json. The model is built on the meta device,
    which takes no memory, and no rank is started. What fit refuses is refused here, in the same words.
    """
    layout = filled(Layout(dp_replicate, dp_shard, tp), ranks)
    entries = load_plan(plan)
    built, _ = load_model(model, parse_arguments(arguments), download)
    rows = placed(built, layout, entries)
    click.echo(table(rows if each else list(collapsed(rows))))
    click.echo(f"\n{summary(rows, layout)}")


def load_plan(name: str | None) -> PlanLike | None:
    """The plan of a script or module; None for no name.

    Raises:
        ConfigurationError: if it names something else.
    """
    found = None if name is None else load_object(name)
    if found is not None and not isinstance(found, Mapping):
        raise ConfigurationError(f"--plan {name} is {kind_of(found)}: give a dict of pattern: style.")
    return found


def filled(layout: Layout, ranks: int | None) -> Layout:
    """The layout for a number of ranks; without one, of as few as its sizes make up."""
    if ranks is not None and ranks < 1:
        raise ConfigurationError(f"--ranks {ranks}: give a number of ranks from 1.")
    if ranks is None:
        layout = replace(layout, **dict.fromkeys(layout.open, 1))
    return layout.filled(layout.size if ranks is None else ranks)


def collapsed(rows: Iterable[Placed]) -> Iterable[Placed]:
    """Joins the rows of layers that repeat: one row, named by its pattern, for all that are placed alike."""
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
    """Describes a plan in a few lines: the mesh, and how much of the model each rank has."""
    whole, held = sum(row.whole for row in rows), sum(row.held for row in rows)
    everywhere = sum(row.held for row in rows if "S(" not in row.placement)
    lines = [
        ("mesh", f"{layout} of {layout.size} rank{'s'[: layout.size != 1]}"),
        ("parameters", f"{size_of(whole)} as built"),
        (
            "per rank",
            f"{size_of(held)}, {held / max(whole, 1):.2%} of them; {size_of(everywhere)} are whole everywhere",
        ),
        ("placement", "S(n): split along dimension n; R: the same on each rank"),
    ]
    return "\n".join(aligned(lines))
