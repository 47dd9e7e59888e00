"""FSDP on ranks that the Trainer starts from this process, and the weights that they return."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from programs import run_program
from ranks.test_fsdp import SETTINGS, Regression, batches
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy


def check(method: str, folder: Path) -> None:
    torch.manual_seed(0)
    module, plain = Regression(), Regression()
    plain.load_state_dict(module.state_dict())
    data: list[tuple[Tensor, Tensor]] = [(x, y) for pair in batches(4, 0, 1) for x, y in zip(*pair, strict=True)]
    arguments = {
        **SETTINGS,
        "use_distributed_sampler": True,
        "max_epochs": 2,
        "default_root_dir": folder,
    }
    trainer = Trainer(strategy=FSDPStrategy(start_method=method), devices=2, **arguments)
    trainer.fit(module, DataLoader(data, 4))
    Trainer(strategy="single_device", **arguments).fit(plain, DataLoader(data, 8))
    assert trainer.global_step == 4
    for (name, expected), found in zip(plain.named_parameters(), module.parameters(), strict=True):
        assert not isinstance(found, DTensor) and torch.allclose(found, expected, atol=2e-3), name


def test_spawned_ranks_return_whole_weights(tmp_path: Path) -> None:
    check("spawn", tmp_path)


@pytest.mark.full
def test_forked_ranks_return_whole_weights(tmp_path: Path) -> None:
    # In a fresh process: forking needs one that has run nothing yet.
    code = (
        f"from pathlib import Path; import test_fsdp_started; test_fsdp_started.check('fork', Path({str(tmp_path)!r}))"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent), *sys.path]
    done = run_program(["-c", code], environ={"PYTHONPATH": os.pathsep.join(paths)})
    assert done.returncode == 0, done.stderr
