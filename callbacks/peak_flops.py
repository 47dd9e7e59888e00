"""The peak FLOP rates of accelerators, and the FLOPs of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Dense rates (half the data sheets' rates with sparsity), in 1e12 floating-point operations per second; of tensor cores
# if the device has them for the dtype, float64 included. The first entry contained in the device's name applies. If
# torch allows TF32, the "tf32" rate applies to float32.
# Sources: NVIDIA's data sheets of GB200 NVL72 and HGX B200 (a single GPU's rates), GH200 Grace Hopper Superchip, H200,
# H100, A100, A40, A30, L40S, L40, L4, V100 and T4.
_TERA: tuple[tuple[str, dict[str, float]], ...] = (
    ("gb200", {"float64": 40, "float32": 80, "tf32": 1250, "bfloat16": 2500, "float16": 2500}),
    ("b200", {"float64": 37, "float32": 75, "tf32": 1125, "bfloat16": 2250, "float16": 2250}),
    ("gh200", {"float64": 67, "float32": 67, "tf32": 494.5, "bfloat16": 989, "float16": 989}),
    ("h200 nvl", {"float64": 60, "float32": 60, "tf32": 417.5, "bfloat16": 835, "float16": 835}),
    ("h200", {"float64": 67, "float32": 67, "tf32": 494.5, "bfloat16": 989, "float16": 989}),
    ("h100 pcie", {"float64": 51, "float32": 51, "tf32": 378, "bfloat16": 756, "float16": 756}),
    ("h100 nvl", {"float64": 60, "float32": 60, "tf32": 417.5, "bfloat16": 835, "float16": 835}),
    ("h100", {"float64": 67, "float32": 67, "tf32": 494.5, "bfloat16": 989, "float16": 989}),
    ("a100", {"float64": 19.5, "float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312}),
    ("a40", {"float32": 37.4, "tf32": 74.8, "bfloat16": 149.7, "float16": 149.7}),
    ("a30", {"float64": 10.3, "float32": 10.3, "tf32": 82, "bfloat16": 165, "float16": 165}),
    ("l40s", {"float32": 91.6, "tf32": 183, "bfloat16": 362, "float16": 362}),
    ("l40", {"float32": 90.5, "tf32": 90.5, "bfloat16": 181, "float16": 181}),
    ("l4", {"float32": 30.3, "tf32": 60, "bfloat16": 121, "float16": 121}),
    ("v100 pcie", {"float64": 7, "float32": 14, "float16": 112}),
    ("v100", {"float64": 7.8, "float32": 15.7, "float16": 125}),
    ("t4", {"float32": 8.1, "float16": 65}),
)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns the peak rate of a device for a dtype, in operations per second; None if unknown.

    Example:
        >>> peak_flops(torch.device("cpu"), torch.float32) is None
        True
    """
    return peak_of(torch.cuda.get_device_name(device), dtype, _allows_tf32()) if device.type == "cuda" else None


def _allows_tf32() -> bool:
    """Returns True if torch may round float32 products on a GPU to TF32."""
    # `torch.set_float32_matmul_precision` and `allow_tf32` also set `fp32_precision`. Reading those two instead would
    # raise if the user has set `fp32_precision`.
    return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


def peak_of(name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Returns the peak rate of a device by its name in torch or nvidia-smi; None if unknown, as for a slice (MIG).

    `tf32` tells whether float32 products may be rounded to TF32.

    Example:
        >>> peak_of("NVIDIA H100 80GB HBM3", torch.bfloat16)
        989000000000000.0
    """
    key = str(dtype).removeprefix("torch.")
    # Compares whole words, so "l4" does not match an L40, nor "a30" an A3000.
    words = f" {name.lower().replace('-', ' ')} "
    if " mig " in words:
        return None
    for device, rates in _TERA:
        if f" {device} " in words:
            rate = rates.get("tf32" if key == "float32" and tf32 else key, rates.get(key))
            return None if rate is None else rate * 1e12
    return None


def measure_flops(module: nn.Module, forward: Callable[[], Any], loss: Callable[[Any], Tensor] | None = None) -> int:
    """Counts the floating-point operations of a forward pass, and of the backward pass if `loss` is given.

    Uses torch's FlopCounterMode. On the meta device nothing is computed.

    Args:
        module: the module that `forward` calls. Its gradients are cleared.
        forward: a function that runs the module on a batch and returns its output.
        loss: a function that returns the loss of an output.

    Example:
        >>> with torch.device("meta"):
        ...     net, x = nn.Linear(8, 4), torch.randn(2, 8)
        >>> measure_flops(net, lambda: net(x))
        128
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:
        output = forward()
        if loss is not None:
            torch.autograd.backward(loss(output))
    module.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())
