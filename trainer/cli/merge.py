"""`leyden merge`: one file of weights from a checkpoint of any number of shards."""

from __future__ import annotations

import click

from leyden.trainer.checkpoint.merge import merge
from leyden.trainer.format.text import size_of


@click.command("merge")
@click.argument("checkpoint")
@click.argument("out", default=".")
@click.option("--module", metavar="NAME", help="Only the weights of this part of the module, and without its name.")
def command(checkpoint: str, out: str, module: str | None) -> None:
    """Write the weights of CHECKPOINT to OUT, a file or a folder (also a new one, as folder/), as one safetensors file.

    transformers and safetensors load it. Where a model is a part of the module, --module strips its name: `net.weight`
    becomes `weight` by --module net.
    """
    path = merge(checkpoint, out, module)
    click.echo(f"{path} ({size_of(path.stat().st_size)})")
