"""`leyden report` draws runs in one HTML file."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("-o", "--output", metavar="FILE", help="The file to write. Default: report.html in the folder of RUN.")
def command(runs: tuple[str, ...], output: str | None) -> None:
    """Draw one or more runs in one HTML file that needs no network.

    RUN is the folder of a run, such as logs/version_0. Several runs share the charts; their report is written to the
    working directory.
    """
    from leyden.report import write_report
    from leyden.report.recorded import PAGE

    path = output or (Path(runs[0]) / PAGE if len(runs) == 1 else Path(PAGE))
    click.echo(write_report(runs, path))
