"""Next to a process group of another backend, such as NCCL, ranks have a gloo group for the host's tensors."""

from __future__ import annotations

import torch
from ranks.world import run_world

from leyden import ConfigurationError, Trainer
from leyden.strategies.ddp import DDPStrategy


def gather_mismatched(backend: str) -> str:
    trainer = Trainer(strategy=DDPStrategy(process_group_backend=backend), accelerator="cpu", logger=False)
    trainer.strategy.setup_environment()
    try:
        trainer.accelerator.all_gather(torch.ones(2 + trainer.global_rank))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_mismatched_cpu_tensors_raise_with_another_backend_too() -> None:
    for message in run_world(2, gather_mismatched, "cpu:gloo,cuda:gloo", timeout=60):
        assert "rank 0 has (2,) float32 and rank 1 has (3,) float32" in message
