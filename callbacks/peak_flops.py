"""The peak arithmetic rates of accelerators, and the operations that a model needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Dense rates of the makers' data sheets, in 1e12 floating-point operations per second; without sparsity. The first name
# that the device's name contains counts. A device computes float32 at the rate of "tf32" where torch allows it.
_TERA: tuple[tuple[str, dict[str, float]], ...] = (
    ("b200", {"float64": 37, "float32": 75, "tf32": 1125, "bfloat16": 2250, "float16": 2250}),
    ("h200", {"float64": 34, "float32": 67, "tf32": 494.5, "bfloat16": 989, "float16": 989}),
    ("h100 pcie", {"float64": 26, "float32": 51, "tf32": 378, "bfloat16": 756, "float16": 756}),
    ("h100 nvl", {"float64": 30, "float32": 60, "tf32": 417.5, "bfloat16": 835, "float16": 835}),
    ("h100", {"float64": 34, "float32": 67, "tf32": 494.5, "bfloat16": 989, "float16": 989}),
    ("a100", {"float64": 9.7, "float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312}),
    ("a40", {"float32": 37.4, "tf32": 74.8, "bfloat16": 149.7, "float16": 149.7}),
    ("a30", {"float64": 5.2, "float32": 10.3, "tf32": 82, "bfloat16": 165, "float16": 165}),
    ("l40s", {"float32": 91.6, "tf32": 183, "bfloat16": 362, "float16": 362}),
    ("l40", {"float32": 90.5, "tf32": 90.5, "bfloat16": 181, "float16": 181}),
    ("l4", {"float32": 30.3, "tf32": 60, "bfloat16": 121, "float16": 121}),
    ("v100", {"float64": 7.8, "float32": 15.7, "float16": 125}),
    ("t4", {"float32": 8.1, "float16": 65}),
)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns the peak rate of a device in a dtype, in operations per second; None where it is not known.

    Example:
        >>> peak_flops(torch.device("cpu"), torch.float32) is None
        True
    """
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype, torch.get_float32_matmul_precision() != "highest")


def peak_of(name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Returns the peak rate of a device by its name.

    Args:
        name: as torch or nvidia-smi gives it.
        dtype: of the matrix products.
        tf32: float32 products may be rounded to TF32.

    Example:
        >>> peak_of("NVIDIA H100 80GB HBM3", torch.bfloat16)
        989000000000000.0
    """
    key = str(dtype).removeprefix("torch.")
    words = f"{name.lower().replace('-', ' ')} "
    for device, rates in _TERA:
        # "l4" is no L40, and "a30" no A3000.
        if f" {device} " in f" {words}":
            rate = rates.get("tf32" if key == "float32" and tf32 else key, rates.get(key))
            return None if rate is None else rate * 1e12
    return None


def measure_flops(module: nn.Module, forward: Callable[[], Any], loss: Callable[[Any], Tensor] | None = None) -> int:
    """Counts the floating-point operations of a forward pass, and of its backward pass if a loss is given.

    torch's FlopCounterMode counts; on the meta device nothing is computed.

    Args:
        module: that `forward` calls.
        forward: runs the module on a batch, and returns its output.
        loss: makes a loss of the output.

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
