"""FSDP on a GPU, in an NCCL world of one, matches a single device in fp32 and bf16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import QUIET, Regression
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from leyden import Trainer
from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy
from leyden.strategies.fsdp.sharding import whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build() -> Regression:
    net = nn.Sequential(nn.Linear(16, 32), *(Block(32) for _ in range(3)), nn.Linear(32, 1))
    return Regression(net, lambda module: torch.optim.SGD(module.parameters(), lr=0.05))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 16, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(6)]


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-6), ("bf16-mixed", 2e-2)])
@pytest.mark.parametrize("offload", [False, True])
def test_a_world_of_one_matches_a_single_device(precision: str, tolerance: float, offload: bool) -> None:
    modules = []
    for strategy in (FSDPStrategy(cpu_offload=offload), "single_device"):
        torch.manual_seed(0)
        modules.append(build())
        trainer = Trainer(
            strategy=strategy,
            devices=1,
            precision=precision,
            max_epochs=2,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            **{**QUIET, "accelerator": "cuda"},
        )
        trainer.fit(modules[-1], batches())
    for (name, expected), found in zip(modules[1].named_parameters(), modules[0].parameters(), strict=True):
        assert isinstance(found, DTensor) and found.device.type == ("cpu" if offload else "cuda")
        assert torch.allclose(expected.detach().cpu(), whole(found.detach()).cpu(), atol=tolerance), name
