"""Gradients of shards: multiplied where they lie, also with CPU offload, where the factor comes from a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leyden.strategies import SingleDeviceStrategy
from leyden.strategies.fsdp.gradients import multiply


class Copies(TorchFunctionMode):
    """The copies to the CPU, and whether the host waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.beside: list[bool] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.to and args[1] == torch.device("cpu"):
            self.beside.append(bool((kwargs or {}).get("non_blocking")))
        return function(*args, **(kwargs or {}))


def by_strategy(grads: list[Tensor], factor: Tensor) -> None:
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    strategy = SingleDeviceStrategy()
    strategy.setup_optimizers([], [torch.optim.SGD(parameters, 0.1)])
    strategy.scale_gradients(factor)


@pytest.mark.parametrize("scale", [multiply, by_strategy])
def test_the_host_waits_for_the_factor_that_it_multiplies_by(scale: Any) -> None:
    """From a GPU, `.to("cpu", non_blocking=True)` gives memory into which the factor is still to come."""
    grads = [torch.ones(2), torch.ones(3)]
    with Copies() as copies:
        scale(grads, torch.tensor(0.5))
    assert [grad.tolist() for grad in grads] == [[0.5, 0.5], [0.5, 0.5, 0.5]]
    assert copies.beside == [False]
