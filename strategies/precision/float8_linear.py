"""Linear layers that compute in fp8: torchao's Float8Linear, put in the place of torch's. It imports torchao."""

from __future__ import annotations

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
    """fp8 where autocast is on, and a plain Linear elsewhere: like every layer of a mixed-precision run.

    torchao's own layer looks at CUDA's autocast alone, and would compute in fp8 after the run too. The parameters stay
    those of the Linear, in float32 and under their names; only the operands of the three matrix products are cast.
    """

    in_evaluation: bool

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        gathered_in_fp8 = self.config.enable_fsdp_float8_all_gather
        wanted = self.training or self.in_evaluation
        if not gathered_in_fp8 and not (wanted and torch.is_autocast_enabled(kind)):
            return F.linear(input, self.weight, self.bias)
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        if not torch.is_inference_mode_enabled():
            return self._in_fp8(input)
        # torchao's tensors know the operations that autograd leaves of a reshape or a cast, and inference_mode leaves
        # all as they are.
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
    """The product of torchao's layer, forward and backward, without oneDNN.

    On CPUs with AVX512-FP16, torch 2.13 hands fp8 products to oneDNN, whose reference kernel there takes 400 times as
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
    # torch.backends.mkldnn.flags also sets tf32, which warns on a CPU.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def convert(linear: nn.Linear, config: Float8LinearConfig, in_evaluation: bool) -> None:
    """Makes a Linear compute in fp8, in place: the object, its parameters, hooks and names stay."""
    made = Float8Linear.from_float(nn.Linear(16, 16, bias=False, device="meta"), config=_without_all_gather(config))
    settings = {name: value for name, value in vars(made).items() if name not in vars(linear)}
    linear.__dict__["_leyden_plain"] = (type(linear), (*settings, "in_evaluation"))
    linear.__dict__.update(settings, config=config, in_evaluation=in_evaluation)
    linear.__class__ = AutocastFloat8Linear


def gather_in_fp8(linear: nn.Linear) -> None:
    """Gives a layer a weight whose shards are cast before FSDP gathers them: half the bytes of bf16."""
    weight, config = linear.weight, vars(linear)["config"]
    cast = WeightWithDynamicFloat8CastTensor(
        weight, vars(linear)["linear_mm_config"], config.cast_config_weight.target_dtype
    )
    wrapped = nn.Parameter(cast, requires_grad=weight.requires_grad)
    wrapped.__dict__.update(weight.__dict__)
    linear.weight = wrapped


def _without_all_gather(config: Float8LinearConfig) -> Float8LinearConfig:
    """Does nothing: torchao would wrap the weight before it has its values."""
    import dataclasses

    return dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
