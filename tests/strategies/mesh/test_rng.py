"""The random numbers of a tensor-parallel group, also in compiled layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from leyden.strategies.mesh.rng import TensorParallelRNG


def test_a_compiled_layer_draws_the_same_numbers_and_breaks_once_per_switch() -> None:
    mesh: Any = SimpleNamespace(get_local_rank=lambda: 1)
    rng = TensorParallelRNG(mesh, torch.device("cpu"))

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        rng.switch(True)
        own = torch.nn.functional.dropout(x + 1)
        rng.switch(False)
        return own, torch.nn.functional.dropout(x + 1)

    found = []
    for run in (layer, torch.compile(layer, backend="eager")):
        counters.clear()
        torch.manual_seed(0)
        with rng.active():
            found.append(run(torch.zeros(64)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert not torch.equal(*found[0])
    assert sum(counters["graph_break"].values()) == 2
