"""fp8 through NVIDIA's Transformer Engine: `transformer-engine`.

Written against its documented interface (releases 1.12 to 2.15), but never run, for lack of a supported GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from leyden.core.errors import ConfigurationError, MissingExtraError, nearest
from leyden.strategies.precision.amp import MixedPrecision
from leyden.strategies.precision.base import restore_layers
from leyden.strategies.precision.fp8 import check_device, converted_in_words
from leyden.strategies.precision.fp8_layers import Filter, Layers

FORMATS = ("HYBRID", "E4M3")
DELAYED = ("margin", "amax_history_len", "amax_compute_algo", "override_linear_precision")
"""Arguments of the delayed-scaling recipe, which scales by a history of earlier steps."""


class TransformerEnginePrecision(MixedPrecision):
    """`transformer-engine`: `bf16-mixed`, with Linear layers that Transformer Engine computes in fp8.

    Layers are chosen as under `fp8`, and the names in checkpoints stay the same. Operands are scaled by their own
    largest value, unless an argument of delayed scaling is given. Delayed scaling uses a history of earlier steps that
    Transformer Engine keeps in a pickle, so checkpoints do not include it: a resumed run starts with an empty history
    and is not bit-identical. A batch's number of tokens must be divisible by 8.

    Args:
        skip: see `Float8Precision`.
        first_and_last: see `Float8Precision`.
        choose: see `Float8Precision`.
        fp8_format: "HYBRID" (gradients in E5M2) or "E4M3".
        use_mxfp8_block_scaling: whether to use one scale per 32 values, which needs Blackwell.
        in_evaluation: whether to compute in fp8 without gradients too. False evaluates in bf16.
        recipe: a recipe of `transformer_engine.common.recipe`, instead of fp8_format, use_mxfp8_block_scaling and
            `**delayed`.
        **delayed: arguments of its DelayedScaling: margin, amax_history_len, amax_compute_algo,
            override_linear_precision.

    Raises:
        ConfigurationError: for an invalid value.
        MissingExtraError: raised by the Trainer or Accelerator if Transformer Engine is not installed.
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
                f"fp8_format={fp8_format!r} is not supported. Use 'HYBRID' or 'E4M3', since E5M2 alone is too coarse "
                "for the forward pass."
            )
        if use_mxfp8_block_scaling and delayed:
            raise ConfigurationError(
                f"use_mxfp8_block_scaling scales by blocks, but {next(iter(delayed))} belongs to delayed scaling. "
                "Leave one of them out."
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
                f"precision='transformer-engine' needs a CUDA GPU. On {device.type} use precision='bf16-mixed'"
                f"{', or fp8, which the CPU emulates' if device.type == 'cpu' else ''}."
            )
        check_device(device, "precision='transformer-engine'")
        self.recipe = self.recipe if self.recipe is not None else self._recipe()

    def use_autocast(self, make: Callable[[], torch.autocast]) -> None:
        self._autocast = make  # type: ignore[method-assign]

    def _recipe(self) -> Any:
        from transformer_engine.common import recipe

        fp8_format = getattr(recipe.Format, self.fp8_format)
        if self.use_mxfp8_block_scaling:
            return recipe.MXFP8BlockScaling(fp8_format=fp8_format)
        if self.delayed:
            return recipe.DelayedScaling(fp8_format=fp8_format, **self.delayed)
        return recipe.Float8CurrentScaling(fp8_format=fp8_format)

    @contextmanager
    def _fp8(self) -> Iterator[None]:
        import transformer_engine.pytorch as te

        enabled = self.in_evaluation or torch.is_grad_enabled()
        # Up to release 2.8 the function and its argument had other names.
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
    """Returns Transformer Engine's Linear without extra state, a pickle that would run code when loaded."""
    import transformer_engine.pytorch as te

    class Linear(te.Linear):  # type: ignore[misc]
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

    return Linear


def _convert(linear: nn.Module, kind: Any) -> None:
    """Turns a Linear into Transformer Engine's, in place. The object, its parameters, hooks and names stay the same."""
    assert isinstance(linear, nn.Linear)
    weight = linear.weight
    template = kind(
        linear.in_features, linear.out_features, bias=linear.bias is not None, params_dtype=weight.dtype, device="cuda"
    )
    settings = {name: value for name, value in vars(template).items() if name not in vars(linear)}
    for name, parameter in linear.named_parameters(recurse=False):
        # Copies the attributes that Transformer Engine sets on its own parameters.
        parameter.__dict__.update(vars(getattr(template, name)))
    linear.__dict__["_leyden_plain"] = (type(linear), tuple(settings))
    linear.__dict__.update(settings)
    linear.__class__ = kind
