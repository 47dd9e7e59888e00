"""The backends of FSDP's process group."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.world import run_world

from leyden import ConfigurationError
from leyden.strategies.ddp import DDPStrategy
from leyden.strategies.fsdp.strategy import FSDPStrategy


@pytest.mark.parametrize("kind", [DDPStrategy, FSDPStrategy])
@pytest.mark.parametrize(("device", "backend"), [("cuda:0", "cpu:gloo,cuda:nccl"), ("cpu", "gloo")])
def test_what_waits_on_the_cpu_has_a_backend_there(kind: Any, device: str, backend: str) -> None:
    """In every run, since the group lasts as long as the process, and a later run may offload."""
    assert kind(devices=[torch.device(device)]).ranks.default_backend == backend


def on_a_group_without_the_cpu() -> str:
    # Registers the backend "fake".
    import torch.testing._internal.distributed.fake_pg

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    try:
        FSDPStrategy(devices=[torch.device("cuda", 0)], cpu_offload=True).setup_environment()
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_group_that_cannot_reduce_on_the_cpu_is_refused() -> None:
    [message] = run_world(1, on_a_group_without_the_cpu)
    assert "has only 'fake': leave out process_group_backend, or use 'cpu:gloo,cuda:nccl'" in message
