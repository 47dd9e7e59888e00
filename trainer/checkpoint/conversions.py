"""The weights of a transformers model as published folders name them, under the names that the model gives them.

A folder may have every expert's matrices by themselves, which the model holds in one tensor. `transformers` knows how
they belong together; here that becomes a table of shards, so that a rank reads of each matrix no more than its part.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from leyden.strategies.errors import ConfigurationError
from leyden.trainer.format.shard_table import Table

STACKED = [("MergeModulelist", 0)]
PACKED = [("MergeModulelist", 0), ("Concatenate", 1)]
"""Operations, with their dimension, that put matrices side by side: (experts, rows, columns)."""


def is_model(module: nn.Module) -> bool:
    """Returns True for a model of transformers."""
    library: Any = sys.modules.get("transformers")
    return library is not None and isinstance(module, library.PreTrainedModel)


def converted(model: Any, tables: Mapping[str, Table]) -> dict[str, Table]:
    """Returns the tables of a folder's weights under the names of the model's state dict.

    Raises:
        ConfigurationError: if transformers computes a weight from those in the folder; names it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms: list[Any] = get_model_conversion_mapping(model)
    found: dict[str, Table] = {}
    stacks: dict[str, list[tuple[int, int, Table]]] = {}
    for key, table in tables.items():
        name, converter, pattern = _renamed(key, transforms)
        if converter is None:
            found[name] = table
            continue
        operations = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations]
        if operations not in (STACKED, PACKED):
            raise ConfigurationError(
                f"transformers computes {name!r} from {key!r} by {', '.join(kind for kind, _ in operations)} as it "
                "loads the folder, which only it can: build the model by from_pretrained in configure_model."
            )
        number = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), key)
        stacks.setdefault(name, []).append(
            (converter.source_patterns.index(pattern), int(number[1]) if number else 0, table)
        )
    return found | {name: _stack(parts) for name, parts in stacks.items()}


def _renamed(key: str, transforms: list[Any]) -> tuple[str, Any, str]:
    """Returns the model's name for a stored key, and the transform and pattern that make one tensor of several."""
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
        parts: which of the matrices that lie side by side each is, its number in the stack, and its own table.
    """
    rows: dict[int, int] = {}
    for place, _, table in sorted(parts, key=lambda part: part[0]):
        rows.setdefault(place, table["shape"][0])
    begins = {place: sum(size for other, size in rows.items() if other < place) for place in rows}
    columns, dtype = parts[0][2]["shape"][1], parts[0][2]["dtype"]
    shards = [
        [*table["shards"][0][:2], [number, begins[place], 0], [1, *table["shape"]]] for place, number, table in parts
    ]
    count = 1 + max(number for _, number, _ in parts)
    return {"dtype": dtype, "shape": [count, sum(rows.values()), columns], "shards": shards}
