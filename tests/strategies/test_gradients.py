"""Gradients are scaled on their device, also with CPU offload, where the factor comes from a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from leyden.strategies.base import multiply


class RecordCopies(TorchFunctionMode):
    """Records for each copy to the CPU whether it is asynchronous."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.to and args[1] == torch.device("cpu"):
            self.non_blocking.append(bool((kwargs or {}).get("non_blocking")))
        return function(*args, **(kwargs or {}))


def test_the_scaling_factor_is_copied_to_the_cpu_synchronously() -> None:
    """From a GPU, `.to("cpu", non_blocking=True)` returns memory that may not hold the factor yet."""
    grads = [torch.ones(2), torch.ones(3)]
    with RecordCopies() as copies:
        multiply(grads, torch.tensor(0.5))
    assert [grad.tolist() for grad in grads] == [[0.5, 0.5], [0.5, 0.5, 0.5]]
    assert copies.non_blocking == [False]


def test_gradients_of_all_dtypes_are_scaled_by_the_unrounded_factor() -> None:
    numbers = torch.linspace(-3, 3, 64, dtype=torch.float64)
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64]
    grads = [numbers.to(dtype) for dtype in dtypes] + [numbers.to_sparse(), numbers[5].bfloat16()]
    wide = {torch.float64: torch.float64, torch.complex64: torch.complex64}
    factor = torch.tensor(1 / 3, dtype=torch.float64)
    expected = []
    for grad in grads:
        dtype = wide.get(grad.dtype, torch.float32)
        by = factor if dtype == torch.float64 else factor.float()
        expected.append((grad.to_dense().to(dtype) * by).to(grad.dtype))
    kept = list(grads)
    multiply(grads, factor)
    assert all(new is old for new, old in zip(grads, kept, strict=True))
    for grad, wanted in zip(grads, expected, strict=True):
        assert torch.equal(grad.to_dense(), wanted), grad.dtype
