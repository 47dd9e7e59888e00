"""The fp8 recipes among an Accelerator's `kwargs_handlers`, under the names of Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.precision import Precision
from leyden.strategies.precision.fp8_config import NO_MSAMP, precision_of_config
from leyden.trainer.accelerator.plugins import Handlers, KwargsHandler


@dataclass
class AORecipeKwargs(KwargsHandler):
    """fp8 by torchao: the arguments of `Float8Precision` that Accelerate has.

    Attributes:
        config: a `Float8LinearConfig` of torchao.
        module_filter_func: takes (module, name) and says whether a Linear is converted; by default all but the first
            and the last are.
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
        """The precision."""
        from leyden.strategies.precision.fp8 import Float8Precision

        given = {
            "pad_inner_dim": self.pad_inner_dim,
            "enable_fsdp_float8_all_gather": self.enable_fsdp_float8_all_gather,
        }
        arguments: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.config is not None and arguments:
            raise ConfigurationError(
                f"AORecipeKwargs(config=…) has {' and '.join(arguments)} in it: set them there, or leave config out."
            )
        return Float8Precision(config=self.config, choose=self.module_filter_func, **arguments)


@dataclass(kw_only=True)
class TERecipeKwargs(KwargsHandler):
    """fp8 by Transformer Engine: the arguments of `TransformerEnginePrecision` that Accelerate has.

    What is None is left to Transformer Engine, which scales by the current values unless delayed scaling is asked for.

    Attributes:
        use_autocast_during_eval: evaluate in fp8 too.
        margin: as of `TransformerEnginePrecision`.
        interval: accepted for scripts that give it; Transformer Engine now computes the scales in each step.
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
        """The precision."""
        return precision_of_config({**_set(self), "backend": "TE"})


@dataclass(kw_only=True)
class FP8RecipeKwargs(TERecipeKwargs):
    """fp8 by any backend, under the older name for all of them.

    Attributes:
        backend: "AO" (torchao) or "TE" (Transformer Engine); left out, the one that the other arguments belong to.
        opt_level: of MS-AMP, which is refused.

    Example:
        >>> FP8RecipeKwargs(backend="AO").build().name
        'fp8'
    """

    backend: str | None = None
    opt_level: str | None = None

    def build(self) -> Precision:
        """The precision."""
        return precision_of_config(_set(self))


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Refused: MS-AMP is no longer maintained.

    Raises:
        ConfigurationError: always; names the other recipes.
    """

    opt_level: str | None = None

    def __post_init__(self) -> None:
        raise ConfigurationError(f"MSAMPRecipeKwargs: {NO_MSAMP}: use AORecipeKwargs() or TERecipeKwargs().")


RECIPES = (AORecipeKwargs, TERecipeKwargs, FP8RecipeKwargs)
"""Those that can be made."""


def recipe_of(handlers: Handlers, precision: Any) -> Precision | None:
    """Builds the precision of the recipe among the handlers; None if there is no recipe.

    Args:
        handlers: those of an Accelerator.
        precision: what it was given, or was filled with.

    Raises:
        ConfigurationError: for two recipes, and for one without fp8.
    """
    found: list[Any] = [handler for kind in RECIPES if (handler := handlers.get(kind)) is not None]
    if not found:
        return None
    name = type(found[0]).__name__
    if len(found) > 1:
        raise ConfigurationError(f"kwargs_handlers holds {name} and {type(found[1]).__name__}: give one recipe of fp8.")
    if precision not in ("fp8", "transformer-engine"):
        raise ConfigurationError(
            f"{name} goes with mixed_precision='fp8', and it is {precision or 'no'!r}: give both, or neither."
        )
    built: Precision = found[0].build()
    return built


def _set(handler: Any) -> dict[str, Any]:
    """Returns the fields that are set; three times False for `override_linear_precision` counts as unset."""
    return {
        name: value for name, value in vars(handler).items() if value is not None and value != (False, False, False)
    }
