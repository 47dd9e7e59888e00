"""Linear layers that compute in fp8, based on torchao's Float8Linear. Imports torchao."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8.config import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor


class AutocastFloat8Linear(Float8Linear):  # type: ignore[misc]
    """Computes in fp8 under autocast, and as a plain Linear otherwise, like every layer of a mixed-precision run.

    torchao's own layer only checks CUDA's autocast, and would still compute in fp8 after the run. The parameters remain
    the Linear's, in float32 and under the same names. Only the operands of the three matrix products are cast.
    """

    in_evaluation: bool

    def forward(self, input: Tensor) -> Tensor:
        device_type = input.device.type
        gathered_in_fp8 = self.config.enable_fsdp_float8_all_gather
        wanted = self.training or self.in_evaluation
        if not gathered_in_fp8 and not (wanted and torch.is_autocast_enabled(device_type)):
            return F.linear(input, self.weight, self.bias)
        if torch.is_autocast_enabled(device_type):
            input = input.to(torch.get_autocast_dtype(device_type))
        if not torch.is_inference_mode_enabled():
            return self._in_fp8(input)
        # torchao's tensors only implement the operations that autograd decomposes reshapes and casts into, and
        # inference_mode does not decompose them.
        with torch.inference_mode(False), torch.no_grad():
            return self._in_fp8(input)

    def _in_fp8(self, input: Tensor) -> Tensor:
        output: Tensor
        if input.device.type != "cpu" or torch.compiler.is_compiling():
            output = super().forward(input)
            return output
        output = _OnCpu.apply(input, self.weight.t(), self.linear_mm_config, self.config)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _OnCpu(matmul_with_hp_or_float8_args):  # type: ignore[misc]
    """The matrix products of torchao's layer, forward and backward, without oneDNN.

    On CPUs with AVX512-FP16, torch 2.13 dispatches fp8 products to oneDNN, whose reference kernel takes 400 times as
    long as torch's own (1 s for 2,048 × 64 by 64 × 256).
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        with _without_onednn():
            return matmul_with_hp_or_float8_args.forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with _without_onednn():
            return matmul_with_hp_or_float8_args.backward(ctx, *gradients)


@contextmanager
def _without_onednn() -> Iterator[None]:
    # Not torch.backends.mkldnn.flags, which also sets tf32, and that warns on a CPU.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def convert(linear: nn.Linear, config: Float8LinearConfig, in_evaluation: bool) -> None:
    """Makes a Linear compute in fp8, in place. The object, its parameters, hooks and names stay the same."""
    # torchao would wrap the weight for the all-gather now, before it has values; `gather_in_fp8` does so later.
    without_gather = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
    template = Float8Linear.from_float(nn.Linear(16, 16, bias=False, device="meta"), config=without_gather)
    settings = {name: value for name, value in vars(template).items() if name not in vars(linear)}
    linear.__dict__["_leyden_plain"] = (type(linear), (*settings, "in_evaluation"))
    linear.__dict__.update(settings, config=config, in_evaluation=in_evaluation)
    linear.__class__ = AutocastFloat8Linear


def gather_in_fp8(linear: nn.Linear) -> None:
    """Wraps a layer's weight so that FSDP casts its shards before gathering them, half the bytes of bf16."""
    weight, config = linear.weight, vars(linear)["config"]
    cast = WeightWithDynamicFloat8CastTensor(
        weight, vars(linear)["linear_mm_config"], config.cast_config_weight.target_dtype
    )
    wrapped = nn.Parameter(cast, requires_grad=weight.requires_grad)
    wrapped.__dict__.update(weight.__dict__)
    linear.weight = wrapped
