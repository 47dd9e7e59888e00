"""fp8: bf16-mixed, with the matrix products of most Linear layers in 8-bit floating point, through torchao."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from leyden.core.errors import ConfigurationError, MissingExtraError, nearest
from leyden.strategies.precision.amp import MixedPrecision
from leyden.strategies.precision.base import restore_layers
from leyden.strategies.precision.fp8_layers import Filter, Layers

if TYPE_CHECKING:
    from types import ModuleType

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
LEAST_CAPABILITY = (8, 9)
"""The first CUDA compute capability with fp8 matrix units (Ada, Hopper, Blackwell)."""


class Float8Precision(MixedPrecision):
    """`fp8`: `bf16-mixed`, with fp8 operands for the matrix products of Linear layers.

    Parameters, gradients, optimizer state and the names in checkpoints are the same as under `bf16-mixed`. Each operand
    is scaled by its own largest value at each use, so there is no state to save, and a resumed run is bit-identical.
    The speed-up needs `torch.compile`, which fuses the casts. A CPU emulates fp8 with equivalent numerics, but is
    slower than `bf16-mixed`.

    Args:
        recipe: "tensorwise" uses one scale per operand and is the fastest. "rowwise" uses one scale per row, which
            limits the effect of outliers. "rowwise_with_gw_hp" is rowwise with the weight's gradient in bf16, and the
            most accurate.
        skip: modules to keep in bf16: classes, class names, or module names such as "blocks.0".
        first_and_last: whether to convert the model's first and last Linear too.
        choose: a function of (module, name) that returns whether to convert a Linear, instead of `first_and_last`.
        enable_fsdp_float8_all_gather: whether FSDP casts weights before it gathers them, which halves the
            communication. "tensorwise" only; no effect under other strategies.
        pad_inner_dim: whether to pad token counts to a multiple of 16, which the hardware requires and a last batch
            often is not.
        in_evaluation: whether to compute in fp8 in evaluation too. False evaluates in bf16.
        config: a `Float8LinearConfig` of torchao, instead of recipe, pad_inner_dim and enable_fsdp_float8_all_gather.

    Raises:
        ConfigurationError: for an invalid value.
        MissingExtraError: raised by the Trainer or Accelerator if torchao is not installed.

    Example:
        >>> Float8Precision("rowwise", skip=["head"]).name
        'fp8'
    """

    def __init__(
        self,
        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
        *,
        skip: Sequence[type | str] = (),
        first_and_last: bool = False,
        choose: Filter | None = None,
        enable_fsdp_float8_all_gather: bool = False,
        pad_inner_dim: bool = True,
        in_evaluation: bool = True,
        config: Any = None,
    ) -> None:
        if recipe not in RECIPES:
            raise ConfigurationError(f"Float8Precision({recipe!r}) is not known. {nearest(recipe, RECIPES)}")
        super().__init__("bf16")
        self.name = "fp8"
        self.recipe = recipe
        self.layers = Layers(skip, first_and_last, choose)
        self.gathers = enable_fsdp_float8_all_gather
        self.pad_inner_dim = pad_inner_dim
        self.in_evaluation = in_evaluation
        self.config = config
        if config is not None:
            self.recipe = "of a config"  # type: ignore[assignment]
            self.gathers = bool(config.enable_fsdp_float8_all_gather)
        if self.gathers and config is None and recipe != "tensorwise":
            raise ConfigurationError(
                f"enable_fsdp_float8_all_gather needs recipe='tensorwise', not {recipe!r}, since a rank knows only its "
                "own rows. Leave one of them out."
            )
        if self.gathers and not in_evaluation:
            raise ConfigurationError(
                "in_evaluation=False evaluates in bf16, but enable_fsdp_float8_all_gather gathers weights in fp8. "
                "Leave one of them out."
            )
        self.form = f"fp8 {self.recipe}{' gathered in fp8' if self.gathers else ''}"

    def check_package(self) -> None:
        if importlib.util.find_spec("torchao") is None:
            raise MissingExtraError("torchao", "fp8", "precision='fp8'")

    def check(self, device: torch.device) -> None:
        super().check(device)
        check_device(device, "precision='fp8'")
        if device.type == "cpu" and self._is_rowwise() and not _cpu_supports_rowwise():
            setting = f"recipe={self.recipe!r}" if self.config is None else "this config"
            raise ConfigurationError(
                f"precision='fp8': {setting} needs one scale per row, but on a CPU torch {torch.__version__} supports "
                "only one scale per operand. Use recipe='tensorwise', a GPU, or a newer torch (2.13 or later)."
            )

    def convert_module(self, module: nn.Module) -> nn.Module:
        return self._convert(module, gathers=False)

    def convert_for_shards(self, module: nn.Module) -> nn.Module:
        return self._convert(module, gathers=self.gathers)

    def before_sharding(self, owner: nn.Module, name: str) -> None:
        if name == "weight" and _gathers(owner):
            _torchao().gather_in_fp8(owner)

    def _convert(self, module: nn.Module, gathers: bool) -> nn.Module:
        restore_layers(module)
        chosen = self.layers.of(module, untied=gathers)
        if chosen.names:
            converter, config = _torchao(), self._config(gathers)
            for name in chosen.names:
                converter.convert(module.get_submodule(name), config, self.in_evaluation)
        else:
            chosen.warn(self.name, module)
        return module

    def _config(self, gathers: bool) -> Any:
        if self.config is not None:
            return dataclasses.replace(self.config, enable_fsdp_float8_all_gather=gathers)
        from torchao.float8.config import Float8LinearConfig

        config = Float8LinearConfig.from_recipe_name(self.recipe)
        return dataclasses.replace(config, enable_fsdp_float8_all_gather=gathers, pad_inner_dim=self.pad_inner_dim)

    def _is_rowwise(self) -> bool:
        """Returns True if torch's matrix product receives one scale per row for any operand."""
        if self.config is None:
            return self.recipe != "tensorwise"
        casts = (self.config.cast_config_input, self.config.cast_config_weight, self.config.cast_config_grad_output)
        return not self.config.emulate and any(cast.scaling_granularity.name == "AXISWISE" for cast in casts)

    def describe(self, modules: Sequence[nn.Module]) -> str:
        gathers = any(_gathers(part) for module in modules for part in module.modules())
        gathered = ", gathered in fp8" if gathers else ""
        emulated = ", emulated by the CPU" if self._device_type == "cpu" else ""
        return f"{self.recipe} in {converted_in_words(modules)}{gathered}{emulated}"


def check_device(device: torch.device, what: str) -> None:
    """Raises ConfigurationError if the device does not support fp8. `what` starts the message."""
    instead = "Use precision='bf16-mixed'"
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise ConfigurationError(
            f"{what} needs a GPU with fp8 units, or a CPU, which emulates them. {instead} on {device.type}."
        )
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        # gfx94x and gfx95x are MI300 and MI350, gfx12xx are RDNA 4.
        arch = str(torch.cuda.get_device_properties(device).gcnArchName)
        if not arch.startswith(("gfx94", "gfx95", "gfx12")):
            raise ConfigurationError(f"{what}: {name} ({arch}) has no fp8 units. {instead}.")
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise ConfigurationError(
            f"{what}: {name} has compute capability {capability[0]}.{capability[1]}, but fp8 needs 8.9 or higher "
            f"(Ada, Hopper, Blackwell). {instead}."
        )


def is_converted(module: nn.Module) -> bool:
    """Returns True for a layer that computes in fp8."""
    return "_leyden_plain" in vars(module)


def converted_in_words(modules: Sequence[nn.Module]) -> str:
    """Describes how many layers compute in fp8, as in "3 of 5 Linear layers"."""
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    linears = [part for part in parts if isinstance(part, nn.Linear) or is_converted(part)]
    return f"{sum(map(is_converted, linears))} of {len(linears)} Linear layers"


def _gathers(module: nn.Module) -> bool:
    return is_converted(module) and bool(getattr(vars(module)["config"], "enable_fsdp_float8_all_gather", False))


def _cpu_supports_rowwise() -> bool:
    operand, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(operand, operand.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def _torchao() -> ModuleType:
    """Returns the module that imports torchao.

    Raises:
        ConfigurationError: if the installed torchao is incompatible with this torch, which pip does not prevent.
    """
    try:
        with _quiet():
            from leyden.strategies.precision import float8_linear
    except ImportError as error:
        raise ConfigurationError(
            f"precision='fp8': torchao {version('torchao')} is incompatible with torch {torch.__version__}: {error}. "
            "Install a compatible version, such as pip install 'torchao==0.15.*': torchao 0.15 to 0.17 for torch 2.9, "
            "0.18 for torch 2.10 and newer."
        ) from error
    return float8_linear


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torchao's messages about kernels that this machine cannot load. Training does not use them."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
