"""Converts metrics and hyperparameters to the plain numbers and text that loggers write."""

from __future__ import annotations

import json
import math
import numbers as abstract_numbers
from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeAlias

from torch import Tensor

from leyden.checkpoint.format.configs import is_config, resolved
from leyden.checkpoint.format.secrets import masked_values
from leyden.core.errors import ConfigurationError, kind_of
from leyden.trainer.hparams import mapping_of

STARTS = "starts"
"""The folder in a run's folder with a record of each start."""
HParams: TypeAlias = Mapping[str, Any] | Namespace | None
"""Hyperparameters as loggers accept them. A dataclass works too."""


def plain_numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Returns metrics, which must be single numbers, as plain ones. Nested metrics become "outer/inner"."""
    plain: dict[str, float] = {}
    for key, value in metrics.items():
        name = f"{prefix}-{key}" if prefix else str(key)
        if type(value) is float or type(value) is int:
            plain[name] = value
        elif isinstance(value, Mapping):
            plain.update({f"{name}/{inner}": number for inner, number in plain_numbers(value).items()})
        else:
            plain[name] = _one_number(name, value)
    return plain


def _one_number(name: str, value: Any) -> float:
    # Tensors, and NumPy arrays and scalars, whose `size` is a number.
    if (isinstance(value, Tensor) and value.numel() == 1) or getattr(value, "size", 0) == 1:
        value = value.item()
    if isinstance(value, abstract_numbers.Integral):
        return int(value)
    if isinstance(value, abstract_numbers.Real):
        return float(value)
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise ConfigurationError(
        f"the metric '{name}' is {kind_of(value)}{shape}, but loggers take single numbers. Log its mean or sum. For "
        "text, images and so on, call logger.experiment."
    )


def as_dict(params: Any) -> dict[str, Any]:
    """Converts a mapping, a Namespace or a dataclass to a dict with secrets masked, and None to an empty dict."""
    found = {} if params is None else mapping_of(params)
    if found is None:
        raise ConfigurationError(
            f"hyperparameters must be a dict, an argparse.Namespace or a dataclass, not {kind_of(params)}. "
            "Call log_hyperparams({'name': value})."
        )
    return dict(masked_values(found))


def flatten_hparams(params: Any) -> dict[str, bool | int | float | str]:
    """Flattens nested hyperparameters to one level, such as `{"optimizer/lr": 0.1}`.

    Values other than numbers and bools become strings.

    Example:
        >>> flatten_hparams({"optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}, "name": None})
        {'optimizer/lr': 0.1, 'optimizer/betas': '(0.9, 0.99)', 'name': 'None'}
    """
    flat: dict[str, bool | int | float | str] = {}
    for key, value in as_dict(params).items():
        if mapping_of(value) is not None:
            flat.update({f"{key}/{inner}": leaf for inner, leaf in flatten_hparams(value).items()})
        else:
            leaf = json_value(value)
            flat[key] = leaf if isinstance(leaf, bool | int | float | str) else _text(value)
    return flat


def _text(value: Any) -> str:
    return str(getattr(value, "__name__", value)) if callable(value) else str(value)


def json_value(value: Any) -> Any:
    """Converts a value to strict JSON. The conversion is one-way: the value cannot be loaded back."""
    if is_config(value):
        value = resolved(value)
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if (entries := mapping_of(value)) is not None:
        return {key: json_value(item) for key, item in entries.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((json_value(item) for item in value), key=str)
    if hasattr(value, "dtype") and hasattr(value, "tolist") and getattr(value, "ndim", 1) == 0:
        return json_value(value.tolist())
    return _text(value)


def json_text(value: Any) -> str:
    """Returns a value as indented, strict JSON text for a file."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def run_files(record: Mapping[str, Any], diff: str) -> dict[str, str]:
    """Returns the content of each file that `Logger.log_run` writes, by its path relative to the run folder.

    Example:
        >>> list(run_files({"started": "2026-02-01T12:30:00.250Z"}, "diff --git …"))
        ['starts/2026-02-01T12-30-00.250Z/run.json', 'starts/2026-02-01T12-30-00.250Z/diff.patch']
    """
    # Windows does not allow colons in file names.
    folder = f"{STARTS}/{str(record['started']).replace(':', '-')}"
    files = {f"{folder}/run.json": json_text(json_value(record))}
    return {**files, f"{folder}/diff.patch": diff} if diff else files
