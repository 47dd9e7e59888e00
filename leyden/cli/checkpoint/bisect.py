"""`leyden bisect` names the first step after which the weights of two runs differ, by the digests they recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from leyden.checkpoint.format.digests import NAMES, DigestsError, Record, read_digests
from leyden.core.paths import local_path
from leyden.core.text import listed

SHOWN = 10
"""Largest number of tensors, or files, that the output names."""


@dataclass
class Comparison:
    """The result of comparing two runs.

    Attributes:
        steps: number of steps that both runs have recorded, up to the first that differs.
        first_step: the first such step, or None.
        agrees_at: the last step at which all digests are equal, or None.
        differs_at: the first step at which some digests differ, or None.
        tensors: names of the tensors that differ there, in the module's order.
    """

    steps: int = 0
    first_step: int | None = None
    agrees_at: int | None = None
    differs_at: int | None = None
    tensors: list[str] = field(default_factory=list)

    def take(self, step: int, tensors: list[str]) -> None:
        """Adds a step that both runs have recorded, and the tensors that differ at it."""
        self.steps += 1
        self.first_step = step if self.first_step is None else self.first_step
        if tensors:
            self.differs_at, self.tensors = step, tensors
        else:
            self.agrees_at = step

    def __str__(self) -> str:
        if self.differs_at is None:
            return f"equal: {self.steps} common step{'s'[: self.steps != 1]}, {self.first_step} to {self.agrees_at}"
        if self.agrees_at is not None:
            ends = self.agrees_at + 1, self.differs_at
            where = f"step {ends[1]}" if ends[0] == ends[1] else f"one of the steps {ends[0]} to {ends[1]}"
            found = f"first difference: {where}; the runs agree after step {self.agrees_at}"
        elif self.differs_at == 0:
            found = "first difference: before the first step; the runs begin with other weights"
        else:
            found = f"first difference: step {self.differs_at} or before; it is the first that both runs recorded"
        lines = [found, *(f"  {name}" for name in self.tensors[:SHOWN])]
        if len(self.tensors) > SHOWN:
            lines.append(f"  and {len(self.tensors) - SHOWN} more (--json lists all)")
        return "\n".join(lines)


@click.command("bisect")
@click.argument("run_a")
@click.argument("run_b")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON.")
def command(run_a: str, run_b: str, as_json: bool) -> int:
    """Name the first step after which the weights of two runs differ, and the parameters and buffers that do.

    RUN_A and RUN_B are the folders of runs trained with Trainer(digest_every_n_steps=N), or their digest files. N = 1
    finds the exact step, a larger N an interval. Tensors are listed in the module's order.

    The exit status is 0 if the runs agree at every step that both have recorded, 1 if they differ, and 2 if they cannot
    be compared.
    """
    found = compared(file_of(run_a), file_of(run_b))
    click.echo(json.dumps(asdict(found)) if as_json else str(found))
    return 0 if found.differs_at is None else 1


def compared(one: Path, other: Path) -> Comparison:
    """Compares two digest files, up to the first step at which they differ.

    Raises:
        DigestsError: if they cannot be compared.
    """
    found = Comparison()
    for here, there in _common(one, other):
        check_forms(here, there, one, other)
        found.take(here.step, [name for name in here.digests if here.digests[name] != there.digests[name]])
        if found.differs_at is not None:
            break
    if not found.steps:
        recorded = [_described(path) for path in (one, other)]
        raise DigestsError(
            f"the runs have no step in common: {'; '.join(recorded)}. Train both with the same digest_every_n_steps."
        )
    return found


def _common(one: Path, other: Path) -> Iterator[tuple[Record, Record]]:
    """Yields the records of the steps that both files have."""
    mine, theirs = read_digests(one), read_digests(other)
    here, there = next(mine, None), next(theirs, None)
    while here is not None and there is not None:
        if here.step == there.step:
            yield here, there
            here, there = next(mine, None), next(theirs, None)
        elif here.step < there.step:
            here = next(mine, None)
        else:
            there = next(theirs, None)


def check_forms(here: Record, there: Record, one: Path, other: Path) -> None:
    """Checks that two records have digests of the same tensors and shards.

    Raises:
        DigestsError: if they do not; names the tensors.
    """
    lines = [f"only in {one}: {_only_in(here, there)}"]
    lines += [f"only in {other}: {_only_in(there, here)}"]
    lines = [line for line in lines if not line.endswith(": ")]
    both = [name for name in here.digests if name in there.digests]
    changed = [name for name in both if here.digests[name].form != there.digests[name].form]
    for name in changed[:SHOWN]:
        lines.append(f"{name} is {here.digests[name].form} in {one} and {there.digests[name].form} in {other}")
    if lines:
        more = f"; and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        raise DigestsError(
            f"at step {here.step} the runs have different tensors or shards, whose digests cannot be compared: "
            f"{'; '.join(lines)}{more}. Compare runs of the same module and the same layout of ranks."
        )


def _only_in(record: Record, other: Record) -> str:
    return listed([name for name in record.digests if name not in other.digests], SHOWN)


def _described(path: Path) -> str:
    steps = [record.step for record in read_digests(path)]
    if not steps:
        return f"{path} has none"
    shown = [*map(str, steps[:2]), *(["…"] if len(steps) > 3 else []), *map(str, steps[2:][-1:])]
    return f"{path} has {', '.join(shown)}"


def file_of(run: str) -> Path:
    """Returns a run's digest file, given the file itself or the run's folder.

    Raises:
        DigestsError: if there is no such file, or more than one.
    """
    path = Path(local_path(run, "RUN"))
    if path.is_file():
        return path
    if not path.is_dir():
        raise DigestsError(f"{run}: there is no such run. Give its folder, or its digest file.")
    found = sorted(file for file in path.iterdir() if NAMES.fullmatch(file.name))
    if len(found) == 1:
        return found[0]
    if found:
        raise DigestsError(
            f"{run} has the digests of {len(found)} runs. Give one of the files: {listed(found, SHOWN)}."
        )
    below = list(dict.fromkeys(file.parent for file in files_below(path)))
    hint = f"Did you mean one of {listed(below, SHOWN)}?" if below else "Train with Trainer(digest_every_n_steps=1)."
    raise DigestsError(f"{run} has no digests. {hint}")


def files_below(run: Path) -> list[Path]:
    """Returns the digest files in a folder and its subfolders."""
    return sorted(path for path in run.glob("**/digests*.jsonl") if NAMES.fullmatch(path.name))
