"""Maps the weights in a published folder to the parameter names of the transformers model that they belong to.

A folder may store each expert's matrices separately, while the model holds them in one tensor. `transformers` knows the
conversion. Here it becomes a table of shards, so that a rank reads only its part of each matrix.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from leyden.checkpoint.format.shard_table import Table
from leyden.core.errors import ConfigurationError

STACKED = [("MergeModulelist", 0)]
PACKED = [("MergeModulelist", 0), ("Concatenate", 1)]
"""The conversions of transformers that only stack matrices, as operation names with their dimension.

The result has the shape (experts, rows, columns). STACKED takes one matrix of each expert; PACKED also
concatenates the rows of several matrices of an expert.
"""
_WRAPPER = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.")
"""What peft adds to the name of a weight whose layer it wraps. It copies layers that train as a whole."""


def is_model(module: nn.Module) -> bool:
    """Returns True for a transformers model."""
    library: Any = sys.modules.get("transformers")
    return library is not None and isinstance(module, library.PreTrainedModel)


def converted(model: Any, tables: Mapping[str, Table]) -> dict[str, Table]:
    """Returns the tables of a folder's weights under the names in the model's state dict.

    Raises:
        ConfigurationError: if transformers computes a weight from the stored ones; names it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms: list[Any] = get_model_conversion_mapping(model)
    wrapped: dict[str, list[str]] = {}
    for own in model.state_dict():
        wrapped.setdefault(_WRAPPER.sub(".", own), []).append(own)
    found: dict[str, Table] = {}
    stacks: dict[str, list[tuple[int, int, Table]]] = {}
    for key, table in tables.items():
        name, converter, pattern = _model_name(key, transforms)
        if converter is None:
            found[name] = table
            continue
        operations = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations]
        if operations not in (STACKED, PACKED):
            raise ConfigurationError(
                f"transformers computes {name!r} from {key!r} with {', '.join(kind for kind, _ in operations)}, which "
                "Leyden cannot do. Build the model with from_pretrained in configure_model."
            )
        number = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), key)
        stacks.setdefault(name, []).append(
            (converter.source_patterns.index(pattern), int(number[1]) if number else 0, table)
        )
    found |= {name: _stack(parts) for name, parts in stacks.items()}
    return {own: table for name, table in found.items() for own in wrapped.get(name, [name])}


def _model_name(key: str, transforms: list[Any]) -> tuple[str, Any, str]:
    """Returns the model's name for a stored key, and the matching converter and pattern.

    The converter merges several stored tensors into one. It is None if the tensor is stored as the model holds it.
    """
    for transform in transforms:
        if not hasattr(transform, "operations"):
            key, _ = transform.rename_source_key(key)
    for transform in transforms:
        if hasattr(transform, "operations"):
            name, pattern = transform.rename_source_key(key)
            if pattern is not None:
                return name, transform, pattern
    return key, None, ""


def _stack(parts: list[tuple[int, int, Table]]) -> Table:
    """Returns the table of a tensor that stacks matrices.

    Args:
        parts: the matrices. Each is given by its position among those whose rows are concatenated, the index of its
            expert, and its own table.
    """
    rows: dict[int, int] = {}
    for position, _, table in parts:
        rows.setdefault(position, table["shape"][0])
    begins = {position: sum(size for other, size in rows.items() if other < position) for position in rows}
    columns, dtype = parts[0][2]["shape"][1], parts[0][2]["dtype"]
    shards = [
        [*table["shards"][0][:2], [expert, begins[position], 0], [1, *table["shape"]]]
        for position, expert, table in parts
    ]
    count = 1 + max(expert for _, expert, _ in parts)
    return {"dtype": dtype, "shape": [count, sum(rows.values()), columns], "shards": shards}
