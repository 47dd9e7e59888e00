"""Merges a checkpoint's sharded weights into one file that safetensors and transformers can load."""

from __future__ import annotations

import os
from pathlib import Path

from leyden.checkpoint.format import staging
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.safefile import write_stream
from leyden.checkpoint.format.shard_table import Table
from leyden.checkpoint.format.tensors import TRANSLATED, dtype_named
from leyden.checkpoint.reader import CheckpointReader
from leyden.core.errors import ConfigurationError, nearest
from leyden.core.paths import local_path


def merge(path: str | os.PathLike[str], out: str | os.PathLike[str], module_prefix: str | None = None) -> Path:
    """Writes a checkpoint's weights to one safetensors file, holding one tensor at a time in memory.

    Tied weights are stored once, under the first of their names. The header lists the other names. Entries from
    `get_extra_state` are not weights, and are left out.

    Args:
        path: the checkpoint.
        out: the file to write, with the suffix `.safetensors`. Or a folder in which to write `model.safetensors`: an
            existing folder, or a path that ends with `/`. An existing file is replaced.
        module_prefix: write only this submodule's weights, without its name: with "net", `net.weight` becomes `weight`.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: if the checkpoint is damaged, or has a tensor that safetensors cannot store.
        ConfigurationError: if no name begins with the prefix, or `out` is a file with another suffix.

    Example:
        >>> import tempfile, torch
        >>> from leyden.checkpoint.writer import CheckpointWriter
        >>> with CheckpointWriter(f"{tempfile.mkdtemp()}/one") as writer:
        ...     writer.model({"net.weight": torch.ones(2)})
        ...     path = writer.commit(progress={"global_step": 1})
        >>> merge(path, path.parent, module_prefix="net").name
        'model.safetensors'
    """
    target = Path(os.path.abspath(local_path(out, "out")))
    reader = CheckpointReader(path)
    if target.is_dir() or os.fspath(out).endswith(("/", os.sep)):
        target = target / "model.safetensors"
    if target.suffix != ".safetensors":
        raise ConfigurationError(
            f"{target} would be a safetensors file with another suffix. End its name with .safetensors."
        )
    tables, aliases = _chosen_tables(reader, module_prefix)
    forms = {name: (dtype_named(table["dtype"]), tuple(table["shape"])) for name, table in tables.items()}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with staging.replacing(target) as new:
            write_stream(new, forms, lambda name: reader.read_table(tables[name]), {**aliases, "format": "pt"})
        staging.fsync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(target, f"cannot be written: {error.strerror or error}.") from error
    return target


def _chosen_tables(reader: CheckpointReader, module_prefix: str | None) -> tuple[dict[str, Table], dict[str, str]]:
    """Returns the tables of the weights by their new names, and the aliases of tied weights."""
    prefix = "" if not module_prefix else module_prefix.rstrip(".") + "."
    layout = reader.layout()
    chosen = [name for name in layout if name.startswith(prefix)]
    if not chosen:
        raise ConfigurationError(
            f"no weight of {reader.path} begins with {prefix!r}. "
            f"{nearest(prefix, sorted({n.split('.')[0] for n in layout}))}"
        )
    tables: dict[str, Table] = {}
    aliases: dict[str, str] = {}
    first_names: dict[str, str] = {}
    for name in chosen:
        owner = layout[name].get("alias_of", name)
        short_name = name[len(prefix) :]
        if owner in first_names:
            aliases[short_name] = first_names[owner]
            continue
        first_names[owner] = short_name
        spec = layout[owner]
        if list(spec["parts"]) != [""] or dtype_named(spec["dtype"]) in TRANSLATED:
            kind = spec.get("layout", spec["dtype"])
            raise CheckpointError(
                reader.path, f"has {name!r} as {kind}, which safetensors cannot store. Convert it first."
            )
        tables[short_name] = spec["parts"][""]
    return tables, aliases
