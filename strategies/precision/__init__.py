"""Precision plugins, and the names that select them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.core.errors import ConfigurationError, nearest
from leyden.core.lazy import lazy_name
from leyden.core.ported import ported
from leyden.strategies.precision.base import Precision

if TYPE_CHECKING:
    from leyden.strategies.precision.amp import MixedPrecision as MixedPrecision
    from leyden.strategies.precision.fp8 import Float8Precision as Float8Precision
    from leyden.strategies.precision.true import DoublePrecision as DoublePrecision
    from leyden.strategies.precision.true import HalfPrecision as HalfPrecision

_HOMES = {
    "MixedPrecision": "leyden.strategies.precision.amp",
    "Float8Precision": "leyden.strategies.precision.fp8",
    "DoublePrecision": "leyden.strategies.precision.true",
    "HalfPrecision": "leyden.strategies.precision.true",
}
ALIASES = {
    "no": "32-true",
    "fp32": "32-true",
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "fp16": "16-mixed",
    "bf16": "bf16-mixed",
}
NAMES = ("32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "fp8", "transformer-engine")


def find_precision(precision: str | int | Precision | None) -> Precision:
    """Returns the plugin for a precision's name.

    Args:
        precision: a name from `NAMES`, one of the short names `no fp32 fp16 bf16 16 32 64`, a plugin, or None for
            32-true.

    Raises:
        ConfigurationError: if the name is unknown. The message suggests similar names.
        MissingExtraError: if the precision needs a package that is not installed.

    Example:
        >>> find_precision("bf16").name
        'bf16-mixed'
    """
    if isinstance(precision, Precision):
        return precision
    name = "32-true" if precision is None else str(precision)
    name = ALIASES.get(name, name)
    if name == "32-true":
        return Precision()
    if name == "64-true":
        from leyden.strategies.precision.true import DoublePrecision

        return DoublePrecision()
    if name in ("16-mixed", "bf16-mixed"):
        from leyden.strategies.precision.amp import MixedPrecision

        return MixedPrecision("16" if name.startswith("16") else "bf16")
    if name in ("16-true", "bf16-true"):
        from leyden.strategies.precision.true import HalfPrecision

        return HalfPrecision("16" if name.startswith("16") else "bf16")
    if name == "fp8":
        from leyden.strategies.precision.fp8 import Float8Precision

        return Float8Precision()
    if name == "transformer-engine":
        from leyden.strategies.precision.transformer_engine import TransformerEnginePrecision

        return TransformerEnginePrecision()
    if not isinstance(precision, (str, int)):
        fix = f"use one of {', '.join(NAMES)}, or a Precision"
        raise ConfigurationError(f"precision={precision!r}: {ported(precision, fix)}.")
    raise ConfigurationError(f"precision={precision!r} is not known. {nearest(name, (*NAMES, *ALIASES), NAMES)}")


__all__ = [
    "ALIASES",
    "NAMES",
    "DoublePrecision",
    "Float8Precision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "find_precision",
]


def __getattr__(name: str) -> Any:
    """Imports a precision on first use: most runs use one or none."""
    return lazy_name(__name__, _HOMES, name)
