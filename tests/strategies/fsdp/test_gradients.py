"""Sharded gradients are scaled on their device, also with CPU offload, where the factor comes from a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leyden.strategies import SingleDeviceStrategy
from leyden.strategies.fsdp.gradients import multiply


class RecordCopies(TorchFunctionMode):
    """Records for each copy to the CPU whether it is asynchronous."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.to and args[1] == torch.device("cpu"):
            self.non_blocking.append(bool((kwargs or {}).get("non_blocking")))
        return function(*args, **(kwargs or {}))


def scale_by_strategy(grads: list[Tensor], factor: Tensor) -> None:
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    strategy = SingleDeviceStrategy()
    strategy.setup_optimizers([], [torch.optim.SGD(parameters, 0.1)])
    strategy.scale_gradients(factor)


@pytest.mark.parametrize("scale", [multiply, scale_by_strategy])
def test_the_scaling_factor_is_copied_to_the_cpu_synchronously(scale: Any) -> None:
    """From a GPU, `.to("cpu", non_blocking=True)` returns memory that may not hold the factor yet."""
    grads = [torch.ones(2), torch.ones(3)]
    with RecordCopies() as copies:
        scale(grads, torch.tensor(0.5))
    assert [grad.tolist() for grad in grads] == [[0.5, 0.5], [0.5, 0.5, 0.5]]
    assert copies.non_blocking == [False]
