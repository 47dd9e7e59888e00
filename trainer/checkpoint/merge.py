"""Merges the shards of a checkpoint's weights into one file that safetensors and transformers can load."""

from __future__ import annotations

import os
from pathlib import Path

from leyden.strategies.errors import ConfigurationError, nearest
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.format import staging
from leyden.trainer.format.errors import CheckpointError
from leyden.trainer.format.safefile import write_stream
from leyden.trainer.format.shard_table import Table
from leyden.trainer.format.tensors import TRANSLATED, dtype_named


def merge(path: str | os.PathLike[str], out: str | os.PathLike[str], module_prefix: str | None = None) -> Path:
    """Writes the weights of a checkpoint to one safetensors file, with one tensor at a time in memory.

    Tied weights are stored once, under the first of their names; the header lists the others. Entries from
    `get_extra_state` are not weights, and are left out.

    Args:
        path: the checkpoint.
        out: the file to write, which ends with `.safetensors`, or a folder for `model.safetensors`: an existing one, or
            one whose name ends with `/`. An existing file is replaced.
        module_prefix: write only this submodule's weights, without its name: with "net", `net.weight` becomes `weight`.

    Returns:
        The file.

    Raises:
        CheckpointError: if the checkpoint is damaged, or has a tensor that safetensors cannot store.
        ConfigurationError: if no name begins with the prefix, or `out` is a file with another ending.

    Example:
        >>> import tempfile, torch
        >>> from leyden.trainer.checkpoint.writer import CheckpointWriter
        >>> with CheckpointWriter(f"{tempfile.mkdtemp()}/one") as writer:
        ...     writer.model({"net.weight": torch.ones(2)})
        ...     path = writer.commit(progress={"global_step": 1})
        >>> merge(path, path.parent, module_prefix="net").name
        'model.safetensors'
    """
    reader, target = CheckpointReader(path), Path(os.path.abspath(out))
    if target.is_dir() or os.fspath(out).endswith(("/", os.sep)):
        target = target / "model.safetensors"
    if target.suffix != ".safetensors":
        raise ConfigurationError(f"{target} would hold safetensors under another name: end it with .safetensors.")
    tables, aliases = _named(reader, module_prefix)
    forms = {name: (dtype_named(table["dtype"]), tuple(table["shape"])) for name, table in tables.items()}
    new = staging.sibling(target, "tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_stream(new, forms, lambda name: reader.read_table(tables[name]), {**aliases, "format": "pt"})
        os.replace(new, target)
        staging.fsync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(target, f"cannot be written: {error.strerror or error}.") from error
    finally:
        new.unlink(missing_ok=True)
    return target


def _named(reader: CheckpointReader, module_prefix: str | None) -> tuple[dict[str, Table], dict[str, str]]:
    """Returns the tables of the weights by their new names, and the aliases of tied ones."""
    start = "" if not module_prefix else module_prefix.rstrip(".") + "."
    layout = reader.layout()
    chosen = [name for name in layout if name.startswith(start)]
    if not chosen:
        raise ConfigurationError(
            f"no weight of {reader.path} begins with {start!r}. "
            f"{nearest(start, sorted({n.split('.')[0] for n in layout}))}"
        )
    tables: dict[str, Table] = {}
    aliases: dict[str, str] = {}
    first: dict[str, str] = {}
    for name in chosen:
        owner = layout[name].get("alias_of", name)
        short = name[len(start) :]
        if owner in first:
            aliases[short] = first[owner]
            continue
        first[owner] = short
        spec = layout[owner]
        if list(spec["parts"]) != [""] or dtype_named(spec["dtype"]) in TRANSLATED:
            kind = spec.get("layout", spec["dtype"])
            raise CheckpointError(
                reader.path, f"has {name!r} as {kind}, which safetensors cannot store: convert it first."
            )
        tables[short] = spec["parts"][""]
    return tables, aliases
