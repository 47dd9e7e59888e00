"""FSDP on ranks that the Trainer starts by itself from this process, and what comes back to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks.test_fsdp import SETTINGS, Regression, batches
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.strategies.fsdp.strategy import FSDPStrategy


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=pytest.mark.full)])
def test_ranks_started_by_a_function_return_whole_weights(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, plain = Regression(), Regression()
    plain.load_state_dict(module.state_dict())
    data: list[tuple[Tensor, Tensor]] = [(x, y) for pair in batches(4, 0, 1) for x, y in zip(*pair, strict=True)]
    arguments = {
        **SETTINGS,
        "use_distributed_sampler": True,
        "max_epochs": 2,
        "default_root_dir": tmp_path,
    }
    trainer = Trainer(strategy=FSDPStrategy(start_method=method), devices=2, **arguments)
    trainer.fit(module, DataLoader(data, 4))
    Trainer(strategy="single_device", **arguments).fit(plain, DataLoader(data, 8))
    assert trainer.global_step == 4
    for (name, expected), found in zip(plain.named_parameters(), module.parameters(), strict=True):
        assert not isinstance(found, DTensor) and torch.allclose(found, expected, atol=2e-3), name
