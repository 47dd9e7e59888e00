"""`leyden checkpoint` lists, verifies and shows checkpoints; `leyden merge` writes the weights of one into one file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from leyden.checkpoint.format.bucket import Place, place_of
from leyden.checkpoint.format.errors import CheckpointError, NoCheckpointError, blame
from leyden.checkpoint.format.manifest import KEPT, LAYOUT, MANIFEST, OPTIMIZERS
from leyden.checkpoint.format.staging import set_aside
from leyden.checkpoint.merge import merge
from leyden.checkpoint.reader import CheckpointReader
from leyden.core.saved_state import SavedState
from leyden.core.text import aligned, size_of
from leyden.trainer.saved.checkpoint_folders import CHECKPOINTS


@click.group("checkpoint")
def command() -> None:
    """List, verify and show checkpoints. Nothing in a checkpoint is ever executed."""


@command.command("ls")
@click.argument("folder", default=".")
def ls(folder: str) -> int:
    """List the checkpoints in FOLDER, oldest first, and mark damaged ones.

    FOLDER holds the checkpoints, or one or more runs (version_N). It is the current folder by default. This checks
    manifests and file sizes; `verify` compares every byte.
    """
    root = place_of(folder, "FOLDER")
    rows, paths = [], _found_in(root)
    homes = {path.parent for path in paths}
    for path in paths:
        name = path.name if len(homes) == 1 else str(path).removeprefix(f"{root}/")
        try:
            reader = CheckpointReader(path)
            reader.verify_sizes()
        except CheckpointError as error:
            rows.append(((1, "", 0), (name, "", "", "", "", "", f"damaged: {error}")))
            continue
        manifest = reader.manifest
        row = (
            name,
            str(manifest.progress.get("epoch", "")),
            str(manifest.progress.get("global_step", "")),
            manifest.saved_at[:19].replace("T", " "),
            size_of(sum(entry.size for entry in manifest.files.values())),
            f"{manifest.world_size} × {manifest.strategy}",
            "whole" if reader.has(OPTIMIZERS) else "whole, weights only",
        )
        rows.append(((0, str(path.parent), manifest.save_counter), row))
    if not rows:
        click.echo(f"{folder} holds no checkpoints")
        return 0
    table = [("name", "epoch", "step", "saved (UTC)", "size", "ranks", "state"), *(row for _, row in sorted(rows))]
    click.echo("\n".join(aligned(table)))
    return 1 if any("damaged" in row[6] for row in table) else 0


@command.command("verify")
@click.argument("paths", nargs=-1, required=True)
def verify(paths: tuple[str, ...]) -> int:
    """Compare every byte of checkpoints with their checksums. A folder of checkpoints or runs stands for all of them.

    The exit status is 1 if one of them is damaged, or is no checkpoint.
    """
    wrong = 0
    for given in paths:
        root = place_of(given, "PATHS")
        for path in [root] if _is_one(root) else _found_in(root) or [root]:
            try:
                reader = CheckpointReader(path)
                reader.verify()
            except CheckpointError as error:
                click.echo(f"{'none   ' if isinstance(error, NoCheckpointError) else 'damaged'}  {error}")
                wrong += 1
                continue
            files = reader.manifest.files
            click.echo(f"whole    {path} ({len(files)} files, {size_of(sum(file.size for file in files.values()))})")
    return 1 if wrong else 0


@command.command("show")
@click.argument("path")
@click.option("--tensors", is_flag=True, help="List every tensor of the module with dtype and shape.")
def show(path: str, tensors: bool) -> None:
    """Show what a checkpoint holds: progress, hyperparameters, files and weights."""
    reader = CheckpointReader(path)
    manifest = reader.manifest
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    click.echo(
        f"{path}, number {manifest.save_counter} in its folder, saved {manifest.saved_at[:19].replace('T', ' ')} UTC"
    )
    click.echo(
        f"by {versions}, on {manifest.world_size} rank{'s' * (manifest.world_size > 1)}, strategy {manifest.strategy}"
    )
    _section("progress", reader.progress())
    if reader.has("hparams"):
        with blame(reader.path / "hparams.json"):
            hparams = SavedState(reader.state("hparams"))
            kept = {owner: hparams.nested(owner).entries for owner in hparams.entries if owner != KEPT}
        for owner, values in kept.items():
            _section(f"hyperparameters of the {owner}", values)
    _section("files", {name: size_of(entry.size) for name, entry in sorted(manifest.files.items())})
    layout = reader.layout()
    owned = {name: spec for name, spec in layout.items() if "alias_of" not in spec}
    count = sum(math.prod(_shape(spec)) for spec in owned.values())
    tied = f", and {len(layout) - len(owned)} tied names" if len(layout) > len(owned) else ""
    click.echo(f"\nweights: {len(owned)} tensors with {count:,} elements{tied}")
    if tensors:
        for name, spec in layout.items():
            click.echo(f"  {name}  {_described(spec)}")


@click.command("merge")
@click.argument("checkpoint")
@click.argument("out", default=".")
@click.option("--module", metavar="NAME", help="Write only this submodule's weights, without its name in front.")
def merge_command(checkpoint: str, out: str, module: str | None) -> None:
    """Write the weights of CHECKPOINT to one safetensors file, which transformers and safetensors can load.

    OUT is a .safetensors file or a folder (a new folder is written as folder/). If the model is a submodule, --module
    strips its name: with --module net, `net.weight` becomes `weight`.
    """
    path = merge(checkpoint, out, module)
    click.echo(f"{path} ({size_of(path.stat().st_size)})")


def _described(spec: dict[str, Any]) -> str:
    if "alias_of" in spec:
        return f"tied to {spec['alias_of']}"
    part = next(iter(spec["parts"].values()))
    shards = len(part["shards"])
    return f"{part['dtype']} {tuple(_shape(spec))}" + (f" in {shards} shards" if shards > 1 else "")


def _shape(spec: dict[str, Any]) -> list[int]:
    """Returns the shape of a tensor from its entry in the layout."""
    found = spec.get("shape") or next(iter(spec["parts"].values()))["shape"]
    return [int(size) for size in found]


def _section(title: str, values: Mapping[str, Any]) -> None:
    click.echo(f"\n{title}")
    for line in aligned([(str(name), str(value)) for name, value in values.items()]):
        click.echo(f"  {line}")


def _is_one(path: Place) -> bool:
    """Returns True for a folder that is a checkpoint, even a damaged one."""
    return any((path / name).is_file() for name in (MANIFEST, LAYOUT))


def _found_in(root: Place) -> list[Place]:
    """Returns the checkpoints in a folder, or else those in the folders of the runs in it."""
    if not root.is_dir():
        raise CheckpointError(root, "is not a folder: give the one that holds the checkpoints, or a run's.")
    if _is_one(root):
        return []
    homes: list[Place] = [root / CHECKPOINTS]
    if isinstance(root, Path):
        homes += sorted(root.glob(f"**/version_*/{CHECKPOINTS}"))
    return _directly_in(root) or [path for home in homes if home.is_dir() for path in _directly_in(home)]


def _directly_in(root: Place) -> list[Place]:
    """Returns the checkpoints in a folder by name, damaged ones included; those that a killed overwrite set aside come
    first.

    Links such as "last" are left out: the checkpoints they point at are listed.
    """
    aside: list[Place] = [path for path, _ in set_aside(root)] if isinstance(root, Path) else []
    inside: Iterable[Place] = root.iterdir()
    return aside + [
        path
        for path in sorted(inside, key=str)
        if not path.is_symlink() and not path.name.startswith(".") and _is_one(path)
    ]
