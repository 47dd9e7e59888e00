"""`leyden test`: runs a small training on the ranks of the configuration, and checks what comes out."""

from __future__ import annotations

import tempfile
from typing import Any

import click

from leyden.trainer.cli import launch


@click.command(
    "test", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, flags: tuple[str, ...]) -> Any:
    """Try the configuration: a real training of a few steps on its ranks.

    Takes the flags of `leyden launch`, --config_file among them. Checked are collectives, equality with a plain loop,
    accumulation, the precision, and saving and resuming.
    """
    if flags[:1] in (("--help",), ("-h",)):
        click.echo(ctx.get_help())
        return 0
    with tempfile.TemporaryDirectory(prefix="leyden-test-") as folder:
        arguments = [*flags, "--module", "leyden.trainer.cli.trial", folder]
        with launch.command.make_context("leyden test", arguments, parent=ctx.parent) as inner:
            return launch.command.invoke(inner)
