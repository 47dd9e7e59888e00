"""OmegaConf's configurations in saved state: resolved when they are written, and rebuilt when they are read."""

from __future__ import annotations

import sys
from typing import Any

from leyden.checkpoint.format.errors import UnsupportedStateError


def is_config(value: Any) -> bool:
    """True for a DictConfig or a ListConfig."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, (omegaconf.DictConfig, omegaconf.ListConfig))


def entries_of(config: Any) -> dict[str, Any] | None:
    """Returns the entries of a DictConfig by name, with "???" for missing values; None for a ListConfig."""
    from omegaconf import DictConfig, OmegaConf

    if not isinstance(config, DictConfig):
        return None
    return {str(name): "???" if OmegaConf.is_missing(config, name) else config[name] for name in config}


def resolved(config: Any, where: str = "hparams") -> Any:
    """Returns a configuration as plain values, with all interpolations resolved. Missing values stay "???".

    Raises:
        UnsupportedStateError: if an interpolation cannot be resolved.
    """
    import omegaconf

    try:
        plain = omegaconf.OmegaConf.to_container(config, resolve=True)
        _check_resolved(plain)
    except (omegaconf.errors.OmegaConfBaseException, ValueError) as error:
        hint = "Set what it refers to before the run."
        raise UnsupportedStateError(where, f"a configuration that cannot be resolved ({error})", hint) from error
    return plain


def config_of(plain: Any) -> Any:
    """Returns a DictConfig or ListConfig of plain values; the values themselves if OmegaConf is not installed.

    Raises:
        ValueError: for an interpolation such as "${oc.env:HOME}". OmegaConf would call the resolver that it names, and
            a checkpoint must never decide what is called.
    """
    try:
        import omegaconf
    except ImportError:
        return plain
    _check_resolved(plain)
    return omegaconf.OmegaConf.create(plain)


def _check_resolved(plain: Any) -> None:
    if isinstance(plain, str) and "${" in plain:
        raise ValueError(f"{plain!r} holds an interpolation")
    if isinstance(plain, (dict, list)):
        for item in [*plain, *plain.values()] if isinstance(plain, dict) else plain:
            _check_resolved(item)
