"""Maps Accelerate's fp8 keys, from `fp8_config` in a configuration file or from a script's recipe, to a Precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leyden.core.errors import ConfigurationError, nearest
from leyden.strategies.precision.base import Precision
from leyden.strategies.precision.fp8 import Float8Precision

BACKENDS = ("AO", "TE")
NO_MSAMP = "MS-AMP is no longer maintained. Use AO (torchao) or TE (Transformer Engine)."
AO = {
    "use_autocast_during_eval": "in_evaluation",
    "enable_fsdp_float8_all_gather": "enable_fsdp_float8_all_gather",
    "pad_inner_dim": "pad_inner_dim",
}
"""Keys of torchao -> arguments of Float8Precision."""
TE = {
    "use_autocast_during_eval": "in_evaluation",
    "use_mxfp8_block_scaling": "use_mxfp8_block_scaling",
    "format": "fp8_format",
    "margin": "margin",
    "amax_history_len": "amax_history_len",
    "amax_compute_algo": "amax_compute_algo",
    "override_linear_precision": "override_linear_precision",
}
"""Keys of Transformer Engine -> arguments of TransformerEnginePrecision."""
NOTHING = {
    "interval": "Transformer Engine now computes scales in each step",
    "opt_level": "it belongs to MS-AMP",
}
OLDER = {"amax_history_length": "amax_history_len", "fp8_format": "format", "optimization_level": "opt_level"}


def precision_of_config(config: Mapping[str, Any]) -> Precision:
    """Returns the precision that the keys of `fp8_config` describe.

    Args:
        config: keys with or without the prefix `fp8_`. None leaves a key at its default.

    Raises:
        ConfigurationError: for an unknown key or backend, and for MS-AMP.

    Example:
        >>> precision_of_config({"fp8_backend": "AO", "fp8_pad_inner_dim": False}).name
        'fp8'
    """
    keys = _normalized(config)
    backend = backend_of(config)
    known = AO if backend == "AO" else TE
    arguments = {known[name]: value for name, value in keys.items() if name in known}
    if backend == "AO":
        return Float8Precision(**arguments)
    from leyden.strategies.precision.transformer_engine import TransformerEnginePrecision

    return TransformerEnginePrecision(**arguments)


def backend_of(config: Mapping[str, Any]) -> str:
    """Returns the backend, AO or TE: as named, or else as implied by the keys. Default: AO.

    Raises:
        ConfigurationError: for an unknown backend, and for MS-AMP.

    Example:
        >>> backend_of({"fp8_margin": 0}), backend_of({"backend": "te"}), backend_of({})
        ('TE', 'TE', 'AO')
    """
    keys = _normalized(config)
    backend = str(keys.get("backend") or "").upper()
    if backend == "MSAMP" or (not backend and "opt_level" in keys):
        raise ConfigurationError(f"fp8_backend: MSAMP: {NO_MSAMP}")
    if backend in BACKENDS:
        return backend
    if backend:
        raise ConfigurationError(f"fp8_backend: {keys['backend']!r} is not known. {nearest(backend, BACKENDS)}")
    return "TE" if any(name in TE and name not in AO for name in keys) else "AO"


def without_effect(config: Mapping[str, Any], is_fsdp: bool) -> dict[str, str]:
    """Returns the keys without effect, with reasons: keys of another backend, and FSDP keys under other strategies.

    Example:
        >>> without_effect({"fp8_backend": "AO", "fp8_margin": 0}, is_fsdp=False)
        {'fp8_margin': 'it belongs to the backend TE, and this one is AO.'}
    """
    backend, found = backend_of(config), {}
    for name in config:
        key = _normalized({name: ...}).popitem()[0]
        if key == "backend" or config[name] is None:
            continue
        if key in NOTHING:
            found[name] = f"{NOTHING[key]}."
        elif key not in (AO if backend == "AO" else TE):
            found[name] = f"it belongs to the backend {'TE' if key in TE else 'AO'}, and this one is {backend}."
        elif key == "enable_fsdp_float8_all_gather" and not is_fsdp:
            found[name] = "only FSDP gathers weights."
    return found


def _normalized(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that are set, under their current names and without the prefix.

    Raises:
        ConfigurationError: for an unknown key.
    """
    known = {"backend", *AO, *TE, *NOTHING}
    found = {}
    for name, value in config.items():
        key = OLDER.get(name, name.removeprefix("fp8_"))
        key = OLDER.get(key, key)
        if key not in known:
            raise ConfigurationError(f"fp8_config: the key {name!r} is not known. {nearest(key, sorted(known))}")
        if value is not None:
            found[key] = value
    return found
