"""fp8 recipes for an Accelerator's `kwargs_handlers`, under Hugging Face Accelerate's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from leyden.accelerator.settings.plugins import KwargsHandler
from leyden.core.errors import ConfigurationError
from leyden.strategies.precision import Precision
from leyden.strategies.precision.fp8_config import NO_MSAMP, precision_of_config


@dataclass
class AORecipeKwargs(KwargsHandler):
    """fp8 with torchao: the arguments of `Float8Precision` that Accelerate has.

    Attributes:
        config: a `Float8LinearConfig` of torchao.
        module_filter_func: function of (module, name) that returns True to convert a Linear; by default all except the
            first and the last are converted.
        pad_inner_dim: as of `Float8Precision`.
        enable_fsdp_float8_all_gather: as of `Float8Precision`.

    Example:
        >>> AORecipeKwargs(pad_inner_dim=False).build().name
        'fp8'
    """

    config: Any = None
    module_filter_func: Callable[[Any, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def build(self) -> Precision:
        """Builds the precision."""
        from leyden.strategies.precision.fp8 import Float8Precision

        arguments = _set_fields(self)
        config, choose = arguments.pop("config", None), arguments.pop("module_filter_func", None)
        if config is not None and arguments:
            raise ConfigurationError(
                f"AORecipeKwargs(config=…) already contains {' and '.join(arguments)}. Set them there, or leave config "
                "out."
            )
        return Float8Precision(config=config, choose=choose, **arguments)


@dataclass(kw_only=True)
class TERecipeKwargs(KwargsHandler):
    """fp8 with Transformer Engine: the arguments of `TransformerEnginePrecision` that Accelerate has.

    None leaves a choice to Transformer Engine, which uses current scaling unless delayed scaling is requested.

    Attributes:
        use_autocast_during_eval: evaluate in fp8 too.
        margin: as of `TransformerEnginePrecision`.
        interval: accepted for Accelerate's scripts; Transformer Engine now computes scales in every step.
        fp8_format: "E4M3", or "HYBRID" for E5M2 gradients.
        amax_history_len: as of `TransformerEnginePrecision`.
        amax_compute_algo: as of `TransformerEnginePrecision`.
        override_linear_precision: as of `TransformerEnginePrecision`.
        use_mxfp8_block_scaling: as of `TransformerEnginePrecision`.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def build(self) -> Precision:
        """Builds the precision."""
        return precision_of_config({**_set_fields(self), "backend": "TE"})


@dataclass(kw_only=True)
class FP8RecipeKwargs(TERecipeKwargs):
    """fp8 with any backend: Accelerate's older class for all recipes.

    Attributes:
        backend: "AO" (torchao) or "TE" (Transformer Engine); by default the one that the other arguments belong to.
        opt_level: argument of MS-AMP, which is refused.

    Example:
        >>> FP8RecipeKwargs(backend="AO").build().name
        'fp8'
    """

    backend: str | None = None
    opt_level: str | None = None

    def build(self) -> Precision:
        """Builds the precision."""
        return precision_of_config(_set_fields(self))


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Refused: MS-AMP is no longer maintained.

    Raises:
        ConfigurationError: always; names the other recipes.
    """

    opt_level: str | None = None

    def __post_init__(self) -> None:
        raise ConfigurationError(f"MSAMPRecipeKwargs: {NO_MSAMP}")


RECIPES = (AORecipeKwargs, TERecipeKwargs, FP8RecipeKwargs)
"""The supported recipes."""


def recipe_of(handlers: Mapping[type, Any], precision: Any) -> Precision | None:
    """Builds the precision of the recipe among the handlers; None without one. Refuses two, and one without fp8."""
    found: list[Any] = [handler for kind in RECIPES if (handler := handlers.get(kind)) is not None]
    if not found:
        return None
    name = type(found[0]).__name__
    if len(found) > 1:
        raise ConfigurationError(f"kwargs_handlers holds {name} and {type(found[1]).__name__}. Pass one fp8 recipe.")
    if precision not in ("fp8", "transformer-engine"):
        raise ConfigurationError(
            f"{name} needs mixed_precision='fp8', but it is {precision or 'no'!r}. Pass both, or neither."
        )
    built: Precision = found[0].build()
    return built


def _set_fields(handler: Any) -> dict[str, Any]:
    """Returns the fields that are set; `override_linear_precision` of three times False counts as unset."""
    return {
        name: value for name, value in vars(handler).items() if value is not None and value != (False, False, False)
    }
