"""Precisions with parameters and inputs in a dtype other than float32: `64-true`, `16-true`, `bf16-true`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from leyden.core.devices import lacks_bfloat16, name_of
from leyden.core.errors import ConfigurationError
from leyden.core.tree import convert_floats
from leyden.strategies.precision.base import DefaultDtype, Precision, restore_layers

T = TypeVar("T")


class TruePrecision(Precision):
    """Floating-point parameters, buffers, inputs and new tensors in one dtype. Complex tensors are unchanged."""

    converts_input = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self.forward_context = self.init_context

    def init_context(self) -> AbstractContextManager[Any]:
        return DefaultDtype(self.dtype)

    def convert_module(self, module: nn.Module) -> nn.Module:
        # Not `to(dtype)`, which would make complex tensors real. `double()` and `half()` leave them unchanged, too.
        apply: Callable[..., nn.Module] = restore_layers(module)._apply
        apply(lambda t: t.to(self.dtype) if t.is_floating_point() else t)
        return module

    def convert_input(self, batch: T) -> T:
        return convert_floats(batch, self.dtype)


class DoublePrecision(TruePrecision):
    """`64-true`: everything in float64."""

    def __init__(self) -> None:
        super().__init__("64-true", torch.float64)

    def check(self, device: torch.device) -> None:
        if device.type == "mps":
            raise ConfigurationError("mps does not support float64. Use precision='32-true', or accelerator='cpu'.")


class HalfPrecision(TruePrecision):
    """`16-true` and `bf16-true`: parameters, gradients and optimizer state in half precision, without a scaler.

    Args:
        dtype: "16" or "16-true" for float16, "bf16" or "bf16-true" for bfloat16.
    """

    def __init__(self, dtype: Literal["16", "bf16", "16-true", "bf16-true"] = "16-true") -> None:
        if dtype not in ("16", "bf16", "16-true", "bf16-true"):
            raise ConfigurationError(f"HalfPrecision(dtype={dtype!r}) is not valid. Use '16-true' or 'bf16-true'.")
        if dtype.startswith("16"):
            super().__init__("16-true", torch.float16)
        else:
            super().__init__("bf16-true", torch.bfloat16)

    def check(self, device: torch.device) -> None:
        if self.dtype == torch.bfloat16 and lacks_bfloat16(device):
            raise ConfigurationError(f"{name_of(device)} lacks bfloat16. Use precision='16-true' or '32-true'.")
