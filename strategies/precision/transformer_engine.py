"""fp8 by NVIDIA's Transformer Engine: `transformer-engine`.

Written against its documented interface (releases 1.12 to 2.15); it has not run here, where there is no GPU that it
supports.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from leyden.strategies.errors import ConfigurationError, MissingExtraError, nearest
from leyden.strategies.precision.amp import MixedPrecision
from leyden.strategies.precision.base import restore_layers
from leyden.strategies.precision.fp8 import check_device, converted_in_words
from leyden.strategies.precision.fp8_layers import Filter, Layers

FORMATS = ("HYBRID", "E4M3")
DELAYED = ("margin", "amax_history_len", "amax_compute_algo", "override_linear_precision")
"""Arguments of the recipe that scales by a history of earlier steps."""


class TransformerEnginePrecision(MixedPrecision):
    """`transformer-engine`: `bf16-mixed`, and Linear layers that Transformer Engine computes in fp8.

    Layers are chosen as under `fp8`, and the names in checkpoints stay as they are. Operands are scaled by their own
    largest value, unless an argument of delayed scaling is given: its history of earlier steps is no part of a
    checkpoint (Transformer Engine keeps it in a pickle), so that a resumed run begins with an empty one and is not bit
    for bit the same. The number of tokens of a batch must be divisible by 8.

    Args:
        skip: as of `Float8Precision`.
        first_and_last: as of `Float8Precision`.
        choose: as of `Float8Precision`.
        fp8_format: "HYBRID" (gradients in E5M2) or "E4M3".
        use_mxfp8_block_scaling: one scale for each 32 values, which Blackwell has.
        in_evaluation: compute in fp8 where gradients are off, too; False, the default, evaluates in bf16.
        recipe: a recipe of `transformer_engine.common.recipe` in place of these two and the following.
        **delayed: of its DelayedScaling: margin, amax_history_len, amax_compute_algo, override_linear_precision.

    Raises:
        ConfigurationError: for a value that is not valid.
        MissingExtraError: from the Trainer or Accelerator, if it is not installed.
    """

    def __init__(
        self,
        *,
        skip: Sequence[type | str] = (),
        first_and_last: bool = False,
        choose: Filter | None = None,
        fp8_format: str = "HYBRID",
        use_mxfp8_block_scaling: bool = False,
        in_evaluation: bool = False,
        recipe: Any = None,
        **delayed: Any,
    ) -> None:
        for name in delayed:
            if name not in DELAYED:
                raise ConfigurationError(
                    f"TransformerEnginePrecision has no argument {name!r}. {nearest(name, DELAYED)}"
                )
        if fp8_format not in FORMATS:
            raise ConfigurationError(
                f"fp8_format={fp8_format!r}: forward and backward together are 'HYBRID' or 'E4M3'; E5M2 alone is too "
                "coarse for what goes forward."
            )
        if use_mxfp8_block_scaling and delayed:
            raise ConfigurationError(
                f"use_mxfp8_block_scaling scales by blocks, and {next(iter(delayed))} is of delayed scaling: leave one "
                "out."
            )
        super().__init__("bf16")
        self.name = "transformer-engine"
        self.layers = Layers(skip, first_and_last, choose)
        self.fp8_format = fp8_format
        self.use_mxfp8_block_scaling = use_mxfp8_block_scaling
        self.in_evaluation = in_evaluation
        self.delayed: Mapping[str, Any] = delayed
        self.recipe = recipe
        self.form = "fp8 by Transformer Engine"
        self.forward_context = self._fp8

    def check_package(self) -> None:
        if importlib.util.find_spec("transformer_engine") is None:
            raise MissingExtraError("transformer-engine[pytorch]", None, "precision='transformer-engine'")

    def check(self, device: torch.device) -> None:
        super().check(device)
        if device.type != "cuda":
            raise ConfigurationError(
                f"precision='transformer-engine' needs a CUDA GPU: on {device.type} use precision='bf16-mixed'"
                f"{', or fp8, which the CPU emulates' if device.type == 'cpu' else ''}."
            )
        check_device(device, "precision='transformer-engine'")
        self.recipe = self.recipe if self.recipe is not None else self._recipe()

    def use_autocast(self, make: Callable[[], torch.autocast]) -> None:
        self._autocast = make  # type: ignore[method-assign]

    def _recipe(self) -> Any:
        from transformer_engine.common import recipe

        chosen = getattr(recipe.Format, self.fp8_format)
        if self.use_mxfp8_block_scaling:
            return recipe.MXFP8BlockScaling(fp8_format=chosen)
        if self.delayed:
            return recipe.DelayedScaling(fp8_format=chosen, **self.delayed)
        return recipe.Float8CurrentScaling(fp8_format=chosen)

    @contextmanager
    def _fp8(self) -> Iterator[None]:
        import transformer_engine.pytorch as te

        enabled = self.in_evaluation or torch.is_grad_enabled()
        # Its name up to release 2.8, with another name of the argument.
        context = (
            te.autocast(enabled=enabled, recipe=self.recipe)
            if hasattr(te, "autocast")
            else te.fp8_autocast(enabled=enabled, fp8_recipe=self.recipe)
        )
        with self._autocast(), context:
            yield

    def convert_module(self, module: nn.Module) -> nn.Module:
        restore_layers(module)
        chosen = self.layers.of(module)
        if chosen.names:
            kind = _linear_class()
            for name in chosen.names:
                _convert(module.get_submodule(name), kind)
        else:
            chosen.warn(self.name, module)
        return module

    def describe(self, modules: Sequence[nn.Module]) -> str:
        return f"{type(self.recipe).__name__} in {converted_in_words(modules)}"


def _linear_class() -> Any:
    """Transformer Engine's Linear without extra state, which would be a pickle: loading it would run code."""
    import transformer_engine.pytorch as te

    class Linear(te.Linear):  # type: ignore[misc]
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

    return Linear


def _convert(linear: nn.Module, kind: Any) -> None:
    """Makes a Linear one of Transformer Engine's, in place: the object, its parameters, hooks and names stay."""
    assert isinstance(linear, nn.Linear)
    weight = linear.weight
    made = kind(
        linear.in_features, linear.out_features, bias=linear.bias is not None, params_dtype=weight.dtype, device="cuda"
    )
    settings = {name: value for name, value in vars(made).items() if name not in vars(linear)}
    for name, parameter in linear.named_parameters(recurse=False):
        # Marks that it leaves on its own parameters.
        parameter.__dict__.update(vars(getattr(made, name)))
    linear.__dict__["_leyden_plain"] = (type(linear), tuple(settings))
    linear.__dict__.update(settings)
    linear.__class__ = kind
