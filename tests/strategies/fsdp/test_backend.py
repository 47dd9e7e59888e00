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
from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy


@pytest.mark.parametrize("kind", [DDPStrategy, FSDPStrategy])
@pytest.mark.parametrize(("device", "backend"), [("cuda:0", "cpu:gloo,cuda:nccl"), ("cpu", "gloo")])
def test_process_groups_include_a_cpu_backend(kind: Any, device: str, backend: str) -> None:
    """Every run needs one, since the group stays open until the process ends, and a later run may offload."""
    assert kind(devices=[torch.device(device)]).ranks.default_backend == backend


def error_without_a_cpu_backend() -> str:
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


def test_cpu_offload_without_a_cpu_backend_is_refused() -> None:
    [message] = run_world(1, error_without_a_cpu_backend)
    assert "has only 'fake': leave out process_group_backend, or use 'cpu:gloo,cuda:nccl'" in message
