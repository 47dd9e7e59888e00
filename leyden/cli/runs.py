"""`leyden runs` lists the runs below a folder."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from leyden.core.errors import ConfigurationError
from leyden.core.paths import local_path
from leyden.core.text import aligned, listed, printable, size_of
from leyden.report.runs import RunSummary, runs_below

HEADER = ("run", "state", "step", "best", "started", "size", "last checkpoint")
ORDERS: dict[str, Callable[[RunSummary], Any]] = {
    "started": lambda run: -(run.started or 0.0),
    "run": lambda run: str(run.path),
    "best": lambda run: (run.best is None, run.metric or "", (run.best or 0.0) * (-1 if run.mode == "max" else 1)),
    "step": lambda run: -1 if run.step is None else -run.step - 2,
    "size": lambda run: -run.size,
}
UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@click.command("runs")
@click.argument("folder", default=".")
@click.option("--sort", type=click.Choice([*ORDERS]), default="started", help="Default: started, the newest first.")
@click.option("--limit", type=click.IntRange(min=1), help="List only the first LIMIT runs.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects with raw values.")
def command(folder: str, sort: str, limit: int | None, as_json: bool) -> None:
    """List the runs in FOLDER and below it: state, step, best metric, start, size and last checkpoint.

    FOLDER is the current folder by default. Nothing is changed, and hidden folders are skipped.
    """
    root = Path(local_path(folder, "FOLDER"))
    if not root.is_dir():
        raise ConfigurationError(f"{printable(folder)} is not a folder: give one that holds runs.")
    found, errors = runs_below(root)
    runs = sorted(sorted(found, key=ORDERS["started"]), key=ORDERS[sort])[:limit]
    if errors:
        names = listed([printable(f"{error.filename} ({error.strerror})") for error in errors], most=3)
        click.echo(f"leyden: not read: {names}", err=True)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(run) for run in runs], indent=1, default=str))
    elif not runs:
        click.echo(f"{printable(folder)} holds no runs")
    else:
        now = time.time()
        click.echo("\n".join(aligned([HEADER, *(_row(run, root, now) for run in runs)], right=[2, 5])))


def _row(run: RunSummary, root: Path, now: float) -> tuple[str, ...]:
    best = "" if run.best is None else f"{run.metric or 'best'}={run.best:.4g}"
    started = "" if run.started is None else f"{_age(now - run.started)} ago"
    step = "" if run.step is None else str(run.step)
    checkpoint = "" if run.checkpoint is None else run.checkpoint.name
    cells = (os.path.relpath(run.path, root), run.state, step, best, started, size_of(run.size), checkpoint)
    return tuple(map(printable, cells))


def _age(seconds: float) -> str:
    """Returns a time in its largest unit.

    Example:
        >>> _age(7300), _age(0)
        ('2 h', '0 s')
    """
    size, unit = next((pair for pair in UNITS if seconds >= pair[0]), UNITS[-1])
    return f"{max(0.0, seconds) // size:.0f} {unit}"
