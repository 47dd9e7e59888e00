"""`leyden estimate` prints the parameters of a model and the memory that training it takes, without activations."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from torch import nn

from leyden.cli.models import ARGS, DOWNLOAD, load_model
from leyden.core.errors import ConfigurationError, nearest
from leyden.core.text import aligned, size_of
from leyden.strategies.fsdp.policy import choose
from leyden.strategies.precision import ALIASES, NAMES

OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "lion": 1, "none": 0}
"""Number of state elements per parameter element of each optimizer."""
DTYPES = {"float32": "32-true", "float64": "64-true", "float16": "16-true", "bfloat16": "bf16-true"}
HALF = {"16-mixed": 2, "bf16-mixed": 2, "16-true": 2, "bf16-true": 2}
HELD = {"64-true": 8, "16-true": 2, "bf16-true": 2}
"""Bytes per element of the precisions that store weights in a dtype other than the module's."""
STRATEGIES = ("single_device", "ddp", "fsdp_shard_grad_op", "fsdp", "fsdp_cpu_offload")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that training takes on one rank's device, without activations.

    Attributes:
        weights: parameters and buffers that stay on the device.
        gradients: gradients of the trained parameters, including DDP's buckets.
        optimizer: the optimizer's state.
        passing: transient copies: gathered parameters and gradients, or weights cast for mixed precision.
    """

    weights: int
    gradients: int
    optimizer: int
    passing: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.passing


def memory(model: nn.Module, strategy: str, ranks: int, precision: str, optimizer: str) -> Memory:
    """Estimates the memory of training on each rank's device, without activations and the device's own overhead.

    Args:
        model: the model, on any device, including meta.
        strategy: one of `STRATEGIES`.
        ranks: the number of ranks.
        precision: the precision's full name.
        optimizer: one of `OPTIMIZERS`.

    Example:
        >>> memory(nn.Linear(2, 1), "ddp", 2, "32-true", "adamw")
        Memory(weights=12, gradients=24, optimizer=24, passing=0)
    """
    # fp8 holds weights in 8 bits only during an operation, so it takes as much memory as bf16-mixed.
    precision = "bf16-mixed" if precision in ("fp8", "transformer-engine") else precision
    held = HELD.get(precision)
    states = OPTIMIZERS[optimizer]
    shards = ranks if strategy.startswith("fsdp") else 1
    kept = sum(_shard(p, shards) * (held or p.element_size()) for p in model.parameters())
    trained = sum(_shard(p, shards) * (held or p.element_size()) for p in model.parameters() if p.requires_grad)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    if not strategy.startswith("fsdp"):
        # DDP copies gradients into the buckets it sends; autocast keeps the weights it has cast until the pass ends.
        gradients = 2 * trained if strategy == "ddp" else trained
        cast = sum(p.numel() * 2 for p in model.parameters()) if precision.endswith("mixed") else 0
        return Memory(kept + buffers, gradients, states * trained, cast)
    computed = HALF.get(precision, held or 4)
    whole, largest = sum(p.numel() for p in model.parameters()) * computed, _largest_group(model) * computed
    # The current group and the next one, which is prefetched, and one group's gradients before they are sharded.
    passing = (whole if strategy == "fsdp_shard_grad_op" else 2 * largest) + largest
    if strategy == "fsdp_cpu_offload":
        return Memory(buffers, 0, 0, passing)
    return Memory(kept + buffers, trained, states * trained, passing)


def _shard(parameter: nn.Parameter, ranks: int) -> int:
    """Returns the elements of the largest shard, which is rank 0's: the first dimension is split, rounding up."""
    if not parameter.dim() or ranks == 1:
        return parameter.numel()
    return -(-parameter.shape[0] // ranks) * (parameter.numel() // max(1, parameter.shape[0]))


def _largest_group(model: nn.Module) -> int:
    """Returns the number of elements of FSDP's largest group. The root's own parameters form one group."""
    groups = [model.get_submodule(name) for name in choose(model, "auto").names]
    inside = {parameter for group in groups for parameter in group.parameters()}
    own = sum(parameter.numel() for parameter in model.parameters() if parameter not in inside)
    return max([own, *(sum(parameter.numel() for parameter in group.parameters()) for group in groups)])


# the command ----------------------------------------------------------------------------------------------------------
@click.command("estimate")
@click.argument("model")
@ARGS
@click.option("--ranks", help="World sizes, separated by commas.  [default: 1,2,8; of layouts: as the sizes make up]")
@click.option(
    "--precision",
    "--dtypes",
    "precision",
    default="32-true,bf16-mixed",
    show_default=True,
    help="Precisions, separated by commas.",
)
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), help="[default: adamw; of layouts: the module's own]")
@click.option("--strategy", default="", help="Only these strategies, separated by commas.")
@click.option("--dp_replicate", default="", help="Layouts: copies of the model, as a list.")
@click.option("--dp_shard", default="", help="Layouts: ranks that shard each copy; -1 for all there are.")
@click.option("--tp", default="", help="Layouts: ranks over which layers are split, such as 1,2,4.")
@click.option("--pp", default="", help="Layouts: ranks over which blocks are divided, as stages of a pipeline.")
@click.option("--cp", default="", help="Layouts: ranks over which sequences are divided, such as 1,2,4.")
@click.option("--ep", default="", help="Layouts: ranks that divide experts, a part of dp_shard × cp.")
@click.option("--schedule", metavar="NAME", help="Layouts with pp: the schedule.  [default: 1F1B]")
@click.option("--microbatches", type=int, help="Layouts with pp: micro-batches of a batch.  [default: 4 × pp]")
@click.option("--layouts", "every", is_flag=True, help="Layouts: all those of --ranks that fit.")
@click.option("--plan", metavar="NAME", help="Layouts: a plan in a script or module (train.py:PLAN).")
@click.option("--data", metavar="NAME", help="Layouts: a loader, DataModule, or function that builds one, for a batch.")
@click.option("--batch-size", type=int, help="Layouts: samples of a data rank, for transformers.")
@click.option("--seq-len", type=int, help="Layouts: tokens in each sample, for transformers.")
@click.option(
    "--memory", metavar="SIZE", help="What a rank has, such as 80GiB: says what fits, and fails if nothing does."
)
@DOWNLOAD
def command(
    model: str,
    arguments: dict[str, Any],
    ranks: str | None,
    precision: str,
    optimizer: str | None,
    strategy: str,
    memory: str | None,
    download: bool,
    **mesh: Any,
) -> None:
    """Print the parameters of MODEL and the memory that training it takes on each rank.

    MODEL is an import path (package.module:Class) of a TrainModule or nn.Module, a script (train.py, or train.py:NAME),
    a local Hugging Face folder, or a config.json. It is built on the meta device, which takes no memory. Activations
    come on top and grow with the batch.

    With one of the options of layouts there is a row for each layout of a mesh, and for each stage of a pipeline.
    Activations, and the bytes that a rank sends over each dimension of the mesh, are those of a training step, traced
    on a simulated rank with the first batch of a loader: the module's own, that of the script's only DataModule, or
    --data; for a model of transformers one of --batch-size and --seq-len.
    """
    sizes = [] if ranks is None else [_positive(size) for size in ranks.split(",")]
    precisions = [_precision(name.strip()) for name in precision.split(",")]
    chosen = [name.strip() for name in strategy.split(",") if name.strip()]
    budget = None if memory is None else _bytes(memory)
    unknown = [name for name in chosen if name not in STRATEGIES]
    if unknown:
        raise ConfigurationError(f"--strategy {unknown[0]!r} is not known. {nearest(unknown[0], STRATEGIES)}")
    by_layout = any(mesh.values())
    if by_layout and chosen:
        raise ConfigurationError(f"--strategy {chosen[0]} has no layouts of a mesh: leave it out, or the mesh's sizes.")
    built, note = load_model(model, arguments, download)
    click.echo(describe(model, built, note))
    if by_layout:
        from leyden.cli.estimate.layouts import report

        text, too_large = report(built, sizes, precisions, optimizer, budget=budget, **mesh)
    else:
        optimizer = optimizer or "adamw"
        click.echo(f"\ntraining with {optimizer}, on each rank's device, without activations:")
        text, too_large = table(built, chosen or STRATEGIES, sizes or (1, 2, 8), precisions, optimizer, budget)
    click.echo(text)
    if too_large:
        raise ConfigurationError(too_large)


def describe(name: str, model: nn.Module, note: str = "") -> str:
    """Describes a model in a few lines: parameters, memory, the largest FSDP group."""
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    held, buffers = (
        size_of(sum(tensor.nbytes for tensor in tensors)) for tensors in (model.parameters(), model.buffers())
    )
    rows = [
        ("model", f"{name} ({type(model).__name__})"),
        ("parameters", f"{total:,}, {trained:,} of them trained; {held} as built, buffers {buffers}"),
        ("group", f"FSDP gathers at most {_largest_group(model):,} parameters at once"),
        ("note", note),
    ]
    return "\n".join(aligned([row for row in rows if row[1]]))


def table(
    model: nn.Module,
    strategies: Sequence[str],
    sizes: Sequence[int],
    precisions: Sequence[str],
    optimizer: str,
    budget: int | None,
) -> tuple[str, str | None]:
    """Formats a row for each combination of strategy, world size and precision that is possible.

    Returns:
        The text, and what to do if no row fits into the budget.
    """
    totals: dict[str, int] = {}
    rows: list[tuple[str, ...]] = [
        ("precision", "ranks", "strategy", "weights", "gradients", "optimizer", "passing", "total")
    ]
    for precision in precisions:
        for size in sizes:
            for strategy in strategies:
                if (strategy == "single_device") != (size == 1):
                    continue
                found = memory(model, strategy, size, precision, optimizer)
                parts = (found.weights, found.gradients, found.optimizer, found.passing, found.total)
                rows.append((precision, str(size), strategy, *map(size_of, parts)))
                totals[f"{strategy} on {size} ranks, {precision}"] = found.total
    return "\n".join(aligned(with_budget(rows, [*totals.values()], budget))), shortfall(budget, totals)


def with_budget(
    rows: Sequence[tuple[str, ...]], totals: Sequence[int], budget: int | None, lacks: Sequence[bool] = ()
) -> Sequence[tuple[str, ...]]:
    """Adds a column to a table: whether the total of each row fits into the budget. `lacks`: if more comes on top."""
    if budget is None:
        return rows
    marks = [f"fits {size_of(budget)}"]
    for total, is_least in itertools.zip_longest(totals, lacks, fillvalue=False):
        marks.append("no" if total > budget else "unknown" if is_least else "yes")
    return [(*row, mark) for row, mark in zip(rows, marks, strict=True)]


def shortfall(budget: int | None, totals: Mapping[str, int]) -> str | None:
    """Says what to do if no row's total fits into the budget."""
    if budget is None or not totals or min(totals.values()) <= budget:
        return None
    name = min(totals, key=totals.__getitem__)
    return (
        f"nothing fits in {size_of(budget)}: the least, {size_of(totals[name])} on a rank, is {name}. Shard over more "
        "ranks (--ranks, --dp_shard), split layers or sequences (--tp, --cp), divide experts or blocks (--ep, --pp), "
        "or try --precision bf16-true or a smaller batch. Activation checkpointing, which this table leaves out, keeps "
        "fewer activations."
    )


def _positive(text: str) -> int:
    # Nine digits are a billion ranks.
    if not text.strip().isdecimal() or len(text.strip()) > 9 or not int(text):
        raise ConfigurationError(f"--ranks: {text!r} is not a number of ranks: give some, such as 1,2,8.")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise ConfigurationError(f"--memory {text}: give what a rank has, such as 80GiB or 24GB.")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))


def _precision(name: str) -> str:
    found = ALIASES.get(DTYPES.get(name, name), DTYPES.get(name, name))
    if found not in NAMES:
        raise ConfigurationError(f"--precision {name!r} is not known. {nearest(name, (*NAMES, *ALIASES, *DTYPES))}")
    return found
